# SPDX-License-Identifier: Apache-2.0
"""Draws benchmarks/results/attention_h200.json: `python -m benchmarks.plot`."""

import json
import pathlib

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

RESULTS = pathlib.Path(__file__).parent / "results"
NAMES = {"cudnn": ("cuDNN", "#9aa0a6"), "flash": ("FlashAttention 2", "#d0b48a")}
NAMES["tf_ops"] = ("tf_ops", "#1565c0")


def main():
    result = json.loads((RESULTS / "attention_h200.json").read_text())
    rows = [row for row in result["attention"] if row["head_dim"] == 128]
    figure, axes = plt.subplots(1, 4, figsize=(13, 3.4), sharey=True)
    panels = [(name, causal) for name in ("forward", "backward") for causal in (False, True)]
    for axis, (name, causal) in zip(axes, panels):
        points = [row for row in rows if row["pass"] == name and row["causal"] == causal]
        seqs = [row["seq"] for row in points]
        for key, (label, color) in NAMES.items():
            rate = [row["tflops"][key] for row in points]
            width = 2.5 if key == "tf_ops" else 1.5
            axis.plot(seqs, rate, color=color, linewidth=width, marker="o", markersize=4)
            if axis is axes[-1]:
                axis.annotate(label, (seqs[-1], rate[-1]), xytext=(8, 0), color=color,
                              textcoords="offset points", va="center")  # fmt: skip
        axis.set_xscale("log", base=2)
        axis.set_xticks(seqs, [f"{seq // 1024}k" for seq in seqs])
        axis.set_title(name + (", causal" if causal else ", full"), fontsize=11)
        axis.set_xlabel("sequence length")
        axis.set_ylim(0, 720)
        axis.grid(axis="y", color="#eeeeee")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("TFLOP/s")
    machine = result["machine"]
    figure.suptitle(
        f"Attention, bfloat16, head_dim 128, 16 heads, 16,384 tokens; {machine['name']}, "
        f"PyTorch {machine['torch'].split('+')[0]}",
        fontsize=11,
    )
    figure.tight_layout(rect=(0, 0, 0.97, 1))
    figure.savefig(RESULTS / "attention_h200.png", dpi=130)


if __name__ == "__main__":
    main()
