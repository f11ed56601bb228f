# SPDX-License-Identifier: Apache-2.0
"""Importing tf_ops: what it refuses and says, and what it leaves alone."""

import pathlib
import subprocess
import sys

import pytest
import tensorflow as tf

import tf_ops
from tf_ops import _library

ROOT = pathlib.Path(__file__).parents[1]
ATTENTION = """
def attention(x):
    none = tf.zeros([0])
    return _library.library.tf_ops_dot_product_attention(
        query=x, key=x, value=x, bias=none, mask=tf.zeros([0], tf.bool),
        query_seq_lengths=tf.zeros([0], tf.int32), key_value_seq_lengths=tf.zeros([0], tf.int32),
        sink=none, seed=tf.zeros([0], tf.int64), scale=1.0).output
"""


@pytest.fixture(autouse=True)
def device():
    """Nothing here depends on the device."""


def run(program):
    """The output of a Python program in a process of its own."""
    result = subprocess.run(
        [sys.executable, "-c", program], check=False, cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture
def doctored(tmp_path):
    """Makes a copy of the library in which `old` became `new`, of equal length."""

    def copy(old=b"", new=b""):
        library = _library.PATH.read_bytes()
        assert old in library and len(old) == len(new)
        path = tmp_path / "tf_ops" / "_tf_ops.so"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(library.replace(old, new) if old else library)
        return path

    return copy


def test_another_tensorflow_is_refused_before_loading(doctored, tmp_path):
    path = doctored(b"tf_ops_build tensorflow=2.", b"tf_ops_build tensorflow=1.")
    found = f"built for TensorFlow 1.*this is TensorFlow {tf.__version__}"
    with pytest.raises(ImportError, match=f"{found}.*pip install 'tensorflow==1"):
        _library.load(path)
    (tmp_path / "Makefile").touch()
    with pytest.raises(ImportError, match=f"{found}.*make -C {tmp_path} PYTHON={sys.executable}"):
        _library.load(path)
    assert str(path) not in pathlib.Path("/proc/self/maps").read_text()


def test_library_that_was_not_built(tmp_path):
    (tmp_path / "Makefile").touch()
    with pytest.raises(ImportError, match=f"has not been built.*make -C {tmp_path}"):
        _library.load(tmp_path / "tf_ops" / "_tf_ops.so")


def test_missing_symbol(doctored):
    path = doctored(
        b"_ZN10tensorflow10OpRegistry6GlobalEv", b"_ZN10tensorflow10OpRegistry6GlobblEv"
    )
    with pytest.raises(ImportError, match="cannot be loaded.*undefined symbol.*wheel"):
        _library.load(path)


def test_damaged_library(doctored):
    with pytest.raises(ImportError, match="cannot be loaded"):
        _library.load(doctored(b"\x7fELF", b"\x7fELG"))


# Registered with XLA twice, an op aborts the process; with the kernel registry, it cannot run.
def test_second_copy_in_the_process(doctored):
    program = f"""
import pathlib
import tensorflow as tf
from tf_ops import _library
{ATTENTION}
try:
    _library.load(pathlib.Path({str(doctored())!r}))
except ImportError as error:
    print(error)
_library.load()  # the same one again is no second copy
x = tf.ones([1, 2, 1, 4])
print(bool(tf.reduce_all(attention(x) == tf.function(attention, jit_compile=True)(x))))
"""
    output = run(program)
    assert "Another copy of tf_ops is loaded" in output
    assert output.endswith("True\n")


def test_import_after_xla_was_used():
    program = f"""
import tensorflow as tf
tf.function(lambda x: x + 1, jit_compile=True)(tf.ones([2]))
from tf_ops import _library
{ATTENTION}
print(tf.function(attention, jit_compile=True)(tf.ones([1, 1, 1, 2])).numpy().tolist())
"""
    assert run(program) == "[[[[1.0, 1.0]]]]\n"


def test_import_starts_no_device_and_takes_no_time():
    program = """
import time
import keras
import tensorflow as tf
start = time.perf_counter()
import tf_ops
seconds = time.perf_counter() - start
for gpu in tf.config.list_physical_devices("GPU"):
    tf.config.experimental.set_memory_growth(gpu, True)  # an error once the devices run
[cpu] = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
assert len(tf.config.list_logical_devices("CPU")) == 2
print(seconds)
"""
    # A busy machine may disturb one of them.
    assert any(float(run(program)) < 0.3 for _ in range(3))


def test_info():
    result = subprocess.run(
        [sys.executable, "-m", "tf_ops", "info"], check=True, cwd=ROOT, capture_output=True
    )
    lines = result.stdout.decode().splitlines()
    for op in tf_ops.list_ops():
        [line] = [line for line in lines if line.startswith(op + " ")]
        assert line.split()[1] == "yes"
    assert f"TensorFlow  {tf.__version__}, built for {tf.__version__}" in lines
