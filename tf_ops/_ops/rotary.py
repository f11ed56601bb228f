# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding."""

import math

import tensorflow as tf

from tf_ops._library import library
from tf_ops._operation import operation

_FLOATS = (tf.float32, tf.float16, tf.bfloat16)
MAX_ROTARY_DIM = 512  # of angles that the kernel computes


@operation
def rotary_embedding(
    x,
    positions=None,
    *,
    theta=10000.0,
    rotary_dim=None,
    interleaved=False,
    scaling_factor=1.0,
    cos=None,
    sin=None,
):
    """Rotates pairs of the entries of each head by angles that grow with the position.

    Pair i of a head turns by positions / scaling_factor * theta ** (-2 i / rotary_dim) radians.
    Angles are exact at any position, for theta and scaling_factor as rounded to float32;
    arithmetic is in float32. The gradient is the inverse
    rotation and keeps nothing of `x`. https://arxiv.org/abs/2104.09864

    Args:
        x: [batch, seq, heads, head_dim] tensor of float32, float16 or bfloat16; or a tuple
            (query, key) of two such, which may differ in heads, for both in one kernel.
        positions: int32 [seq] or [batch, seq]; None: 0, 1, 2, ...
        theta: positive float, the base of the angles.
        rotary_dim: even int, how many entries of a head are rotated, the first ones; the others
            are copied. None: all, or twice the width of `cos`. At most 512 without `cos`.
        interleaved: whether entries 2 i and 2 i + 1 make a pair, as in GPT-J, instead of i and
            rotary_dim / 2 + i, as in GPT-NeoX and Llama.
        scaling_factor: positive float by which positions are divided.
        cos: the cosines, in place of those of the angles above, for angles of another kind:
            [rows, rotary_dim / 2], whose row `position` is taken, or [batch, seq,
            rotary_dim / 2], without positions. They and `sin` have no gradient.
        sin: the sines, like `cos`.

    Returns:
        A tensor like `x`, or a tuple of two.

    Raises:
        ValueError: a dtype, shape or option that is not as above.
        tf.errors.InvalidArgumentError: a shape that was not known before, or, on the CPU, a
            position that is no row of `cos`; on the GPU such a token becomes NaN.
    """
    pair = isinstance(x, tuple)
    if pair and len(x) != 2:
        raise ValueError(f"rotary_embedding: x is a tuple of {len(x)}; it must be (query, key)")
    x, key = map(tf.convert_to_tensor, x) if pair else (tf.convert_to_tensor(x), None)
    _check_tensors(x, key)
    positions = _positions(x, positions)
    cos, sin = _tables(cos, sin)
    _check_rotary_dim(x, rotary_dim, cos)
    y, rotated_key = library.tf_ops_rotary_embedding(
        x=x,
        key=tf.zeros([0], x.dtype) if key is None else key,
        positions=[] if positions is None else positions,
        cos=[] if cos is None else cos,
        sin=[] if sin is None else sin,
        theta=_positive("theta", theta),
        scaling_factor=_positive("scaling_factor", scaling_factor),
        rotary_dim=0 if rotary_dim is None else rotary_dim,
        interleaved=bool(interleaved),
    )
    return (y, rotated_key) if pair else y


def _check_tensors(x, key):
    for name, tensor in (("x", x), ("key", key)):
        if tensor is None:
            continue
        if tensor.dtype not in _FLOATS:
            raise ValueError(
                f"rotary_embedding: {name} is {tensor.dtype.name}; it must be float32, float16 or "
                "bfloat16"
            )
        if tensor.shape.rank not in (None, 4):
            raise ValueError(
                f"rotary_embedding: {name} is {tensor.shape}; it must be [batch, seq, heads, "
                "head_dim]"
            )
    if key is None:
        return
    alike = [x.shape[:2] + x.shape[3:], key.shape[:2] + key.shape[3:]]
    if key.dtype != x.dtype or not alike[0].is_compatible_with(alike[1]):
        raise ValueError(
            f"rotary_embedding: key is {key.dtype.name} {key.shape}; beside a query of "
            f"{x.dtype.name} {x.shape} only its heads may be others"
        )


def _positions(x, positions):
    if positions is None:
        return None
    positions = tf.convert_to_tensor(positions)
    if positions.dtype not in (tf.int32, tf.int64):
        raise ValueError(
            f"rotary_embedding: positions are {positions.dtype.name}; they must be int32"
        )
    batch, seq = (None, None) if x.shape.rank is None else x.shape[:2]
    allowed = [[seq], [batch, seq], [1, seq]]
    if not any(positions.shape.is_compatible_with(shape) for shape in allowed):
        raise ValueError(
            f"rotary_embedding: positions are {positions.shape}; beside x {x.shape} they must be "
            "[seq] or [batch, seq]"
        )
    return tf.cast(positions, tf.int32)


def _tables(cos, sin):
    if (cos is None) != (sin is None):
        raise ValueError("rotary_embedding: takes both cos and sin, or neither")
    if cos is None:
        return None, None
    cos, sin = tf.convert_to_tensor(cos), tf.convert_to_tensor(sin)
    for name, table in (("cos", cos), ("sin", sin)):
        if not table.dtype.is_floating or table.shape.rank not in (None, 2, 3):
            raise ValueError(
                f"rotary_embedding: {name} is {table.dtype.name} {table.shape}; it must be floats "
                "[rows, rotary_dim / 2] or [batch, seq, rotary_dim / 2]"
            )
    if not cos.shape.is_compatible_with(sin.shape):
        raise ValueError(
            f"rotary_embedding: cos is {cos.shape} and sin {sin.shape}; they must be of one shape"
        )
    return tf.cast(cos, tf.float32), tf.cast(sin, tf.float32)


def _check_rotary_dim(x, rotary_dim, cos):
    head_dim = None if x.shape.rank is None else x.shape[-1]
    width = None if cos is None or cos.shape.rank is None else cos.shape[-1]
    size = rotary_dim
    if size is None:
        size = 2 * width if width is not None else head_dim if cos is None else None
    elif not isinstance(size, int) or isinstance(size, bool) or size < 2:
        raise ValueError(
            f"rotary_embedding: rotary_dim is {size!r}; it must be None or a positive even int"
        )
    if size is None:
        return
    if size % 2 or head_dim is not None and size > head_dim:
        raise ValueError(
            f"rotary_embedding: rotary_dim is {size}; it must be even and at most head_dim, "
            f"{head_dim}"
        )
    if cos is None and size > MAX_ROTARY_DIM:
        raise ValueError(
            f"rotary_embedding: rotary_dim is {size}; without cos and sin it is {MAX_ROTARY_DIM} "
            "at most"
        )
    if width is not None and width != size // 2:
        raise ValueError(
            f"rotary_embedding: cos is {cos.shape}; its last axis must be half of rotary_dim {size}"
        )


def _positive(name, value):
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 < number <= tf.float32.max:
        raise ValueError(f"rotary_embedding: {name} must be a positive number; it is {value!r}")
    return number


_ATTRIBUTES = ("theta", "scaling_factor", "rotary_dim", "interleaved")


@tf.RegisterGradient("TfOps>RotaryEmbedding")
def _gradient(op, dy, dkey):
    x, key, positions, cos, sin = op.inputs
    dx, dkey = library.tf_ops_rotary_embedding(
        x=tf.zeros_like(x) if dy is None else dy,
        key=tf.zeros_like(key) if dkey is None else dkey,
        positions=positions,
        cos=cos,
        sin=sin,
        inverse=not op.get_attr("inverse"),
        **{name: op.get_attr(name) for name in _ATTRIBUTES},
    )
    return dx, dkey, None, None, None
