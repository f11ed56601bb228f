# SPDX-License-Identifier: Apache-2.0
"""What an op's tests need: `check()` compares it everywhere with its formula in stock TensorFlow.

A `conftest.py` that says `pytest_plugins = ["tf_ops.testing"]` gets three fixtures: `device`, which
runs every test on the CPU and, where there is one, on the GPU; `mode` and `dtype`, one of `MODES`
and of `DTYPES` for the tests that take them. A whole test is then

    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_twice(shape, dtype, mode):
        check(twice, lambda x: 2 * x, [shape], dtype, mode)

Needs pytest. Importing this module sets two things for the process, so do it before the first op
runs: memory that an op leaves unwritten is NaN (`TF_OPS_DEBUG_MEMORY=0` turns that off), and
float32 products are not rounded to TensorFloat-32.
"""

import os

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

os.environ.setdefault("TF_OPS_DEBUG_MEMORY", "1")
# float32 means float32: the yardstick is stock TensorFlow's own error.
tf.config.experimental.enable_tensor_float_32_execution(False)

DTYPES = [tf.float32, tf.float16, tf.bfloat16]
MODES = ["eager", "graph", "xla"]
DEVICES = ["CPU:0"] + ["GPU:0"] * bool(tf.config.list_physical_devices("GPU"))
# Of an element-wise op: nothing in it, one element, less than a vector, a rest beside whole
# vectors, whole vectors only, more than a block of threads, several blocks and a rest.
SHAPES = [(0,), (2, 0, 3), (), (1,), (3,), (2, 3, 5), (33,), (4, 64), (1025,), (5, 3, 4099)]


@pytest.fixture(params=DEVICES, autouse=True)
def device(request):
    """Runs every test once per available device."""
    with tf.device(request.param):
        assert tf.zeros([]).device.endswith(request.param)
        yield request.param


@pytest.fixture(params=MODES)
def mode(request):
    """How the op is called."""
    return request.param


@pytest.fixture(params=DTYPES, ids=lambda dtype: dtype.name)
def dtype(request):
    """What the op's floating inputs are."""
    return request.param


def in_mode(fn, mode, inputs):
    """Returns `fn` as it runs in a mode.

    Args:
        fn: a function of tensors.
        mode: "eager"; "graph", a `tf.function` that knows the ranks of its inputs only; or "xla",
            one with `jit_compile=True`.
        inputs: the tensors it will be called with; their values are not read.
    """
    if mode == "eager":
        return fn
    if mode == "xla":
        return tf.function(fn, jit_compile=True, autograph=False)
    signature = [tf.TensorSpec([None] * x.shape.rank, x.dtype) for x in inputs]
    return tf.function(fn, input_signature=signature, autograph=False)


def error(actual, reference):
    """Returns the largest deviation from `reference`; where that is not finite both must agree."""
    actual, reference = (tf.cast(x, tf.float64).numpy() for x in (actual, reference))
    finite = np.isfinite(reference)
    np.testing.assert_array_equal(actual[~finite], reference[~finite])
    return np.abs(actual[finite] - reference[finite]).max(initial=0)


def check(op, reference, inputs, dtype=tf.float32, mode="eager", seed=0, second_order=False):
    """Compares values and gradients of `op` with those of `reference`, run in float64.

    The yardstick is the same formula in the op's dtype, in eager mode on the device in scope: the
    op may err twice as much (gradients: thrice), plus 4 (8) units in the last place of the largest
    entry. Gradients are those by all floating inputs, for random upstream gradients.

    Args:
        op: the function under test, of as many tensors as `inputs`; returns one or several.
        reference: the obvious formula in stock TensorFlow, called alike.
        inputs: for each argument a shape, which is filled with normal random numbers of `dtype`,
            or a tensor, which is taken as it is.
        dtype: of the random inputs and of the results that `reference` gives in it.
        mode: "eager"; "graph", with unknown dimensions; or "xla".
        seed: of the random numbers.
        second_order: also compares the gradients of the gradients.

    Raises:
        AssertionError: a value or gradient is off by more, has another shape or dtype, is NaN or
            infinite where the reference's is not, or an input was written to.
    """
    rng = np.random.default_rng(seed)
    draw = lambda shape, dtype=dtype: tf.cast(rng.standard_normal(shape), dtype)
    inputs = [shape if tf.is_tensor(shape) else draw(shape) for shape in inputs]
    y = tf.nest.flatten(reference(*inputs))
    # A cotangent for each value, then one for each first-order gradient.
    args = inputs + [draw(x.shape, x.dtype) for x in y]
    args += [draw(x.shape, x.dtype) for x in inputs if x.dtype.is_floating]
    wide = [tf.cast(x, tf.float64) if x.dtype.is_floating else x for x in args]

    ours = _values_and_gradients(op, inputs, len(y), second_order)
    stock = _values_and_gradients(reference, inputs, len(y), second_order)
    before = [x.numpy().copy() for x in args]
    actual = in_mode(ours, mode, args)(*args)
    for i, (x, copy) in enumerate(zip(args, before)):
        assert x.numpy().tobytes() == copy.tobytes(), f"input {i} was written to"
    stock, expected = stock(*args), stock(*wide)

    rules = [("value", 2, 4), ("gradient", 3, 8), ("second-order gradient", 3, 8)]
    for (what, ratio, ulps), *orders in zip(rules, actual, stock, expected):
        for i, (a, s, e) in enumerate(zip(*orders, strict=True)):
            name = f"{what} {i}"
            assert a.shape == e.shape, f"{name} is of shape {a.shape}, not {e.shape}"
            assert a.dtype in (dtype, s.dtype), f"{name} is {a.dtype.name}, not {s.dtype.name}"
            ulp = float(ml_dtypes.finfo(a.dtype.as_numpy_dtype).eps)
            largest = np.abs(e.numpy()[np.isfinite(e)]).max(initial=0)
            allowed = ratio * error(s, e) + ulps * ulp * largest
            off = error(a, e)
            assert not np.isnan(off), (
                f"{name}: off by nan: it is NaN or infinite where the reference is not, or the"
                " reverse. What a kernel leaves unwritten is NaN in tests."
            )
            assert off <= allowed, f"{name}: off by {off:.3g}, not {allowed:.3g} at most"


def _values_and_gradients(fn, inputs, num_outputs, second_order):
    """fn as (inputs, cotangents) -> values, gradients, and gradients of those.

    Gradients are those by the floating inputs. The cotangents are one for each value, then,
    for the second order, one for each gradient.
    """
    floating = [i for i, x in enumerate(inputs) if x.dtype.is_floating]

    def run(*args):
        args, cotangents = args[: len(inputs)], list(args[len(inputs) :])
        dy, dgradients = cotangents[:num_outputs], cotangents[num_outputs:]
        by = [args[i] for i in floating]
        with tf.GradientTape() as outer:
            outer.watch([*by, *dy])
            with tf.GradientTape() as tape:
                tape.watch(by)
                y = tf.nest.flatten(fn(*args))
            gradients = tape.gradient(y, by, dy, unconnected_gradients="zero")
        if not second_order:
            return [y, gradients]
        second = outer.gradient(gradients, [*by, *dy], dgradients, unconnected_gradients="zero")
        return [y, gradients, second]

    return run


def check_rejected(op, inputs, match, mode="eager"):
    """Verifies that `op` refuses `inputs` with an error, where shapes are known at run time only.

    Args:
        op: the function under test.
        inputs: the tensors that it must refuse.
        match: a regular expression that is in the text of the InvalidArgumentError.
        mode: as in `check`.
    """
    inputs = [tf.convert_to_tensor(x) for x in inputs]
    signature = [tf.TensorSpec(None, x.dtype) for x in inputs]
    if mode != "eager":
        op = tf.function(op, jit_compile=mode == "xla", input_signature=signature)
    with pytest.raises(tf.errors.InvalidArgumentError, match=match):
        op(*inputs)
