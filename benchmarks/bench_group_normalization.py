# SPDX-License-Identifier: Apache-2.0
"""Group normalization beside Keras's, forward and forward with gradients."""

import keras
import tensorflow as tf

from tf_ops import group_normalization
from tf_ops.benchmarking import Case, compiled, main, with_gradients

GPU = bool(tf.config.list_physical_devices("GPU"))
SHAPES = [((64, 56, 56, 256), -1), ((64, 256, 56, 56), 1)] if GPU else []
SHAPES = SHAPES or [((8, 56, 56, 64), -1), ((8, 64, 56, 56), 1), ((4, 16, 16, 512), -1)]
DTYPES = [tf.bfloat16] if GPU else [tf.float32, tf.bfloat16]


def stock(channels, axis):
    """What the layer of Keras does, as a function of its input and weights."""
    layer = keras.layers.GroupNormalization(32, axis)

    def run(x, gamma, beta):
        layer.gamma, layer.beta = gamma, beta
        return keras.layers.GroupNormalization.call(layer, x)

    return run


def cases():
    for dtype in DTYPES:
        for shape, axis in SHAPES:
            channels = shape[axis]
            draw = lambda *shape, dtype=dtype: tf.cast(tf.random.normal(shape), dtype)
            make = lambda draw=draw, shape=shape, channels=channels: [
                draw(*shape),
                draw(channels),
                draw(channels),
            ]
            size = dtype.size * tf.TensorShape(shape).num_elements()
            ours = lambda x, gamma, beta, axis=axis: group_normalization(x, gamma, beta, 32, axis)
            layer = stock(channels, axis)
            label = f"{dtype.name} {'x'.join(map(str, shape))} axis {axis}"
            yield Case(label, make, compiled(ours, layer), bytes=2 * size, dtype=dtype)
            yield Case(
                label + " with gradients",
                lambda make=make, draw=draw, shape=shape: [*make(), draw(*shape)],
                compiled(with_gradients(ours), with_gradients(layer)),
                bytes=5 * size,
                dtype=dtype,
            )


if __name__ == "__main__":
    main("group_normalization", list(cases()))
