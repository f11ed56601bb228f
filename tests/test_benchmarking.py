# SPDX-License-Identifier: Apache-2.0
"""`python -m tf_ops bench`: what it prints, writes and draws, and how it measures."""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import time
import types

import pytest
import tensorflow as tf

from benchmarks.tables import Table
from tf_ops import benchmarking
from tf_ops.__main__ import bench

ROOT = pathlib.Path(__file__).parents[1]
BENCHMARK = """
import tensorflow as tf
from tf_ops.benchmarking import Case, compiled, main

def cases():
    for size in (100, 200):
        inputs = lambda size=size: [tf.random.normal([size])]
        both = compiled(lambda x: x + x, lambda x: 2 * x)
        yield Case(f"size {size}", inputs, both, bytes=8 * size)

if __name__ == "__main__":
    main("twice", list(cases()))
"""


@pytest.fixture(autouse=True)
def device():
    """A benchmark chooses its own."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "bench_twice.py").write_text(BENCHMARK)
    (tmp_path / "results").mkdir()
    return tmp_path


def run(folder, *arguments):
    result = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_table_json_and_picture(folder):
    pytest.importorskip("matplotlib")
    options = ["--rounds", "1", "--json", "results", "--plot"]
    lines = run(folder, "tf_ops", "bench", *options).splitlines()
    assert lines[0].split() == benchmarking.COLUMNS
    contenders = [line.split()[2:4] for line in lines[1:-1]]
    assert len(lines) == 8 and [name[0] for name in contenders] == ["ours", "stock", "stock"] * 2
    [file] = (folder / "results").glob("twice_*.json")
    assert lines[-1] == f"results/{file.stem}.png"
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    rows = json.loads(file.read_text())["rows"]
    assert [row["case"] for row in rows] == ["size 100"] * 3 + ["size 200"] * 3
    assert all(0 < row["share"] and row["us"] > 0 for row in rows)
    # The page of all results reads what is written.
    table = Table(file.rename(folder / "twice_cpu.json"))
    assert table.contenders == ["tf_ops", "stock graph", "stock XLA"] and len(table.cases) == 2


def test_one_benchmark_by_itself(folder):
    command = ["benchmarks.bench_twice", "--only", "200", "--rounds", "1", "--json", "mine.json"]
    assert len(run(folder, *command).splitlines()) == 4
    assert len(json.loads((folder / "mine.json").read_text())["rows"]) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(names=["thrice"]), "no thrice among once, twice"),
        (dict(only="300"), "twice: no case has '300' in its label"),
        (dict(names=[], json=pathlib.Path("a.json")), "must be a folder"),
        (None, "no benchmarks/bench_"),
    ],
)
def test_mistakes(folder, monkeypatch, arguments, message):
    (folder / "benchmarks" / "bench_once.py").write_text(BENCHMARK)
    monkeypatch.chdir(folder if arguments else folder / "results")
    module = types.SimpleNamespace(cases=lambda: [])
    monkeypatch.setitem(sys.modules, "benchmarks.bench_twice", module)
    defaults = dict(names=["twice"], rounds=1, only="", json=None, plot=False)
    with pytest.raises(SystemExit, match=message):
        bench(argparse.Namespace(**defaults | (arguments or {})))


def test_ratio_is_of_one_round_and_the_share_of_the_nearer_limit(monkeypatch, capsys):
    limits = {"copy": 1e9, "float32": 1e9}
    monkeypatch.setattr(benchmarking, "machine_limits", lambda dtypes: limits)
    # The machine is slower in the second round, for both.
    times = {"ours": [0.1, 0.3, 0.1], "stock": [0.2, 0.6, 0.25]}
    monkeypatch.setattr(benchmarking, "seconds_by_round", lambda *_: times)
    case = benchmarking.Case("a", lambda: [], dict.fromkeys(times, lambda: 0), flops=2e7, bytes=5e7)
    rows = benchmarking.measure("a", [case])["rows"]
    assert [row["ratio"] for row in rows] == [1, 2] and [row["share"] for row in rows] == [0.5, 0.2]
    assert "stock" in capsys.readouterr().out


def test_contenders_take_turns():
    calls = []
    contender = lambda name: lambda x: calls.append(name) or time.sleep(0.03)
    contenders = {"a": contender("a"), "b": contender("b")}
    times = benchmarking.seconds_by_round(contenders, lambda: [tf.zeros([1])], 2)
    assert all(len(seconds) == 2 and min(seconds) >= 0.03 for seconds in times.values())
    assert "".join(calls[-8:]) == "aabbaabb"
