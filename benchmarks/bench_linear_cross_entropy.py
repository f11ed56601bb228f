# SPDX-License-Identifier: Apache-2.0
"""Loss and all gradients of hidden x kernel beside stock TensorFlow, which holds the logits.

The share is that of three matrix products alone; ours computes four, the logits twice.
"""

import tensorflow as tf

from tf_ops import linear_cross_entropy
from tf_ops.benchmarking import Case, compiled, main

SHAPES = [(1024, 256, 32000, tf.float32), (512, 512, 32000, tf.float32)]
if tf.config.list_physical_devices("GPU"):
    SHAPES = [(8192, 4096, 131072, tf.bfloat16), (8192, 4096, 32768, tf.bfloat16)]


def with_gradients(loss_of):
    def step(labels, hidden, kernel, dloss):
        with tf.GradientTape() as tape:
            tape.watch([hidden, kernel])
            loss = loss_of(labels, hidden, kernel)
        return loss, tape.gradient(loss, [hidden, kernel], tf.cast(dloss, loss.dtype))

    return step


def stock(labels, hidden, kernel):
    logits = tf.matmul(hidden, kernel)
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, tf.cast(logits, tf.float32))


def cases():
    for tokens, features, classes, dtype in SHAPES:

        def make_inputs(tokens=tokens, features=features, classes=classes, dtype=dtype):
            labels = tf.random.uniform([tokens], maxval=classes, dtype=tf.int32)
            hidden = tf.random.normal([tokens, features], dtype=dtype)
            kernel = tf.random.normal([features, classes], stddev=features**-0.5, dtype=dtype)
            return labels, hidden, kernel, tf.random.normal([tokens])

        label = f"{tokens}x{features}x{classes} {dtype.name} with gradients"
        contenders = compiled(with_gradients(linear_cross_entropy), with_gradients(stock))
        contenders["ours xla"] = tf.function(
            with_gradients(linear_cross_entropy), jit_compile=True, autograph=False
        )
        flops = 3 * 2 * tokens * features * classes
        yield Case(label, make_inputs, contenders, flops=flops, dtype=dtype)


if __name__ == "__main__":
    main("linear_cross_entropy", list(cases()))
