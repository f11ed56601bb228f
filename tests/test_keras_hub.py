# SPDX-License-Identifier: Apache-2.0
"""KerasHub's models on the kernels, against themselves without."""

import pathlib
import zipfile

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

import tf_ops
from tests.common import error

keras_hub = pytest.importorskip(
    "keras_hub", reason="KerasHub is not installed: pip install keras-hub"
)
EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"
NAMES = ("llama", "gemma", "mistral", "qwen", "bert", "vit", "sd3")
POLICIES = ["float32", "mixed_bfloat16"]


@pytest.fixture
def architectures(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    import architectures

    return architectures


@pytest.fixture(autouse=True)
def counted():
    tf_ops.coverage(reset=True)


def results(model, a, cotangent):
    """The output where it counts, and the gradients by the weights."""
    # A token that is padding sees no key where we give 0 and stock a mean.
    valid = tf.constant(True) if a.valid is None else tf.constant(a.valid)[..., None]
    weights = [w.value for w in model.trainable_variables]
    with tf.GradientTape() as tape:
        y = model(a.inputs, training=False)
        y = tf.where(valid, y, tf.zeros([], y.dtype))
        loss = tf.reduce_sum(tf.cast(y, cotangent.dtype) * cotangent)
    gradients = tape.gradient(loss, weights)
    return [y], [tf.convert_to_tensor(g) for g in gradients if g is not None]


def same_weights(*models):
    """Gives random values to the weights of all, those that begin as zeros and ones included."""
    rng = np.random.default_rng(0)
    # Products keep their initial size, so that the logits do.
    values = [
        w.numpy() + 0.1 * rng.standard_normal(w.shape) * (w.shape.rank < 2 or 0.1)
        for w in (tf.convert_to_tensor(v) for v in models[0].get_weights())
    ]
    for model in models:
        model.set_weights(values)


def check(actual, stock, exact):
    for order, (ratio, ulps) in enumerate([(2, 4), (3, 8)]):
        for i, (a, s, e) in enumerate(zip(actual[order], stock[order], exact[order], strict=True)):
            assert a.dtype == s.dtype and a.shape == s.shape
            ulp = float(ml_dtypes.finfo(a.dtype.as_numpy_dtype).eps)
            if order:
                ulp = float(ml_dtypes.finfo(actual[0][0].dtype.as_numpy_dtype).eps)
            # Gradients of queries and keys are what remains of terms that cancel.
            largest = max(np.abs(x).max(initial=0) * (1 if x is e else 0.05) for x in exact[order])
            allowed = ratio * error(s, e) + ulps * ulp * largest
            off = error(a, e)
            assert off <= allowed, f"order {order}, number {i}: off by {off}, not {allowed}"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", NAMES)
def test_numbers_and_coverage(architectures, name, policy):
    a, exact = architectures.build(name, dtype=policy), architectures.build(name, dtype="float64")
    same_weights(a.model, exact.model)
    cotangent = np.random.default_rng(1).standard_normal(a.model(a.inputs).shape)
    run = lambda model: results(model, a, tf.constant(cotangent, tf.float64))
    stock, reference = run(a.model), run(exact.model)
    assert tf_ops.coverage() == {}

    report = tf_ops.accelerate(a.model)
    check(run(a.model), stock, reference)
    assert report.kept == []
    assert served(name)
    report.undo()
    for x, y in zip(tf.nest.flatten(run(a.model)), tf.nest.flatten(stock)):
        np.testing.assert_array_equal(x, y)
    assert tf_ops.coverage() == {}

    with tf_ops.enable():
        check(run(a.model), stock, reference)
    assert served(name)


def served(name):
    """Whether each call of attention and normalization was."""
    coverage = tf_ops.coverage(reset=True)
    norm = "layer_normalization" if name in ("bert", "vit", "sd3") else "rms_normalization"
    attentions = 3 if name == "sd3" else 2  # a block of it attends twice
    print(coverage)
    return (
        coverage.share == 1.0
        and coverage["dot_product_attention"]["served"] == attentions
        and coverage[norm]["served"] >= 2
    )
