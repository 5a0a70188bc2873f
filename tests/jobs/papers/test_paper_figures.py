"""Test the programs that draw the papers' figures.

The tests check the figures' names, stored numbers and pictures, and the methods that the figures
need.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from jobs.papers import figure as program
from jobs.papers.figures import FIGURES, figures_of, figures_section, find_figure
from jobs.papers.figures.core import (
    PaperFigure,
    Runs,
    checksum,
    draw,
    image_panel,
    panel,
    read_numbers,
    series,
    write_numbers,
)
from jobs.papers.tables import PAPERS
from raysim.primitives.errors import RefusedError
from raysim.primitives.files import conf_folder

PANELS = [
    panel("lines", "a", "x", "y", [series("one", [1, 2, 3], [0.5, float("nan"), 0.7])]),
    panel("bars", "b", "x", "y", [series("one", [0, 1], [1, 2]), series("two", [0, 1], [3, 4])]),
    panel("points", "c", "x", "y", [series("one", [0, 1], [1, 2])]),
    image_panel("d", np.arange(24).reshape(2, 3, 4)),
]
FIGURE = PaperFigure("fedbss/9", "nothing", "no scale", lambda runs: PANELS)
DIGITS = (
    "data=digits",
    "model=mlp",
    "rounds=1",
    "local.epochs=1",
    "partition.clients=4",
    "schedule.cohort=4",
)


def test_wrong_name_of_a_figure_gets_a_suggestion() -> None:
    assert find_figure("fedbss/5b").name == "fedbss/5b"
    with pytest.raises(RefusedError, match=r"^fedbss/5c: .*fedbss/5"):
        find_figure("fedbss/5c")


def test_page_of_each_paper_shows_figures_and_the_commands_that_draw_them() -> None:
    assert sorted(FIGURES, key=lambda name: PAPERS.index(name.partition("/")[0])) == [*FIGURES]
    for paper in PAPERS:
        text = "\n".join(figures_section(paper))
        assert figures_of(paper)
        for figure in figures_of(paper):
            assert f"python -m jobs.papers.figure {figure.name} data.root=DIR" in text
            assert (f"figures/{figure.file}.png" in text) == (read_numbers(figure) is not None)


def test_figures_leave_out_values_that_are_not_finite() -> None:
    assert PANELS[0]["series"][0]["x"] == [1.0, 3.0]


def test_all_images_of_a_figure_have_the_same_grey_scale() -> None:
    images = np.asarray(PANELS[3]["images"])
    assert (images.shape, images.min(), images.max()) == ((2, 3, 4), 0, 255)


def test_numbers_of_a_figure_are_stored_and_read(tmp_path: Path) -> None:
    runs = Runs(tmp_path, commands=["a", "b", "a"])
    write_numbers(FIGURE, PANELS, runs, tmp_path)
    stored = read_numbers(FIGURE, tmp_path)
    assert stored is not None
    assert (stored["panels"], stored["commands"]) == (PANELS, ["a", "b"])


@pytest.mark.pictures
def test_figure_has_panels_with_lines_and_bars_and_points_and_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    draw(FIGURE, PANELS, tmp_path / "a.png")
    lines, bars, points, images, *rest = figures[0].axes
    assert lines.lines[0].get_xydata().tolist() == [[1.0, 0.5], [3.0, 0.7]]  # type: ignore[union-attr]
    assert sorted(patch.get_height() for patch in bars.patches) == [1, 2, 3, 4]  # type: ignore[attr-defined]
    assert len(points.lines) == 1 and len(images.images) == 1
    assert not any(ax.axison for ax in rest)


@pytest.mark.parametrize("name", FIGURES)
def test_figure_shows_the_stored_numbers(name: str) -> None:
    numbers = read_numbers(FIGURES[name])
    if numbers is None:
        return
    path = conf_folder().parent / "docs" / "papers" / "figures" / f"{FIGURES[name].file}.png"
    drawn = Image.open(path)
    assert drawn.text["Description"] == checksum(numbers["panels"])  # type: ignore[attr-defined]
    assert numbers["commands"]


def test_figure_does_not_repeat_a_finished_run(tmp_path: Path) -> None:
    words = ("method=loss_half", *DIGITS)
    first = Runs(tmp_path, ("seed=3",)).run(*words)
    before = (first.folder / "summary.json").stat().st_mtime_ns
    again = Runs(tmp_path, ("seed=3",)).run(*words)
    assert again.folder == first.folder
    assert (again.folder / "summary.json").stat().st_mtime_ns == before
    assert Runs(tmp_path).run(*words).folder != first.folder


def test_command_of_a_run_contains_no_path_of_this_machine(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    first = runs.run("method=loss_half", *DIGITS)
    runs.run("method=loss_half", *DIGITS, f"init={first.folder}/model.safetensors")
    assert str(tmp_path) not in runs.commands[-1]
    assert f"init=figures/runs/{first.folder.name}/model.safetensors" in runs.commands[-1]


def test_method_named_loss_half_trains_on_samples_with_lowest_or_highest_losses(
    tmp_path: Path,
) -> None:
    runs = Runs(tmp_path, DIGITS)
    low = runs.run("method=loss_half")
    high = runs.run("method=loss_half", "method.loss_half.half=high")
    every = runs.run("method=moved")
    losses = [float(result.rows[-1]["train_loss"] or 0) for result in (low, every, high)]
    assert losses == sorted(losses) and losses[0] < losses[2]
    assert float(every.rows[-1]["moved.moved"] or 0) > 0


def test_method_named_split_points_stores_the_share_of_unbiased_samples_per_client(
    tmp_path: Path,
) -> None:
    words = ("method=split_points", "method.split_points.clients=2")
    rows = Runs(tmp_path, DIGITS).run(*words).rows
    shares = {key: row for row in rows for key, row in row.items() if "client_" in key}
    assert set(shares) == {"split_points.client_0", "split_points.client_1"}
    assert all(0 < float(value or 0) <= 1 for value in shares.values())


def test_figures_program_lists_and_draws_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    program.main([])
    assert capsys.readouterr().out.splitlines()[0].startswith("fedbr/")
    monkeypatch.setitem(FIGURES, FIGURE.name, FIGURE)
    program.main([FIGURE.name, "rounds=2", "--out", str(tmp_path)])
    assert {path.name for path in tmp_path.iterdir()} == {"fedbss-9.json", "fedbss-9.png"}
