# SPDX-License-Identifier: Apache-2.0
"""Keras layers over the kernels of this package; those of a stock name are like the stock ones."""

import keras

if keras.backend.backend() != "tensorflow":
    raise ImportError(
        f"tf_ops.layers needs Keras on TensorFlow, and its backend is {keras.backend.backend()}: "
        "set KERAS_BACKEND=tensorflow"
    )

from tf_ops.layers.attention import GroupQueryAttention, MultiHeadAttention
from tf_ops.layers.glu import GatedLinearUnit
from tf_ops.layers.linear_cross_entropy import LinearCrossEntropy
from tf_ops.layers.normalization import (
    GroupNormalization,
    LayerNormalization,
    RMSNormalization,
)
from tf_ops.layers.rotary import RotaryEmbedding
from tf_ops.layers.transformer import TransformerDecoderBlock

__all__ = [
    "GatedLinearUnit",
    "GroupNormalization",
    "GroupQueryAttention",
    "LayerNormalization",
    "LinearCrossEntropy",
    "MultiHeadAttention",
    "RMSNormalization",
    "RotaryEmbedding",
    "TransformerDecoderBlock",
]
