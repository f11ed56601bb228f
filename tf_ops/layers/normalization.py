# SPDX-License-Identifier: Apache-2.0
"""Keras normalization layers over the fused kernels."""

import keras

from tf_ops._ops.group_normalization import group_normalization
from tf_ops._ops.normalization import layer_normalization, rms_normalization
from tf_ops.layers._dtypes import is_served


@keras.saving.register_keras_serializable(package="tf_ops")
class RMSNormalization(keras.layers.RMSNormalization):
    """`keras.layers.RMSNormalization` computed by `tf_ops.rms_normalization`.

    Arguments, weights, config and numbers are those of the stock layer, whose own computation
    serves dtypes other than float32, float16 and bfloat16.
    """

    def call(self, x):
        if not is_served(x.dtype) or not _are_in_order(self.axis, len(x.shape)):
            return super().call(x)
        return rms_normalization(x, scale=self.scale, axis=self.axis, epsilon=self.epsilon)


@keras.saving.register_keras_serializable(package="tf_ops")
class LayerNormalization(keras.layers.LayerNormalization):
    """`keras.layers.LayerNormalization` computed by `tf_ops.layer_normalization`.

    Arguments, weights, config and numbers are those of the stock layer, whose own computation
    serves `rms_scaling` and dtypes other than float32, float16 and bfloat16.
    """

    def call(self, inputs):
        if (
            self.rms_scaling
            or not is_served(inputs.dtype)
            or not _are_in_order(self.axis, len(inputs.shape))
        ):
            return super().call(inputs)
        outputs = layer_normalization(
            inputs, self.gamma, self.beta, axis=self.axis, epsilon=self.epsilon
        )
        return keras.ops.cast(outputs, self.compute_dtype)


@keras.saving.register_keras_serializable(package="tf_ops")
class GroupNormalization(keras.layers.GroupNormalization):
    """`keras.layers.GroupNormalization` computed by `tf_ops.group_normalization`.

    Arguments, weights, config and numbers are those of the stock layer, whose own computation
    serves dtypes other than float32, float16 and bfloat16.
    """

    def call(self, inputs):
        if not is_served(inputs.dtype):
            return super().call(inputs)
        outputs = group_normalization(
            inputs, self.gamma, self.beta, self.groups, self.axis, self.epsilon
        )
        return keras.ops.cast(outputs, self.compute_dtype)


def _are_in_order(axes, rank):
    """Whether the weights, whose axes are in the given order, are laid out as the input is."""
    positions = [axis % rank for axis in axes]
    return positions == sorted(positions)
