# SPDX-License-Identifier: Apache-2.0
"""Replacements for methods of KerasHub's layers, most of which have an attention of their own."""

import functools
import inspect

import keras
import numpy as np
import tensorflow as tf

from tf_ops._models.coverage import count, left_to_stock
from tf_ops._models.replacements import MULTI_HEAD_PARAMETERS, Replacement
from tf_ops._models.visibility import Visibility
from tf_ops._ops.normalization import rms_normalization
from tf_ops.layers._dtypes import is_served
from tf_ops.layers.attention import attend, multi_head_compute_attention, obstacle

_OPERATION = "dot_product_attention"
_VISIBILITY = "_tf_ops_visibility"  # attribute of a tensor that stands for one


def _decoder_mask(stock, window=None):
    """Replaces the method of a decoder block that makes its mask, causal and by padding.

    `window` names the attribute that holds how many keys a query sees, itself included.
    """
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def mask(self, *args, **kwargs):
        given = signature.bind(self, *args, **kwargs).arguments
        if (
            not given.get("use_causal_mask", True)
            or given.get("vision_mask") is not None
            or getattr(self, "use_bidirectional_attention", False)
        ):
            return stock(self, *args, **kwargs)

        from keras_hub.src.layers.modeling import transformer_layer_utils

        # What stands before differs: decoder_padding_mask, self_attention_cache.
        ending = lambda suffix: next((v for k, v in given.items() if k.endswith(suffix)), None)
        cache, first = ending("cache"), ending("cache_update_index")
        sequence = list(given.values())[1]
        merged = transformer_layer_utils.merge_padding_and_attention_mask(
            sequence, ending("padding_mask"), ending("attention_mask")
        )
        # [batch, 2, keys, ...], or a key and a value.
        num_keys = None if cache is None else keras.ops.shape(cache[0])[1]
        if cache is None or isinstance(first, int) and first == 0:
            first = None
        width = getattr(self, window) if window else None
        return Visibility(sequence, merged, num_keys, first, None if width is None else width - 1)

    return mask


def _attention(
    stock,
    scale=lambda layer: layer._inv_norm_factor,
    window=lambda layer: None,
    soft_cap=None,
    sink=None,
    dropout=None,
    groups=None,
):
    """Replaces the method that attends with query, key, value and a mask [batch, seq_q, seq_k].

    `window(layer)` is how many keys before its own a query sees, or None. The others name
    attributes: `dropout` that of the Dropout layer of the weights, `groups` one by which keys and
    values are repeated before the stock method.
    """
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def _compute_attention(self, *args, **kwargs):
        bound = signature.bind(self, *args, **kwargs)
        given = bound.arguments
        _, query, key, value, *_ = given.values()
        mask = given.get("attention_mask")
        mask = getattr(mask, _VISIBILITY, mask)
        reason = _obstacle(self, query, value)
        width = None if mask is None else window(self)
        if isinstance(mask, Visibility):
            mask = mask.within(width)
        elif width is not None and hasattr(self, "_mask_sliding_window"):
            # Where the queries are among the keys of such a mask only stock knows.
            index = given.get("cache_update_index")
            mask = self._mask_sliding_window(mask, 0 if index is None else index)
        elif width is not None:
            reason = reason or "a mask of its own beside a window"
        if reason:
            repeats = query.shape[2] // key.shape[2] if groups else 1
            if repeats > 1:
                names = list(given)
                given[names[2]] = keras.ops.repeat(key, repeats, axis=2)
                given[names[3]] = keras.ops.repeat(value, repeats, axis=2)
            return left_to_stock(_OPERATION, reason, stock, *bound.args, **bound.kwargs)
        dropout_layer = getattr(self, dropout) if dropout else None
        rate = dropout_layer.rate if dropout_layer and given.get("training") else 0.0
        return attend(
            query,
            key,
            value,
            mask,
            scale=float(scale(self)),
            attn_logits_soft_cap=getattr(self, soft_cap) if soft_cap else None,
            sink=tf.convert_to_tensor(getattr(self, sink)) if sink else None,
            dropout_rate=rate,
            seed=dropout_layer.seed_generator.next() if rate else None,
        )

    return _compute_attention


def _obstacle(layer, query, value):
    if keras.config.is_flash_attention_enabled() is False:
        return "flash attention is disabled"
    return obstacle(layer.compute_dtype, (query.shape[-1], value.shape[-1]))


def _gemma_call(stock):
    """Replaces `call`, which looks at the mask once more, for queries that see no key.

    Our attention gives 0 there already, so it gets a mask that has no such queries.
    """

    @functools.wraps(stock)
    def call(self, x, attention_mask=None, **kwargs):
        dims = self.head_dim, self.head_dim
        if isinstance(attention_mask, Visibility) and not obstacle(self.compute_dtype, dims):
            visibility, attention_mask = attention_mask, tf.ones([1, 1, 1], tf.bool)
            setattr(attention_mask, _VISIBILITY, visibility)
        return stock(self, x, attention_mask=attention_mask, **kwargs)

    return call


def _gemma_scale(layer):
    if layer.query_head_dim_normalize:
        return 1 / np.sqrt(layer.head_dim)
    return 1 / np.sqrt(layer.hidden_dim // layer.num_query_heads)


def _mmdit_attention(stock):
    """Replaces the joint attention of text and image, which has no mask: [batch, seq, features]."""

    @functools.wraps(stock)
    def _compute_attention(self, query, key, value):
        reason = _obstacle(self, query, value)
        if reason:
            return left_to_stock(_OPERATION, reason, stock, self, query, key, value)
        output = attend(query, key, value, scale=self._inverse_sqrt_key_dim)
        return keras.ops.reshape(
            output, (keras.ops.shape(query)[0], -1, self.num_heads * self.head_dim)
        )

    return _compute_attention


def _rms(stock, scale="scale", scale_offset=0.0):
    """Replaces the `call` of an RMS normalization; `scale` names the attribute that holds it."""

    @functools.wraps(stock)
    def call(self, x):
        dtype = keras.backend.standardize_dtype(x.dtype)
        if not is_served(dtype) or dtype != self.compute_dtype:
            reason = f"x is {dtype}"
            return left_to_stock("rms_normalization", reason, stock, self, x)
        count("rms_normalization")
        weight = getattr(self, scale)
        return rms_normalization(x, weight, epsilon=self.epsilon, scale_offset=scale_offset)

    return call


_MASK = "decoder_sequence decoder_padding_mask decoder_attention_mask"
_CACHE = " self_attention_cache self_attention_cache_update_index"
_QKV = "query key value attention_mask"
_DENSE_BAND = "_mask_sliding_window"


def _block(parameters=_MASK + _CACHE, name="_compute_self_attention_mask", **options):
    make = functools.partial(_decoder_mask, **options)
    return Replacement({name: (parameters, make)})


def _heads(parameters=_QKV, groups="num_key_value_groups", **options):
    """An attention whose `call` repeats keys and values, which a single layer can do without."""
    make = functools.partial(_attention, groups=groups, **options)
    methods = {"_compute_attention": (parameters, make)}
    return Replacement(methods, (_DENSE_BAND,), {groups: 1} if groups else {})


def _gemma(parameters, window):
    make = functools.partial(
        _attention,
        scale=_gemma_scale,
        window=window,
        soft_cap="logit_soft_cap",
        dropout="dropout_layer",
    )
    compute = "q k v attention_mask training cache_update_index"
    methods = {"call": (parameters, _gemma_call), "_compute_attention": (compute, make)}
    return Replacement(methods, (_DENSE_BAND,))


def _norm(**options):
    return Replacement({"call": ("x", functools.partial(_rms, **options))})


def _band(layer):
    size = layer.sliding_window_size
    return size - 1 if getattr(layer, "use_sliding_window_attention", size) else None


_INDEXED = _QKV + " cache_update_index"
_GEMMA_MASK = "_compute_attention_mask"

# By class, under keras_hub.src.
REPLACEMENTS = {
    "layers.modeling.transformer_decoder.TransformerDecoder": _block(
        _MASK + " use_causal_mask" + _CACHE
    ),
    "layers.modeling.cached_multi_head_attention.CachedMultiHeadAttention": Replacement(
        {"_compute_attention": (MULTI_HEAD_PARAMETERS, multi_head_compute_attention)},
        ("_masked_softmax",),
    ),
    "models.llama.llama_decoder.LlamaTransformerDecoder": _block(),
    "models.llama.llama_attention.LlamaAttention": _heads(),
    "models.llama.llama_layernorm.LlamaLayerNorm": _norm(),
    "models.mistral.mistral_transformer_decoder.MistralTransformerDecoder": _block(
        window="sliding_window"
    ),
    "models.mistral.mistral_attention.CachedMistralAttention": _heads(
        groups="_num_key_value_groups"
    ),
    "models.mistral.mistral_layer_norm.MistralLayerNormalization": _norm(),
    "models.mixtral.mixtral_decoder.MixtralTransformerDecoder": _block(window="sliding_window"),
    "models.mixtral.mixtral_attention.CachedMixtralAttention": _heads(),
    "models.mixtral.mixtral_layer_norm.MixtralLayerNormalization": _norm(),
    "models.qwen.qwen_decoder.QwenTransformerDecoder": _block(),
    "models.qwen.qwen_attention.QwenAttention": _heads(_INDEXED, window=_band),
    "models.qwen.qwen_layernorm.QwenLayerNorm": _norm(),
    "models.qwen_moe.qwen_moe_decoder.QwenMoeTransformerDecoder": _block(),
    "models.qwen_moe.qwen_moe_attention.QwenMoeAttention": _heads(
        _INDEXED + " kwargs", window=_band
    ),
    "models.qwen_moe.qwen_moe_layernorm.QwenMoeLayerNorm": _norm(),
    "models.qwen3.qwen3_decoder.Qwen3TransformerDecoder": _block(),
    "models.qwen3.qwen3_attention.Qwen3Attention": _heads(_INDEXED, window=_band),
    "models.qwen3.qwen3_layernorm.Qwen3LayerNorm": _norm(),
    "models.qwen3_moe.qwen3_moe_decoder.Qwen3MoeTransformerDecoder": _block(),
    "models.qwen3_moe.qwen3_moe_attention.Qwen3MoeAttention": _heads(_INDEXED, window=_band),
    "models.qwen3_moe.qwen3_moe_layernorm.Qwen3MoeLayerNorm": _norm(),
    "models.phi3.phi3_decoder.Phi3Decoder": _block(
        _MASK + " attention_cache attention_cache_update_index"
    ),
    "models.phi3.phi3_attention.Phi3Attention": _heads(),
    "models.phi3.phi3_layernorm.Phi3LayerNorm": _norm(),
    "models.smollm3.smollm3_layers.SmolLM3DecoderLayer": _block(),
    "models.smollm3.smollm3_layers.SmolLM3Attention": _heads(_INDEXED),
    "models.gpt_neo_x.gpt_neo_x_decoder.GPTNeoXDecoder": _block(),
    "models.gpt_neo_x.gpt_neo_x_attention.GPTNeoXAttention": _heads(
        _QKV + " training", groups=None, dropout="_attn_dropout_layer"
    ),
    "models.gpt_oss.gpt_oss_decoder.GptOssTransformerDecoder": _block(),
    "models.gpt_oss.gpt_oss_attention.GptOssAttention": _heads(
        _QKV + " start_index", window=lambda layer: layer.sliding_window or None, sink="sinks"
    ),
    "models.gpt_oss.gpt_oss_layer_norm.GptOssLayerNormalization": _norm(),
    "models.gemma.gemma_decoder_block.GemmaDecoderBlock": _block(
        "x padding_mask cache cache_update_index", _GEMMA_MASK
    ),
    "models.gemma.gemma_attention.CachedGemmaAttention": _gemma(
        "x attention_mask cache cache_update_index training",
        _band,
    ),
    "models.gemma.rms_normalization.RMSNormalization": _norm(scale_offset=1.0),
    "models.gemma3.gemma3_decoder_block.Gemma3DecoderBlock": _block(
        "x padding_mask vision_mask cache cache_update_index", _GEMMA_MASK
    ),
    "models.gemma3.gemma3_attention.CachedGemma3Attention": _gemma(
        "x attention_mask cache cache_update_index cache_update_mask training",
        _band,
    ),
    "models.gemma3.gemma3_layers.RMSNormalization": _norm(scale_offset=1.0),
    "models.stable_diffusion_3.mmdit.MMDiTBlock": Replacement(
        {"_compute_attention": ("query key value", _mmdit_attention)}
    ),
    "models.t5.t5_layer_norm.T5LayerNorm": Replacement(
        {"call": ("hidden_states", functools.partial(_rms, scale="weight"))}
    ),
}
