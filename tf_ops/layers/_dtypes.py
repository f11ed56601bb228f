# SPDX-License-Identifier: Apache-2.0
"""What the kernels compute in."""

import keras


def is_served(dtype):
    """Whether the kernels take this dtype; where they do not, a layer computes as stock."""
    return keras.backend.standardize_dtype(dtype) in ("float32", "float16", "bfloat16")
