# SPDX-License-Identifier: Apache-2.0
"""The CPU launcher of rotary embedding without TensorFlow, on memory at odd addresses.

Run as `python -m tests.rotary_rows`; TF_OPS_ISA chooses the instruction set.
"""

import itertools

import ml_dtypes
import numpy as np

from tests.normalization_rows import unaligned
from tests.runner import Kernels

THETA, SCALE = 10000.0, 2.0


def reference(x, positions, rotary_dim, interleaved, inverse):
    pairs = rotary_dim // 2
    angles = positions[..., None] / SCALE * THETA ** (-np.arange(pairs) / pairs)
    cos, sin = np.cos(angles)[:, :, None], np.sin(angles)[:, :, None] * (-1) ** inverse
    first = slice(0, rotary_dim, 2) if interleaved else slice(0, pairs)
    second = slice(1, rotary_dim, 2) if interleaved else slice(pairs, rotary_dim)
    x = x.astype(np.float64)
    y = x.copy()
    y[..., first] = x[..., first] * cos - x[..., second] * sin
    y[..., second] = x[..., second] * cos + x[..., first] * sin
    return y


def verify(kernels, dtype, dims, interleaved, inverse, move):
    head_dim, rotary_dim = dims
    rng = np.random.default_rng(0)
    draw = lambda heads: move(rng.standard_normal((2, 5, heads, head_dim)).astype(dtype))
    inputs = [draw(3), draw(1)]
    positions = move(rng.integers(-100, 2**20, (2, 5)).astype(np.int32))
    outputs = [move(np.empty_like(x)) for x in inputs]
    absent = np.empty(0, np.float32)
    attributes = [THETA, SCALE, rotary_dim, interleaved, inverse]
    kernels("TfOps>RotaryEmbedding", [*inputs, positions, absent, absent], attributes, outputs)
    for x, a in zip(inputs, outputs):
        e = reference(x, positions.astype(np.float64), rotary_dim, interleaved, inverse)
        allowed = 2 * float(ml_dtypes.finfo(dtype).eps) * np.abs(e).max()
        error = np.abs(a.astype(np.float64) - e).max()
        assert error <= allowed, (dtype, dims, interleaved, inverse, error, allowed)
    return outputs


def main():
    kernels = Kernels()
    dims = [(2, 2), (8, 8), (64, 64), (66, 66), (33, 20), (80, 32), (128, 128), (512, 512)]
    dtypes = [np.float32, np.float16, ml_dtypes.bfloat16]
    for case in itertools.product(dtypes, dims, (False, True), (False, True)):
        plain, moved = verify(kernels, *case, np.copy), verify(kernels, *case, unaligned)
        for a, b in zip(plain, moved):
            np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))
    print("ok")


if __name__ == "__main__":
    main()
