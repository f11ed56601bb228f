# SPDX-License-Identifier: Apache-2.0
"""PyTorch's attention on the CPU, in a process that bench_attention.py drives by lines of JSON.

The first line sent is PyTorch's version. A line read is a shape, as in bench_attention.py, and
what to do with it, or a number of calls to make, which is answered with the seconds they took.
"""

import json
import sys
import time

import torch
from torch.nn.functional import scaled_dot_product_attention


def attention(shape, is_causal, gradients, rotated):
    """A function of i that calls SDPA on the i-th of some inputs, in the layout it likes best."""
    batch, seq, heads, kv_heads, head_dim, dtype = shape
    options = {"is_causal": is_causal, "enable_gqa": heads != kv_heads}

    def draw(n):
        return torch.randn(batch, n, seq, head_dim, dtype=getattr(torch, dtype))

    inputs = [[draw(n) for n in (heads, kv_heads, kv_heads, heads)] for _ in range(rotated)]

    def forward(i):
        with torch.no_grad():
            scaled_dot_product_attention(*inputs[i % rotated][:3], **options)

    def forward_and_backward(i):
        *leaves, dy = inputs[i % rotated]
        for leaf in leaves:
            leaf.requires_grad_()
        y = scaled_dot_product_attention(*leaves, **options)
        torch.autograd.grad(y, leaves, dy)

    return forward_and_backward if gradients else forward


def main():
    print(json.dumps(torch.__version__), flush=True)
    call = None
    for line in sys.stdin:
        order = json.loads(line)
        if isinstance(order, list):
            call = attention(*order)
            continue
        start = time.perf_counter()
        for i in range(order):
            call(i)
        print(json.dumps(time.perf_counter() - start), flush=True)


if __name__ == "__main__":
    main()
