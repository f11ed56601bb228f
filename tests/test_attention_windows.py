# SPDX-License-Identifier: Apache-2.0
"""Attention with windows and sinks."""

import math

import numpy as np
import pytest
import tensorflow as tf

from tests.attention_reference import check_attention, draw, gradients_of
from tf_ops import dot_product_attention


@pytest.mark.parametrize("window", [(40, 0), (0, 40), (3, 17), (0, 0), (64, 64), 130], ids=str)
def test_window_is_a_mask(window, dtype):
    """A window (L, 0) that is not causal sees the future; tails beside a tile are wrong."""
    arguments = {"query": (1, 203, 2, 16), "key": (1, 203, 1, 16), "value": (1, 203, 1, 16)}
    check_attention(arguments | {"local_window_size": window, "return_lse": True}, dtype, "eager")


@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
@pytest.mark.parametrize("seq", [(300, 70), (70, 300), (1, 300)], ids=str)
def test_window_over_tiles(seq, alignment, dtype):
    """Rows before or behind all keys see none."""
    seq_q, seq_k = seq
    arguments = {"query": (2, seq_q, 2, 16), "key": (2, seq_k, 2, 16), "value": (2, seq_k, 2, 16)}
    arguments |= {"local_window_size": (20, 9), "causal_alignment": alignment}
    arguments |= {"key_value_seq_lengths": tf.constant([seq_k, seq_k // 2], tf.int32)}
    check_attention(arguments | {"sink": (2,), "return_lse": True}, dtype, "eager")


def test_what_a_window_hides_does_not_leak(dtype):
    query, key, value = draw(*[(1, 200, 2, 16)] * 3, dtype=dtype)
    attend = lambda *x: dot_product_attention(*x, local_window_size=(30, 5), return_lse=True)
    clean, clean_gradients = gradients_of(attend, [query, key, value])
    bad = (np.arange(200) == 100)[None, :, None, None]
    put = lambda x, poison: tf.where(bad, tf.cast(poison, dtype), x)
    for poison in (math.nan, math.inf):
        dirty = [query, put(key, poison), put(value, poison)]
        (output, lse), gradients = gradients_of(attend, dirty)
        sees = (np.arange(200) >= 95) & (np.arange(200) <= 130)
        np.testing.assert_array_equal(output[:, ~sees], clean[0][:, ~sees])
        np.testing.assert_array_equal(lse[..., ~sees], clean[1][..., ~sees])
        np.testing.assert_array_equal(gradients[0][:, ~sees], clean_gradients[0][:, ~sees])
        seen = (np.arange(200) >= 65) & (np.arange(200) <= 135)  # by one that sees the bad key
        for a, b in zip(gradients[1:], clean_gradients[1:]):
            np.testing.assert_array_equal(a[:, ~seen], b[:, ~seen])


def test_a_window_between_two_infinities_of_a_tile_sees_neither(dtype):
    query, key, value = draw(*[(1, 150, 2, 16)] * 3, dtype=dtype)
    attend = lambda value: dot_product_attention(query, key, value, local_window_size=(9, 5))
    expected = attend(value).numpy().astype(np.float32)
    value, i = value.numpy(), np.arange(150)
    for j, sign in ((2, 1), (40, -1), (60, 1), (100, -1), (126, 1)):
        value[:, j, :, 3] = sign * math.inf
        expected[:, (i - 9 <= j) & (j <= i + 5), :, 3] = sign * math.inf
    np.testing.assert_array_equal(tf.cast(attend(tf.constant(value)), tf.float32), expected)


def test_sink_of_minus_infinity_is_none(dtype):
    query, key, value = draw(*[(2, 9, 2, 8)] * 3, dtype=dtype)
    options = {"key_value_seq_lengths": [0, 7], "return_lse": True}
    with_sink = dot_product_attention(query, key, value, sink=[-math.inf] * 2, **options)
    for a, b in zip(with_sink, dot_product_attention(query, key, value, **options)):
        np.testing.assert_array_equal(a, b)


def test_a_row_without_a_key_has_the_sink_as_lse(dtype, mode):
    """0 and the sink's logit, whose gradient is then that of lse; padded queries count as such."""
    query, key, value = draw((2, 70, 2, 16), (2, 40, 2, 16), (2, 40, 2, 16), dtype=dtype)
    sink = tf.constant([0.7, -90.0])
    value = tf.where((np.arange(40) == 39)[:, None, None], tf.cast(math.nan, dtype), value)

    def run(query, key, value, sink):
        with tf.GradientTape() as tape:
            tape.watch([query, sink])
            output, lse = dot_product_attention(
                query,
                key,
                value,
                sink=sink,
                key_value_seq_lengths=[0, 39],
                query_seq_lengths=[70, 30],
                return_lse=True,
            )
            loss = tf.reduce_sum(lse[0]) + tf.reduce_sum(lse[1, :, 30:])
        return output, lse, tape.gradient(loss, [query, sink])

    if mode != "eager":
        run = tf.function(run, jit_compile=mode == "xla")
    output, lse, (dquery, dsink) = run(query, key, value, sink)
    assert (tf.cast(output[0], tf.float32).numpy() == 0).all()
    assert (tf.cast(output[1, 30:], tf.float32).numpy() == 0).all()
    assert np.isfinite(tf.cast(output, tf.float32)).all()
    np.testing.assert_array_equal(lse[0], tf.repeat(sink[:, None], 70, 1))
    np.testing.assert_array_equal(lse[1, :, 30:], tf.repeat(sink[:, None], 40, 1))
    assert (tf.cast(dquery, tf.float32).numpy() == 0).all()
    np.testing.assert_allclose(dsink, [110.0, 110.0], 1e-6)


def test_a_query_of_one_key_and_a_sink_has_a_gradient(dtype):
    for seq in (1, 2, 3):
        shapes = {name: (3, seq, 2, 16) for name in ("query", "key", "value")}
        check_attention(shapes | {"sink": (2,), "is_causal": True}, dtype, "eager", seed=seq)
