# SPDX-License-Identifier: Apache-2.0
"""Reads benchmarks/results/*.json, of any family, into tables of contenders beside tf_ops.

FAMILY_DEVICE.json, or FAMILY_DEVICE_more.json, holds rows, the dicts of its lists; without any it
is one row itself. A row has a time under `us`, `ms` or `s`, of its `contender` or of each contender
in a dict; or it has a dict for each contender, with a time. Beside a time there may be memory,
under `MB` or the like, and a share of the limit. Strings, ints and bools of a row name the case.
"""

import dataclasses
import json
import math
import pathlib
import re
import statistics

RESULTS = pathlib.Path(__file__).parent / "results"
FILE = re.compile(r"(.+?)_(h200|cpu)(?:_.+)?\.json")
DEVICES = {"h200": "NVIDIA H200", "cpu": "CPU"}
TITLES = {
    "cross_entropy": "Cross entropy",
    "decode": "Attention of one query to a cache",
    "demo": "The demo's model, a training step",
    "glu": "Gated linear units",
    "normalization": "RMS and layer normalization",
    "rotary": "Rotary embedding",
    "softmax": "Masked softmax",
}
NAMES = {
    "ours": "tf_ops",
    "contiguous": "tf_ops",
    "stock": "stock graph",
    "stock xla": "stock XLA",
    "torch": "PyTorch",
    "liger": "Liger",
    "liger (mean)": "Liger",
    "cudnn": "cuDNN",
    "flash": "FlashAttention 2",
    "sdpa": "PyTorch",
    "sdpa cudnn": "cuDNN",
    "sdpa flash": "FlashAttention 2",
}
UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
MEMORY = {"bytes": 1e-6, "MB": 1.0, "MiB": 1.048576, "GB": 1e3, "GiB": 1073.741824}
GRADIENTS = re.compile("gradient|backward|both|step|train")
SHARES = ["share_of_same_copy", "share", "share_of_floor", "share_of_copy"]


@dataclasses.dataclass
class Measurement:
    """The time of one contender in one case; what is None is not in the file."""

    case: str
    contender: str
    ms: float
    share: float | None = None  # of the limit
    ratio: float | None = None  # to the time of ours, by interleaved rounds
    memory: float | None = None  # in MB


def name_of(contender):
    contender = NAMES.get(contender, contender)
    contender = re.sub(r"^ours\b", "tf_ops", contender)
    contender = re.sub(r"^paged \d{3,}$", "tf_ops, one page", contender)
    return re.sub(r"^paged (\d+)$", r"tf_ops, pages of \1", contender)


def time_in(row):
    """The key and value of the row's time, in ms; the value is a dict where the row's is."""
    for key, value in row.items():
        scale = 1e3 * UNITS.get(key.partition("_per_")[0], 0)
        if scale and isinstance(value, dict):
            return key, {contender: scale * t for contender, t in value.items()}
        if scale and isinstance(value, (int, float)):
            return key, scale * value
    return None, None


def memory_in(row):
    """The key and value of the row's memory, in MB."""
    for key, value in row.items():
        scale = MEMORY.get(key.rpartition("_")[2])
        if scale and isinstance(value, (int, float)):
            return key, scale * value
    return None, None


def case_of(row, measured):
    parts = []
    for key, value in row.items():
        if key == "contender" or key in measured or isinstance(value, (float, dict, list)):
            continue
        if isinstance(value, bool):
            parts += [key] * value
        elif value is not None:
            parts.append(value if isinstance(value, str) else f"{key} {value}")
    return ", ".join(parts)


def rows_of(result):
    """The rows of a file; a row that is of one contender has its name."""
    lists = {k: v for k, v in result.items() if isinstance(v, list) and v and type(v[0]) is dict}
    rows = [{"list": k} | row if len(lists) > 1 else row for k in lists for row in lists[k]]
    if not rows:
        nested = {k: v for k, v in result.items() if isinstance(v, dict)}
        rows = [{"model": result.get("model", "step")} | nested]
    for row in rows:
        nested = {k: v for k, v in row.items() if isinstance(v, dict) and time_in(v)[0]}
        plain = {k: v for k, v in row.items() if k not in nested}
        for contender, more in nested.items():
            yield plain | more | {"contender": contender}
        if not nested:
            yield row


def measurements(result):
    """The measurements in a file, whatever its form; none if it has no times."""
    found = []
    for row in rows_of(result):
        (time_key, ms), (memory_key, memory) = time_in(row), memory_in(row)
        if time_key is None:
            continue
        share = next((row[key] for key in SHARES if key in row), None)
        case = case_of(row, {time_key, memory_key})
        for contender, t in (ms if isinstance(ms, dict) else {row["contender"]: ms}).items():
            found.append(Measurement(case, name_of(contender), t, share, row.get("ratio"), memory))
    return found


class Table:
    """The cases of one file, each with its measurements by contender."""

    def __init__(self, path):
        self.path, result = path, json.loads(path.read_text())
        self.family, self.device = FILE.fullmatch(path.name).groups()
        self.title = TITLES.get(self.family, self.family.replace("_", " ").capitalize())
        self.machine, self.note = machine_of(result), result.get("note", "")
        self.cases = {}
        for m in measurements(result):
            self.cases.setdefault(m.case, {})[m.contender] = m
        contenders = {contender: None for row in self.cases.values() for contender in row}
        ours = lambda name: (name != "tf_ops", not name.startswith("tf_ops"))
        self.contenders = sorted(contenders, key=ours)

    def ours(self, case):
        """The measurement that others are compared with: of tf_ops, or of its first variant."""
        row = self.cases[case]
        return next((row[c] for c in self.contenders if c in row and c.startswith("tf_ops")), None)

    def ratio(self, case, contender):
        """How many times the time of ours it takes; None where there is nothing to compare."""
        ours, other = self.ours(case), self.cases[case].get(contender)
        if not ours or not other or ours is other:
            return None
        return other.ratio or other.ms / ours.ms

    def compared(self):
        """The cases in which there is something beside ours."""
        return [c for c in self.cases if any(self.ratio(c, peer) for peer in self.contenders)]

    def summary(self, gradients):
        """The geometric means of the ratios, over the cases with gradients or those without."""
        texts = []
        cases = [c for c in self.cases if bool(GRADIENTS.search(c)) == gradients]
        for contender in self.contenders:
            logs = [math.log(ratio) for c in cases if (ratio := self.ratio(c, contender))]
            if logs and not contender.startswith("tf_ops"):
                texts.append(f"{contender} {math.exp(statistics.mean(logs)):.2f}")
        return ", ".join(texts)

    def shares(self):
        """The shares of the limit that ours reaches."""
        ours = [self.ours(case) for case in self.cases]
        return [m.share for m in ours if m and m.share]


def machine_of(result):
    """The machine and versions of a result in words."""
    machine = result.get("machine", {})
    gpu = machine.get("name") or (result.get("gpu") or "").splitlines()[-1:]
    gpu = ", ".join(gpu) if isinstance(gpu, list) else gpu
    words = [gpu or result.get("cpu", "").replace("\n", ", ")]
    words += [f"driver {machine.get('driver_version')}"] * ("driver_version" in machine)
    for key, name in {"tensorflow": "TensorFlow", "keras": "Keras", "torch": "PyTorch"}.items():
        version = result.get(key) or machine.get(key)
        words += [f"{name} {version}"] * bool(version)
    return ", ".join(words)


def tables(folder=RESULTS):
    """The tables of all files that hold times, in the order of the page."""
    found = [Table(path) for path in folder.glob("*.json") if FILE.fullmatch(path.name)]
    order = lambda t: (t.family == "demo", t.title, list(DEVICES).index(t.device), t.path.name)
    return sorted((table for table in found if table.cases), key=order)
