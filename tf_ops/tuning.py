# SPDX-License-Identifier: Apache-2.0
"""Measures the configurations of kernels that have several, and keeps the quickest.

A call is run once while the library notes what its kernels ask. Each legal value is then measured,
and the one that wins is kept in a JSON file per device, for this process and later ones.
"""

import ctypes
import fcntl
import json
import os
import pathlib
import re
import statistics
import tempfile
import time
import warnings

import numpy as np
import tensorflow as tf

from tf_ops import _library

_COLD_BYTES = 128 << 20  # inputs in turn exceed every cache
_ROUNDS, _SECONDS = 7, 0.02  # of a value, and of a round
_MARGIN = 0.02  # a value that wins by less is not told apart from noise
_SHIPPED = pathlib.Path(__file__).with_name("tuned")


def _mode():
    mode = os.environ.get("TF_OPS_AUTOTUNE") or "cached"
    if mode not in ("off", "cached", "force"):
        raise ValueError(f"TF_OPS_AUTOTUNE is off, cached or force; it is {mode!r}")
    return mode


def _call(name, *args, result=None):
    """What each library answers: this package's and those of `tf_ops.extend.load`."""
    answers = []
    for library in _library.loaded:
        function = getattr(library, name, None)
        if function is None:
            continue  # of a library linked without the table, or the hashes of cc/build.mk
        function.restype = result
        answers.append(function(*args))
    return answers


def _families():
    """The hash of each family's sources, as its library was built."""
    texts = _call("tf_ops_families", result=ctypes.c_char_p)
    words = b" ".join(texts).decode().split()
    return dict(zip(words[::2], words[1::2]))


def _asked(fn):
    """What the kernels of fn() ask: by key the heuristic's value, and then the others."""
    _call("tf_ops_tuning_listen", 1)
    try:
        fn()
    finally:
        _call("tf_ops_tuning_listen", 0)
    text = b"".join(_call("tf_ops_tuning_asked", result=ctypes.c_char_p)).decode()
    pairs = (line.split("\t") for line in text.splitlines())
    return {key: [int(value) for value in values.split()] for key, values in pairs}


def _set(choices):
    text = "".join(f"{key}\t{value}\n" for key, value in choices.items())
    _call("tf_ops_tuning_set", text.encode())


def _device_name(kind):
    """What the stored choices of "CPU" or "GPU" are for; None without such a device."""
    if kind == "GPU":
        gpus = tf.config.list_physical_devices("GPU")
        details = gpus and tf.config.experimental.get_device_details(gpus[0])
        return details.get("device_name", gpus[0].name) if gpus else None
    model = re.search(r"model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text())
    threads = tf.config.threading.get_intra_op_parallelism_threads() or os.cpu_count()
    return f"{model[1] if model else 'CPU'}, {_library.instruction_set()}, {threads} threads"


def cache_dir():
    """The folder of the stored choices: TF_OPS_CACHE_DIR, or tf_ops in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(os.environ.get("TF_OPS_CACHE_DIR") or pathlib.Path(base) / "tf_ops")


def _file_name(device):
    return re.sub(r"[^a-z0-9]+", "_", device.lower()).strip("_") + ".json"


def _read(path):
    """The choices in a file, those that were made for the kernels of this library."""
    try:
        choices = json.loads(path.read_text())["choices"]
        families = _families()
        return {
            key: choice
            for key, choice in choices.items()
            if isinstance(choice["value"], int)
            and choice["sources"] == families.get(key.split("/")[0])
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        warnings.warn(f"{path} is ignored, for it cannot be read: {error!r}")
        return {}


def _write(device, choices):
    """Merges choices into the device's file, which is at each moment a whole one."""
    path = cache_dir() / _file_name(device)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            text = json.dumps({"device": device, "choices": _read(path) | choices}, indent=1)
            with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
                file.write(text + "\n")
            os.chmod(file.name, 0o644)  # for all who share the folder
            os.replace(file.name, path)
    except OSError as error:
        warnings.warn(f"What was tuned serves this process only: {path} is not written: {error}")


class _Stored:
    """The choices that the library has been given."""

    def __init__(self):
        self.choices = {}

    def load(self):
        self.choices = {}
        # Devices are asked for where a file may be theirs.
        folders = [f for f in (_SHIPPED, cache_dir()) if any(f.glob("*.json"))]
        if _mode() != "off" and folders:
            for device in filter(None, map(_device_name, ("CPU", "GPU"))):
                for folder in folders:
                    self.choices |= _read(folder / _file_name(device))
        self.use()

    def use(self, **trial):
        _set({key: choice["value"] for key, choice in self.choices.items()} | trial)


_stored = _Stored()


def load():
    """Gives the libraries the choices that are stored for the devices here, and no others."""
    _stored.load()


def load_more():
    """The same once another library is there; what this process has tuned stays."""
    kept = _stored.choices
    _stored.load()
    _stored.choices |= kept
    _stored.use()


def _agree(results, references):
    """Whether a value's results are the heuristic's, but for the order of sums."""
    for x, reference in zip(tf.nest.flatten(results), tf.nest.flatten(references), strict=True):
        if not x.dtype.is_floating:
            if not np.array_equal(x, reference):
                return False
            continue
        a, b = (tf.cast(y, tf.float64).numpy() for y in (x, reference))
        finite = np.isfinite(b)
        if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
            return False
        units = 2 if x.dtype.size == 2 else 64
        eps = np.finfo(x.dtype.as_numpy_dtype).eps if x.dtype != tf.bfloat16 else 2.0**-7
        largest = np.abs(b[finite]).max(initial=0)
        if not np.all(np.abs(a[finite] - b[finite]) <= units * float(eps) * largest):
            return False
    return True


def _seconds(run, inputs, calls):
    tf.test.experimental.sync_devices()
    start = time.perf_counter()
    for i in range(calls):
        run(*inputs[i % len(inputs)])
    tf.test.experimental.sync_devices()
    return (time.perf_counter() - start) / calls


def _measure(key, values, run, inputs, say):
    """The choice for a key: {value, heuristic, us, sources}."""
    _stored.use(**{key: values[0]})
    reference = run(*inputs[0])
    right, calls = [values[0]], {}
    for value in values:
        _stored.use(**{key: value})
        if value != values[0] and not _agree(run(*inputs[0]), reference):
            say(f"  {value:>6}  wrong result: left out")
            continue
        right += [value] * (value != values[0])
        calls[value] = max(1, round(_SECONDS / _seconds(run, inputs, 2)))
    times = {value: [] for value in right}
    for _ in range(_ROUNDS):
        for value in right:
            _stored.use(**{key: value})
            times[value].append(_seconds(run, inputs, calls[value]))
    us = {value: 1e6 * statistics.median(times[value]) for value in right}
    best = min(right, key=us.get)
    if us[best] > (1 - _MARGIN) * us[values[0]]:
        best = values[0]
    for value in right:
        marks = " heuristic" * (value == values[0]) + " chosen" * (value == best)
        say(f"  {value:>6}  {us[value]:>10.1f} us {marks}")
    return {
        "value": best,
        "heuristic": values[0],
        "us": {str(value): float(f"{t:.4g}") for value, t in us.items()},
        "sources": _families()[key.split("/")[0]],
    }


def tune(fn, *args, verbose=None):
    """Measures the kernels' configurations in `fn(*args)`, and keeps the quickest.

    The first call of `fn` tells which kernels have a choice for these sizes. Each legal value is
    then measured in turn, on copies of the arguments that come in turns so that no cache holds
    them, and may win only if all results are those of the heuristic's value, but for the order of
    sums. Sizes are told apart by powers of two. Choices are kept in a file per device in
    `TF_OPS_CACHE_DIR`, by default `~/.cache/tf_ops`, which later processes read when they import
    this package; where it cannot be written they serve this process.

    `TF_OPS_AUTOTUNE` is "cached", what is known already is not measured again; "force", it is; or
    "off", nothing is measured and the heuristics serve. `TF_OPS_PRINT_AUTOTUNE=1` prints.

    Args:
        fn: a function of tensors that changes nothing, neither variables nor files: it is called
            many times. With a gradient inside, as `tf_ops.benchmarking.with_gradients` makes it,
            the kernels of the gradient are measured, too.
        args: tensors, or what becomes one.
        verbose: whether to print progress and the measured times; None: as the variable says.

    Returns:
        A dict by key, such as "cross_entropy/forward GPU bfloat16 tokens=4096 classes=32768", of
        dicts: `value`, `heuristic`, `us`, microseconds of the whole of `fn` by value, and
        `sources`, a hash of the kernels' sources.

    Raises:
        RuntimeError: inside of a graph that is being traced.
        ValueError: TF_OPS_AUTOTUNE is none of the above.
    """
    if not tf.executing_eagerly():
        raise RuntimeError("tune measures, so it is for eager code, outside of every tf.function")
    mode = _mode()
    if mode == "off":
        return {}
    verbose = os.environ.get("TF_OPS_PRINT_AUTOTUNE") == "1" if verbose is None else verbose
    say = lambda text: print(text, flush=True) if verbose else None
    args = [tf.convert_to_tensor(x) for x in args]
    size = sum(x.shape.num_elements() * x.dtype.size for x in args)
    # Selected from two, so that each is memory of its own.
    copy = lambda x: tf.where(tf.ones_like(x, tf.bool), x, tf.zeros_like(x))
    inputs = [[copy(x) for x in args] for _ in range(1 + min(8, _COLD_BYTES // max(size, 1)))]
    run = tf.function(fn, jit_compile=False, autograph=False)
    results = {}
    try:
        for key, values in _asked(lambda: run(*inputs[0])).items():
            if mode == "cached" and key in _stored.choices:
                say(f"{key}: {_stored.choices[key]['value']}, known")
                results[key] = _stored.choices[key]
            elif len(values) > 1:
                say(f"{key}: {len(values)} values")
                results[key] = _measure(key, values, run, inputs, say)
                _stored.choices[key] = results[key]
    finally:
        _stored.use()
    for kind in ("CPU", "GPU"):
        fresh = {key: x for key, x in results.items() if key.split()[1] == kind}
        if fresh:
            _write(_device_name(kind), fresh)
    return results
