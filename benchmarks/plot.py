# SPDX-License-Identifier: Apache-2.0
"""Draws attention_h200.json and the row-wise *_h200.json: `python -m benchmarks.plot`."""

import json
import pathlib

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

RESULTS = pathlib.Path(__file__).parent / "results"
COLORS = ["#d0b48a", "#9aa0a6", "#8e6c8a", "#5b9279", "#c46210", "#4a6fa5"]


def draw_ratios(table, path):
    """Draws how many times the time of tf_ops the contenders of a table take, a line for each case.

    Args:
        table: a benchmarks.tables.Table.
        path: of the PNG to write.
    """
    cases = table.compared()
    peers = [contender for contender in table.contenders if not contender.startswith("tf_ops")]
    figure, axis = plt.subplots(figsize=(9, 1.3 + 0.2 * len(cases)))
    axis.axvline(1, color="#1565c0", linewidth=2.5)
    for i, contender in enumerate(peers):
        shift = 0.3 * (i - (len(peers) - 1) / 2) / len(peers)  # equal ones stay visible
        points = [(table.ratio(case, contender), y + shift) for y, case in enumerate(cases)]
        points = [point for point in points if point[0]]
        color = COLORS[i % len(COLORS)]
        if points:
            axis.scatter(*zip(*points), s=26, color=color, label=contender, zorder=3)
    axis.set_xscale("log")
    low, high = axis.get_xlim()
    ticks = [t for t in (0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24) if low <= t <= high]
    axis.set_xticks(ticks, [f"{t:g}" for t in ticks])
    axis.set_xticks([], minor=True)
    axis.set_yticks(range(len(cases)), cases, fontsize=8)
    axis.set_ylim(len(cases) - 0.5, -0.5)
    axis.set_xlabel("times the time of tf_ops, which is the line: right of it tf_ops is faster")
    axis.grid(color="#eeeeee")
    axis.tick_params(length=0)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=6, frameon=False, fontsize=9)
    figure.savefig(path, dpi=100, bbox_inches="tight")
    plt.close(figure)


NAMES = {"cudnn": ("cuDNN", "#9aa0a6"), "flash": ("FlashAttention 2", "#d0b48a")}
NAMES["tf_ops"] = ("tf_ops", "#1565c0")


def draw_attention():
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


# What is drawn of each file, under which label.
ROWWISE = {
    "RMSNorm": ("normalization", "rms 16384x4096"),
    "LayerNorm": ("normalization", "layer 16384x4096"),
    "SwiGLU": ("glu", "silu 16384x4096"),
    "RoPE": ("rotary", "32+8 heads of 128"),
    "softmax": ("softmax", "softmax 16384x4096"),
}
CONTENDERS = {
    "stock graph": ("stock TensorFlow", "#8e6c8a"),
    "stock xla": ("stock XLA", "#5b9279"),
    "torch": ("PyTorch", "#9aa0a6"),
    "torch.compile": ("torch.compile", "#c9ccd1"),
    "liger": ("Liger", "#d0b48a"),
    "ours": NAMES["tf_ops"],
}
# Of these TensorFlow's gradient is measured together with the forward pass.
TOGETHER = ("normalization", "softmax")


def draw_rowwise():
    files = {name: json.loads((RESULTS / f"{name}_h200.json").read_text())
             for name in {file for file, _ in ROWWISE.values()}}  # fmt: skip
    figure, axes = plt.subplots(1, 3, figsize=(15, 3.8), sharey=True)
    for axis, direction in zip(axes, ("forward", "backward", "forward and backward")):
        drawn = {label: at for label, at in ROWWISE.items()
                 if direction != "forward and backward" or at[0] in TOGETHER}  # fmt: skip
        width = 0.84 / len(CONTENDERS)
        for i, (file, what) in enumerate(drawn.values()):
            shares = {row["contender"]: row["share"] for row in files[file]["rows"]
                      if row["what"] == f"{what} {direction}"}  # fmt: skip
            for j, (key, (_, color)) in enumerate(CONTENDERS.items()):
                at = i + width * (j - (len(CONTENDERS) - 1) / 2)
                axis.bar(at, 100 * shares.get(key, 0), 0.95 * width, color=color)
        axis.set_xticks(range(len(drawn)), drawn)
        axis.set_title(direction, fontsize=11)
        axis.set_ylim(0, 105)
        axis.axhline(100, color="#dddddd", linewidth=1, zorder=0)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("% of the copy bandwidth")
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for _, color in CONTENDERS.values()]
    labels = [label for label, _ in CONTENDERS.values()]
    figure.legend(handles, labels, frameon=False, ncols=6, loc="lower center", fontsize=9)
    figure.suptitle("Row-wise operations, bfloat16, 16,384 x 4,096 elements (RoPE: 16,384 tokens); "
                    "NVIDIA H200", fontsize=11)  # fmt: skip
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(RESULTS / "rowwise_h200.png", dpi=110)


def main():
    draw_attention()
    if all((RESULTS / f"{file}_h200.json").exists() for file, _ in ROWWISE.values()):
        draw_rowwise()


if __name__ == "__main__":
    main()
