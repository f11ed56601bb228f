# SPDX-License-Identifier: Apache-2.0
"""What the ops ask for beside inputs and outputs: calls, and bytes of workspace.

    tf_ops.memory.record()
    step()
    print(tf_ops.memory.summary())

A workspace comes from TensorFlow's allocator, or is part of what XLA's holds, and goes back when
the op is done. Calls are counted from `record()` on. With `TF_OPS_DEBUG_MEMORY=1` they are from the
start, and with `TF_OPS_LOG_MEMORY=1`, which also prints a line for each. An op counts when it runs,
not when it is traced.
"""

import ctypes

import tensorflow as tf

from tf_ops import _library

__all__ = ["record", "stats", "summary"]


def record(on=True):
    """Counts calls and workspaces of all ops from now on, from 0.

    Args:
        on: False stops counting, and keeps what was counted.
    """
    for library in _library.loaded:
        library.tf_ops_memory_record(int(on))


def stats():
    """Returns what was counted, of this package's ops and of those loaded by `tf_ops.extend.load`.

    Returns:
        A dict. Keys: name of the op and "CPU" or "GPU". Values: dicts of `calls`; `bytes`, of all
        workspaces together; `peak`, the bytes of the largest.
    """
    counted = {}
    for library in _library.loaded:
        usage = library.tf_ops_memory_usage
        usage.restype = ctypes.c_char_p
        for line in usage().decode().splitlines():
            op, device, *numbers = line.split()
            counted[op, device] = dict(zip(["calls", "bytes", "peak"], map(int, numbers)))
    return counted


def summary():
    """Returns `stats()` as a table, and below it what TensorFlow allocated on each GPU."""
    lines = [f"{'op':42}{'device':8}{'calls':>10}{'bytes of workspace':>20}{'the largest':>16}"]
    for (op, device), counted in sorted(stats().items()):
        calls, total, peak = counted.values()
        lines.append(f"{op:42}{device:8}{calls:10,}{total:20,}{peak:16,}")
    if len(lines) == 1:
        lines.append("Nothing was counted: tf_ops.memory.record() comes first.")
    for gpu in tf.config.list_logical_devices("GPU"):
        name = gpu.name.removeprefix("/device:")
        info = tf.config.experimental.get_memory_info(name)
        lines.append(f"TensorFlow on {name}: {info['current']:,} bytes, peak {info['peak']:,}")
    return "\n".join(lines)
