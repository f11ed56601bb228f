# SPDX-License-Identifier: Apache-2.0
"""The main job from end to end, as small as it gets."""

import argparse
import json
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

import tf_ops  # noqa: F401  registers the ops

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"


@pytest.fixture(autouse=True)
def device():
    """The example chooses its own."""


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    import train_and_serve

    return train_and_serve


def test_train_and_serve(tmp_path):
    flags = {"preset": "cpu", "steps": 10, "layers": 1, "d-model": 32, "seq": 32, "batch": 2}
    command = [sys.executable, EXAMPLES / "train_and_serve.py", f"--text={EXAMPLES}"]
    command += [f"--{name}={value}" for name, value in flags.items()] + [f"--out={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    same = [line.split(":")[0] for line in lines if ": same logits" in line]
    assert same == [
        "stock Keras's weights in the model of tf_ops",
        "tf_ops's weights in the model of stock Keras",
        "A fresh Python process",
        *(["The C server, without Python"] if shutil.which("cc") else []),
    ]
    for kind in ("tf_ops", "stock Keras"):
        assert len(json.loads((tmp_path / f"{kind}.json").read_text())["losses"]) == 10
        assert any(line.startswith(kind) and len(line.split()) >= 8 for line in lines)
    assert (tmp_path / "report.png").stat().st_size > 10_000


def test_generate(tmp_path):
    flags = {"preset": "cpu", "steps": 10, "layers": 1, "d-model": 32, "seq": 32, "batch": 2}
    command = [sys.executable, EXAMPLES / "generate.py", f"--text={EXAMPLES}", "--count=12"]
    command += [f"--{name}={value}" for name, value in flags.items()] + [f"--out={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.strip() for line in done.stdout.splitlines()]
    rates = [line for line in lines if line.startswith(("tf_ops, ", "stock Keras, "))]
    assert len(rates) == 6 and all(float(line.split()[-1]) > 0 for line in rates)
    assert "All wrote the same." in lines
    assert any("wrote the same in a fresh process" in line for line in lines)
    # A step is all that the signature does.
    signature = tf.saved_model.load(tmp_path / "generator").signatures["serving_default"]
    shapes = {name: x.shape for name, x in signature.structured_input_signature[1].items()}
    assert shapes == {"tokens": [1], "positions": [1]}
    assert signature.structured_outputs["logits"].shape == [1, 256]


def test_another_token_stops_it(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    from generate import check_tokens

    args = argparse.Namespace(policy="float32", gpu=False)
    logits = np.random.default_rng(0).normal(size=(2, 3, 256))
    expected = logits.argmax(-1)
    check_tokens("same", expected.copy(), expected, logits, args)
    tokens = expected.copy()
    tokens[1, 2] += 1
    with pytest.raises(SystemExit, match="DIFFERENT token, number 2"):
        check_tokens("fault", tokens, expected, logits, args)
    logits[1, 2, tokens[1, 2]] = logits[1, 2].max() - 1e-6
    check_tokens("tie", tokens, expected, logits, args)


@pytest.mark.parametrize("fault", ["shifted", "nan", "another choice"])
def test_different_logits_stop_it(example, fault):
    args = argparse.Namespace(policy="float32", gpu=False)
    expected = np.random.default_rng(0).normal(size=(2, 3, 256)).astype("float32")
    example.check_logits("same", expected + 1e-6, expected, args)
    logits = expected.copy()
    if fault == "shifted":
        logits += 1e-2
    elif fault == "nan":
        logits[0, 1, 2] = np.nan
    else:
        args.policy = "mixed_bfloat16"
        expected[0, 0, 5] = logits[0, 0, 5] = 9
        logits[0, 0, 6] = 9.1
        expected[0, 0, 6] = 0
    with pytest.raises(SystemExit, match="DIFFERENT"):
        example.check_logits(fault, logits, expected, args)


def test_losses_that_part_stop_it(example, tmp_path):
    args = argparse.Namespace(policy="float32", gpu=False, steps=20, out=tmp_path)
    ours = {"losses": [2.0] * 20, "seconds": [0.1] * 20, "peak_bytes": 1e6, "jit": False}
    stock = ours | {"losses": [2.0] * 19 + [2.03]}
    example.report({"tf_ops": ours, "stock Keras": dict(ours)}, 2, args)
    with pytest.raises(SystemExit, match="DIFFER"):
        example.report({"tf_ops": ours, "stock Keras": stock}, 2, args)


def test_unfit_text_is_refused(example, tmp_path):
    with pytest.raises(SystemExit, match="No such file"):
        example.read_text(tmp_path / "missing", 8)
    (tmp_path / "short.py").write_text("pass\n")
    with pytest.raises(SystemExit, match="80 are needed"):
        example.read_text(tmp_path, 8)


def test_accelerate_models(tmp_path):
    pytest.importorskip("keras_hub", reason="KerasHub is not installed: pip install keras-hub")
    command = [sys.executable, EXAMPLES / "accelerate_models.py", "--device-config=tiny"]
    command += ["--policy=float32", "--only=vit", "--seconds=0.1"]
    command += [f"--json={tmp_path / 'models.json'}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "DIFFER" not in done.stdout
    models = json.loads((tmp_path / "models.json").read_text())["models"]
    for results in models.values():
        assert results["tf_ops"]["share_served"] == 1.0
        assert results["stock"]["train_ms"] > 0


def test_lengths_that_train(tmp_path):
    pytest.importorskip("keras_hub", reason="KerasHub is not installed: pip install keras-hub")
    command = [sys.executable, EXAMPLES / "accelerate_models.py", "--device-config=tiny"]
    command += ["--policy=float32", "--only=llama", "--longest", "32", "16"]
    command += [f"--json={tmp_path / 'longest.json'}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "longest.json").read_text())["longest"]["llama"]
    assert results["32 tokens"]["tf_ops"]["train_ms"] > 0
    assert results["16 tokens"]["stock"]["train_ms"] > 0
