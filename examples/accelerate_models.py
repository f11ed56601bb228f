# SPDX-License-Identifier: Apache-2.0
"""KerasHub's models before and after `tf_ops.accelerate`: time, memory and coverage.

    python examples/accelerate_models.py
    python examples/accelerate_models.py --device-config h200 --only llama,gemma --json out.json
    python examples/accelerate_models.py --only llama --longest 65536,131072 8192,16384

The weights are random, nothing is downloaded. Each model trains on one batch, with Adam, and
infers from it; stock Keras does so under its default jit and, on a GPU, without. The last sequence
of a batch is padded. `--longest` says which of these lengths train, a sequence at a time.
"""

import argparse
import ctypes
import gc
import json
import os
import pathlib
import statistics
import subprocess
import sys
import threading
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
    """A model after its first two steps of training and its first inference.

    Returns:
        What was measured of them, with `step` and `infer` to go on, or an error.
    """
    keras.utils.set_random_seed(0)
    memory = Memory()
    a = architectures.build(name, args.device_config, args.policy, batch, seq)
    tf_ops.coverage(reset=True)
    if kind == OURS:
        report = tf_ops.accelerate(a.model)
    none = {"metrics": None, "weighted_metrics": None}
    a.model.compile("adam", a.loss, jit_compile=False if kind == NO_JIT else "auto", **none)
    jit = bool(a.model.jit_compile)
    inputs = tf.nest.map_structure(tf.constant, a.inputs)
    forward = tf.function(lambda: a.model(inputs, training=False), jit_compile=jit)
    step = lambda: float(np.ravel(a.model.train_on_batch(a.inputs, a.targets))[0])
    # Of the output, which is large, only what it takes to know that it is there.
    infer = lambda: float(tf.reshape(forward(), [-1])[0])
    result = {"parameters": a.model.count_params(), "jit": jit}
    start = time.perf_counter()
    try:
        result["losses"] = [step()]
        result["first_step_s"] = time.perf_counter() - start
        result["losses"].append(step())
        result["train_peak_bytes"] = memory.peak()
        if seq is None:
            infer()
    except (tf.errors.ResourceExhaustedError, tf.errors.InternalError) as error:
        if "memory" not in str(error) and "OOM" not in str(error):
            raise
        return {**result, "error": "out of memory"}
    if kind == OURS:
        result["coverage"], result["kept"] = tf_ops.coverage(), report.kept
        result["share_served"] = result["coverage"].share
    return {**result, "step": step, "infer": infer}


def measure(results, args):
    """Adds the times of a step and of an inference; the contenders take turns."""
    results = [result for result in results if "error" not in result]
    for key, part in (("train_ms", "step"), ("predict_ms", "infer")):
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


class Contender:
    """A process for one model one way. Its memory, and its end, are its own.

    It is told what to do by lines: `prepare`, which compiles, and `measure`.
    """

    def __init__(self, name, kind, args, deadline, seq=None):
        self.name, self.kind, self.seq = name, kind, seq
        self._args, self._deadline, self._process = args, deadline, None

    def start(self):
        options = [f"--{key.replace('_', '-')}={getattr(self._args, key)}" for key in _PASSED_ON]
        options += [f"--only={self.name}", f"--contender={self.kind}"]
        options += [f"--seq={self.seq}"] * bool(self.seq)
        self._process = subprocess.Popen(
            [sys.executable, __file__, *options],
            env={**os.environ, "TF_FORCE_GPU_ALLOW_GROWTH": "true"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        left = max(0.0, self._deadline - time.monotonic())
        self._timer = threading.Timer(left, self._process.kill)
        self._timer.start()
        return self

    def tell(self, *words):
        try:
            self._process.stdin.write("".join(f"{word}\n" for word in words))
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # what it came to is in `result`

    def wait(self, word):
        """Reads what it says up to a line of this beginning; None if it ends before."""
        for text in self._process.stdout:
            if text.startswith(word):
                return text.removeprefix(word)

    def result(self):
        text = self.wait("result ")
        self._timer.cancel()
        code = self._process.wait()
        if text is not None:
            return json.loads(text)
        is_late = time.monotonic() >= self._deadline
        return {"error": "no time left" if is_late else f"the process ended with {code}"}


_PASSED_ON = ("device_config", "policy", "seconds")


def contend(args):
    """What a process of a `Contender` does."""
    for text in sys.stdin:
        if text == "prepare\n":
            batch = None if args.seq is None else 1
            result = prepared(args.only[0], args.contender, args, batch, args.seq)
            print("ready", flush=True)
        elif text == "measure\n":
            if args.seq is None:
                measure([result], args)
            elif "error" not in result:
                start = time.perf_counter()
                result["step"]()
                result["train_ms"] = 1e3 * (time.perf_counter() - start)
            result = {k: v for k, v in result.items() if k not in ("step", "infer")}
            print("result", json.dumps(result), flush=True)
            return


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


def heading():
    print("The shortest of some steps of training and of inference; memory while training.")
    print(f"{'':28}{'step, ms':>9}{'infer':>9}{'MiB':>8}", flush=True)


def note(args, results, name, group):
    """Keeps and prints what the contenders of a model came to."""
    results.setdefault(name, {}).update(group)
    for kind, result in group.items():
        print(line(name, kind, result, results[name].get(OURS, result)), flush=True)
    save(args, results)
    losses = [r["losses"] for r in results[name].values() if len(r.get("losses", ())) > 1]
    limit = 0.03 if "16" in args.policy else 1e-3
    # BERT drops: other weights in each.
    if len(losses) > 1 and name != "bert" and not np.allclose(*losses[-2:], rtol=limit):
        print(f"  The losses DIFFER: {losses[-2:]}")


def compare_in_turns(args, deadline):
    """In one process, a step of each after the other: where other programs are at work."""
    results = {}
    heading()
    for name in args.only:
        if time.monotonic() > deadline:
            group = {kind: {"error": "no time left"} for kind in (OURS, STOCK)}
        else:
            group = {kind: prepared(name, kind, args) for kind in (OURS, STOCK)}
            measure(group.values(), args)
            keras.backend.clear_session()
        note(args, results, name, group)


def compare_in_processes(args, deadline):
    """Some models at a time compile, all at once; then one process after the other measures."""
    results = {}
    heading()
    kinds = (OURS, STOCK, NO_JIT)
    contenders = [
        [Contender(name, kind, args, deadline).start() for kind in kinds] for name in args.only
    ]
    for first in range(0, len(contenders), args.together):
        group = contenders[first : first + args.together]
        compiled = [c for one in group for c in one if c.kind != NO_JIT]
        for c in compiled:
            c.tell("prepare")
        for c in compiled:
            c.wait("ready")
        for c in compiled:
            c.tell("measure")
            note(args, results, c.name, {c.kind: c.result()})
        for c in (c for one in group for c in one if c.kind == NO_JIT):
            c.tell("prepare", "measure")
            note(args, results, c.name, {c.kind: c.result()})


def longest(args, deadline):
    """The longest sequence of a batch of one that trains, of the powers of two."""
    results = {}
    for name in args.only:
        results[name] = {}
        contenders = [
            Contender(name, kind, args, deadline, seq).start()
            for kind, lengths in ((OURS, args.longest[0]), (STOCK, args.longest[1]))
            for seq in lengths
        ]
        # All compile at once, and are gone after two steps.
        for c in contenders:
            c.tell("prepare", "measure")
        outcomes = [(c, c.result()) for c in contenders]
        for c, result in outcomes:
            if "error" in result:  # was the memory another's?
                alone = Contender(name, c.kind, args, deadline, c.seq).start()
                alone.tell("prepare", "measure")
                result = alone.result()
            results[name].setdefault(f"{c.seq} tokens", {})[c.kind] = result
            text = result.get("error") or f"{result['train_ms']:.0f} ms"
            print(f"{name:9}{c.kind:19}{c.seq:8} tokens: {text}", flush=True)
            save(args, results)


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


def lengths(text):
    return [int(length) for length in text.split(",")]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device-config", choices=["tiny", "cpu", "h200"])
    parser.add_argument("--only", default=",".join(architectures.NAMES), help="names, by commas")
    parser.add_argument("--policy", help="of the dtypes; default: mixed_bfloat16 on a GPU")
    parser.add_argument("--seconds", type=float, default=2.0, help="to repeat a step for")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds; then it ends")
    parser.add_argument(
        "--together", type=int, default=2, help="on a GPU: models that compile and fit at a time"
    )
    parser.add_argument(
        "--longest", type=lengths, nargs=2, metavar=("OURS", "STOCK"), help="lengths, by commas"
    )
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    parser.add_argument("--seq", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    gpu = bool(tf.config.list_physical_devices("GPU"))
    args.device_config = args.device_config or ("h200" if gpu else "cpu")
    args.policy = args.policy or ("mixed_bfloat16" if gpu else "float32")
    args.only = args.only.split(",")
    deadline = time.monotonic() + args.limit
    if args.contender:
        contend(args)
    elif args.longest:
        longest(args, deadline)
    elif gpu:
        compare_in_processes(args, deadline)
    else:
        compare_in_turns(args, deadline)


if __name__ == "__main__":
    main()
