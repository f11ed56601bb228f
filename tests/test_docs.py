# SPDX-License-Identifier: Apache-2.0
"""The pages in docs/ and at the root: their links lead somewhere, their code runs.

What is done with a code block depends on its language:

    python          runs; the blocks of a page share their names, and an empty folder
    sh              bash parses it; the targets of make and the files that it names are there
    cpp, c, cuda    is part of a source file, which the build compiles
    json            is parsed
    none, text      no code: output, a diagram. A command in it is an error

A comment on the line before a block asks for something else:

    <!-- block: excerpt PATH -->    these very lines are in PATH, but for their indentation
    <!-- block: compile -->         it is parsed, and does not run: what it needs is not here
"""

import json
import pathlib
import re
import shutil
import subprocess
import textwrap
import types

import pytest

import tf_ops

ROOT = pathlib.Path(__file__).parents[1]
GENERATED = ROOT / "docs" / "reference"
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
    if GENERATED not in path.parents
}
FENCE = re.compile(
    r"(?:^ *<!-- block: (?P<mark>.*?) -->\n)?"
    r"^(?P<indent> *)(?P<fence>```+)(?P<language>[^\n`]*)\n(?P<code>.*?)^(?P=indent)(?P=fence)$",
    re.M | re.S,
)
TARGETS = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))

COMMANDS = re.findall(r'add_parser\("(\w+)"', (ROOT / "tf_ops/__main__.py").read_text())


@pytest.fixture(autouse=True)
def device():
    """A page chooses its own."""


def blocks(text):
    """(line, language, mark, code) of each fenced block."""
    for match in FENCE.finditer(text):
        line = text[: match.start("code")].count("\n")
        code = textwrap.dedent(match["code"])
        yield line, match["language"].strip(), match["mark"], code


def lines_of(code):
    return [line.strip() for line in code.splitlines() if line.strip()]


def excerpt_gaps(path, code):
    """Lines count, in order and side by side; indentation and empty lines do not."""
    source = ROOT / path
    if not source.is_file():
        return [f"{path} is not there"]
    whole, part = lines_of(source.read_text()), lines_of(code)
    places = range(len(whole) - len(part) + 1)
    return [] if any(whole[i : i + len(part)] == part for i in places) else [f"is not in {path}"]


def shell_gaps(code):
    parses = subprocess.run(["bash", "-n"], input=code, text=True).returncode == 0
    return command_gaps(code) + ([] if parses else ["bash does not parse it"])


def command_gaps(code):
    """Targets of make, commands of tf_ops and files that are named and not there."""
    gaps = []
    code = re.sub(r"(?:^|\s)#.*", "", code)
    for arguments in re.findall(r"(?:^|[;&|] *)make\b([^;&|\n]*)", code, re.M):
        words = re.sub(r"-C \S+", "", re.sub(r"'[^']*'|\"[^\"]*\"", "", arguments)).split()
        for word in words:
            if re.fullmatch(r"[a-z]+", word) and word not in TARGETS:
                gaps.append(f"the Makefile has no target {word}")
    for command in re.findall(r"python3? -m tf_ops (\w+)", code):
        if command not in COMMANDS:
            gaps.append(f"python -m tf_ops has no command {command}")
    files = re.findall(r"\b(?:tests|benchmarks|examples|docs|cc)/[\w/]+\.\w+", code)
    return gaps + [f"{file} is not there" for file in files if not (ROOT / file).exists()]


def block_gaps(language, mark, code):
    """What is wrong with a block that is not run."""
    kind, _, path = (mark or "").partition(" ")
    if kind not in ("", "excerpt", "compile"):
        return [f"has an unknown mark, {mark}"]
    if kind == "excerpt":
        return excerpt_gaps(path, code)
    if language == "python":
        try:
            compile(code, "block", "exec")
        except SyntaxError as error:
            return [f"does not parse: {error}"]
        return []
    if language == "sh":
        return shell_gaps(code)
    if language == "json":
        return [] if json.loads(code) is not None else ["is empty"]
    if language in ("cpp", "c", "cuda"):
        return ["needs <!-- block: excerpt PATH -->"]
    if language in ("", "text"):
        commands = re.findall(r"^(?:\$ |make\b|pip |python3? |import |#include)", code, re.M)
        return [f"holds {commands[0]!r}, so it has a language"] if commands else []
    return [] if language.startswith("{") else [f"has the unknown language {language}"]


@pytest.mark.parametrize("page", PAGES)
def test_blocks(page):
    gaps = [
        f"{page}:{line} {gap}"
        for line, language, mark, code in blocks(PAGES[page])
        for gap in block_gaps(language, mark, code)
    ]
    assert not gaps, "\n".join(gaps)
    fences = re.findall(r"^ *```", PAGES[page], re.M)
    assert len(fences) == 2 * len(list(blocks(PAGES[page]))), "a fence is not closed"


SOURCES = "".join(
    path.read_text()
    for folder in ("cc", "tf_ops")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".h", ".cc", ".cu", ".cuh", ".mk", ".py")
)


def span_gaps(text):
    """Of `code` within a line: commands, names and variables of ours that are not there."""
    gaps = []
    for span in re.findall(r"`([^`\n]+)`", FENCE.sub("", text)):
        if re.match(r"make [a-z]", span) or "-m tf_ops " in span:
            gaps += command_gaps(span)
        for path in re.findall(r"^tf_ops((?:\.[A-Za-z]\w*)+)", span):
            owner = tf_ops
            for name in path[1:].split("."):
                owner = getattr(owner, name, None)
            gaps += [] if owner is not None else [f"there is no tf_ops{path}"]
        for variable in re.findall(r"\bTF_OPS_[A-Z_]+\b", span):
            gaps += [] if variable in SOURCES else [f"nothing reads {variable}"]
    return gaps


@pytest.mark.parametrize("page", PAGES)
def test_spans(page):
    assert not (gaps := span_gaps(PAGES[page])), f"{page}: {gaps}"


RUN = {
    page: code
    for page, text in PAGES.items()
    if (code := [block for block in blocks(text) if block[1] == "python" and not block[2]])
}


@pytest.mark.parametrize("page", RUN)
def test_python_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "page"}
    for line, _, _, code in RUN[page]:
        # The line numbers of an error are those of the page.
        exec(compile("\n" * line + code, str(ROOT / page), "exec"), names)


def anchors(text):
    """Those that GitHub and the site make of the headings."""
    headings = re.findall(r"^#+ +(.*)$", FENCE.sub("", text), re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings}


def link_gaps(page, text):
    gaps = []
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))):
        if re.match(r"https://", target):
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        if not file.exists():
            gaps.append(f"{page}: {target} leads nowhere")
        elif anchor and anchor not in anchors(file.read_text()):
            gaps.append(f"{page}: {target}: no such heading")
    return gaps


def test_links():
    gaps = [gap for page, text in PAGES.items() for gap in link_gaps(page, text)]
    assert len(PAGES) > 5 and not gaps, "\n".join(gaps)


def test_every_page_is_in_the_site():
    index = PAGES["docs/index.md"]
    for page in PAGES:
        name = page.removeprefix("docs/").removesuffix(".md")
        if page.startswith("docs/") and name != "index":
            assert re.search(rf"^{name}$", index, re.M), f"docs/index.md does not list {page}"


def test_every_function_has_a_page():
    text = PAGES["docs/reference.md"]
    names = {n for n in tf_ops.__all__ if not isinstance(getattr(tf_ops, n), types.ModuleType)}
    names |= {f"layers.{name}" for name in tf_ops.layers.__all__}
    losses = [name for name, value in vars(tf_ops.losses).items() if isinstance(value, type)]
    names |= {f"losses.{name}" for name in losses if not name.startswith("_")}
    missing = [name for name in names if not re.search(rf"^   {re.escape(name)}$", text, re.M)]
    assert not missing, f"docs/reference.md lacks {missing}"


# The guide's figures


RESULT = json.loads((ROOT / "benchmarks/results/guide_h200.json").read_text())


def figures():
    """Every time, rate and share that guide_h200.json knows, as the guide writes them."""
    known = {f"{RESULT[name]:.2f} TB/s" for name in ("copy_TBps", "copy_of_128_MiB_TBps")}
    known |= {f"{RESULT['copy_of_128_MiB_TBps'] / RESULT['copy_TBps']:.0%}", "100%"}
    for row in RESULT["rows"]:
        known |= {f"{row['us']:.0f} µs", f"{row['TBps']:.2f} TB/s", f"{row['share']:.0%}"}
        known.add(f"{row['share']:.1%}")
    for row in RESULT["counters"]:
        known |= {f"{row['dram_read_MB']:.0f} MB", f"{row['dram_write_MB']:.0f} MB"}
        known |= {f"{row['warps_active_percent']:.0f}%", f"{row['l2_read_hit_percent']:.1f}%"}
    return known


def figure_gaps(text, known):
    text = re.sub(r"(?<=\d),(?=\d)", "", FENCE.sub("", text))
    found = re.findall(r"(?<![\d.])\d[\d.]* ?(?:µs|TB/s|%|MB)", text)
    return [figure for figure in found if figure not in known]


@pytest.mark.parametrize("page", ["docs/guide/steps.md", "docs/guide/profiling.md"])
def test_figures_are_those_that_were_measured(page):
    known = figures()
    assert not (gaps := figure_gaps(PAGES[page], known)), f"{page}: {gaps}"
    assert figure_gaps("It takes 17.5 µs.", known) == ["17.5 µs"]


def test_steps_table_is_that_of_the_measurement():
    rows = [row for row in RESULT["rows"] if row["list"] == "steps"]
    for row in rows:
        cells = [
            row["name"],
            f"{row['us']:,.0f} µs",
            f"{row['TBps']:.2f} TB/s",
            f"{row['share']:.0%}",
        ]
        assert f"| {' | '.join(cells)} |" in PAGES["docs/guide/steps.md"]


@pytest.mark.parametrize(
    ("gaps", "complaint"),
    [
        (block_gaps("python", None, "x = ("), "does not parse"),
        (block_gaps("sh", None, "make tset"), "no target tset"),
        (block_gaps("sh", None, "make test OP=softmax ARGS='-k xla'  # make this"), None),
        (block_gaps("sh", None, "python -m tf_ops inform"), "no command inform"),
        (block_gaps("sh", None, "python tests/none.py"), "tests/none.py is not there"),
        (block_gaps("sh", None, "for x in"), "bash does not parse"),
        (block_gaps("cpp", None, "int x;"), "needs"),
        (block_gaps("cpp", "excerpt cc/common/cpu.h", "int no_such_line;"), "is not in"),
        (block_gaps("cpp", "excerpt cc/none.h", "int x;"), "is not there"),
        (block_gaps("cuda", "skip", "int x;"), "unknown mark"),
        (block_gaps("", None, "make test"), "has a language"),
        (block_gaps("rust", None, ""), "unknown language"),
        (span_gaps("`make tset`"), "no target tset"),
        (span_gaps("`python -m tf_ops inform`"), "no command inform"),
        (span_gaps("`tf_ops.layers.None1()`"), "no tf_ops.layers.None1"),
        (span_gaps("`TF_OPS_NONE=1`"), "nothing reads TF_OPS_NONE"),
        (span_gaps("`make test`, `tf_ops.rms_normalization(x)`, `TF_OPS_ISA=avx2`"), None),
        (link_gaps("README.md", "[a](docs/none.md)"), "leads nowhere"),
        (link_gaps("README.md", "[a](docs/design.md#none)"), "no such heading"),
        (link_gaps("README.md", "[a](docs/index.md) `[a](none)`"), None),
    ],
)
def test_checks_are_seen_to_fail(gaps, complaint):
    assert any(complaint in gap for gap in gaps) if complaint else not gaps


@pytest.mark.skipif(not shutil.which("nvcc"), reason="no nvcc")
def test_steps_compile(tmp_path):
    """For one architecture, the kernels alone: `make guide` builds the whole program."""
    source = tmp_path / "steps.cu"
    source.write_text('#include "docs/guide/rms_steps.cuh"\n')
    command = ["nvcc", "-std=c++17", "-arch=sm_90", f"-I{ROOT}", "-cubin", "-o", tmp_path / "o"]
    done = subprocess.run([*command, source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
