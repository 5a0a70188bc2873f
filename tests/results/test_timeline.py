"""Test what the axes of a run's timeline show."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from test_figures import size

from raysim.results import timeline
from raysim.results.history import Row
from raysim.results.jobs import FATES, Jobs
from raysim.results.theme import LIGHT, page_theme

pytestmark = pytest.mark.pictures


def make_jobs(*jobs: tuple[int, float, float, str, int]) -> Jobs:
    """Return a table of jobs. Job k = 1, 2, ... ends in round k.

    jobs: for each job the client, the start and finish time in seconds, the end (such as
    "aggregated" or "lost"), and the staleness in versions.
    """
    client, start, finish, fate, stale = (np.array(each) for each in zip(*jobs, strict=True))
    codes, rounds = (
        np.array([FATES.index(each) for each in fate], np.int8),
        np.arange(1, len(client) + 1),
    )
    return Jobs(client, np.maximum(rounds - 1 - stale, 0), start, finish, codes, rounds, stale)


JOBS = make_jobs(
    (7, 0.0, 2.0, "aggregated", 0),
    (3, 1.0, 4.0, "aggregated", 2),
    (7, 2.0, 3.0, "lost", 0),
    (5, 0.0, 8.0, "discarded", 0),
    (3, 4.0, 7.0, "aggregated", 1),
    (3, 7.0, 10.0, "failed", 0),
    (5, 8.0, 16.0, "in flight", 0),
)
ROWS: list[Row] = [
    {
        "round": n,
        "virtual_seconds": 2.0 * n,
        "wall_seconds": float(n),
        "worker_busy": 0.5 + 0.1 * n,
        "worker_busy_least": 0.1 * n,
    }
    for n in range(1, 6)
]


def draw_panels(jobs: Jobs = JOBS, rows: list[Row] | None = None) -> list[Any]:
    """Draw the timeline of a run; return the panels for clients, fleet and workers.

    A run with stale updates has a fourth panel, which shows the staleness.
    rows: the rows of the history; None takes `ROWS`.
    """
    figure = Figure()
    timeline.fill_figure(figure, jobs, ROWS if rows is None else rows, LIGHT)
    return [ax for ax in figure.axes if ax.get_label() != "<colorbar>"]


def boxes(ax: Any) -> list[PolyCollection]:
    return [each for each in ax.collections if isinstance(each, PolyCollection)]


def spans(bars: PolyCollection) -> list[tuple[float, float, float]]:
    """Return (start, finish, y) for each bar of a panel.

    start, finish: in seconds, the two ends of the bar on the x-axis.
    y: the middle of the bar on the y-axis.
    """
    corners = [path.vertices[:4] for path in bars.get_paths()]
    return [
        (*np.round((c[:, 0].min(), c[:, 0].max(), c[:, 1].mean()), 6).tolist(),) for c in corners
    ]


# --- whether --------------------------------------------------------------------------------------
def test_timeline_is_not_drawn_if_all_jobs_start_and_end_together() -> None:
    rounds = make_jobs(*[(client, 0.0, 1.0, "aggregated", 0) for client in range(4)])
    rounds.round[:] = 1
    assert not timeline.has_events(rounds)
    assert not timeline.has_events(rounds[np.zeros(4, bool)])


@pytest.mark.parametrize("fate", ["lost", "discarded", "failed"])
def test_timeline_is_drawn_if_a_job_is_not_aggregated(fate: str) -> None:
    assert timeline.has_events(make_jobs((0, 0.0, 1.0, "aggregated", 0), (1, 0.0, 1.0, fate, 0)))


def test_timeline_is_drawn_for_stale_jobs_or_long_waiting() -> None:
    assert timeline.has_events(make_jobs((0, 0.0, 1.0, "aggregated", 1)))
    for slow, needed in ((9.0, True), (2.0, False)):
        waiting = make_jobs(
            *[(client, 0.0, 1.0, "aggregated", 0) for client in range(3)],
            (3, 0.0, slow, "aggregated", 0),
        )
        waiting.round[:] = 1
        assert timeline.has_events(waiting) == needed


# --- clients --------------------------------------------------------------------------------------
def test_bar_of_a_job_is_in_the_row_of_its_client_and_coloured_by_staleness() -> None:
    ax = draw_panels()[0]
    assert [label.get_text() for label in ax.get_yticklabels()] == [
        "7",
        "3",
        "5",
    ]  # by their mean seconds
    taken = next(bars for bars in boxes(ax) if bars.get_label() == "aggregated")
    assert spans(taken) == [(0, 2, 0), (1, 4, 1), (4, 7, 1)]
    assert np.asarray(taken.get_array()).tolist() == [0, 2, 1]
    assert taken.norm.vmin == 0 and taken.norm.vmax == 2


def test_bar_of_an_unaggregated_job_is_empty_and_has_a_marker() -> None:
    ax = draw_panels()[0]
    others = [bars for bars in boxes(ax) if bars.get_label() != "aggregated"]
    assert [spans(bars) for bars in others] == [
        [(0, 8, 2)],
        [(2, 3, 0)],
        [(7, 10, 1)],
        [(8, 10, 2)],
    ]
    signs = {
        line.get_label(): line.get_xydata().tolist()
        for line in ax.lines
        if len(line.get_xydata()) == 1
    }
    assert signs == {"discarded": [[8, 2]], "lost": [[3, 0]], "failed": [[10, 1]]}
    assert "in flight at the end" in ax.get_legend_handles_labels()[1]


def test_timeline_axes_show_seconds_and_versions() -> None:
    ax = draw_panels()[0]
    assert ax.get_xlabel() == "virtual time (s)" and ax.get_xlim() == (0, 10)
    above = ax.child_axes[0]
    shown = dict(
        zip(
            above.get_xticks().tolist(),
            [each.get_text() for each in above.get_xticklabels()],
            strict=True,
        )
    )
    assert shown == {2.0: "1", 4.0: "2", 6.0: "3", 8.0: "4", 10.0: "5"}
    hours = JOBS[np.arange(len(JOBS))]
    hours.start[:] *= 3600
    hours.finish[:] *= 3600
    rows: list[Row] = [
        row | {"virtual_seconds": 3600 * (row["virtual_seconds"] or 0)} for row in ROWS
    ]
    panels = draw_panels(hours, rows)
    assert [ax.get_xlabel() for ax in panels[:3]] == ["virtual time (h)"] * 3
    assert spans(boxes(panels[0])[0]) == [(0, 2, 0), (1, 4, 1), (4, 7, 1)]


def test_timeline_of_many_clients_shows_the_fastest_and_slowest_and_random_others() -> None:
    many = make_jobs(
        *[(client, 0.0, 1.0 + (client * 37) % 100, "aggregated", 0) for client in range(100)]
    )
    by_speed = [(client * 73) % 100 for client in range(100)]  # 73 is the inverse of 37 modulo 100
    kinds = dict(timeline.sample_clients(many))
    assert list(kinds) == ["fastest", "random", "slowest"]
    assert (
        kinds["fastest"].tolist() == by_speed[:12] and kinds["slowest"].tolist() == by_speed[-12:]
    )
    places = [by_speed.index(client) for client in kinds["random"].tolist()]
    assert (
        places == sorted(set(places)) and len(places) == 12 and places[0] >= 12 and places[-1] < 88
    )
    assert timeline.sample_clients(many)[1][1].tolist() == kinds["random"].tolist()
    assert "36 of 100 clients" in draw_panels(many)[0].get_title()


def test_client_with_lost_jobs_does_not_count_as_fast() -> None:
    jobs = make_jobs(
        (0, 0.0, 0.1, "lost", 0),
        (0, 1.0, 9.0, "aggregated", 0),
        (1, 0.0, 2.0, "aggregated", 0),
        (2, 0.0, 3.0, "lost", 0),
    )
    assert timeline.sample_clients(jobs)[0][1].tolist() == [1, 2, 0]


def test_timeline_of_a_long_run_shows_jobs_in_the_middle_of_the_run_only() -> None:
    long = make_jobs(*[(k % 5, float(k), k + 1.0, "aggregated", 0) for k in range(1000)])
    assert timeline.shown_window(long, 1000.0) == (420.0, 580.0)
    assert timeline.shown_window(long[np.arange(100)], 100.0) == (0.0, 100.0)
    ax = draw_panels(long, [{"virtual_seconds": 1000.0}])[0]
    assert "a part of the run" in ax.get_title()
    assert len(spans(boxes(ax)[0])) == 160


# --- fleet, workers, staleness --------------------------------------------------------------------
def test_timeline_counts_active_clients_exactly() -> None:
    jobs = make_jobs(
        (0, 0.0, 2.0, "aggregated", 0), (1, 1.0, 3.0, "aggregated", 0), (2, 2.5, 9.0, "lost", 0)
    )
    assert timeline.active_clients(jobs, np.arange(5.0)).tolist() == [1.0, 2.0, 1.5, 1.0]


def test_timeline_shows_fleet_and_workers_over_virtual_time() -> None:
    _, fleet, workers, _ = draw_panels()
    everyone, vain = (stairs.get_data() for stairs in fleet.patches)
    assert everyone.edges[[0, -1]].tolist() == [0, 10]
    assert everyone.values[[0, 18, -1]].tolist() == pytest.approx([2, 3, 2])
    assert vain.values[[0, 30, -1]].tolist() == pytest.approx([1, 2, 1])  # of clients 5, 7 and 3
    assert "2.2 active clients" in fleet.get_title()  # 22 seconds of work in 10
    mean, least = workers.lines
    assert mean.get_xydata().tolist() == [[2.0 * n, 0.5 + 0.1 * n] for n in range(1, 6)]
    assert least.get_ydata().tolist() == [0.1 * n for n in range(1, 6)]
    assert "80%" in workers.get_title()


def test_timeline_explains_missing_times_of_workers() -> None:
    assert (
        draw_panels(rows=[{"round": 1, "virtual_seconds": 10.0}])[2].get_title()
        == "Workers: not measured"
    )


def test_timeline_has_one_worker_curve_if_all_workers_are_equally_busy() -> None:
    workers = draw_panels(rows=[row | {"worker_busy_least": row["worker_busy"]} for row in ROWS])[2]
    assert len(workers.lines) == 1 and workers.get_legend() is None


def test_curve_with_many_points_shows_means_of_neighbouring_points() -> None:
    x, y = timeline.thin_curve(np.arange(1200.0), np.arange(1200.0) % 2, 1200.0)
    assert len(x) == 120 and x[:2].tolist() == [4.5, 14.5] and set(y.tolist()) == {0.5}
    assert timeline.thin_curve(np.arange(3.0), np.ones(3), 3.0)[0].tolist() == [0, 1, 2]


def test_histogram_has_the_share_of_each_staleness() -> None:
    panel = draw_panels()[3]
    assert [bar.get_height() for bar in panel.patches] == pytest.approx([1 / 3] * 3)
    assert [bar.get_x() + bar.get_width() / 2 for bar in panel.patches] == pytest.approx([0, 1, 2])
    assert panel.get_title() == "Staleness: mean 1, at most 2"
    wide = make_jobs(
        *[(k, 0.0, 1.0, "aggregated", stale) for k, stale in enumerate((0, 1, 2, 100))]
    )
    bars = draw_panels(wide)[3].patches
    assert sum(bar.get_height() for bar in bars) == pytest.approx(1)
    assert len(bars) <= 41 and bars[-1].get_height() == 0.25


def test_run_without_staleness_has_no_histogram() -> None:
    assert len(draw_panels(JOBS[~JOBS.staleness.astype(bool)])) == 3


# --- the file -------------------------------------------------------------------------------------
def test_timeline_can_be_drawn_in_light_and_dark_colours(
    tmp_path: Path,
) -> None:
    assert timeline.draw_timeline(JOBS, ROWS, tmp_path / "timeline.png", "a $title$")
    assert size(tmp_path / "timeline.png") == (1690, 1248)
    assert (
        timeline.timeline_png(JOBS, ROWS, "a $title$") == (tmp_path / "timeline.png").read_bytes()
    )
    assert (
        timeline.timeline_png(JOBS, ROWS, "a $title$", dark=True)
        != (tmp_path / "timeline.png").read_bytes()
    )
    assert not timeline.draw_timeline(JOBS[[0]], ROWS, tmp_path / "none.png", "")
    assert not (tmp_path / "none.png").exists()


def test_timeline_titles_and_tick_labels_do_not_overlap() -> None:
    many = make_jobs(
        *[(k % 60, k / 3, k / 3 + 1 + k % 60, "aggregated", k % 7) for k in range(300)]
    )
    with matplotlib.rc_context(page_theme(False)):
        figure = Figure(figsize=(13, 9.6), dpi=50, layout="constrained")
        timeline.fill_figure(
            figure, many, [{"virtual_seconds": 5.0 * n} for n in range(1, 24)], LIGHT
        )
        figure.draw_without_rendering()
    for ax in figure.axes:
        for names in (ax.get_xticklabels(), ax.get_yticklabels()):
            found = [
                each.get_window_extent() for each in names if each.get_text() and each.get_visible()
            ]
            assert not any(left.overlaps(right) for left, right in itertools.pairwise(found))
    titles = [ax.title.get_window_extent() for ax in figure.axes if ax.get_title()]
    assert not any(a.overlaps(b) for k, a in enumerate(titles) for b in titles[k + 1 :])
