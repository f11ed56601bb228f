# SPDX-License-Identifier: Apache-2.0
"""What a package of ops of your own takes from tf_ops, beside tf_ops.testing and benchmarking.

`python -m tf_ops new NAME --package FOLDER` writes such a package.
"""

from tf_ops._gradient import register_second_order
from tf_ops._library import load
from tf_ops._operation import operation

__all__ = ["load", "operation", "register_second_order"]
