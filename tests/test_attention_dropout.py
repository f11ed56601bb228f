# SPDX-License-Identifier: Apache-2.0
"""Attention with dropout."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from tests.attention_reference import draw, gradients_of
from tests.philox import kept_pairs, philox
from tf_ops import dot_product_attention


def test_philox_is_that_of_the_paper():
    """The known answers of Random123."""
    ones = 2**32 - 1
    known = {
        (0, 0): [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48],
        (ones, ones): [0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662],
    }
    for (counter, key), words in known.items():
        assert [int(x) for x in philox([counter] * 4, [key] * 2)] == words


@pytest.mark.parametrize("seed", [[1, 2], [-5, 2**62 + 3]], ids=str)
def test_dropout_replays_in_every_gradient(seed, dtype):
    """Gradients whose mask is not that of the forward pass, or whose scale is another."""
    batch, seq_q, seq_k, rate = 2, 150, 202, 0.4
    kept = kept_pairs(seed, rate, (batch, 4, seq_q, seq_k))
    attend = lambda *x, **options: dot_product_attention(
        *x, dropout_rate=rate, seed=seed, **options
    )
    zeros = lambda *shape: tf.zeros([batch, *shape], dtype)
    ones = lambda *shape: tf.ones([batch, *shape], dtype)
    eye = lambda seq, heads: tf.tile(tf.eye(seq, dtype=dtype)[None, :, None], [batch, 1, heads, 1])
    eye_k, eye_q = eye(seq_k, 2), eye(seq_q, 4)  # [batch, seq, heads, seq]
    weights = lambda kept: kept / (1 - rate) / seq_k
    close = lambda actual, expected: np.testing.assert_allclose(
        tf.cast(actual, tf.float32), expected, 1e-5 if dtype == tf.float32 else 2e-2, 1e-4 / seq_k
    )

    # All scores are 0. Values, or upstream gradients, that are unit vectors show the weights.
    output = attend(zeros(seq_q, 4, 8), zeros(seq_k, 2, 8), eye_k)
    close(output, weights(kept).transpose(0, 2, 1, 3))

    value = zeros(seq_k, 2, seq_q)
    with tf.GradientTape() as tape:
        tape.watch(value)
        output = attend(zeros(seq_q, 4, 8), zeros(seq_k, 2, 8), value)
    dvalue = tape.gradient(output, value, eye_q)  # [batch, seq_k, 2, seq_q]
    close(dvalue, weights(kept).reshape(batch, 2, 2, seq_q, seq_k).sum(2).transpose(0, 3, 1, 2))

    # Where values are 1, ds is the weight minus the mean of all.
    ds = weights(kept) - weights(kept).mean(3, keepdims=True)
    value = ones(seq_k, 2, 1)
    bias = tf.zeros([batch, 4, seq_q, seq_k], dtype)
    query, key = zeros(seq_q, 4, seq_k), eye_k
    with tf.GradientTape(persistent=True) as tape:
        tape.watch([query, bias])
        output = attend(query, key, value, bias, scale=1.0)
    dquery, dbias = tape.gradient(output, [query, bias])
    size = 1 if dtype == tf.float32 else 200
    far = lambda a, b: np.abs(tf.cast(a, tf.float32) - b).max()
    assert far(dbias, ds) < size * 1e-4 / seq_k
    assert far(dquery, ds.transpose(0, 2, 1, 3)) < size * 1e-4 / seq_k
    key = zeros(seq_k, 2, seq_q)
    with tf.GradientTape() as tape:
        tape.watch(key)
        output = attend(eye_q, key, value, scale=1.0)
    dkey = tape.gradient(output, key)  # [batch, seq_k, 2, seq_q]
    expected = ds.reshape(batch, 2, 2, seq_q, seq_k).sum(2).transpose(0, 3, 1, 2)
    assert far(dkey, expected) < 2 * size * 1e-4 / seq_k


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.93])
def test_dropout_keeps_the_share_that_it_should(rate, dtype):
    """The share kept, over all and by row and column; the mean over seeds is that without."""
    seq = 128
    query = tf.zeros([2, seq, 4, 8], dtype)
    value = tf.tile(tf.eye(seq, dtype=dtype)[None, :, None], [2, 1, 4, 1])
    attend = lambda seed: dot_product_attention(query, query, value, dropout_rate=rate, seed=seed)
    outputs = [tf.cast(attend([i, 0]), tf.float32).numpy() for i in range(8)]
    kept = np.stack(outputs) > 0
    assert abs(kept.mean() - (1 - rate)) < 0.01
    for axis in range(5):  # of 2^16 or more each
        axes = tuple(set(range(5)) - {axis})
        assert np.abs(kept.mean(axes) - (1 - rate)).max() < 0.03
    # Sums over the keys of one row are 1 on average.
    assert abs(np.stack(outputs).sum(4).mean() - 1) < 0.01
    # Neighbours are independent.
    for axis in range(1, 5):
        pairs = np.take(kept, range(kept.shape[axis] - 1), axis)
        pairs &= np.take(kept, range(1, kept.shape[axis]), axis)
        assert abs(pairs.mean() - (1 - rate) ** 2) < 0.01


def test_dropout_of_other_seeds_is_another():
    (x,) = draw((1, 64, 2, 16))
    attend = lambda seed: dot_product_attention(x, x, x, dropout_rate=0.5, seed=seed).numpy()
    seeds = [[0, 0], [1, 0], [0, 1], [2**32, 0], [0, 2**32], [-1, 0], [0, -1]]
    outputs = [attend(seed) for seed in seeds]
    for a, b in itertools.combinations(outputs, 2):
        assert np.abs(a - b).max() > 0.1
    np.testing.assert_array_equal(attend(tf.constant([1, 0], tf.int32)), outputs[1])
    np.testing.assert_array_equal(attend(np.int64([1, 0])), outputs[1])


def test_dropout_of_a_seed_that_a_graph_varies(mode):
    inputs = draw((2, 33, 4, 16), (2, 65, 2, 16), (2, 65, 2, 16))

    def run(seed, *inputs):
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            y = dot_product_attention(*inputs, dropout_rate=0.2, seed=seed)
        return y, tape.gradient(y, inputs)

    compiled = run
    if mode != "eager":
        compiled = tf.function(run, jit_compile=mode == "xla")
    for seed in ([1, 2], [3, 4], [1, 2]):
        seed = tf.constant(seed, tf.int64)
        results = zip(tf.nest.flatten(compiled(seed, *inputs)), tf.nest.flatten(run(seed, *inputs)))
        for a, b in results:
            np.testing.assert_array_equal(a, b)
    if mode != "eager":
        assert compiled.experimental_get_tracing_count() == 1


def test_no_dropout_rate_needs_no_seed():
    (x,) = draw((1, 9, 2, 8))
    expected = dot_product_attention(x, x, x)
    np.testing.assert_array_equal(dot_product_attention(x, x, x, dropout_rate=0.0), expected)
    np.testing.assert_array_equal(dot_product_attention(x, x, x, seed=[1, 2]), expected)


@pytest.mark.parametrize("head_dim", [16, 128])
def test_thirty_runs_are_the_same(head_dim, dtype):
    """Gradients that differ from run to run, with every feature at once."""
    query, key, value, bias = draw(
        (2, 70, 4, head_dim),
        (2, 90, 2, head_dim),
        (2, 90, 2, head_dim),
        (1, 4, 70, 90),
        dtype=dtype,
    )
    (sink,) = draw((4,))
    attend = lambda query, key, value, bias, sink: dot_product_attention(
        query,
        key,
        value,
        bias,
        is_causal=True,
        causal_alignment="bottom_right",
        attn_logits_soft_cap=3.0,
        local_window_size=40,
        key_value_seq_lengths=[90, 33],
        sink=sink,
        dropout_rate=0.3,
        seed=[1, 2],
        return_lse=True,
    )
    inputs = [query, key, value, bias, sink]
    first = tf.nest.flatten(gradients_of(attend, inputs))
    for _ in range(29):
        for a, b in zip(first, tf.nest.flatten(gradients_of(attend, inputs)), strict=True):
            np.testing.assert_array_equal(a, b)
