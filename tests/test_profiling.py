# SPDX-License-Identifier: Apache-2.0
"""The ranges that a profiler sees around each launch."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from tf_ops import _library

ROOT = pathlib.Path(__file__).parents[1]
NVCC = shutil.which("nvcc")


@pytest.fixture(autouse=True)
def device():
    """Without TensorFlow, on the CPU."""


def compiled(tmp_path, compiler, source, *options):
    target = tmp_path / source
    command = [compiler, "-std=c++17", "-O3", "-DTF_OPS_CUDA=1", f"-I{ROOT}", *options]
    subprocess.run([*command, "-o", target, ROOT / "tests" / source], check=True)
    return target


@pytest.mark.skipif(not shutil.which("g++"), reason="no g++")
def test_a_range_costs_nothing_when_it_is_off(tmp_path):
    program = compiled(tmp_path, "g++", "range_cost.cc")
    environment = {k: v for k, v in os.environ.items() if k != "TF_OPS_NVTX"}
    output = subprocess.run([program], env=environment, capture_output=True, check=True).stdout
    assert float(output) < 50  # ns a launch
    # The same loop reaches the range when it is on; this program cannot make one.
    on = subprocess.run([program], env=environment | {"TF_OPS_NVTX": "1"}, check=False)
    assert on.returncode != 0


@pytest.mark.skipif(
    not NVCC or not _library.build_info()["cuda"], reason="a build without CUDA makes no ranges"
)
@pytest.mark.parametrize("on", [True, False])
def test_ranges_tell_op_and_shapes(tmp_path, on):
    # The headers of NVTX are where nvcc looks.
    listener = compiled(tmp_path, NVCC, "range_listener.cc", "-shared", "-Xcompiler=-fPIC")
    program = """
import numpy as np
from tests.runner import Kernels
x = np.ones([2, 3], np.float32)
Kernels()("TfOps>MaskedSoftmax", [x, np.ones(0, bool)], [1.0], [x.copy()])
"""
    environment = os.environ | {"TF_OPS_NVTX": str(int(on)), "NVTX_INJECTION64_PATH": str(listener)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    expected = ["begin TfOps>MaskedSoftmax float32[2,3]", "end"] if on else []
    assert done.stderr.splitlines() == expected
