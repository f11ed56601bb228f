# SPDX-License-Identifier: Apache-2.0
"""Puts the kernels in the place of the computation of the layers of one model."""

import re
import types

import keras

from tf_ops._models import replacements
from tf_ops.layers._dtypes import is_served


class Report:
    """What `accelerate` did to a model.

    Attributes:
        replaced: list of (path, class name) of the layers that compute with the kernels now.
        kept: list of (path, class name, reason) of other layers of attention and normalization.
    """

    def __init__(self, model):
        self.replaced = []
        self.kept = []
        self._model = model
        self._changes = []  # (layer, attribute, the value that the layer itself had, or _NOTHING)

    def undo(self):
        """Makes the model as it was. Weights keep the values that training gave them."""
        while self._changes:
            layer, name, value = self._changes.pop()
            if value is _NOTHING:
                vars(layer).pop(name, None)
            else:
                vars(layer)[name] = value
        _forget_compiled_functions(self._model)

    def __str__(self):
        lines = [f"{len(self.replaced)} layers replaced"]
        lines += [f"  {path}: {name}" for path, name in self.replaced]
        lines += [f"{len(self.kept)} layers of attention or normalization kept"] * bool(self.kept)
        lines += [f"  {path}: {name}: {reason}" for path, name, reason in self.kept]
        return "\n".join(lines)

    def _change(self, layer, name, value):
        self._changes.append((layer, name, vars(layer).get(name, _NOTHING)))
        # Not by setattr, which tracks what it sees: nothing of it is to be saved.
        vars(layer)[name] = value


_NOTHING = object()


def accelerate(model):
    """Lets the layers of `model` compute attention and normalization with the kernels.

    It works on any Keras model or layer, nested ones included: functional, sequential,
    subclassed, backbones and tasks of KerasHub. The layers remain the objects they are, with their
    classes, weights, names and configs; their `call` is another. So the model trains, saves and
    exports as before: a `.keras` file or a file of weights has nothing of ours and loads anywhere,
    there as a stock model, which `accelerate` takes again. An exported SavedModel holds our
    operations, and wants `import tf_ops` before it is loaded. Functions that `fit`, `evaluate` and
    `predict` have compiled are compiled again; a `tf.function` of your own stays as it was traced.

    Which layers are replaced, and what of their calls stock still computes, is as for
    `tf_ops.enable()`, which also reaches plain calls of `keras.ops`. `tf_ops.coverage()` counts
    the calls. A model is accelerated once: for layers that are already nothing happens.

    Args:
        model: a `keras.Model` or `keras.layers.Layer`, built or not. Layers that it makes when it
            is built are found only afterwards.

    Returns:
        A report that prints as a list, with `replaced`, `kept` and `undo()`.

    Raises:
        ValueError: `model` is not of Keras, or Keras's backend is not TensorFlow.
    """
    if not isinstance(model, keras.layers.Layer):
        raise ValueError(f"accelerate: model is {type(model).__name__}; it must be a Keras model")
    known = {**replacements.keras_replacements(), **replacements.keras_hub_replacements()}
    report = Report(model)
    for layer in model._flatten_layers():
        name, path = type(layer).__name__, layer.path or layer.name
        stock = next((cls for cls in type(layer).__mro__ if cls in known), None)
        reason = _obstacle(layer, stock, known.get(stock))
        if reason == _IS_OURS:
            continue
        if reason:
            parts = layer._flatten_layers(include_self=False)
            if (
                stock
                or re.search("attention|norm", name, re.IGNORECASE)
                and not any(known.keys() & set(type(part).__mro__) for part in parts)
            ):
                report.kept.append((path, name, reason))
            continue
        for method, function in known[stock].made(type(layer)).items():
            report._change(layer, method, types.MethodType(function, layer))
        for attribute, value in known[stock].attributes.items():
            report._change(layer, attribute, value)
        report.replaced.append((path, name))
    for layer in model._flatten_layers():
        for operation in getattr(layer, "operations", ()):
            name = type(operation).__name__
            if name in _OPERATIONS and not isinstance(operation, keras.layers.Layer):
                report.kept.append((operation.name, name, "not a layer; tf_ops.enable() serves it"))
    _forget_compiled_functions(model)
    return report


_IS_OURS = "is ours"
_OPERATIONS = ("DotProductAttention", "RMSNorm", "LayerNorm")  # those of functional models


def _obstacle(layer, stock, replacement):
    """Why a layer is not replaced, or None."""
    if any(cls.__module__.startswith("tf_ops.") for cls in type(layer).__mro__):
        return _IS_OURS
    if stock is None:
        return "nothing of ours is like it"
    if any(hasattr(vars(layer).get(name), "tf_ops_stock") for name in replacement.methods):
        return _IS_OURS
    if replacement.mismatch(stock):
        return f"unknown: {replacement.mismatch(stock)}"
    overridden = replacement.overridden(type(layer), stock)
    if overridden:
        return f"it overrides {overridden} of {stock.__name__}"
    if not is_served(layer.compute_dtype):
        return f"it computes in {layer.compute_dtype}"
    return None


def _forget_compiled_functions(model):
    for layer in model._flatten_layers():
        for name in ("train_function", "test_function", "predict_function", "generate_function"):
            if getattr(layer, name, None) is not None:
                setattr(layer, name, None)  # as `compile` does
