# SPDX-License-Identifier: Apache-2.0
"""Softmax of what a mask shows."""

import tensorflow as tf

from tf_ops._gradient import register_second_order
from tf_ops._library import library
from tf_ops._operation import operation

_MAX_RANK = 8  # of the kernels


@operation
def masked_softmax(x, mask=None, axis=-1, *, scale=1.0):
    """softmax(scale * x) over the entries where `mask` is true, and 0 where it is false.

    A row without such an entry is 0. Whatever a hidden entry holds, NaN too, reaches neither the
    result nor the gradient, which is 0 there. Arithmetic is in float32.

    Args:
        x: tensor of float32, float16 or bfloat16.
        mask: bool tensor that broadcasts to the shape of `x`, or None. It is not expanded.
        axis: int, the axis over which the result sums to 1.
        scale: float that `x` is multiplied by.

    Returns:
        A tensor like `x`.

    Raises:
        ValueError: a dtype, shape or axis that is not as above.
        tf.errors.InvalidArgumentError: a shape that was not known before.
    """
    x = tf.convert_to_tensor(x)
    if x.dtype not in (tf.float32, tf.float16, tf.bfloat16):
        raise ValueError(f"x must be float32, float16 or bfloat16; it is {x.dtype.name}")
    rank = x.shape.rank
    if not hasattr(axis, "__index__") or (rank is None and axis != -1):
        raise ValueError(f"axis must be an int, and -1 for an x of unknown rank; it is {axis!r}")
    if rank is not None and not -rank <= axis < rank:
        raise ValueError(f"axis must be one of x, which is {x.shape}; it is {axis}")
    if mask is not None:
        mask = tf.cast(mask, tf.bool)
        _check_mask(mask, x)

    back = lambda y: y
    last = -1 if rank is None else rank - 1
    if rank is not None and axis % rank != last:
        order = list(range(rank))
        order[axis], order[last] = order[last], order[axis]
        x, back = tf.transpose(x, order), lambda y: tf.transpose(y, order)
        if mask is not None:
            mask = tf.transpose(_of_rank(mask, rank), order)
    if rank is not None and rank > _MAX_RANK:
        swapped, shape = back, tf.shape(x)
        flat = tf.concat([[tf.reduce_prod(shape[: 1 - _MAX_RANK])], shape[1 - _MAX_RANK :]], 0)
        if mask is not None:
            mask = tf.reshape(tf.broadcast_to(mask, shape), flat)
        x, back = tf.reshape(x, flat), lambda y: swapped(tf.reshape(y, shape))
    y = library.tf_ops_masked_softmax(
        x=x, mask=tf.zeros([0], tf.bool) if mask is None else mask, scale=scale
    )
    return back(y)


def _check_mask(mask, x):
    if None in (mask.shape.rank, x.shape.rank):
        return
    pairs = list(zip(mask.shape[::-1], x.shape[::-1]))
    if mask.shape.rank > x.shape.rank or not all(m in (1, d) or None in (m, d) for m, d in pairs):
        raise ValueError(f"mask must broadcast to x, which is {x.shape}; it is {mask.shape}")


def _of_rank(mask, rank):
    """The mask with ones in front."""
    return tf.reshape(mask, tf.concat([[1] * (rank - mask.shape.rank), tf.shape(mask)], 0))


@tf.RegisterGradient("TfOps>MaskedSoftmax")
def _gradient(op, dy):
    (y,) = op.outputs
    return library.tf_ops_masked_softmax_grad(dy=dy, y=y, scale=op.get_attr("scale")), None


def _gradient_formula(op, dy, y):
    seen = tf.where(y != 0, dy, 0)
    return op.get_attr("scale") * y * (seen - tf.reduce_sum(seen * y, -1, keepdims=True))


register_second_order("TfOps>MaskedSoftmaxGrad", _gradient_formula)
