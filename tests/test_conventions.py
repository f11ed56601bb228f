# SPDX-License-Identifier: Apache-2.0
"""What every op and every file has. Each rule returns complaints, and is shown to complain."""

import pathlib
import re

import pytest
import tensorflow as tf
from tensorflow.python.framework import kernels, ops

import tf_ops
from tf_ops import _library

ROOT = pathlib.Path(__file__).parents[1]
FOLDERS = ["cc", "tf_ops", "tests", "benchmarks", "examples", "docs"]
TYPES = {".cc", ".h", ".cu", ".cuh", ".py", ".c", ".bzl", ".lds"}
SOURCES = {
    str(path.relative_to(ROOT)): path.read_text()
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in TYPES
}
BUILD_FILES = ["Makefile", "cc/build.mk", "cc/machine.mk", "BUILD", "cc/BUILD"]
SOURCES |= {name: (ROOT / name).read_text() for name in [*BUILD_FILES, "setup.py", ".ci/run"]}
FAMILIES = sorted({name.split("/")[1] for name in SOURCES if re.match(r"cc/.*_op\.cc", name)})


@pytest.fixture(autouse=True)
def device():
    """Nothing here depends on the device."""


def kernels_of(op):
    return {kernel.device_type for kernel in kernels.get_registered_kernels_for_op(op).kernel}


def op_gaps(op, devices, gradients, required):
    gaps = [f"{op} has no {device} kernel" for device in sorted(required - devices)]
    if op not in gradients:
        gaps.append(f"{op} has no gradient, nor tf.no_gradient")
    return gaps


def public_name(op):
    return re.sub(r"(?<=.)([A-Z])", r"_\1", op.removeprefix("TfOps>")).lower()


def docstring_gaps(op, function):
    if "Args:" not in (function.__doc__ or ""):
        return [f"{op} has no public function {public_name(op)} with Args in its docstring"]
    return []


def family_gaps(family, sources):
    wanted = [f"cc/{family}/{family}.h", f"cc/{family}/{family}_op.cc", f"tf_ops/_ops/{family}.py"]
    wanted += [f"tests/test_{family}.py", f"benchmarks/bench_{family}.py"]
    names = re.findall(r'REGISTER_OP\("([^"]*)"\)', sources.get(wanted[1], ""))
    gaps = [f"{name} is missing" for name in wanted if name not in sources]
    gaps += [f"{name} does not start with TfOps>" for name in names if name[:6] != "TfOps>"]
    if "def cases():" not in sources.get(wanted[-1], "def cases():"):
        gaps.append(f"{wanted[-1]} has no cases(), for `python -m tf_ops bench`")
    return gaps


def include_gaps(name, text):
    """A header speaks C++, a .cu CUDA; TensorFlow and XLA are for the adapters."""
    allowed = ["cuda"] if name.endswith((".cu", ".cuh")) else []
    if not name.startswith("cc/") or name.endswith(".cc") or name == "cc/common/tf.h":
        return []
    includes = re.findall(r'#include [<"]((tensorflow|tsl|xla|absl|cuda|google)[^>"]*)', text)
    return [f"{name} includes {path}" for path, kind in includes if kind not in allowed]


def build_gaps(name, text, sources):
    """Build files find the sources of a family; only cc/common has files that they name."""
    files = [s for s in sources if s.startswith("cc/") and s.count("/") > 1 and "/common/" not in s]
    return [f"{name} names {file}" for file in files if file.rsplit("/", 1)[1] in text]


def text_gaps(name, text):
    gaps = []
    if "SPDX-License-Identifier: Apache-2.0" not in "".join(text.splitlines(True)[:2]):
        gaps.append(f"{name} lacks the SPDX line")
    # A name says what a thing does.
    names = [pathlib.Path(name).stem]
    names += re.findall(r"\b(?:class|struct|def|void|Status|auto|namespace)\s+(\w+)", text)
    words = "fast|faster|optimized|new|old|impl|helper|helpers|util|utils|misc|v[0-9]+"
    for word in names:
        parts = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", word).lower().split("_")
        gaps += [f"{name}: the name {word}" for part in parts if re.fullmatch(words, part)]
    gaps += [f"{name}: the path {path}" for path in re.findall(r"/(?:work|root|home)/\w+", text)]
    return gaps


def test_every_op():
    tf.function(lambda x: x + 1, jit_compile=True)(0.0)  # XLA makes its kernels at its first use
    # A TensorFlow for the CPU only has no XLA for GPUs; a build for it has no GPU kernels.
    required = kernels_of("AddV2") & {"CPU", "XLA_CPU_JIT", "XLA_GPU_JIT"}
    required |= {"GPU"} if _library.build_info()["cuda"] else set()
    gaps = []
    for op in tf_ops.list_ops():
        gaps += op_gaps(op, kernels_of(op), ops.gradient_registry.list(), required)
        if not op.endswith("Grad"):
            gaps += docstring_gaps(op, getattr(tf_ops, public_name(op), None))
    assert len(tf_ops.list_ops()) > 0 and not gaps, "\n".join(gaps)


def test_every_family():
    gaps = [gap for family in FAMILIES for gap in family_gaps(family, SOURCES)]
    assert FAMILIES and not gaps, "\n".join(gaps)


def test_every_file():
    gaps = [gap for name in BUILD_FILES for gap in build_gaps(name, SOURCES[name], SOURCES)]
    for name, text in SOURCES.items():
        gaps += include_gaps(name, text) + text_gaps(name, text)
    assert not gaps, "\n".join(gaps)


SPDX = "# SPDX-License-Identifier: Apache-2.0\n"
A = {f"cc/a/{x}": "" for x in ["a.h", "a_op.cc"]}
A |= dict.fromkeys(["tf_ops/_ops/a.py", "tests/test_a.py"], "")
A |= {"benchmarks/bench_a.py": "def cases():"}


@pytest.mark.parametrize(
    ("gaps", "complaint"),
    [
        (op_gaps("A", {"CPU"}, {"A"}, {"CPU", "GPU"}), "no GPU kernel"),
        (op_gaps("A", {"CPU"}, {"A"}, {"CPU", "XLA_CPU_JIT"}), "no XLA_CPU_JIT kernel"),
        (op_gaps("A", {"GPU"}, {"A"}, {"CPU", "GPU"}), "no CPU kernel"),
        (op_gaps("A", {"CPU"}, {"B"}, {"CPU"}), "no gradient"),
        (op_gaps("A", {"CPU"}, {"A"}, {"CPU"}), None),
        (docstring_gaps("TfOps>TwoWords", None), "no public function two_words"),
        (docstring_gaps("TfOps>Len", len), "no public function len with Args"),
        *((family_gaps("a", {k: A[k] for k in A if k != name}), name) for name in A),
        (family_gaps("a", A | {"cc/a/a_op.cc": 'REGISTER_OP("Softmax")'}), "start with TfOps>"),
        (family_gaps("a", A | {"benchmarks/bench_a.py": "main()"}), "has no cases()"),
        (family_gaps("a", A), None),
        (include_gaps("cc/a/a.h", "#include <cuda_runtime.h>"), "includes cuda_runtime.h"),
        (include_gaps("cc/a/a.cu", '#include "tensorflow/core/x.h"'), "includes tensorflow"),
        (include_gaps("cc/a/a.cu", "#include <cuda_runtime.h>"), None),
        (build_gaps("BUILD", 'srcs = ["a/a_op.cc"]', A), "names cc/a/a_op.cc"),
        (build_gaps("BUILD", 'srcs = glob(["*/*.cc"])', A), None),
        (text_gaps("a.py", "x = 1\n"), "lacks the SPDX line"),
        (text_gaps("a_utils.py", SPDX), "name a_utils"),
        (text_gaps("a.cu", SPDX + "void Softmax" + "FastKernel"), "name SoftmaxFastKernel"),
        (text_gaps("a.py", SPDX + "def softmax" + "_v2(x):"), "name softmax_v2"),
        (text_gaps("a.py", SPDX + "open('" + "/ho" + "me/me/x')"), "the path"),
        (text_gaps("a.py", SPDX + "def newton(x): fast = x"), None),
    ],
)
def test_rules_are_seen_to_fail(gaps, complaint):
    assert any(complaint in gap for gap in gaps) if complaint else not gaps
