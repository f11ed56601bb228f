# SPDX-License-Identifier: Apache-2.0
"""Keras attention layers over the fused kernel."""

import functools

import keras
import tensorflow as tf

from tf_ops._models.coverage import count, left_to_stock
from tf_ops._models.visibility import Visibility
from tf_ops._ops.attention import MAX_HEAD_DIM, dot_product_attention
from tf_ops.layers._dtypes import is_served

_OPERATION = "dot_product_attention"


def multi_head_call(stock):
    """Returns the `call` of a multi-head attention, made of `stock`, that of Keras."""

    @functools.wraps(stock)
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
        key = value if key is None else key
        dims = self._key_dim, self._value_dim
        reason = "return_attention_scores" if return_attention_scores else None
        reason = reason or _obstacle(self, self._dropout, dims, (query, value, key), 3)
        if self._attention_axes != (1,):
            reason = reason or f"attention_axes is {self._attention_axes}"
        if reason:
            return left_to_stock(
                _OPERATION,
                reason,
                stock,
                self,
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
            window=getattr(self, "_sliding_window", None),
            dropout_rate=self._dropout if training else 0.0,
            has_gate=getattr(self, "_use_gate", False),
        )
        if query_mask is not None:
            output._keras_mask = query_mask
        return output

    return call


def multi_head_compute_attention(stock):
    """Returns the `_compute_attention` of a multi-head attention: (output, None).

    It is for subclasses that have a `call` of their own and hand over a mask of their making.
    """

    @functools.wraps(stock)
    def _compute_attention(
        self,
        query,
        key,
        value,
        attention_mask=None,
        training=None,
        return_attention_scores=False,
        use_causal_mask=False,
    ):
        dims = query.shape[-1], value.shape[-1]
        reason = "return_attention_scores" if return_attention_scores else None
        reason = reason or _obstacle(self, self._dropout, dims, (query, key, value), 4)
        if reason:
            causal = {"use_causal_mask": True} if use_causal_mask else {}
            return left_to_stock(
                _OPERATION,
                reason,
                stock,
                self,
                query,
                key,
                value,
                attention_mask,
                training,
                return_attention_scores,
                **causal,
            )
        dropout_rate = self._dropout if training else 0.0
        output = attend(
            query,
            key,
            value,
            attention_mask,
            is_causal=use_causal_mask,
            dropout_rate=dropout_rate,
            seed=self._dropout_layer.seed_generator.next() if dropout_rate else None,
        )
        return output, None

    return _compute_attention


def grouped_query_call(stock):
    """Returns the `call` of a grouped-query attention, made of `stock`, that of Keras."""

    @functools.wraps(stock)
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
        key = value if key is None else key
        reason = "return_attention_scores" if return_attention_scores else None
        reason = reason or _obstacle(self, self.dropout, (self.head_dim,), (query, value, key), 3)
        if reason:
            return left_to_stock(
                _OPERATION,
                reason,
                stock,
                self,
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
            key,
            query_mask=query_mask,
            key_masks=(value_mask, key_mask),
            attention_mask=attention_mask,
            is_causal=use_causal_mask,
            window=getattr(self, "sliding_window", None),
            dropout_rate=self.dropout if training else 0.0,
            has_gate=getattr(self, "use_gate", False),
        )

    return call


@keras.saving.register_keras_serializable(package="tf_ops")
class MultiHeadAttention(keras.layers.MultiHeadAttention):
    """`keras.layers.MultiHeadAttention` whose attention is `tf_ops.dot_product_attention`.

    Arguments, weights, config, masks and numbers are those of the stock layer; weights files
    load both ways. Two things differ: a query that sees no key, padded queries included, gets 0
    from the attention, and `flash_attention=True` is accepted. The causal mask and padding are
    never expanded to [batch, seq_q, seq_k].

    The stock computation serves inputs that are not of rank 3, `attention_axes`,
    `return_attention_scores`, heads larger than 256, dtype policies that do not compute in
    float32, float16 or bfloat16, and layers made after `keras.config.disable_flash_attention()`.
    Dropout drops other weights than the stock layer's, at the same rate and from the same seed
    variable.
    """

    call = multi_head_call(keras.layers.MultiHeadAttention.call)


@keras.saving.register_keras_serializable(package="tf_ops")
class GroupedQueryAttention(keras.layers.GroupQueryAttention):
    """`keras.layers.GroupQueryAttention` whose attention is `tf_ops.dot_product_attention`.

    Keys and values are never repeated for the query heads that share them. Otherwise as
    `MultiHeadAttention` of this module.
    """

    call = grouped_query_call(keras.layers.GroupQueryAttention.call)


# Keras exports the class under a name that is not its own.
GroupQueryAttention = GroupedQueryAttention


def attend(query, key, value, mask=None, **options):
    """`dot_product_attention`, counted, where `mask` is what Keras has: [batch, 1 or seq_q, seq_k].

    It may have no batch, have heads as well, be of any dtype, or be a `Visibility`.
    """
    count(_OPERATION)
    if isinstance(mask, Visibility):
        options.update(mask.arguments())
    elif mask is not None:
        mask = tf.cast(mask, tf.bool)
        options["mask"] = mask[:, None] if len(mask.shape) == 3 else mask
    return dot_product_attention(query, key, value, **options)


def obstacle(dtype, dims):
    """Why the kernel does not take this compute dtype and these head dims, or None."""
    if not is_served(dtype):
        return f"computes in {dtype}"
    if max(d or 0 for d in dims) > MAX_HEAD_DIM:
        return f"head_dim is {max(d or 0 for d in dims)}, more than {MAX_HEAD_DIM}"
    return None


def _obstacle(layer, dropout, dims, inputs, rank):
    """Why the kernel does not serve a call of a layer, or None."""
    if layer._flash_attention is False:
        return "flash attention is disabled"
    if dropout >= 1.0:
        return f"dropout is {dropout}"
    for x in inputs:
        if len(x.shape) != rank:
            return f"inputs of rank {len(x.shape)}"
    return obstacle(layer.compute_dtype, dims)


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
    count(_OPERATION)
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
