"""Test that the documentation builds without a warning and agrees with code and settings."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import multiprocessing
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from raysim.experiment.groups import find_groups
from raysim.primitives import checks

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


@pytest.fixture
def from_docs(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(DOCS))
    return importlib.import_module


def test_method_page_shows_costs_and_settings_and_cites_the_paper(from_docs: Any) -> None:
    reference: ModuleType = from_docs("reference")
    page = reference.method_page("scaffold")
    assert "Karimireddy et al., ICML 2020" in page
    assert "## Departures from the paper" in page
    assert re.search(
        r"a client sends, besides its update \| [\d,]+ floats, 0\.99 of the vector", page
    )
    assert "`scaffold.control`" in page
    page = reference.method_page("krum")
    assert "| `method.krum.byzantine` | `1` | an integer; at least 0 |" in page
    assert "| `geometric_median` | both combine the updates (combine)." in page
    assert "`uv run python -m jobs.papers.report fedbr/table1`" in reference.method_page("fedbr")


def test_titled_list_in_a_docstring_gets_a_heading_on_the_method_page(from_docs: Any) -> None:
    reference: ModuleType = from_docs("reference")
    for method, title in {
        "centralized": "How the run works",
        "dp_fedavg": "The two epsilons",
        "hetlora": "Choices that the paper leaves open",
    }.items():
        assert f"\n\n## {title}\n\n- " in reference.method_page(method)
    sentence = "A run can choose:\n- one\n- two"
    assert reference.prose(sentence) == sentence


def test_configuration_page_lists_every_key(from_docs: Any) -> None:
    page = from_docs("reference").configuration()
    for key in (
        "schedule.max_staleness",
        "fleet.dropout",
        "local.nesterov",
        "evaluate.finetune.epochs",
        "runtime.gpus",
    ):
        assert f"| `{key}` |" in page
    assert re.search(r"\| `faults.tolerate` \| `0.1` \| a number; from 0 to 1 \| share", page)
    for group in ("schedule", "selection", "fleet", "data", "partition", "model"):
        for option in find_groups().files[group]:
            assert f"### {group}={option}\n" in page


def test_reference_explains_every_option_of_the_configuration(from_docs: Any) -> None:
    reference: ModuleType = from_docs("reference")
    pages = [reference.configuration()]
    for name, method in reference.instances().items():
        if name in find_groups().files["method"]:
            pages.append(reference._options(method))
    lacking = re.findall(r"^\| `([\w.]+)` \|.*\|  ?\|$", "\n".join(pages), re.MULTILINE)
    assert lacking == []


def test_meaning_of_an_option_is_shown_whole_if_it_contains_a_colon(from_docs: Any) -> None:
    class Trimming:
        """Leave out the smallest and the largest numbers, equally many at each end.

        share: the share that is left out at each end: 0.2 leaves out 20 %.
        size: the number of all numbers.
        """

        def __init__(self, share: float, size: int):
            self.share, self.size = share, size

    described = from_docs("reference").described
    assert (
        described(Trimming, "share")
        == "the share that is left out at each end: 0.2 leaves out 20 %"
    )
    assert described(Trimming, "size") == "the number of all numbers"


def test_tables_on_the_page_about_many_nodes_equal_computed_tables(from_docs: Any) -> None:
    many: ModuleType = from_docs("many_nodes")
    text = many.PAGE.read_text(encoding="utf-8")
    assert many.fill_tables(text) == text, "uv run python docs/many_nodes.py"
    assert all(table in text for table in many.tables().values())
    vector, small = 4e9, many.Cluster()
    alone, combined = (sum(s.bytes for s in many.stages(small, 1e9, way)) for way in (False, True))
    assert (alone, combined) == ((7 + 112) * vector, (7 + 14) * vector), (
        "a version to 7 nodes, and 128 sums, 16 of them there already; or 8 between nodes and 6"
    )


def test_every_panel_of_the_asynchrony_pictures_contains_data(from_docs: Any) -> None:
    pictures = from_docs("pictures")
    panels = pictures.schedules().axes
    assert len(panels) == len(pictures.SCHEDULES)
    assert all(len(panel.patches) > 10 and panel.lines for panel in panels)
    assert all(panel.has_data() for panel in pictures.fleets().axes)
    assert all(panel.has_data() for panel in pictures.staleness().axes)


def test_functions_in_the_table_of_extending_md_have_the_listed_arguments() -> None:
    table = re.findall(
        r"^\| `(\w+)\((.*?)\)` \|", (DOCS / "extending.md").read_text(), re.MULTILINE
    )
    assert len(table) > 5
    for name, arguments in table:
        given = [each.strip("= ") for each in arguments.split(",")]
        assert {*given} <= {*inspect.signature(getattr(checks, name)).parameters}, name


def test_links_between_pages_are_valid() -> None:
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.glob("*.md")):
        for link in re.findall(r"\]\(([^)#:\s]+)(?:#[\w-]+)?\)", path.read_text()):
            made = link.startswith("reference/")
            assert made or (path.parent / link).exists(), f"{path.name}: {link}"


@pytest.mark.parametrize(
    ("text", "tex"),
    [
        ("x_bar = c_i+ - rho^tau_i", r"\bar{x}=c_{i}^{+}-\rho^{\tau_{i}}"),
        ("theta <- theta - eta_t <g, h>", r"\theta\leftarrow\theta-\eta_{t}\langleg,h\rangle"),
        ("w / sqrt(sum_k v~)", r"w/\sqrt{\sum_{k}\tilde{v}}"),
        ("v <- u    every local step", r"v\leftarrowu\quad\text{everylocalstep}"),
    ],
)
def test_formulas_in_docstrings_are_converted_to_tex(text: str, tex: str, from_docs: Any) -> None:
    typeset = from_docs("mathematics").typeset
    assert typeset(text, str).replace(" ", "") == tex
    assert typeset("only words of a sentence", str) is None


def build(folder: Path, errors: Path) -> None:
    """Build the HTML documentation, and end this process with Sphinx's exit status.

    folder: the folder for the results, with the pages in `site` and the parsed sources in `read`.
    errors: the file for warnings and errors.
    """
    from sphinx.cmd.build import main

    words = ["-W", "--keep-going", "-q", "-d", str(folder / "read"), str(DOCS)]
    with errors.open("w") as stream, contextlib.redirect_stderr(stream):
        status = main([*words, str(folder / "site")])
    sys.exit(status)


@pytest.mark.slow
@pytest.mark.pictures
def test_documentation_builds_without_warnings(tmp_path: Path) -> None:
    errors = tmp_path / "errors"
    # The new process has the modules that this one has imported, and what the tests above computed.
    building = multiprocessing.get_context("fork").Process(target=build, args=(tmp_path, errors))
    building.start()
    building.join()
    assert building.exitcode == 0, errors.read_text()
    pages = {path.stem for path in (tmp_path / "site" / "reference" / "methods").glob("*.html")}
    assert pages == {"fedavg", *find_groups().files["method"]}
