# SPDX-License-Identifier: Apache-2.0
"""Writes an op that works, to be changed into another.

`templates` is a whole package, my_ops, of one op, scaled_square: they are copied and renamed.
"""

import importlib.util
import keyword
import pathlib
import re

TEMPLATES = pathlib.Path(__file__).with_name("templates")
_LEFT = re.compile(r"__pycache__|_cache/|build/|\.so$")
WORDS = re.compile(r"[a-z][a-z0-9]+(_[a-z][a-z0-9]+)*")


def camel_case(name):
    return "".join(word.capitalize() for word in name.split("_"))


def package_of(folder):
    """The name of the package in `folder`, tf_ops in a checkout of it; None if there is none."""
    makefile = folder / "Makefile"
    found = re.search(
        r"^PACKAGE +:= (\w+)$", makefile.read_text() if makefile.exists() else "", re.M
    )
    return found and found[1]


def sort_imports(text, package):
    """Puts includes and imports into the order of clang-format and ruff, which depends on names."""
    text = re.sub(
        r'(#include ".*\n)+', lambda block: "".join(sorted(block[0].splitlines(True))), text
    )
    imports = re.findall(r"^(?:import|from) .*\n", text, re.M)
    if not imports:
        return text

    def section(line):
        module = line.split()[1].partition(".")[0]
        return 2 if module == package else 0 if module in {"functools", "pathlib"} else 1

    ordered = sorted(imports, key=lambda line: (line.startswith("from"), line.split()[1]))
    sections = ["".join(line for line in ordered if section(line) == i) for i in range(3)]
    start, end = text.index(imports[0]), text.index(imports[-1]) + len(imports[-1])
    return text[:start] + "\n".join(filter(None, sections)) + text[end:]


def export(text, package, name):
    """The text of the package's __init__.py with the function `name` in it."""

    def insert(lines, line):
        return "".join(sorted({*lines.splitlines(True), line}, key=str.lower))

    of_op = f"from {package}._ops.{name} import {name}\n"
    imports = re.search(rf"(from {package}\._ops\..*\n)+", text)
    text = text[: imports.start()] + insert(imports[0], of_op) + text[imports.end() :]
    names = re.search(r'(?<=__all__ = \[\n)(    ".*",\n)+', text)
    return text[: names.start()] + insert(names[0], f'    "{name}",\n') + text[names.end() :]


def write_op(name, folder):
    """Writes the op `name`: its folder in cc/, its module, test and benchmark.

    Args:
        name: of the op and its function, such as "scaled_square".
        folder: of a checkout of tf_ops or of a package that was written before; of a new package
            if there is no such folder, or nothing in it.

    Returns:
        The files written or changed, relative to `folder`.

    Raises:
        ValueError: a name that will not do, or something is there already; nothing is written.
    """
    package = package_of(folder)
    is_new = package is None
    if is_new:
        package = folder.resolve().name
        if folder.exists() and any(folder.iterdir()):
            raise ValueError(f"{folder} holds no package that was written by this command")
        known = importlib.util.find_spec(package) if package.isidentifier() else None
        if known and known.origin:
            raise ValueError(f"{package} is a package already, in {known.origin}")
    for word in (name, package):
        if not WORDS.fullmatch(word) or keyword.iskeyword(word):
            raise ValueError(f"{word!r}: a name is words of small letters and digits, like_this")
    renamed = {"scaled_square": name, "my_ops": package}
    renamed |= {camel_case(old): camel_case(new) for old, new in renamed.items()}
    rename = lambda text: re.sub("|".join(renamed), lambda found: renamed[found[0]], text)

    files = {}
    for path in sorted(TEMPLATES.rglob("*")):
        path = path.relative_to(TEMPLATES)
        # Not what building or checking the templates left there.
        if not (TEMPLATES / path).is_file() or _LEFT.search(str(path)):
            continue
        if is_new or "scaled_square" in path.name:
            text = rename((TEMPLATES / path).read_text())
            files[rename(str(path))] = sort_imports(text, package)
    present = [file for file in files if (folder / file).exists()]
    if present:
        raise ValueError(f"{folder / present[0]} is there already")
    if not is_new:
        init = f"{package}/__init__.py"
        files[init] = export((folder / init).read_text(), package, name)
    for file, text in files.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text)
    return list(files)
