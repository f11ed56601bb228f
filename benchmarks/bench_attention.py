# SPDX-License-Identifier: Apache-2.0
"""Attention against the formula of keras.ops.dot_product_attention in stock TensorFlow.

On a CPU, PyTorch's attention takes its turn, too, where TORCH_PYTHON names a Python that has it.
"""

import os

import keras
import tensorflow as tf

from tf_ops import dot_product_attention
from tf_ops.benchmarking import Case, Peer, compiled, main, with_gradients

# batch, seq, heads, kv_heads, head_dim, dtype
ON_CPU = [
    (1, 2048, 8, 8, 64, tf.float32),
    (1, 2048, 8, 8, 64, tf.bfloat16),
    (1, 1024, 8, 2, 128, tf.float32),
    (8, 256, 8, 8, 32, tf.float32),
    (8, 64, 8, 8, 32, tf.float32),
]
ON_GPU = [
    (4, 4096, 16, 16, 128, tf.bfloat16),
    (4, 4096, 16, 16, 64, tf.bfloat16),
    (4, 4096, 16, 4, 128, tf.float16),
    (16, 512, 16, 16, 64, tf.bfloat16),
    (2, 2048, 16, 16, 64, tf.float32),
]


def case(shape, is_causal, gradients, torch):
    batch, seq, heads, kv_heads, head_dim, dtype = shape
    draw = lambda n: tf.cast(tf.random.normal([batch, seq, n, head_dim]), dtype)

    def ours(query, key, value):
        return dot_product_attention(query, key, value, is_causal=is_causal)

    def stock(query, key, value):
        return keras.ops.dot_product_attention(query, key, value, is_causal=is_causal)

    contenders = compiled(*(with_gradients(fn) if gradients else fn for fn in (ours, stock)))
    if torch:
        contenders["torch"] = torch.work([*shape[:-1], dtype.name], is_causal, gradients)

    # Two matrix products forward and five backward; half of each is visible under is_causal.
    products = 7 if gradients else 2
    return Case(
        label=f"{batch}x{seq}x{heads}/{kv_heads}x{head_dim} {dtype.name}"
        + " causal" * is_causal
        + " gradients" * gradients,
        make_inputs=lambda: [draw(n) for n in [heads, kv_heads, kv_heads] + [heads] * gradients],
        contenders=contenders,
        flops=products * 2 * batch * heads * seq * seq * head_dim / (1 + is_causal),
        dtype=dtype,
    )


def cases():
    shapes = ON_GPU if tf.config.list_physical_devices("GPU") else ON_CPU
    python = os.environ.get("TORCH_PYTHON")
    torch = Peer([python, "benchmarks/peers/attention_torch_cpu.py"]) if python else None
    return [case(s, c, g, torch) for s in shapes for c in (False, True) for g in (False, True)]


if __name__ == "__main__":
    main("attention", cases())
