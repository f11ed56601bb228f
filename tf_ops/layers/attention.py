# SPDX-License-Identifier: Apache-2.0
"""Keras attention layers over the fused kernel."""

import functools

import keras
import tensorflow as tf

from tf_ops._ops.attention import MAX_HEAD_DIM, dot_product_attention
from tf_ops.layers._dtypes import is_served


@keras.saving.register_keras_serializable(package="tf_ops")
class MultiHeadAttention(keras.layers.MultiHeadAttention):
    """`keras.layers.MultiHeadAttention` whose attention is `tf_ops.dot_product_attention`.

    Arguments, weights, config, masks and numbers are those of the stock layer; weights files
    load both ways. Two things differ: a query that sees no key, padded queries included, gets 0
    from the attention, and `flash_attention=True` is accepted. The causal mask and padding are
    never expanded to [batch, seq_q, seq_k].

    The stock computation serves inputs that are not of rank 3, `attention_axes`,
    `return_attention_scores`, heads larger than 256, and dtype policies that do not compute in
    float32, float16 or bfloat16. Dropout drops other weights than the stock layer's, at the same
    rate and from the same seed variable.
    """

    def call(
        self,
        query,
        value,
        key=None,
        query_mask=None,
        value_mask=None,
        key_mask=None,
        attention_mask=None,
        return_attention_scores=False,
        training=None,
        use_causal_mask=False,
    ):
        if (
            return_attention_scores
            or self._dropout >= 1.0
            or self._attention_axes != (1,)
            or max(self._key_dim, self._value_dim) > MAX_HEAD_DIM
            or not _has_served_inputs(self, query, value, key)
        ):
            return super().call(
                query,
                value,
                key=key,
                query_mask=query_mask,
                value_mask=value_mask,
                key_mask=key_mask,
                attention_mask=attention_mask,
                return_attention_scores=return_attention_scores,
                training=training,
                use_causal_mask=use_causal_mask,
            )
        key = value if key is None else key
        # As in the stock layer: the mask that counts is the one the query carries, and it
        # moves to the output.
        query_mask = getattr(query, "_keras_mask", None)
        for x in (query, value, key):
            x._keras_mask = None
        output = _attention(
            self,
            query,
            value,
            key,
            query_mask=query_mask,
            key_masks=(value_mask, key_mask),
            attention_mask=attention_mask,
            is_causal=use_causal_mask,
            window=self._sliding_window,
            dropout_rate=self._dropout if training else 0.0,
            has_gate=self._use_gate,
        )
        if query_mask is not None:
            output._keras_mask = query_mask
        return output


@keras.saving.register_keras_serializable(package="tf_ops")
class GroupedQueryAttention(keras.layers.GroupQueryAttention):
    """`keras.layers.GroupQueryAttention` whose attention is `tf_ops.dot_product_attention`.

    Keys and values are never repeated for the query heads that share them. Otherwise as
    `MultiHeadAttention` of this module.
    """

    def call(
        self,
        query,
        value,
        key=None,
        query_mask=None,
        value_mask=None,
        key_mask=None,
        attention_mask=None,
        return_attention_scores=False,
        training=None,
        use_causal_mask=False,
    ):
        if (
            return_attention_scores
            or self.dropout >= 1.0
            or self.head_dim > MAX_HEAD_DIM
            or not _has_served_inputs(self, query, value, key)
        ):
            return super().call(
                query,
                value,
                key=key,
                query_mask=query_mask,
                value_mask=value_mask,
                key_mask=key_mask,
                attention_mask=attention_mask,
                return_attention_scores=return_attention_scores,
                training=training,
                use_causal_mask=use_causal_mask,
            )
        return _attention(
            self,
            query,
            value,
            value if key is None else key,
            query_mask=query_mask,
            key_masks=(value_mask, key_mask),
            attention_mask=attention_mask,
            is_causal=use_causal_mask,
            window=self.sliding_window,
            dropout_rate=self.dropout if training else 0.0,
            has_gate=self.use_gate,
        )


# Keras exports the class under a name that is not its own.
GroupQueryAttention = GroupedQueryAttention


def _has_served_inputs(layer, *inputs):
    return is_served(layer.compute_dtype) and all(
        len(x.shape) == 3 for x in inputs if x is not None
    )


def _attention(
    layer,
    query,
    value,
    key,
    query_mask,
    key_masks,
    attention_mask,
    is_causal,
    window,
    dropout_rate,
    has_gate,
):
    """Projects, attends, projects back: [batch, seq_q, features]."""
    # Each in four dimensions or in the last two, so that they broadcast together.
    masks = [tf.cast(x, tf.bool)[:, None, None, :] for x in key_masks if x is not None]
    if attention_mask is not None:
        attention_mask = tf.cast(attention_mask, tf.bool)
        masks.append(attention_mask[:, None] if len(attention_mask.shape) == 3 else attention_mask)

    output = dot_product_attention(
        layer._query_dense(query),
        layer._key_dense(key),
        layer._value_dense(value),
        mask=functools.reduce(tf.logical_and, masks) if masks else None,
        is_causal=is_causal,
        local_window_size=None if window is None else window - 1,  # Keras counts the key itself.
        dropout_rate=dropout_rate,
        seed=layer._dropout_layer.seed_generator.next() if dropout_rate else None,
    )
    if query_mask is not None:
        # Within the attention it would expand the mask of the keys to [seq_q, seq_k].
        output = tf.where(tf.cast(query_mask, tf.bool)[:, :, None, None], output, 0)
    if has_gate:
        output *= layer._gate_dense(query)
    return layer._output_dense(output)
