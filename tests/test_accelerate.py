# SPDX-License-Identifier: Apache-2.0
"""tf_ops.accelerate on models of Keras; those of KerasHub are in test_keras_hub.py."""

import threading
import zipfile

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_ops
from tf_ops._models.visibility import Visibility

BATCH, SEQ, WIDTH = 2, 43, 16
# Stock layers that drop masks say so, and so do ours.
pytestmark = pytest.mark.filterwarnings("ignore:.*destroy the mask")


@pytest.fixture(autouse=True)
def counted():
    tf_ops.coverage(reset=True)


def block(x, dropout=0.0):
    """A layer of each kind."""
    layers = keras.layers
    h = layers.LayerNormalization()(x)
    x = x + layers.MultiHeadAttention(2, 8, dropout=dropout)(h, h, use_causal_mask=True)
    h = layers.RMSNormalization()(x)
    return x + layers.GroupQueryAttention(8, 4, 2)(h, h, use_causal_mask=True)


def functional():
    x = keras.Input([SEQ], dtype="int32")
    h = keras.layers.Embedding(50, WIDTH, mask_zero=True)(x)
    return keras.Model(x, keras.layers.Dense(50)(block(h)))


def nested():
    inner = functional()
    x = keras.Input([SEQ], dtype="int32")
    return keras.Model(x, keras.layers.LayerNormalization()(inner(x)))


def sequential():
    layers = keras.layers
    return keras.Sequential(
        [layers.Embedding(50, WIDTH), layers.RMSNormalization(), layers.GroupNormalization(4)]
    )


@keras.saving.register_keras_serializable(package="test_accelerate")
class Subclassed(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.embedding = keras.layers.Embedding(50, WIDTH)
        self.blocks = [keras.layers.MultiHeadAttention(2, 8) for _ in range(2)]
        self.norms = {"last": keras.layers.LayerNormalization()}

    def call(self, tokens):
        x = self.embedding(tokens)
        for attention in self.blocks:
            x = x + attention(x, x, use_causal_mask=True)
        return self.norms["last"](x)


MODELS = {
    "functional": (functional, 4),
    "nested": (nested, 5),
    "sequential": (sequential, 2),
    "subclassed": (Subclassed, 3),
}


def tokens():
    values = np.random.default_rng(0).integers(1, 50, (BATCH, SEQ)).astype("int32")
    values[1, 30:] = 0
    return values


def made(name):
    model = MODELS[name][0]()
    model(tokens())
    rng = np.random.default_rng(0)
    model.set_weights([0.3 * rng.standard_normal(w.shape) + 0.1 for w in model.weights])
    return model


def valid(y):
    """What is not padding: there a query may see no key."""
    return np.asarray(y)[tokens() != 0]


@pytest.mark.parametrize("name", MODELS)
def test_numbers_and_undo(name):
    model, x = made(name), tokens()
    expected = model(x)
    types = [type(layer) for layer in model._flatten_layers()]
    report = tf_ops.accelerate(model)
    assert len(report.replaced) == MODELS[name][1] and report.kept == []
    np.testing.assert_allclose(valid(model(x)), valid(expected), rtol=1e-4, atol=1e-5)
    coverage = tf_ops.coverage(reset=True)
    assert coverage.share == 1.0
    assert sum(counts["served"] for counts in coverage.values()) == MODELS[name][1]
    assert [type(layer) for layer in model._flatten_layers()] == types

    assert tf_ops.accelerate(model).replaced == []  # nothing twice
    report.undo()
    np.testing.assert_array_equal(model(x), expected)
    assert tf_ops.coverage() == {}
    report.undo()
    assert len(tf_ops.accelerate(model).replaced) == MODELS[name][1]


@pytest.mark.parametrize("name", MODELS)
def test_saves_as_the_stock_model(name, tmp_path):
    model = made(name)
    before = model.get_config() if name != "subclassed" else None
    tf_ops.accelerate(model)
    expected = model(tokens())
    model.save(tmp_path / "model.keras")
    with zipfile.ZipFile(tmp_path / "model.keras") as file:
        assert b"tf_ops" not in file.read("config.json")
    tf_ops.coverage(reset=True)
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(valid(loaded(tokens())), valid(expected), rtol=1e-4, atol=1e-5)
    assert tf_ops.coverage() == {}
    assert before is None or model.get_config() == before
    model.save_weights(tmp_path / "w.weights.h5")
    made(name).load_weights(tmp_path / "w.weights.h5")


def test_functions_that_fit_and_predict_compiled_are_compiled_again():
    model = made("functional")
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    fit = lambda: model.fit(tokens(), tokens(), verbose=0).history["loss"][0]
    fit(), model.predict(tokens(), verbose=0), model.evaluate(tokens(), tokens(), verbose=0)
    report = tf_ops.accelerate(model)
    for run in (fit, lambda: model.predict(tokens(), verbose=0)):
        run()
        assert tf_ops.coverage(reset=True)["dot_product_attention"]["served"] >= 2
    report.undo()
    fit(), model.predict(tokens(), verbose=0)
    assert tf_ops.coverage() == {}


@pytest.mark.parametrize("policy, jit_compile", [("float32", "auto"), ("mixed_bfloat16", True)])
def test_fit(policy, jit_compile):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        ours, stock = made("functional"), made("functional")
    finally:
        keras.config.set_dtype_policy(before)
    tf_ops.accelerate(ours)
    losses = []
    for model, jit in ((ours, jit_compile), (stock, "auto")):
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0)
        model.compile(keras.optimizers.SGD(0.1), loss, jit_compile=jit)
        losses.append(model.fit(tokens(), tokens(), epochs=4, verbose=0).history["loss"])
    assert losses[0][-1] < losses[0][0]
    tolerance = 1e-4 if policy == "float32" else 0.03
    np.testing.assert_allclose(*losses, rtol=tolerance)
    assert tf_ops.coverage().share == 1.0


def test_exports(tmp_path):
    model = made("functional")
    tf_ops.accelerate(model)
    expected = model(tokens())
    model.export(tmp_path / "saved", verbose=False)
    loaded = tf.saved_model.load(tmp_path / "saved")
    np.testing.assert_allclose(loaded.serve(tokens()), expected, rtol=1e-5, atol=1e-5)
    operations = {
        node.op
        for function in loaded.signatures["serving_default"].graph.as_graph_def().library.function
        for node in function.node_def
    }
    assert {"TfOps>DotProductAttention", "TfOps>RmsNormalization"} <= operations


def test_the_report_says_what_is_kept_and_why():
    class Own(keras.layers.MultiHeadAttention):
        def _compute_attention(self, query, key, value, *args, **kwargs):
            return value, None

    x = keras.Input([SEQ, WIDTH])
    y = keras.layers.LayerNormalization(name="plain")(x)
    y = keras.layers.MultiHeadAttention(2, 8, dtype="float64", name="wide")(y, y)
    y = Own(2, 8, name="own")(y, y)
    y = keras.layers.BatchNormalization(name="batch")(y)
    y = tf_ops.layers.RMSNormalization(name="ours")(y)
    y = keras.ops.rms_normalization(y)
    model = keras.Model(x, y)
    expected = model(np.ones([1, SEQ, WIDTH], "float32"))
    report = tf_ops.accelerate(model)
    assert report.replaced == [("plain", "LayerNormalization")]
    kept = {name: reason for _, name, reason in report.kept}
    assert kept == {
        "MultiHeadAttention": "it computes in float64",
        "Own": "it overrides _compute_attention of MultiHeadAttention",
        "BatchNormalization": "nothing of ours is like it",
        "RMSNorm": "not a layer; tf_ops.enable() serves it",
    }
    assert "1 layers replaced\n  plain: LayerNormalization\n4 layers" in str(report)
    actual = model(np.ones([1, SEQ, WIDTH], "float32"))
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


def test_what_stock_serves_of_a_layer_is_counted_once():
    layer = keras.layers.MultiHeadAttention(2, 8)
    x = tf.ones([1, SEQ, WIDTH])
    expected = layer(x, x, return_attention_scores=True)
    tf_ops.accelerate(layer)
    for a, e in zip(layer(x, x, return_attention_scores=True), expected):
        np.testing.assert_array_equal(a, e)
    assert tf_ops.coverage() == {
        "dot_product_attention": {"served": 0, "fell_through": {"return_attention_scores": 1}}
    }
    assert tf_ops.coverage().share == 0.0
    assert "1 not: return_attention_scores" in str(tf_ops.coverage())


def test_only_models_and_layers_are_taken():
    with pytest.raises(ValueError, match="accelerate: model is int; it must be a Keras model"):
        tf_ops.accelerate(3)


def test_the_counter_loses_nothing_between_threads():
    layer = keras.layers.RMSNormalization()
    x = tf.ones([1, 4])
    layer(x)
    tf_ops.accelerate(layer)
    run = lambda: [layer(x) for _ in range(200)]
    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tf_ops.coverage()["rms_normalization"]["served"] == 1600


@pytest.mark.parametrize("first", [None, 0, 7])
@pytest.mark.parametrize("window", [None, 0, 3])
@pytest.mark.parametrize("is_masked", [False, True])
def test_flags_and_lengths_say_what_the_dense_mask_says(first, window, is_masked):
    seq_q, seq_k = (SEQ, SEQ) if first is None else (5, 20)
    rng = np.random.default_rng(0)
    q, k, v = (
        tf.constant(rng.standard_normal([BATCH, n, 2, 8]), tf.float32)
        for n in (seq_q, seq_k, seq_k)
    )
    mask = tf.constant(rng.random([BATCH, 1, seq_k]) < 0.8) if is_masked else None
    visibility = Visibility(q, mask, None if first is None else seq_k, first).within(window)
    i, j = np.arange(seq_q)[:, None] + (first or 0), np.arange(seq_k)
    expected = (j <= i) & (j >= i - (seq_k if window is None else window))
    expected = np.broadcast_to(expected, [BATCH, seq_q, seq_k])
    expected = expected & np.asarray(mask) if is_masked else expected
    np.testing.assert_array_equal(tf.convert_to_tensor(visibility), expected)
    np.testing.assert_array_equal(tf.cast(visibility, tf.int32), expected)
    np.testing.assert_array_equal(visibility[:, None], expected[:, None])
    actual = tf_ops.dot_product_attention(q, k, v, **visibility.arguments())
    expected = tf_ops.dot_product_attention(q, k, v, mask=expected[:, None])
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
