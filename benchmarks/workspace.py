# SPDX-License-Identifier: Apache-2.0
"""What it costs to ask TensorFlow for a workspace at each call, which a pool of ours would save.

    make build/tests/binding.so
    python -m benchmarks.workspace [--json FILE]

A graph of ops that fill a workspace with zeros, beside the same ops filling memory that they have
already: the difference is the allocator's, with what the system takes for fresh pages. The second
is the least that an op takes which uses so much workspace. Then ops that have one, without and with
TF_OPS_DEBUG_MEMORY=1.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys

import tensorflow as tf

import tf_ops
from tf_ops import _library, benchmarking

BINDING = pathlib.Path(__file__).parents[1] / "build" / "tests" / "binding.so"
SIZES = [1 << 10, 16 << 10, 256 << 10, 4 << 20, 64 << 20]
CASES = {
    "rms_normalization 8x1024": (tf_ops.rms_normalization, [(8, 1024), (1024,)]),
    "rms_normalization 4096x1024": (tf_ops.rms_normalization, [(4096, 1024), (1024,)]),
    "dot_product_attention 1x2048x8x64": (tf_ops.dot_product_attention, [(1, 2048, 8, 64)] * 3),
}


def nanoseconds(functions, inputs):
    times = benchmarking.seconds_by_round(functions, lambda: inputs, 15)
    return {name: 1e9 * statistics.median(rounds) for name, rounds in times.items()}


def allocation(ops, size):
    """Nanoseconds an op, in a workspace and in place."""
    count = max(4, min(200, (256 << 20) // size))

    def graph(in_place):
        def run(x):
            y = x + 0.0
            for _ in range(count):
                y = ops.tf_ops_test_fill_somewhere(x=y, in_place=in_place)
            return y[:1]

        return tf.function(run, autograph=False)

    graphs = {"workspace": graph(False), "in place": graph(True)}
    times = nanoseconds(graphs, [tf.zeros([size // 4])])
    workspace, in_place = (round(times[name] / count) for name in graphs)
    return {"bytes": size, "in_place_ns": in_place, "allocation_ns": workspace - in_place}


def gradient(name, function, shapes):
    """A call with its gradient: the time, and the workspaces."""
    inputs = [tf.random.normal(shape) for shape in shapes]
    inputs.append(tf.random.normal(shapes[0]))
    step = tf.function(benchmarking.with_gradients(function), autograph=False)
    time = nanoseconds({name: step}, inputs)[name]
    tf_ops.memory.record()
    step(*inputs)
    tf_ops.memory.record(False)
    size = sum(counted["bytes"] for counted in tf_ops.memory.stats().values())
    return {"case": name, "workspace_bytes": size, "call_ns": round(time)}


def gradients(debug):
    """The rows of CASES, from a process that has TF_OPS_DEBUG_MEMORY from its start."""
    command = [sys.executable, "-m", "benchmarks.workspace", "--gradients"]
    environment = os.environ | {"TF_OPS_DEBUG_MEMORY": str(int(debug))}
    output = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE).stdout
    return json.loads(output)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--gradients", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    device = "GPU:0" if tf.config.list_physical_devices("GPU") else "CPU:0"
    if arguments.gradients:
        with tf.device(device):
            print(json.dumps([gradient(name, *case) for name, case in CASES.items()]))
        return
    rows = gradients(debug=False)
    for row, debugged in zip(rows, gradients(debug=True)):
        row["call_with_debug_memory_ns"] = debugged["call_ns"]
    ops = _library.load(BINDING)
    with tf.device(device):
        result = {
            "benchmark": "workspace",
            "tensorflow": tf.__version__,
            "cpu": subprocess.getoutput("lscpu | grep -E '^(CPU\\(s\\)|Model name)'"),
            "gpu": benchmarking.gpu(),
            "rows": [allocation(ops, size) for size in SIZES],
            "gradients": rows,
        }
    print(json.dumps(result, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
