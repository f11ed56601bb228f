# SPDX-License-Identifier: Apache-2.0
"""The wheel: one per TensorFlow minor, for any Python. `make wheel` builds the library first."""

import pathlib
import re
import tempfile

from setuptools import Distribution, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel


class BinaryDistribution(Distribution):
    def has_ext_modules(self):
        return True


class AnyPython(bdist_wheel):
    """The library depends on TensorFlow's version and on the platform, not on Python's."""

    def get_tag(self):
        return ("py3", "none", super().get_tag()[2])


library = pathlib.Path(__file__).with_name("tf_ops") / "_tf_ops.so"
if not library.exists():
    raise SystemExit("tf_ops/_tf_ops.so has not been built: run `make wheel`")
minor = re.search(rb"tf_ops_build tensorflow=(\d+\.\d+)", library.read_bytes())[1].decode()
# build/ is the Makefile's, and what setuptools once left there would go into every later wheel.
with tempfile.TemporaryDirectory() as folder:
    setup(
        distclass=BinaryDistribution,
        cmdclass={"bdist_wheel": AnyPython},
        # With what an op of the user's own is built from.
        packages=[*find_packages(include=["tf_ops*"]), "tf_ops.cc"],
        package_dir={"tf_ops.cc": "cc"},
        package_data={
            "tf_ops": ["_tf_ops.so", "templates/**", "templates/.*", "tuned/*.json"],
            "tf_ops.cc": ["common/*", "*.mk", "exports.lds"],
        },
        install_requires=[f"tensorflow=={minor}.*"],
        options={"build": {"build_base": folder}},
    )
