# SPDX-License-Identifier: Apache-2.0
"""The formula of attention in stock TensorFlow, and what its tests share."""

import math

import numpy as np
import tensorflow as tf

from tests.philox import kept_pairs
from tf_ops import dot_product_attention
from tf_ops.testing import check

# Arguments that are no inputs of the functions compared.
STATIC = ("scale", "is_causal", "attn_logits_soft_cap", "causal_alignment", "return_lse")
STATIC += ("local_window_size", "dropout_rate")


def visible_pairs(query, key, mask, is_causal, alignment, window, query_lengths, key_lengths):
    """bool [batch, heads, seq_q, seq_k]."""
    batch, seq_q, heads = query.shape[:3]
    seq_k = key.shape[1]
    length = lambda x, seq: tf.fill([batch], seq) if x is None else tf.clip_by_value(x, 0, seq)
    num_q = length(query_lengths, seq_q)[:, None, None, None]
    num_k = length(key_lengths, seq_k)[:, None, None, None]
    i, j = tf.range(seq_q)[:, None], tf.range(seq_k)
    visible = tf.broadcast_to((i < num_q) & (j < num_k), [batch, heads, seq_q, seq_k])
    if mask is not None:
        visible &= mask
    diagonal = i + (num_k - num_q if alignment == "bottom_right" else 0)
    if is_causal:
        visible &= j <= diagonal
    if window is not None:
        left, right = window if isinstance(window, tuple) else (window, window)
        visible &= (j >= diagonal - min(left, 10**9)) & (j <= diagonal + min(right, 10**9))
    return visible


def reference(
    query,
    key,
    value,
    bias=None,
    mask=None,
    scale=None,
    is_causal=False,
    attn_logits_soft_cap=None,
    causal_alignment="top_left",
    query_seq_lengths=None,
    key_value_seq_lengths=None,
    sink=None,
    local_window_size=None,
    dropout_rate=0.0,
    seed=None,
    return_lse=False,
):
    """What stock Keras computes and in its dtypes, with rows of no key at 0."""
    visible = visible_pairs(
        query,
        key,
        mask,
        is_causal,
        causal_alignment,
        local_window_size,
        query_seq_lengths,
        key_value_seq_lengths,
    )
    wide = tf.float64 if query.dtype == tf.float64 else tf.float32
    groups = query.shape[2] // max(key.shape[2], 1)
    key, value = tf.repeat(key, groups, axis=2), tf.repeat(value, groups, axis=2)
    x = tf.cast(tf.einsum("bihd,bjhd->bhij", query, key), wide)
    x *= 1.0 / math.sqrt(query.shape[3]) if scale is None else tf.cast(scale, wide)
    if attn_logits_soft_cap:
        x = attn_logits_soft_cap * tf.tanh(x / attn_logits_soft_cap)
    if bias is not None:
        x += tf.cast(bias, wide)
    sees = tf.reduce_any(visible, 3, keepdims=True)
    x = tf.where(visible, x, -1e30)
    seq_k = x.shape[3]
    if sink is not None:
        sinks = tf.broadcast_to(tf.cast(sink, wide)[:, None, None], [*x.shape[:3], 1])
        x, sees = tf.concat([x, sinks], 3), tf.ones_like(sees)
    probabilities = tf.where(visible, tf.nn.softmax(x)[..., :seq_k], 0)
    probabilities = tf.cast(probabilities, value.dtype)
    if dropout_rate:
        kept = kept_pairs(seed.numpy(), dropout_rate, probabilities.shape)
        dropped = probabilities / tf.cast(1 - np.float32(dropout_rate), value.dtype)
        probabilities = tf.where(kept, dropped, 0)
    output = tf.einsum("bhij,bjhd->bihd", probabilities, value)
    if not return_lse:
        return output
    lse = tf.reduce_logsumexp(tf.where(sees, x, 0), 3, keepdims=True)
    return output, tf.where(sees, lse, -math.inf)[..., 0]


def check_attention(arguments, dtype, mode, **options):
    """check() for arguments by name: shapes, tensors, or the values of STATIC."""
    static = {name: arguments[name] for name in STATIC if name in arguments}
    tensors = {name: x for name, x in arguments.items() if name not in STATIC and x is not None}
    named = lambda fn: lambda *args: fn(**dict(zip(tensors, args)), **static)
    shapes = list(tensors.values())
    check(named(dot_product_attention), named(reference), shapes, dtype, mode, **options)


def draw(*shapes, dtype=tf.float32, seed=0):
    rng = np.random.default_rng(seed)
    return [tf.cast(rng.standard_normal(shape), dtype) for shape in shapes]


def gradients_of(fn, inputs, seed=1):
    """Values of fn, and the gradients of random cotangents, as NumPy arrays."""
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        y = tf.nest.flatten(fn(*inputs))
    cotangents = draw(*[x.shape for x in y], seed=seed)
    cotangents = [tf.cast(c, x.dtype) for c, x in zip(cotangents, y)]
    gradients = tape.gradient(y, inputs, cotangents)
    return [x.numpy() for x in y], [x.numpy() for x in gradients]
