# SPDX-License-Identifier: Apache-2.0
"""TensorFlow ops with kernels for CPUs and NVIDIA GPUs."""

from my_ops._ops.scaled_square import scaled_square

__version__ = "0.1.0"
__all__ = [
    "scaled_square",
]
