# SPDX-License-Identifier: Apache-2.0
"""Attention with a mask that is the same for all heads and queries, as one of padding is."""

import math

import numpy as np
import pytest
import tensorflow as tf

from tests.attention_reference import check_attention, draw, gradients_of
from tf_ops import dot_product_attention

SEQ = 300
KEY = np.arange(SEQ)
SHOWN = {
    "padding after": [KEY < 170, KEY < SEQ],
    "padding before": [KEY >= 200, KEY >= 1],
    "both": [(KEY >= 97) & (KEY < 260), (KEY >= 128) & (KEY < 129)],
    "holes": [KEY % 3 > 0, (KEY < 40) | (KEY >= 270)],
    "nothing": [KEY < 0, KEY % 128 == 127],
}


def key_mask(name):
    return tf.constant(np.stack(SHOWN[name])[:, None, None])


@pytest.mark.parametrize("name", SHOWN)
@pytest.mark.parametrize("head_dim", [16, 128, 192])
def test_key_mask(name, head_dim, dtype):
    query, key = (2, 270, 2, head_dim), (2, SEQ, 1, head_dim)
    arguments = {"query": query, "key": key, "value": key, "mask": key_mask(name)}
    check_attention(arguments | {"return_lse": True}, dtype, "eager")


@pytest.mark.parametrize("name", SHOWN)
@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
def test_beside_causality_windows_lengths_and_sinks(name, alignment, dtype):
    """A length is what bottom_right is aligned to, whatever the mask hides."""
    query, key = (2, 270, 2, 16), (2, SEQ, 2, 16)
    arguments = {"query": query, "key": key, "value": key, "mask": key_mask(name)}
    arguments |= {"is_causal": True, "causal_alignment": alignment, "local_window_size": (90, 0)}
    arguments |= {"query_seq_lengths": tf.constant([270, 100], tf.int32), "sink": (2,)}
    arguments |= {"key_value_seq_lengths": tf.constant([280, 300], tf.int32)}
    check_attention(arguments | {"return_lse": True}, dtype, "eager")


@pytest.mark.parametrize("shape", [(1, 1, 1, SEQ), (2, 1, 1, 1), (1, 1, 1, 1)], ids=str)
def test_broadcast(shape, dtype, mode):
    mask = tf.constant(np.resize([True, False, True], shape))
    arguments = dict.fromkeys(["query", "key", "value"], (2, SEQ, 2, 16)) | {"mask": mask}
    check_attention(arguments | {"is_causal": True}, dtype, mode)


@pytest.mark.parametrize("name", ["padding after", "padding before", "holes"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_what_it_hides_does_not_leak(name, is_causal, dtype):
    query, key, value = draw(*[(2, SEQ, 2, 16)] * 3, dtype=dtype)
    mask = key_mask(name)

    def attend(*x):
        return dot_product_attention(*x, mask=mask, is_causal=is_causal, return_lse=True)

    clean = gradients_of(attend, [query, key, value])
    hidden = ~mask.numpy()[:, 0, 0, :, None, None]
    for poison in (math.nan, math.inf):
        put = lambda x: tf.where(hidden, tf.cast(poison, dtype), x)
        dirty = gradients_of(attend, [query, put(key), put(value)])
        for a, b in zip(tf.nest.flatten(clean), tf.nest.flatten(dirty), strict=True):
            np.testing.assert_array_equal(a, b)
