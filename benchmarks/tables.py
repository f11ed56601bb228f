# SPDX-License-Identifier: Apache-2.0
"""Reads benchmarks/results/*.json, of any family, into tables of contenders beside tf_ops.

FAMILY_DEVICE.json, or FAMILY_DEVICE_more.json, holds records: dicts with times, under `us` or `ms`
or names that end so, such as `train_ms`. A time is of the record's `contender`, else of each
contender in a dict of times, else of the contender that the record is the value of. Memory, under
`MB` or the like, goes with the time of the same beginning; there may be a share of the limit.
Strings, ints and bools of the row that holds a record name the case, and so do the names between.
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
    "models": "Whole models",
    "rotary": "Rotary embedding",
    "softmax": "Masked softmax",
}
NAMES = {
    "ours": "tf_ops",
    "contiguous": "tf_ops",
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
UNITS = {"us": 1e-3, "ms": 1.0}  # in ms
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


def unit_of(key, units):
    """What a key's unit is worth and what else it says: ("train", 1.0) for "train_ms"."""
    key = key.partition("_per_")[0]
    name, _, unit = key.rpartition("_")
    return (name, units[unit]) if unit in units else None


def times_in(record):
    """A record's times, in ms: what they are of, and a number or a dict of numbers."""
    for key, value in record.items():
        found = unit_of(key, UNITS)
        if found and isinstance(value, dict):
            yield found[0], {contender: found[1] * t for contender, t in value.items()}
        elif found and isinstance(value, (int, float)):
            yield found[0], found[1] * value


def memory_in(record, of):
    """A record's memory, in MB, beside its time `of` something; None if it has none."""
    for key, value in record.items():
        found = unit_of(key, MEMORY)
        if found and key.startswith(of) and isinstance(value, (int, float)):
            return found[1] * value
    return None


def fields(row):
    """What a row says of its case."""
    for key, value in row.items():
        measured = unit_of(key, UNITS) or unit_of(key, MEMORY) or isinstance(value, float)
        if key == "contender" or measured or not isinstance(value, (str, int)):
            continue
        if not isinstance(value, bool):
            yield value if isinstance(value, str) else f"{key} {value}"
        elif value:
            yield key


def records(node, names=(), case=()):
    """The dicts with times, each with the names that lead to it and the fields of its row."""
    if isinstance(node, list):
        for row in node:
            yield from records(row, (), (*case, *fields(row)) if isinstance(row, dict) else case)
    elif isinstance(node, dict) and any(times_in(node)):
        yield names, case, node
    elif isinstance(node, dict):
        for key, value in node.items():
            yield from records(value, (*names, key), case)


def measurements(result):
    """The measurements in a file, whatever its form; none if it has no times."""
    found = []
    # tf_ops.benchmarking says what its stock is; a model's is as Keras compiles it.
    stock = {"stock": "stock graph"} if "benchmark" in result else {}
    for names, case, record in records(result):
        contender = record.get("contender") or (names[-1] if names else "")
        between = names[:-1][1:] if len(names) > 2 else names[:-1]  # the first one is of them all
        share = next((record[key] for key in SHARES if key in record), None)
        for of, ms in times_in(record):
            label = ", ".join(filter(None, [*between, *case, of])) or result.get("model", "step")
            more = share, record.get("ratio"), memory_in(record, of)
            for name, t in (ms if isinstance(ms, dict) else {contender: ms}).items():
                found.append(Measurement(label, stock.get(name) or name_of(name), t, *more))
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
    gpu = machine.get("name") or ", ".join((result.get("gpu") or "").splitlines()[-1:])
    words = [gpu or result.get("cpu", "").replace("\n", ", ") or result.get("device", "")]
    words += [f"driver {machine.get('driver_version')}"] * ("driver_version" in machine)
    for key, name in {"tensorflow": "TensorFlow", "keras": "Keras", "torch": "PyTorch"}.items():
        version = result.get(key) or machine.get(key)
        words += [f"{name} {version}"] * bool(version)
    return ", ".join(filter(None, words))


def tables(folder=RESULTS):
    """The tables of all files that hold times, in the order of the page."""
    found = [Table(path) for path in folder.glob("*.json") if FILE.fullmatch(path.name)]
    order = lambda t: (t.family == "demo", t.title, list(DEVICES).index(t.device), t.path.name)
    return sorted((table for table in found if table.cases), key=order)
