# SPDX-License-Identifier: Apache-2.0
import tensorflow as tf

from tf_ops._ops.cross_entropy import sparse_softmax_cross_entropy
from tf_ops.benchmarking import Case, compiled, main

SHAPES = [
    (1024, 32000, tf.float32),
    (1024, 32000, tf.bfloat16),
    (65536, 10, tf.float32),
    (16384, 100, tf.float32),
    (4096, 1000, tf.float32),
]
if tf.config.list_physical_devices("GPU"):
    SHAPES += [(8192, c, tf.bfloat16) for c in (4096, 32768)] + [(4096, 131072, tf.bfloat16)]


def with_gradient(loss_of):
    def step(labels, logits, dloss):
        with tf.GradientTape() as tape:
            tape.watch(logits)
            loss = loss_of(labels, logits, dloss)
        return loss, tape.gradient(loss, logits, tf.cast(dloss, loss.dtype))

    return step


def ours(labels, logits, dloss):
    return sparse_softmax_cross_entropy(labels, logits)


def stock(labels, logits, dloss):
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)


def cases():
    for tokens, classes, dtype in SHAPES:

        def make_inputs(tokens=tokens, classes=classes, dtype=dtype):
            labels = tf.random.uniform([tokens], maxval=classes, dtype=tf.int32)
            logits = tf.random.normal([tokens, classes], dtype=dtype)
            return labels, logits, tf.random.normal([tokens])

        size, label = tokens * classes * dtype.size, f"{tokens}x{classes} {dtype.name}"
        # Forward reads the logits; the gradient reads them again and writes as much.
        yield Case(f"{label} forward", make_inputs, compiled(ours, stock), bytes=size, dtype=dtype)
        contenders = compiled(with_gradient(ours), with_gradient(stock))
        yield Case(f"{label} with gradient", make_inputs, contenders, bytes=3 * size, dtype=dtype)


if __name__ == "__main__":
    main("cross_entropy", list(cases()))
