# SPDX-License-Identifier: Apache-2.0
"""What a benchmark's program writes: a table, JSON and a picture."""

import json
import pathlib

from tf_ops.benchmarking import gpu, measure


def add_options(parser):
    """Adds the options of every benchmark to an argparse parser."""
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default="", help="text in the labels of the cases to run")
    parser.add_argument(
        "--json",
        type=pathlib.Path,
        metavar="PATH",
        help="of a file to write, or of a folder, which gets NAME_DEVICE.json",
    )
    parser.add_argument("--plot", action="store_true", help="a PNG beside the JSON, or here")


def run(name, cases, options):
    """Measures the cases and writes what the options ask for."""
    cases = [case for case in cases if options.only in case.label]
    if not cases:
        raise SystemExit(f"{name}: no case has {options.only!r} in its label")
    report = measure(name, cases, options.rounds)
    device = gpu().splitlines()[0].split(",")[0].split()[-1].lower() if gpu() else "cpu"
    file = options.json or pathlib.Path(f"{name}_{device}.json")
    if file.is_dir():
        file = file / f"{name}_{device}.json"
    if options.json:
        file.write_text(json.dumps(report, indent=1) + "\n")
    if options.plot:
        plot(report, file.with_suffix(".png"))
        print(file.with_suffix(".png"))


def plot(report, path):
    """Draws the shares of the limit that the contenders reach; needs matplotlib.

    Args:
        report: what `measure` returned.
        path: of the PNG to write.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = report["rows"]
    cases = list(dict.fromkeys(row["case"] for row in rows))
    contenders = list(dict.fromkeys(row["contender"] for row in rows))
    figure, axis = plt.subplots(figsize=(9, 1.5 + 0.2 * len(cases) * (len(contenders) + 1)))
    colors = ["#1565c0", "#9aa0a6", "#d0b48a", "#8e6c8a", "#5b9279", "#c46210"]
    for i, contender in enumerate(contenders):
        mine = [row for row in rows if row["contender"] == contender]
        y = [cases.index(row["case"]) + i / (len(contenders) + 1) for row in mine]
        shares = [100 * row["share"] for row in mine]
        axis.barh(y, shares, 0.9 / (len(contenders) + 1), color=colors[i % 6], label=contender)
        for place, share, row in zip(y, shares, mine):
            time = f"{row['us']:.3g} \u00b5s" if row["us"] < 1000 else f"{row['us'] / 1000:.3g} ms"
            axis.text(share + 0.5, place, time, va="center", fontsize=7)
    axis.axvline(100, color="#444444", linewidth=1)
    middle = (len(contenders) - 1) / (len(contenders) + 1) / 2
    axis.set_yticks([i + middle for i in range(len(cases))], cases, fontsize=8)
    axis.set_ylim(len(cases), -0.4)
    axis.set_xlim(0, max(110, *(110 * row["share"] for row in rows)))
    axis.set_xlabel("% of the nearer limit: a copy, or a large matrix product, on this machine")
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(length=0)
    axis.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=6, frameon=False, fontsize=9)
    figure.savefig(path, dpi=110, bbox_inches="tight")
    plt.close(figure)
