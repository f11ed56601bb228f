# SPDX-License-Identifier: Apache-2.0
"""The Keras operation that stands for one call of a function of this package."""

import inspect

import keras
import numpy as np
import tensorflow as tf

from tf_ops._operation import FUNCTIONS, name_of


@keras.saving.register_keras_serializable(package="tf_ops")
class Operation(keras.Operation):
    """One call of a tf_ops function in a Keras model.

    Args:
        function: the name of the function in FUNCTIONS.
        arguments: dict of its arguments that hold no tensor. The others are those of the call.
        name: the name of the operation; by default that of the function, made unique.
    """

    def __init__(self, function, arguments, name=None):
        if name is None:
            name = function.rpartition(".")[2]
            uid = keras.backend.get_uid(name)
            name = name if uid == 1 else f"{name}_{uid - 1}"
        super().__init__(name=name)
        self.function = function
        self.arguments = arguments

    def call(self, **tensors):
        return FUNCTIONS[self.function](**tensors, **self.arguments)

    def get_config(self):
        arguments = keras.saving.serialize_keras_object(self.arguments)
        return {"name": self.name, "function": self.function, "arguments": arguments}

    @classmethod
    def from_config(cls, config):
        arguments = keras.saving.deserialize_keras_object(config["arguments"])
        return cls(config["function"], arguments, name=config["name"])


def symbolic_call(function, args, kwargs):
    """Returns the KerasTensors of `function(*args, **kwargs)`, of which some are KerasTensors."""
    arguments = inspect.signature(function).bind(*args, **kwargs).arguments
    tensors = {name: value for name, value in arguments.items() if _holds_tensor(value)}
    static = {name: value for name, value in arguments.items() if name not in tensors}
    return Operation(name_of(function), static)(**tensors)


def _holds_tensor(value):
    return any(
        isinstance(x, (keras.KerasTensor, keras.Variable, np.ndarray)) or tf.is_tensor(x)
        for x in tf.nest.flatten(value)
    )
