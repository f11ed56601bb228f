# SPDX-License-Identifier: Apache-2.0
"""The table and the picture of train_and_serve.py."""

import sys

import numpy as np

COLORS = "#e8973a", "#15549a"  # stock, ours


def report(results, turn, args):
    """Prints a table and draws a picture; exits if the losses differ by more than the limit.

    Args:
        results: for each model, ours first, a dict of `losses`, `seconds` (lists with an item for
            each step), `peak_bytes` and `jit`.
        turn: int, steps that a model trained before the other had its turn.
        args: the flags of train_and_serve.py.
    """
    steps = [1, *(args.steps * quarter // 4 for quarter in (1, 2, 3, 4))]
    titles = [f"loss at {step}" for step in steps] + ["ms/step", "peak MB"]
    print(f"\n{'':12}" + "".join(f"{title:>13}" for title in titles))
    for kind, result in results.items():
        result["ms"] = 1e3 * float(np.median(result["seconds"][turn:]))
        cells = [f"{result['losses'][step - 1]:.4f}" for step in steps]
        cells += [f"{result['ms']:.1f}", f"{result['peak_bytes'] / 1e6:.0f}"]
        print(f"{kind:12}" + "".join(f"{cell:>13}" for cell in cells))

    ours, stock = results.values()
    ratio = np.array(ours["losses"][9::10]) / stock["losses"][9::10]
    difference, limit = np.abs(ratio - 1).max(), 0.01 if args.policy == "float32" else 0.03
    mode = "compiled by XLA" if ours["jit"] else "in graph mode"
    measure = "of the GPU allocator" if args.gpu else "resident set beyond that before training"
    memory = ours["peak_bytes"] / stock["peak_bytes"]
    print(f"""
Speed-up {stock["ms"] / ours["ms"]:.2f}x, with {memory:.2f}x the memory.
  Time: median after the first {turn} steps, {mode}; the two took turns of {turn} steps.
  Peak memory: {measure}, each model in a process of its own.
  Losses at every tenth step: within {difference:.1e} of stock's (limit {limit}).""")
    draw(results, args)
    if not difference <= limit:
        sys.exit("The losses DIFFER by more than the limit.")


def draw(results, args):
    """Writes report.png: the loss by step and by time, the time of a step, the memory."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print(f"  No picture without Matplotlib: {sys.executable} -m pip install matplotlib")
        return
    figure = Figure(figsize=(12, 3.8), layout="constrained")
    by_step, by_time, time, memory = figure.subplots(1, 4, width_ratios=(4, 4, 2, 2))
    # Stock first and thick, ours thin on it: both are seen.
    for (kind, result), color, width in zip(reversed(results.items()), COLORS, (5, 1.5)):
        losses, seconds = np.array(result["losses"]), np.array(result["seconds"])
        label = {"text": kind, "color": color, "weight": "bold"}
        by_step.plot(np.arange(args.steps) + 1, losses, color=color, linewidth=width)
        by_step.annotate(xy=(0.6, 0.85 - 0.03 * width), xycoords="axes fraction", **label)
        losses, elapsed = losses.reshape(-1, 10).mean(1), np.cumsum(seconds)[9::10] - seconds[0]
        by_time.plot(elapsed, losses, color=color, linewidth=2)
        by_time.annotate(
            xy=(elapsed[-1], losses[-1]), xytext=(0, -16), textcoords="offset points", ha="right",
            **label,
        )  # fmt: skip
        for axes, value in (time, result["ms"]), (memory, result["peak_bytes"] / 1e6):
            axes.bar_label(axes.bar(kind, value, 0.7, color=color), [f"{value:,.0f}"], color=color)
    by_step.set(title="Loss by step (nats per byte)", xlabel="step")
    by_time.set(title="Loss by time, means of 10 steps", xlabel="seconds since the first step")
    by_time.set_ylim(by_step.get_ylim())
    time.set(title="Step time (ms)", yticks=[])
    memory.set(title="Peak memory (MB)", yticks=[])
    for axes in figure.axes:
        axes.title.set(size="medium", weight="bold")
        axes.spines[["top", "right"] + ["left"] * (axes in (time, memory))].set_visible(False)
    figure.savefig(args.out / "report.png", dpi=160)
    print(f"  Picture: {args.out / 'report.png'}")
