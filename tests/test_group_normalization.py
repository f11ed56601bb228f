# SPDX-License-Identifier: Apache-2.0
import os
import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from tf_ops import testing
from tf_ops._library import library
from tf_ops._ops.group_normalization import group_normalization
from tf_ops.testing import DTYPES, check_rejected, in_mode

ROOT = pathlib.Path(__file__).parents[1]
EPSILON = 1e-3


def reference(x, gamma=None, beta=None, groups=32, axis=-1, epsilon=EPSILON):
    """The formula in stock TensorFlow, in the dtype of x but at least float32."""
    axis %= x.shape.rank
    wide = x if x.dtype.size >= 4 else tf.cast(x, tf.float32)
    channels = x.shape[axis]
    split = [*x.shape[:axis], groups, channels // groups, *x.shape[axis + 1 :]]
    v = tf.reshape(wide, split)
    axes = [i for i in range(1, len(split)) if i != axis]
    mean = tf.reduce_mean(v, axes, keepdims=True)
    variance = tf.reduce_mean((v - mean) ** 2, axes, keepdims=True)
    y = (v - mean) * tf.math.rsqrt(variance + tf.cast(epsilon, v.dtype))
    y = tf.reshape(y, x.shape)
    by_channel = [channels if i == axis else 1 for i in range(x.shape.rank)]
    if gamma is not None:
        y *= tf.reshape(tf.cast(gamma, y.dtype), by_channel)
    if beta is not None:
        y += tf.reshape(tf.cast(beta, y.dtype), by_channel)
    return tf.cast(y, x.dtype)


def check(shapes, dtype, mode="eager", second_order=False, **options):
    testing.check(
        lambda *x: group_normalization(*x, **options),
        lambda *x: reference(*x, **options),
        shapes,
        dtype,
        mode,
        second_order=second_order,
    )


def value_and_gradients(x, gamma, beta, dy=None, **options):
    with tf.GradientTape() as tape:
        tape.watch([x, gamma, beta])
        y = group_normalization(x, gamma, beta, **options)
    dy = tf.cast(tf.cos(tf.cast(x, tf.float32)), y.dtype) if dy is None else dy
    return [y, *tape.gradient(y, [x, gamma, beta], dy)]


# Whole vectors and tails, a channel or all in a group, more channels than a strip or than threads
# of a block; one place, many, none; no sample.
LAST = [((2, 9, 8), 2), ((3, 5, 64), 32), ((2, 7, 30), 6), ((2, 50, 12), 12), ((2, 40, 33), 1)]
LAST += [((2, 3, 3000), 2), ((1, 3, 2304), 1), ((4, 2), 1), ((5, 96), 3), ((2, 300, 16), 2)]
LAST += [((1, 700, 3), 3), ((2, 0, 8), 2), ((0, 5, 8), 2), ((2, 6, 1024), 4), ((2, 3, 5, 2, 24), 3)]


@pytest.mark.parametrize("shape, groups", LAST, ids=str)
def test_channels_last(shape, groups, dtype):
    check([shape, shape[-1:], shape[-1:]], dtype, groups=groups)


FIRST = [((2, 8, 9), 2), ((3, 64, 16), 32), ((2, 30, 7), 6), ((2, 6, 300), 3), ((2, 3, 33), 1)]
FIRST += [
    ((1, 4, 20000), 2),
    ((2, 8, 0), 2),
    ((0, 8, 5), 2),
    ((2, 12, 1), 3),
    ((2, 24, 3, 5, 2), 3),
]


@pytest.mark.parametrize("shape, groups", FIRST, ids=str)
def test_channels_first(shape, groups, dtype):
    check([shape, shape[1:2], shape[1:2]], dtype, groups=groups, axis=1)


@pytest.mark.parametrize("axis", [2, -2])
def test_channels_between(axis, dtype):
    check([(2, 3, 6, 9), (6,), (6,)], dtype, groups=3, axis=axis)


@pytest.mark.parametrize("axis", [1, -1])
def test_modes(axis, dtype, mode):
    check([(2, 6, 5, 6), (6,), (6,)], dtype, mode, second_order=True, groups=2, axis=axis)


@pytest.mark.parametrize("given", [(), ("gamma",), ("beta",)], ids=str)
def test_arguments(given, dtype):
    take = lambda args: dict(zip(given, args))
    for axis in (1, -1):
        testing.check(
            lambda x, *w: group_normalization(x, groups=2, axis=axis, **take(w)),
            lambda x, *w: reference(x, groups=2, axis=axis, **take(w)),
            [(3, 8, 8), *[(8,)] * len(given)],
            dtype,
            "eager",
            second_order=True,
        )


@pytest.mark.parametrize("axis", [1, -1])
def test_weights_of_another_dtype(axis, dtype):
    for weight_dtype in DTYPES:
        gamma, beta = (tf.cast(tf.random.normal([8]), weight_dtype) for _ in range(2))
        for other in {weight_dtype, tf.float32}:
            check([(3, 8, 8), gamma, tf.cast(beta, other)], dtype, groups=4, axis=axis)
            x = tf.cast(tf.random.normal([3, 8, 8]), dtype)
            results = value_and_gradients(x, gamma, tf.cast(beta, other), groups=4, axis=axis)
            assert [r.dtype for r in results] == [dtype, dtype, weight_dtype, other]


@pytest.mark.parametrize("axis", [1, -1, 2])
def test_numbers_of_keras(axis):
    x = tf.random.normal([3, 8, 8, 8])
    layer = keras.layers.GroupNormalization(4, axis)
    layer.build(x.shape)
    layer.set_weights([np.random.default_rng(i).standard_normal(8) for i in range(2)])
    ours = group_normalization(x, layer.gamma, layer.beta, 4, axis)
    np.testing.assert_allclose(ours, layer(x), rtol=1e-5, atol=1e-5)
    each = group_normalization(x, groups=-1, axis=axis)
    np.testing.assert_array_equal(each, group_normalization(x, groups=8, axis=axis))


@pytest.mark.parametrize("axis", [1, -1])
def test_far_from_zero_does_not_cancel(axis):
    rng = np.random.default_rng(0)
    x = tf.constant(1e4 + rng.standard_normal([3, 16, 30, 16]), tf.float32)
    check([x, (16,), (16,)], tf.float32, groups=4, axis=axis)


def test_group_of_one_element_has_no_gradient_but_rounding(dtype):
    inputs = [tf.cast(tf.random.normal(shape), dtype) for shape in ([50, 3], [3], [3])]
    y, dx, dgamma, dbeta = value_and_gradients(*inputs, tf.ones([50, 3], dtype), groups=3)
    np.testing.assert_array_equal(y, tf.broadcast_to(inputs[2], y.shape))
    np.testing.assert_array_equal(dgamma, tf.zeros([3], dtype))
    np.testing.assert_array_equal(dbeta, tf.fill([3], tf.cast(50, dtype)))
    np.testing.assert_allclose(tf.cast(dx, tf.float32), np.zeros([50, 3]), atol=1e-5)


@pytest.mark.parametrize("axis", [1, -1])
def test_constant_groups(axis, dtype):
    x = tf.fill([2, 8, 8], tf.cast(-1e4, dtype))
    y, dx, *_ = value_and_gradients(
        x, tf.ones([8], dtype), tf.ones([8], dtype), groups=2, axis=axis
    )
    np.testing.assert_allclose(tf.cast(y, tf.float32), np.ones([2, 8, 8]), atol=1e-2)
    assert np.isfinite(tf.cast(dx, tf.float32)).all()


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan], ids=str)
@pytest.mark.parametrize("axis", [1, -1])
def test_inf_and_nan_stay_in_their_group(axis, value, dtype):
    x = np.random.default_rng(0).standard_normal([2, 8, 8])
    place = (1, 2, 5)  # in group 1 of 2 by the last axis, 0 by the middle one
    x[place] = value
    y = tf.cast(group_normalization(tf.cast(x, dtype), groups=2, axis=axis), tf.float32).numpy()
    expected = np.zeros_like(x, bool)
    expected[(1, slice(4)) if axis == 1 else (1, slice(None), slice(4, 8))] = True
    np.testing.assert_array_equal(np.isnan(y), expected)


def test_weight_gradient_of_ten_thousand_ones_is_not_stuck_at_256(dtype):
    """tt-metal#53386, Liger#950: sums in bfloat16."""
    for shape, axis in [((10, 1000, 4), -1), ((10, 4, 1000), 1)]:
        x, ones = tf.zeros(shape, dtype), tf.ones([4], dtype)
        dy = tf.ones(shape, dtype)
        *_, dbeta = value_and_gradients(x, ones, ones, dy, groups=2, axis=axis)
        np.testing.assert_array_equal(dbeta, tf.cast(tf.fill([4], 10000.0), dtype))


@pytest.mark.parametrize(
    "shape", [(1, 30000, 8), (3000, 2, 8), (1, 8, 30000), (3000, 8, 2)], ids=str
)
def test_many_places_and_samples(shape, dtype):
    check([shape, (8,), (8,)], dtype, groups=2, axis=shape.index(8))


@pytest.mark.parametrize("axis", [1, -1])
def test_unaligned(axis, dtype):
    x = tf.cast(tf.random.normal([5, 13, 13]), dtype)
    for first in range(1, 4):
        check([x[first:], (13,), (13,)], dtype, groups=13, axis=axis)
        check([x[first:], (13,), (13,)], dtype, groups=1, axis=axis)


@pytest.mark.parametrize("axis", [1, -1])
def test_same_call_gives_the_same_bits_and_inputs_stay(axis, dtype, mode):
    inputs = [tf.cast(tf.random.normal(s), dtype) for s in ([3, 16, 40, 16], [16], [16])]
    before = [x.numpy() for x in inputs]
    run = in_mode(lambda *x: value_and_gradients(*x, groups=4, axis=axis), mode, inputs)
    for a, b in zip(run(*inputs), run(*inputs)):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(inputs, before):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("isa", ["baseline", "avx2"])
def test_lower_instruction_sets(isa, device):
    if "GPU" in device:
        pytest.skip("is of the CPU")
    tests = "tests/test_group_normalization.py::test_channels_"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", tests + "last", tests + "first", "-k", "CPU"],
        cwd=ROOT,
        env={**os.environ, "TF_OPS_ISA": isa},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout


def test_more_than_2_to_the_31_elements(device):
    if "CPU" in device:
        pytest.skip("needs a GPU's memory")
    x, ones = tf.random.normal([34_000, 64, 1024], dtype=tf.bfloat16), tf.ones([1024])
    y, dx, *_ = value_and_gradients(x, ones, ones, x, groups=32)
    for rows in (slice(0, 2), slice(-2, None)):
        expected = value_and_gradients(x[rows], ones, ones, x[rows], groups=32)
        np.testing.assert_array_equal(y[rows], expected[0])
        np.testing.assert_array_equal(dx[rows], expected[1])


def test_takes_arrays_lists_and_variables():
    x, gamma = np.float32([[1, 2, 4, 9]]), [1.0, 2.0, 3.0, 4.0]
    expected = group_normalization(tf.constant(x), tf.constant(gamma), groups=2)
    for make in (np.float32, tf.Variable, keras.Variable):
        np.testing.assert_array_equal(group_normalization(x, make(gamma), groups=2), expected)
    np.testing.assert_array_equal(group_normalization(tf.Variable(x), gamma, groups=2), expected)


@pytest.mark.parametrize(
    "match, arguments",
    {
        "x must be float32, float16 or bfloat16; it is float64": {"x": np.zeros([2, 8])},
        "x must be of known rank, and at least 2; it is \\(8,\\)": {"x": tf.zeros([8])},
        "axis must be one of x, .* it is 0": {"axis": 0},
        "axis must be one of x, .* it is 2": {"axis": 2},
        "groups must divide the 8 channels; it is 3": {"groups": 3},
        "groups must be an int of at least 1, or -1; it is 0": {"groups": 0},
        "gamma must be \\[channels\\], which are 8; it is \\(7,\\)": {"gamma": tf.ones([7])},
        "beta must be \\[channels\\], which are 8; it is \\(1, 8\\)": {"beta": tf.ones([1, 8])},
    }.items(),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_mistakes_that_are_seen_at_once(match, arguments):
    with pytest.raises(ValueError, match=match):
        group_normalization(**{"x": tf.zeros([2, 8]), "groups": 2, **arguments})


def test_mistakes_that_are_seen_at_run_time(mode):
    if mode == "eager":
        return  # these are ValueErrors
    signature = [tf.TensorSpec([None, None]), tf.TensorSpec([None])]
    run = lambda x, gamma: group_normalization(x, gamma, groups=3)
    fn = tf.function(run, input_signature=signature, jit_compile=mode == "xla")
    with pytest.raises(tf.errors.InvalidArgumentError, match="3 groups do not divide"):
        fn(tf.zeros([2, 8]), tf.ones([8]))
    with pytest.raises(tf.errors.InvalidArgumentError, match="must be \\[channels\\]"):
        fn(tf.zeros([2, 9]), tf.ones([8]))


def test_raw_op_checks_its_arguments(mode):
    raw = lambda x: library.tf_ops_group_normalization(x=x, gamma=[], beta=[], groups=2)
    if mode == "eager":
        check_rejected(raw, [tf.zeros([2, 3, 8])], "rank 4", mode)
    check_rejected(raw, [tf.zeros([2, 3, 7, 1])], "2 groups do not divide", mode)
