# SPDX-License-Identifier: Apache-2.0
"""Group normalization."""

import functools
import operator

import tensorflow as tf

from tf_ops._gradient import register_second_order
from tf_ops._library import library
from tf_ops._operation import operation


@operation
def group_normalization(x, gamma=None, beta=None, groups=32, axis=-1, epsilon=1e-3):
    """Returns (x - mean) / sqrt(variance + epsilon) * gamma + beta by groups of channels.

    Mean and variance are those of a group of neighbouring channels of a sample, over all places
    (Wu and He, 2018, "Group Normalization"). Arithmetic is in float32, the result is cast to the
    dtype of `x`. Channels may come last, first after the samples, or anywhere else.

    Args:
        x: [samples, ...] tensor of float32, float16 or bfloat16.
        gamma: [channels] tensor of any floating dtype, or None for 1.
        beta: [channels] tensor of any floating dtype, or None for 0.
        groups: int that divides the channels; -1: as many as there are channels.
        axis: int, the axis of the channels, which is not the first.
        epsilon: float added to the variance.

    Returns:
        A tensor like `x`.

    Raises:
        ValueError: a dtype, shape or number that is not as above.
        tf.errors.InvalidArgumentError: a shape that was not known before.
    """
    x = tf.convert_to_tensor(x)
    if x.dtype not in (tf.float32, tf.float16, tf.bfloat16):
        raise ValueError(f"x must be float32, float16 or bfloat16; it is {x.dtype.name}")
    rank = x.shape.rank
    if rank is None or rank < 2:
        raise ValueError(f"x must be of known rank, and at least 2; it is {x.shape}")
    if not hasattr(axis, "__index__") or not -rank <= axis < rank or axis % rank == 0:
        raise ValueError(f"axis must be one of x, {x.shape}, but not the first; it is {axis!r}")
    axis = axis.__index__() % rank
    channels = x.shape[axis]
    groups = _check_groups(groups, channels)
    gamma, beta = (_weight(n, w, x.dtype, channels) for n, w in (("gamma", gamma), ("beta", beta)))
    if gamma is not None and beta is not None and gamma.dtype != beta.dtype:
        gamma, beta = tf.cast(gamma, tf.float32), tf.cast(beta, tf.float32)

    sizes = [tf.shape(x)[i] if n is None else n for i, n in enumerate(x.shape)]
    product = lambda sizes: functools.reduce(operator.mul, sizes, 1)
    flat = [sizes[0], product(sizes[1:axis]), sizes[axis], product(sizes[axis + 1 :])]
    absent = tf.zeros([0], next((w.dtype for w in (gamma, beta) if w is not None), x.dtype))
    y, _, _ = library.tf_ops_group_normalization(
        x=tf.reshape(x, flat),
        gamma=absent if gamma is None else gamma,
        beta=absent if beta is None else beta,
        groups=groups,
        epsilon=epsilon,
    )
    return tf.reshape(y, sizes)


def _check_groups(groups, channels):
    if not hasattr(groups, "__index__") or (groups < 1 and groups != -1):
        raise ValueError(f"groups must be an int of at least 1, or -1; it is {groups!r}")
    if groups == -1:
        if channels is None:
            raise ValueError("groups is -1: then the number of channels must be known")
        return max(channels, 1)
    if channels is not None and channels % groups != 0:
        raise ValueError(f"groups must divide the {channels} channels; it is {groups}")
    return groups


def _weight(name, weight, dtype, channels):
    if weight is None:
        return None
    weight = tf.convert_to_tensor(weight)
    if not weight.shape.is_compatible_with([channels]):
        raise ValueError(f"{name} must be [channels], which are {channels}; it is {weight.shape}")
    return weight if weight.dtype in (dtype, tf.float32) else tf.cast(weight, tf.float32)


@tf.RegisterGradient("TfOps>GroupNormalization")
def _gradient(op, dy, *_):
    x, gamma, beta = op.inputs
    return library.tf_ops_group_normalization_grad(
        dy=dy,
        x=x,
        gamma=gamma,
        beta=beta,
        mean=op.outputs[1],
        rstd=op.outputs[2],
        groups=op.get_attr("groups"),
        epsilon=op.get_attr("epsilon"),
    )


def _gradient_formula(op, dy, x, gamma, beta, *_):
    """The gradients of x, gamma and beta; mean and rstd are computed anew, for they depend on x."""
    groups, shape = op.get_attr("groups"), tf.shape(x)
    split = tf.stack([shape[0], shape[1], groups, shape[2] // groups, shape[3]])
    average = lambda v: tf.reduce_mean(v, [1, 3, 4], keepdims=True)
    by_group = tf.reshape(x, split)
    centered = by_group - average(by_group)
    rstd = tf.math.rsqrt(average(centered**2) + op.get_attr("epsilon"))
    xhat = centered * rstd
    g = dy if gamma.shape == [0] else dy * tf.cast(gamma, x.dtype)[:, tf.newaxis]
    g = tf.reshape(g, split)
    dx = rstd * (g - average(g) - xhat * average(g * xhat))

    def summed(v, weight):
        return tf.zeros_like(weight) if weight.shape == [0] else tf.reduce_sum(v, [0, 1, 3])

    xhat = tf.reshape(xhat, shape)
    return tf.reshape(dx, shape), summed(dy * xhat, gamma), summed(dy, beta)


register_second_order("TfOps>GroupNormalizationGrad", _gradient_formula)
