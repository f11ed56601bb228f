# SPDX-License-Identifier: Apache-2.0
"""What takes the place of functions of Keras."""

import functools
import inspect
import sys

import keras

from tf_ops._models.coverage import count, left_to_stock
from tf_ops._ops.attention import dot_product_attention
from tf_ops._ops.normalization import layer_normalization, rms_normalization
from tf_ops.layers._dtypes import is_served
from tf_ops.layers.attention import obstacle


def _dot_product_attention(stock):
    @functools.wraps(stock)
    def attention(
        query,
        key,
        value,
        bias=None,
        mask=None,
        scale=None,
        is_causal=False,
        flash_attention=None,
        attn_logits_soft_cap=None,
    ):
        query, key, value = map(keras.ops.convert_to_tensor, (query, key, value))
        dtype = keras.backend.result_type(query.dtype, key.dtype, value.dtype)
        reason = None
        if flash_attention is None and keras.config.is_flash_attention_enabled() is False:
            flash_attention = False
        if flash_attention is False:
            reason = "flash attention is disabled"
        elif any(len(x.shape) != 4 for x in (query, key, value)):
            reason = "inputs are not of rank 4"
        else:
            reason = obstacle(dtype, (query.shape[-1], value.shape[-1]))
        if reason:
            if flash_attention:
                raise ValueError(f"dot_product_attention: flash_attention is True, but {reason}")
            args = query, key, value, bias, mask, scale, is_causal
            return left_to_stock(
                "dot_product_attention",
                reason,
                stock,
                *args,
                attn_logits_soft_cap=attn_logits_soft_cap,
            )
        count("dot_product_attention")
        query, key, value = (keras.ops.cast(x, dtype) for x in (query, key, value))
        return dot_product_attention(
            query,
            key,
            value,
            bias=bias,
            mask=mask,
            scale=scale,
            is_causal=is_causal,
            attn_logits_soft_cap=attn_logits_soft_cap,
        )

    return attention


def _rms_normalization(stock):
    @functools.wraps(stock)
    def normalization(x, scale=None, axis=-1, epsilon=None):
        dtype = keras.backend.standardize_dtype(x.dtype)
        if not is_served(dtype):
            reason = f"x is {dtype}"
            return left_to_stock(
                "rms_normalization", reason, stock, x, scale=scale, axis=axis, epsilon=epsilon
            )
        count("rms_normalization")
        return rms_normalization(x, scale, axis=axis, epsilon=epsilon)

    return normalization


def _layer_normalization(stock):
    @functools.wraps(stock)
    def normalization(x, gamma=None, beta=None, axis=-1, epsilon=None, rms_scaling=False):
        dtype = keras.backend.standardize_dtype(x.dtype)
        reason = "rms_scaling" if rms_scaling else None if is_served(dtype) else f"x is {dtype}"
        if reason:
            args = x, gamma, beta, axis, epsilon, rms_scaling
            return left_to_stock("layer_normalization", reason, stock, *args)
        count("layer_normalization")
        return layer_normalization(x, gamma, beta, axis=axis, epsilon=epsilon)

    return normalization


def functions_of_keras():
    """The functions of Keras to replace: (module, name, replacement); raises if one differs."""
    if keras.backend.backend() != "tensorflow":
        raise RuntimeError(
            f"tf_ops.enable: Keras's backend is {keras.backend.backend()}, not tensorflow"
        )
    known = {
        ("keras.src.backend.tensorflow.nn", "dot_product_attention"): (
            "query key value bias mask scale is_causal flash_attention attn_logits_soft_cap",
            _dot_product_attention,
        ),
        ("keras.src.ops.nn", "_rms_normalization"): ("x scale axis epsilon", _rms_normalization),
        ("keras.src.ops.nn", "_layer_normalization"): (
            "x gamma beta axis epsilon rms_scaling",
            _layer_normalization,
        ),
    }
    functions = []
    for (path, name), (parameters, make) in known.items():
        module = sys.modules.get(path)
        stock = getattr(module, name, None)
        found = stock and " ".join(inspect.signature(stock).parameters)
        if found != parameters:
            found = "is not there" if stock is None else f"takes ({found}), not ({parameters})"
            raise unknown_keras(f"{path}.{name} {found}")
        functions.append((module, name, make(stock)))
    return functions


def unknown_keras(what):
    return RuntimeError(
        f"tf_ops.enable: Keras {keras.__version__} is not one that we know: {what}. "
        "Nothing was changed."
    )
