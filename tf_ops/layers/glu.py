# SPDX-License-Identifier: Apache-2.0
"""Keras layer of gated linear units."""

import keras

from tf_ops._ops.glu import ACTIVATIONS, gated_linear_unit
from tf_ops.layers._dtypes import is_served


@keras.saving.register_keras_serializable(package="tf_ops")
class GatedLinearUnit(keras.layers.Layer):
    """activation(gate) * up, by `tf_ops.gated_linear_unit`: what stands between the `Dense`
    layers of a gated MLP. It has no weights.

        y = GatedLinearUnit("silu")(Dense(units)(x), Dense(units)(x))
        y = GatedLinearUnit("silu")(Dense(2 * units)(x))  # one product for both

    Called with `gate` and `up`, tensors of one shape, or with one tensor whose last axis holds
    [gate, up]. Dtypes that the kernel does not take are computed by Keras.

    Args:
        activation: "silu"; "gelu", with erf; "gelu_tanh"; "relu"; "sigmoid".
    """

    def __init__(self, activation="silu", **kwargs):
        super().__init__(**kwargs)
        if activation not in ACTIVATIONS:
            raise ValueError(
                f"GatedLinearUnit: activation is {activation!r}; it must be one of "
                f"{', '.join(ACTIVATIONS)}"
            )
        self.activation = activation
        self.supports_masking = True
        self.built = True

    def call(self, gate, up=None):
        if is_served(gate.dtype):
            return gated_linear_unit(gate, up, self.activation)
        if up is None:
            gate, up = keras.ops.split(gate, 2, -1)
        if self.activation.startswith("gelu"):
            return keras.ops.gelu(gate, approximate=self.activation == "gelu_tanh") * up
        return getattr(keras.ops, self.activation)(gate) * up

    def compute_output_shape(self, gate_shape, up_shape=None):
        if up_shape is not None or gate_shape[-1] is None:
            return tuple(gate_shape)
        return (*gate_shape[:-1], gate_shape[-1] // 2)

    def get_config(self):
        return {**super().get_config(), "activation": self.activation}
