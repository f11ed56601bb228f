# SPDX-License-Identifier: Apache-2.0
"""The op scaled_square."""

import tensorflow as tf
from tf_ops.extend import operation, register_second_order

from my_ops._library import library


@operation
def scaled_square(x, scale=1.0):
    """Returns scale * x * x. Arithmetic is in float32.

    Args:
        x: tensor of float32, float16 or bfloat16, of at most 8 dimensions.
        scale: float.

    Returns:
        A tensor like `x`.

    Raises:
        ValueError: a dtype that is not as above.
        tf.errors.InvalidArgumentError: more dimensions.
    """
    x = tf.convert_to_tensor(x)
    if x.dtype not in (tf.float32, tf.float16, tf.bfloat16):
        raise ValueError(f"x is {x.dtype.name}; it must be float32, float16 or bfloat16")
    return library.my_ops_scaled_square(x=x, scale=scale)


@tf.RegisterGradient("MyOps>ScaledSquare")
def _gradient(op, dy):
    (x,) = op.inputs
    return library.my_ops_scaled_square_grad(dy=dy, x=x, scale=op.get_attr("scale"))


# Its derivative, by TensorFlow, is the second-order gradient.
def _gradient_formula(op, dy, x):
    return 2 * op.get_attr("scale") * x * dy


register_second_order("MyOps>ScaledSquareGrad", _gradient_formula)
