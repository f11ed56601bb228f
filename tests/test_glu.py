# SPDX-License-Identifier: Apache-2.0
import os
import pathlib
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from tf_ops import gated_linear_unit
from tf_ops._library import library
from tf_ops.testing import DTYPES, check, check_rejected, error

ROOT = pathlib.Path(__file__).parents[1]
STOCK = {
    "silu": tf.nn.silu,
    "gelu": lambda x: tf.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: tf.nn.gelu(x, approximate=True),
    "relu": tf.nn.relu,
    "sigmoid": tf.sigmoid,
}
# The last axis with whole vectors, with a rest beside them, and too short for one.
SHAPES = [(3, cols) for cols in (1, 2, 7, 31, 33, 64, 127, 192, 256, 760, 1000, 1024, 4096)]
SHAPES += [(0, 64), (5, 0), (0,), (1,), (199, 65), (2, 3, 5), (1, 65536), (1, 70001)]


def separate_reference(activation):
    return lambda gate, up: STOCK[activation](gate) * up


def packed_reference(activation):
    return lambda x: separate_reference(activation)(*tf.split(x, 2, -1))


def normal(shape, dtype=tf.float32, seed=0):
    return tf.cast(np.random.default_rng(seed).standard_normal(shape), dtype)


def run_with_gradients(fn, inputs, dy):
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        y = fn(*inputs)
    return [y, *tape.gradient(y, inputs, dy)]


@pytest.mark.parametrize("activation", STOCK)
def test_gated_linear_unit(activation, dtype):
    for shape in SHAPES:
        run = lambda *inputs: gated_linear_unit(*inputs, activation=activation)
        check(run, separate_reference(activation), [shape, shape], dtype, "eager")
        packed = (*shape[:-1], 2 * shape[-1])
        check(run, packed_reference(activation), [packed], dtype, "eager")


@pytest.mark.parametrize(
    "activation, dtype",
    [*(("silu", d) for d in DTYPES), *((a, tf.float32) for a in STOCK if a != "silu")],
    ids=lambda x: x if isinstance(x, str) else x.name,
)
def test_modes(activation, dtype, mode):
    run = lambda *inputs: gated_linear_unit(*inputs, activation=activation)
    both = lambda gate, up, packed: (run(gate, up), run(packed))
    stock = lambda gate, up, packed: (
        separate_reference(activation)(gate, up),
        packed_reference(activation)(packed),
    )
    shapes = [(2, 3, 7), (2, 3, 7), (5, 2, 18)]
    check(both, stock, shapes, dtype, mode, second_order=True)


def test_silu_is_the_default():
    gate, up = normal([3, 5]), normal([3, 5], seed=1)
    y = gated_linear_unit(gate, up)
    np.testing.assert_array_equal(y, gated_linear_unit(gate, up, "silu"))
    np.testing.assert_allclose(y, tf.nn.silu(gate) * up, rtol=1e-6)


# The two lie 4e-4 apart, which a loose tolerance does not see.
def test_gelu_by_erf_is_not_taken_for_tanh():
    gate, up = tf.linspace(-4.0, 4.0, 1001), tf.ones([1001])
    for activation, other in [("gelu", "gelu_tanh"), ("gelu_tanh", "gelu")]:
        y = gated_linear_unit(gate, up, activation)
        assert error(y, STOCK[activation](gate)) < 2e-6
        assert error(y, STOCK[other](gate)) > 1e-4


# Far below 0 the value is tiny, and 1 + erf or 1 + tanh would round it to 0.
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "sigmoid"])
def test_tails_keep_relative_precision(activation):
    gate = tf.linspace(-7.0, -2.0, 1001)
    y = gated_linear_unit(gate, tf.ones_like(gate), activation)
    x = tf.cast(gate, tf.float64)
    if activation == "gelu_tanh":
        exact = x * tf.sigmoid(np.sqrt(8 / np.pi) * (x + 0.044715 * x**3))
    elif activation == "gelu":
        exact = 0.5 * x * tf.math.erfc(-x * np.sqrt(0.5))
    else:
        exact = STOCK[activation](x)
    np.testing.assert_allclose(y, exact, rtol=2e-5)


# Where x^3 or exp(-x) overflows; stock's gelu_tanh has NaN gradients there.
@pytest.mark.parametrize("activation", STOCK)
def test_huge_and_tiny_numbers(activation, dtype):
    magnitudes = [0, 1e-30, 1e-5, 1, 10, 50, 87, 88.5, 89, 100, 1e3, 1e4]
    magnitudes += [1e10, 1e20, 1e37] * (dtype != tf.float16)
    gate = tf.cast([sign * m for m in magnitudes for sign in (1, -1)], dtype)
    up, dy = normal(gate.shape, dtype), normal(gate.shape, dtype, 1)
    run = lambda *x: gated_linear_unit(*x, activation)
    actual = run_with_gradients(run, [gate, up], dy)
    gate, up, dy = (tf.cast(x, tf.float64) for x in (gate, up, dy))
    expected = run_with_gradients(separate_reference(activation), [gate, up], dy)
    for a, e in zip(actual, expected):
        ulp = float(ml_dtypes.finfo(dtype.as_numpy_dtype).eps)
        np.testing.assert_allclose(tf.cast(a, tf.float64), e, rtol=4 * ulp, atol=4 * ulp)


@pytest.mark.parametrize("activation", STOCK)
def test_inf_and_nan_as_stock(activation, dtype):
    gate = tf.cast([np.inf, -np.inf, np.nan, 1, 1, 1, -1] * 5, dtype)
    up = tf.cast([1, 1, 1, np.inf, -np.inf, np.nan, 1] * 5, dtype)
    inputs, dy = [gate, up], tf.ones_like(gate)
    actual = run_with_gradients(lambda *x: gated_linear_unit(*x, activation=activation), inputs, dy)
    expected = run_with_gradients(separate_reference(activation), inputs, dy)
    for a, e in zip(actual, expected):
        a, e = (tf.cast(x, tf.float32).numpy() for x in (a, e))
        np.testing.assert_array_equal(np.isnan(a), np.isnan(e))
        np.testing.assert_array_equal(a[np.isinf(e)], e[np.isinf(e)])


# The activation is not rounded to 16 bits between the two products.
def test_one_rounding_of_16_bit_results(dtype):
    gate, up, dy = (normal([1000], dtype, seed) for seed in range(3))
    actual = run_with_gradients(lambda *x: gated_linear_unit(*x, "gelu"), [gate, up], dy)
    wide = [tf.cast(x, tf.float64) for x in (gate, up)]
    expected = run_with_gradients(separate_reference("gelu"), wide, tf.cast(dy, tf.float64))
    if dtype == tf.float32:
        return
    for a, e in zip(actual, expected):
        rounded = tf.cast(tf.cast(e, tf.float32), dtype)
        differ = np.mean(tf.cast(a, tf.float32).numpy() != tf.cast(rounded, tf.float32).numpy())
        assert differ < 0.01


def test_inputs_and_upstream_gradient_are_not_written():
    for packed in [False, True]:
        inputs = [normal([7, 66])] if packed else [normal([7, 33]), normal([7, 33], seed=1)]
        dy = normal([7, 33], seed=2)
        before = [tf.identity(x).numpy().copy() for x in (*inputs, dy)]
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(inputs)
            y = gated_linear_unit(*inputs)
        first = tape.gradient(y, inputs, dy)
        first = [g.numpy().copy() for g in first]
        second = tape.gradient(y, inputs, dy)  # a second pass sees the same
        for a, b in zip(first, second):
            np.testing.assert_array_equal(a, b)
        for x, b in zip((*inputs, dy), before):
            np.testing.assert_array_equal(x, b)


# Temporaries die with the op, whose results may take their memory.
@pytest.mark.parametrize("packed", [False, True])
def test_results_in_the_memory_of_temporaries(packed, mode):
    gate, up, dy = (normal([50, 60], seed=seed) for seed in range(3))

    def run(fn, gate, up, dy):
        with tf.GradientTape() as tape:
            tape.watch([gate, up])
            inputs = [2 * gate + 1, 3 * up]
            y = fn(tf.concat(inputs, -1)) if packed else fn(*inputs)
        return [y, *tape.gradient(y, [gate, up], 1 * dy)]

    ours = lambda *args: run(gated_linear_unit, *args)
    if mode != "eager":
        ours = tf.function(ours, jit_compile=mode == "xla")
    stock = packed_reference("silu") if packed else separate_reference("silu")
    for a, e in zip(ours(gate, up, dy), run(stock, gate, up, dy)):
        np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-5)


def test_one_tensor_as_both_arguments(mode):
    run = lambda x: gated_linear_unit(x, x)
    check(run, lambda x: tf.nn.silu(x) * x, [(7, 33)], tf.float32, mode)


@pytest.mark.parametrize("watched", [0, 1])
def test_one_input_alone_is_differentiated(watched):
    inputs, dy = [normal([3, 5]), normal([3, 5], seed=1)], normal([3, 5], seed=2)
    every = run_with_gradients(gated_linear_unit, inputs, dy)[1:]
    with tf.GradientTape() as tape:
        tape.watch(inputs[watched])
        y = gated_linear_unit(*inputs)
    np.testing.assert_array_equal(tape.gradient(y, inputs[watched], dy), every[watched])


def test_bitwise_repeat(dtype, mode):
    inputs, dy = (
        [normal([200, 77], dtype), normal([200, 77], dtype, 1)],
        normal([200, 77], dtype, 2),
    )
    run = lambda *args: run_with_gradients(gated_linear_unit, args[:2], args[2])
    if mode != "eager":
        run = tf.function(run, jit_compile=mode == "xla")
    for a, b in zip(run(*inputs, dy), run(*inputs, dy)):
        np.testing.assert_array_equal(tf.bitcast(a, tf.uint16), tf.bitcast(b, tf.uint16))


def test_rows_at_odd_addresses(dtype):
    gate, up = normal([9, 33], dtype), normal([9, 33], dtype, 1)
    y = gated_linear_unit(gate, up)
    for row in range(9):
        np.testing.assert_array_equal(
            tf.cast(gated_linear_unit(gate[row], up[row]), tf.float32), tf.cast(y[row], tf.float32)
        )


def test_numpy_variables_and_lists():
    x = np.float32([[1, -2, 3, 4]])
    expected = packed_reference("silu")(x)
    for value in (x, tf.Variable(x), x.tolist()):
        np.testing.assert_allclose(gated_linear_unit(value), expected, rtol=1e-6)
    variables = [tf.Variable(x), tf.Variable(2 * x)]
    dy = tf.ones_like(x)
    ours = run_with_gradients(gated_linear_unit, variables, dy)
    stock = run_with_gradients(separate_reference("silu"), variables, dy)
    for a, e in zip(ours, stock):
        np.testing.assert_allclose(a, e, rtol=1e-6)


def test_ten_dimensions():
    shape = (1, 2, 1, 2, 1, 1, 3, 1, 1, 6)
    check(gated_linear_unit, packed_reference("silu"), [shape], tf.float32, "eager")
    check(gated_linear_unit, separate_reference("silu"), [shape, shape], tf.float32, "graph")


def test_vectorized_map():
    gate, up = normal([3, 4, 6]), normal([3, 4, 6], seed=1)
    y = tf.vectorized_map(lambda x: gated_linear_unit(*x), (gate, up))
    np.testing.assert_allclose(y, gated_linear_unit(gate, up), rtol=1e-6)


def test_saved_model(tmp_path):
    class Model(tf.Module):
        @tf.function(input_signature=[tf.TensorSpec([None, 6])])
        def __call__(self, x):
            return gated_linear_unit(x, activation="gelu_tanh")

    x, dy = normal([5, 6]), normal([5, 3], seed=1)
    tf.saved_model.save(Model(), str(tmp_path))
    loaded = tf.saved_model.load(str(tmp_path))
    expected = run_with_gradients(packed_reference("gelu_tanh"), [x], dy)
    for a, e in zip(run_with_gradients(loaded, [x], dy), expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-6)


def test_unknown_rank():
    run = tf.function(gated_linear_unit, input_signature=[tf.TensorSpec(None)])
    x = normal([3, 6])
    np.testing.assert_allclose(run(x), packed_reference("silu")(x), rtol=1e-5)


def test_more_than_2_31_elements(device):
    if "GPU" not in device:
        pytest.skip("12 GB of the GPU")
    tail = normal([1000], tf.bfloat16)
    gate = tf.concat([tf.zeros([2**31], tf.bfloat16), tail], 0)
    y = gated_linear_unit(gate, gate)[-1000:]
    np.testing.assert_array_equal(
        tf.cast(y, tf.float32), tf.cast(gated_linear_unit(tail, tail), tf.float32)
    )


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(gate=[1, 2]), "gate is int32; it must be float32, float16 or bfloat16"),
        (dict(gate=np.ones([2, 4])), "gate is float64"),
        (dict(gate=tf.ones([2, 3])), r"gate is \(2, 3\).*even"),
        (dict(gate=tf.ones([])), r"gate is \(\)"),
        (dict(up=tf.ones([2, 3])), r"up is float32 \(2, 3\).*gate, float32 \(2, 4\)"),
        (dict(up=tf.ones([2, 4], tf.float16)), "up is float16"),
        (dict(up=tf.ones([1, 4])), r"up is float32 \(1, 4\)"),
        (dict(activation="swish"), "activation is 'swish'; it must be one of silu, gelu,"),
        (dict(activation=None), "activation is None"),
        (dict(activation=["silu"]), "activation is"),
    ],
    ids=lambda a: next(iter(a)) if isinstance(a, dict) else "",
)
def test_static_mistakes(arguments, message):
    with pytest.raises(ValueError, match=message):
        gated_linear_unit(**{"gate": tf.ones([2, 4]), **arguments})


def test_mistakes_at_run_time(mode):
    if mode == "eager":
        pytest.skip("they are known before")
    odd = "gate is|evenly divisible"
    check_rejected(gated_linear_unit, [np.float32([[1, 2, 3]])], odd, mode)
    unlike = [np.ones([2, 4], np.float32), np.ones([2, 5], np.float32)]
    check_rejected(gated_linear_unit, unlike, "up is|must be equal", mode)


def test_raw_ops_reject(mode):
    x, short = tf.ones([2, 4]), tf.ones([2, 3])
    forward, gradient = library.tf_ops_gated_linear_unit, library.tf_ops_gated_linear_unit_grad
    absent = tf.zeros([0])
    for inputs, attributes, message in [
        ([x, x], dict(activation="swish"), "activation must be silu.*it is swish"),
        ([x, short], {}, "up is|must be equal"),
        ([x, absent], {}, "up is|same rank|equal rank"),
        ([short, absent], dict(packed=True), "even"),
        ([x, x], dict(packed=True), "beside a packed gate"),
        ([tf.ones([]), absent], dict(packed=True), "gate is|at least rank"),
    ]:
        check_rejected(lambda *a: forward(gate=a[0], up=a[1], **attributes), inputs, message, mode)
    for inputs, attributes, message in [
        ([short, x, x], {}, "y or its gradient|must be equal"),
        ([x, x, absent], dict(packed=True), "y or its gradient|must be equal"),
    ]:
        run = lambda *a: gradient(dy=a[0], gate=a[1], up=a[2], **attributes)
        check_rejected(run, inputs, message, mode)


@pytest.mark.parametrize("isa", ["baseline", "avx2", "avx512"])
def test_each_instruction_set_on_unaligned_memory(isa, device):
    if "GPU" in device:
        pytest.skip("of the CPU")
    result = subprocess.run(
        [sys.executable, "-m", "tests.glu_rows"],
        cwd=ROOT,
        env=os.environ | {"TF_OPS_ISA": isa},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
