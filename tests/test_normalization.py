# SPDX-License-Identifier: Apache-2.0
import itertools
import os
import pathlib
import subprocess
import sys

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from tf_ops import layer_normalization, rms_normalization
from tf_ops._library import library
from tf_ops.testing import DTYPES, check, check_rejected, in_mode

ROOT = pathlib.Path(__file__).parents[1]
EPSILON = 1e-3

# Below, at and above the threads per row of each kernel, with and without whole vectors.
WIDTHS = [1, 2, 7, 31, 33, 64, 127, 128, 200, 760, 1000, 1024, 4096]
ROWS = [0, 1, 3, 199]
SHAPES = [*itertools.product(ROWS, WIDTHS), (3, 2047), (5, 8192), (2, 9001), (2, 33000), (7, 0)]


def wide(x):
    return tf.cast(x, tf.float32) if x.dtype.size < 4 else x


def normalized(x, axis, subtract_mean):
    mean = tf.reduce_mean(x, axis, keepdims=True) if subtract_mean else 0
    variance = tf.reduce_mean((x - mean) ** 2, axis, keepdims=True)
    return (x - mean) * tf.math.rsqrt(variance + tf.cast(EPSILON, x.dtype))


def rms_reference(x, scale=None, residual=None, offset=0, axis=-1):
    s = x if residual is None else x + residual
    y = normalized(wide(s), axis, subtract_mean=False)
    if scale is not None:
        y *= tf.cast(scale, y.dtype) + offset
    return tf.cast(y, x.dtype), s


def layer_reference(x, gamma=None, beta=None, residual=None, axis=-1):
    s = x if residual is None else x + residual
    y = normalized(wide(s), axis, subtract_mean=True)
    y = y if gamma is None else y * tf.cast(gamma, y.dtype)
    y = y if beta is None else y + tf.cast(beta, y.dtype)
    return tf.cast(y, x.dtype), s


def normal(shape, dtype=tf.float32, seed=0):
    return tf.cast(np.random.default_rng(seed).standard_normal(shape), dtype)


def both_gradients(run, *inputs):
    """The value and the gradients of run(*inputs) for a fixed uneven upstream gradient."""
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        y = run(*inputs)
    dy = tf.cos(tf.range(tf.cast(tf.size(y), tf.float32)))
    return [y, *tape.gradient(y, inputs, tf.cast(tf.reshape(dy, tf.shape(y)), y.dtype))]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rms_normalization(shape, dtype):
    check(
        lambda x, scale: rms_normalization(x, scale, epsilon=EPSILON),
        lambda x, scale: rms_reference(x, scale)[0],
        [shape, shape[-1:]],
        dtype,
        "eager",
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_layer_normalization(shape, dtype):
    check(
        lambda x, gamma, beta: layer_normalization(x, gamma, beta, epsilon=EPSILON),
        lambda x, gamma, beta: layer_reference(x, gamma, beta)[0],
        [shape, shape[-1:], shape[-1:]],
        dtype,
        "eager",
    )


# Several leading dimensions, several normalised axes, and every argument together: through every
# kind of call, with second-order gradients.
def test_rms_modes(dtype, mode):
    check(
        lambda x, scale, residual: rms_normalization(
            x, scale, [-2, -1], EPSILON, residual=residual, scale_offset=1.0, return_residual=True
        ),
        lambda x, scale, residual: rms_reference(x, scale, residual, 1, [-2, -1]),
        [(2, 3, 5, 7), (5, 7), (2, 3, 5, 7)],
        dtype,
        mode,
        second_order=True,
    )


def test_layer_modes(dtype, mode):
    check(
        lambda x, gamma, beta, residual: layer_normalization(
            x, gamma, beta, [-2, -1], EPSILON, residual=residual, return_residual=True
        ),
        lambda x, gamma, beta, residual: layer_reference(x, gamma, beta, residual, [-2, -1]),
        [(2, 3, 5, 7), (5, 7), (5, 7), (2, 3, 5, 7)],
        dtype,
        mode,
        second_order=True,
    )


@pytest.mark.parametrize("rows", [0, 1, 21])
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("has_scale", [False, True])
def test_rms_arguments(has_residual, has_scale, rows, dtype):
    names = ["scale"] * has_scale + ["residual"] * has_residual
    shapes = {"scale": (33,), "residual": (rows, 33)}
    take = lambda args: dict(zip(names, args))
    for offset in [0, 1.5]:
        check(
            lambda x, *args: rms_normalization(
                x, epsilon=EPSILON, scale_offset=offset, **take(args)
            ),
            lambda x, *args: rms_reference(x, offset=offset, **take(args))[0],
            [(rows, 33), *(shapes[n] for n in names)],
            dtype,
            "eager",
            second_order=rows == 1,
        )


@pytest.mark.parametrize("rows", [0, 1, 21])
@pytest.mark.parametrize("given", list(itertools.product([False, True], repeat=3)), ids=str)
def test_layer_arguments(given, rows, dtype):
    names = list(itertools.compress(["gamma", "beta", "residual"], given))
    shapes = {"gamma": (33,), "beta": (33,), "residual": (rows, 33)}
    take = lambda args: dict(zip(names, args))
    check(
        lambda x, *args: layer_normalization(x, epsilon=EPSILON, **take(args)),
        lambda x, *args: layer_reference(x, **take(args))[0],
        [(rows, 33), *(shapes[n] for n in names)],
        dtype,
        "eager",
        second_order=rows == 1,
    )


@pytest.mark.parametrize("weight_dtype", DTYPES, ids=lambda d: d.name)
def test_weights_of_another_dtype(weight_dtype, dtype):
    weights = [normal([40], weight_dtype, seed) for seed in (1, 2)]
    check(
        lambda x, scale: rms_normalization(x, scale, epsilon=EPSILON, scale_offset=1),
        lambda x, scale: rms_reference(x, scale, offset=1)[0],
        [(50, 40), weights[0]],
        dtype,
        "eager",
    )
    for beta_dtype in {weight_dtype, tf.float32}:
        gamma, beta = weights[0], tf.cast(weights[1], beta_dtype)
        run = lambda x, gamma, beta: layer_normalization(x, gamma, beta, epsilon=EPSILON)
        check(run, lambda *a: layer_reference(*a)[0], [(50, 40), gamma, beta], dtype, "eager")
        values = both_gradients(run, normal([50, 40], dtype), gamma, beta)
        assert [v.dtype for v in values] == [dtype, dtype, gamma.dtype, beta.dtype]


# The last axes of x: as many as the weights cover, which is more than are normalised.
@pytest.mark.parametrize(
    "shape, weight",
    [
        ((2, 9, 4, 8), (4, 8)),  # heads, as in QK-norm
        ((5, 6, 128), (6, 128)),
        ((3, 5, 33), (5, 33)),
        ((1, 7, 300), (7, 300)),  # one row per row of weights
        ((2, 300, 3, 16), (300, 3, 16)),  # more groups than a GPU has multiprocessors
        ((40, 3, 1100), (3, 1100)),
        ((2, 2, 9000), (2, 9000)),
        ((0, 4, 8), (4, 8)),
        ((3, 0, 8), (0, 8)),
    ],
    ids=str,
)
def test_weights_with_leading_axes(shape, weight, dtype):
    check(
        lambda x, scale: rms_normalization(x, scale, epsilon=EPSILON),
        lambda x, scale: rms_reference(x, scale)[0],
        [shape, weight],
        dtype,
        "eager",
    )
    check(
        lambda x, gamma, beta: layer_normalization(x, gamma, beta, epsilon=EPSILON),
        lambda x, gamma, beta: layer_reference(x, gamma, beta)[0],
        [shape, weight, weight],
        dtype,
        "eager",
    )


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize(
    "axis, scale, gamma",
    [
        (-1, (5,), (5,)),
        (2, (4, 1), (5,)),
        (2, (3, 1, 1), (3, 4, 5)),
        (2, (), (1, 1, 5)),
        ((-2, -1), (4, 5), (20,)),
        ((2, 1), (5,), (4, 5)),
        (1, (4, 1), (4,)),
        (1, (5,), (1, 4, 1)),
        (0, (3, 1, 1), (3,)),  # whose transposition is not its own inverse
        ((0, 2), (3, 1, 5), (3, 5)),
        ([-1, 0], (1, 1, 1), (1, 1, 5)),
        ((0, 1, 2), (3, 4, 5), (3, 4, 5)),
    ],
    ids=str,
)
def test_as_keras_on_any_axis(axis, scale, gamma, graph):
    x = normal([3, 4, 5])
    mode = lambda fn, inputs: in_mode(fn, "graph", inputs) if graph else fn
    gammas = [normal(gamma), normal(gamma, seed=1)]
    for ours, stock, weights in [
        (rms_normalization, keras.ops.rms_normalization, [normal(scale)]),
        (layer_normalization, keras.ops.layer_normalization, gammas),
    ]:
        run = lambda x, *w: ours(x, *w, axis=axis)
        if graph and any(w.shape.rank != np.size(axis) for w in weights):
            continue  # what broadcasts must be known
        actual = both_gradients(mode(run, [x, *weights]), x, *weights)
        expected = both_gradients(lambda x, *w: stock(x, *w, axis=axis), x, *weights)
        for a, e in zip(actual, expected, strict=True):
            np.testing.assert_allclose(a, e, rtol=1e-5, atol=2e-5)


def test_scale_along_an_axis_that_is_not_the_last():
    x, scale = normal([3, 4, 5]), normal([4])
    expected = rms_normalization(x, scale[:, tf.newaxis], axis=1)
    np.testing.assert_array_equal(rms_normalization(x, scale, axis=1), expected)


def test_keras_defaults_and_scalar(dtype):
    x = normal([3, 40], dtype) * tf.cast(1e-3, dtype)  # so small that epsilon matters
    for ours, stock in [
        (rms_normalization, keras.ops.rms_normalization),
        (layer_normalization, keras.ops.layer_normalization),
    ]:
        y = ours(x)
        assert y.dtype == dtype
        tolerance = 4 * float(ml_dtypes.finfo(dtype.as_numpy_dtype).eps)
        np.testing.assert_allclose(wide(y), wide(stock(x)), rtol=tolerance, atol=1e-4)
    scalar = tf.constant(3.0, dtype)
    np.testing.assert_array_equal(rms_normalization(scalar), keras.ops.rms_normalization(scalar))


def test_numpy_variables_and_lists():
    x, scale = np.float32([[3, 4]]), [2.0, 0.5]
    expected = rms_normalization(tf.constant(x), tf.constant(scale))
    np.testing.assert_array_equal(rms_normalization(x, scale, residual=x * 0), expected)
    np.testing.assert_array_equal(rms_normalization(x, np.array(scale)), expected)
    np.testing.assert_array_equal(rms_normalization(tf.Variable(x), tf.Variable(scale)), expected)
    np.testing.assert_array_equal(rms_normalization(x, keras.Variable(scale)), expected)


def test_return_residual_without_residual():
    x = normal([2, 5])
    y, s = rms_normalization(x, return_residual=True)
    np.testing.assert_array_equal(s, x)
    y, s = layer_normalization(x, axis=0, return_residual=True)
    np.testing.assert_array_equal(s, x)


@pytest.mark.parametrize("used", ["y", "s"])
def test_one_output_alone_has_a_gradient(used):
    x, residual = normal([4, 9]), normal([4, 9], seed=1)
    with tf.GradientTape() as tape:
        tape.watch([x, residual])
        y, s = layer_normalization(x, residual=residual, return_residual=True)
        target = y if used == "y" else s
    dx, dresidual = tape.gradient(target, [x, residual], normal([4, 9], seed=2))
    np.testing.assert_array_equal(dx, dresidual)
    if used == "s":
        np.testing.assert_array_equal(dx, normal([4, 9], seed=2))


def test_ten_dimensions(dtype):
    check(
        lambda x, scale: rms_normalization(x, scale, axis=(8, 9), epsilon=EPSILON),
        lambda x, scale: rms_reference(x, scale, axis=(8, 9))[0],
        [(2, 1, 1, 2, 1, 1, 1, 1, 3, 5), (3, 5)],
        dtype,
        "eager",
    )


# Numbers


@pytest.mark.parametrize("cols", [64, 1000, 20000])
def test_rows_far_from_zero_do_not_cancel(cols):
    x = tf.cast(1e4 + np.random.default_rng(0).standard_normal((5, cols)), tf.float32)
    run = lambda x, gamma, beta: layer_normalization(x, gamma, beta, epsilon=EPSILON)
    check(run, lambda *a: layer_reference(*a)[0], [x, (cols,), (cols,)], tf.float32, "eager")
    y = run(x, None, None)
    np.testing.assert_allclose(tf.math.reduce_std(y, -1), np.ones(5), rtol=1e-3)


@pytest.mark.parametrize("cols", [1, 33, 64, 3000, 9001])
def test_constant_rows(cols, dtype):
    x = tf.constant([[0.0], [3.0], [-1e4]]) * tf.ones([3, cols])
    y, dx, dgamma = both_gradients(
        lambda x, g: layer_normalization(x, g), tf.cast(x, dtype), tf.ones([cols])
    )
    assert np.abs(wide(y)).max() < 1e-2 and np.isfinite(wide(dx)).all()
    y = rms_normalization(tf.cast(x, dtype))
    np.testing.assert_allclose(wide(y), tf.sign(x) * tf.ones([1, cols]), rtol=1e-2)


@pytest.mark.parametrize(
    "factor", [1e-30, 1e-12, 1e12, 1e18, 1e25, 1e-40], ids=lambda f: f"{f:.0e}"
)
@pytest.mark.parametrize("subtract_mean", [False, True], ids=["rms", "layer"])
def test_huge_and_tiny_numbers_as_stock(factor, subtract_mean):
    x = tf.cast(normal([3, 40], tf.float64) * factor, tf.float32)
    scale = normal([40])
    ours = layer_normalization if subtract_mean else rms_normalization
    stock = layer_reference if subtract_mean else rms_reference
    actual = both_gradients(lambda x, w: ours(x, w, epsilon=EPSILON), x, scale)
    expected = both_gradients(lambda x, w: stock(x, w)[0], x, scale)
    for a, e in zip(actual, expected, strict=True):
        largest = np.abs(e).max()
        # Stock flushes denormals to zero; the GPU kernels need not.
        denormal = 10 * np.finfo(np.float32).tiny
        np.testing.assert_allclose(a, e, rtol=1e-4, atol=max(1e-4 * min(largest, 1), denormal))


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan], ids=str)
@pytest.mark.parametrize("cols", [5, 64, 1000])
def test_inf_and_nan_as_stock(value, cols, dtype):
    x = normal([3, cols], dtype).numpy()
    x[1, cols // 2] = value
    for ours, stock in [(rms_normalization, rms_reference), (layer_normalization, layer_reference)]:
        actual, expected = wide(ours(x, epsilon=EPSILON)), wide(stock(tf.constant(x))[0])
        np.testing.assert_array_equal(np.isnan(actual), np.isnan(expected))
        assert np.isfinite(actual.numpy()[[0, 2]]).all()  # other rows do not care


def test_float32_statistics_of_16_bit_rows(dtype):
    for name, size in [("rms", 1), ("layer", 2)]:
        op = getattr(library, f"tf_ops_{name}_normalization")
        weights = dict(scale=[]) if size == 1 else dict(gamma=[], beta=[])
        x = normal([4, 3000], dtype)
        *_, rstd = op(x=x, residual=[], epsilon=0.0, **weights)
        assert rstd.dtype == tf.float32
        centered = tf.cast(x, tf.float64)
        centered -= tf.reduce_mean(centered, -1, keepdims=True) if size == 2 else 0
        expected = tf.math.rsqrt(tf.reduce_mean(centered**2, -1))
        np.testing.assert_allclose(rstd, tf.cast(expected, tf.float32), rtol=1e-5)


def test_weight_gradient_of_ten_thousand_ones_is_not_stuck_at_256(dtype):
    x = tf.ones([10000, 8], dtype)
    with tf.GradientTape() as tape:
        scale = tf.ones([8], dtype)
        tape.watch(scale)
        y = rms_normalization(x, scale, epsilon=0.0)
    d = tape.gradient(y, scale, tf.ones_like(y))
    np.testing.assert_array_equal(d, tf.cast(tf.fill([8], 10000.0), dtype))


# One more row than a power of two, narrow and odd: partial sums must not be cut off.
@pytest.mark.parametrize(
    "rows, cols", [(1025, 33), (65537, 3), (70000, 1), (500000, 2), (4097, 64)]
)
@pytest.mark.parametrize("weights", [False, True], ids=["plain", "weights"])
def test_last_rows_count_in_weight_gradients(rows, cols, weights):
    shapes = [(rows, cols)] + [(cols,)] * (2 * weights)
    run = lambda x, *w: layer_normalization(x, *w, epsilon=EPSILON)
    check(run, lambda x, *w: layer_reference(x, *w)[0], shapes, tf.float32, "eager")


@pytest.mark.parametrize("cols", [12288, 65537, 131073, 262144])
def test_hidden_sizes_that_others_refuse(cols):
    for dtype in (tf.float32, tf.bfloat16):
        shapes = [(2, cols), (cols,)]
        check(
            lambda x, scale, r: rms_normalization(x, scale, epsilon=EPSILON, residual=r),
            lambda x, scale, r: rms_reference(x, scale, r)[0],
            [*shapes, shapes[0]],
            dtype,
            "eager",
        )
        check(
            lambda x, *w: layer_normalization(x, *w, epsilon=EPSILON),
            lambda x, *w: layer_reference(x, *w)[0],
            [*shapes, shapes[1]],
            dtype,
            "eager",
        )


@pytest.mark.parametrize("shape", [(3, 0, 2520), (0, 2, 5), (2, 3, 0), (0,)], ids=str)
def test_empty(shape, mode):
    weights = [normal(shape[-1:])] * 2
    run = lambda x, *w: tf.nest.flatten(both_gradients(layer_normalization, x, *w))
    inputs = [normal(shape), *weights]
    y, dx, dgamma, dbeta = in_mode(run, mode, inputs)(*inputs)
    assert y.shape == dx.shape == shape
    np.testing.assert_array_equal(dgamma, np.zeros(shape[-1:]))
    np.testing.assert_array_equal(dbeta, np.zeros(shape[-1:]))


def test_statistics_of_rows_without_columns_are_nan(mode):
    run = lambda x: library.tf_ops_layer_normalization(
        x=x, residual=[], gamma=[], beta=[], epsilon=EPSILON
    )
    x = tf.zeros([5, 0])
    outputs = in_mode(run, mode, [x])(x)
    assert np.isnan(outputs.mean).all() and np.isnan(outputs.rstd).all()


def test_more_than_2_31_elements(device):
    """Row offsets of 64 bits; the first and last rows are compared."""
    if "GPU" not in device:
        pytest.skip("takes 13 GB")
    cols = 4096
    rows = 2**31 // cols + 3
    x = tf.concat([tf.ones([rows - 4, cols], tf.bfloat16), normal([4, cols], tf.bfloat16)], 0)
    scale = normal([cols], tf.bfloat16)

    def run(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = rms_normalization(x, scale)
        return y, tape.gradient(y, x)  # of ones

    for a, b in zip(run(x), run(x[-4:])):
        np.testing.assert_array_equal(wide(a[-4:]), wide(b))


# Promises


@pytest.mark.parametrize("shape", [(4000, 64), (300, 1000), (50, 9001)], ids=str)
def test_bitwise_repeat(shape, mode, dtype):
    inputs = [normal(shape, dtype), normal(shape[-1:], dtype), normal(shape[-1:], dtype)]
    run = in_mode(lambda *a: both_gradients(layer_normalization, *a), mode, inputs)
    first = run(*inputs)
    for _ in range(3):
        for a, b in zip(run(*inputs), first, strict=True):
            np.testing.assert_array_equal(a.numpy().view(np.uint8), b.numpy().view(np.uint8))


def test_inputs_and_upstream_gradient_are_not_written():
    inputs = [normal([20, 64]), normal([64]), normal([64]), normal([20, 64], seed=1)]
    dy, ds = normal([20, 64], seed=2), normal([20, 64], seed=3)
    before = [x.numpy().copy() for x in (*inputs, dy, ds)]

    @tf.function
    def run(*args):
        *inputs, dy, ds = args
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            y = layer_normalization(*inputs[:3], residual=inputs[3], return_residual=True)
        return tape.gradient(y, inputs, [dy, ds])

    run(*inputs, dy, ds)
    for x, b in zip((*inputs, dy, ds), before):
        np.testing.assert_array_equal(x, b)


def test_second_backward_pass_is_the_same():
    x, scale = normal([20, 64]), normal([64])
    with tf.GradientTape(persistent=True) as tape:
        tape.watch([x, scale])
        y = rms_normalization(x, scale, residual=x)
    first, second = (tape.gradient(y, [x, scale], normal([20, 64], seed=1)) for _ in range(2))
    for a, b in zip(first, second):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("watched", range(1, 16), ids=lambda m: f"{m:04b}")
def test_any_subset_of_inputs_is_differentiated(watched):
    inputs = [normal([6, 9]), normal([9]), normal([9], seed=1), normal([6, 9], seed=2)]
    run = lambda x, g, b, r: layer_normalization(x, g, b, residual=r, epsilon=EPSILON)
    everything = both_gradients(run, *inputs)[1:]
    chosen = [i for i in range(4) if watched >> i & 1]
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch([inputs[i] for i in chosen])
        y = run(*inputs)
    dy = tf.reshape(tf.cos(tf.range(54.0)), [6, 9])
    gradients = tape.gradient(y, [inputs[i] for i in chosen], dy)
    for i, gradient in zip(chosen, gradients):
        np.testing.assert_array_equal(gradient, everything[i])


def test_statistics_of_the_raw_ops_are_differentiable():
    x = normal([4, 9], tf.float32)

    def ours(x):
        outputs = library.tf_ops_layer_normalization(
            x=x, residual=[], gamma=[], beta=[], epsilon=EPSILON
        )
        rms = library.tf_ops_rms_normalization(x=x, residual=[], scale=[], epsilon=EPSILON)
        return outputs.mean, outputs.rstd, rms.rstd

    def stock(x):
        mean, variance = tf.reduce_mean(x, -1), tf.math.reduce_variance(x, -1)
        square = tf.reduce_mean(x * x, -1)
        return mean, tf.math.rsqrt(variance + EPSILON), tf.math.rsqrt(square + EPSILON)

    for second_order in (False, True):
        check(ours, stock, [x], tf.float32, "eager", second_order=second_order)


# Calls


def test_unknown_rank():
    for fn in (rms_normalization, layer_normalization):
        run = tf.function(
            lambda x, w, r: fn(x, w, residual=r), input_signature=[tf.TensorSpec(None)] * 3
        )
        for shape in [(3, 5), (2, 3, 5), (5,)]:
            x, w = normal(shape), normal([5])
            np.testing.assert_array_equal(run(x, w, x), fn(x, w, residual=x))
    with pytest.raises(ValueError, match="unknown rank"):
        tf.function(
            lambda x: rms_normalization(x, axis=1), input_signature=[tf.TensorSpec(None)]
        ).get_concrete_function()


def test_vectorized_map():
    x, w = normal([3, 4, 5]), normal([5])
    y = tf.vectorized_map(lambda x: rms_normalization(x, w), x)
    np.testing.assert_allclose(y, rms_normalization(x, w), rtol=1e-6)


def test_saved_model(tmp_path):
    class Model(tf.Module):
        @tf.function(input_signature=[tf.TensorSpec([None, 5]), tf.TensorSpec([5])])
        def __call__(self, x, w):
            return layer_normalization(x, w, residual=x)

    x, w = normal([3, 5]), normal([5])
    tf.saved_model.save(Model(), str(tmp_path))
    loaded = tf.saved_model.load(str(tmp_path))
    expected = both_gradients(lambda x, w: layer_normalization(x, w, residual=x), x, w)
    for a, e in zip(both_gradients(loaded, x, w), expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-6)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(x=[1, 2]), "x is int32; it must be float32, float16 or bfloat16"),
        (dict(x=np.ones([2, 3])), "x is float64"),
        (dict(scale=np.ones(4)), r"scale is \(4,\).*broadcast to x"),
        (dict(scale=np.ones([5, 3])), "scale is"),
        (dict(scale=np.ones([2, 2, 3])), "scale is"),
        (dict(axis=2), "axis is 2; it must name different axes of x"),
        (dict(axis=-3), "axis is -3"),
        (dict(axis=(1, -1)), "different axes"),
        (dict(axis=()), "some ints"),
        (dict(axis=None), "axis is None"),
        (dict(axis=1.0), "axis is 1.0"),
        (dict(residual=np.ones([2, 4], np.float32)), "residual is float32"),
        (dict(residual=np.ones([3], np.float32)), "residual is float32"),
        (dict(residual=tf.ones([2, 3], tf.bfloat16)), "residual is bfloat16"),
    ],
    ids=str,
)
def test_static_mistakes(arguments, message):
    with pytest.raises(ValueError, match=message):
        rms_normalization(**{"x": tf.ones([2, 3]), **arguments})
    arguments = {"gamma" if k == "scale" else k: v for k, v in arguments.items()}
    with pytest.raises(ValueError, match=message.replace("scale", "gamma")):
        layer_normalization(**{"x": tf.ones([2, 3]), **arguments})
    with pytest.raises(ValueError, match="scalar|rank|axis"):
        layer_normalization(tf.constant(1.0))


def test_mistakes_at_run_time(mode):
    rms = lambda x, w, r: rms_normalization(x, w, residual=r)
    layer = lambda x, w, b: layer_normalization(x, w, b)
    x, w = tf.ones([2, 3]), tf.ones([3])
    if mode != "eager":  # eager mode knows shapes, and raises ValueError
        check_rejected(rms, [x, tf.ones([4]), x], "must be equal|scale is", mode)
        check_rejected(rms, [x, w, tf.ones([2, 4])], "residual is", mode)
        check_rejected(layer, [x, w, tf.ones([4])], "must be equal|beta is", mode)
        check_rejected(layer, [x, tf.ones([2, 3]), w], "one shape|must be", mode)
        check_rejected(rms, [tf.constant(1.0), w, tf.constant(1.0)], "rank|axes", mode)


def test_raw_ops_reject(mode):
    rms = lambda x, w: library.tf_ops_rms_normalization(x=x, residual=[], scale=w, epsilon=0.1)
    check_rejected(rms, [tf.ones([2, 3]), tf.ones([4])], "must be equal", mode)
    check_rejected(rms, [tf.ones([1] * 10), tf.ones([1])], "limit of 8", mode)
    check_rejected(rms, [tf.ones([2, 3], tf.bfloat16), tf.ones([3], tf.half)], "dtype of x", mode)
    deep = lambda x: library.tf_ops_rms_normalization(
        x=x, residual=[], scale=[], epsilon=0.1, axes=3
    )
    check_rejected(deep, [tf.ones([2, 3])], "rank", mode)
    grad = lambda dy, ds, drstd, w, rstd: library.tf_ops_rms_normalization_grad(
        dy=dy, ds=ds, drstd=drstd, x=tf.ones([2, 3]), scale=w, rstd=rstd, epsilon=0.1
    )
    x, w, r = tf.ones([2, 3]), tf.ones([3]), tf.ones([2])
    for at, wrong, message in [
        (0, tf.ones([2, 4]), "must be equal"),
        (1, tf.ones([2, 4]), "gradient of s is"),
        (2, tf.ones([3]), "gradient of rstd is"),
        (3, tf.ones([2]), "scale is"),
        (4, tf.ones([3]), "rstd is"),
    ]:
        inputs = [x, x, r, w, r]
        inputs[at] = wrong
        check_rejected(grad, inputs, message, mode)


# Without TensorFlow, where memory need not be aligned and instruction sets can be chosen.


@pytest.mark.parametrize("isa", ["baseline", "avx2", "avx512"])
def test_each_instruction_set_on_unaligned_memory(isa, device):
    if "GPU" in device:
        pytest.skip("of the CPU")
    result = subprocess.run(
        [sys.executable, "-m", "tests.normalization_rows"],
        cwd=ROOT,
        env=os.environ | {"TF_OPS_ISA": isa},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
