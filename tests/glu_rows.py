# SPDX-License-Identifier: Apache-2.0
"""The CPU launchers of gated linear units without TensorFlow, on memory at odd addresses.

Run as `python -m tests.glu_rows`; TF_OPS_ISA chooses the instruction set.
"""

import itertools
import math

import ml_dtypes
import numpy as np

from tests.normalization_rows import unaligned
from tests.runner import Kernels

erf = np.vectorize(math.erf, otypes=[np.float64])


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def tanh_argument(x):
    return math.sqrt(8 / math.pi) * (x + 0.044715 * x**3)


VALUES = {
    "silu": lambda x: x * sigmoid(x),
    "gelu": lambda x: x * (1 + erf(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * sigmoid(tanh_argument(x)),
    "relu": lambda x: np.maximum(x, 0),
    "sigmoid": sigmoid,
}


def verify(kernels, dtype, activation, shape, packed, move):
    rng = np.random.default_rng(0)
    draw = lambda scale=1: (scale * rng.standard_normal(shape)).astype(dtype)
    gate, up, dy = draw(3), draw(), draw()
    inputs = [np.concatenate([gate, up], -1), np.empty(0, dtype)] if packed else [gate, up]
    inputs = [move(x) for x in inputs]
    y, dgate, dup = (move(np.zeros_like(x)) for x in (gate, *inputs))
    name = "TfOps>GatedLinearUnit"
    kernels(name, inputs, [activation, packed], [y])
    kernels(name + "Grad", [move(dy), *inputs], [activation, packed], [dgate, dup])

    f, h = VALUES[activation], 1e-4
    g, u, d = (x.astype(np.float64) for x in (gate, up, dy))
    slope = (f(g + h) - f(g - h)) / (2 * h)
    if activation == "relu":
        slope = g > 0
    gradients = np.split(dgate, 2, -1) if packed else [dgate, dup]
    for a, e in zip([y, *gradients], [f(g) * u, d * u * slope, d * f(g)]):
        allowed = (4 * float(ml_dtypes.finfo(dtype).eps) + 1e-7) * np.abs(e).max(initial=0)
        error = np.abs(a.astype(np.float64) - e).max(initial=0)
        assert error <= allowed, (dtype, activation, shape, packed, error, allowed)
    return [y, dgate, dup]


def main():
    kernels = Kernels()
    shapes = [(3, cols) for cols in (1, 7, 8, 15, 16, 33, 64, 1000)]
    dtypes = [np.float32, np.float16, ml_dtypes.bfloat16]
    for case in itertools.product(dtypes, VALUES, shapes, (False, True)):
        plain, moved = verify(kernels, *case, np.copy), verify(kernels, *case, unaligned)
        for a, b in zip(plain, moved):
            np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))
    print("ok")


if __name__ == "__main__":
    main()
