# SPDX-License-Identifier: Apache-2.0
"""Keras normalization layers over the fused kernels."""

import keras

from tf_ops._ops.normalization import layer_normalization, rms_normalization
from tf_ops.layers._dtypes import is_served


@keras.saving.register_keras_serializable(package="tf_ops")
class RMSNormalization(keras.layers.RMSNormalization):
    """`keras.layers.RMSNormalization` computed by `tf_ops.rms_normalization`.

    Arguments, weights, config and numbers are those of the stock layer, which serves other
    dtypes and several axes that are not the last ones.
    """

    def call(self, x):
        axis = _served_axis(self.axis, len(x.shape))
        if axis is None or not is_served(x.dtype):
            return super().call(x)
        return rms_normalization(x, scale=self.scale, axis=axis, epsilon=self.epsilon)


@keras.saving.register_keras_serializable(package="tf_ops")
class LayerNormalization(keras.layers.LayerNormalization):
    """`keras.layers.LayerNormalization` computed by `tf_ops.layer_normalization`.

    Arguments, weights, config and numbers are those of the stock layer, which serves other
    dtypes, `rms_scaling` and several axes that are not the last ones.
    """

    def call(self, inputs):
        axis = _served_axis(self.axis, len(inputs.shape))
        if axis is None or self.rms_scaling or not is_served(inputs.dtype):
            return super().call(inputs)
        outputs = layer_normalization(
            inputs, self.gamma, self.beta, axis=axis, epsilon=self.epsilon
        )
        return keras.ops.cast(outputs, self.compute_dtype)


def _served_axis(axes, rank):
    """Returns the axis or axes for the kernel, or None: any one axis, or the last ones in order."""
    if len(axes) == 1:
        return axes[0]
    trailing = list(range(rank - len(axes), rank))
    return trailing if [axis % rank for axis in axes] == trailing else None
