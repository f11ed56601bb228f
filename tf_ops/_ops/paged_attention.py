# SPDX-License-Identifier: Apache-2.0
"""Attention to a cache of keys and values that lie in pages."""

import math

import numpy as np
import tensorflow as tf

from tf_ops._library import library
from tf_ops._operation import operation

tf.no_gradient("TfOps>PagedAttention")


@operation
def paged_attention(
    query,
    key_pages,
    value_pages,
    page_table,
    key_value_seq_lengths,
    *,
    scale=None,
    attn_logits_soft_cap=None,
    local_window_size=None,
    sink=None,
):
    """Returns softmax(cap(scale · query · keyᵀ)) · value over the keys that a page table names.

    For inference: it has no gradient. Key j of batch row b is row j % page_size of page
    `page_table[b, j // page_size]` (vLLM; Kwon et al., 2023). Attention is causal, and the last
    query sees the last key of its batch row; so queries are the newest tokens, whose keys are in
    the cache already. A query that sees no key gives 0. What is beyond the lengths or the window
    is never read, nor are the table's entries for it.

    Args:
        query: [batch, seq_q, heads, head_dim] tensor of float32, float16 or bfloat16.
        key_pages: [pages, page_size, kv_heads, head_dim] of that dtype; any page size, and heads
            is a multiple of kv_heads.
        value_pages: [pages, page_size, kv_heads, value_dim] of that dtype; head_dim and
            value_dim are at most 256.
        page_table: int32 [batch, pages_per_row]; batch rows may share pages.
        key_value_seq_lengths: int [batch], the number of keys of each batch row, clamped into
            [0, pages_per_row · page_size].
        scale: float; by default 1 / sqrt(head_dim).
        attn_logits_soft_cap: positive float c; cap(x) = c · tanh(x / c). None caps nothing.
        local_window_size: int, or (left, right) of which the second has no effect; a query sees
            so many keys before its own.
        sink: [heads], a logit of each head that takes part in the softmax only.

    Returns:
        [batch, seq_q, heads, value_dim] tensor of the dtype of `query`.

    Raises:
        ValueError: dtypes or options do not fit.
        tf.errors.InvalidArgumentError: shapes do not fit; or, on the CPU, an entry of the table
            that a query needs names no page. On the GPU nothing is read for such an entry, and
            the output of the queries that need it is NaN.
    """
    query, key_pages, value_pages = map(tf.convert_to_tensor, (query, key_pages, value_pages))
    for name, x in (("key_pages", key_pages), ("value_pages", value_pages)):
        if x.dtype != query.dtype:
            raise _error(f"{name} is {x.dtype.name}, query {query.dtype.name}")
    if query.dtype not in (tf.float32, tf.float16, tf.bfloat16):
        raise _error(f"query is {query.dtype.name}; it must be float32, float16 or bfloat16")
    page_table = tf.convert_to_tensor(page_table)
    if page_table.dtype != tf.int32:
        raise _error(f"page_table is {page_table.dtype.name}; it must be int32")
    lengths = tf.convert_to_tensor(key_value_seq_lengths)
    if lengths.dtype not in (tf.int32, tf.int64):
        raise _error(f"key_value_seq_lengths is {lengths.dtype.name}; it must be int32 or int64")
    if lengths.dtype == tf.int64:
        lengths = tf.cast(tf.clip_by_value(lengths, 0, tf.int32.max), tf.int32)
    if scale is not None and not (
        isinstance(scale, (int, float, np.generic)) and math.isfinite(scale)
    ):
        raise _error(f"scale is {scale!r}; it must be None or a finite float")
    if attn_logits_soft_cap is not None and not 0.0 < float(attn_logits_soft_cap) < math.inf:
        raise _error(f"attn_logits_soft_cap is {attn_logits_soft_cap}; it must be None or positive")
    return library.tf_ops_paged_attention(
        query=query,
        key_pages=key_pages,
        value_pages=value_pages,
        page_table=page_table,
        key_value_seq_lengths=lengths,
        sink=tf.constant([], tf.float32) if sink is None else tf.cast(sink, tf.float32),
        scale=math.nan if scale is None else float(scale),
        soft_cap=float(attn_logits_soft_cap or 0.0),
        window_left=_window_left(local_window_size),
    )


def _error(message):
    return ValueError(f"paged_attention: {message}")


def _window_left(size):
    if size is None:
        return -1
    sides = size if isinstance(size, (tuple, list)) else (size, 0)
    if len(sides) != 2 or not all(isinstance(s, (int, np.integer)) and s >= 0 for s in sides):
        raise _error(
            f"local_window_size is {size!r}; it must be None, an int or (left, right), not negative"
        )
    return int(sides[0])
