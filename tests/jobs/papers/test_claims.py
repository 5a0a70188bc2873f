"""Test the papers' claims: printed numbers, settings, and verdicts from stored runs."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from test_studies import started

from jobs.papers import gpu, results
from jobs.papers.claims import (
    CLAIMS,
    LENGTHS,
    SKEW,
    VERDICTS,
    Claim,
    claims_table,
    findings,
    seeds_needed,
    verdicts,
)
from jobs.papers.results import stored_runs
from jobs.papers.settings import SETTINGS, Setting, find_setting, overrides_of, setting_of
from jobs.papers.tables import PAPERS
from raysim.commands.study.plan import plan
from raysim.experiment.config_files import drop_set_keys
from raysim.results.significance import MIN_PAIRS
from raysim.results.stored_runs import Run

ALL = [claim for paper in PAPERS for claim in CLAIMS[paper]]
SKEW_CLAIM = next(claim for claim in CLAIMS["fedbss"] if claim.settings == SKEW)


def stored_run(method: str, seed: int, accuracy: float, setting: str = "skew-slow") -> Run:
    """Return a run of ten rounds that all have the same accuracy.

    method: the overrides that select the method.
    setting: the name of the setting in `jobs.papers.settings`.
    """
    overrides = " ".join(find_setting(setting).overrides)
    command = f"raysim run {method} seed={seed} device=cuda {overrides} data.root=DIR"
    rows = [{"round": number, "accuracy_global": accuracy} for number in range(10)]
    summary = {"command": command, "split": {"label_entropy": 0.1}}
    return Run("x", {"seed": seed}, rows, summary, Path("x"))


def pairs(gains: Sequence[float], base: float = 0.7, setting: str = "skew-slow") -> list[Run]:
    """Return a run of FedAvg and a run of FedBSS for each of the seeds 0, 1, ...

    gains: for each seed, the accuracy of FedBSS minus that of FedAvg.
    base: the accuracy of FedAvg.
    """
    runs = []
    for seed, gain in enumerate(gains):
        runs.append(stored_run("method=fedavg", seed, base, setting))
        words = "method=fedbss method.fedbss.warmup_rounds=20"
        runs.append(stored_run(words, seed, base + gain, setting))
    return runs


@pytest.mark.parametrize(
    ("gains", "verdict"),
    [
        ([0.05, 0.06, 0.07], "supported"),
        ([-0.05, -0.06, -0.07], "contradicted"),
        ([-0.05, 0.06, 0.01], "undecided"),
        ([0.05, 0.06], "undecided"),
    ],
)
def test_verdict_on_a_claim_follows_from_the_confidence_interval(
    gains: list[float], verdict: str
) -> None:
    (finding,) = findings(SKEW_CLAIM, pairs(gains))
    assert finding.verdict == verdict
    assert bool(finding.to_decide()) == (verdict == "undecided")
    # A claim that the score is lower has the opposite verdict.
    lower = replace(finding, claim=replace(SKEW_CLAIM, higher=False))
    opposite = {"supported": "contradicted", "contradicted": "supported"}
    assert lower.verdict == opposite.get(verdict, verdict)


def test_claim_is_undecided_if_accuracy_is_below_80_percent_of_the_paper() -> None:
    # 80 % of the printed 69.48 is 55.58.
    for base, is_trained in ((0.55, False), (0.56, True)):
        (finding,) = findings(SKEW_CLAIM, pairs([0.05, 0.06, 0.07], base))
        assert finding.is_trained == is_trained
        assert finding.verdict == ("supported" if is_trained else "undecided")
    (untrained,) = findings(SKEW_CLAIM, pairs([0.05, 0.06, 0.07], 0.55))
    assert "55.0 %" in untrained.to_decide() and "`skew-paper-80`" in untrained.to_decide()


def test_claim_with_three_equal_differences_needs_at_least_four_seeds() -> None:
    (finding,) = findings(SKEW_CLAIM, pairs([0.0, 0.0, 0.0]))
    assert finding.verdict == "undecided"
    assert finding.to_decide() == "4 seeds or more"


def test_paper_claim_is_judged_for_each_setting() -> None:
    runs = pairs([0.05, 0.06, 0.07]) + pairs([-0.05, -0.06, -0.07], setting="skew-fast")
    first, second = findings(SKEW_CLAIM, runs)
    assert (first.setting.name, first.verdict) == ("skew-slow", "supported")
    assert (second.setting.name, second.verdict) == ("skew-fast", "contradicted")


def test_interval_excludes_zero_with_the_predicted_number_of_seeds() -> None:
    # t(0.975, 9) = 2.262: with ten pairs the half width is 0.715 deviations, with nine 0.769.
    assert seeds_needed(1.0, 0.74) == "about 10" == seeds_needed(2.0, -1.48)
    assert seeds_needed(1.0, 0.01) == "more than 100"


@pytest.mark.parametrize("claim", ALL, ids=lambda claim: claim.text)
def test_every_claim_of_a_paper_has_settings_and_either_numbers_or_a_source(claim: Claim) -> None:
    numbers = claim.printed_numbers()
    assert (numbers is None) == bool(claim.source)
    assert numbers is None or (numbers[0] > numbers[1]) == claim.higher, "as the paper claims"
    assert claim.settings and all(find_setting(name) for name in claim.settings)


def test_fedbss_claims_about_label_noise_have_the_numbers_printed_in_the_paper() -> None:
    printed = [claim.printed_numbers() for claim in CLAIMS["fedbss"][:3]]
    assert printed == [(78.88, 75.28), (79.91, 78.44), (80.63, 80.19)]


@pytest.mark.parametrize("paper", PAPERS)
def test_claims_table_suggests_runs_for_undecided_claims_only(paper: str) -> None:
    runs = stored_runs(paper)
    rows = claims_table(paper, runs).splitlines()[2:]
    assert len(rows) == len(list(verdicts(paper, runs)))
    for row in rows:
        *_, verdict, decide, _ = [cell.strip() for cell in row.strip("| ").split(" | ")]
        assert verdict.strip("*") in VERDICTS
        assert ("undecided" in verdict) == (decide != "–")


def test_settings_of_paper_claims_have_unique_names_and_overrides() -> None:
    assert len({setting.name for setting in SETTINGS}) == len(SETTINGS)
    assert len({setting.overrides for setting in SETTINGS}) == len(SETTINGS)
    assert (
        setting_of(["rounds=1", "a=2"]).name
        == setting_of(["rounds=1", "a=2"]).name
        != setting_of(["a=2"]).name
    )


@pytest.mark.parametrize("paper", PAPERS)
def test_every_stored_run_belongs_to_a_named_setting(paper: str) -> None:
    for run in stored_runs(paper):
        assert not setting_of(overrides_of(run)[1]).name.startswith("setting-"), run.summary[
            "command"
        ]


@pytest.mark.slow
def test_study_command_of_a_paper_setting_contains_the_overrides_of_that_setting(
    tmp_path: Path,
) -> None:
    for setting in SETTINGS:
        if not setting.study.startswith("bash jobs/studies.sh "):
            continue
        folder = tmp_path / setting.name
        folder.mkdir()
        name = setting.study.split()[-1]
        studies = [words for words in started(folder, name) if words[1] == f"out=studies/{name}"]
        assert len(studies) == 1, setting.name
        wanted = set(setting.overrides)
        run = {word for text in studies[0] for word in _values(text)}
        assert wanted - run <= DEFAULTS, (setting.name, wanted - run)


@pytest.mark.slow
def test_study_of_a_setting_runs_all_methods_that_claims_compare_there(tmp_path: Path) -> None:
    methods_by_command: dict[str, set[tuple[str, str]]] = {}
    for claim in ALL:
        for setting in map(find_setting, claim.settings):
            if setting.study not in methods_by_command:
                methods_by_command[setting.study] = set(_planned(setting, tmp_path))
            planned = methods_by_command[setting.study]
            for method in (claim.method, claim.other):
                assert (setting.name, method) in planned, f"{setting.study}: {claim.text}"


def test_gpu_study_of_a_paper_claim_has_enough_seeds_for_a_verdict() -> None:
    for claim in ALL:
        for setting in map(find_setting, claim.settings):
            for study in gpu.STUDIES:
                if study.name in setting.study.split():
                    assert len(study.seeds) >= MIN_PAIRS, study.name


def _planned(setting: Setting, folder: Path) -> Iterator[tuple[str, str]]:
    """Yield settings and methods of all runs that a setting's study makes, for one seed.

    The methods are written without the overrides in `LENGTHS`.
    folder: a folder for the files of `started`.
    """
    program, *words = shlex.split(setting.study.removeprefix("bash "))
    if program == "jobs/studies.sh":
        place = folder / setting.name
        place.mkdir()
        studies = [study[1:] for study in started(place, *words)]
    elif program == "jobs/papers/gpu.sh":
        chosen = [study for study in gpu.STUDIES if study.name in words]
        studies = [[*study.setting, *method] for study in chosen for method in study.methods]
    else:
        studies = [words[1:]]
    for overrides in studies:
        unused = ("seed=", "out=", "resume=", "data.root=")
        kept = [word for word in overrides if not word.startswith(unused)]
        for cell in plan([*kept, f"out={folder / 'new'}"]).runs:
            config = drop_set_keys(cell.config)
            run = Run("x", config, [], {"command": results.command(config)}, folder)
            methods, others = overrides_of(run)
            methods = [word for word in methods if not word.startswith(LENGTHS)]
            yield setting_of(others).name, " ".join(methods)


# Values that the presets already have.
DEFAULTS = {"partition.alpha=0.1"}


def _values(override: str) -> list[str]:
    """Split an override with several values into overrides with one value each.

    A number with ".0" loses these two characters: "key=5.0,6" gives "key=5" and "key=6". A list in
    brackets is one value.
    """
    key, _, values = override.partition("=")
    if values.startswith("["):
        return [override]
    # Whole numbers in the settings of claims have no ".0".
    numbers = [value.removesuffix(".0") for value in values.split(",")]
    return [f"{key}={value}" for value in numbers]
