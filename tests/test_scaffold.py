# SPDX-License-Identifier: Apache-2.0
"""`python -m tf_ops new`: what it writes builds, passes its tests and is in the house style."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from tests.test_conventions import family_gaps, text_gaps
from tf_ops import _library
from tf_ops._scaffold import write_op

ROOT = pathlib.Path(__file__).parents[1]
CUDA = int(bool(_library.build_info()["cuda"]))


@pytest.fixture(autouse=True)
def device():
    """What is written chooses its own."""


def run(*command, cwd):
    result = subprocess.run(
        command,
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def check_style(folder):
    for tool in ("ruff", "clang-format"):
        if not shutil.which(tool, path=pathlib.Path(sys.executable).parent):
            pytest.skip(f"{tool} is not there")
    folder_of_tools = pathlib.Path(sys.executable).parent
    sources = [path for path in (folder / "cc").rglob("*.*") if path.suffix != ".mk"]
    run(folder_of_tools / "clang-format", "--dry-run", "-Werror", *sources, cwd=folder)
    run(folder_of_tools / "ruff", "check", ".", cwd=folder)
    run(folder_of_tools / "ruff", "format", "--check", ".", cwd=folder)


@pytest.mark.skipif(not shutil.which("make") or not shutil.which("g++"), reason="no compiler")
def test_package_builds_and_passes_its_tests(tmp_path):
    folder = tmp_path / "my_kernels"
    output = run(sys.executable, "-m", "tf_ops", "new", "gate", "--package", folder, cwd=tmp_path)
    assert str(folder / "cc" / "gate" / "gate.cu") in output
    make = ["make", f"PYTHON={sys.executable}", f"CUDA={CUDA}", "CUDA_ARCHS=90a", "WERROR=1"]
    run(*make, "build/config", "build/tf.mk", cwd=folder)
    # What every package compiles alike takes most of the time; here it is built already.
    built = ROOT / "build"
    if (built / "config").exists() and f"-DTF_OPS_CUDA={CUDA}" in (built / "config").read_text():
        shutil.copytree(
            built / "cc" / "common",
            folder / "build" / "cc" / "common",
            ignore=shutil.ignore_patterns("*.d"),
            copy_function=shutil.copyfile,
        )
    output = run(*make, "test", cwd=folder)
    assert " passed" in output and "failed" not in output
    check_style(folder)


# A functional model with an op of another package, saved and loaded.
def test_keras_model_with_an_op_of_a_package(tmp_path):
    program = """
import sys, types
import keras, numpy as np
from tf_ops.extend import operation

module = types.ModuleType("my_kernels")
exec("def gated_linear_unit(x, scale=1.0):\\n    return scale * x", module.__dict__)
ours = operation(module.gated_linear_unit)
inputs = keras.Input([3])
model = keras.Model(inputs, ours(ours(inputs, scale=2.0)))
model.save(sys.argv[1])
x = np.float32([[1, 2, 3]])
print(keras.saving.load_model(sys.argv[1]).predict(x, verbose=0).tolist())
import tf_ops
inputs = keras.Input([2])
model = keras.Model(inputs, tf_ops.gated_linear_unit(inputs))  # of the same name
print(model.predict(x[:, :2], verbose=0).shape)
"""
    output = run(sys.executable, "-c", program, tmp_path / "model.keras", cwd=tmp_path)
    assert output.splitlines() == ["[[2.0, 4.0, 6.0]]", "(1, 1)"]


@pytest.fixture
def checkout(tmp_path):
    """What `new` looks at and changes in a checkout of this repository."""
    folder = tmp_path / "checkout"
    (folder / "tf_ops").mkdir(parents=True)
    for file in ["Makefile", "pyproject.toml", ".clang-format", *ROOT.glob("tf_ops/*.py")]:
        shutil.copy(ROOT / file, folder / (ROOT / file).relative_to(ROOT))
    return folder


# The order of includes and imports and the breaks of lines depend on names.
@pytest.mark.parametrize("name", ["aa", "zz_top", "attention_of_others"])
def test_op_in_this_repository(checkout, name):
    files = write_op(name, checkout)
    sources = {str(file): (checkout / file).read_text() for file in files}
    gaps = family_gaps(name, sources)
    gaps += [gap for file, text in sources.items() for gap in text_gaps(file, text)]
    assert not gaps, "\n".join(gaps)
    left = [file for file, text in sources.items() if "my_ops" in text or "caled" in text]
    assert not left, left
    assert f"from tf_ops._ops.{name} import {name}" in sources["tf_ops/__init__.py"]
    assert f'    "{name}",' in sources["tf_ops/__init__.py"].splitlines()
    check_style(checkout)


@pytest.mark.parametrize("package", ["ab", "the_other_package"])
def test_package_of_any_name(tmp_path, package):
    write_op("some_gated_thing", tmp_path / package)
    write_op("aa", tmp_path / package)
    check_style(tmp_path / package)


def test_mistakes_change_nothing(tmp_path, checkout):
    write_op("gate", tmp_path / "mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "something").touch()
    before = sorted(tmp_path.rglob("*"))
    for name, folder, message in [
        ("gate", "mine", "is there already"),
        ("Gate", "mine", "'Gate': a name is words"),
        ("two words", "checkout", "a name is words"),
        ("gate", "My-Ops", "'My-Ops': a name is words"),
        ("gate", "full", "holds no package"),
        ("lambda", "mine", "'lambda': a name is words"),
        ("gate", "numpy", "numpy is a package already, in "),
    ]:
        with pytest.raises(ValueError, match=message):
            write_op(name, tmp_path / folder)
    assert sorted(tmp_path.rglob("*")) == before
    command = [sys.executable, "-m", "tf_ops", "new", "gate", "--package", tmp_path / "mine"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 1 and "is there already" in result.stderr.splitlines()[-1]
