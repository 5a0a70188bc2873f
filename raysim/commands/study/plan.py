"""Plan the runs of a study, from the command's overrides or from study.yaml.

This module imports no torch, so that a wrong override is refused at once.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from raysim.experiment import run_table
from raysim.experiment.compose import compose
from raysim.experiment.config_files import Node, to_dict
from raysim.experiment.groups import find_groups
from raysim.experiment.many_runs import (
    check_free,
    dated_folder,
    local_folder,
    value_label,
)
from raysim.experiment.run_overrides import expand_override, read_full_key
from raysim.primitives.errors import RefusedError
from raysim.primitives.files import user_path
from raysim.results.stored_runs import short_names

# These keys are in the name of every run, so that a continued study can have more values of them.
ALWAYS_NAMED = ("method", "seed")


@dataclass(frozen=True)
class StudyRun:
    """One run of a study.

    name: the name of the run's folder.
    settings: maps keys to the run's values, such as {"method": "fedprox", "partition.alpha":
    "0.1"}. It has the key `method`, and the run's other keys that vary in the study, except the
    seed.
    is_finished: True if the run's folder is complete.
    warnings: warnings about `config`, for the user.
    """

    name: str
    settings: Mapping[str, str]
    seed: int
    config: Node
    is_finished: bool = False
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class StudyPlan:
    """A study before it starts.

    folder: each run has a folder inside it.
    conf: the user's own folders of options.
    overrides: the overrides of each key, such as {"seed": ("seed=0", "seed=1")}.
    runs: all runs, those of the first seed first.
    is_new: True if the folder must not exist yet.
    is_dated: True if there is no `out=`, so that the folder is named after the time of the start.
    """

    folder: Path
    conf: tuple[str, ...]
    overrides: Mapping[str, tuple[str, ...]]
    runs: tuple[StudyRun, ...] = ()
    is_new: bool = False
    is_dated: bool = False

    @property
    def varied(self) -> list[str]:
        """Return the keys with several values, in the order in which the user gave them."""
        return [key for key, overrides in self.overrides.items() if len(overrides) > 1]

    def __str__(self) -> str:
        """Describe the study: the number of runs, the values that vary, and the folder."""
        factors = [f"{len(self.overrides[key])} of {key}" for key in self.varied]
        count = f"{len(self.runs)} run{'s' if len(self.runs) != 1 else ''}"
        product = " x ".join(factors) or "nothing varies"
        return f"{count} ({product}) in {self.folder}; what each prints: {run_table.LOGS}/"

    @property
    def warnings(self) -> list[str]:
        """Return each warning once, with the name of the first run that has it.

        If several runs have the warning, the text also has the number of further runs. If all runs
        have it, the text names no run.
        """
        names_of: dict[str, list[str]] = {}
        for run in self.runs:
            for text in run.warnings:
                names_of.setdefault(text, []).append(run.name)
        lines = []
        for text, names in names_of.items():
            if len(names) == len(self.runs):
                lines.append(text)
            elif len(names) == 1:
                lines.append(f"{text} ({names[0]})")
            else:
                lines.append(f"{text} ({names[0]} and {len(names) - 1} more)")
        return lines

    def log(self, run: StudyRun) -> Path:
        """Return the file with a run's printed output."""
        return run_table.log_file(self.folder, run.name)

    def run_folder(self, run: StudyRun) -> Path:
        """Return the folder of a run."""
        return run_table.run_folder(self.folder, run.name)


# --- the plan -----------------------------------------------------------------------------------
def plan(overrides: Sequence[str], conf: Sequence[str] = ()) -> StudyPlan:
    """Return the study that the overrides describe; the runs of the first seed come first.

    overrides: such as "method=fedavg,fedprox", "seed=0..4" and "rounds=20". There is a run for each
    combination of values. A run that does not have a key, such as FedAvg without method.fedprox.mu,
    ignores the key's override. With resume=latest, the overrides that are stored in the folder
    `out=` are added.
    conf: the user's own folders of options.

    Raise `RefusedError` if no run has a key, or if the folder exists without resume=latest.
    """
    overrides_of = {key: tuple(texts) for key, texts in map(expand_override, overrides)}
    out = overrides_of.pop("out", ())
    overrides_of.pop("resume", None)
    folder = _folder(out)
    conf = tuple(str(user_path(root).absolute()) for root in conf)
    study = StudyPlan(folder, conf, overrides_of)
    if run_table.is_continued(overrides, "study", folder):
        return _with_runs(_merge_stored_plan(study))
    if "resume=latest" in overrides:
        return _with_runs(study)
    check_free(folder)
    return _with_runs(replace(study, is_new=True, is_dated=not out))


def move(study: StudyPlan, folder: Path) -> StudyPlan:
    """Return a copy of the plan with another folder; no files are moved.

    folder: the new folder of the study.
    """
    return _with_runs(replace(study, folder=folder))


def _with_runs(study: StudyPlan) -> StudyPlan:
    runs = tuple(_runs(study))
    names = [run.name for run in runs]
    for name in names:
        if names.count(name) > 1:
            raise RefusedError(
                f"{name}: two runs of this study would have this name. Give each value only once."
            )
    return replace(study, runs=runs)


def _folder(out: Sequence[str]) -> Path:
    if not out:
        return dated_folder(Path("studies"))
    if len(out) > 1:
        raise RefusedError(
            f"{' and '.join(out)}: a study is written into one folder. Keep one of these overrides."
        )
    if "${" in out[0]:  # a reference to another key
        return local_folder(str(to_dict(compose(out))["out"]))
    return local_folder(str(read_full_key(out[0]).value))


def _merge_stored_plan(study: StudyPlan) -> StudyPlan:
    """Return the study with the stored overrides of its folder; new overrides replace old ones."""
    stored = run_table.load_plan(study.folder, "study")
    before = {key: tuple(texts) for key, texts in map(expand_override, stored["overrides"])}
    overrides = {**before, **study.overrides}
    merged = replace(study, overrides=overrides, conf=study.conf or tuple(stored["conf"]))
    for key in overrides:
        varied_before = len(before.get(key, ())) > 1
        varies_now = key in merged.varied
        if key not in ALWAYS_NAMED and varies_now != varied_before:
            values = "several values" if varies_now else "one value"
            raise RefusedError(
                f"{key}: the study in {study.folder} cannot continue with {values} for this key, "
                "because the names of its runs would change. Start another study in a new folder."
            )
    return merged


# --- the runs -----------------------------------------------------------------------------------
def _runs(study: StudyPlan) -> Iterator[StudyRun]:
    combinations = list(_combinations(study))
    name_parts = _name_parts(study.varied)
    seeds = study.overrides.get("seed") or ("",)
    for seed_override, (settings, config) in itertools.product(seeds, combinations):
        seed = _seed(seed_override) if seed_override else config["seed"]
        parts = [settings["method"]]
        for key, value in settings.items():
            if key != "method":
                parts.append(f"{name_parts[key]}-{value}")
        parts.append(f"seed-{seed}")
        name = re.sub(r"[^\w.+-]+", "-", "_".join(parts))
        config = run_table.configure_run({**config, "seed": seed}, study.folder, name)
        yield StudyRun(name, settings, seed, config)


def _seed(override: str) -> int:
    text = override.partition("=")[2]
    if re.fullmatch(r"\d+-\d+", text):
        counted = text.replace("-", "..")
        raise RefusedError(f"{override}: this is not a number. Write seed={counted} for a range.")
    if not text.isdigit():
        raise RefusedError(f"{override}: a seed is a whole number of at least 0. Change it.")
    return int(text)


def _combinations(study: StudyPlan) -> Iterator[tuple[dict[str, str], Node]]:
    """Yield the settings and the configuration of each combination of the overrides' values.

    The override of `seed` is ignored. A combination uses only overrides whose keys exist in its
    configuration: method.fedprox.mu only with method=fedprox. Each configuration is yielded once.
    """
    overrides = {key: texts for key, texts in study.overrides.items() if key != "seed"}
    group_names = find_groups([Path(root) for root in study.conf]).files
    bases: dict[tuple[str, ...], Node] = {}  # by the chosen options
    seen: set[tuple[str, ...]] = set()
    used_keys: set[str] = set()
    for combination in itertools.product(*overrides.values()):
        override_of = dict(zip(overrides, combination, strict=True))
        options = tuple(text for key, text in override_of.items() if key in group_names)
        if options not in bases:
            bases[options] = to_dict(compose(options, study.conf))
        fitting = {}
        for key, text in override_of.items():
            if key in group_names or _has_key(bases[options], key):
                fitting[key] = text
        used_keys.update(fitting)
        texts = tuple(fitting.values())
        if texts in seen:
            continue
        seen.add(texts)
        config = to_dict(compose(texts, study.conf))
        yield _settings(study, config, fitting), config
    unused = [texts[0] for key, texts in overrides.items() if key not in used_keys]
    if unused:
        options = tuple(texts[0] for key, texts in overrides.items() if key in group_names)
        compose([*options, *unused], study.conf)  # refuses unused overrides as a single run does


def _settings(study: StudyPlan, config: Node, overrides: Mapping[str, str]) -> dict[str, str]:
    settings = {"method": value_label(config["choices"]["method"])}
    for key in study.varied:
        if key in overrides and key != "method":
            settings[key] = overrides[key].partition("=")[2].strip("\"'")
    return settings


def _has_key(node: object, key: str) -> bool:
    for part in key.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return False
        node = node[part]
    return True


def _name_parts(keys: Sequence[str]) -> dict[str, str]:
    """Map each key to the short name that stands for it in names of runs.

    This is the part after the key's last dot, or the whole key if several keys have the same last
    part.
    """
    # A run's name is also the name of its folder. If these names changed, a continued study would
    # not find the folders of its runs.
    parts = {}
    for key, short_name in zip(keys, short_names(keys), strict=True):
        parts[key] = key if "." in short_name else short_name
    return parts
