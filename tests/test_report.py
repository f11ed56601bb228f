# SPDX-License-Identifier: Apache-2.0
"""docs/performance.md is what benchmarks/results holds, whatever the family."""

import json
import re

import pytest

from benchmarks import report
from benchmarks.tables import RESULTS, tables


@pytest.fixture(autouse=True)
def device():
    """Nothing here depends on the device."""


def test_committed_page_is_of_the_committed_results():
    wrong = "docs/performance.md is not what the JSON files give: run `make report`"
    assert report.PAGE.read_text() == report.page(tables()), wrong


def test_pictures_are_there():
    text = report.PAGE.read_text()
    pictures = re.findall(r"!\[[^]]*\]\((.*?)\)", text)
    assert pictures and all((report.PAGE.parent / picture).exists() for picture in pictures)
    links = re.findall(r"\]\(#(.*?)\)", text)
    titles = re.findall(r"^## (.*)", text, re.M)
    anchors = {re.sub("[^a-z0-9-]", "", title.lower().replace(" ", "-")) for title in titles}
    assert links and set(links) == anchors


def readme_lines():
    """Lines of the README's tables, made of the results; all cells but the first."""
    read = lambda name: json.loads((RESULTS / f"{name}.json").read_text())
    rates = {
        (row["head_dim"], row["pass"], row["causal"]): row["tflops"]
        for row in read("attention_h200")["attention"]
        if row["seq"] == 4096
    }
    for dim in (64, 128, 256):
        cases = [rates[dim, way, causal] for way in ("forward", "backward") for causal in (0, 1)]
        yield [f"{rate['tf_ops']:.0f}" for rate in cases]
        yield [f"{rate['cudnn']:.0f} / {rate['flash']:.0f}" for rate in cases]

    for name, forward, gradients in (
        ("attention", "1x2048x8/8x64 float32", "1x2048x8/8x64 float32 gradients"),
        ("attention", "1x2048x8/8x64 float32 causal", "1x2048x8/8x64 float32 causal gradients"),
        ("normalization", "rms float32 4096x1024", "rms float32 4096x1024 with gradients"),
        ("normalization", "layer float32 4096x1024", "layer float32 4096x1024 with gradients"),
        ("cross_entropy", "1024x32000 float32 forward", "1024x32000 float32 with gradient"),
    ):
        rows = read(f"{name}_cpu")["rows"]
        ratio = {(row["case"], row["contender"]): row["ratio"] for row in rows}
        yield [
            f"{ratio[case, 'stock']:.1f} / {ratio[case, 'stock xla']:.1f}"
            for case in (forward, gradients)
        ]


def test_figures_of_the_readme_are_of_the_committed_results():
    text = (report.PAGE.parents[1] / "README.md").read_text()
    lines = [f" | {' | '.join(cells)} |\n" for cells in readme_lines()]
    assert not [line for line in lines if line not in text]


BENCH = dict(zip(["TFLOP/s", "GB/s", "share"], [0.0, 1.0, 0.5]))
FORMS = {
    "of benchmarks": [
        {"case": "2x3 with gradients", "contender": "ours", "us": 1500.0, "ratio": 1.0} | BENCH,
        {"case": "2x3 with gradients", "contender": "stock xla", "us": 2e3, "ratio": 2.0} | BENCH,
    ],
    "of peers": [
        {"rows": 2, "cols": 3, "contender": "ours", "pass": "backward", "ms": 1.5, "share": 0.5},
        {"rows": 2, "cols": 3, "contender": "torch", "pass": "backward", "ms": 3.0, "TBps": 4.0},
    ],
    "of each contender in a dict": [
        {"cols": 3, "causal": True, "pass": "backward", "ms": {"tf_ops": 1.5, "cudnn": 3.0}},
    ],
    "of models": [
        {
            "model": "small",
            "what": "training step",
            "tf_ops": {"ms": 1.5, "peak_GiB": 1.0},
            "stock Keras": {"ms": 3.0, "peak_GiB": 2.0},
        }
    ],
    "of models by name": {
        "small": {
            "tf_ops": {"jit": True, "losses": [1.0], "train_ms": 1.5, "train_peak_GiB": 1.0},
            "stock": {"jit": False, "losses": [1.0], "train_ms": 3.0, "train_peak_GiB": 2.0},
        }
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_unknown_family_is_taken_up(tmp_path, form):
    (tmp_path / "new_family_cpu.json").write_text(json.dumps({"cpu": "a CPU", "rows": FORMS[form]}))
    [table] = tables(tmp_path)
    [case] = table.cases
    peer = table.contenders[1]
    assert table.title == "New family" and table.contenders[0] == "tf_ops"
    assert table.ours(case).ms == pytest.approx(1.5) and table.ratio(case, peer) == 2
    assert table.summary(gradients=True) == f"{peer} 2.00" and table.summary(gradients=False) == ""
    text = report.page([table])
    assert "## New family\n\n### CPU\n\na CPU ([file]" in text
    expected = {"of benchmarks": "1.50 | 2.00 (2.00) | 50%", "of peers": "1.50 | 3.00 (2.00) | 50%"}
    expected["of models"] = expected["of models by name"] = "1.50, 1074 MB | 3.00 (2.00), 2147 MB"
    assert expected.get(form, "1.50 | 3.00 (2.00)") + " |" in text
    assert peer == {
        "of benchmarks": "stock XLA",
        "of peers": "PyTorch",
        "of each contender in a dict": "cuDNN",
        "of models": "stock Keras",
        "of models by name": "stock",
    }.get(form)


def test_what_names_a_case(tmp_path):
    row = {
        "seq": 8,
        "causal": True,
        "masked": False,
        "pass": "forward",
        "us": 1,
        "contender": "ours",
    }
    (tmp_path / "a_h200_more.json").write_text(json.dumps({"rows": [row]}))
    (tmp_path / "b_cpu.json").write_text(json.dumps({"rows": [{"tokens": 3}]}))  # without times
    (tmp_path / "c.json").write_text("[]")
    [table] = tables(tmp_path)
    assert list(table.cases) == ["seq 8, causal, forward"] and table.device == "h200"
    assert table.compared() == []
