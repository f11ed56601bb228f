# SPDX-License-Identifier: Apache-2.0
"""tf_ops.testing finds the faults that it is for."""

import ctypes
import os

import numpy as np
import pytest
import tensorflow as tf

import tf_ops
from tf_ops.testing import SHAPES, check, check_rejected, error


def cube(x):
    return x * x * x


def with_gradient(gradient):
    """cube() with another gradient."""

    @tf.custom_gradient
    def op(x):
        return cube(x), lambda dy: gradient(x, dy)

    return op


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_is_right_passes(shape, dtype, mode):
    right = with_gradient(lambda x, dy: 3 * x * x * dy)
    check(right, cube, [shape], dtype, mode, second_order=True)


def with_value(value):
    """cube() with another value, and its own gradient."""

    @tf.custom_gradient
    def op(x):
        return value(x), lambda dy: 3 * x * x * tf.cast(tf.reshape(dy, tf.shape(x)), x.dtype)

    return op


# Each is a fault, under what check() says of it.
FAULTS = {
    "value 0: off by": with_value(lambda x: cube(x) + 1e-4),
    "value 0: off by nan": with_value(lambda x: cube(x) + tf.one_hot(2, 3, np.nan, 0.0)),
    r"value 0 is of shape \(1, 3\)": with_value(lambda x: cube(x)[None]),
    "value 0 is float16, not float32": with_value(lambda x: tf.cast(cube(x), tf.float16)),
    "^gradient 0: off by": with_gradient(lambda x, dy: 3 * x * x * dy + 1e-4),
    "second-order gradient 0: off": with_gradient(lambda x, dy: 3 * tf.stop_gradient(x * x) * dy),
}


@pytest.mark.parametrize("message", FAULTS)
def test_fault_is_found(message):
    with pytest.raises(AssertionError, match=message):
        check(FAULTS[message], cube, [(3,)], second_order=True)


def test_fault_of_one_mode_is_found(mode):
    only_in_graphs = with_value(lambda x: cube(x) + (0 if tf.executing_eagerly() else 1e-4))
    if mode == "eager":
        return check(only_in_graphs, cube, [(3,)], mode=mode)
    with pytest.raises(AssertionError, match="value 0: off by"):
        check(only_in_graphs, cube, [(3,)], mode=mode)


def test_nan_must_be_where_the_reference_has_it():
    x = tf.constant([1.0, -1.0])
    check(tf.math.log, tf.math.log, [x])
    with pytest.raises(AssertionError):
        check(lambda x: tf.math.log(tf.abs(x)), tf.math.log, [x])


def test_input_that_is_written_to(device):
    if "GPU" in device:
        pytest.skip("a write to the CPU's memory")
    x = tf.constant([1.0, 2.0, 3.0])

    def op(x):
        ctypes.memset(np.asarray(memoryview(x)).ctypes.data, 0, 4)
        return x + 0

    with pytest.raises(AssertionError, match="input 0 was written to"):
        check(op, lambda x: x + 0, [x])


def test_error():
    assert error(tf.constant([1.0, np.inf]), tf.constant([1.5, np.inf])) == 0.5
    assert error(tf.zeros([0]), tf.zeros([0])) == 0
    with pytest.raises(AssertionError):
        error(tf.constant([np.inf]), tf.constant([-np.inf]))


def test_rejection_is_verified(mode):
    product = lambda x, y: tf.raw_ops.MatMul(a=x, b=y)
    check_rejected(product, [tf.ones([2, 3]), tf.ones([2, 3])], "ncompatible|must be equal", mode)
    with pytest.raises(pytest.fail.Exception):
        check_rejected(product, [tf.ones([2, 3]), tf.ones([3, 2])], ".", mode)


def test_memory_is_poisoned():
    assert os.environ["TF_OPS_DEBUG_MEMORY"] in "01"  # 0: somebody wanted it so
    assert tf_ops.testing.check is check
