# SPDX-License-Identifier: Apache-2.0
"""Stock TensorFlow as a graph and under XLA, and ours in a graph, beside what PyTorch's peers took.

    python -m benchmarks.peers.rowwise_tf FOLDER [--only FAMILY ...] [--wait]

Adds rows to FOLDER/FAMILY_h200.json, which rowwise_torch.py or cross_entropy_torch.py wrote on the
same GPU. The formulas are those of benchmarks/bench_FAMILY.py. A call of a graph from Python takes
longer than a kernel: each has many independent inputs, so that the GPU is never without work. With
--wait everything is compiled, and measured when a line comes on standard input.
"""

import argparse
import importlib
import json
import pathlib
import re
import statistics

import tensorflow as tf

from tf_ops.benchmarking import seconds_by_round

BYTES = 1 << 30  # of a call's inputs
MOST_COPIES = 32
NAMES = {"ours": "ours graph", "stock": "stock graph"}
TITLE = {"both": "forward and backward"}
SHAPES = ["16384x1024", "16384x4096", "16384x8192", "4096x16384"]
# The cases of a benchmark as the file of its family calls them.
WHAT = {
    "normalization": {f"{n} bfloat16 {s}": f"{n} {s}" for n in ("rms", "layer") for s in SHAPES},
    "glu": {f"silu bfloat16 {s}": f"silu {s}" for s in SHAPES}
    | {f"{f} bfloat16 16384x4096": f"{f} 16384x4096" for f in ("gelu", "packed silu")},
    "rotary": {
        f"{i}bfloat16 4x4096x32+8x128": f"32+8 heads of 128 {i}".strip()
        for i in ("", "interleaved ")
    },
    "softmax": {
        f"{m}bfloat16 {s}": f"{m}softmax {s}" for m in ("", "masked ") for s in SHAPES[1::2]
    },
    "group_normalization": {
        "bfloat16 64x56x56x256 axis -1": "group norm (64, 3136, 256, 1) in 32",
        "bfloat16 64x256x56x56 axis 1": "group norm (64, 1, 256, 3136) in 32",
    },
    "cross_entropy": {f"{s} bfloat16": s for s in ("8192x4096", "8192x32768", "4096x131072")},
    "linear_cross_entropy": {f"{s} bfloat16": s for s in ("8192x4096x131072", "8192x4096x32768")},
}
WHAT["glu"]["packed silu bfloat16 16384x4096"] = "silu packed 16384x4096"
# Gradients that need nothing of the forward computation, and so come without it.
ALONE = ("glu", "rotary")


def copies(fn, count, jit_compile):
    """fn of `count` inputs in turn, which are one list."""

    def run(*flat):
        size = len(flat) // count
        return [fn(*flat[i * size : (i + 1) * size]) for i in range(count)]

    return tf.function(run, jit_compile=jit_compile, autograph=False)


class Work:
    """A case of a benchmark, `count` times in each call."""

    def __init__(self, case):
        self.case = case
        size = sum(x.shape.num_elements() * x.dtype.size for x in case.make_inputs())
        self.count = 1 if case.flops else min(max(BYTES // size, 1), MOST_COPIES)
        self.contenders = {
            name: copies(fn.python_function, self.count, "xla" in name)
            for name, fn in case.contenders.items()
        }

    def make_inputs(self):
        return [x for _ in range(self.count) for x in self.case.make_inputs()]

    def compile(self):
        inputs = self.make_inputs()
        for fn in self.contenders.values():
            fn(*inputs)

    def milliseconds(self):
        """Name, time of one of the copies."""
        for name, fn in self.contenders.items():
            rounds = seconds_by_round({name: fn}, self.make_inputs, 3)[name]
            yield name, 1e3 * statistics.median(rounds) / self.count


def extra_bytes(fn, inputs):
    """Device memory that a call takes at its peak beside its inputs and outputs."""
    tf.test.experimental.sync_devices()
    tf.config.experimental.reset_memory_stats("GPU:0")
    before = tf.config.experimental.get_memory_info("GPU:0")["current"]
    results = fn(*inputs)
    tf.test.experimental.sync_devices()
    size = sum(x.shape.num_elements() * x.dtype.size for x in tf.nest.flatten(results))
    return tf.config.experimental.get_memory_info("GPU:0")["peak"] - before - size


def cases(family):
    """Pairs: the name of a case in the file, "forward", "backward" or "both"; the case."""
    for case in importlib.import_module(f"benchmarks.bench_{family}").cases():
        label = re.sub(r" (with )?gradients?$", "", case.label)
        direction = "backward" if family in ALONE else "both"
        if label == case.label:
            label, direction = label.removesuffix(" forward"), "forward"
        if label in WHAT[family]:
            yield WHAT[family][label], direction, case


def row_of(family, report, what, direction, contender, ms, case):
    """A row in the form of the family's file."""
    rate = 1 / ms / 1e9
    if family == "linear_cross_entropy":
        return dict(what=what, contender=contender, ms=ms, TFLOPs=case.flops * rate)
    share = case.bytes * rate / report["copy_TBps"]
    if family == "cross_entropy":
        tokens, classes = map(int, what.split("x"))
        row = dict(tokens=tokens, classes=classes, contender=contender, what=direction, ms=ms)
        return row | dict(TBps=case.bytes * rate, share_of_floor=share)
    # How long a copy of as many bytes takes, ours tell.
    ours = parts_of(report, what, direction)["ours"]
    same_copy = sum(row["share_of_same_copy"] * row["ms"] for row in ours)
    row = dict(what=f"{what} {TITLE.get(direction, direction)}", contender=contender, ms=ms)
    return row | dict(TBps=case.bytes * rate, share=share, share_of_same_copy=same_copy / ms)


def parts_of(report, what, direction):
    """By contender, the rows of forward and backward, or of one of them."""
    parts = ("forward", "backward") if direction == "both" else (direction,)
    found = {}
    for row in report["rows"]:
        if row["what"] in [f"{what} {part}" for part in parts]:
            found.setdefault(row["contender"], []).append(row)
    return {contender: rows for contender, rows in found.items() if len(rows) == len(parts)}


def rows_of(family, report, what, direction, work):
    """Contender, time and more of a case; for both directions also the sums of what is there."""
    if direction == "both" and family != "cross_entropy" and family != "linear_cross_entropy":
        for contender, rows in parts_of(report, what, direction).items():
            yield contender, sum(row["ms"] for row in rows), {}
    for name, ms in work.milliseconds():
        more = {}
        if family == "linear_cross_entropy":
            extra, sizes = extra_bytes(work.contenders[name], work.make_inputs()), what.split("x")
            share = extra / (2 * int(sizes[0]) * int(sizes[2]))
            more = dict(extra_bytes=extra, share_of_logits=share)
        yield NAMES.get(name, name), ms, more


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--only", nargs="+", choices=WHAT, default=list(WHAT))
    parser.add_argument("--wait", action="store_true", help="compile, then wait for a line")
    arguments = parser.parse_args()
    found = [(family, *case) for family in arguments.only for case in cases(family)]
    all_work = [(*names, Work(case)) for *names, case in found]
    if arguments.wait:
        for *_, work in all_work:
            work.compile()
        print("ready", flush=True)
        input()
    for family, what, direction, work in all_work:
        path = arguments.folder / f"{family}_h200.json"
        report = json.loads(path.read_text())
        for contender, ms, more in rows_of(family, report, what, direction, work):
            row = row_of(family, report, what, direction, contender, ms, work.case) | more
            report["rows"].append(row)
            print(f"{what + ' ' + direction:45}{contender:15}{ms:9.4f} ms {more}", flush=True)
        report["tensorflow"] = tf.__version__
        path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
