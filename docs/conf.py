"""How the documentation is built: `uv run sphinx-build -W docs docs/_build`. A warning ends the build."""

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
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "raysim"
html_show_copyright = False
html_static_path = ["static"]
html_css_files = ["wide.css"]
smartquotes = False  # quotes are part of what users type
highlight_language = "text"  # docstrings show equations as indented text


def listed_if_there(app: Sphinx, page: str, source: list[str]) -> None:
    """Leave out of the contents what is not written; a page that is written and not in them is a warning anyway."""
    if page == "index":
        lines = source[0].split("\n")
        written = (
            not re.fullmatch(r"[\w/]+", line) or Path(app.srcdir, f"{line}.md").is_file()
            for line in lines
        )
        source[0] = "\n".join(itertools.compress(lines, written))


def from_a_page(app: Sphinx, page: str, source: list[str]) -> None:
    """The guide to clusters is a page here, which is made of the file that readers of a checkout are sent to."""
    source[0] = source[0].replace("](../jobs/README.md", "](reference/cluster.md")


def setup(app: Sphinx) -> None:
    """Writes the pages that come from code and configuration before Sphinx reads any page."""
    import reference

    app.connect("builder-inited", lambda app: reference.write(Path(app.srcdir)))
    app.connect("source-read", listed_if_there)
    app.connect("source-read", from_a_page)
