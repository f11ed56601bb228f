# SPDX-License-Identifier: Apache-2.0
"""Existing Keras models on the kernels of this package."""
