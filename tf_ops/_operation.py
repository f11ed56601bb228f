"""Lets a function of tensors take KerasTensors."""


def operation(function):
    return function
