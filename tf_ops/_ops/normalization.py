# SPDX-License-Identifier: Apache-2.0
"""RMS and layer normalisation."""

import tensorflow as tf

from tf_ops._gradient import register_second_order
from tf_ops._library import library
from tf_ops._operation import operation

_DTYPES = (tf.float32, tf.float16, tf.bfloat16)


@operation
def rms_normalization(
    x, scale=None, axis=-1, epsilon=None, *, residual=None, scale_offset=0.0, return_residual=False
):
    """Returns s / sqrt(mean(s²) + epsilon) * (scale + scale_offset), where s = x + residual.

    `keras.ops.rms_normalization` with a residual sum in front: arithmetic is in float32, the
    result is cast to the dtype of `x`.

    Args:
        x: tensor of float32, float16 or bfloat16.
        scale: tensor of any floating dtype that broadcasts to `x`, or None. It may have more axes
            than are normalised: [heads, head_dim] beside an `x` of [..., heads, head_dim]. Where
            it cannot be broadcast, it may have the shape of the normalised axes.
        axis: int or ints, the axes to normalise over.
        epsilon: float added to the mean; None: `keras.config.epsilon()`.
        residual: tensor like `x`, or None: s is `x`. The sum is rounded to the dtype of `x`.
        scale_offset: float added to `scale` in float32, as Gemma's 1.
        return_residual: whether to return s as well.

    Returns:
        A tensor like `x`, or with `return_residual` the tuple of it and s.

    Raises:
        ValueError: an argument has a dtype, shape or value that is not taken.
    """
    x, residual = _inputs("rms_normalization", x, residual)
    if x.shape.rank == 0:  # as Keras does
        x, residual = tf.reshape(x, [1]), None if residual is None else tf.reshape(residual, [1])
    order, axes = _order("rms_normalization", x, axis)
    x, residual, undo = _transposed(x, residual, order)
    scale = _weight("rms_normalization: scale", scale, x, order, axes, lay_along_axes=False)
    y, s, _ = library.tf_ops_rms_normalization(
        x=x,
        residual=[] if residual is None else residual,
        scale=[] if scale is None else scale,
        epsilon=_epsilon(epsilon),
        scale_offset=scale_offset,
        axes=axes,
        return_residual=return_residual,
    )
    return (undo(y), undo(x if residual is None else s)) if return_residual else undo(y)


@operation
def layer_normalization(
    x, gamma=None, beta=None, axis=-1, epsilon=None, *, residual=None, return_residual=False
):
    """Returns (s - mean(s)) / sqrt(variance(s) + epsilon) * gamma + beta, where s = x + residual.

    `keras.ops.layer_normalization` with a residual sum in front: arithmetic is in float32, the
    result is cast to the dtype of `x`.

    Args:
        x: tensor of float32, float16 or bfloat16.
        gamma: tensor of any floating dtype, of the shape of the normalised axes, or None. It may
            have more of the last axes of `x` than are normalised, or broadcast to `x`.
        beta: as `gamma`.
        axis: int or ints, the axes to normalise over.
        epsilon: float added to the variance; None: `keras.config.epsilon()`.
        residual: tensor like `x`, or None: s is `x`. The sum is rounded to the dtype of `x`.
        return_residual: whether to return s as well.

    Returns:
        A tensor like `x`, or with `return_residual` the tuple of it and s.

    Raises:
        ValueError: an argument has a dtype, shape or value that is not taken.
    """
    x, residual = _inputs("layer_normalization", x, residual)
    order, axes = _order("layer_normalization", x, axis)
    x, residual, undo = _transposed(x, residual, order)
    gamma = _weight("layer_normalization: gamma", gamma, x, order, axes, lay_along_axes=True)
    beta = _weight("layer_normalization: beta", beta, x, order, axes, lay_along_axes=True)
    if gamma is not None and beta is not None:
        gamma, beta = _alike(gamma, beta)
    y, s, _, _ = library.tf_ops_layer_normalization(
        x=x,
        residual=[] if residual is None else residual,
        gamma=[] if gamma is None else gamma,
        beta=[] if beta is None else beta,
        epsilon=_epsilon(epsilon),
        axes=axes,
        return_residual=return_residual,
    )
    return (undo(y), undo(x if residual is None else s)) if return_residual else undo(y)


def _epsilon(epsilon):
    if epsilon is None:
        import keras

        return keras.config.epsilon()
    return epsilon


def _inputs(function, x, residual):
    """x and the residual as tensors that fit each other."""
    x = tf.convert_to_tensor(x)
    if x.dtype not in _DTYPES:
        raise ValueError(
            f"{function}: x is {x.dtype.name}; it must be float32, float16 or bfloat16"
        )
    if residual is not None:
        if not tf.is_tensor(residual) and not hasattr(residual, "dtype"):
            residual = tf.convert_to_tensor(residual, x.dtype)
        residual = tf.convert_to_tensor(residual)
        if residual.dtype != x.dtype or not residual.shape.is_compatible_with(x.shape):
            raise ValueError(
                f"{function}: residual is {residual.dtype.name} {residual.shape}; it must have "
                f"the dtype and shape of x, {x.dtype.name} {x.shape}"
            )
    return x, residual


def _order(function, x, axis):
    """How to transpose x so that the axes to normalise come last, None if they do; their number."""
    axes = list(axis) if isinstance(axis, (tuple, list)) else [axis]
    if not axes or not all(hasattr(a, "__index__") for a in axes):
        raise ValueError(f"{function}: axis is {axis!r}; it must be an int or some ints")
    axes = [a.__index__() for a in axes]
    rank = x.shape.rank
    if rank is None:
        if sorted(axes) != list(range(-len(axes), 0)):
            raise ValueError(
                f"{function}: axis is {axis}; of an x of unknown rank only the last axes, counted "
                "from the end, can be normalised"
            )
        return None, len(axes)
    if not all(-rank <= a < rank for a in axes) or len({a % rank for a in axes}) < len(axes):
        raise ValueError(
            f"{function}: axis is {axis}; it must name different axes of x, which is {x.shape}"
        )
    axes = sorted(a % rank for a in axes)
    order = [a for a in range(rank) if a not in axes] + axes
    return None if order == list(range(rank)) else order, len(axes)


def _transposed(x, residual, order):
    """x and the residual as the kernel takes them, and a function that turns results back."""
    back = lambda y: y
    if order is not None:
        inverse = [order.index(i) for i in range(len(order))]
        x, residual = (None if t is None else tf.transpose(t, order) for t in (x, residual))
        back = lambda y: tf.transpose(y, inverse)
    if (x.shape.rank or 0) <= 8:
        return x, residual, back
    shape = tf.shape(x)  # the kernel's limit is 8 dimensions
    flat = tf.concat([[tf.reduce_prod(shape[:-7])], shape[-7:]], 0)
    x, residual = (None if t is None else tf.reshape(t, flat) for t in (x, residual))
    return x, residual, lambda y: back(tf.reshape(y, shape))


def _weight(name, weight, x, order, axes, lay_along_axes):
    """A weight as the kernel takes it: like the last `axes` or more axes of the transposed x."""
    if weight is None:
        return None
    weight = tf.convert_to_tensor(weight)
    if weight.dtype != x.dtype and weight.dtype != tf.float32:
        weight = tf.cast(weight, tf.float32)
    if weight.shape.rank is None or x.shape.rank is None:
        return weight
    given, rank = weight.shape, x.shape.rank if order is None else len(order)
    normalised = x.shape[-axes:]
    # Keras lays the weights of a layer normalisation along the axes, whatever their rank.
    elements = weight.shape.num_elements()
    if lay_along_axes and weight.shape.rank != rank and elements == normalised.num_elements():
        if elements is not None and weight.shape != normalised:
            weight = tf.reshape(weight, normalised)
    elif order is not None and weight.shape.rank <= rank:
        ones = [1] * (rank - weight.shape.rank)
        shape = [x.shape[order.index(i)] for i in range(rank)]
        if all(w in (1, d) or None in (w, d) for w, d in zip(ones + list(given), shape)):
            weight = tf.reshape(weight, tf.concat([ones, tf.shape(weight)], 0))
            weight = tf.transpose(weight, order)
    leading = next((i for i, w in enumerate(weight.shape[:-axes]) if w != 1), None)
    leading = max(weight.shape.rank - axes, 0) if leading is None else leading
    if leading > 0:
        weight = tf.squeeze(weight, list(range(leading)))
    last = max(axes, weight.shape.rank)
    pairs = list(zip(weight.shape[::-1], x.shape[::-1]))
    if last > x.shape.rank or not all(w in (1, d) or None in (w, d) for w, d in pairs):
        raise ValueError(
            f"{name} is {given}; it must broadcast to x or have the shape of its normalised "
            f"axes, which are {normalised} of {x.shape}"
        )
    if weight.shape.rank < axes or any(w == 1 and d != 1 for w, d in pairs):
        weight = tf.broadcast_to(weight, tf.shape(x)[-last:])
    return weight


def _alike(gamma, beta):
    """Both weights in one dtype and shape."""
    if gamma.dtype != beta.dtype:
        gamma, beta = tf.cast(gamma, tf.float32), tf.cast(beta, tf.float32)
    if gamma.shape.rank != beta.shape.rank and None not in (gamma.shape.rank, beta.shape.rank):
        if gamma.shape.rank < beta.shape.rank:
            gamma = tf.broadcast_to(gamma, tf.shape(beta))
        else:
            beta = tf.broadcast_to(beta, tf.shape(gamma))
    return gamma, beta


def _absent(tensor):
    return tensor.shape.rank == 1 and tensor.shape[0] == 0


@tf.custom_gradient
def _saved_sum(x, residual, s):
    """s, as the sum of x and residual that it is: second-order gradients go to these."""
    return tf.identity(s), lambda ds: (ds, ds, None)


def _normalized(op, x, residual, s, dy, ds):
    """What was normalised, and the gradients of y and s."""
    dy = tf.zeros_like(x) if dy is None else dy
    if _absent(residual):
        return x, dy, []
    if op.get_attr("return_residual"):
        return s, dy, [] if ds is None else ds
    # Nobody has s, so its gradient is zeros, which the kernel need not read.
    return _saved_sum(x, residual, s), dy, []


def _residual_gradient(x, residual, dx):
    return None if _absent(residual) and not _absent(x) else dx


@tf.RegisterGradient("TfOps>RmsNormalization")
def _rms_normalization_grad(op, dy, ds, drstd):
    x, residual, scale = op.inputs
    s, dy, ds = _normalized(op, x, residual, op.outputs[1], dy, ds)
    dx, dscale = library.tf_ops_rms_normalization_grad(
        dy=dy,
        ds=ds,
        drstd=[] if drstd is None else drstd,
        x=s,
        scale=scale,
        rstd=op.outputs[2],
        epsilon=op.get_attr("epsilon"),
        scale_offset=op.get_attr("scale_offset"),
        axes=op.get_attr("axes"),
    )
    return dx, _residual_gradient(x, residual, dx), dscale


@tf.RegisterGradient("TfOps>LayerNormalization")
def _layer_normalization_grad(op, dy, ds, dmean, drstd):
    x, residual, gamma, beta = op.inputs
    s, dy, ds = _normalized(op, x, residual, op.outputs[1], dy, ds)
    dx, dgamma, dbeta = library.tf_ops_layer_normalization_grad(
        dy=dy,
        ds=ds,
        dmean=[] if dmean is None else dmean,
        drstd=[] if drstd is None else drstd,
        x=s,
        gamma=gamma,
        beta=beta,
        mean=op.outputs[2],
        rstd=op.outputs[3],
        epsilon=op.get_attr("epsilon"),
        axes=op.get_attr("axes"),
    )
    return dx, _residual_gradient(x, residual, dx), dgamma, dbeta


def _formula(op, dy, ds, dmean, drstd, x, scale, beta, scale_offset, subtract_mean):
    """The gradients of x, scale and beta; stats are computed anew, for they depend on x."""
    axis = list(range(-op.get_attr("axes"), 0))
    average = lambda v: tf.reduce_mean(v, axis, keepdims=True)
    centered = x - average(x) if subtract_mean else x
    rstd = tf.math.rsqrt(average(centered * centered) + op.get_attr("epsilon"))
    xhat = centered * rstd
    g = dy if _absent(scale) else dy * (scale + scale_offset)
    cols = tf.cast(tf.reduce_prod(tf.shape(x)[axis[0] :]), x.dtype)
    dot = average(g * xhat)
    if not _absent(drstd):
        dot += rstd * tf.reshape(drstd, tf.shape(rstd)) / cols
    dx = rstd * (g - xhat * dot)
    if subtract_mean:
        dx -= rstd * average(g)
        if not _absent(dmean):
            dx += tf.reshape(dmean, tf.shape(rstd)) / cols
    if not _absent(ds):
        dx += ds

    def summed(v, weight):
        if _absent(weight):
            return tf.zeros_like(weight)
        v = tf.cast(v, weight.dtype)
        return tf.reduce_sum(v, tf.range(tf.rank(v) - tf.rank(weight)))

    return dx, summed(dy * xhat, scale), summed(dy, beta)


def _rms_formula(op, dy, ds, drstd, x, scale, _):
    absent, offset = tf.zeros([0]), op.get_attr("scale_offset")
    return _formula(op, dy, ds, absent, drstd, x, scale, absent, offset, False)[:2]


def _layer_formula(op, dy, ds, dmean, drstd, x, gamma, beta, *_):
    return _formula(op, dy, ds, dmean, drstd, x, gamma, beta, 0.0, True)


register_second_order("TfOps>RmsNormalizationGrad", _rms_formula)
register_second_order("TfOps>LayerNormalizationGrad", _layer_formula)
