"""Test comparisons of settings for papers: tables, marks of the best value, costs and figures."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

import raysim
from raysim.primitives.errors import RefusedError
from raysim.results import comparison, page, print_figures
from raysim.results.curves import AXES, mean_curve
from raysim.results.history import read_history, summarise, write_history, write_json
from raysim.results.report import TableView

FEDAVG = [0.50, 0.52, 0.49, 0.51]
FEDPROX = [0.70, 0.71, 0.70, 0.72]
MOON = [0.51, 0.50, 0.51, 0.50]


def save(folder: Path, method: str, seed: int, final: float, floats: int = 1000) -> Path:
    """Write the folder of a run with three rounds, and return the folder.

    final: the accuracy after the last round; it is lower in earlier rounds.
    floats: how many floats the clients receive, and also send, in a round.
    """
    folder.mkdir(parents=True)
    rows: list[dict[str, int | float | None]] = [
        {
            "round": n,
            "virtual_seconds": 2.0 * n,
            "wall_seconds": 0.5 * n,
            "floats_down": floats * n,
            "floats_up": floats * n,
            "train_loss": 1.0 / n,
            "accuracy": share * final,
            "accuracy_worst": 0.1,
            "accuracy_global": None,
            "loss_global": None,
            "clients": 2,
            "failures": 0,
        }
        for n, share in enumerate((0.5, 0.8, 1.0), 1)
    ]
    write_history(rows, folder / "history.parquet")
    (folder / "config.yaml").write_text(f"{{method: {{{method}: {{}}}}, seed: {seed}}}")
    write_json(summarise(rows), folder / "summary.json")
    return folder


@pytest.fixture
def study(tmp_path: Path) -> Path:
    for method, finals in {"fedavgm": FEDAVG, "fedprox": FEDPROX, "moon": MOON}.items():
        for seed, final in enumerate(finals):
            save(tmp_path / "runs" / f"{method}-{seed}", method, seed, final)
    return tmp_path


def test_report_marks_settings_that_differ_significantly_from_the_first(study: Path) -> None:
    table = raysim.report(study, order="fedavgm,moon").results.set_index("setting")
    assert list(table.index) == ["fedavgm", "moon", "fedprox"]
    assert table["final"].tolist() == pytest.approx(
        [np.mean(FEDAVG), np.mean(MOON), np.mean(FEDPROX)]
    )
    assert table["final_mark"].tolist() == ["", "", "†"]
    from_best = raysim.report(study).results.set_index("setting")
    assert from_best["final_mark"].to_dict() == {"fedprox": "", "fedavgm": "‡", "moon": "‡"}


def test_settings_are_compared_by_paired_t_tests_with_holm_correction(study: Path) -> None:
    table = raysim.report(study, order="fedavgm", columns=["final"]).differences
    rows = {row["compared"]: row for row in table.to_dict("records")}
    p = {
        name: float(stats.ttest_rel(finals, FEDAVG).pvalue)
        for name, finals in (("fedprox", FEDPROX), ("moon", MOON))
    }
    assert {row["reference"] for row in rows.values()} == {"fedavgm"}
    assert rows["fedprox"]["p"] == pytest.approx(p["fedprox"])
    assert rows["fedprox"]["holm"] == pytest.approx(2 * p["fedprox"])
    assert rows["moon"]["holm"] == pytest.approx(max(2 * p["fedprox"], p["moon"]))


def test_settings_with_different_data_are_not_compared(tmp_path: Path) -> None:
    for method, finals in {"fedavgm": FEDAVG, "fedprox": FEDPROX}.items():
        for alpha in (0.1, 1.0):
            for seed, final in enumerate(finals):
                folder = save(tmp_path / f"{method}-{alpha}-{seed}", method, seed, final)
                config = (
                    f"{{method: {{{method}: {{}}}}, partition: {{alpha: {alpha}}}, seed: {seed}}}"
                )
                (folder / "config.yaml").write_text(config)
    report = raysim.report(sorted(tmp_path.iterdir()), columns=["final"])
    rows = report.differences
    assert len(rows) == 2
    alphas = [
        re.findall(r"alpha=([\d.]+)", " ".join(row))
        for row in rows[["compared", "reference"]].values
    ]
    assert all(len(set(pair)) == 1 for pair in alphas)
    text = report.latex()
    assert text.count(r"\textbf") == 2  # the best of each
    # The rows of one split are neighbours, with a rule between the two splits.
    assert re.findall(r"alpha=([\d.]+)|(midrule)", text)[1:] == [
        *[("0.1", ""), ("0.1", ""), ("", "midrule"), ("1.0", ""), ("1.0", "")]
    ]


def test_settings_are_ordered_by_the_mean_of_their_seeds(tmp_path: Path) -> None:
    for method, finals in {"fedavgm": [0.9, 0.3], "fedprox": [0.7, 0.7]}.items():
        for seed, final in enumerate(finals):
            save(tmp_path / f"{method}-{seed}", method, seed, final)
    report = raysim.report(sorted(tmp_path.iterdir()))
    assert [group.label for group in report.groups] == ["fedprox", "fedavgm"]


def test_latex_table_of_costs_shows_each_score_once(study: Path) -> None:
    text = raysim.report(study, thresholds=[0.3, 0.4]).latex_thresholds()
    scores = re.findall(r"^([\d.]*) & (?:fedavgm|fedprox|moon)", text, re.MULTILINE)
    assert scores == ["0.30", "", "", "0.40", "", ""]
    assert text.count(r"\midrule") == 2


def test_two_seeds_are_too_few_for_a_significance_test(tmp_path: Path) -> None:
    for method in ("fedavgm", "fedprox"):
        for seed in (0, 1):
            save(tmp_path / f"{method}-{seed}", method, seed, 0.5 + 0.1 * seed)
    report = raysim.report(sorted(tmp_path.iterdir()))
    assert "final_mark" not in report.results
    assert "3 seeds" in report.latex()


def test_percent_flag_multiplies_scores_and_curves_by_100(study: Path) -> None:
    plain, percent = (raysim.report(study, percent=flag) for flag in (False, True))
    for key in ("final", "final_std", "best5_mean", "accuracy_worst"):
        assert percent.results[key].tolist() == pytest.approx((100 * plain.results[key]).tolist())
    assert percent.results["rounds"].equals(plain.results["rounds"])
    assert r"final (\%)" in percent.latex()
    heights = [
        report.figures["accuracy-round"].axes[0].get_lines()[0].get_ydata()
        for report in (plain, percent)
    ]
    assert np.asarray(heights[1]) == pytest.approx(100 * np.asarray(heights[0]))


def test_percent_flag_applies_to_thresholds_and_chosen_columns(study: Path) -> None:
    text = raysim.report(study, percent=True).text()
    assert re.search(r"to \d0 %", text) and not re.search(r"to 0\.\d", text)
    columns = ["accuracy_global_best", "accuracy_worst", "rounds_to.0.50"]
    plain, percent = (raysim.report(study, percent=f, columns=columns[1:]) for f in (False, True))
    assert "accuracy_worst" in plain.results
    assert "rounds to 50 %" in percent.text()
    with pytest.raises(RefusedError, match="--columns"):
        raysim.report(study, percent=True, columns=columns)


def test_costs_are_counted_until_a_threshold_is_first_reached(study: Path) -> None:
    table = raysim.report(study, thresholds=[0.5], order="fedavgm").thresholds.set_index("setting")
    row = table.loc["fedprox"]
    # 0.8 * 0.7 is above 0.5, so each seed needs two rounds of 2,000 floats of four bytes.
    assert (row["rounds"], row["bytes"], row["virtual_seconds"]) == (2, 16_000, 4.0)
    assert row["wall_seconds"] == 1.0
    assert table.loc["fedavgm", "reached"] == 3  # of FEDAVG, 0.49 never reaches it
    assert table.loc["fedavgm", "rounds"] == 3


def test_lowest_cost_is_marked_in_each_group_of_settings_with_the_same_data(tmp_path: Path) -> None:
    for method, final in {"fedavgm": 0.7, "fedprox": 1.0}.items():
        for alpha in (0.1, 1.0):
            for seed in range(3):
                # A larger alpha needs fewer rounds, so it would always be the best.
                score = final if alpha == 1.0 else 0.8 * final
                folder = save(tmp_path / f"{method}-{alpha}-{seed}", method, seed, score)
                config = (
                    f"{{method: {{{method}: {{}}}}, partition: {{alpha: {alpha}}}, seed: {seed}}}"
                )
                (folder / "config.yaml").write_text(config)
    text = raysim.report(sorted(tmp_path.iterdir()), thresholds=[0.5]).latex_thresholds()
    best = [line for line in text.splitlines() if "textbf" in line]
    assert [re.findall(r"fedprox, alpha=([\d.]+)", line) for line in best] == [["1.0"], ["0.1"]]


def test_order_set_by_the_user_applies_only_among_settings_with_equal_data(
    tmp_path: Path,
) -> None:
    for method in ("fedavgm", "fedprox", "moon"):
        for alpha in (0.1, 1.0):
            folder = save(tmp_path / f"{method}-{alpha}", method, 0, 0.5 + alpha / 10)
            config = f"{{method: {{{method}: {{}}}}, partition: {{alpha: {alpha}}}, seed: 0}}"
            (folder / "config.yaml").write_text(config)
    names = [f"{folder.name}" for folder in sorted(tmp_path.iterdir())]
    report = raysim.report(sorted(tmp_path.iterdir()), order=["moon-0.1", "moon-1.0"])
    alphas = [group.label[-3:] for group in report.groups]
    assert sorted(group.label for group in report.groups) == names
    assert alphas == ["0.1", "0.1", "0.1", "1.0", "1.0", "1.0"]
    assert report.groups[0].label == "moon-0.1" and report.groups[3].label == "moon-1.0"


def test_cost_is_not_marked_best_if_a_seed_misses_the_threshold(study: Path) -> None:
    save(study / "runs" / "fedprox-4", "fedprox", 4, 0.4)
    text = raysim.report(study, thresholds=[0.5]).latex_thresholds()
    assert "4 of 5" in text and "textbf" not in text


def test_report_columns_can_be_chosen_by_key_or_title(study: Path) -> None:
    report = raysim.report(study, columns=["final", "rounds_to.0.50", "train_loss", "wall"])
    assert [name for name in report.results if not name.endswith(("_std", "_mark"))] == [
        "setting",
        "final",
        "rounds_to.0.50",
        "train_loss",
        "wall_seconds",
    ]
    with pytest.raises(RefusedError, match="--columns finale"):
        raysim.report(study, columns=["finale"])


@pytest.mark.parametrize(
    ("text", "labels"),
    [
        ("fedavg=FedAvg", {"fedavg": "FedAvg"}),
        ('fedavg="FedAvg (ours)",a=1, b=2=Both', {"fedavg": "FedAvg (ours)", "a=1, b=2": "Both"}),
        ("fedavg=one, two,moon=MOON", {"fedavg": "one, two", "moon": "MOON"}),
        ("", {}),
    ],
)
def test_labels_of_settings_may_have_commas(text: str, labels: dict[str, str]) -> None:
    assert comparison.parse_labels(text, ["fedavg", "moon", "a=1, b=2"]) == labels


def test_labels_of_settings_in_the_order_flag_may_have_commas() -> None:
    known = ["a=1, b=2", "fedavg", "a=1"]
    assert comparison.parse_order("fedavg,a=1, b=2,a=1", known) == ["fedavg", "a=1, b=2", "a=1"]


@pytest.mark.parametrize(
    ("choice", "key"),
    [
        ({"labels": "fedavg=FedAvg"}, "--labels fedavg"),
        ({"labels": "moon=MOON,fedavg=FedAvg"}, "--labels fedavg"),
        ({"labels": {"x": "y"}}, "--labels x"),
        ({"order": "fedavg"}, "--order fedavg"),
        ({"thresholds": ["high"]}, "--thresholds high"),
        ({"width": 0.0}, "--width"),
    ],
)
def test_error_of_a_wrong_report_argument_contains_its_flag(
    choice: dict[str, object], key: str, study: Path
) -> None:
    with pytest.raises(RefusedError, match=key):
        raysim.report(study, **choice)  # type: ignore[arg-type]


def test_report_of_an_empty_list_of_runs_is_refused() -> None:
    with pytest.raises(RefusedError, match="runs: "):
        raysim.report([])


def test_labels_chosen_for_settings_appear_in_tables_and_curves(study: Path) -> None:
    report = raysim.report(study, labels="moon=MOON,fedprox=FedProx", order="MOON")
    assert report.results["setting"].tolist() == ["MOON", "FedProx", "fedavgm"]
    lines = report.figures["accuracy-round"].axes[0].get_lines()
    assert [line.get_label() for line in lines] == ["MOON", "FedProx", "fedavgm"]
    assert report.text().splitlines()[3].startswith("MOON")


@pytest.mark.pictures
def test_figure_fits_a_column_of_a_paper(study: Path, tmp_path: Path) -> None:
    report = raysim.report(study)
    figure = report.figures["accuracy-round"]
    assert figure.get_size_inches()[0] == print_figures.COLUMN_WIDTH_IN
    sizes = {
        text.get_fontsize()
        for text in figure.findobj(lambda artist: hasattr(artist, "get_fontsize"))
        if text.get_text()
    }
    assert min(sizes) >= 7 and max(sizes) <= 8
    paths = report.write(tmp_path / "paper", ["pdf", "svg"])
    assert {path.name for path in paths} >= {"report.html", "results.tex", "accuracy-round.pdf"}
    pdf = (tmp_path / "paper" / "accuracy-round.pdf").read_bytes()
    assert pdf.startswith(b"%PDF") and b"/Type3" not in pdf
    first = (tmp_path / "paper" / "accuracy-round.svg").read_bytes()
    again = tmp_path / "again.svg"
    print_figures.save_figure(raysim.report(study).figures["accuracy-round"], again)
    assert again.read_bytes() == first


@pytest.mark.pictures
def test_figure_with_few_lines_has_line_labels_in_place_of_a_legend(study: Path) -> None:
    report = raysim.report(study)
    figure = report.figures["accuracy-round"]
    labels = figure.axes[0].texts
    assert {label.get_text() for label in labels} == {"fedavgm", "fedprox", "moon"}
    assert not figure.legends
    boxes = sorted((text.get_window_extent() for text in labels), key=lambda box: box.y0)
    assert all(low.y1 <= high.y0 + 1 for low, high in itertools.pairwise(boxes))
    assert all(box.x1 <= figure.bbox.x1 + 1 for box in boxes)


@pytest.mark.pictures
def test_figure_whose_lines_end_at_different_places_has_a_legend(study: Path) -> None:
    save(study / "runs" / "krum-0", "krum", 0, 0.5, floats=9000)
    (curves,) = [
        curves
        for key, (_, _, curves) in page.setting_curves(raysim.report(study).groups).items()
        if key == "accuracy"
    ]
    figure = print_figures.draw_figure(curves, AXES[1], "accuracy")
    assert len(figure.legends) == 1 and not figure.axes[0].texts
    # Lines on other lines have gaps, and their legends do not.
    assert {line.get_linestyle() for line in figure.legends[0].get_lines()} == {"-"}
    assert "--" in {line.get_linestyle() for line in figure.axes[0].get_lines()}


@pytest.mark.pictures
@pytest.mark.parametrize("label", ["fedprox, alpha=0.1", "a name of many words " * 6])
def test_legend_fits_into_its_figure(label: str) -> None:
    rows = [{"round": number, "accuracy": number / 30} for number in range(1, 31)]
    curves = [mean_curve(f"{label} {index}", [rows], "accuracy", index) for index in range(7)]
    figure = print_figures.draw_figure(curves, AXES[0], "accuracy")
    box = figure.legends[0].get_window_extent()
    assert box.x0 >= 0 and box.x1 <= figure.bbox.x1
    assert figure.axes[0].get_window_extent().height / figure.dpi > 1.0


def test_ticks_of_the_round_axis_are_multiples_of_ten() -> None:
    rows = [{"round": number, "accuracy": number / 30} for number in range(1, 31)]
    curves = [mean_curve("fedavg", [rows], "accuracy", 0)]
    axes = print_figures.draw_figure(curves, AXES[0], "accuracy").axes[0]
    left, right = axes.get_xlim()
    assert [x for x in axes.get_xticks() if left <= x <= right] == [0, 10, 20, 30]


@pytest.mark.parametrize(
    ("places", "moved"),
    [
        ([0.0, 0.5, 1.0], [0.0, 0.5, 1.0]),
        ([0.5, 0.5], [0.45, 0.55]),
        ([0.1, 0.5, 0.52, 0.54], [0.1, 0.42, 0.52, 0.62]),
        ([0.5, 0.5, 0.58], [0.4266667, 0.5266667, 0.6266667]),
        ([], []),
    ],
)
def test_overlapping_line_labels_move_apart_around_their_mean_position(
    places: list[float], moved: list[float]
) -> None:
    assert print_figures.spread(places, 0.1) == pytest.approx(moved)


def test_report_refuses_to_write_pictures_in_an_unknown_file_format(
    study: Path, tmp_path: Path
) -> None:
    with pytest.raises(RefusedError, match="--format"):
        raysim.report(study).write(tmp_path / "paper", ["eps"])
    assert not (tmp_path / "paper").exists()


def test_mean_is_not_marked_best_if_a_seed_misses_the_threshold(study: Path) -> None:
    rounds = {"fedavgm": [3, 3, 3, 3], "moon": [1, 1, None, None]}
    for method, seed in itertools.product(rounds, range(4)):
        path = study / "runs" / f"{method}-{seed}" / "summary.json"
        summary = json.loads(path.read_text())
        summary["rounds_to"]["0.50"] = rounds[method][seed]
        write_json(summary, path)
    report = raysim.report(study, columns=["rounds_to.0.50"], bold="best")
    lines = {line.split()[0]: line for line in report.text().splitlines() if line}
    assert "(2 of 4)" in lines["moon"]
    starred = [name for name in ("moon", "fedavgm", "fedprox") if "*" in lines[name]]
    assert starred == ["fedprox"]


def test_report_refuses_an_unknown_value_of_the_argument_bold(study: Path) -> None:
    with pytest.raises(RefusedError, match="--bold"):
        raysim.report(study, bold="bset")


def test_report_draws_a_curve_figure_for_every_metric(tmp_path: Path) -> None:
    folder = save(tmp_path / "a", "fedprox", 0, 0.7)
    rows = read_history(folder / "history.parquet")
    for row in rows:
        row |= {"brier": 2.0, "brier_worst": 3.0, "brier_global": None}
    write_history(rows, folder / "history.parquet")
    curves = page.setting_curves(raysim.report(folder).groups, TableView(percent=True))
    assert list(curves) == [
        *("accuracy", "accuracy_worst", "brier", "brier_worst", "train_loss"),
    ]
    assert curves["accuracy"][2][0].points[-1][1] == pytest.approx(70.0)
    assert curves["brier"][2][0].points[-1][1] == 2.0, "only shares are in percent"


def test_table_of_results_has_traffic_in_bytes(study: Path) -> None:
    results = raysim.report(study).results
    assert results["bytes"].tolist() == (4 * results["floats"]).tolist()
    assert results["bytes"].tolist() == 3 * [24_000.0]
