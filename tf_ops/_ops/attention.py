# SPDX-License-Identifier: Apache-2.0
"""Scaled dot-product attention."""

import math
import operator

import numpy as np
import tensorflow as tf

from tf_ops._gradient import register_second_order
from tf_ops._library import library
from tf_ops._operation import operation

_DTYPES = (tf.float32, tf.float16, tf.bfloat16)
MAX_HEAD_DIM = 256
_ATTRIBUTES = ("scale", "soft_cap", "is_causal", "bottom_right")
_ATTRIBUTES += ("window_left", "window_right", "dropout_rate")
_LARGEST_WINDOW = 2**31  # no sequence is longer


@operation
def dot_product_attention(
    query,
    key,
    value,
    bias=None,
    mask=None,
    scale=None,
    is_causal=False,
    flash_attention=None,
    attn_logits_soft_cap=None,
    *,
    causal_alignment="top_left",
    local_window_size=None,
    query_seq_lengths=None,
    key_value_seq_lengths=None,
    sink=None,
    dropout_rate=0.0,
    seed=None,
    return_lse=False,
):
    """Returns softmax(cap(scale · query · keyᵀ) + bias) · value over the visible keys.

    A key is visible to a query when `mask`, the causal mask, the window and both lengths allow
    it. A query that sees no key, and one beyond its length, gives 0 and has no gradient. What is
    invisible reaches neither the output nor a gradient, NaN and Inf included. Memory grows with
    the sequence, not with its square; what a window hides costs no time either.

    Args:
        query: [batch, seq_q, heads, head_dim] tensor of float32, float16 or bfloat16. Where the
            dtypes of query, key and value differ, all are taken in float32.
        key: [batch, seq_k, kv_heads, head_dim]; heads is a multiple of kv_heads.
        value: [batch, seq_k, kv_heads, value_dim]; head_dim and value_dim are at most 256.
        bias: broadcasts to [batch, heads, seq_q, seq_k]; added to the scaled, capped logits.
        mask: bool tensor that broadcasts like `bias`; True lets a query see a key.
        scale: float or scalar tensor; by default 1 / sqrt(head_dim).
        is_causal: bool; a query sees the keys up to its own position.
        flash_attention: accepted for the sake of Keras; the same kernel serves all its values.
        attn_logits_soft_cap: positive float c; cap(x) = c · tanh(x / c). None caps nothing.
        causal_alignment: "top_left" counts positions from the first query and key;
            "bottom_right" lets the last valid query see the last valid key.
        local_window_size: int or (left, right), none of them negative: a query sees so many keys
            before and after that of its own position, which `causal_alignment` aligns. None
            hides nothing; under `is_causal` nothing right of the position is seen.
        query_seq_lengths: int [batch], the number of valid queries, clamped into [0, seq_q].
        key_value_seq_lengths: int [batch], that of valid keys, clamped into [0, seq_k].
        sink: [heads] tensor, a logit per head that takes part in the softmax and has no value
            (Xiao et al., "Efficient streaming language models with attention sinks", 2023;
            learned as in gpt-oss). It has a gradient. A query that sees no key gives 0 still.
        dropout_rate: float in [0, 1): the share of the softmax's weights that are dropped; the
            others are divided by 1 - dropout_rate. `return_lse` is without it.
        seed: int32 or int64 [2], wanted where `dropout_rate` is not 0. The same seed and
            shapes drop the same weights, on every device.
        return_lse: bool; also return the logarithm of the sum of the exponentials of the
            visible logits, and the sink's.

    Returns:
        [batch, seq_q, heads, value_dim] tensor of the dtype of `query`; with `return_lse` also
        a float32 tensor [batch, heads, seq_q]; where a query sees no key, the sink or -inf.
        Both are differentiable.

    Raises:
        ValueError: shapes, dtypes or options do not fit, as far as known before it runs;
            `tf.errors.InvalidArgumentError` otherwise.
    """
    del flash_attention
    if causal_alignment not in ("top_left", "bottom_right"):
        raise _error(
            f"causal_alignment is {causal_alignment!r}; it must be 'top_left' or 'bottom_right'"
        )
    if attn_logits_soft_cap is not None and not 0.0 < float(attn_logits_soft_cap) < math.inf:
        raise _error(f"attn_logits_soft_cap is {attn_logits_soft_cap}; it must be None or positive")
    if not 0.0 <= dropout_rate < 1.0:
        raise _error(f"dropout_rate is {dropout_rate}; it must be in [0, 1)")
    if dropout_rate and seed is None:
        raise _error(f"dropout_rate is {dropout_rate} and seed is None; it must be int64 [2]")
    window_left, window_right = _window(local_window_size)
    query, key, value = _operands(query=query, key=key, value=value)
    dtype = query.dtype
    query, key, value, scale = _scaled(query, key, value, scale)
    output, lse = library.tf_ops_dot_product_attention(
        query=query,
        key=key,
        value=value,
        bias=_broadcastable("bias", bias, query.dtype),
        mask=_broadcastable("mask", mask, tf.bool),
        query_seq_lengths=_lengths("query_seq_lengths", query_seq_lengths, query),
        key_value_seq_lengths=_lengths("key_value_seq_lengths", key_value_seq_lengths, query),
        sink=_sink(sink, query),
        seed=_seed(seed if dropout_rate else None),
        scale=scale,
        soft_cap=float(attn_logits_soft_cap or 0.0),
        is_causal=bool(is_causal),
        bottom_right=causal_alignment == "bottom_right",
        window_left=window_left,
        window_right=window_right,
        dropout_rate=float(dropout_rate),
    )
    output = tf.cast(output, dtype)
    return (output, lse) if return_lse else output


def _error(message):
    return ValueError(f"dot_product_attention: {message}")


def _operands(**tensors):
    """Returns query, key and value as tensors of one dtype, whose known dimensions fit."""
    tensors = {name: tf.convert_to_tensor(x) for name, x in tensors.items()}
    for name, x in tensors.items():
        if x.dtype not in _DTYPES:
            raise _error(f"{name} is {x.dtype.name}; it must be float32, float16 or bfloat16")
        if x.shape.rank not in (4, None):
            raise _error(f"{name} is {x.shape}; it must have rank 4: [batch, seq, heads, dim]")
    query, key, value = tensors.values()
    if not query.dtype == key.dtype == value.dtype:
        query, key, value = (tf.cast(x, tf.float32) for x in (query, key, value))
    if None in (query.shape.rank, key.shape.rank, value.shape.rank):
        return query, key, value
    q, k, v = query.shape.as_list(), key.shape.as_list(), value.shape.as_list()
    for axis, wanted, same in (
        (0, "the batch of query", (q, k)),
        (0, "the batch of query", (q, v)),
        (1, "the seq_k of key", (k, v)),
        (2, "the kv_heads of key", (k, v)),
        (3, "the head_dim of query", (q, k)),
    ):
        if None not in (same[0][axis], same[1][axis]) and same[0][axis] != same[1][axis]:
            name = "key" if same[1] is k else "value"
            raise _error(
                f"{name} is {tensors[name].shape}; its dimension {axis} must be {wanted}, "
                f"{same[0][axis]}"
            )
    heads, kv_heads = q[2], k[2]
    if None not in (heads, kv_heads) and (heads % kv_heads if kv_heads else heads):
        raise _error(
            f"query has {heads} heads, key and value {kv_heads}; "
            "the first must be a multiple of the second"
        )
    for name, dim in (("head_dim", q[3]), ("value_dim", v[3])):
        if dim is not None and dim > MAX_HEAD_DIM:
            raise _error(f"{name} is {dim}; the limit is {MAX_HEAD_DIM}")
    return query, key, value


def _scaled(query, key, value, scale):
    """Returns query, key, value and the float that scales the logits; NaN is the default.

    A scale that is known only at run time is multiplied into the query, which is where its
    gradient comes from. All are taken in float32 then: a query rounded once more to 16 bits
    would show in lse and in the gradient of the scale.
    """
    if scale is None:
        return query, key, value, math.nan
    if isinstance(scale, (int, float, np.generic)):
        if not math.isfinite(scale):
            raise _error(f"scale is {scale}; it must be finite")
        return query, key, value, float(scale)
    scale = tf.cast(scale, tf.float32)
    if scale.shape.rank not in (0, None):
        raise _error(f"scale is {scale.shape}; it must be a scalar")
    query, key, value = (tf.cast(x, tf.float32) for x in (query, key, value))
    return query * tf.reshape(scale, []), key, value, 1.0


def _broadcastable(name, x, dtype):
    """Returns bias or mask in four dimensions, or the [0] that stands for none."""
    if x is None:
        return tf.constant([], dtype)
    x = tf.convert_to_tensor(x)
    if dtype == tf.bool and x.dtype != tf.bool:
        raise _error(f"{name} is {x.dtype.name}; it must be bool")
    x = tf.cast(x, dtype)
    rank = x.shape.rank
    if rank is None:
        missing = tf.maximum(4 - tf.rank(x), 0)
        return tf.reshape(x, tf.concat([tf.ones([missing], tf.int32), tf.shape(x)], 0))
    if rank > 4:
        raise _error(f"{name} is {x.shape}; it must broadcast to [batch, heads, seq_q, seq_k]")
    return x if rank == 4 else x[(None,) * (4 - rank)]


def _lengths(name, lengths, query):
    """Returns int32 [batch], or the [0] that stands for none."""
    if lengths is None:
        return tf.constant([], tf.int32)
    lengths = tf.convert_to_tensor(lengths)
    if lengths.dtype not in (tf.int32, tf.int64):
        raise _error(f"{name} is {lengths.dtype.name}; it must be int32 or int64")
    if lengths.dtype == tf.int64:
        lengths = tf.cast(tf.clip_by_value(lengths, 0, tf.int32.max), tf.int32)
    batch = query.shape[0] if query.shape.rank else None
    if not lengths.shape.is_compatible_with([batch]):
        raise _error(f"{name} is {lengths.shape}; it must be [{batch}], the batch of query")
    if batch is None or not lengths.shape.is_fully_defined():
        # An empty tensor would pass for none.
        lengths = tf.reshape(lengths, [tf.shape(query)[0]], name=name)
    return lengths


def _window(size):
    """Returns how many keys are visible on the left and on the right; -1 is all."""
    if size is None:
        return -1, -1
    try:
        left, right = size if isinstance(size, (tuple, list)) else (size, size)
        left, right = operator.index(left), operator.index(right)
    except (TypeError, ValueError):
        left = right = -1
    if left < 0 or right < 0:
        raise _error(
            f"local_window_size is {size!r}; it must be None, an int or (left, right), "
            "none of them negative"
        )
    return min(left, _LARGEST_WINDOW), min(right, _LARGEST_WINDOW)


def _sink(sink, query):
    """Returns float32 [heads], or the [0] that stands for none."""
    if sink is None:
        return tf.constant([], tf.float32)
    sink = tf.convert_to_tensor(sink)
    if not sink.dtype.is_floating:
        raise _error(f"sink is {sink.dtype.name}; it must be floating")
    heads = query.shape[2] if query.shape.rank else None
    if not sink.shape.is_compatible_with([heads]):
        raise _error(f"sink is {sink.shape}; it must be [{heads}], the heads of query")
    sink = tf.cast(sink, tf.float32)
    if heads is None or not sink.shape.is_fully_defined():
        # An empty tensor would pass for none.
        sink = tf.reshape(sink, [tf.shape(query)[2]], name="sink")
    return sink


def _seed(seed):
    """Returns int64 [2], or the [0] that stands for none."""
    if seed is None:
        return tf.constant([], tf.int64)
    seed = tf.convert_to_tensor(seed)
    if seed.dtype not in (tf.int32, tf.int64):
        raise _error(f"seed is {seed.dtype.name}; it must be int32 or int64")
    if not seed.shape.is_compatible_with([2]):
        raise _error(f"seed is {seed.shape}; it must be [2]")
    return tf.cast(seed, tf.int64)


@tf.RegisterGradient("TfOps>DotProductAttention")
def _gradient(op, doutput, dlse):
    if _is_zeros(dlse):
        dlse = tf.constant([], tf.float32)
    tensors = (doutput, dlse, *op.inputs, *op.outputs)
    attributes = {name: op.get_attr(name) for name in _ATTRIBUTES}
    *gradients, dsink = library.tf_ops_dot_product_attention_grad(*tensors, **attributes)
    # In a graph an op whose result is not used never runs.
    unused = getattr(op, "skip_input_indices", None) or ()
    if op.inputs[3].shape.rank == 1 or 3 in unused:
        gradients.append(None)
    else:
        gradients.append(library.tf_ops_dot_product_attention_bias_grad(*tensors, **attributes))
    dsink = None if op.inputs[7].shape == [0] else dsink
    return gradients + [None, None, None, dsink, None]


def _is_zeros(x):
    """Whether a graph says so; the gradient of an lse that nobody uses is made of zeros."""
    if not tf.is_symbolic_tensor(x):
        return False
    if x.op.type in ("Const", "Fill"):
        value = tf.get_static_value(x)
        return value is not None and not value.any()
    return x.op.type == "ZerosLike"


def _composite_gradients(op, doutput, dlse, query, key, value, bias, *others):
    """The gradients of attention by query, key, value, sink and bias, in stock TensorFlow."""
    sink = others[3]
    by = [query, key, value, sink] + [bias] * (bias.shape.rank != 1)
    with tf.GradientTape() as tape:
        tape.watch(by)
        output, lse = _composite(op, query, key, value, bias, *others[:5])
        # Where lse is -inf it has no gradient, whatever its cotangent.
        outputs = [output] if dlse.shape.rank == 1 else [output, lse]
    gradients = tape.gradient(outputs, by, [doutput, dlse][: len(outputs)])
    return [sink if by[i] is sink and g is None else g for i, g in enumerate(gradients)]


def _composite(op, query, key, value, bias, mask, query_lengths, key_lengths, sink, seed):
    groups = tf.shape(query)[2] // tf.maximum(tf.shape(key)[2], 1)
    key, value = tf.repeat(key, groups, axis=2), tf.repeat(value, groups, axis=2)
    visible = _visible(op, query, key, mask, query_lengths, key_lengths)
    # What no query sees may be NaN, and 0 · NaN is not 0.
    seen = tf.transpose(tf.reduce_any(visible, 2), [0, 2, 1])[..., None]
    key, value = tf.where(seen, key, 0), tf.where(seen, value, 0)
    sees = tf.reduce_any(visible, 3, keepdims=True)
    query = tf.where(tf.transpose(sees, [0, 2, 1, 3]), query, 0)

    scale = op.get_attr("scale")
    if math.isnan(scale):
        scale = tf.math.rsqrt(tf.cast(tf.shape(query)[3], query.dtype))
    x = tf.einsum("bihd,bjhd->bhij", query, key) * scale
    cap = op.get_attr("soft_cap")
    if cap:
        x = cap * tf.tanh(x / cap)
    if bias.shape.rank != 1:
        x += bias
    x = tf.where(visible, x, -math.inf)
    # No sink is one of -inf.
    sink = tf.fill([tf.shape(query)[2]], -math.inf) if sink.shape == [0] else sink
    sink = tf.cast(sink, x.dtype)[:, None, None]
    some = sees | (sink > -math.inf)
    largest = tf.maximum(tf.where(sees, tf.reduce_max(x, 3, keepdims=True), -math.inf), sink)
    largest = tf.stop_gradient(tf.where(some, largest, 0))
    e = tf.where(visible, tf.exp(tf.where(visible, x - largest, 0)), 0)
    total = tf.reduce_sum(e, 3, keepdims=True) + tf.exp(sink - largest)
    total = tf.where(some, total, 1)
    lse = tf.where(some, largest + tf.math.log(total), -math.inf)
    weights = e / total
    rate = op.get_attr("dropout_rate")
    if rate:
        weights *= tf.cast(_dropout(rate, seed, tf.shape(x)), x.dtype)
    return tf.einsum("bhij,bjhd->bihd", weights, value), lse[..., 0]


def _dropout(rate, seed, shape):
    """What multiplies the weights: attention_dropout.h in stock TensorFlow, float32."""
    low = lambda x: tf.bitwise.bitwise_and(x, 0xFFFFFFFF)
    high = lambda x: low(tf.bitwise.right_shift(x, tf.constant(32, tf.int64)))
    xor = tf.bitwise.bitwise_xor

    def philox(counter, key):
        c, k = counter, key
        for _ in range(7):
            a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
            c = (
                xor(xor(high(b), c[1]), k[0]),
                low(b),
                xor(xor(high(a), c[3]), k[1]),
                low(a),
            )
            k = low(k[0] + 0x9E3779B9), low(k[1] + 0xBB67AE85)
        return c

    none = tf.zeros([], tf.int64)
    *key, salt, _ = philox((low(seed[1]), high(seed[1]), none, none), (low(seed[0]), high(seed[0])))
    batch, heads, seq_q, seq_k = tf.unstack(tf.cast(shape, tf.int64))
    blocks = tf.range((seq_k + 3) // 4)
    head = tf.reshape(tf.range(batch * heads), [batch, heads, 1, 1])
    words = tf.stack(philox((blocks, tf.range(seq_q)[:, None], head, salt), key), 4)
    words = tf.reshape(words, [batch, heads, seq_q, -1])[..., :seq_k]
    threshold = int(rate * 2**32 + 0.5)
    return tf.where(words >= threshold, 2**32 / (2**32 - threshold), 0.0)


def _visible(op, query, key, mask, query_lengths, key_lengths):
    """Returns bool [batch, heads, seq_q, seq_k]."""
    batch, seq_q, heads = tf.unstack(tf.shape(query)[:3])
    seq_k = tf.shape(key)[1]
    i, j = tf.range(seq_q)[:, None], tf.range(seq_k)
    length = lambda x, seq: (
        seq if x.shape == [0] else tf.clip_by_value(x, 0, seq)[:, None, None, None]
    )
    num_q, num_k = length(query_lengths, seq_q), length(key_lengths, seq_k)
    visible = tf.broadcast_to((i < num_q) & (j < num_k), [batch, heads, seq_q, seq_k])
    beside = j - i - (num_k - num_q if op.get_attr("bottom_right") else 0)
    left, right = op.get_attr("window_left"), op.get_attr("window_right")
    if op.get_attr("is_causal"):
        right = 0
    # A window beyond int32 hides nothing.
    if 0 <= left < tf.int32.max:
        visible &= beside >= -left
    if 0 <= right < tf.int32.max:
        visible &= beside <= right
    return visible if mask.shape.rank == 1 else visible & mask


register_second_order("TfOps>DotProductAttentionGrad", lambda *x: _composite_gradients(*x)[:4])
register_second_order("TfOps>DotProductAttentionBiasGrad", lambda *x: _composite_gradients(*x)[4])
