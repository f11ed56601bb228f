# SPDX-License-Identifier: Apache-2.0
"""Which methods of which Keras classes have a replacement over the kernels."""

import dataclasses
import inspect
import sys
from typing import Callable

import keras

from tf_ops.layers import attention, normalization


@dataclasses.dataclass(frozen=True)
class Replacement:
    """What takes the place of methods of a class.

    Args:
        methods: for each method the name of its parameters, separated by spaces, and a function
            that makes the replacement from the stock method. Without these very parameters the
            stock method is not one that we know.
        parts: names of further methods; a subclass that overrides one is not replaced.
        attributes: values that attributes of a single layer get as well.
    """

    methods: dict[str, tuple[str, Callable]]
    parts: tuple[str, ...] = ()
    attributes: dict = dataclasses.field(default_factory=dict)

    def mismatch(self, cls):
        """What differs in a class from what we know of it, or None."""
        for name, (parameters, _) in self.methods.items():
            method = stock_method(cls, name)
            if method is None:
                return f"{cls.__name__} has no {name}"
            names = " ".join(inspect.signature(method).parameters).removeprefix("self ")
            # A newer Keras may have more of them at the end; ours would not know what they mean.
            if not parameters.startswith(names):
                return f"{cls.__name__}.{name} takes ({names}), not ({parameters})"
        return None

    def overridden(self, cls, stock):
        """The name of a method that a subclass overrides and that matters here, or None."""
        for name in (*self.methods, *self.parts):
            if stock_method(cls, name) is not stock_method(stock, name):
                return name
        return None

    def made(self, cls):
        """For each name the function that takes the place of the method of `cls`."""
        functions = {}
        for name, (_, make) in self.methods.items():
            stock = stock_method(cls, name)
            functions[name] = make(stock)
            functions[name].tf_ops_stock = stock
        return functions


def stock_method(cls, name):
    """A method as it is without us, or None."""
    method = getattr(cls, name, None)
    return getattr(method, "tf_ops_stock", method)


MULTI_HEAD_PARAMETERS = "query key value attention_mask training"
MULTI_HEAD_PARAMETERS += " return_attention_scores use_causal_mask"
_CALL = "query value key query_mask value_mask key_mask attention_mask"
_CALL += " return_attention_scores training use_causal_mask"

_KERAS = {
    keras.layers.MultiHeadAttention: Replacement(
        {
            "call": (_CALL, attention.multi_head_call),
            "_compute_attention": (MULTI_HEAD_PARAMETERS, attention.multi_head_compute_attention),
        },
        parts=("_compute_attention_mask", "_masked_softmax"),
    ),
    keras.layers.GroupQueryAttention: Replacement(
        {"call": (_CALL, attention.grouped_query_call)},
        parts=("_compute_attention", "_compute_attention_mask", "_masked_softmax"),
    ),
    keras.layers.RMSNormalization: Replacement({"call": ("x", normalization.rms_call)}),
    keras.layers.LayerNormalization: Replacement({"call": ("inputs", normalization.layer_call)}),
    keras.layers.GroupNormalization: Replacement({"call": ("inputs", normalization.group_call)}),
}


def keras_replacements():
    """{class: Replacement} of Keras itself."""
    return _KERAS


def keras_hub_replacements():
    """{class: Replacement} of KerasHub, as far as it has been imported."""
    if "keras_hub" not in sys.modules:
        return {}
    from tf_ops._models.keras_hub import REPLACEMENTS

    found = {}
    for path, replacement in REPLACEMENTS.items():
        module, name = f"keras_hub.src.{path}".rsplit(".", 1)
        cls = getattr(sys.modules.get(module), name, None)
        if cls is not None:
            found[cls] = replacement
    return found
