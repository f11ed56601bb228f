# SPDX-License-Identifier: Apache-2.0
"""Gated linear units beside the activations of stock TensorFlow times `up`."""

import tensorflow as tf

from tf_ops import gated_linear_unit
from tf_ops.benchmarking import Case, compiled, main, with_gradients

GPU = bool(tf.config.list_physical_devices("GPU"))
SHAPES = [(16384, c) for c in (1024, 4096, 8192)] + [(4096, 16384)]
SHAPES = SHAPES if GPU else [(8, 64), (4096, 1024)]
DTYPES = [tf.bfloat16] if GPU else [tf.float32, tf.bfloat16]
STOCK = {
    "silu": tf.nn.silu,
    "gelu": lambda x: tf.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: tf.nn.gelu(x, approximate=True),
}


def draw(dtype, *shape):
    return tf.cast(tf.random.normal(shape), dtype)


def packed(stock):
    return lambda x: stock(*tf.split(x, 2, -1))


def cases():
    for dtype in DTYPES:
        for rows, cols in SHAPES:
            for activation, f in STOCK.items():
                ours = lambda gate, up=None, name=activation: gated_linear_unit(gate, up, name)
                stock = lambda gate, up, f=f: f(gate) * up
                size = rows * cols * dtype.size
                pair = lambda n=2, shape=(rows, cols), d=dtype: [draw(d, *shape) for _ in range(n)]
                label = f"{activation} {dtype.name} {rows}x{cols}"
                yield Case(label, pair, compiled(ours, stock), bytes=3 * size, dtype=dtype)
                yield Case(
                    label + " gradients",
                    lambda pair=pair: pair(3),
                    compiled(with_gradients(ours), with_gradients(stock)),
                    bytes=5 * size,
                    dtype=dtype,
                )
            label = f"packed silu {dtype.name} {rows}x{cols}"
            one = lambda d=dtype, shape=(rows, 2 * cols): [draw(d, *shape)]
            stock = packed(lambda gate, up: tf.nn.silu(gate) * up)
            yield Case(label, one, compiled(gated_linear_unit, stock), bytes=3 * size, dtype=dtype)
            yield Case(
                label + " gradients",
                lambda one=one, d=dtype, shape=(rows, cols): [*one(), draw(d, *shape)],
                compiled(with_gradients(gated_linear_unit), with_gradients(stock)),
                bytes=5 * size,
                dtype=dtype,
            )


if __name__ == "__main__":
    main("glu", list(cases()))
