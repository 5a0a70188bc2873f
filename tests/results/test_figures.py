"""Test pictures of probes, methods' reports, domains and the loss decomposition."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from probing import make

from raysim.results import figures
from raysim.results.history import Row
from raysim.training.probe import summarise_probes

pytestmark = pytest.mark.pictures


def size(path: Path) -> tuple[int, int]:
    """Return the width and the height in pixels from the header of a PNG file."""
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", head[16:24])
    return width, height


def test_same_probes_give_the_same_feature_picture(tmp_path: Path) -> None:
    probes = [make(client, rows=6) for client in range(6)]
    for name in ("one.png", "two.png"):
        figures.draw_features(probes, tmp_path / name, "a $title$ with_signs")
    assert size(tmp_path / "one.png") == (1560, 897)
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "two.png").read_bytes()


@pytest.mark.parametrize("scale", [0.0, 1.0, 1e30])
@pytest.mark.parametrize("features", [1, 5])
def test_features_figure_accepts_any_number_and_size_of_features(
    tmp_path: Path, features: int, scale: float
) -> None:
    probe = make(rows=1, features=features)
    probe.features[:] *= np.float32(scale)
    probe.received[:] *= np.float32(scale)
    figures.draw_features([probe], tmp_path / "features.png", "one row")
    assert size(tmp_path / "features.png") == (1560, 897)


def test_features_figure_shows_clients_that_received_the_same_version() -> None:
    probes = [
        make(0, 9),
        make(1, 4),
        make(2, 4),
        make(3, 4),
        make(4, 4),
        make(5, 4),
        make(6, 4, rows=3),
    ]
    probes[2].features[0, 0] = np.inf
    assert [probe.client for probe in figures._comparable_probes(probes)] == [1, 3, 4, 5]
    assert [
        probe.client for probe in figures._comparable_probes([make(0, 2), make(1, 5), make(2, 4)])
    ] == [1]


def test_features_figure_shows_at_most_150_rows_of_10_classes() -> None:
    labels = np.arange(5000) % 100
    rows = figures._shown_rows(labels)
    assert np.bincount(labels[rows]).tolist() == [15] * 10


def test_features_figure_contains_a_note_if_features_are_not_finite(
    tmp_path: Path,
) -> None:
    probe = make()
    probe.features[0, 0] = np.nan
    figures.draw_features([probe], tmp_path / "features.png", "nothing")
    assert size(tmp_path / "features.png") == (1560, 390)


@pytest.mark.parametrize(
    ("clients", "pixels"), [(1, (910, 533)), (2, (1092, 533)), (9, (1638, 910))]
)
def test_figure_of_model_outputs_shows_at_most_six_clients(
    tmp_path: Path, clients: int, pixels: tuple[int, int]
) -> None:
    probes = [make(0, seen=3), *(make(client + 1) for client in range(clients))]
    figures.draw_outputs(probes, tmp_path / "outputs.png", "outputs")
    assert size(tmp_path / "outputs.png") == pixels


def test_figure_of_model_outputs_is_drawn_even_if_clients_have_seen_all_classes(
    tmp_path: Path,
) -> None:
    figures.draw_outputs([make(seen=3)], tmp_path / "outputs.png", "outputs")
    assert size(tmp_path / "outputs.png") == (910, 390)


def test_vertical_axis_of_the_figure_of_model_outputs_fits_the_largest_bar() -> None:
    from matplotlib.figure import Figure

    panels = Figure().subplots(1, 2, sharey=True)
    for ax, highest in zip(panels, (0.1, 0.9), strict=True):
        figures._draw_output(ax, make(), np.array([highest, 0.05, 0.05]))
    assert panels[0].get_ylim()[1] > 0.9
    assert panels[0].get_ylim()[0] == 0


def test_bias_figure_is_drawn_even_if_some_rounds_have_no_probes(tmp_path: Path) -> None:
    probed = summarise_probes([make(0), make(1)])
    everything_seen = summarise_probes([make(seen=3)])
    rows: list[Row] = [
        {"round": 1, "accuracy_global": 0.5},
        {"round": 2, "accuracy_global": None, **probed},
        {"round": 3, "accuracy_global": 0.75, **everything_seen},
    ]
    for name, chosen in (("all", rows), ("seen", rows[2:])):
        assert figures.draw_bias(chosen, tmp_path / f"{name}.png", "bias")
        assert size(tmp_path / f"{name}.png") == (1820, 650)


def test_bias_figure_is_not_drawn_without_probes(tmp_path: Path) -> None:
    rows: list[Row] = [{"round": 1, "accuracy_global": 0.5}, {"round": 2, **summarise_probes([])}]
    assert not figures.draw_bias(rows, tmp_path / "bias.png", "bias")
    assert not figures.draw_bias([], tmp_path / "bias.png", "bias")
    assert list(tmp_path.iterdir()) == []


def test_figures_are_drawn_only_if_the_history_has_their_columns(tmp_path: Path) -> None:
    rows: list[Row] = [
        {
            "round": number,
            "accuracy": 0.5,
            "accuracy.art": 0.1 * number,
            "accuracy.photo": None,
            "decomposition.local_loss": 1.0,
            "fedbss.biased_share": 0.2,
        }
        for number in range(3)
    ]
    for name, draw, prefix in (
        ("methods", figures.draw_reports, "fedbss."),
        ("domains", figures.draw_domains, "accuracy."),
        ("decomposition", figures.draw_decomposition, "decomposition."),
    ):
        assert draw(rows, tmp_path / f"{name}.png", name)
        others = [
            {key: value for key, value in row.items() if not key.startswith(prefix)} for row in rows
        ]
        assert not draw(others, tmp_path / f"no_{name}.png", name)
        assert not (tmp_path / f"no_{name}.png").exists()
        assert size(tmp_path / f"{name}.png")[0] > 500


def test_figure_of_40_domains_draws_40_distinguishable_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.axes import Axes

    styles: list[tuple[object, object]] = []
    plot = Axes.plot

    def record_style(self: Axes, *points: Any, **style: Any) -> Any:
        styles.append((style["color"], style["linestyle"]))
        return plot(self, *points, **style)

    monkeypatch.setattr(Axes, "plot", record_style)
    scores = {f"accuracy.user{number}": number / 40 for number in range(40)}
    rows: list[Row] = [{"round": number, "accuracy": 0.5, **scores} for number in range(2)]
    assert figures.draw_domains(rows, tmp_path / "domains.png", "40 users")
    assert len(set(styles)) == 40
