# SPDX-License-Identifier: Apache-2.0
"""Layers against the stock layers of the same name, with the same weights."""

import subprocess
import sys

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

import tf_ops
from tests.philox import kept_pairs
from tf_ops import layers
from tf_ops.testing import error

# Stock layers that drop masks say so, and so do ours.
pytestmark = pytest.mark.filterwarnings("ignore:.*destroy the mask")

POLICIES = ["float32", "mixed_bfloat16", "mixed_float16", "bfloat16"]
BATCH, SEQ_Q, SEQ_K = 2, 37, 53

MHA = ("MultiHeadAttention", {"num_heads": 4, "key_dim": 8})
GQA = ("GroupQueryAttention", {"head_dim": 8, "num_query_heads": 4, "num_key_value_heads": 2})


def pair(name, config, policy="float32"):
    """Our layer and the stock one."""
    return [getattr(home, name)(**config, dtype=policy) for home in (layers, keras.layers)]


def copy_weights(source, *targets):
    """Gives random values to the weights of `source`, those of gamma and beta included."""
    rng = np.random.default_rng(0)
    values = [0.3 * rng.standard_normal(w.shape) + 0.1 for w in source.weights]
    for layer in (source, *targets):
        layer.set_weights(values)


def draw(*shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [tf.constant(rng.standard_normal(shape), tf.float32) for shape in shapes]


def random_mask(*shape, seed=0):
    """A mask that leaves something visible in each row."""
    mask = np.random.default_rng(seed).random(shape) < 0.7
    mask[..., 0] = True
    return tf.constant(mask)


def results(layer, inputs, masks, cotangent, **kwargs):
    """The output of a layer, and its gradients by inputs and weights."""
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        carriers = [tf.identity(x) for x in inputs]
        for x, mask in zip(carriers, masks):
            x._keras_mask = mask
        y = layer(*carriers, **kwargs)
        loss = tf.reduce_sum(y * tf.cast(cotangent, y.dtype))
    weights = [w.value for w in layer.trainable_weights]
    return [y], tape.gradient(loss, [*inputs, *weights])


def check_layer(name, config, inputs, policy="float32", masks=(), compiled=False, **kwargs):
    """Compares our layer with the stock one by the error rule, stock in float64 the reference."""
    ours, stock = pair(name, config, policy)
    (_, exact) = pair(name, config, "float64")
    for layer in (ours, stock, exact):
        layer(*inputs, **kwargs)
    copy_weights(ours, stock, exact)
    assert ours.compute_dtype == stock.compute_dtype

    (cotangent,) = draw(ours(*inputs, **kwargs).shape, seed=1)
    if masks and masks[0] is not None:
        # Rows that see nothing are 0 here and a mean in stock Keras.
        cotangent *= tf.cast(masks[0], tf.float32)[..., None]
    run = lambda layer: results(layer, inputs, masks, cotangent, **kwargs)
    actual = tf.function(run, jit_compile=True)(ours) if compiled else run(ours)
    stock, exact = run(stock), run(exact)
    if masks and masks[0] is not None:
        for values in (actual[0], stock[0], exact[0]):
            values[0] = values[0][masks[0]]

    ulp = float(ml_dtypes.finfo(ours.compute_dtype).eps)
    for order, (ratio, ulps) in enumerate([(2, 4), (3, 8)]):
        for i, (a, s, e) in enumerate(zip(actual[order], stock[order], exact[order], strict=True)):
            assert a.dtype == s.dtype and a.shape == s.shape
            largest = np.abs(e).max(initial=0)
            if largest < 1e-9:
                # Softmax ignores the bias of the keys: its gradient is a sum that cancels.
                largest = max(np.abs(x).max(initial=0) for x in exact[order])
            allowed = ratio * error(s, e) + ulps * ulp * largest
            assert error(a, e) <= allowed, f"order {order}, number {i}"


def ops_of(layer, *inputs, **kwargs):
    """The operations of a layer's graph."""
    function = tf.function(lambda *x: layer(*x, **kwargs))
    return function.get_concrete_function(*inputs).graph.get_operations()


def is_fused(layer, *inputs, **kwargs):
    return any(op.type.startswith("TfOps>") for op in ops_of(layer, *inputs, **kwargs))


# Attention.

QUERY, VALUE = (BATCH, SEQ_Q, 12), (BATCH, SEQ_K, 12)
PADDING = tf.sequence_mask([SEQ_K, 20], SEQ_K)
HOLES = random_mask(BATCH, SEQ_K)

CASES = {
    "plain": {},
    "causal": {"use_causal_mask": True},
    "mask_BTS": {"attention_mask": random_mask(BATCH, SEQ_Q, SEQ_K)},
    "mask_TS": {"attention_mask": random_mask(SEQ_Q, SEQ_K)},
    "mask_B1S": {"attention_mask": random_mask(BATCH, 1, SEQ_K)},
    "mask_BNTS": {"attention_mask": random_mask(BATCH, 4, SEQ_Q, SEQ_K)},
    "mask_int": {"attention_mask": tf.cast(random_mask(BATCH, SEQ_Q, SEQ_K), tf.int32)},
    "padding": {"masks": (None, PADDING)},
    "holes_and_causal": {"masks": (None, HOLES), "use_causal_mask": True},
    "value_mask": {"value_mask": PADDING},
    "key_mask": {"key_mask": HOLES, "value_mask": PADDING},
    "query_mask": {"masks": (random_mask(BATCH, SEQ_Q), None)},
    "both_masks": {"masks": (random_mask(BATCH, SEQ_Q), PADDING), "use_causal_mask": True},
    "padding_and_mask": {
        "masks": (None, PADDING),
        "attention_mask": random_mask(BATCH, SEQ_Q, SEQ_K),
        "use_causal_mask": True,
    },
    "window": {"config": {"sliding_window": 40}},
    "causal_window_padding": {
        "config": {"sliding_window": 9},
        "masks": (None, tf.sequence_mask([SEQ_K, 30], SEQ_K)),
        "use_causal_mask": True,
    },
    "gate": {"config": {"use_gate": True}},
    "no_bias": {"config": {"use_bias": False}},
    "dropout_at_inference": {"config": {"dropout": 0.4}, "training": False},
}


@pytest.mark.parametrize("layer", [MHA, GQA], ids=lambda layer: layer[0])
@pytest.mark.parametrize("case", CASES)
def test_attention_is_that_of_stock(layer, case):
    (name, config), options = layer, dict(CASES[case])
    config = config | options.pop("config", {})
    check_layer(name, config, draw(QUERY, VALUE), **options)


@pytest.mark.parametrize("layer", [MHA, GQA], ids=lambda layer: layer[0])
@pytest.mark.parametrize("policy", POLICIES[1:])
def test_attention_policies(layer, policy):
    masks = (None, PADDING)
    check_layer(*layer, draw(QUERY, VALUE), policy, masks, use_causal_mask=True)


@pytest.mark.parametrize("layer", [MHA, GQA], ids=lambda layer: layer[0])
@pytest.mark.parametrize("case", ["causal", "both_masks", "padding_and_mask"])
def test_attention_under_xla(layer, case):
    check_layer(*layer, draw(QUERY, VALUE), compiled=True, **CASES[case])


def test_dimensions_of_multi_head_attention():
    config = {"num_heads": 3, "key_dim": 8, "value_dim": 20, "output_shape": (4, 5)}
    check_layer("MultiHeadAttention", config, draw(QUERY, VALUE, VALUE))


def test_one_key_value_head():
    """MQA raises."""
    config = {"head_dim": 8, "num_query_heads": 4, "num_key_value_heads": 1}
    check_layer("GroupQueryAttention", config, draw(QUERY, VALUE))


@pytest.mark.parametrize("name, config", [MHA, GQA], ids=["mha", "gqa"])
def test_what_the_stock_computation_serves(name, config):
    """Attention scores, float64, a dropout of everything: the same bits as stock."""
    query, value = draw(QUERY, VALUE)
    scores = {"return_attention_scores": True}
    cases = [
        (config, "float32", scores),
        (config, "float32", scores | {"use_causal_mask": True, "value_mask": PADDING}),
        (config | {"dropout": 1.0}, "float32", {"training": True}),
        (config, "float64", {"use_causal_mask": True}),
    ]
    for changed, policy, kwargs in cases:
        ours, stock = pair(name, changed, policy)
        assert not is_fused(ours, query, value, **kwargs)
        stock(query, value)
        copy_weights(ours, stock)
        for a, b in zip(
            tf.nest.flatten(ours(query, value, **kwargs)),
            tf.nest.flatten(stock(query, value, **kwargs)),
            strict=True,
        ):
            np.testing.assert_array_equal(a, b)


def test_other_ranks_and_axes():
    x = tf.reshape(draw((2, 4, 5, 12))[0], [2, 4, 5, 12])
    for axes in (None, (1,), (2,)):
        ours, stock = pair("MultiHeadAttention", MHA[1] | {"attention_axes": axes})
        ours(x, x), stock(x, x)
        copy_weights(ours, stock)
        np.testing.assert_array_equal(ours(x, x), stock(x, x))


def test_heads_beyond_the_kernels_limit():
    check_layer("MultiHeadAttention", {"num_heads": 1, "key_dim": 260}, draw(QUERY, VALUE))


@pytest.mark.parametrize("name, config", [MHA, GQA], ids=["mha", "gqa"])
def test_a_layer_with_dropout_uses_the_kernel(name, config):
    """A layer with dropout never reaches the fused kernel, even at inference."""
    inputs = draw(QUERY, VALUE)
    layer = getattr(layers, name)(**config, dropout=0.3)
    for training, rate in ((None, 0.0), (False, 0.0), (True, 0.3)):
        operations = ops_of(layer, *inputs, training=training)
        (attention,) = [op for op in operations if op.type == "TfOps>DotProductAttention"]
        np.testing.assert_allclose(attention.get_attr("dropout_rate"), rate, 1e-6)


@pytest.mark.parametrize("name, config", [MHA, GQA], ids=["mha", "gqa"])
def test_dropout_while_training(name, config):
    """What stock computes when it drops the same weights; each call has a seed of its own."""
    config = config | {"dropout": 0.3, "seed": 5}
    ours, stock = pair(name, config)
    query, value = draw(QUERY, VALUE)
    for layer in (ours, stock):
        layer(query, value)
    copy_weights(ours, stock)
    drawn = iter([[5, 0], [5, 1]])
    stock._dropout_layer.call = lambda scores, training: (
        scores * kept_pairs(next(drawn), 0.3, scores.shape) / 0.7
    )
    outputs = []
    for _ in range(2):
        a, b = ours(query, value, training=True), stock(query, value, training=True)
        np.testing.assert_allclose(a, b, 1e-4, 1e-5)
        outputs.append(a)
    assert np.abs(outputs[0] - outputs[1]).max() > 0.01
    (state,) = ours.non_trainable_variables
    np.testing.assert_array_equal(state, [5, 2])


@pytest.mark.parametrize("name, config", [MHA, GQA], ids=["mha", "gqa"])
def test_a_window_is_no_mask(name, config):
    layer = getattr(layers, name)(**config, sliding_window=9)
    operations = ops_of(layer, *draw(QUERY, VALUE), use_causal_mask=True)
    (attention,) = [op for op in operations if op.type == "TfOps>DotProductAttention"]
    assert attention.get_attr("window_left") == 8
    assert attention.inputs[4].shape == [0]


@pytest.mark.parametrize("name, config", [MHA, GQA], ids=["mha", "gqa"])
def test_causal_and_padding_masks_are_not_expanded(name, config):
    layer = getattr(layers, name)(**config)
    query, value = draw(QUERY, VALUE)
    masks = {"query_mask": random_mask(BATCH, SEQ_Q), "value_mask": HOLES, "key_mask": PADDING}
    operations = ops_of(layer, query, value, use_causal_mask=True, **masks)
    for op in operations:
        for output in op.outputs:
            assert output.shape[-2:].as_list() != [SEQ_Q, SEQ_K], op
    (attention,) = [op for op in operations if op.type == "TfOps>DotProductAttention"]
    assert attention.get_attr("is_causal")
    assert attention.inputs[4].shape == [BATCH, 1, 1, SEQ_K]


def test_keys_and_values_are_not_repeated():
    layer = layers.GroupQueryAttention(**GQA[1])
    operations = ops_of(layer, *draw(QUERY, VALUE))
    (attention,) = [op for op in operations if op.type == "TfOps>DotProductAttention"]
    assert attention.inputs[1].shape[2] == GQA[1]["num_key_value_heads"]


@pytest.mark.parametrize("name, config", [MHA, GQA], ids=["mha", "gqa"])
def test_a_query_that_sees_no_key(name, config):
    """It gets 0 from the attention; a padded query counts as such."""
    layer = getattr(layers, name)(**config, bias_initializer="ones")
    query, value = draw(QUERY, VALUE)
    query._keras_mask = tf.sequence_mask([SEQ_Q, 5], SEQ_Q)
    y = layer(query, value, value_mask=tf.sequence_mask([0, SEQ_K], SEQ_K))
    np.testing.assert_array_equal(y[0], tf.ones_like(y[0]))  # The output's bias alone.
    np.testing.assert_array_equal(y[1, 5:], tf.ones_like(y[1, 5:]))
    assert np.abs(y[1, :5] - 1).min(axis=(0, 1)) > 0


@pytest.mark.parametrize("name, config", [MHA, GQA], ids=["mha", "gqa"])
def test_masks_after_the_layer(name, config):
    after = []
    for layer in pair(name, config):
        query, value = draw(QUERY, VALUE)
        query._keras_mask, value._keras_mask = random_mask(BATCH, SEQ_Q), PADDING
        y = layer(query, value)
        after.append([getattr(x, "_keras_mask", None) for x in (y, query, value)])
    for ours, stock in zip(*after):
        assert (ours is None) == (stock is None)
        if ours is not None:
            np.testing.assert_array_equal(ours, stock)


def test_flash_attention_is_accepted():
    query, value = draw(QUERY, VALUE)
    for name, config in (MHA, GQA):
        assert is_fused(getattr(layers, name)(**config, flash_attention=True), query, value)


# Normalization.

NORMALIZATIONS = {
    "rms": ("RMSNormalization", {}, (3, 5, 40)),
    "rms_epsilon": ("RMSNormalization", {"epsilon": 0.1}, (3, 33)),
    "rms_axes": ("RMSNormalization", {"axis": [-2, -1]}, (3, 5, 7)),
    "rms_middle": ("RMSNormalization", {"axis": 1}, (3, 7, 7)),
    "layer": ("LayerNormalization", {}, (3, 5, 40)),
    "layer_axes": ("LayerNormalization", {"axis": [1, 2]}, (3, 5, 7)),
    "layer_middle": ("LayerNormalization", {"axis": 1}, (3, 5, 7)),
    "layer_apart": ("LayerNormalization", {"axis": [1, 3]}, (2, 5, 3, 7)),
    "layer_no_center": ("LayerNormalization", {"center": False, "epsilon": 0.1}, (3, 40)),
    "layer_no_scale": ("LayerNormalization", {"scale": False}, (3, 40)),
    "group": ("GroupNormalization", {"groups": 4}, (3, 5, 2, 8)),
    "group_first": ("GroupNormalization", {"groups": 2, "axis": 1}, (3, 6, 5)),
    "group_each": ("GroupNormalization", {"groups": -1, "center": False}, (3, 5, 7)),
    "group_neither": (
        "GroupNormalization",
        {"groups": 1, "center": False, "scale": False, "epsilon": 0.1},
        (3, 40),
    ),
    "layer_neither": ("LayerNormalization", {"center": False, "scale": False}, (3, 40)),
}


@pytest.mark.parametrize("case", NORMALIZATIONS)
def test_normalization_is_that_of_stock(case):
    name, config, shape = NORMALIZATIONS[case]
    check_layer(name, config, draw(shape))
    layer = getattr(layers, name)(**config)
    assert is_fused(layer, *draw(shape))


@pytest.mark.parametrize("name", ["RMSNormalization", "LayerNormalization", "GroupNormalization"])
@pytest.mark.parametrize("policy", POLICIES[1:])
def test_normalization_policies(name, policy):
    config = {"groups": 4} if name == "GroupNormalization" else {}
    check_layer(name, config, draw((3, 5, 40)), policy)
    # The input is the caller's dtype where stock does not cast it.
    check_layer(name, config, [tf.cast(x, tf.bfloat16) for x in draw((3, 5, 40))], policy)


@pytest.mark.parametrize("name", ["RMSNormalization", "LayerNormalization"])
def test_normalization_under_xla(name):
    check_layer(name, {}, draw((3, 5, 40)), compiled=True)


@pytest.mark.filterwarnings("ignore:.*rms_scaling")
@pytest.mark.parametrize(
    "name, config, policy",
    [
        ("RMSNormalization", {}, "float64"),
        ("LayerNormalization", {}, "float64"),
        ("GroupNormalization", {"groups": 1}, "float64"),
        ("LayerNormalization", {"rms_scaling": True}, "float32"),
        ("LayerNormalization", {"axis": [-1, 1]}, "float32"),  # Weights laid out in that order.
    ],
)
def test_normalization_served_by_stock(name, config, policy):
    (x,) = draw((3, 5, 5))
    x = tf.cast(x, "float64" if policy == "float64" else "float32")
    ours, stock = pair(name, config, policy)
    assert not is_fused(ours, x)
    stock(x)
    copy_weights(ours, stock)
    np.testing.assert_array_equal(ours(x), stock(x))


def test_normalization_passes_masks_on():
    for layer in pair("LayerNormalization", {}):
        (x,) = draw((BATCH, SEQ_K, 8))
        x._keras_mask = PADDING
        np.testing.assert_array_equal(layer(x)._keras_mask, PADDING)


# Configuration, files, models.

ALL = [
    (*MHA, {"value_dim": 6, "dropout": 0.1, "sliding_window": 4, "seed": 7, "use_bias": False}),
    (*GQA, {"dropout": 0.1, "use_gate": True, "kernel_regularizer": "l2"}),
    ("RMSNormalization", {}, {"axis": [-1], "epsilon": 1e-4}),
    ("LayerNormalization", {}, {"axis": [-2, -1], "center": False}),
    ("GroupNormalization", {"groups": 4}, {"axis": 1, "scale": False}),
]


@pytest.mark.parametrize("name, config, more", ALL, ids=[case[0] for case in ALL])
def test_config(name, config, more):
    ours, stock = pair(name, config | more, "mixed_bfloat16")
    assert type(ours).__name__ == type(stock).__name__
    assert issubclass(type(ours), type(stock)) and ours.supports_jit
    config = ours.get_config()
    assert config | {"name": ""} == stock.get_config() | {"name": ""}
    again = type(ours).from_config(config)
    assert again.get_config() == config
    serialized = keras.saving.serialize_keras_object(ours)
    assert serialized["registered_name"] == f"tf_ops>{type(ours).__name__}"
    again = keras.saving.deserialize_keras_object(serialized)
    assert type(again) is type(ours) and again.get_config() == config


def language_model(home, policy="float32", dropout=0.0):
    """A model of every layer, with padding that reaches the attention."""
    tokens = keras.Input((None,), dtype="int32")
    x = keras.layers.Embedding(11, 16, mask_zero=True, dtype=policy)(tokens)
    add = lambda x, y: keras.layers.Add(dtype=policy)([x, y])
    y = home.LayerNormalization(dtype=policy)(x)
    attention = home.GroupQueryAttention(8, 4, 2, dropout=dropout, seed=1, dtype=policy)
    x = add(x, attention(y, y, use_causal_mask=True))
    y = home.LayerNormalization(dtype=policy)(x)
    attention = home.MultiHeadAttention(2, 8, dropout=dropout, seed=2, dtype=policy)
    x = add(x, attention(y, y, use_causal_mask=True))
    x = home.RMSNormalization(dtype=policy)(x)  # Masks end here, as in stock Keras.
    return keras.Model(tokens, keras.layers.Dense(11, dtype="float32")(x))


def batches():
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 11, (8, 13))
    tokens[4:, 9:] = 0
    return tokens, rng.integers(0, 11, (8, 13))


def test_weights_files_load_both_ways(tmp_path):
    tokens, _ = batches()
    path = str(tmp_path / "model.weights.h5")
    for source, target in ((layers, keras.layers), (keras.layers, layers)):
        source, target = language_model(source), language_model(target)
        copy_weights(source)
        source.save_weights(path)
        target.load_weights(path)
        for a, b in zip(source.weights, target.weights, strict=True):
            np.testing.assert_array_equal(a, b)
        valid = tokens > 0
        a, b = source(tokens), target(tokens)
        np.testing.assert_allclose(a[valid], b[valid], 1e-4, 1e-5)


def test_padding_of_an_embedding_reaches_the_kernel():
    tokens, _ = batches()
    operations = ops_of(language_model(layers), tf.constant(tokens))
    masks = [op.inputs[4] for op in operations if op.type == "TfOps>DotProductAttention"]
    assert [mask.shape for mask in masks] == [(8, 1, 1, 13)] * 2


def test_saved_model_loads_in_a_fresh_process(tmp_path):
    """All that it takes is `import tf_ops`."""
    tokens, _ = batches()
    model = language_model(layers)
    model.save(tmp_path / "model.keras")
    np.save(tmp_path / "tokens.npy", tokens)
    code = (
        "import keras, numpy as np, tensorflow as tf, tf_ops\n"
        "tf.config.experimental.enable_tensor_float_32_execution(False)\n"
        "model = keras.saving.load_model('model.keras')\n"
        "assert type(model.layers[2]).__module__.startswith('tf_ops.')\n"
        "np.save('logits.npy', model(np.load('tokens.npy')))\n"
    )
    path = str(tf.io.gfile.join(tf_ops.__path__[0], ".."))
    command = "import sys; sys.path.insert(0, sys.argv[1]); exec(sys.argv[2])"
    subprocess.run([sys.executable, "-c", command, path, code], cwd=tmp_path, check=True)
    np.testing.assert_allclose(np.load(tmp_path / "logits.npy"), model(tokens), 1e-5, 1e-5)


def fitted(home, policy, jit_compile, dropout):
    """The losses of a few steps, and the weights after them."""
    model = language_model(home, policy, dropout)
    copy_weights(model)
    model.compile(
        keras.optimizers.SGD(0.1),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=jit_compile,
    )
    tokens, labels = batches()
    # What comes after padded queries differs from stock.
    steps = {"batch_size": 4, "epochs": 2, "shuffle": False, "verbose": 0}
    history = model.fit(tokens, labels, sample_weight=1.0 * (tokens > 0), **steps)
    seeds = [w.numpy() for w in model.non_trainable_variables]
    return history.history["loss"], [w.numpy() for w in model.trainable_weights], seeds


@pytest.mark.parametrize("jit_compile", [False, True, "auto"])
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_fit(policy, jit_compile):
    ours, stock = (fitted(home, policy, jit_compile, 0.0) for home in (layers, keras.layers))
    tolerance = 1e-4 if policy == "float32" else 3e-2
    np.testing.assert_allclose(ours[0], stock[0], tolerance)
    for a, b in zip(ours[1], stock[1], strict=True):
        np.testing.assert_allclose(a, b, tolerance, tolerance)


def test_fit_with_dropout():
    """Other weights are dropped than in stock, and the seeds move on as in stock."""
    ours, stock = (fitted(home, "float32", False, 0.3) for home in (layers, keras.layers))
    np.testing.assert_allclose(ours[0], stock[0], 0.05)
    assert len(ours[2]) == 2
    for a, b in zip(ours[2], stock[2], strict=True):
        np.testing.assert_array_equal(a, b)
    again, compiled = (fitted(layers, "float32", xla, 0.3) for xla in (False, True))
    # Other masks would differ by far more than stock's sums on a GPU, which have no fixed order.
    for a, b in zip(tf.nest.flatten(again), tf.nest.flatten(ours), strict=True):
        np.testing.assert_allclose(a, b, 1e-5, 1e-6)
    np.testing.assert_allclose(compiled[0], ours[0], 1e-4)


# A packed input, a pair, and every dtype: against Keras in float64.
@pytest.mark.parametrize("policy", [*POLICIES, "float64"])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu", "sigmoid"])
def test_gated_linear_unit(activation, policy):
    gate, up = draw((3, 5, 8), (3, 5, 8))
    name, approximate = activation.removesuffix("_tanh"), activation == "gelu_tanh"
    options = {"approximate": approximate} if name == "gelu" else {}
    layer = layers.GatedLinearUnit(activation, dtype=policy)
    gate, up = (tf.cast(x, layer.compute_dtype) for x in (gate, up))
    wide = [tf.cast(x, tf.float64) for x in (gate, up)]
    expected = getattr(keras.ops, name)(wide[0], **options) * wide[1]
    for y in [layer(gate, up), layer(tf.concat([gate, up], -1))]:
        assert y.dtype == layer.compute_dtype
        ulp = float(ml_dtypes.finfo(y.dtype.as_numpy_dtype).eps)
        assert error(y, expected) <= 4 * ulp * np.abs(expected).max()


def test_gated_linear_unit_in_a_saved_model(tmp_path):
    x = keras.Input([None, 6])
    gate, up = (keras.layers.Dense(4)(x) for _ in range(2))
    both = layers.GatedLinearUnit("gelu")(gate, up)
    y = layers.GatedLinearUnit(name="packed")(keras.layers.Dense(10)(both))
    assert both.shape == (None, None, 4) and y.shape == (None, None, 5)
    model = keras.Model(x, y)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert loaded.get_layer("packed").get_config()["activation"] == "silu"
    (value,) = draw((2, 3, 6))
    np.testing.assert_array_equal(model(value), loaded(value))


def test_gated_linear_unit_of_no_such_activation():
    with pytest.raises(ValueError, match="activation is 'swish'; it must be one of silu"):
        layers.GatedLinearUnit("swish")


@pytest.mark.parametrize("policy", [*POLICIES, "float64"])
@pytest.mark.parametrize("rotary_dim", [None, 6])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_embedding(interleaved, rotary_dim, policy):
    options = dict(theta=100.0, rotary_dim=rotary_dim, interleaved=interleaved, scaling_factor=2.0)
    layer = layers.RotaryEmbedding(**options, dtype=policy)
    exact = layers.RotaryEmbedding(**options, dtype="float64")
    query, key = (tf.cast(x, layer.compute_dtype) for x in draw((2, 5, 4, 8), (2, 5, 2, 8)))
    for positions in [None, tf.range(5) + 3, tf.reshape(tf.range(10), [2, 5])]:
        both = layer((query, key), positions)
        for y, x in zip([*both, layer(query, positions)], (query, key, query)):
            assert y.dtype == layer.compute_dtype
            expected = exact(tf.cast(x, tf.float64), positions)
            ulp = float(ml_dtypes.finfo(y.dtype.as_numpy_dtype).eps)
            assert error(y, expected) <= 4 * ulp * np.abs(expected).max()
    # The formula of the layer itself is that of the kernel.
    actual = tf_ops.rotary_embedding(tf.cast(query, tf.float32), **options)
    np.testing.assert_allclose(actual, exact(tf.cast(query, tf.float64)), atol=1e-5)


@pytest.mark.parametrize("jit_compile", [False, True])
def test_rotary_embedding_in_a_saved_model(jit_compile, tmp_path):
    x, positions = keras.Input([None, 3, 8]), keras.Input([None], dtype="int32")
    query, key = layers.RotaryEmbedding(theta=100.0)((x, x[:, :, :1]), positions)
    assert query.shape == (None, None, 3, 8) and key.shape == (None, None, 1, 8)
    model = keras.Model([x, positions], layers.RotaryEmbedding(name="one")(query * key))
    model.compile(jit_compile=jit_compile)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert loaded.get_layer("one").get_config()["theta"] == 10000.0
    inputs = [*draw((2, 5, 3, 8)), tf.constant([[0, 1, 2, 3, 9], [5, 6, 7, 8, 9]])]
    expected = model(inputs)
    np.testing.assert_array_equal(expected, loaded(inputs))
    np.testing.assert_allclose(model.predict(inputs, verbose=0), expected, rtol=1e-5, atol=1e-5)


def test_symbolic_shapes():
    query, value = keras.Input((None, 12)), keras.Input((7, 12))
    for ours, stock in (
        pair(*MHA),
        pair(MHA[0], MHA[1] | {"value_dim": 24, "output_shape": 5}),
        pair(*GQA),
    ):
        assert ours(query, value).shape == stock(query, value).shape
    for ours, stock in (pair("RMSNormalization", {}), pair("LayerNormalization", {})):
        assert ours(query).shape == stock(query).shape == (None, None, 12)


# Functions of KerasTensors.


def test_functions_build_models_that_save_and_load(tmp_path):
    query, key, value = keras.Input((None, 4, 8)), keras.Input((7, 2, 8)), keras.Input((7, 2, 24))
    lengths = keras.Input((), dtype="int32")
    mask = np.ones((1, 1, 1, 7), bool)
    mask[..., 3] = False
    output, lse = tf_ops.dot_product_attention(
        query,
        key,
        value,
        mask=mask,
        is_causal=True,
        attn_logits_soft_cap=3.0,
        key_value_seq_lengths=lengths,
        return_lse=True,
    )
    # The width is that of the values, not of the queries.
    assert output.shape == (None, None, 4, 24) and lse.shape == (None, 4, None)
    output = tf_ops.rms_normalization(output, axis=(-1,), epsilon=1e-3)
    output, s = tf_ops.rms_normalization(output, residual=output, return_residual=True)
    model = keras.Model([query, key, value, lengths], [output, s, lse])
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")

    inputs = [x.numpy() for x in draw((2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 24))]
    inputs.append(np.int32([3, 7]))
    options = {"mask": mask, "is_causal": True, "attn_logits_soft_cap": 3.0, "return_lse": True}
    o, lse = tf_ops.dot_product_attention(*inputs[:3], key_value_seq_lengths=inputs[3], **options)
    o = tf_ops.rms_normalization(o, axis=(-1,), epsilon=1e-3)
    expected = (*tf_ops.rms_normalization(o, residual=o, return_residual=True), lse)
    for built in (model, again):
        for a, b in zip(built(inputs), expected, strict=True):
            np.testing.assert_array_equal(a, b)
        names = [operation.name for operation in built.operations]
        assert names.count("dot_product_attention") <= len(names) == len(set(names))


def test_rotary_and_gated_functions_build_models_that_save_and_load(tmp_path):
    query, key = keras.Input((None, 4, 8)), keras.Input((None, 2, 8))
    positions = keras.Input((None,), dtype="int32")
    rotated = tf_ops.rotary_embedding((query, key), positions, interleaved=True)
    outputs = [*rotated, tf_ops.gated_linear_unit(rotated[0], activation="gelu")]
    assert outputs[2].shape == (None, None, 4, 4)
    model = keras.Model([query, key, positions], outputs)
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    inputs = [x.numpy() for x in draw((2, 5, 4, 8), (2, 5, 2, 8))]
    inputs.append(np.int32([[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]))
    q, k = tf_ops.rotary_embedding(tuple(inputs[:2]), inputs[2], interleaved=True)
    expected = q, k, tf_ops.gated_linear_unit(q, activation="gelu")
    for built in (model, again):
        for a, b in zip(built(inputs), expected, strict=True):
            np.testing.assert_array_equal(a, b)


def test_errors_of_symbolic_calls_name_the_argument():
    query, key = keras.Input((5, 8, 16)), keras.Input((7, 3, 16))
    with pytest.raises(ValueError, match="8 heads, key and value 3"):
        tf_ops.dot_product_attention(query, key, key)


def test_import_leaves_keras_and_devices_alone():
    code = (
        "import sys, tensorflow as tf\n"
        "had = 'keras' in sys.modules\n"
        "import tf_ops\n"
        "assert ('keras' in sys.modules) == had\n"
        "assert {'layers', 'list_ops', 'rms_normalization'} <= set(dir(tf_ops))\n"
        "from tensorflow.python.eager import context\n"
        "assert context.context()._context_handle is None\n"
    )
    path = str(tf.io.gfile.join(tf_ops.__path__[0], ".."))
    subprocess.run([sys.executable, "-c", code], cwd=path, check=True)
