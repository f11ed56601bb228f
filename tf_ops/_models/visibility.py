# SPDX-License-Identifier: Apache-2.0
"""Masks as flags and lengths, in place of [batch, seq_q, seq_k] booleans."""

import tensorflow as tf


class Visibility:
    """The causal mask of a decoder, and what else hides keys there, unexpanded.

    A layer of ours hands it to attention as flags and lengths (`arguments`). For anything else it
    is what the stock layer would have made: TensorFlow converts it to a bool tensor
    [batch, seq_q, seq_k] on sight.

    Args:
        sequence: tensor [batch, seq_q, ...] of the queries.
        mask: [batch, 1 or seq_q, seq_k] tensor, not 0 where a key is visible, or None.
        num_keys: int or scalar tensor, seq_k; None: seq_q.
        first: the position of the first query among the keys, a scalar, or None: it is 0.
        window: int, how many keys before its own position a query sees, or None: all.
    """

    def __init__(self, sequence, mask=None, num_keys=None, first=None, window=None):
        self._sequence = sequence
        self._mask = mask
        self._num_keys = num_keys
        self._first = first
        self._window = window

    def within(self, window):
        """The same with another window as well."""
        window = min((w for w in (window, self._window) if w is not None), default=None)
        return Visibility(self._sequence, self._mask, self._num_keys, self._first, window)

    def arguments(self):
        """The arguments of `dot_product_attention` that say it."""
        arguments = {"is_causal": True, "local_window_size": self._window}
        if self._mask is not None:
            arguments["mask"] = tf.cast(self._mask, tf.bool)[:, None]
        if self._first is not None:
            # The last query is at position first + seq_q - 1; no key after it is valid yet.
            batch, seq_q = tf.unstack(tf.shape(self._sequence)[:2])
            lengths = tf.fill([batch], tf.cast(self._first, tf.int32) + seq_q)
            arguments.update(causal_alignment="bottom_right", key_value_seq_lengths=lengths)
        return arguments

    def dense(self):
        """Returns bool [batch, seq_q, seq_k]."""
        batch, seq_q = tf.unstack(tf.shape(self._sequence)[:2])
        num_keys = seq_q if self._num_keys is None else self._num_keys
        first = 0 if self._first is None else tf.cast(self._first, tf.int32)
        beside = tf.range(num_keys) - (tf.range(seq_q)[:, None] + first)
        visible = beside <= 0
        if self._window is not None:
            visible &= beside >= -self._window
        if self._mask is not None:
            visible &= tf.cast(self._mask, tf.bool)
        return tf.broadcast_to(visible, [batch, seq_q, num_keys])

    @property
    def shape(self):
        return self.dense().shape

    dtype = tf.bool

    def __getitem__(self, index):
        return self.dense()[index]

    def __and__(self, other):
        return self.dense() & other

    __rand__ = __and__


def _to_tensor(visibility, dtype=None, name=None, as_ref=False):
    del as_ref
    return tf.cast(visibility.dense(), dtype or tf.bool, name=name)


tf.register_tensor_conversion_function(Visibility, _to_tensor)
