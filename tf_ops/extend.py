# SPDX-License-Identifier: Apache-2.0
"""What a package of ops of your own takes from tf_ops, beside tf_ops.testing and benchmarking.

`python -m tf_ops new NAME --package FOLDER` writes such a package.
"""

from tf_ops import _library, tuning
from tf_ops._gradient import register_second_order
from tf_ops._operation import operation


def load(path):
    """Loads the library of ops at `path`, and gives it the choices that were tuned for it.

    Returns:
        The module of the ops' functions, as `tf.load_op_library` makes it.

    Raises:
        ImportError: it cannot be loaded; the text says what mends it.
    """
    library = _library.load(path)
    tuning.load_more()
    return library


__all__ = ["load", "operation", "register_second_order"]
