# SPDX-License-Identifier: Apache-2.0
"""The site that `make docs` builds: these pages, and one for each function and layer."""

import pathlib
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import tf_ops.layers  # noqa: E402

# autodoc takes a class of another name for an alias. Keras has both names, too.
tf_ops.layers.GroupQueryAttention.__name__ = "GroupQueryAttention"

project = "tf_ops"
release = tf_ops.__version__
html_title = f"tf_ops {release}"
html_theme = "furo"
html_show_copyright = False

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
exclude_patterns = ["_templates"]
templates_path = ["_templates"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
# Pages of reference/ are made from the docstrings at each build, and are not committed.
autosummary_generate_overwrite = True
autodoc_typehints = "none"
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Call arguments", "params_style")]
# A docstring speaks Markdown's code: `x` is code, not a cross-reference.
default_role = "code"
smartquotes = False


def mark_code(app, what, name, obj, options, lines):
    """What is indented after a colon and an empty line is code, as in Markdown."""
    text = re.sub(r":(?=\n\n {4})", "::", "\n".join(lines))
    lines[:] = text.splitlines()


def leave_out_links(app, name, source):
    """README and CONTRIBUTING stand beside the pages of the site, not among them."""
    source[0] = re.sub(r"\[([^]]*)\]\(\.\./(README|CONTRIBUTING)\.md[^)]*\)", r"\1", source[0])


def setup(app):
    app.connect("autodoc-process-docstring", mark_code, priority=400)  # before napoleon
    app.connect("source-read", leave_out_links)
