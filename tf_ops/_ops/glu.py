# SPDX-License-Identifier: Apache-2.0
"""Gated linear units."""

import math

import tensorflow as tf

from tf_ops._gradient import register_second_order
from tf_ops._library import library
from tf_ops._operation import operation

_FLOATS = (tf.float32, tf.float16, tf.bfloat16)


def _silu(x):
    s = tf.sigmoid(x)
    return x * s, s * (1 + x * (1 - s))


def _gelu(x):
    phi = 0.5 * tf.math.erfc(-x * math.sqrt(0.5))
    return x * phi, phi + x * tf.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


def _gelu_tanh(x):
    c = math.sqrt(8 / math.pi)
    s = tf.sigmoid(c * x * (1 + 0.044715 * x * x))
    return x * s, s + x * s * (1 - s) * c * (1 + 3 * 0.044715 * x * x)


def _relu(x):
    return tf.nn.relu(x), tf.cast(x > 0, x.dtype)


def _sigmoid(x):
    s = tf.sigmoid(x)
    return s, s * (1 - s)


# f(x) and f'(x), for the second-order gradient.
ACTIVATIONS = {
    "silu": _silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": _relu,
    "sigmoid": _sigmoid,
}


@operation
def gated_linear_unit(gate, up=None, activation="silu"):
    """Returns f(gate) * up: SwiGLU, GeGLU, ReGLU or GLU, by the activation f.

    Arithmetic is in float32. Between forward and gradient only the arguments are kept: the
    gradient computes f again. https://arxiv.org/abs/2002.05202

    Args:
        gate: tensor of float32, float16 or bfloat16.
        up: tensor like `gate`, or None: the last axis of `gate` holds both, [gate, up].
        activation: "silu"; "gelu", with erf; "gelu_tanh", its approximation; "relu"; "sigmoid".

    Returns:
        A tensor like `gate`, with half its last axis where `up` is None.

    Raises:
        ValueError: a dtype, shape or activation that is not as above.
        tf.errors.InvalidArgumentError: a shape that was not known before.
    """
    gate = tf.convert_to_tensor(gate)
    if gate.dtype not in _FLOATS:
        raise ValueError(
            f"gated_linear_unit: gate is {gate.dtype.name}; it must be float32, float16 or bfloat16"
        )
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise ValueError(
            f"gated_linear_unit: activation is {activation!r}; it must be one of "
            f"{', '.join(ACTIVATIONS)}"
        )
    packed = up is None
    if packed:
        if gate.shape.rank == 0 or gate.shape.rank and (gate.shape[-1] or 0) % 2:
            raise ValueError(
                f"gated_linear_unit: gate is {gate.shape}; without up its last axis must hold "
                "gate and up, so that its size is even"
            )
        up = tf.zeros([0], gate.dtype)
    else:
        up = tf.convert_to_tensor(up)
        if up.dtype != gate.dtype or not up.shape.is_compatible_with(gate.shape):
            raise ValueError(
                f"gated_linear_unit: up is {up.dtype.name} {up.shape}; it must have the dtype and "
                f"shape of gate, {gate.dtype.name} {gate.shape}"
            )
    call = lambda gate, up: library.tf_ops_gated_linear_unit(
        gate=gate, up=up, activation=activation, packed=packed
    )
    if (gate.shape.rank or 0) <= 8:
        return call(gate, up)
    shape = tf.shape(gate)  # the kernel's limit is 8 dimensions
    flat = [-1, shape[-1]]
    y = call(tf.reshape(gate, flat), up if packed else tf.reshape(up, flat))
    return tf.reshape(y, tf.concat([shape[:-1], tf.shape(y)[-1:]], 0))


@tf.RegisterGradient("TfOps>GatedLinearUnit")
def _gradient(op, dy):
    dgate, dup = library.tf_ops_gated_linear_unit_grad(
        dy=dy,
        gate=op.inputs[0],
        up=op.inputs[1],
        activation=op.get_attr("activation"),
        packed=op.get_attr("packed"),
    )
    return dgate, None if op.get_attr("packed") else dup


def _gradient_formula(op, dy, gate, up):
    packed = op.get_attr("packed")
    if packed:
        gate, up = tf.split(gate, 2, -1)
    activation = op.get_attr("activation")
    value, derivative = ACTIVATIONS[getattr(activation, "decode", lambda: activation)()](gate)
    dgate, dup = dy * up * derivative, dy * value
    return (tf.concat([dgate, dup], -1), tf.zeros([0])) if packed else (dgate, dup)


register_second_order("TfOps>GatedLinearUnitGrad", _gradient_formula)
