# SPDX-License-Identifier: Apache-2.0
"""The launchers of normalization without TensorFlow, on memory at odd addresses.

Run as `python -m tests.normalization_rows`; TF_OPS_ISA chooses the instruction set.
"""

import itertools

import ml_dtypes
import numpy as np

from tests.runner import Kernels

EPSILON = 1e-3


def unaligned(array):
    """A copy one element beside where NumPy would put it."""
    memory = np.empty(array.size + 1, array.dtype)
    memory[1:] = array.ravel()
    return memory[1:].reshape(array.shape)


def reference(x, scale, beta, dy, ds, subtract_mean):
    x, scale, beta, dy, ds = (a.astype(np.float64) for a in (x, scale, beta, dy, ds))
    mean = x.mean(-1, keepdims=True) * subtract_mean
    rstd = 1 / np.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + EPSILON)
    xhat, g = (x - mean) * rstd, dy * scale
    dx = g - g.mean(-1, keepdims=True) * subtract_mean - xhat * (g * xhat).mean(-1, keepdims=True)
    return [
        xhat * scale + beta * subtract_mean,
        rstd * dx + ds,
        (dy * xhat).reshape(-1, *scale.shape).sum(0),
        dy.reshape(-1, *scale.shape).sum(0),
    ]


def verify(kernels, dtype, weight_dtype, shape, weight_shape, subtract_mean, move):
    rng = np.random.default_rng(0)
    draw = lambda shape, dtype: move(rng.standard_normal(shape).astype(dtype))
    x, residual, dy, ds = (draw(shape, dtype) for _ in range(4))
    scale, beta = (draw(weight_shape, weight_dtype) for _ in range(2))
    like = lambda *arrays: [move(np.empty_like(a)) for a in arrays]
    stats = [np.empty(shape[:-1], np.float32) for _ in range(1 + subtract_mean)]
    y, s, dx, *dweights = like(x, x, x, scale, beta)
    absent = np.empty(0, np.float32)
    if subtract_mean:
        name, weights, attributes = "TfOps>LayerNormalization", [scale, beta], [EPSILON]
    else:
        name, weights, attributes = "TfOps>RmsNormalization", [scale], [EPSILON, 0.0]
    kernels(name, [x, residual, *weights], [*attributes, 1, 1], [y, s, *stats])
    dweights = dweights[: len(weights)]
    inputs = [dy, ds, *[absent] * len(stats), s, *weights, *stats]
    kernels(name + "Grad", inputs, [*attributes, 1], [dx, *dweights])

    exact = (x.astype(np.float32) + residual.astype(np.float32)).astype(dtype)
    np.testing.assert_array_equal(s.astype(np.float32), exact.astype(np.float32))
    expected = reference(s, scale, beta, dy, ds, subtract_mean)
    results = [y, dx, *dweights]
    for a, e in zip(results, expected):
        ulps = 8 * float(ml_dtypes.finfo(a.dtype).eps) * np.abs(e).max(initial=0)
        error = np.abs(a.astype(np.float64) - e).max(initial=0)
        assert error <= ulps, (name, dtype, weight_dtype, shape, error, ulps)
    return results


def main():
    kernels = Kernels()
    shapes = [((3, c), (c,)) for c in (1, 7, 8, 31, 64, 65, 200, 1000, 5000)]
    shapes += [((50, 3, 37), (3, 37)), ((200, 33), (33,))]
    dtypes = [np.float32, np.float16, ml_dtypes.bfloat16]
    for dtype, (shape, weight), subtract_mean in itertools.product(dtypes, shapes, (False, True)):
        for weight_dtype in {dtype, np.float32}:
            case = (kernels, dtype, weight_dtype, shape, weight, subtract_mean)
            plain, moved = verify(*case, np.copy), verify(*case, unaligned)
            for a, b in zip(plain, moved):
                np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))
    print("ok")


if __name__ == "__main__":
    main()
