# SPDX-License-Identifier: Apache-2.0
"""The decoder block against the obvious formula, and with its cache against itself without."""

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from tf_ops.layers import TransformerDecoderBlock
from tf_ops.testing import error

BATCH, SEQ, FEATURES, MAX_SEQ = 2, 13, 24, 20
CONFIG = {"head_dim": 8, "num_query_heads": 4, "num_key_value_heads": 2, "intermediate_dim": 40}
ODD = {
    "activation": "gelu_tanh",
    "local_window_size": 4,
    "attn_logits_soft_cap": 2.0,
    "theta": 100.0,
    "rotary_dim": 6,
    "interleaved": True,
    "scaling_factor": 2.0,
    "epsilon": 1e-3,
    "use_bias": True,
}
POLICIES = ["float32", "mixed_bfloat16", "mixed_float16", "bfloat16"]


def make_block(policy="float32", **config):
    """A block with random weights, the same for each policy."""
    block = TransformerDecoderBlock(**{**CONFIG, **config}, dtype=policy)
    block.build((None, None, FEATURES))
    random = np.random.default_rng(0)
    block.set_weights([0.3 * random.standard_normal(w.shape) + 0.1 for w in block.weights])
    return block


def draw(*shape, dtype="float32", seed=0):
    return tf.cast(np.random.default_rng(seed).standard_normal(shape), dtype)


def make_cache(block, fill=np.nan):
    """Keys and values that nothing may read before they are written."""
    shape = [BATCH, MAX_SEQ, block.num_key_value_heads, block.head_dim]
    return tuple(tf.Variable(tf.fill(shape, tf.cast(fill, block.compute_dtype))) for _ in range(2))


def formula(block, x, mask=None):
    """The block in stock TensorFlow, in the dtype of x."""
    weight = lambda layer: [tf.cast(w.value, x.dtype) for w in layer.weights]

    def norm(layer, x):
        (scale,) = weight(layer)
        return x * tf.math.rsqrt(tf.reduce_mean(x * x, -1, keepdims=True) + block.epsilon) * scale

    def dense(layer, x):
        kernel, *bias = weight(layer)
        return tf.tensordot(x, kernel, 1) + (bias[0] if bias else tf.zeros([], x.dtype))

    def rotate(x):
        size = block.rotary_dim or block.head_dim
        frequency = block.theta ** (-np.arange(size // 2) * 2 / size)
        angles = np.arange(x.shape[1])[:, None, None] / block.scaling_factor * frequency
        cos, sin = tf.cast(np.cos(angles), x.dtype), tf.cast(np.sin(angles), x.dtype)
        a, b = (
            (x[..., :size:2], x[..., 1:size:2])
            if block.interleaved
            else (x[..., : size // 2], x[..., size // 2 : size])
        )
        a, b = a * cos - b * sin, a * sin + b * cos
        turned = tf.stack([a, b], -1) if block.interleaved else tf.stack([a, b], -2)
        return tf.concat([tf.reshape(turned, [*x.shape[:3], size]), x[..., size:]], -1)

    heads = lambda x: tf.reshape(x, [*x.shape[:2], -1, block.head_dim])
    y = norm(block.attention_norm, x)
    query, key, value = (heads(dense(layer, y)) for layer in (block.query, block.key, block.value))
    groups = block.num_query_heads // block.num_key_value_heads
    key, value = tf.repeat(rotate(key), groups, 2), tf.repeat(value, groups, 2)
    logits = tf.einsum("bqhd,bkhd->bhqk", rotate(query), key) / block.head_dim**0.5
    if cap := block.attn_logits_soft_cap:
        logits = cap * tf.tanh(logits / cap)
    before = np.arange(x.shape[1])[:, None] - np.arange(x.shape[1])
    visible = (before >= 0) & (before <= (block.local_window_size or np.inf))
    visible = visible if mask is None else visible & mask[:, None, None, :]
    weights = tf.nn.softmax(tf.where(visible, logits, tf.cast(-1e4, x.dtype)))
    y = tf.reshape(tf.einsum("bhqk,bkhd->bqhd", weights, value), [*x.shape[:2], -1])
    x += dense(block.output_projection, y)
    y = norm(block.mlp_norm, x)
    gate = dense(block.gate, y)
    gate = tf.nn.silu(gate) if block.activation == "silu" else tf.nn.gelu(gate, approximate=True)
    return x + dense(block.down, gate * dense(block.up, y))


def check(actual, stock, exact, ratio=2, ulps=4):
    """The error rule."""
    ulp = float(ml_dtypes.finfo(actual.dtype.as_numpy_dtype).eps)
    allowed = ratio * error(stock, exact) + ulps * ulp * np.abs(exact).max()
    assert error(actual, exact) <= allowed


def generate_states(block, x, cache, prompt, jit_compile=None):
    """The outputs of the block, a prompt and then token by token."""
    step = lambda x, positions: block(x, cache=cache, positions=positions)
    if jit_compile is not None:
        step = tf.function(step, jit_compile=jit_compile, reduce_retracing=True)
    y = [step(x[:, :prompt], tf.zeros([BATCH], tf.int32))]
    y += [step(x[:, i : i + 1], tf.fill([BATCH], i)) for i in range(prompt, x.shape[1])]
    return tf.concat(y, 1)


# Values and gradients.


@pytest.mark.parametrize("config", [{}, ODD], ids=["plain", "odd"])
@pytest.mark.parametrize("policy", POLICIES)
def test_block_is_the_formula(policy, config):
    block = make_block(policy, **config)
    x = draw(BATCH, SEQ, FEATURES, dtype=block.compute_dtype)
    y = block(x)
    assert y.dtype == block.compute_dtype and y.shape == x.shape
    check(y, formula(block, x), formula(block, tf.cast(x, tf.float64)))


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("config", [{}, ODD], ids=["plain", "odd"])
def test_gradients_are_those_of_the_formula(config, jit_compile):
    block, wide = make_block(**config), make_block("float64", **config)
    x, dy = draw(BATCH, SEQ, FEATURES), draw(BATCH, SEQ, FEATURES, seed=1)

    def gradients(call, block, x, dy):
        variables = [w.value for w in block.trainable_weights]
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = call(x)
        return tape.gradient(y, [x, *variables], dy)

    ours = tf.function(lambda x: gradients(block, block, x, dy), jit_compile=jit_compile)(x)
    stock = gradients(lambda x: formula(block, x), block, x, dy)
    x, dy = tf.cast(x, tf.float64), tf.cast(dy, tf.float64)
    exact = gradients(lambda x: formula(wide, x), wide, x, dy)
    assert len(ours) == 1 + len(block.weights)
    largest = max(np.abs(e).max() for e in exact)
    for a, s, e in zip(ours, stock, exact, strict=True):
        # Softmax ignores the bias of the keys: its gradient is a sum that cancels.
        allowed = 3 * error(s, e) + 8 * np.finfo("float32").eps * max(np.abs(e).max(), largest)
        assert error(a, e) <= allowed


def test_policy_beyond_the_kernels():
    """float64 is computed by stock operations, dropout included."""
    block = make_block("float64", **ODD)
    x = draw(BATCH, SEQ, FEATURES, dtype="float64")
    np.testing.assert_allclose(block(x), formula(block, x), 1e-12, 1e-12)
    block = make_block("float64", dropout=0.5, seed=1)
    assert error(block(x, training=True), block(x)) > 0.01
    with pytest.raises(ValueError, match="no cache where it computes in float64"):
        block(x, cache=make_cache(block), positions=[0, 0])


@pytest.mark.parametrize("policy", ["float32", "float64"])
def test_padding(policy):
    """What the mask hides reaches no other token; the mask goes on to the next layer."""
    block = make_block(policy)
    x = draw(BATCH, SEQ, FEATURES, dtype=policy)
    mask = np.ones([BATCH, SEQ], bool)
    mask[0, 7:] = mask[1, 2] = False
    y = block(x, mask=mask)
    exact = formula(block, tf.cast(x, tf.float64), mask)
    assert error(y[mask], exact[mask]) <= 1e-5 * np.abs(exact).max()
    spoilt = tf.where(mask[..., None], x, 1e3 if policy == "float64" else np.nan)
    np.testing.assert_array_equal(block(spoilt, mask=mask)[mask], y[mask])
    x._keras_mask = tf.constant(mask)
    carried = block(x)
    np.testing.assert_array_equal(carried, y)
    np.testing.assert_array_equal(carried._keras_mask, mask)


def test_dropout_in_training_only():
    block = make_block(dropout=0.5, seed=3)
    x = draw(BATCH, SEQ, FEATURES)
    plain = make_block()(x)
    np.testing.assert_array_equal(block(x), plain)
    first, second = block(x, training=True), block(x, training=True)
    assert error(first, plain) > 0.01 and error(first, second) > 0.01
    np.testing.assert_array_equal(make_block(dropout=0.5, seed=3)(x, training=True), first)


# The cache.


@pytest.mark.parametrize("jit_compile", [None, False, True], ids=["eager", "graph", "xla"])
@pytest.mark.parametrize("config", [{}, ODD], ids=["plain", "odd"])
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_cache_gives_what_full_recomputation_gives(policy, config, jit_compile):
    block = make_block(policy, **config)
    x = draw(BATCH, SEQ, FEATURES, dtype=block.compute_dtype)
    y = generate_states(block, x, make_cache(block), 6, jit_compile)
    exact = formula(block, tf.cast(x, tf.float64))
    check(y, formula(block, x), exact)
    check(block(x), formula(block, x), exact)


def test_rows_at_positions_of_their_own():
    """A prompt padded at its end: what is written over its padding, and NaN beyond, is unseen."""
    block, cache, lengths = make_block(), make_cache(make_block()), np.int32([3, 7])
    x = draw(BATCH, 12, FEATURES)
    whole = block(x).numpy()
    y = block(x[:, :7], cache=cache, positions=tf.zeros([BATCH], tf.int32))
    np.testing.assert_allclose(y, whole[:, :7], 1e-5, 1e-5)
    for step in range(5):
        token = tf.stack([x[i, n + step] for i, n in enumerate(lengths)])[:, None]
        y = block(token, cache=cache, positions=lengths + step)
        for i, n in enumerate(lengths):
            np.testing.assert_allclose(y[i, 0], whole[i, n + step], 1e-5, 1e-5)
    assert np.isnan(cache[0][:, 12:]).all() and np.isfinite(cache[0][:, :8]).all()


def test_cache_of_keras_variables():
    block, x = make_block(), draw(BATCH, SEQ, FEATURES)
    cache = [keras.Variable(variable.value()) for variable in make_cache(block)]
    y = block(x, cache=cache, positions=[0, 0])
    np.testing.assert_allclose(y, block(x), 1e-5, 1e-5)
    assert np.isfinite(cache[1][:, :SEQ]).all()


def test_greedy_tokens_are_those_of_full_recomputation():
    keras.utils.set_random_seed(0)
    embedding = keras.layers.Embedding(30, FEATURES, keras.initializers.RandomNormal(stddev=1))
    blocks, logits = [make_block(), make_block(**ODD)], keras.layers.Dense(30, use_bias=False)
    tokens, caches = tf.constant([[3, 1, 4], [1, 5, 9]]), [make_cache(block) for block in blocks]
    expected, states = tokens, []
    position = 0
    while expected.shape[1] < MAX_SEQ:
        x, new = embedding(expected), embedding(tokens[:, position:])
        for block, cache in zip(blocks, caches):
            x = block(x)
            new = block(new, cache=cache, positions=tf.fill([BATCH], position))
        position = tokens.shape[1]
        pick = lambda x: tf.argmax(logits(x)[:, -1:], -1, tf.int32)
        expected, tokens = tf.concat([expected, pick(x)], 1), tf.concat([tokens, pick(new)], 1)
        states.append(new)
    np.testing.assert_array_equal(tokens, expected)
    assert len(np.unique(tokens)) > 4


def test_unfit_arguments():
    with pytest.raises(ValueError, match="num_query_heads is 5; .* multiple of"):
        make_block(num_query_heads=5)
    with pytest.raises(ValueError, match="head_dim is 260; it must be even and at most 256"):
        make_block(head_dim=260)
    with pytest.raises(ValueError, match=r"dropout is 1.0; it must be in \[0, 1\)"):
        make_block(dropout=1.0)
    with pytest.raises(ValueError, match="local_window_size is -1; it must be None or at least 0"):
        make_block(local_window_size=-1)
    block, x = make_block(), draw(BATCH, 1, FEATURES)
    with pytest.raises(ValueError, match="both cache and positions"):
        block(x, cache=make_cache(block))
    with pytest.raises(ValueError, match="both cache and positions"):
        block(x, positions=[0, 0])
    for cache in (make_cache(make_block("bfloat16")), make_cache(block)[:1], (x, x)):
        with pytest.raises(ValueError, match="two variables, .key, value., of float32"):
            block(x, cache=cache, positions=[0, 0])
    with pytest.raises(tf.errors.InvalidArgumentError, match="positions must be in"):
        block(x, cache=make_cache(block), positions=[0, MAX_SEQ])


# Keras.


def make_model(policy="float32", **config):
    tokens = keras.Input([None], dtype="int32")
    x = keras.layers.Embedding(30, FEATURES, mask_zero=True, dtype=policy)(tokens)
    for name in ("first", "second"):
        x = TransformerDecoderBlock(**{**CONFIG, **config}, name=name, dtype=policy)(x)
        assert x.shape == (None, None, FEATURES)
    return keras.Model(tokens, keras.layers.Dense(30, dtype="float32")(x))


def test_config_holds_every_argument():
    config = CONFIG | ODD | {"dropout": 0.25, "seed": 7, "name": "block", "dtype": "bfloat16"}
    config |= {
        "kernel_initializer": keras.initializers.RandomNormal(stddev=0.5),
        "kernel_regularizer": keras.regularizers.L2(0.5),
    }
    block = TransformerDecoderBlock(**config)
    serialized = keras.saving.serialize_keras_object(block)
    assert serialized["registered_name"] == "tf_ops>TransformerDecoderBlock"
    again = keras.saving.deserialize_keras_object(serialized)
    assert again.get_config() == block.get_config()
    for name in CONFIG | ODD | {"dropout": 0, "seed": 0}:
        assert getattr(again, name) == config[name]
    again.build((None, None, FEATURES))
    kernels = [w for w in again.weights if w.path.endswith("kernel")]
    assert len(kernels) == 7 == len(again.losses)
    assert 0.4 < np.std(kernels[0]) < 0.6
    assert error(again.key.kernel, again.value.kernel) > 0.1


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_model_saves_and_loads(tmp_path, policy):
    model = make_model(policy, **ODD)
    tokens = np.random.default_rng(0).integers(1, 30, [BATCH, SEQ])
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(again(tokens), model(tokens))
    model.save_weights(tmp_path / "model.weights.h5")
    other = make_model(policy, **ODD)
    other.load_weights(tmp_path / "model.weights.h5")
    np.testing.assert_array_equal(other(tokens), model(tokens))


@pytest.mark.parametrize("policy, jit_compile", [("float32", "auto"), ("mixed_bfloat16", True)])
def test_fit(policy, jit_compile):
    """It learns to repeat the token before the last."""
    keras.utils.set_random_seed(0)
    model = make_model(policy, dropout=0.1)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-2), loss, jit_compile=jit_compile)
    tokens = np.random.default_rng(0).integers(1, 30, [256, 8])
    labels = np.concatenate([tokens[:, :1], tokens[:, :-1]], 1)
    losses = model.fit(tokens, labels, batch_size=16, epochs=5, verbose=0).history["loss"]
    assert losses[-1] < 0.3 * losses[0]


def test_saved_model_of_one_step(tmp_path):
    """Caches are variables of the module, and a signature writes to them."""

    class Server(tf.Module):
        def __init__(self):
            super().__init__()
            self.block = make_block()
            self.cache = make_cache(self.block)

        @tf.function(
            input_signature=[
                tf.TensorSpec([BATCH, None, FEATURES]),
                tf.TensorSpec([BATCH], tf.int32),
            ]
        )
        def step(self, x, positions):
            return {"y": self.block(x, cache=self.cache, positions=positions)}

    server, x = Server(), draw(BATCH, SEQ, FEATURES)
    tf.saved_model.save(server, tmp_path, signatures=server.step)
    step = tf.saved_model.load(tmp_path).signatures["serving_default"]
    y = [step(x=x[:, i : i + 1], positions=tf.fill([BATCH], i))["y"] for i in range(SEQ)]
    np.testing.assert_allclose(tf.concat(y, 1), server.block(x), 1e-5, 1e-5)
