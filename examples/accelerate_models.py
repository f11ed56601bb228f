# SPDX-License-Identifier: Apache-2.0
"""KerasHub's models before and after `tf_ops.accelerate`: time, memory and coverage.

    python examples/accelerate_models.py
    python examples/accelerate_models.py --device-config h200 --only llama,gemma --json out.json

The weights are random, nothing is downloaded. Each model trains on one batch, with Adam, and
predicts it; stock Keras does so under its default jit and, on a GPU, without. The last sequence of
a batch is padded. `--longest` doubles the sequence until a training step of one does not fit.
"""

import argparse
import ctypes
import gc
import json
import pathlib
import statistics
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import architectures
import keras
import numpy as np
import tensorflow as tf

import tf_ops

OURS, STOCK, NO_JIT = "tf_ops", "stock", "stock without jit"


class Memory:
    """The largest use of memory since it was made, in bytes, beyond that before."""

    def __init__(self):
        gc.collect()
        self._gpu = bool(tf.config.list_physical_devices("GPU"))
        if self._gpu:
            tf.config.experimental.reset_memory_stats("GPU:0")
            self._before = 0  # what lives on the GPU is the model's
        else:
            ctypes.CDLL(None).malloc_trim(0)
            pathlib.Path("/proc/self/clear_refs").write_text("5")  # resets the peak
            self._before = self._resident("VmRSS")

    def peak(self):
        if self._gpu:
            return tf.config.experimental.get_memory_info("GPU:0")["peak"]
        return self._resident("VmHWM") - self._before

    @staticmethod
    def _resident(field):
        lines = pathlib.Path("/proc/self/status").read_text().splitlines()
        (line,) = (line for line in lines if line.startswith(field))
        return 1024 * int(line.split()[1])


def prepared(name, kind, args, batch=None, seq=None):
    """A model after its first two steps of training and its first prediction.

    Returns:
        What was measured of them, with `step` and `predict` to go on, or an error.
    """
    keras.utils.set_random_seed(0)
    memory = Memory()
    a = architectures.build(name, args.device_config, args.policy, batch, seq)
    tf_ops.coverage(reset=True)
    if kind == OURS:
        report = tf_ops.accelerate(a.model)
    none = {"metrics": None, "weighted_metrics": None}
    a.model.compile("adam", a.loss, jit_compile=False if kind == NO_JIT else "auto", **none)
    step = lambda: float(np.ravel(a.model.train_on_batch(a.inputs, a.targets))[0])
    predict = lambda: a.model.predict_on_batch(a.inputs)
    result = {"parameters": a.model.count_params(), "jit": bool(a.model.jit_compile)}
    start = time.perf_counter()
    try:
        result["losses"] = [step()]
        result["first_step_s"] = time.perf_counter() - start
        result["losses"].append(step())
        result["train_peak_bytes"] = memory.peak()
        if seq is None:
            predict()
    except (tf.errors.ResourceExhaustedError, tf.errors.InternalError) as error:
        if "memory" not in str(error) and "OOM" not in str(error):
            raise
        return {**result, "error": "out of memory"}
    if kind == OURS:
        result["coverage"], result["kept"] = tf_ops.coverage(), report.kept
        result["share_served"] = result["coverage"].share
    return {**result, "step": step, "predict": predict}


def measure(results, args):
    """Adds the times of a step and of a prediction; the contenders take turns."""
    results = [result for result in results if "error" not in result]
    for key, part in (("train_ms", "step"), ("predict_ms", "predict")):
        calls = [result.pop(part) for result in results]
        times = [[] for _ in results]
        until = time.perf_counter() + args.seconds * len(results)
        while results and (len(times[0]) < 3 or time.perf_counter() < until):
            for call, taken in zip(calls, times):
                start = time.perf_counter()
                call()
                taken.append(1e3 * (time.perf_counter() - start))
        for result, taken in zip(results, times):
            result[key], result[f"{key}_median"] = min(taken), statistics.median(taken)


def line(name, kind, result, reference):
    if "error" in result:
        return f"{name:9}{kind:19}{result['error']}"
    cells = [f"{result['train_ms']:9.1f}", f"{result['predict_ms']:9.1f}"]
    cells.append(f"{result['train_peak_bytes'] / 2**20:8.0f}")
    if kind == OURS:
        note = f"{100 * result['share_served']:.0f} % of the calls served"
    elif "error" in reference:
        note = ""
    else:
        ratios = (result[key] / reference[key] for key in ("train_ms", "predict_ms"))
        note = "{:.2f} and {:.2f} times the time of tf_ops".format(*ratios)
    return f"{name:9}{kind:19}{''.join(cells)}  {note}"


def compare(args, deadline):
    results = {}
    gpu = bool(tf.config.list_physical_devices("GPU"))
    # Where memory is scarce one after the other; where others are at work, in turns.
    groups = [[OURS], [STOCK], [NO_JIT]] if gpu else [[OURS, STOCK]]
    print("The shortest of some steps of training and of inference; memory while training.")
    print(f"{'':28}{'step, ms':>9}{'predict':>9}{'MiB':>8}", flush=True)
    for name in args.only:
        results[name] = {}
        longest = 0.0
        for kinds in groups:
            start = time.monotonic()
            if start + longest > deadline:
                group = {kind: {"error": "skipped: no time left"} for kind in kinds}
            else:
                group = {kind: prepared(name, kind, args) for kind in kinds}
                measure(group.values(), args)
                keras.backend.clear_session()
            longest = max(longest, time.monotonic() - start)
            results[name].update(group)
            for kind in kinds:
                print(line(name, kind, group[kind], results[name][OURS]), flush=True)
            save(args, results)
        losses = [r["losses"] for r in results[name].values() if "losses" in r]
        limit = 0.03 if "16" in args.policy else 1e-3
        # BERT drops: other weights in each.
        if len(losses) > 1 and name != "bert" and not np.allclose(*losses[:2], rtol=limit):
            print(f"  The losses DIFFER: {losses[:2]}")


def longest(args, deadline):
    """The longest sequence of a batch of one that trains, by doubling."""
    results = {}
    for name in args.only:
        results[name] = {}
        for kind in (OURS, STOCK):
            seq = 2048
            while time.monotonic() < deadline:
                result = prepared(name, kind, args, batch=1, seq=seq)
                if "error" in result:
                    break
                start = time.perf_counter()
                result.pop("step")()
                result["train_ms"] = 1e3 * (time.perf_counter() - start)
                del result["predict"]
                results[name][kind] = {"seq": seq, **result}
                print(f"{name:9}{kind:19}{seq:8} tokens: {result['train_ms']:.0f} ms", flush=True)
                save(args, results)
                seq *= 2
            else:
                print(f"{name:9}{kind:19}no time left to try {seq}", flush=True)


def save(args, results):
    if args.json is None:
        return
    devices = tf.config.list_physical_devices("GPU")
    query = "nvidia-smi --query-gpu=name,driver_version --format=csv,noheader"
    about = {
        "device": subprocess.getoutput(query) if devices else "CPU",
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "keras_hub": architectures.keras_hub.__version__,
        "config": args.device_config,
        "policy": args.policy,
        "shapes": {name: architectures.shape(name, args.device_config) for name in args.only},
        "longest" if args.longest else "models": results,
    }
    args.json.write_text(json.dumps(about, indent=1))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device-config", choices=["tiny", "cpu", "h200"])
    parser.add_argument("--only", default=",".join(architectures.NAMES), help="names, by commas")
    parser.add_argument("--policy", help="of the dtypes; default: mixed_bfloat16 on a GPU")
    parser.add_argument("--seconds", type=float, default=2.0, help="to repeat a step for")
    parser.add_argument(
        "--limit", type=float, default=150.0, help="seconds; what is left is skipped"
    )
    parser.add_argument("--longest", action="store_true")
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    gpu = bool(tf.config.list_physical_devices("GPU"))
    args.device_config = args.device_config or ("h200" if gpu else "cpu")
    args.policy = args.policy or ("mixed_bfloat16" if gpu else "float32")
    args.only = args.only.split(",")
    deadline = time.monotonic() + args.limit
    (longest if args.longest else compare)(args, deadline)


if __name__ == "__main__":
    main()
