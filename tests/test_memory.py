# SPDX-License-Identifier: Apache-2.0
"""Workspaces: their guards, what is counted of them, and that attention's stay small."""

import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

import tf_ops
from tf_ops import _library

ROOT = pathlib.Path(__file__).parents[1]
needs_guards = pytest.mark.skipif(
    os.environ.get("TF_OPS_DEBUG_MEMORY") != "1", reason="needs TF_OPS_DEBUG_MEMORY=1"
)


@pytest.fixture(scope="module")
def ops():
    return _library.load(ROOT / "build" / "tests" / "binding.so")


def scribble(ops, mode, size, **attributes):
    """Zeros by way of two pieces of workspace; see binding_op.cc."""
    run = lambda x: ops.tf_ops_test_scribble(x=x, **attributes)
    run = run if mode == "eager" else tf.function(run, jit_compile=mode == "xla")
    return run(tf.ones([size]))


# In whole blocks of the alignment, and beside them.
@pytest.mark.parametrize("size", [1, 100, 1024])
@needs_guards
def test_guards_let_pass_what_is_inside(ops, mode, size):
    for at in (0, size - 1):
        for second in (False, True):
            y = scribble(ops, mode, size, at=at, second=second)
            np.testing.assert_array_equal(y, np.zeros(size))


@pytest.mark.parametrize("size", [1, 100, 1024])
@pytest.mark.parametrize("second", [False, True], ids=["first", "second"])
@pytest.mark.parametrize("side", ["in front of", "behind"])
@needs_guards
def test_a_write_of_one_element_beside_a_piece_is_an_error(ops, mode, side, second, size):
    at = -1 if side == "in front of" else size
    piece = "second" if second else "first"
    message = (
        f'TfOpsTest>Scribble: a write {side} the piece "{piece}" of the workspace, which has '
        f"{4 * size} bytes: 4 bytes from offset {4 * at}"
    )
    with pytest.raises(tf.errors.InternalError, match=re.escape(message)):
        np.asarray(scribble(ops, mode, size, at=at, second=second))


@needs_guards
def test_a_launcher_that_takes_more_than_was_asked_for_is_an_error(ops, mode):
    with pytest.raises(tf.errors.InternalError, match="Scribble: takes .* bytes of a workspace of"):
        np.asarray(scribble(ops, mode, 8, took_more=True))


def test_calls_are_counted(ops, mode, device):
    key = "TfOpsTest>Scribble", device[:3]
    tf_ops.memory.record()
    assert key not in tf_ops.memory.stats()
    assert "record() comes first" in tf_ops.memory.summary()
    for size in (1000, 10, 10):
        scribble(ops, mode, size)
    counted = tf_ops.memory.stats()[key]
    assert counted["calls"] == 3
    assert 8000 <= counted["peak"] < 8000 + 8 * 256
    assert counted["peak"] + 160 <= counted["bytes"] < counted["peak"] + 160 + 16 * 256
    row = next(line for line in tf_ops.memory.summary().splitlines() if key[0] in line)
    assert row.split()[1:] == [key[1], "3", f"{counted['bytes']:,}", f"{counted['peak']:,}"]
    tf_ops.memory.record(False)
    assert tf_ops.memory.stats()[key] == counted


class TestProcessesOfTheirOwn:
    @pytest.fixture(autouse=True)
    def device(self):
        """On the CPU."""

    COUNT = """
import numpy as np
from tests.runner import Kernels
kernels = Kernels()
usage = kernels.library.tf_ops_memory_usage
usage.restype = __import__("ctypes").c_char_p
x = np.ones([4, 64], np.float32)
grad = lambda: kernels("TfOps>RmsNormalizationGrad",
    [x, x[:0, 0], x[:0, 0], x, x[0], x[:, 0].copy()], [1e-6, 0.0, 1], [x.copy(), x[0].copy()])
grad()
print(usage().decode().split())
kernels.library.tf_ops_memory_record(1)
grad()
print(usage().decode().split())
"""

    def run(self, **variables):
        environment = os.environ | {"TF_OPS_DEBUG_MEMORY": "0"} | variables
        done = subprocess.run(
            [sys.executable, "-c", self.COUNT],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.splitlines(), done.stderr.splitlines()

    # One part of 64 floats, and room to align it.
    BYTES = 256 + 64

    def test_nothing_is_counted_before_it_is_asked_for(self):
        out, err = self.run()
        size = str(self.BYTES)
        assert out == ["[]", str(["TfOps>RmsNormalizationGrad", "CPU", "1", size, size])]
        assert err == []

    def test_a_log_of_every_request(self):
        _, err = self.run(TF_OPS_LOG_MEMORY="1")
        line = f"tf_ops: TfOps>RmsNormalizationGrad on CPU: a workspace of {self.BYTES} bytes"
        assert err == [line, line]

    def test_guards_take_room(self):
        out, _ = self.run(TF_OPS_DEBUG_MEMORY="1")
        size = str(self.BYTES + 2 * 64)
        assert out[0] == str(["TfOps>RmsNormalizationGrad", "CPU", "1", size, size])


PROGRAM = """
import sys, tensorflow as tf, tf_ops

def status(key):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(key)) / 1024

def step(seq):
    x = [tf.random.normal([1, seq, 1, 64]) for _ in range(4)]
    with tf.GradientTape() as tape:
        tape.watch(x[:3])
        y = tf_ops.dot_product_attention(*x[:3], is_causal=True)
    return tape.gradient(y, x[:3], x[3])

with tf.device("CPU"):
    step(64)
    before = status("VmRSS")
    step(int(sys.argv[1]))
    print(status("VmHWM") - before)
"""


class TestAttention:
    """Its memory grows with the sequence, not with its square."""

    @pytest.fixture(autouse=True)
    def device(self):
        """Each size has a process of its own, on the CPU, whose peak the system knows."""

    def peak(self, seq):
        command = [sys.executable, "-c", PROGRAM, str(seq)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        return float(done.stdout)

    def test_peak_is_linear(self):
        small, large = self.peak(8192), self.peak(32768)
        assert large < 6 * small
        # Scores of one head in float32 would be 4096 MiB; the eight tensors here are 64 MiB.
        assert large < 400
