# SPDX-License-Identifier: Apache-2.0
"""Keras layer of a decoder block, for training and for generation with a cache."""

import operator

import keras
import tensorflow as tf

from tf_ops._ops.attention import MAX_HEAD_DIM, dot_product_attention
from tf_ops._ops.cache import update_cache
from tf_ops._ops.normalization import rms_normalization
from tf_ops.layers._dtypes import is_served
from tf_ops.layers.glu import GatedLinearUnit
from tf_ops.layers.normalization import RMSNormalization
from tf_ops.layers.rotary import RotaryEmbedding

# Arguments that the config holds as they are.
_OPTIONS = ("head_dim", "num_query_heads", "num_key_value_heads", "intermediate_dim", "activation")
_OPTIONS += ("local_window_size", "attn_logits_soft_cap", "dropout", "theta", "rotary_dim")
_OPTIONS += ("interleaved", "scaling_factor", "epsilon", "use_bias", "seed")


@keras.saving.register_keras_serializable(package="tf_ops")
class TransformerDecoderBlock(keras.layers.Layer):
    """x += attention(norm(x)), then x += mlp(norm(x)), as in Llama, Mistral and their kin.

    RMS normalization, causal attention with grouped queries and rotary position embedding, and a
    gated MLP. To train it, or to run it over whole sequences:

        x = TransformerDecoderBlock(64, 8, 2, 2048)(x)

    To generate, with the keys and values of earlier tokens in variables of the compute dtype:

        shape = [batch, max_seq, num_key_value_heads, head_dim]
        cache = [tf.Variable(tf.zeros(shape)) for _ in range(2)]
        y = block(prompt, cache=cache, positions=[0] * batch)
        y = block(next_token, cache=cache, positions=[prompt_length] * batch)

    The tokens of `x` are written to the cache in place, from `positions` on, and see what is
    there up to themselves. Rows may be at different positions. What a row of the cache holds
    beyond its position is not seen, so a prompt may be padded at its end, and no cache needs to be
    cleared. A mask is not looked at there.

    Dtype policies that do not compute in float32, float16 or bfloat16 are computed by stock
    operations, without a cache.

    Args:
        head_dim: even int, width of a head, at most 256.
        num_query_heads: int, a multiple of `num_key_value_heads`.
        num_key_value_heads: int, heads of the keys and values that the queries share.
        intermediate_dim: int, width within the MLP.
        activation: that of the gate, as `GatedLinearUnit` takes it.
        local_window_size: int, how many keys before its own position a query sees; None: all.
        attn_logits_soft_cap: a positive c makes c tanh(x / c) of the attention's logits.
        dropout: float in [0, 1), share of the attention's weights dropped while training.
        theta, rotary_dim, interleaved, scaling_factor: as in `RotaryEmbedding`.
        epsilon: that of the normalizations.
        use_bias: whether the projections have biases.
        kernel_initializer: of the projections.
        kernel_regularizer: likewise.
        seed: int, for the dropout.

    Call arguments:
        x: [batch, seq, features].
        mask: bool [batch, seq], False for tokens that no other may see. What a token gets that
            sees nothing is no matter.
        cache: (key, value), each a `tf.Variable` [batch, max_seq, num_key_value_heads, head_dim].
        positions: int32 [batch], wanted with a cache: the position of the first token of `x` in
            each row. `positions + seq` is at most `max_seq`.

    Returns:
        [batch, seq, features].

    References:
        Zhang, Sennrich (https://arxiv.org/abs/1910.07467), Su et al.
        (https://arxiv.org/abs/2104.09864), Shazeer (https://arxiv.org/abs/2002.05202),
        Ainslie et al. (https://arxiv.org/abs/2305.13245).
    """

    def __init__(
        self,
        head_dim,
        num_query_heads,
        num_key_value_heads,
        intermediate_dim,
        activation="silu",
        local_window_size=None,
        attn_logits_soft_cap=None,
        dropout=0.0,
        theta=10000.0,
        rotary_dim=None,
        interleaved=False,
        scaling_factor=1.0,
        epsilon=1e-6,
        use_bias=False,
        kernel_initializer="glorot_uniform",
        kernel_regularizer=None,
        seed=None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        if not 0 < head_dim <= MAX_HEAD_DIM or head_dim % 2:
            raise _error(f"head_dim is {head_dim}; it must be even and at most {MAX_HEAD_DIM}")
        if num_key_value_heads < 1 or num_query_heads % num_key_value_heads:
            raise _error(
                f"num_query_heads is {num_query_heads}; it must be a multiple of "
                f"num_key_value_heads, {num_key_value_heads}"
            )
        if not 0.0 <= dropout < 1.0:
            raise _error(f"dropout is {dropout}; it must be in [0, 1)")
        if local_window_size is not None and not 0 <= operator.index(local_window_size):
            raise _error(f"local_window_size is {local_window_size}; it must be None or at least 0")
        self.supports_masking = True
        self.head_dim = head_dim
        self.num_query_heads = num_query_heads
        self.num_key_value_heads = num_key_value_heads
        self.intermediate_dim = intermediate_dim
        self.activation = activation
        self.local_window_size = local_window_size
        self.attn_logits_soft_cap = attn_logits_soft_cap
        self.dropout = dropout
        self.theta = theta
        self.rotary_dim = rotary_dim
        self.interleaved = interleaved
        self.scaling_factor = scaling_factor
        self.epsilon = epsilon
        self.use_bias = use_bias
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.kernel_regularizer = keras.regularizers.get(kernel_regularizer)
        self.seed = seed
        self.seed_generator = keras.random.SeedGenerator(seed) if dropout else None

        policy = self.dtype_policy
        self.attention_norm = RMSNormalization(epsilon=epsilon, dtype=policy)
        self.mlp_norm = RMSNormalization(epsilon=epsilon, dtype=policy)
        self.attention_norm.supports_masking = True  # nothing warns that the mask ends there
        self.rotary_embedding = RotaryEmbedding(
            theta, rotary_dim, interleaved, scaling_factor, dtype=policy
        )
        self.gated_linear_unit = GatedLinearUnit(activation, dtype=policy)
        self.query = self._dense(num_query_heads * head_dim)
        self.key = self._dense(num_key_value_heads * head_dim)
        self.value = self._dense(num_key_value_heads * head_dim)
        self.gate = self._dense(intermediate_dim)
        self.up = self._dense(intermediate_dim)

    def build(self, x_shape):
        features = x_shape[-1]
        self.output_projection, self.down = self._dense(features), self._dense(features)
        for layer in (self.attention_norm, self.query, self.key, self.value):
            layer.build(x_shape)
        for layer in (self.mlp_norm, self.gate, self.up):
            layer.build(x_shape)
        self.output_projection.build((*x_shape[:-1], self.query.units))
        self.down.build((*x_shape[:-1], self.intermediate_dim))
        self.built = True

    def call(self, x, mask=None, cache=None, positions=None, training=None):
        if (cache is None) != (positions is None):
            raise _error("takes both cache and positions, or neither")
        if cache is not None and not is_served(self.compute_dtype):
            raise _error(f"takes no cache where it computes in {self.compute_dtype}")
        y = self._attend(x, mask, cache, positions, self.dropout if training else 0.0)
        if is_served(self.compute_dtype):
            # The numbers of the other branch, in one pass over memory.
            y, x = rms_normalization(
                y, self.mlp_norm.scale, epsilon=self.epsilon, residual=x, return_residual=True
            )
        else:
            x = x + y
            y = self.mlp_norm(x)
        return x + self.down(self.gated_linear_unit(self.gate(y), self.up(y)))

    def _attend(self, x, mask, cache, positions, dropout_rate):
        """The attention's part of the sum."""
        batch, seq = tf.shape(x)[0], tf.shape(x)[1]
        y = self.attention_norm(x)
        query, key, value = (
            tf.reshape(dense(y), [batch, seq, dense.units // self.head_dim, self.head_dim])
            for dense in (self.query, self.key, self.value)
        )
        if cache is None:
            query, key = self.rotary_embedding((query, key))
            lengths = None
        else:
            cache = self._variables(cache)
            positions = tf.cast(positions, tf.int32)
            query, key = self.rotary_embedding((query, key), positions[:, None] + tf.range(seq))
            update_cache(*cache, key, value, positions)
            (key, value), lengths, mask = cache, positions + seq, None
        options = {
            "mask": None if mask is None else tf.cast(mask, tf.bool)[:, None, None, :],
            "attn_logits_soft_cap": self.attn_logits_soft_cap,
        }
        if is_served(self.compute_dtype):
            y = dot_product_attention(
                query,
                key,
                value,
                is_causal=True,
                causal_alignment="top_left" if cache is None else "bottom_right",
                local_window_size=self.local_window_size,
                key_value_seq_lengths=lengths,
                dropout_rate=dropout_rate,
                seed=self.seed_generator.next() if dropout_rate else None,
                **options,
            )
        else:
            y = self._stock_attention(query, key, value, dropout_rate, **options)
        return self.output_projection(tf.reshape(y, [batch, seq, self.query.units]))

    def _variables(self, cache):
        cache = [x.value if isinstance(x, keras.Variable) else x for x in cache]
        # Keras has cast, to a tensor, a variable of another dtype.
        if len(cache) != 2 or not all(isinstance(x, tf.Variable) for x in cache):
            raise _error(f"cache must be two variables, (key, value), of {self.compute_dtype}")
        return cache

    def _stock_attention(self, query, key, value, dropout_rate, mask, attn_logits_soft_cap):
        """The formula in stock operations."""
        ops, cap = keras.ops, attn_logits_soft_cap
        groups = self.num_query_heads // self.num_key_value_heads
        key, value = ops.repeat(key, groups, axis=2), ops.repeat(value, groups, axis=2)
        logits = ops.einsum("bqhd,bkhd->bhqk", query, key) / self.head_dim**0.5
        logits = logits if cap is None else cap * ops.tanh(logits / cap)
        positions = ops.arange(ops.shape(query)[1])
        before = positions[:, None] - positions
        visible = before >= 0
        if self.local_window_size is not None:
            visible &= before <= self.local_window_size
        visible = visible if mask is None else visible & mask
        weights = ops.where(visible, ops.softmax(ops.where(visible, logits, -1e30)), 0)
        if dropout_rate:
            weights = keras.random.dropout(weights, dropout_rate, seed=self.seed_generator)
        return ops.einsum("bhqk,bkhd->bqhd", weights, value)

    def _dense(self, units):
        # An initializer that two layers share would give both the same weights.
        initializer = keras.initializers.serialize(self.kernel_initializer)
        return keras.layers.Dense(
            units,
            use_bias=self.use_bias,
            kernel_initializer=keras.initializers.get(initializer),
            kernel_regularizer=self.kernel_regularizer,
            dtype=self.dtype_policy,
        )

    def compute_output_shape(self, x_shape):
        return tuple(x_shape)

    def get_config(self):
        return {
            **super().get_config(),
            **{name: getattr(self, name) for name in _OPTIONS},
            "kernel_initializer": keras.initializers.serialize(self.kernel_initializer),
            "kernel_regularizer": keras.regularizers.serialize(self.kernel_regularizer),
        }


def _error(message):
    return ValueError(f"TransformerDecoderBlock: {message}")
