# SPDX-License-Identifier: Apache-2.0
"""RMS and layer normalization beside Keras's, forward and forward with gradients."""

import keras
import tensorflow as tf

from tf_ops import layer_normalization, rms_normalization
from tf_ops.benchmarking import Case, compiled, main, with_gradients

GPU = bool(tf.config.list_physical_devices("GPU"))
SHAPES = [(16384, c) for c in (1024, 4096, 8192)] + [(4096, 16384)]
SHAPES = SHAPES if GPU else [(4096, 1024), (65536, 128)]
DTYPES = [tf.bfloat16] if GPU else [tf.float32, tf.bfloat16]


def draw(dtype, *shape):
    return tf.cast(tf.random.normal(shape), dtype)


def with_residual(norm, fused):
    """norm(x, *weights) of a sum, and the sum, as in a pre-norm block."""

    def run(x, residual, *weights):
        if fused:
            return norm(x, *weights, residual=residual, return_residual=True)
        s = x + residual
        return norm(s, *weights), s

    return run


def cases():
    families = {
        "rms": (rms_normalization, keras.ops.rms_normalization, 1),
        "layer": (layer_normalization, keras.ops.layer_normalization, 2),
    }
    for dtype in DTYPES:
        for shape in SHAPES:
            size = shape[0] * shape[1] * dtype.size
            for name, (ours, stock, weights) in families.items():
                make = lambda shape=shape, weights=weights, dtype=dtype: [
                    draw(dtype, *shape),
                    *(draw(dtype, shape[1]) for _ in range(weights)),
                ]
                label = f"{name} {dtype.name} {shape[0]}x{shape[1]}"
                yield Case(label, make, compiled(ours, stock), bytes=2 * size, dtype=dtype)
                yield Case(
                    label + " with gradients",
                    lambda make=make: [*make(), make()[0]],
                    compiled(with_gradients(ours), with_gradients(stock)),
                    bytes=5 * size,
                    dtype=dtype,
                )
    shape, dtype = SHAPES[0], DTYPES[0]
    yield Case(
        f"rms of a sum {dtype.name} {shape[0]}x{shape[1]}",
        lambda: [draw(dtype, *shape), draw(dtype, *shape), draw(dtype, shape[1])],
        compiled(
            with_residual(rms_normalization, True),
            with_residual(keras.ops.rms_normalization, False),
        ),
        bytes=4 * shape[0] * shape[1] * dtype.size,
        dtype=dtype,
    )


if __name__ == "__main__":
    main("normalization", list(cases()))
