# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
import tensorflow as tf

from tf_ops import paged_attention, update_cache
from tf_ops.testing import in_mode


def normal(*shape, dtype=tf.float32, seed=0):
    return tf.cast(np.random.default_rng(seed).standard_normal(shape), dtype)


def make_caches(batch=3, max_seq=10, kv_heads=2, head_dim=5, value_dim=4, dtype=tf.float32):
    return [
        tf.Variable(normal(batch, max_seq, kv_heads, dim, dtype=dtype, seed=dim))
        for dim in (head_dim, value_dim)
    ]


def wide(x):
    return tf.cast(x, tf.float64).numpy()


def written(cache, x, positions):
    """The cache as it is to be."""
    cache, x = wide(cache), wide(x)
    for b, position in enumerate(positions):
        cache[b, position : position + x.shape[1]] = x[b]
    return cache


@pytest.mark.parametrize("integer", [tf.int32, tf.int64], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("seq", [0, 1, 4, 10])
def test_update_cache(seq, integer, dtype, mode):
    caches = make_caches(dtype=dtype)
    positions = tf.constant([0, 10 - seq, (10 - seq) // 2], integer)
    new = [normal(3, seq, 2, dim, dtype=dtype, seed=1) for dim in (5, 4)]
    expected = [written(cache, x, positions) for cache, x in zip(caches, new)]
    inputs = [*new, positions]
    in_mode(lambda *args: update_cache(*caches, *args), mode, inputs)(*inputs)
    for cache, e in zip(caches, expected):
        np.testing.assert_array_equal(wide(cache), e)


def address(variable):
    return np.asarray(memoryview(variable.read_value())).ctypes.data


# Stock's scatter_nd_update makes each read that follows it a copy of the whole variable.
def test_neither_update_nor_read_copies_the_cache(mode, device):
    if "GPU" in device:
        pytest.skip("the address is that on the CPU")
    caches = make_caches()
    inputs = [normal(3, 1, 2, 5), normal(3, 1, 2, 4), tf.constant([1, 2, 3])]
    run = in_mode(lambda *args: update_cache(*caches, *args), mode, inputs)
    run(*inputs)
    before = [address(cache) for cache in caches]
    for _ in range(3):
        run(*inputs)
        assert [address(cache) for cache in caches] == before


def test_what_was_read_before_stays(mode):
    caches = make_caches()
    read = [cache.read_value() for cache in caches]
    expected = [x.numpy().copy() for x in read]
    inputs = [normal(3, 1, 2, 5), normal(3, 1, 2, 4), tf.constant([1, 2, 3])]
    run = in_mode(lambda *args: update_cache(*caches, *args), mode, inputs)
    for _ in range(2):
        run(*inputs)
    for x, e in zip(read, expected):
        np.testing.assert_array_equal(x, e)


# A graph that was traced outside of XLA has the same ops.
def test_graph_within_xla():
    caches = make_caches()
    inputs = [normal(3, 1, 2, 5), normal(3, 1, 2, 4), tf.constant([1, 2, 3])]
    expected = written(written(caches[0], inputs[0], [1, 2, 3]), inputs[0], [2, 3, 4])
    step = tf.function(lambda *args: update_cache(*caches, *args), autograph=False)
    step(*inputs)
    tf.function(lambda *args: step(*args), autograph=False, jit_compile=True)(
        *inputs[:2], inputs[2] + 1
    )
    np.testing.assert_array_equal(wide(caches[0]), expected)


def test_attention_in_a_loop_sees_what_was_written(mode):
    batch, steps = 2, 6
    caches = make_caches(batch, steps, 2, 8, 8)
    query, key, value = (normal(steps, batch, 1, heads, 8, seed=heads) for heads in (4, 2, 2))
    table = tf.range(batch)[:, None]

    def generate(query, key, value):
        outputs = tf.TensorArray(tf.float32, steps, element_shape=[batch, 1, 4, 8])

        def body(i, outputs):
            update_cache(*caches, key[i], value[i], tf.fill([batch], i))
            pages = [cache.read_value() for cache in caches]
            y = paged_attention(query[i], *pages, table, tf.fill([batch], i + 1))
            return i + 1, outputs.write(i, y)

        return tf.while_loop(lambda i, _: i < steps, body, (0, outputs))[1].stack()

    if mode != "eager":
        generate = tf.function(generate, autograph=False, jit_compile=mode == "xla")
    y = generate(query, key, value)
    # Whole sequences [batch, steps, heads, 8], causal.
    q, k, v = (tf.transpose(x[:, :, 0], [1, 0, 2, 3]) for x in (query, key, value))
    k, v = tf.repeat(k, 2, 2), tf.repeat(v, 2, 2)
    x = tf.einsum("bihd,bjhd->bhij", q, k) / np.sqrt(8)
    x = tf.where(tf.linalg.band_part(tf.ones([steps, steps], tf.bool), -1, 0), x, -np.inf)
    expected = tf.einsum("bhij,bjhd->bihd", tf.nn.softmax(x), v)
    np.testing.assert_allclose(tf.transpose(y[:, :, 0], [1, 0, 2, 3]), expected, atol=1e-5)


@pytest.mark.parametrize(
    "positions", [[0, -1, 0], [8, 9, 0], [0, 0, 10], [0, 2**31 - 1, 0], [-(2**31), 0, 0]]
)
def test_position_out_of_range(positions, mode):
    caches = make_caches()
    before = [wide(cache) for cache in caches]
    inputs = [normal(3, 2, 2, 5, seed=1), normal(3, 2, 2, 4, seed=1), tf.constant(positions)]
    run = in_mode(lambda *args: update_cache(*caches, *args), mode, inputs)
    if mode != "xla":
        with pytest.raises(tf.errors.InvalidArgumentError, match="max_seq - seq"):
            run(*inputs)
    else:
        run(*inputs)
        # No row but those of the right positions, and of wrong ones what lies in the cache.
        for cache, x, b in zip(caches, inputs, before):
            for row, position in enumerate(positions):
                for i in range(2):
                    if 0 <= position + i < 10:
                        b[row, position + i] = wide(x)[row, i]
            np.testing.assert_array_equal(wide(cache), b)
        return
    for cache, b in zip(caches, before):
        np.testing.assert_array_equal(wide(cache), b)


def test_saved_model(tmp_path):
    class Model(tf.Module):
        def __init__(self):
            self.caches = make_caches(dtype=tf.bfloat16)

        @tf.function(
            input_signature=[
                tf.TensorSpec([3, None, 2, 5], tf.bfloat16),
                tf.TensorSpec([3, None, 2, 4], tf.bfloat16),
                tf.TensorSpec([3], tf.int32),
            ]
        )
        def step(self, key, value, positions):
            update_cache(*self.caches, key, value, positions)
            return self.caches[0].read_value()

    model = Model()
    tf.saved_model.save(model, str(tmp_path))
    loaded = tf.saved_model.load(str(tmp_path))
    inputs = [normal(3, 2, 2, 5, dtype=tf.bfloat16), normal(3, 2, 2, 4, dtype=tf.bfloat16)]
    for positions in ([1, 2, 3], [4, 0, 8]):
        y = loaded.step(*inputs, tf.constant(positions))
        np.testing.assert_array_equal(wide(y), wide(model.step(*inputs, tf.constant(positions))))
        np.testing.assert_array_equal(wide(loaded.caches[1]), wide(model.caches[1]))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(key_cache=tf.zeros([3, 10, 2, 5])), "key_cache is EagerTensor; it must be a tf.Var"),
        (dict(value=tf.zeros([3, 1, 2, 4], tf.float16)), "value is float16, value_cache float32"),
        (dict(key=tf.zeros([2, 1, 2, 5])), r"key is \(2, 1, 2, 5\); beside key_cache"),
        (dict(key=tf.zeros([3, 1, 1, 5])), r"key is \(3, 1, 1, 5\)"),
        (dict(value=tf.zeros([3, 2, 2, 4])), r"value is \(3, 2, 2, 4\)"),
        (dict(value=tf.zeros([3, 2, 4])), r"value is \(3, 2, 4\)"),
        (dict(positions=[1, 2]), r"positions is \(2,\); it must be \(3,\)"),
        (dict(positions=[1.0, 2.0, 3.0]), "positions is float32"),
    ],
    ids=lambda a: next(iter(a)) if isinstance(a, dict) else "",
)
def test_static_mistakes(arguments, message):
    key_cache, value_cache = make_caches()
    new = dict(key=normal(3, 1, 2, 5), value=normal(3, 1, 2, 4), positions=[0, 1, 2])
    with pytest.raises(ValueError, match=message):
        update_cache(**dict(key_cache=key_cache, value_cache=value_cache, **new) | arguments)
