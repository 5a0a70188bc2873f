"""Configure Sphinx.

`uv run sphinx-build -W docs docs/_build` builds the pages and fails on a warning.
"""

import itertools
import re
import sys
from pathlib import Path

from sphinx.application import Sphinx

sys.path[:0] = [
    str(Path(__file__).parent),
    str(Path(__file__).parents[1]),
]  # reference.py, and jobs

project = "raysim"
extensions = ["myst_parser"]
myst_enable_extensions = ["deflist", "dollarmath"]
myst_dmath_allow_space = False
myst_dmath_allow_digits = False
html_math_renderer = "mathml"
myst_heading_anchors = 3
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "raysim"
html_show_copyright = False
html_static_path = ["static"]
html_css_files = ["wide.css"]
smartquotes = False  # quotes are part of what users type
highlight_language = "text"  # docstrings show equations as indented text


def drop_missing_pages(app: Sphinx, page: str, source: list[str]) -> None:
    """Remove pages that do not exist from the table of contents of the index."""
    if page == "index":
        lines = source[0].split("\n")
        written = (
            not re.fullmatch(r"[\w/]+", line) or Path(app.srcdir, f"{line}.md").is_file()
            for line in lines
        )
        source[0] = "\n".join(itertools.compress(lines, written))


def redirect_cluster_guide(app: Sphinx, page: str, source: list[str]) -> None:
    """Link to the cluster guide of the documentation instead of jobs/README.md."""
    source[0] = source[0].replace("](../jobs/README.md", "](reference/cluster.md")


def setup(app: Sphinx) -> None:
    """Write the reference pages before Sphinx reads any page."""
    import mathematics
    import reference

    app.add_html_math_renderer(
        "mathml",
        inline_renderers=(mathematics.visit_inline, None),
        block_renderers=(mathematics.visit_block, None),
    )
    app.connect("builder-inited", lambda app: reference.write(Path(app.srcdir)))
    app.connect("source-read", drop_missing_pages)
    app.connect("source-read", redirect_cluster_guide)
