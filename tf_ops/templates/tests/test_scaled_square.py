# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
import tensorflow as tf
from tf_ops.testing import SHAPES, check, check_rejected

from my_ops import scaled_square
from my_ops._library import library


def reference(x, scale=1.0):
    """The obvious formula, which check() runs in float64."""
    return scale * x * x


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape, dtype):
    check(scaled_square, reference, [shape], dtype)


def test_modes(dtype, mode):
    op = lambda x: scaled_square(x, scale=0.7)
    formula = lambda x: reference(x, scale=0.7)
    check(op, formula, [(2, 3, 37)], dtype, mode, second_order=True)


def test_same_bits_each_time(dtype):
    x = tf.cast(tf.random.normal([1000, 33]), dtype)
    first, second = (tf.bitcast(scaled_square(x), x.dtype) for _ in range(2))
    np.testing.assert_array_equal(first, second)


# Memory that does not begin at a multiple of 16 bytes takes another path.
def test_unaligned_slice(dtype):
    x = tf.cast(tf.random.normal([1001]), dtype)
    np.testing.assert_array_equal(scaled_square(x[1:]), scaled_square(x)[1:])


def test_mistakes(mode):
    with pytest.raises(ValueError, match="x is int32; it must be float32"):
        scaled_square([1, 2])
    gradient = lambda dy, x: library.my_ops_scaled_square_grad(dy=dy, x=x)
    check_rejected(gradient, [tf.ones([2]), tf.ones([3])], "shape|equal", mode)
