"""Test our stored runs for the papers' tables, and the pages that show these runs."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image
from test_papers import MNIST, WIDE, line, make, rows

from jobs.papers import pages, pictures, results
from jobs.papers.comparison import compare
from jobs.papers.gains import by_setting, gains
from jobs.papers.presets import PAPER_RUNS
from jobs.papers.tables import PAPERS, tables
from raysim.experiment.compose import compose
from raysim.experiment.config_files import to_dict
from raysim.primitives.errors import RefusedError
from raysim.primitives.files import conf_folder
from raysim.results.history import Row, write_json
from raysim.results.stored_runs import Run, flat_settings, load_run

pytestmark = pytest.mark.slow

SPLIT = {"label_entropy": 0.33, "largest_share": 0.9, "divergence": 0.61}
IDENTITY = {"device": "cpu", "threads": 1, "libraries": {"torch": "2.9"}}


def finished(folder: Path, words: Sequence[str], history: Sequence[Row]) -> Path:
    """Write the folder of a finished run, without training; return the folder.

    The data split, the identity and the checksums are constants of this module.
    words, history: the run's overrides and history rows.
    """
    run = make(folder, words, history)
    summary = json.loads((folder / "summary.json").read_text())
    ending = {
        "split": SPLIT,
        "identity": IDENTITY,
        "model_sha256": "a" * 64,
        "state_sha256": "b" * 64,
    }
    write_json(summary | ending, folder / "summary.json")
    return run.folder


def scores(*accuracies: float) -> list[Row]:
    return rows(list(accuracies), accuracy=0.9, accuracy_worst=0.2, accuracy_worst_domain=0.4)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(results, "RESULTS", tmp_path / "kept")
    return tmp_path / "kept"


def reduced(method: str, seed: int = 0) -> list[str]:
    return [
        *MNIST,
        f"method=[{method}]",
        "rounds=40",
        "data.pool=2",
        "local.lr=0.01",
        f"seed={seed}",
    ]


# --- keeping --------------------------------------------------------------------------------------
def test_stored_run_contains_scores_and_split_but_no_local_paths(
    tmp_path: Path, store: Path
) -> None:
    folder = finished(
        tmp_path / "a", [*reduced("fedbr"), "data.root=/somewhere", "out=x"], scores(0.5, 0.6)
    )
    path = results.store_run(folder)
    assert path.parent == store / "fedbr" and path.name.startswith("rotated_mnist-fedbr-")
    (kept,), run = results.stored_runs("fedbr"), load_run(folder)
    assert kept.summary["split"] == SPLIT and kept.summary["model_sha256"] == "a" * 64
    assert [row["accuracy_global"] for row in kept.rows] == [
        row["accuracy_global"] for row in run.rows
    ]
    text = path.read_text()
    assert "/somewhere" not in text and str(tmp_path) not in text and len(text) < 20_000
    assert (
        compare("fedbr/table1", [kept], WIDE).split("runs (")[0]
        == compare("fedbr/table1", [run], WIDE).split("runs (")[0]
    )
    assert results.store_run(folder) == path, "the same run has the same file"


def test_command_of_a_stored_run_reproduces_its_configuration(tmp_path: Path, store: Path) -> None:
    words = [
        *reduced("fedbr,mixup"),
        "method.fedbr.max_step=false",
        "data.augment=[flip]",
        "model=cnn",
        "model.pool=3",
    ]
    path = results.store_run(finished(tmp_path / "a", words, scores(0.5)))
    said = shlex.split(json.loads(path.read_text())["command"])
    assert (
        said[:3] == ["raysim", "run", "experiment=fedbr/rotated_mnist"]
        and said[-1] == "data.root=DIR"
    )
    assert not any("schedule_rounds" in word for word in said), "it follows from rounds"
    again, before = (
        flat_settings(to_dict(compose(each))) for each in (said[2:], [*words, "data.root=DIR"])
    )
    assert again == before


def test_store_run_writes_a_file_per_seed_and_refuses_unfinished_runs(
    tmp_path: Path, store: Path
) -> None:
    for seed in (0, 1):
        results.store_run(finished(tmp_path / str(seed), reduced("", seed), scores(0.5)))
    assert len(results.stored_runs("fedbr")) == 2 and results.stored_runs("fraug") == []
    other = finished(tmp_path / "digits", ["method=[fedprox]"], scores(0.5))
    with pytest.raises(RefusedError, match="experiment=default"):
        results.store_run(other)
    (other / "summary.json").unlink()
    with pytest.raises(RefusedError, match="finished"):
        results.store_run(other)


# --- beside the paper's numbers -------------------------------------------------------------------
def kept_at(tmp_path: Path, method: str, score: float, *words: str, seed: int = 0) -> None:
    folder = tmp_path / f"{method}-{seed}-{'-'.join(words)}"
    results.store_run(
        finished(folder, [*MNIST, f"method=[{method}]", f"seed={seed}", *words], scores(score))
    )


def sections(text: str) -> dict[str, list[str]]:
    """Return the rows of each RotatedMNIST table in the output of `compare`, by configuration.

    A key of the result says how the configuration of the runs differs from the paper's; "" means no
    difference.
    text: the output of `compare`.
    """
    found: dict[str, list[str]] = {}
    setting = ""
    for part in text.split("\n\n"):
        title, _, said = part.partition("differences from the paper: ")
        setting = said if said and title.startswith("rotated_mnist") else setting
        setting = "" if part == "rotated_mnist, at the paper's setting" else setting
        if part.startswith("rotated_mnist, Acc") and " ours " in part:
            found[setting] = [" ".join(row.split()) for row in part.splitlines()[2:]]
    return found


def test_runs_with_different_numbers_of_rounds_are_in_separate_tables(
    tmp_path: Path, store: Path
) -> None:
    for seed, score in ((0, 0.5), (1, 0.7)):
        for method in ("", "fedprox"):
            kept_at(tmp_path, method, score, "rounds=40", seed=seed)
    own = load_run(finished(tmp_path / "own", [*MNIST, "method=[]"], scores(0.8)))
    found = sections(compare("fedbr/table1", [own], WIDE, results.stored_runs("fedbr")))
    assert [*found] == ["", "rounds=40 instead of 1000"]
    assert [row for row in found[""] if " – – – " not in row] == [
        row for row in found[""] if "80.00" in row
    ]
    assert found[""][1].startswith("FedAvg 82.47 80.00 -2.47")
    kept = found["rounds=40 instead of 1000"]
    assert [row.split()[0] for row in kept] == ["FedAvg", "FedProx"]
    assert kept[1].startswith("FedProx 82.32 60.00* ± 14.14 (2 runs) -22.32")


def test_main_setting_of_a_page_does_not_depend_on_the_order_of_runs(
    tmp_path: Path, store: Path
) -> None:
    small = "model=small_cnn"
    for method, score in (("", 0.1), ("fedprox", 0.2), ("fedbr", 0.3)):
        kept_at(tmp_path, method, score, small)
    kept_at(tmp_path, "", 0.8, "rounds=40")
    runs = results.stored_runs("fedbr")
    found = sections(compare("fedbr/table1", [], WIDE, runs))
    main, other = found.values()
    assert [row for row in main if "*" in row and "80.00" in row] == [], (
        "no cell of the other setting"
    )
    assert sum("*" in row for row in main) == 3 and len(other) == 1 and "80.00*" in other[0]
    assert sections(compare("fedbr/table1", [], WIDE, runs[::-1])) == found


def test_runs_at_the_setting_of_the_paper_get_a_separate_section(
    tmp_path: Path, store: Path
) -> None:
    for method in ("", "fedprox"):
        kept_at(tmp_path, method, 0.5, "rounds=40")
    kept_at(tmp_path, "", 0.8)
    found = sections(compare("fedbr/table1", [], WIDE, results.stored_runs("fedbr")))
    assert [*found] == ["rounds=40 instead of 1000", ""]
    assert len(found[""]) == 1 and found[""][0].startswith("FedAvg 82.47 80.00 -2.47")


def test_paper_table_marks_a_run_with_changed_method_settings_by_a_footnote(
    tmp_path: Path, store: Path
) -> None:
    kept_at(tmp_path, "", 0.5, "rounds=40")
    kept_at(tmp_path, "fedbr", 0.6, "rounds=40", "method.fedbr.samples_per_mean=5")
    kept_at(tmp_path, "fedbr", 0.7, "rounds=40")
    text = compare("fedbr/table1", [], WIDE, results.stored_runs("fedbr"))
    (rows_,) = sections(text).values()
    assert [row.split(" -")[0] for row in rows_ if "*" in row] == [
        "FedAvg 82.47 50.00*",
        "FedBR (Ours) 86.58 70.00*",
        "FedBR (Ours) [a] 86.58 60.00*",
    ]
    assert "[a] method.fedbr.samples_per_mean=5 instead of 10" in text


def test_paper_table_gives_no_difference_for_a_run_on_other_data(
    tmp_path: Path, store: Path
) -> None:
    shift = [
        "data=synthetic",
        "data.domains=5",
        "data.samples=2000",
        "data.test_samples=2000",
        "partition=domain",
    ]
    words = ["experiment=fedld/retina", "method=[]", "model=small_cnn"]
    run = make(tmp_path / "a", [*words, *shift], rows([0.5]))
    assert "ours" not in compare("fedld/table1", [run], WIDE)
    run = make(tmp_path / "b", [*words, "data=pneumonia_mnist", "partition.alpha=0.5"], rows([0.5]))
    text = compare("fedld/table1", [run], WIDE)
    assert line(text, "pneumonia_mnist, Split-3").startswith(
        "pneumonia_mnist, Split-3 paper ours ours - paper"
    )
    assert "FedAvg 81.13 50.00* –" in " ".join(text.split()), (
        "other data than the paper's have no difference"
    )


def test_stored_run_contains_the_history_columns_of_its_methods_only(
    tmp_path: Path, store: Path
) -> None:
    reported = {"fedbss.biased_share": 0.25, "fedbr.other": 1.0, "aggregated": 3.0}
    words = ["experiment=fedbss/fashion_mnist", "method=[fedbss]"]
    results.store_run(finished(tmp_path / "a", words, rows([0.5], **reported)))
    (run,) = results.stored_runs("fedbss")
    assert run.rows[0]["fedbss.biased_share"] == 0.25
    assert not {"fedbr.other", "aggregated"} & run.rows[0].keys()


def test_paper_table_shows_all_scores_and_the_heterogeneity_of_a_run(
    tmp_path: Path, store: Path
) -> None:
    run = load_run(finished(tmp_path / "a", [*MNIST, "method=[]"], scores(0.5)))
    text = compare("fedbr/table1", [run], WIDE)
    assert line(text, "FedAvg ").startswith(
        "FedAvg 82.47 50.00 -32.47 90.00 20.00 0.33 / 0.61 828 / –"
    )
    assert "local mean" in text and "local worst" in text and "entropy / divergence" in text
    assert "We compare with the second (central)" in " ".join(text.split())
    assert line(compare("fedbr/table14", [run], WIDE), "ERM").startswith(
        "ERM (FedAvg) 66.60 40.00 -26.60 90.00 20.00 50.00"
    )
    bare = make(tmp_path / "b", [*MNIST, "method=[]"], rows([0.5]))
    assert "local mean" not in compare("fedbr/table1", [bare], WIDE)


# --- pages ----------------------------------------------------------------------------------------
def test_pages_match_the_stored_results() -> None:
    folder = conf_folder().parent / "docs" / "papers"
    for name, text in pages.pages().items():
        assert (folder / name).read_text() == text, (
            f"{name}: run uv run python -m jobs.papers.pages docs/papers"
        )


@pytest.mark.parametrize("paper", PAPERS)
def test_chart_on_the_page_of_a_paper_shows_the_stored_results(paper: str) -> None:
    drawn = Image.open(conf_folder().parent / "docs" / "papers" / f"{paper}.png")
    assert drawn.text["Description"] == pictures.checksum(
        results.stored_runs(paper), PAPER_RUNS[paper]
    ), (  # type: ignore[attr-defined]
        "run uv run python -m jobs.papers.pages docs/papers"
    )


def page_of(runs: Sequence[Run], causes: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(
        pages, "_explanations", lambda paper: {"causes": causes, "remarks": ["Nothing seen of it."]}
    )
    return pages.page("fedbr", runs)


def test_paper_page_shows_each_setting_and_the_causes_of_differences(
    tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed, score in ((0, 0.5), (1, 0.7)):
        results.store_run(finished(tmp_path / f"r{seed}", reduced("", seed), scores(score)))
    results.store_run(finished(tmp_path / "whole", [*MNIST, "method=[]"], scores(0.8)))
    results.store_run(finished(tmp_path / "prox", [*MNIST, "method=[fedprox]"], scores(0.8)))
    text = page_of(results.stored_runs("fedbr"), {"table1/FedProx": "another mu"}, monkeypatch)
    first = text.split("## Table 1:")[1].split("## Table 2:")[0]
    small, whole = (
        first.split(f"### Our results{title}")[1].split("###")[0]
        for title in (": ", " at the paper's setting")
    )
    assert (
        "Differences from the paper" in small
        and "rounds=40 instead of 1000" in small
        and "torch 2.9" in small
    )
    assert "| FedAvg | rotated_mnist, Acc (%) | 82.47 | 60.00 ± 14.14 | 2 | -22.47 | 90.00" in small
    assert "| 0.330 | 0.900 | 0.610 | scale |" in small
    assert (
        "| FedAvg | rotated_mnist, Acc (%) | 82.47 | 80.00 | 1 | -2.47 |" in whole
        and "| not known |" in whole
    )
    assert "| FedProx |" in whole and "| another mu |" in whole
    assert "experiment=fedbr/rotated_mnist method=fedavg " in first and "data.pool=2" in first
    assert (
        "not run yet" in text.split("## Table 2:")[1]
        and "- Nothing seen of it." in text.split("## Table 1:")[0]
    )


def test_paper_page_names_the_scale_of_each_column(
    tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "_explanations", lambda paper: {"causes": {}, "remarks": []})
    small = ["model=small_cnn", "data.pool=2", "partition.fraction=0.2", "local.lr=0.1"]
    for alpha in ("0.1", "0.3"):
        words = [*small, "rounds=150", f"partition.alpha={alpha}"]
        experiment = ["experiment=fedbss/fashion_mnist", "method=[]"]
        results.store_run(finished(tmp_path / alpha, [*experiment, *words], scores(0.5)))
    text = pages.page("fedbss", results.stored_runs("fedbss"))
    table = text.split("## Table 1:")[1].split("## Table 2:")[0]
    assert "### Our results: scales `skew-fast`, `skew-fast-0.3`\n" in table
    for alpha, name in (("0.1", "skew-fast"), ("0.3", "skew-fast-0.3")):
        assert f"Scale `{name}`, small CNN" in table and f", Dirichlet {alpha}, rate 0.1" in table


def test_average_over_other_domains_has_no_difference_from_the_paper(tmp_path: Path) -> None:
    history = [{"round": 0, "accuracy_best": 0.5, "accuracy_best.mnist": 0.6}]
    words = ["experiment=fraug/digits", "method=[]"]
    run = make(tmp_path / "a", words, history)
    text = " ".join(compare("fraug/table2", [run], WIDE).split())
    assert "FedAvg 96.85 ± 0.1 60.00 -36.85" in text and "FedAvg 85.62 ± 0.2 50.00 -35.62" in text
    run = make(tmp_path / "b", [*words, "data.domains=[mnist,mnist_m,usps,digits]"], history)
    text = " ".join(compare("fraug/table2", [run], WIDE).split())
    assert "FedAvg 96.85 ± 0.1 60.00* -36.85" in text and "FedAvg 85.62 ± 0.2 50.00* –" in text


def test_paper_page_shows_the_command_for_a_domain_that_has_no_stored_run(
    tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "_explanations", lambda paper: {"causes": {}, "remarks": []})
    words = ["experiment=fraug/digits", "method=[]", "data.domains=[mnist,mnist_m,usps,digits]"]
    history = [{"round": 0, "accuracy_best": 0.5, "accuracy_best.mnist": 0.6}]
    results.store_run(finished(tmp_path / "a", words, history))
    text = pages.page("fraug", results.stored_runs("fraug"))
    assert "1 run on " in text
    places, command = text.split("FedAvg, digits, MT (96.85)")[1].split("\n\n")[:2]
    assert "not run yet" not in places and "data.domains" in command
    place = "FedAvg, digits, SV (74.49, not run yet)"
    assert text.split(place)[1].split("\n\n")[1] == (
        "    raysim run experiment=fraug/digits method=fedavg data.root=DIR"
    )


def test_page_without_runs_lists_every_number_of_its_paper() -> None:
    for paper in PAPERS:
        text = pages.page(paper, [])
        assert text.count("## Table ") == len(tables(paper))
        for table in tables(paper).values():
            for cell in table.cells:
                assert (
                    f"{cell.label}, {cell.dataset}, {cell.column} ({cell.mean}, not run yet)"
                    in text
                )


# --- beside FedAvg, seed by seed ------------------------------------------------------------------
def stored(method: str, seed: int, accuracy: float, words: str = "", entropy: float = 0.1) -> Run:
    """Return a stored run of one round.

    accuracy: the accuracy of the round.
    words: further overrides of the run, such as " device=cuda runtime.graph=true".
    entropy: the label entropy of the clients' samples.
    """
    summary = {
        "command": f"raysim run experiment=fedbr/x method={method} seed={seed} rounds=40{words} "
        "data.root=DIR",
        "split": {"label_entropy": entropy},
    }
    return Run("x", {"seed": seed}, [{"round": 1, "accuracy": accuracy}], summary, Path("x"))


FEDBR = PAPER_RUNS["fedbr"]


def test_gain_over_fedavg_uses_only_seeds_that_both_methods_have() -> None:
    # 10, 20 and 30 points: mean 20, deviation 10, and t(0.975, 2) = 4.3027 gives 24.84 to each
    # side.
    gained = [
        stored("fedbr", seed, 0.6 + 0.1 * seed, " device=cuda runtime.graph=true")
        for seed in range(3)
    ]
    runs = [stored("fedavg", seed, 0.5, entropy=1 - seed) for seed in range(5)] + gained
    text = "\n".join(gains(runs, FEDBR))
    assert "## Gains over FedAvg: experiment=fedbr/x rounds=40\n" in text + "\n", (
        "where it ran does not matter"
    )
    assert "Each seed also draws its own split. Gains in points" in text
    assert "| `method=fedbr` | 3 | +20.00 (-4.84 to +44.84) |" in text
    rows_ = [row for row in text.splitlines() if "→" in row and row.startswith("| ")]
    assert rows_ == [
        "| 2 | -1.000 | 50.00 → 80.00 (+30.00) |",
        "| 1 | 0.000 | 50.00 → 70.00 (+20.00) |",
        "| 0 | 1.000 | 50.00 → 60.00 (+10.00) |",
    ], "the most uneven split first"
    assert "Spearman" not in text, "three splits have no correlation"


def test_gain_over_fedavg_is_measured_in_the_score_that_the_paper_reports() -> None:
    def run(method: str, seed: int, gained: float) -> Run:
        best, early, late = 0.5 + gained, 0.3 + 2 * gained, 0.2 + 4 * gained
        scores = [best] * 5 + [early] * 9 + [late]
        rows = [{"accuracy_global": score, "accuracy_best": 0.4 + 3 * gained} for score in scores]
        return replace(stored(method, seed, 0.5), rows=rows)

    runs = [run("fedavg", seed, 0.0) for seed in range(3)]
    runs += [run("fedbr", seed, 0.01 * seed) for seed in range(3)]
    gained = {}
    for paper in PAPERS:
        (setting,) = by_setting(runs, PAPER_RUNS[paper])
        for title, score in setting.scores.items():
            gained[paper, title] = round(
                setting.gain(setting.others["method=fedbr"], score).mean or 0, 6
            )
    # Points gained: 1 in the five best rounds, 2 and once 4 in the last ten, 4 in the last, 3 in
    # the best validation.
    assert gained == {
        ("fedbr", "central"): 1.0,
        ("fedbss", "central"): 2.2,
        ("fedld", "central"): 4.0,
        ("fraug", "clients' tests"): 3.0,
    }


def test_overrides_that_differ_only_in_how_a_number_is_written_are_equal() -> None:
    words = (" local.lr=10", " local.lr=10.0", " local.lr=10")
    runs = [
        stored(method, seed, 0.5, words[seed])
        for method in ("fedavg", "fedbr")
        for seed in range(3)
    ]
    text = "\n".join(gains(runs, FEDBR))
    assert text.startswith("## Gains over FedAvg: experiment=fedbr/x rounds=40 local.lr=10\n")
    assert "| `method=fedbr` | 3 |" in text
    runs = [
        stored(method, seed, 0.5, f" local.lr=1.0{seed}")
        for method in ("fedavg", "fedbr")
        for seed in range(3)
    ]
    assert not list(gains(runs, FEDBR)), "1.01 and 1.02 are two"


def test_paper_page_shows_central_scores_and_terms_of_the_loss_decomposition() -> None:
    def run(method: str, seed: int, shift: float) -> Run:
        rows: list[Row] = [
            {"accuracy": None, "accuracy_global": 0.5, "decomposition.shift": value}
            for value in (9.0, shift - 0.1, shift - 0.1, shift, shift + 0.1, shift + 0.1)
        ]
        return replace(stored(method, seed, 0.5), rows=rows)

    fedavg = [run("fedavg", seed, 1.0 + 0.1 * seed) for seed in range(3)]
    text = "\n".join(
        gains([*fedavg, *(run("fedbr", seed, 0.5 + 0.2 * seed) for seed in range(3))], FEDBR)
    )
    assert "| methods | seeds | central |" in text and "local mean" not in text
    assert "| `method=fedavg` | 3 | 1.100 |" in text
    # -0.5, -0.4 and -0.3: deviation 0.1, and t(0.975, 2) = 4.3027 gives 0.248 to each side.
    assert "| `method=fedbr` | 3 | 0.700 (-0.400; -0.648 to -0.152) |" in text, (
        "the last five, paired by seed"
    )


def test_table_of_loss_terms_has_only_terms_that_all_its_runs_measured() -> None:
    def run(method: str, seed: int, **terms: float | None) -> Run:
        columns = {f"decomposition.{name}": value for name, value in terms.items()}
        return replace(stored(method, seed, 0.5), rows=[{"accuracy": 0.5, **columns}])

    runs = [run("fedavg", seed, shift=1.0, local=2.0, other=None) for seed in range(3)]
    runs += [run("fedbr", seed, shift=0.5, local=None, other=1.0) for seed in range(3)]
    runs += [run("moon", seed, shift=None) for seed in range(3)]
    text = "\n".join(gains(runs, FEDBR))
    assert "| methods | seeds | shift |" in text
    assert "| `method=fedbr` | 3 | 0.500 (-0.500; no test" in text
    assert (
        "| `method=moon` | 3 | +0.00 (equal in every pair) |" in text
        and text.count("method=moon") == 1
    )


def test_paper_page_shows_rank_correlation_of_label_entropy_with_gain_over_fedavg() -> None:
    runs = [stored("fedavg", seed, 0.5, entropy=seed) for seed in range(4)]
    runs += [stored("fedbr", seed, 0.9 - 0.1 * seed, entropy=seed) for seed in range(4)]
    assert "with the label entropy, 4 splits: local mean -1.00 (p = 0.0000)." in "\n".join(
        gains(runs, FEDBR)
    )


def test_fedbr_page_shows_gain_of_fedbr_on_each_split_if_methods_have_equal_seeds() -> None:
    runs = [
        stored(method, seed, 0.5, entropy=seed)
        for method in ("fedavg", "fedbn", "fedbr", "scaffold")
        for seed in range(4)
    ]
    assert "`method=fedbr` by split" in "\n".join(gains(runs, FEDBR))


def test_paper_page_omits_rank_correlation_if_all_seeds_use_one_data_split() -> None:
    runs = [
        stored(method, seed, 0.5 + 0.1 * seed * seed)
        for method in ("fedavg", "fedbr")
        for seed in range(4)
    ]
    text = "\n".join(gains(runs, FEDBR))
    assert "| `method=fedbr` | 4 |" in text
    assert "by split" not in text and "Spearman" not in text and "A seed is a split" not in text


def test_picture_of_gains_shows_means_with_intervals_and_each_data_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [stored("fedavg", seed, 0.5, entropy=seed) for seed in range(4)]
    runs += [stored("fedbr", seed, 0.9 - 0.1 * seed, entropy=seed) for seed in range(4)]
    runs += [
        stored("moon method.moon.mu=1", seed, 0.4 + 0.1 * seed, entropy=seed) for seed in range(3)
    ]
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    pictures.draw(runs, FEDBR, tmp_path / "a.png")
    means, splits = figures[0].axes
    assert [label.get_text() for label in means.get_yticklabels()] == ["fedbr", "moon, mu=1"]
    # fedbr: 40, 30, 20, 10; moon: -10, 0, 10; the intervals by t(0.975, 3) = 3.1824 and t(0.975, 2)
    # = 4.3027.
    lines = [np.round(np.asarray(line.get_xdata(), float), 2).tolist() for line in means.lines]
    assert lines == [[4.46, 45.54], [25.0], [-24.84, 24.84], [0.0], [0.0, 0.0]]
    blue, grey = (means.lines[place].get_color() for place in (0, 2))
    assert blue == means.lines[1].get_color() != grey, "an interval around 0 is grey"
    (dots, _) = splits.lines
    assert np.allclose(dots.get_xydata(), [(0, 40), (1, 30), (2, 20), (3, 10)])
    assert (
        pictures.checksum(runs, FEDBR) != pictures.checksum(runs[:-1], FEDBR)
        and pictures.checksum(runs[:4], FEDBR) == ""
    )


def test_gain_over_fedavg_needs_enough_seeds_of_one_setting() -> None:
    fedavg = [stored("fedavg", seed, 0.5) for seed in range(3)]
    assert not list(gains([*fedavg, stored("fedbr", 0, 0.6), stored("fedbr", 1, 0.6)], FEDBR))
    assert not list(
        gains([*fedavg, *(stored("fedbr", seed, 0.6, " local.lr=0.1") for seed in range(3))], FEDBR)
    )
    assert not list(gains([stored("fedbr", seed, 0.6) for seed in range(3)], FEDBR))


def test_stored_run_names_its_gpu_and_its_execution_settings(tmp_path: Path, store: Path) -> None:
    words = [*reduced("fedbr"), "runtime=inprocess", "runtime.lanes=10", "runtime.graph=true"]
    folder = finished(tmp_path / "a", words, scores(0.5))
    summary = json.loads((folder / "summary.json").read_text())
    write_json(
        summary | {"identity": IDENTITY | {"device": "NVIDIA H100"}}, folder / "summary.json"
    )
    config = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(config.replace("device: auto", "device: cuda"))
    results.store_run(folder)
    (kept,) = results.stored_runs("fedbr")
    assert kept.summary["hardware"] == "NVIDIA H100"
    assert results.hardware({"device": "cpu", "processor": "AMD EPYC"}) == "AMD EPYC"
    command = str(kept.summary["command"])
    assert "device=cuda runtime.lanes=10 runtime.graph=true data.root=DIR" in command, command
