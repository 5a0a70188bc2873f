"""Test that the papers' tables have the published numbers, and our scores in the right cells."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from jobs import command
from jobs.papers import report
from jobs.papers.comparison import compare
from jobs.papers.presets import PAPER_RUNS
from jobs.papers.tables import PAPERS, find, listing, tables
from raysim.experiment.compose import compose
from raysim.experiment.config_files import to_dict, to_yaml
from raysim.primitives.errors import RefusedError
from raysim.results.history import Row, summarise, write_history, write_json
from raysim.results.stored_runs import Run, load_run

MNIST = ("experiment=fedbr/rotated_mnist",)
WIDE = 1000


def rows(scores: Sequence[float | None], **more: float) -> list[Row]:
    """Return a history with a row for rounds 2, 4, 6, ...

    scores: the accuracy on the central test set in each of these rounds.
    more: further columns, by name. Each has the same value in all rows.
    """
    return [
        {
            "round": 2 * n,
            "accuracy_global": score,
            "floats_down": 40_000_000 * n,
            "clients": 10,
            **more,
        }
        for n, score in enumerate(scores, 1)
    ]


def make(folder: Path, words: Sequence[str], history: Sequence[Row]) -> Run:
    """Write the folder of a finished run with these overrides and this history; load the run."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(to_yaml(to_dict(compose(words))))
    write_history(history, folder / "history.parquet")
    write_json(summarise(history), folder / "summary.json")
    return load_run(folder)


def lines(text: str, label: str) -> list[str]:
    """Return the lines of a text that begin with a label, with single spaces between words."""
    return [" ".join(line.split()) for line in text.splitlines() if line.startswith(label)]


def line(text: str, label: str) -> str:
    """Return the first of the lines that start with a label; reduce each gap to one space."""
    return lines(text, label)[0]


# --- the numbers ----------------------------------------------------------------------------------
@pytest.mark.parametrize("paper", PAPERS)
def test_json_file_of_a_paper_equals_the_copy_in_the_shared_folder(
    paper: str, shared: Path
) -> None:
    ours = Path(report.__file__).parent / f"{paper}.json"
    assert ours.read_bytes() == (shared / "papers" / f"{paper}.json").read_bytes()


@pytest.mark.parametrize("name", [name for paper in PAPERS for name in tables(paper)])
def test_notes_on_a_paper_table_name_no_file(name: str) -> None:
    assert ".md" not in " ".join(find(name).notes) and all(find(name).notes)


@pytest.mark.parametrize("name", [name for paper in PAPERS for name in tables(paper)])
def test_paper_table_shows_every_mean_and_deviation_that_the_paper_prints(name: str) -> None:
    text = compare(name)
    for cell in find(name).cells:
        number = f"{cell.mean}" if cell.deviation is None else f"{cell.mean} ± {cell.deviation}"
        assert number in line(text, cell.label) or text.count(f"\n{cell.label} ") > 1
    assert max(map(len, text.split("\n\n")[1].splitlines())) <= 120


def test_tables_keep_trailing_zeros_as_printed_in_the_paper() -> None:
    assert any("64.40" in row for row in lines(compare("fedbr/table13"), "GroupDRO"))
    assert "43.7" in compare("fedbr/table9") and "43.70" not in compare("fedbr/table9")


def test_list_of_paper_tables_is_complete_and_wrong_name_gets_suggestion() -> None:
    assert len(listing("fedbr").splitlines()) == 14
    assert "fedbr/table5   Accuracy with 100 clients on CIFAR10" in listing("fedbr")
    for name, near in (
        ("fedbrr", "did you mean fedbr?"),
        ("fedbr/tabel1", "did you mean fedbr/table1?"),
    ):
        with pytest.raises(RefusedError, match=f"^{name}: ") as refused:
            find(name)
        assert near in str(refused.value)


# --- ours beside theirs ---------------------------------------------------------------------------
def test_paper_table_shows_a_run_next_to_the_number_printed_in_the_paper(tmp_path: Path) -> None:
    scores = [0.5, 0.79, 0.81, 0.80, 0.82, 0.83, 0.84]
    run = make(tmp_path / "prox", [*MNIST, "method=[fedprox]"], rows(scores))
    text = compare("fedbr/table1", [run], WIDE)
    assert line(text, "FedProx").startswith("FedProx 82.32 82.00 -0.32 824 / 6")
    assert line(text, "FedAvg ").startswith("FedAvg 82.47 – – 828 / –")
    assert f"{run.folder}: FedProx; as in the preset" in text
    assert "rotated_mnist method=fedavg" in text
    assert "rotated_mnist method=fedprox" not in text
    assert "raysim run experiment=fedbr/cifar10 method=fedprox" in text


def test_paper_table_averages_runs_over_their_seeds(tmp_path: Path) -> None:
    runs = [
        make(tmp_path / str(seed), [*MNIST, "method=[]", f"seed={seed}"], rows(scores))
        for seed, scores in enumerate(([0.7, 0.8], [0.8, 0.82]))
    ]
    text = compare("fedbr/table8", runs, WIDE)
    # Means of rounds 0.75 and 0.81; the threshold 0.80 in rounds 4 and 2.
    assert line(text, "ERM").startswith(
        "ERM (FedAvg) 82.78 ± 0.38 78.00 ± 4.24 (2 runs) -4.78 821 / 3"
    )
    assert "seed=" not in text


def test_paper_table_omits_rounds_until_the_threshold_if_one_run_never_reaches_it(
    tmp_path: Path,
) -> None:
    runs = [
        make(tmp_path / str(score), [*MNIST, "method=[]"], rows([score])) for score in (0.79, 0.81)
    ]
    assert "828 / –" in line(compare("fedbr/table1", runs, WIDE), "FedAvg ")


def test_note_of_a_run_lists_its_differences_from_the_setting_of_the_paper(tmp_path: Path) -> None:
    words = [
        *MNIST,
        "method=[fedbr]",
        "rounds=40",
        "data.pool=2",
        "method.fedbr.projection=code",
        "runtime=inprocess",
    ]
    run = make(tmp_path / "small", words, rows([0.6]))
    text = compare("fedbr/table1", [run], WIDE)
    notes = next(row for row in text.splitlines() if "small: FedBR (Ours); it has" in row)
    for part in (
        "rounds=40 instead of 1000",
        "data.pool=2 instead of 1",
        "method.fedbr.projection=code instead of paper",
    ):
        assert part in notes
    assert "runtime" not in notes
    assert "60.00* -26.58" in line(text, "FedBR (Ours) [a]")
    assert "\n[a] method.fedbr.projection=code instead of paper\n" in text


def test_weighting_that_the_method_requires_is_not_listed_as_a_difference(tmp_path: Path) -> None:
    words = ["experiment=fraug/digits", "method=[fedbn]", "weighting=samples"]
    run = make(
        tmp_path / "a",
        words,
        [{"round": 1, "accuracy_best": 0.5, "accuracy": 0.4, "accuracy_validation_best": 0.6}],
    )
    text = compare("fraug/table2", [run], WIDE)
    assert "as in the preset" in text and "instead of" not in text
    block = next(
        part for part in text.split("\n\n") if "digits, Avg" in part or "digits, avg" in part
    )
    assert "50.00" in block and "40.00" in block and "60.00" in block


def test_paper_table_mentions_the_data_set_if_it_is_not_that_of_the_preset(tmp_path: Path) -> None:
    run = make(tmp_path / "other", [*MNIST, "method=[]", "data=fashion_mnist"], rows([0.6]))
    assert "data=fashion_mnist instead of mnist" in compare("fedbr/table1", [run])


def test_paper_table_puts_ablation_runs_in_their_own_rows(tmp_path: Path) -> None:
    whole = make(tmp_path / "whole", [*MNIST, "method=[fedbr]"], rows([0.5]))
    first = make(tmp_path / "first", [*MNIST, "method=[fedbr]", "method.fedbr.mu=0"], rows([0.25]))
    without = make(
        tmp_path / "without",
        [*MNIST, "method=[fedbr]", "method.fedbr.max_step=false"],
        rows([0.125]),
    )
    text = compare("fedbr/table4", [whole, first, without], WIDE)
    assert line(text, "FedBR").startswith("FedBR 86.58 50.00")
    assert line(text, "Component 1").startswith("Component 1 84.40 25.00")
    assert line(text, "+ min step").startswith("+ min step 80.81 12.50")
    assert "– –" in line(text, "Component 2")
    assert f"{first.folder} belongs to no row of this table" in compare("fedbr/table1", [first])


def test_paper_table_says_that_a_run_belongs_to_none_of_its_rows(tmp_path: Path) -> None:
    run = make(tmp_path / "digits", ["method=[fedprox]"], rows([0.9]))
    text = compare("fedbr/table1", [run])
    assert (
        f"{run.folder} belongs to no row of this table (it has experiment=default, method fedprox)"
        in text
    )
    assert "ours" not in text


def test_paper_table_shows_rounds_until_the_final_accuracy_of_fedavg(tmp_path: Path) -> None:
    plain_run = make(tmp_path / "avg", [*MNIST, "method=[]"], rows([0.5, 0.9, 0.7]))
    moon = make(tmp_path / "prox", [*MNIST, "method=[fedprox]"], rows([0.5, 0.6, 0.75]))
    assert "824 / 6" in line(compare("fedbr/table13", [plain_run, moon], WIDE), "FedProx")
    assert "824 / –" in line(compare("fedbr/table13", [moon], WIDE), "FedProx")


def test_paper_table_shows_scores_of_the_worst_domain_and_of_local_models(tmp_path: Path) -> None:
    lowest = rows([0.9], accuracy_worst_domain=0.4)
    run = make(tmp_path / "a", [*MNIST, "method=[]"], lowest)
    assert line(compare("fedbr/table14", [run], WIDE), "ERM").startswith(
        "ERM (FedAvg) 66.60 40.00 -26.60 90.00 816 / 2"
    )
    run = make(tmp_path / "b", [*MNIST, "method=[]"], rows([0.9]))
    assert "ours" not in compare("fedbr/table14", [run])  # an older history has no such column
    run = make(
        tmp_path / "c", ["experiment=fedbr/cifar10", "method=[]"], rows([0.5], local_accuracy=0.2)
    )
    assert lines(compare("fedbr/table6", [run], WIDE), "FedAvg")[:2] == [
        "FedAvg 21.01 20.00 -1.01 50.00",
        "FedAvg 46.37 50.00 +3.63",
    ]


def test_paper_table_shows_the_local_accuracy_for_runs_of_method_local(tmp_path: Path) -> None:
    run = make(tmp_path / "a", [*MNIST, "method=[local]"], rows([None], local_accuracy=0.15))
    assert line(compare("fedbr/table1", [run], WIDE), "Local").startswith(
        "Local 14.67 15.00 +0.33 – / –"
    )


def test_paper_table_shows_the_costs_per_job(tmp_path: Path) -> None:
    run = make(
        tmp_path / "a",
        ["experiment=fedbr/cifar10", "method=[]"],
        rows([0.1, 0.2], worker_seconds=3.0),
    )
    # 80 million floats down and 6 seconds over 20 participations.
    first, second, *_ = lines(compare("fedbr/table7", [run], WIDE), "FedAvg")
    assert (first, second) == ("FedAvg 9.2 4.0 -5.2", "FedAvg 0.29 0.30 +0.01")


def test_every_paper_has_presets() -> None:
    assert set(PAPER_RUNS) == set(PAPERS)


def test_fedbss_paper_table_shows_mean_and_deviation_of_the_last_rounds(
    tmp_path: Path,
) -> None:
    words = ["experiment=fedbss/fashion_mnist", "method=[]", "partition.alpha=0.3"]
    run = make(tmp_path / "a", words, rows([0.1, *[0.70] * 5, *[0.72] * 5]))
    text = compare("fedbss/table1", [run])
    assert "71.00 ± 1.00" in text
    assert "experiment=fedbss/fashion_mnist method=fedavg partition.alpha=0.1" in text, (
        "what is still to be run"
    )
    assert "experiment=fedbss/fashion_mnist method=fedavg partition.alpha=0.3" not in text


# --- the command ----------------------------------------------------------------------------------
def status(*words: str) -> object:
    """Run `jobs.papers.report` with these arguments; return its exit status."""
    with pytest.raises(SystemExit) as ended:
        command.run(lambda: report.main(words))
    return ended.value.code


def test_papers_command_prints_the_table_of_a_paper_with_the_scores_of_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make(tmp_path / "a", [*MNIST, "method=[fedbr]"], rows([0.87]))
    assert status("fedbr/table1", str(run.folder)) == 0
    assert "87.00" in line(capsys.readouterr().out, "FedBR (Ours)")
    assert status("fedbr") == 0
    assert "fedbr/table14" in capsys.readouterr().out


def test_papers_command_ignores_other_folders(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path / "runs/a", [*MNIST, "method=[fedbr]"], rows([0.87]))
    for name in ("notes", "mlflow_artifacts"):
        (tmp_path / "runs" / name).mkdir()
    assert status("fedbr/table1", *map(str, sorted((tmp_path / "runs").iterdir()))) == 0
    captured = capsys.readouterr()
    assert captured.err.count("raysim: ") == 1 and str(tmp_path / "runs/notes") in captured.err
    assert status("fedbr/table1", str(tmp_path)) == 0, "a study is named by its folder"
    assert "87.00" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["fedbrr"], "did you mean fedbr?"),
        (["fedbr/table15"], "fedbr/table1"),
        (["fedbr", "runs/a"], "fedbr/table1"),
        (["fedbr/table1", "nowhere"], "nowhere"),
    ],
)
def test_papers_command_prints_errors_on_one_line(
    words: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status(*words) == 2
    text = capsys.readouterr().err
    assert part in text and text.count("\n") == 1


def test_papers_command_prints_tables_as_json() -> None:
    path = Path(report.__file__).parent / "fedbr.json"
    assert len(json.loads(path.read_text())["tables"]) == 14


def test_run_appears_only_in_the_paper_table_for_its_partition(tmp_path: Path) -> None:
    words = ["experiment=fedbss/fashion_mnist", "method=[]", "partition=iid"]
    run = make(tmp_path / "a", [*words, "data.label_noise=0.3", "rounds=5"], rows([0.5]))
    text = compare("fedbss/table2", [run], WIDE)
    assert "50.00*" in line(text, "FedAvg ") or "50.00*" in "".join(lines(text, "FedAvg "))
    assert "rounds=5 instead of 200" in text and "partition.alpha" not in text
    assert "ours" not in compare("fedbss/table1", [run], WIDE)
