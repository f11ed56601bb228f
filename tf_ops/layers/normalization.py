# SPDX-License-Identifier: Apache-2.0
"""Keras normalization layers over the fused kernels."""

import functools

import keras

from tf_ops._models.coverage import count, left_to_stock
from tf_ops._ops.group_normalization import group_normalization
from tf_ops._ops.normalization import layer_normalization, rms_normalization
from tf_ops.layers._dtypes import is_served


def rms_call(stock):
    """Returns the `call` of an RMS normalization, made of `stock`, that of Keras."""

    @functools.wraps(stock)
    def call(self, x):
        reason = _obstacle(x, self.axis)
        if reason:
            return left_to_stock("rms_normalization", reason, stock, self, x)
        count("rms_normalization")
        return rms_normalization(x, scale=self.scale, axis=self.axis, epsilon=self.epsilon)

    return call


def layer_call(stock):
    """Returns the `call` of a layer normalization, made of `stock`, that of Keras."""

    @functools.wraps(stock)
    def call(self, inputs):
        reason = "rms_scaling" if self.rms_scaling else _obstacle(inputs, self.axis)
        if reason:
            return left_to_stock("layer_normalization", reason, stock, self, inputs)
        count("layer_normalization")
        outputs = layer_normalization(
            inputs, self.gamma, self.beta, axis=self.axis, epsilon=self.epsilon
        )
        return keras.ops.cast(outputs, self.compute_dtype)

    return call


def group_call(stock):
    """Returns the `call` of a group normalization, made of `stock`, that of Keras."""

    @functools.wraps(stock)
    def call(self, inputs):
        reason = _obstacle(inputs, ())
        if reason:
            return left_to_stock("group_normalization", reason, stock, self, inputs)
        count("group_normalization")
        outputs = group_normalization(
            inputs, self.gamma, self.beta, self.groups, self.axis, self.epsilon
        )
        return keras.ops.cast(outputs, self.compute_dtype)

    return call


def _obstacle(x, axes):
    """Why the kernels do not take x, or None."""
    if not is_served(x.dtype):
        return f"x is {keras.backend.standardize_dtype(x.dtype)}"
    # The weights have the axes in the given order, and are laid out as the input is.
    positions = [axis % len(x.shape) for axis in axes]
    return None if positions == sorted(positions) else f"axis is {axes}"


@keras.saving.register_keras_serializable(package="tf_ops")
class RMSNormalization(keras.layers.RMSNormalization):
    """`keras.layers.RMSNormalization` computed by `tf_ops.rms_normalization`.

    Arguments, weights, config and numbers are those of the stock layer, whose own computation
    serves dtypes other than float32, float16 and bfloat16.
    """

    call = rms_call(keras.layers.RMSNormalization.call)


@keras.saving.register_keras_serializable(package="tf_ops")
class LayerNormalization(keras.layers.LayerNormalization):
    """`keras.layers.LayerNormalization` computed by `tf_ops.layer_normalization`.

    Arguments, weights, config and numbers are those of the stock layer, whose own computation
    serves `rms_scaling` and dtypes other than float32, float16 and bfloat16.
    """

    call = layer_call(keras.layers.LayerNormalization.call)


@keras.saving.register_keras_serializable(package="tf_ops")
class GroupNormalization(keras.layers.GroupNormalization):
    """`keras.layers.GroupNormalization` computed by `tf_ops.group_normalization`.

    Arguments, weights, config and numbers are those of the stock layer, whose own computation
    serves dtypes other than float32, float16 and bfloat16.
    """

    call = group_call(keras.layers.GroupNormalization.call)
