# SPDX-License-Identifier: Apache-2.0
"""Draws the guide's pictures from benchmarks/results/guide_h200.json, into docs/images.

python docs/guide/pictures.py
"""

import json
import pathlib

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.patches import Rectangle

DOCS = pathlib.Path(__file__).resolve().parents[1]
RESULT = json.loads((DOCS.parent / "benchmarks/results/guide_h200.json").read_text())
STEPS = [row for row in RESULT["rows"] if row["list"] == "steps"]
BLUE, GREY, PALE = "#1565c0", "#b0b6bc", "#eef1f4"
THREADS = ["#1565c0", "#ef6c00", "#2e7d32", "#8e24aa", "#c62828", "#00838f", "#6d4c41", "#f9a825"]

# What the threads 0, 1, ... of a warp touch at once: (row, first of 64 elements, how many).
VECTORS = [(0, 8 * thread, 8) for thread in range(8)]
ACCESSES = [
    ("one load of a warp: each thread in a row of its own", [(t, 0, 1) for t in range(8)]),
    ("one load of a warp: 2 bytes a thread, side by side", [(0, t, 1) for t in range(32)]),
    ("one load of a warp: 16 bytes a thread, side by side", VECTORS),
    ("memory is read once; the second look is at shared memory", VECTORS),
    ("four loads a thread, then the arithmetic", [(r, *v[1:]) for r in range(4) for v in VECTORS]),
    ("the weights' loads leave with the row's", [(r, *v[1:]) for r in range(8) for v in VECTORS]),
]
LABELS = {
    0: ["row 0", "row 1", "row 2", "row 3", "row 4", "row 5", "row 6", "row 7"],
    4: ["load 1", "load 2", "load 3", "load 4"],
    5: ["row 1", "row 2", "row 3", "row 4", "scale 1", "scale 2", "scale 3", "scale 4"],
}


def draw_accesses(axis, step):
    title, accesses = ACCESSES[step]
    rows = max(row for row, _, _ in accesses) + 1
    for row in range(rows):
        for sector in range(4):  # of 32 bytes, the least that memory gives
            touched = any(r == row and first // 16 == sector for r, first, _ in accesses)
            color = "#c3cdd8" if touched else PALE
            axis.add_patch(Rectangle((16 * sector, row), 15.6, 0.8, color=color))
    for i, (row, first, count) in enumerate(accesses):
        color = THREADS[(row if step == 0 else i) % 8]
        axis.add_patch(Rectangle((first + 0.1, row), count - 0.4, 0.8, color=color))
    if step == 3:
        axis.annotate("", (32, 2.05), (32, 0.9), arrowprops=dict(arrowstyle="<->", color="#444444"))
        axis.add_patch(Rectangle((0, 2.1), 63.6, 0.8, color="#d7e3f4"))
        axis.text(32, 2.5, "shared memory of the block", ha="center", va="center", fontsize=9)
        rows = 3
    axis.set_xlim(-0.5, 64)
    axis.set_ylim(rows + 0.1, -0.3)
    labels = LABELS.get(step, ["row 0"])
    axis.set_yticks([i + 0.4 for i in range(len(labels))], labels, fontsize=8)
    axis.set_xticks([0, 16, 32, 48, 64], ["0", "32", "64", "96", "128 bytes"], fontsize=8)
    axis.set_title(title, fontsize=10)
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)


def draw_shares(axis, step):
    """The shares of the steps up to this one; all of them for step None."""
    shown = STEPS if step is None else STEPS[: step + 1]
    for i, row in enumerate(shown):
        axis.barh(i, 100 * row["share"], color=BLUE if step in (i, None) else GREY)
        axis.text(100 * row["share"] + 1, i, f"{row['share']:.0%}", va="center", fontsize=9)
    axis.set_yticks(range(len(shown)), [row["name"] for row in shown], fontsize=9)
    axis.set_ylim(len(STEPS) - 0.4, -0.6)
    axis.set_xlim(0, 112)
    axis.set_xticks([0, 50, 100], ["0", "50", "100 %"], fontsize=8)
    axis.set_title("share of the copy bandwidth", fontsize=10)
    axis.tick_params(length=0)
    axis.spines[["top", "right"]].set_visible(False)


def main():
    for step in range(len(STEPS) - 1):  # the last is that of cc
        figure, (left, right) = plt.subplots(1, 2, figsize=(9, 2.7), width_ratios=(1.3, 1))
        draw_accesses(left, step)
        draw_shares(right, step)
        figure.tight_layout()
        figure.savefig(DOCS / "images" / f"guide_step{step + 1}.png", dpi=110)
        plt.close(figure)
    figure, axis = plt.subplots(figsize=(7, 3))
    draw_shares(axis, None)
    axis.set_title(f"RMS normalization, 16384 × 4096, bfloat16, {RESULT['gpu']}", fontsize=10)
    axis.set_xlabel(f"share of a copy's {RESULT['copy_TBps']:.2f} TB/s", fontsize=9)
    figure.tight_layout()
    figure.savefig(DOCS / "images" / "guide_steps.png", dpi=110)


if __name__ == "__main__":
    main()
