# SPDX-License-Identifier: Apache-2.0
"""Writes docs/performance.md and its pictures, from benchmarks/results: `make report`."""

import pathlib
import re
import statistics

from benchmarks.tables import DEVICES, tables

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "performance.md"
PICTURES = "images/performance"  # from the page
INTRODUCTION = """\
<!-- Written by `make report` from benchmarks/results/*.json; changes here are lost. -->
# Performance

How many times the time of tf_ops others take: above 1, tf_ops is faster. In this table it is the
geometric mean over the cases of a file, in the others it stands beside each time. The share is that
of the nearer limit, a copy or a large matrix product as the same machine does them; in this table
its median. Stock is the same formula in stock TensorFlow or Keras, as a graph and under XLA. On the
CPU `make bench` measures in interleaved rounds, on the GPU `benchmarks/peers/*.py --bench` with
cold caches; times are medians.
"""


def digits(value):
    """Three of them."""
    return f"{value:.0f}" if value >= 100 else f"{value:#.3g}"


def cell(table, case, contender):
    m, ratio = table.cases[case].get(contender), table.ratio(case, contender)
    text = digits(m.ms) if m else ""
    text += f" ({ratio:.2f})" if ratio else ""
    return text + (f", {digits(m.memory)} MB" if m and m.memory else "")


def markdown(table):
    with_share = bool(table.shares())
    lines = [["case, times in ms", *table.contenders, *["share"] * with_share]]
    lines.append(["---"] + ["--:"] * (len(lines[0]) - 1))
    for case in table.cases:
        ours = table.ours(case)
        share = f"{ours.share:.0%}" if ours and ours.share else ""
        cells = [cell(table, case, contender) for contender in table.contenders]
        lines.append([case, *cells, *[share] * with_share])
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    if len(table.cases) <= 16:
        return text
    return f"<details><summary>{len(table.cases)} cases</summary>\n\n{text}\n\n</details>"


def has_picture(table):
    return len(table.compared()) > 1


def section(table):
    file = f"../benchmarks/results/{table.path.name}"
    text = f"### {DEVICES[table.device]}\n\n{table.machine} ([file]({file})). {table.note}".strip()
    if has_picture(table):
        picture = f"{PICTURES}/{table.path.stem}.png"
        text += f"\n\n![{table.title}: times beside tf_ops's]({picture})"
    return f"{text}\n\n{markdown(table)}"


def page(found):
    """The text of the page."""
    lines = ["| | on | forward | with gradients | share |", "|---|---|---|---|--:|"]
    text, title = "", ""
    for table in found:
        anchor = re.sub("[^a-z0-9-]", "", table.title.lower().replace(" ", "-"))
        shares = table.shares()
        share = f"{statistics.median(shares):.0%}" if shares else ""
        cells = [f"[{table.title}](#{anchor})", DEVICES[table.device]]
        cells += [table.summary(False), table.summary(True), share]
        lines.append(f"| {' | '.join(cells)} |")
        text += f"\n## {table.title}\n" * (table.title != title) + f"\n{section(table)}\n"
        title = table.title
    return INTRODUCTION + "\n" + "\n".join(lines) + "\n" + text


def main():
    found = tables()
    PAGE.write_text(page(found))
    try:
        from benchmarks.plot import draw_ratios
    except ImportError as error:
        print(f"{PAGE} is written; no pictures: {error}")
        return
    for table in filter(has_picture, found):
        draw_ratios(table, PAGE.parent / PICTURES / f"{table.path.stem}.png")


if __name__ == "__main__":
    main()
