# SPDX-License-Identifier: Apache-2.0
"""scaled_square beside its formula in stock TensorFlow."""

from functools import partial

import tensorflow as tf
from tf_ops.benchmarking import Case, compiled, main, with_gradients

from my_ops import scaled_square

GPU = bool(tf.config.list_physical_devices("GPU"))
SIZES = [1 << 20, 1 << 26] if GPU else [1 << 12, 1 << 22]
DTYPES = [tf.bfloat16] if GPU else [tf.float32, tf.bfloat16]


def stock(x):
    return x * x


def draw(count, size, dtype):
    return [tf.cast(tf.random.normal([size]), dtype) for _ in range(count)]


def cases():
    for dtype in DTYPES:
        for size in SIZES:
            yield Case(
                f"{dtype.name} {size}",
                partial(draw, 1, size, dtype),
                compiled(scaled_square, stock),
                bytes=2 * size * dtype.size,
                dtype=dtype,
            )
            yield Case(
                f"{dtype.name} {size} gradient",
                partial(draw, 2, size, dtype),
                compiled(with_gradients(scaled_square), with_gradients(stock)),
                bytes=3 * size * dtype.size,
                dtype=dtype,
            )


if __name__ == "__main__":
    main("scaled_square", list(cases()))
