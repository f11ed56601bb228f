# SPDX-License-Identifier: Apache-2.0
"""tf_ops.enable: keras.ops and the layers of Keras, with their own names, on the kernels."""

import os
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.backend.tensorflow import nn as backend_nn
from keras.src.ops import nn as ops_nn

import tf_ops
from tf_ops.testing import check

BATCH, SEQ, HEADS, DIM = 2, 43, 4, 8
QKV = [(BATCH, SEQ, HEADS, DIM)] * 3
# Stock layers that drop masks say so, and so do ours.
pytestmark = pytest.mark.filterwarnings("ignore:.*destroy the mask")


@pytest.fixture(autouse=True)
def stock_afterwards():
    tf_ops.coverage(reset=True)
    yield
    tf_ops.disable()
    keras.config.enable_flash_attention()


def patched():
    """What enable() changes, as it is now."""
    layers = keras.layers
    return [
        backend_nn.dot_product_attention,
        ops_nn._rms_normalization,
        ops_nn._layer_normalization,
        layers.MultiHeadAttention.call,
        layers.MultiHeadAttention._compute_attention,
        layers.GroupQueryAttention.call,
        layers.LayerNormalization.call,
        layers.RMSNormalization.call,
        layers.GroupNormalization.call,
    ]


STOCK = patched()


def is_enabled():
    now = patched()
    changed = [a is not b for a, b in zip(now, STOCK)]
    assert all(changed) or not any(changed)
    return all(changed)


def random_mask(*shape):
    mask = np.random.default_rng(0).random(shape) < 0.7
    mask[..., 0] = True
    return tf.constant(mask)


def enabled(function):
    def call(*args):
        with tf_ops.enable():
            return function(*args)

    return call


OPERATIONS = {
    "attention": (keras.ops.dot_product_attention, QKV, {}),
    "causal": (keras.ops.dot_product_attention, QKV, {"is_causal": True, "scale": 0.3}),
    "mask": (keras.ops.dot_product_attention, QKV, {"mask": random_mask(BATCH, 1, SEQ, SEQ)}),
    "bias": (keras.ops.dot_product_attention, [*QKV, (1, HEADS, SEQ, SEQ)], {}),
    "rms": (keras.ops.rms_normalization, [(5, 7, 33), (33,)], {}),
    "rms_axes": (keras.ops.rms_normalization, [(5, 7, 33)], {"axis": [1, 2], "epsilon": 0.1}),
    "layer": (keras.ops.layer_normalization, [(5, 7, 33), (33,), (33,)], {}),
    "layer_axis": (keras.ops.layer_normalization, [(5, 7, 33), (7,)], {"axis": 1}),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations(name, dtype, mode):
    function, shapes, options = OPERATIONS[name]
    stock = lambda *args: function(*args, **options)
    check(enabled(stock), stock, shapes, dtype, mode)
    coverage = tf_ops.coverage()
    assert coverage.share == 1.0 and len(coverage) == 1


LAYERS = {
    "MultiHeadAttention": (lambda **kw: keras.layers.MultiHeadAttention(2, 8, **kw), 2),
    "GroupQueryAttention": (lambda **kw: keras.layers.GroupQueryAttention(8, 4, 2, **kw), 2),
    "LayerNormalization": (keras.layers.LayerNormalization, 1),
    "RMSNormalization": (keras.layers.RMSNormalization, 1),
    "GroupNormalization": (lambda **kw: keras.layers.GroupNormalization(4, **kw), 1),
}


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "float64"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name, policy):
    make, num_inputs = LAYERS[name]
    layer = make(dtype=policy)
    x = np.random.default_rng(0).standard_normal([BATCH, SEQ, 16])
    x = [tf.constant(x, layer.compute_dtype)] * num_inputs
    options = {"use_causal_mask": True} if num_inputs == 2 else {}
    expected = layer(*x, **options)
    with tf_ops.enable():
        actual = layer(*x, **options)
    tolerance = 0.03 if policy == "mixed_bfloat16" else 1e-5
    np.testing.assert_allclose(
        tf.cast(actual, tf.float64), tf.cast(expected, tf.float64), rtol=tolerance, atol=tolerance
    )
    (counts,) = tf_ops.coverage().values()
    if policy == "float64":
        assert counts["served"] == 0 and sum(counts["fell_through"].values()) == 1
        assert "float64" in str(counts["fell_through"])
    else:
        assert counts == {"served": 1, "fell_through": {}}


def test_states_nest():
    assert not is_enabled()
    with tf_ops.enable():
        assert is_enabled()
        with tf_ops.enable():
            assert is_enabled()
        assert is_enabled()
        with tf_ops.disable():
            assert not is_enabled()
            with tf_ops.enable():
                assert is_enabled()
            assert not is_enabled()
        assert is_enabled()
    assert not is_enabled()
    assert tf_ops.enable() is not None and is_enabled()
    tf_ops.enable()
    with pytest.raises(KeyError):
        with tf_ops.disable():
            raise KeyError
    assert is_enabled()
    tf_ops.disable()
    assert not is_enabled()
    assert "_compute_attention" not in vars(tf_ops.layers.MultiHeadAttention)


@pytest.mark.parametrize(
    "owner, name",
    [
        (backend_nn, "dot_product_attention"),
        (ops_nn, "_layer_normalization"),
        (keras.layers.GroupQueryAttention, "call"),
    ],
)
def test_unknown_internals_of_keras_change_nothing(owner, name, monkeypatch):
    def other(query, key, something_new):
        raise AssertionError

    monkeypatch.setattr(owner, name, other)
    before = patched()
    with pytest.raises(RuntimeError, match=f"{name} takes .*something_new.*Nothing was changed"):
        tf_ops.enable()
    assert all(a is b for a, b in zip(patched(), before))
    monkeypatch.undo()
    with tf_ops.enable():
        assert is_enabled()


def test_missing_internals_of_keras_change_nothing(monkeypatch):
    monkeypatch.delattr(ops_nn, "_rms_normalization")
    with pytest.raises(RuntimeError, match="_rms_normalization is not there"):
        tf_ops.enable()
    assert keras.layers.MultiHeadAttention.call is STOCK[3]


def test_flash_attention_stops_raising_and_means_it():
    q, k, v = (tf.ones(shape) for shape in QKV)
    attend = keras.ops.dot_product_attention
    with pytest.raises(ValueError, match="not supported in tensorflow"):
        attend(q, k, v, flash_attention=True)
    keras.config.enable_flash_attention()
    layer = keras.layers.MultiHeadAttention(2, 8, flash_attention=True)
    with tf_ops.enable():
        attend(q, k, v, flash_attention=True)
        layer(tf.ones([1, 5, 16]), tf.ones([1, 5, 16]))
        assert tf_ops.coverage(reset=True)["dot_product_attention"]["served"] == 2
        with pytest.raises(ValueError, match="flash_attention is True, but head_dim is 257"):
            attend(*[tf.ones([1, 2, 1, 257])] * 3, flash_attention=True)
        assert tf_ops.coverage() == {}


def test_disabled_flash_attention_is_stock():
    q, k, v = (tf.ones(shape) for shape in QKV)
    with tf_ops.enable():
        keras.ops.dot_product_attention(q, k, v, flash_attention=False)
        keras.config.disable_flash_attention()
        keras.ops.dot_product_attention(q, k, v)
        layer = keras.layers.GroupQueryAttention(8, 4, 2)
        layer(tf.ones([1, 5, 16]), tf.ones([1, 5, 16]))
    assert tf_ops.coverage()["dot_product_attention"] == {
        "served": 0,
        "fell_through": {"flash attention is disabled": 3},
    }


def test_calls_that_are_not_covered_fall_through():
    x = tf.random.stateless_normal([1, 5, 2, 300], [1, 2])
    with tf_ops.enable():
        actual = keras.ops.dot_product_attention(x, x, x)
        keras.ops.rms_normalization(tf.ones([2, 3], tf.float64))
        keras.ops.layer_normalization(tf.ones([2, 3], tf.float64))
        attention = keras.layers.MultiHeadAttention(2, 8, attention_axes=(1, 2))
        attention(tf.ones([1, 3, 4, 16]), tf.ones([1, 3, 4, 16]))
    np.testing.assert_allclose(actual, keras.ops.dot_product_attention(x, x, x), rtol=1e-6)
    reasons = {k: v["fell_through"] for k, v in tf_ops.coverage().items()}
    assert reasons == {
        "dot_product_attention": {"head_dim is 300, more than 256": 1, "inputs of rank 4": 1},
        "rms_normalization": {"x is float64": 1},
        "layer_normalization": {"x is float64": 1},
    }
    assert tf_ops.coverage().share == 0.0


def test_a_soft_cap_that_reaches_the_backend_counts():
    rng = np.random.default_rng(0)
    q, k, v = (tf.constant(9 * rng.standard_normal(shape), tf.float32) for shape in QKV)
    with tf_ops.enable():
        actual = backend_nn.dot_product_attention(q, k, v, attn_logits_soft_cap=2.0)
    expected = tf_ops.dot_product_attention(q, k, v, attn_logits_soft_cap=2.0)
    np.testing.assert_array_equal(actual, expected)


def test_grouped_queries_which_an_older_keras_refuses():
    rng = np.random.default_rng(0)
    shapes = [(BATCH, SEQ, HEADS, DIM), (BATCH, SEQ, 2, DIM), (BATCH, SEQ, 2, DIM)]
    q, k, v = (tf.constant(rng.standard_normal(shape), tf.float32) for shape in shapes)
    with tf_ops.enable():
        actual = keras.ops.dot_product_attention(q, k, v)
    np.testing.assert_array_equal(actual, tf_ops.dot_product_attention(q, k, v))


def test_a_subclass_with_an_attention_of_its_own_keeps_it():
    class Own(keras.layers.MultiHeadAttention):
        def _compute_attention(self, query, key, value, *args, **kwargs):
            return 2.0 * value, None

    class Renamed(keras.layers.MultiHeadAttention):
        pass

    x = tf.random.stateless_normal([1, 5, 16], [1, 2])
    own, renamed = Own(2, 8), Renamed(2, 8)
    expected = own(x, x), renamed(x, x)
    with tf_ops.enable():
        actual = own(x, x), renamed(x, x)
    np.testing.assert_array_equal(actual[0], expected[0])
    np.testing.assert_allclose(actual[1], expected[1], rtol=1e-4, atol=1e-5)
    assert tf_ops.coverage()["dot_product_attention"] == {"served": 1, "fell_through": {}}


def test_functional_models_run_both_ways():
    q = keras.Input([SEQ, HEADS, DIM])
    model = keras.Model(q, keras.ops.rms_normalization(keras.ops.dot_product_attention(q, q, q)))
    x = tf.random.stateless_normal([2, SEQ, HEADS, DIM], [1, 2])
    expected = model(x)
    with tf_ops.enable():
        np.testing.assert_allclose(model(x), expected, rtol=1e-4, atol=1e-5)
    assert {k: v["served"] for k, v in tf_ops.coverage().items()} == {
        "dot_product_attention": 1,
        "rms_normalization": 1,
    }


def python(code, **environment):
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **environment}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_the_environment_enables_it_at_import():
    code = "import tf_ops, keras, tensorflow as tf"
    code += "; keras.layers.RMSNormalization()(tf.ones([1, 2])); print(tf_ops.coverage())"
    assert "rms_normalization: 1 served" in python(code, TF_OPS_ENABLE="1")
    assert "rms_normalization" not in python(code, TF_OPS_ENABLE="0")


def test_keras_hub_imported_later_is_enabled_too():
    pytest.importorskip("keras_hub", reason="KerasHub is not installed: pip install keras-hub")
    code = """if True:
        import sys, tf_ops
        tf_ops.enable()
        assert "keras_hub" not in sys.modules
        import keras_hub
        from keras_hub.src.models.llama.llama_attention import LlamaAttention as Attention
        print("replaced:", hasattr(Attention._compute_attention, "tf_ops_stock"))
        tf_ops.disable()
        print("restored:", not hasattr(Attention._compute_attention, "tf_ops_stock"))
    """
    output = python(code)
    assert "replaced: True" in output and "restored: True" in output


def test_another_backend_is_refused(monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(RuntimeError, match="Keras's backend is jax, not tensorflow"):
        tf_ops.enable()
    monkeypatch.undo()
    assert not is_enabled()
