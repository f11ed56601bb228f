# SPDX-License-Identifier: Apache-2.0
"""The compiled ops, as functions of `library`."""

import pathlib

from tf_ops.extend import load

library = load(pathlib.Path(__file__).with_name("_my_ops.so"))
