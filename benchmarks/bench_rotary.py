# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding of query and key beside the formula in stock TensorFlow."""

import tensorflow as tf

from tf_ops import rotary_embedding
from tf_ops.benchmarking import Case, compiled, main

GPU = bool(tf.config.list_physical_devices("GPU"))
# batch, seq, heads, kv_heads, head_dim
SHAPES = [(4, 4096, h, k, 128) for h, k in ((8, 2), (32, 8), (64, 8))]
SHAPES = SHAPES if GPU else [(1, 8, 4, 2, 64), (2, 1024, 16, 4, 64), (1, 2048, 8, 8, 128)]
DTYPES = [tf.bfloat16] if GPU else [tf.float32, tf.bfloat16]


def rotated(x, interleaved):
    half = x.shape[-1] // 2
    frequency = 10000.0 ** (-tf.range(half, dtype=tf.float32) / half)
    angle = tf.range(x.shape[1], dtype=tf.float32)[:, None, None] * frequency
    cos, sin = tf.cast(tf.cos(angle), x.dtype), tf.cast(tf.sin(angle), x.dtype)
    if interleaved:
        a, b = x[..., ::2], x[..., 1::2]
        return tf.reshape(tf.stack([a * cos - b * sin, b * cos + a * sin], -1), tf.shape(x))
    a, b = tf.split(x, 2, -1)
    return tf.concat([a * cos - b * sin, b * cos + a * sin], -1)


def gradients(fn):
    def step(query, key, dquery, dkey):
        with tf.GradientTape() as tape:
            tape.watch([query, key])
            y = fn(query, key)
        return tape.gradient(y, [query, key], [dquery, dkey])

    return step


def cases():
    for dtype in DTYPES:
        for batch, seq, heads, kv_heads, head_dim in SHAPES:
            draw = lambda h, s=(batch, seq), d=head_dim, t=dtype: tf.cast(
                tf.random.normal([*s, h, d]), t
            )
            make = lambda draw=draw, h=heads, k=kv_heads: [draw(h), draw(k)]
            size = 2 * batch * seq * (heads + kv_heads) * head_dim * dtype.size
            for interleaved in [False, True]:
                ours = lambda q, k, i=interleaved: rotary_embedding((q, k), interleaved=i)
                stock = lambda q, k, i=interleaved: (rotated(q, i), rotated(k, i))
                label = f"{dtype.name} {batch}x{seq}x{heads}+{kv_heads}x{head_dim}"
                label = "interleaved " * interleaved + label
                yield Case(label, make, compiled(ours, stock), bytes=size, dtype=dtype)
                yield Case(
                    label + " gradients",
                    lambda make=make: [*make(), *make()],
                    compiled(gradients(ours), gradients(stock)),
                    bytes=size,
                    dtype=dtype,
                )


if __name__ == "__main__":
    main("rotary", list(cases()))
