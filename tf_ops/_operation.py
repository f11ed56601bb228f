# SPDX-License-Identifier: Apache-2.0
"""Lets a function of tensors take KerasTensors."""

import functools
import sys

import tensorflow as tf

FUNCTIONS = {}  # The decorated functions, by the names that saved models know them by.


def name_of(function):
    """The function's name; that of another package has the package's in front."""
    package = function.__module__.partition(".")[0]
    return function.__name__ if package == "tf_ops" else f"{package}.{function.__name__}"


def operation(function):
    """Makes `function` a node of a Keras model when one of its arguments is a KerasTensor.

    Tensors may be in lists, tuples and dicts. With other arguments `function` is called as it
    is; Keras is never imported for it.
    """

    # Nothing in it is for AutoGraph, which would take seconds to find out.
    @tf.autograph.experimental.do_not_convert
    @functools.wraps(function)
    def call(*args, **kwargs):
        if "keras" in sys.modules and (_is_symbolic(args) or kwargs and _is_symbolic(kwargs)):
            from tf_ops._keras_operation import symbolic_call

            return symbolic_call(function, args, kwargs)
        return function(*args, **kwargs)

    FUNCTIONS[name_of(function)] = function
    return call


def _is_symbolic(values):
    # A Keras that is still being imported has no KerasTensor, so nobody has made one.
    keras_tensor = getattr(sys.modules["keras"], "KerasTensor", ())
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, keras_tensor):
            return True
        if isinstance(value, (list, tuple, dict)) and _is_symbolic(value):
            return True
    return False
