# SPDX-License-Identifier: Apache-2.0
pytest_plugins = ["tf_ops.testing"]  # runs each test on the CPU and on the GPU
