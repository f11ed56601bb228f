# SPDX-License-Identifier: Apache-2.0
"""Puts the kernels in the place of Keras's own computation, for all models of the process."""

import functools
import importlib.abc
import importlib.util
import sys
import threading
import warnings

from tf_ops._models import replacements
from tf_ops._models.functions import functions_of_keras, unknown_keras

_lock = threading.RLock()
_undo = []  # what to call to be as before, in the reverse order
_is_enabled = False


class _State:
    """The state before; a `with` statement returns to it."""

    def __init__(self, is_enabled):
        self._is_enabled = is_enabled

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        _set(self._is_enabled)


def enable():
    """Lets Keras compute attention and normalization with the kernels of this package.

    Served are `keras.ops.dot_product_attention`, `rms_normalization` and `layer_normalization`,
    the layers `MultiHeadAttention`, `GroupQueryAttention`, `RMSNormalization`,
    `LayerNormalization` and `GroupNormalization`, what derives from them, and the layers of
    KerasHub that have an attention or a normalization of their own (`docs/models.md` lists them),
    whether KerasHub is imported before or after. `flash_attention=True` and
    `keras.config.enable_flash_attention()` mean these kernels;
    `keras.config.disable_flash_attention()` leaves attention to stock. Masks that stock makes from
    padding, causality and windows are not made. What the kernels do not take, such as float64,
    stock computes; `tf_ops.coverage()` says what and why. A query that sees no key gets 0 from
    attention, not the mean of the values.

    It changes functions and classes of Keras for the whole process, until `tf_ops.disable()`, and
    may be called any number of times; a function that `tf.function` has traced before, `fit`
    included, stays as it is. With the environment variable `TF_OPS_ENABLE=1` importing `tf_ops`
    calls it. As a context manager it holds within the block:

        with tf_ops.enable():
            model.fit(...)

    Returns:
        A context manager that returns to the state before the call.

    Raises:
        RuntimeError: Keras has another backend, or its internals are not those we know. Nothing
            is changed then. A class of KerasHub that differs is left out, with a warning.
    """
    with _lock:
        before = _State(_is_enabled)
        _set(True)
    return before


def disable():
    """Lets Keras compute by itself again, as before `tf_ops.enable()`.

    Returns:
        A context manager that returns to the state before the call.
    """
    with _lock:
        before = _State(_is_enabled)
        _set(False)
    return before


def _set(is_enabled):
    global _is_enabled
    with _lock:
        if is_enabled and not _is_enabled:
            functions, classes = functions_of_keras(), _checked(replacements.keras_replacements())
            for module, name, function in functions:
                _replace(module, name, function)
            _replace_methods(classes)
            if "keras_hub" in sys.modules:
                _enable_keras_hub()
            else:
                finder = _KerasHubFinder()
                sys.meta_path.insert(0, finder)
                _undo.append(finder.remove)
        elif _is_enabled and not is_enabled:
            while _undo:
                _undo.pop()()
        _is_enabled = is_enabled


def _checked(classes):
    for cls, replacement in classes.items():
        mismatch = replacement.mismatch(cls)
        if mismatch:
            raise unknown_keras(mismatch)
    return classes


def _replace(owner, name, function):
    own = vars(owner).get(name)  # not that of a base class
    restore = delattr if own is None else setattr
    _undo.append(functools.partial(restore, owner, name, *([] if own is None else [own])))
    setattr(owner, name, function)


def _replace_methods(classes):
    for cls, replacement in classes.items():
        for name, function in replacement.made(cls).items():
            _replace(cls, name, _unless_overridden(function, cls, replacement))


def _unless_overridden(function, cls, replacement):
    """`function` for the class and those subclasses that are like it in all that matters."""
    is_overridden = functools.lru_cache(maxsize=None)(
        lambda subclass: replacement.overridden(subclass, cls) is not None
    )

    @functools.wraps(function)
    def method(self, *args, **kwargs):
        chosen = function.tf_ops_stock if is_overridden(type(self)) else function
        return chosen(self, *args, **kwargs)

    return method


def _enable_keras_hub():
    known = {}
    for cls, replacement in replacements.keras_hub_replacements().items():
        mismatch = replacement.mismatch(cls)
        if mismatch:
            warnings.warn(f"tf_ops.enable: of KerasHub, {mismatch}; it stays as it is")
        else:
            known[cls] = replacement
    _replace_methods(known)


class _KerasHubFinder(importlib.abc.MetaPathFinder):
    """Lets KerasHub's classes be replaced as soon as it is imported."""

    def find_spec(self, name, path=None, target=None):
        if name != "keras_hub":
            return None
        self.remove()
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_enable(module):
            execute(module)
            with _lock:
                if _is_enabled:
                    _enable_keras_hub()

        spec.loader.exec_module = execute_and_enable
        return spec

    def remove(self):
        if self in sys.meta_path:
            sys.meta_path.remove(self)
