"""Store finished runs for the papers' tables: one small JSON file per run.

A file has the run's command and results. `uv run python -m jobs.papers.results RUN...` stores
finished runs. `jobs.papers.report` and `jobs.papers.pages` read them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from jobs.command import run as run_program
from jobs.papers.comparison import OPEN, ROUNDS
from raysim.experiment.compose import compose
from raysim.experiment.config_files import to_dict
from raysim.experiment.instantiate import format_value
from raysim.primitives.errors import RefusedError
from raysim.primitives.files import parse_json
from raysim.results.history import column, summarise, write_json
from raysim.results.stored_runs import Run, chosen_option, find_runs, flat_settings, load_run

RESULTS = Path(__file__).parent / "results"
# Prefixes of the stored columns. Columns of the run's methods are stored as well.
COLUMNS = (
    "accuracy",
    "local_accuracy",
    "best_round",
    "floats_down",
    "clients",
    "worker_seconds",
    "decomposition.",
)
FACTS = (
    "rounds",
    "wall_seconds",
    "model_sha256",
    "state_sha256",
    "identity",
    "split",
)  # of summary.json
# Settings that say where and how a run was executed, not what it computes.
PLACES = (
    "out",
    "resume",
    "tracking",
    "runtime",
    "checkpoint",
    "thresholds",
    "device",
    "state",
    "faults",
)


def stored_runs(paper: str) -> list[Run]:
    """Return the stored runs of a paper."""
    return [_read(path) for path in sorted((RESULTS / paper).glob("*.json"))]


def _read(path: Path) -> Run:
    content = parse_json(path.read_text(encoding="utf-8"))
    history = content["history"]
    rows = [
        dict(zip(history, values, strict=True)) for values in zip(*history.values(), strict=True)
    ]
    summary = {
        **summarise(rows),
        **content["facts"],
        "command": content["command"],
        "hardware": content["hardware"],
    }
    return Run(path.stem, content["config"], rows, summary, path)


def store_run(folder: Path) -> Path:
    """Write the JSON file of a finished run and return its path.

    Raise `RefusedError` for an unfinished run, and for a run without a paper's preset.
    """
    run = load_run(folder)
    experiment = chosen_option(run.config, "experiment")
    if not run.finished:
        raise RefusedError(f"{folder}: this run has not finished. Name finished runs.")
    if "/" not in experiment:
        raise RefusedError(
            f"{folder}: experiment={experiment} is not a paper's preset. Give only folders of runs "
            "with experiment=PAPER/PRESET."
        )
    identity = cast("Mapping[str, object]", run.summary.get("identity") or {})
    config = {key: value for key, value in run.config.items() if key not in PLACES} | {
        "data": _without_places(run.config)
    }
    content = {
        "command": command(run.config),
        "hardware": hardware(identity),
        "facts": {key: run.summary.get(key) for key in FACTS},
        "config": config,
        "history": {name: _short(column(run.rows, name)) for name in _columns(run)},
    }
    text = json.dumps([config["seed"], content["command"]])
    methods = "+".join((run.config.get("method") or {}).keys()) or "fedavg"  # type: ignore[attr-defined]
    paper, _, preset = experiment.partition("/")
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    path = RESULTS / paper / f"{preset}-{methods}-{digest}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(content, path)
    return path


def command(config: Mapping[str, object]) -> str:
    """Return the command of a run, which names the preset, the methods and all changed settings.

    config: the configuration in the run's folder.
    """
    choices, methods = config["choices"], config.get("method") or {}
    assert isinstance(choices, Mapping) and isinstance(methods, Mapping)
    overrides = [f"experiment={choices['experiment']}", f"method={'+'.join(methods) or 'fedavg'}"]
    preset = to_dict(compose(overrides))
    groups = [
        f"{group}={value}"
        for group, value in choices.items()
        if group not in ("method", "experiment", *PLACES) and value != preset["choices"].get(group)
    ]
    defaults = flat_settings(to_dict(compose([*overrides, *groups])))
    settings = flat_settings(config)
    changed = []
    for key, value in settings.items():
        if key not in defaults or value == defaults[key] or (key, defaults[key]) in OPEN:
            continue
        if key in ROUNDS and value == settings["rounds"]:
            continue
        if key.partition(".")[0] in PLACES or _is_place(key):
            continue
        changed.append(f"{key}={format_value(_value(config, key))}")
    path_overrides = ["data.root=DIR"] if "data.root" in settings else []
    return " ".join(
        ["raysim run", *overrides, *groups, *changed, *_execution(config), *path_overrides]
    )


def _execution(config: Mapping[str, object]) -> list[str]:
    """Return a run's overrides of device, lanes, recorded steps and precision.

    These overrides decide the bits of results. Values equal to the defaults "cpu", one lane, no
    recorded steps and "float32" are left out.
    config: the configuration in the run's folder.
    """
    defaults = {"lanes": 1, "graph": False, "precision": "float32"}
    runtime = config.get("runtime") or {}
    assert isinstance(runtime, Mapping)
    overrides = []
    if config.get("device", "cpu") != "cpu":
        overrides.append(f"device={config['device']}")
    for key, value in defaults.items():
        if runtime.get(key, value) != value:
            overrides.append(f"runtime.{key}={format_value(runtime[key])}")
    return overrides


def hardware(identity: Mapping[str, object]) -> str:
    """Describe the hardware of a run: the name of its GPU, or that of its processor.

    identity: the part "identity" of the run's summary.
    """
    device = str(identity.get("device", "cpu"))
    return device if device != "cpu" else str(identity.get("processor", "an unknown processor"))


def _columns(run: Run) -> list[str]:
    """Return the columns to store: scores, costs, and the numbers that methods report."""
    methods = run.config.get("method") or {}
    assert isinstance(methods, Mapping)
    prefixes = (*COLUMNS, *(f"{name}." for name in methods))
    names = dict.fromkeys(name for row in run.rows for name in row)
    return ["round", *(name for name in names if name.startswith(prefixes))]


def _short(values: Sequence[int | float | None]) -> list[int | float | None]:
    return [round(value, 5) if isinstance(value, float) else value for value in values]


def _is_place(key: str) -> bool:
    return key.endswith((".root", ".cache", ".download"))


def _without_places(config: Mapping[str, object]) -> object:
    data = config["data"]
    assert isinstance(data, Mapping)
    return {key: value for key, value in data.items() if not _is_place(f".{key}")}


def _value(config: Mapping[str, object], key: str) -> object:
    value: object = config
    for part in key.split("."):
        assert isinstance(value, Mapping)
        value = value[part]
    return value


def main(arguments: Sequence[str] | None = None) -> None:
    """Store finished runs in `jobs/papers/results`, and print the paths of the stored files.

    arguments: the folders of the runs, studies and sweeps to store; None reads them from the
    command line.
    """
    parser = argparse.ArgumentParser(
        prog="python -m jobs.papers.results",
        description="Store finished runs for the papers' tables.",
    )
    parser.add_argument(
        "runs", metavar="RUN", nargs="+", help="folders of runs, studies and sweeps"
    )
    for name in parser.parse_args(arguments).runs:
        for folder in find_runs(Path(name)):
            print(f"stored the run {folder} in {store_run(folder)}")


if __name__ == "__main__":
    run_program(main)
