"""How the documentation is built: `uv run sphinx-build -W docs docs/_build`. A warning ends the build."""

import sys
from pathlib import Path

from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).parent))

project = "raysim"
extensions = ["myst_parser"]
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "raysim"
highlight_language = "text"  # docstrings show equations as indented text
suppress_warnings = ["toc.empty_glob"]


def setup(app: Sphinx) -> None:
    """Writes the pages that come from code and configuration before Sphinx reads any page."""
    import reference

    app.connect("builder-inited", lambda app: reference.write(Path(app.srcdir)))
