# SPDX-License-Identifier: Apache-2.0
"""Attention of one query to pages beside stock TensorFlow, which gathers the pages first."""

import tensorflow as tf

from tf_ops import paged_attention
from tf_ops.benchmarking import Case, compiled, main

GPU = bool(tf.config.list_physical_devices("GPU"))
# batch, keys, heads, kv_heads, head_dim, page size
SHAPES = [(16, 8192, 32, 8, 128, 16), (16, 8192, 32, 8, 128, 1), (1, 8192, 32, 8, 128, 16)]
if not GPU:
    SHAPES = [(4, 2048, 16, 4, 64, 16), (4, 2048, 16, 4, 64, 1), (1, 4096, 8, 8, 128, 16)]
DTYPES = [tf.bfloat16] if GPU else [tf.float32, tf.bfloat16]


def stock(query, key_pages, value_pages, page_table, lengths):
    batch, _, heads, dim = query.shape
    kv_heads = key_pages.shape[2]
    keys, values = (
        tf.reshape(tf.gather(pages, page_table), [batch, -1, kv_heads, dim])
        for pages in (key_pages, value_pages)
    )
    query = tf.reshape(query, [batch, kv_heads, heads // kv_heads, dim])
    x = tf.einsum("bhgd,bjhd->bhgj", query, keys) * dim**-0.5
    visible = tf.sequence_mask(lengths, keys.shape[1])[:, None, None]
    weights = tf.nn.softmax(tf.where(visible, x, x.dtype.min))
    return tf.reshape(tf.einsum("bhgj,bjhd->bhgd", weights, values), [batch, 1, heads, dim])


def case(shape, dtype):
    batch, keys, heads, kv_heads, dim, page_size = shape
    per_row = keys // page_size

    def make_inputs():
        draw = lambda *shape: tf.cast(tf.random.normal(shape), dtype)
        table = tf.reshape(tf.random.shuffle(tf.range(batch * per_row)), [batch, per_row])
        pages = [draw(batch * per_row, page_size, kv_heads, dim) for _ in range(2)]
        return [draw(batch, 1, heads, dim), *pages, table, tf.fill([batch], keys)]

    return Case(
        label=f"{batch}x{keys}x{heads}/{kv_heads}x{dim} page {page_size} {dtype.name}",
        make_inputs=make_inputs,
        contenders=compiled(paged_attention, stock),
        bytes=2 * batch * keys * kv_heads * dim * dtype.size,
        dtype=dtype,
    )


def cases():
    return [case(shape, dtype) for dtype in DTYPES for shape in SHAPES]


if __name__ == "__main__":
    main("paged_attention", cases())
