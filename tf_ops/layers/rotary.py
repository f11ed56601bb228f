# SPDX-License-Identifier: Apache-2.0
"""Keras layer of rotary position embedding."""

import keras

from tf_ops._ops.rotary import rotary_embedding
from tf_ops.layers._dtypes import is_served


@keras.saving.register_keras_serializable(package="tf_ops")
class RotaryEmbedding(keras.layers.Layer):
    """Rotates queries and keys by their positions, by `tf_ops.rotary_embedding`.

        query, key = RotaryEmbedding()((query, key))
        query = RotaryEmbedding(theta=500000.0)(query, positions)

    Called with x, a [batch, seq, heads, head_dim] tensor or a tuple (query, key) of two, and
    positions, int32 [seq] or [batch, seq], or None: 0, 1, 2, ... It has no weights. Dtypes that
    the kernel does not take are computed by stock operations.

    Args:
        theta: positive float, the base of the angles.
        rotary_dim: even int, how many entries of a head are rotated; None: all.
        interleaved: whether entries 2 i and 2 i + 1 make a pair, not i and rotary_dim / 2 + i.
        scaling_factor: positive float by which positions are divided.
    """

    def __init__(
        self, theta=10000.0, rotary_dim=None, interleaved=False, scaling_factor=1.0, **kwargs
    ):
        super().__init__(**kwargs)
        self.theta = theta
        self.rotary_dim = rotary_dim
        self.interleaved = interleaved
        self.scaling_factor = scaling_factor
        self.supports_masking = True
        self.built = True

    def call(self, x, positions=None):
        pair = isinstance(x, (tuple, list))
        if is_served((x[0] if pair else x).dtype):
            return rotary_embedding(tuple(x) if pair else x, positions, **self._options())
        rotated = tuple(self._composed(y, positions) for y in (x if pair else [x]))
        return rotated if pair else rotated[0]

    def _composed(self, x, positions):
        """The formula in stock operations."""
        ops = keras.ops
        size = self.rotary_dim or x.shape[-1]
        if positions is None:
            positions = ops.arange(ops.shape(x)[1])
        frequency = self.theta ** (-ops.arange(size // 2, dtype=x.dtype) / (size // 2))
        angles = ops.cast(positions, x.dtype)[..., None, None] / self.scaling_factor * frequency
        cos, sin = ops.cos(angles), ops.sin(angles)
        if self.interleaved:
            a, b = x[..., 0:size:2], x[..., 1:size:2]
        else:
            a, b = x[..., : size // 2], x[..., size // 2 : size]
        a, b = a * cos - b * sin, b * cos + a * sin
        if self.interleaved:
            turned = ops.reshape(ops.stack([a, b], -1), (*ops.shape(a)[:-1], size))
        else:
            turned = ops.concatenate([a, b], -1)
        return ops.concatenate([turned, x[..., size:]], -1)

    def compute_output_spec(self, x, positions=None):
        like = lambda y: keras.KerasTensor(y.shape, self.compute_dtype)
        return tuple(map(like, x)) if isinstance(x, (tuple, list)) else like(x)

    def _options(self):
        return {
            "theta": self.theta,
            "rotary_dim": self.rotary_dim,
            "interleaved": self.interleaved,
            "scaling_factor": self.scaling_factor,
        }

    def get_config(self):
        return {**super().get_config(), **self._options()}
