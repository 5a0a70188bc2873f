"""Write and read the folder of `raysim study` and `raysim sweep`.

    study.yaml, sweep.yaml   the overrides of the command, and its --conf folders
    runs/NAME/               the folder of the run NAME
    logs/NAME.txt            what this run printed

This module imports no torch, so a wrong override is refused at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from raysim.experiment.config_files import Node, load_yaml, to_yaml
from raysim.experiment.many_runs import is_resume_requested, wrong_folder_error
from raysim.primitives.errors import RefusedError
from raysim.primitives.files import replace_file
from raysim.results.number_format import format_amount
from raysim.results.progress import format_duration

RUNS, LOGS = "runs", "logs"
OLD_PLANS = {"sweep": "sweep.json"}  # plans of earlier versions, whose folders cannot be continued


def run_folder(folder: Path, name: str) -> Path:
    """Return the folder of a run.

    folder: the folder of the study or sweep.
    name: the name of the run.
    """
    return folder / RUNS / name


def log_file(folder: Path, name: str) -> Path:
    """Return the file with the printed output of a run, and with its error if it failed.

    folder: the folder of the study or sweep.
    name: the name of the run.
    """
    return folder / LOGS / f"{name}.txt"


def plan_file(folder: Path, command: str) -> Path:
    """Return the path of the file that stores a command's overrides and --conf folders.

    folder: the folder of the study or sweep.
    command: "study" or "sweep".
    """
    return folder / f"{command}.yaml"


def configure_run(config: Node, folder: Path, name: str) -> Node:
    """Return a run's configuration with the values of `out` and `resume` for a study or sweep.

    With these values, the run has its own folder, and an unfinished run of the same name continues.
    If `checkpoint.folder` is set, the run's checkpoints get their own subfolder there.
    config: the configuration without these values.
    folder: the folder of the study or sweep.
    name: the name of the run.
    """
    placed = {**config, "out": str(run_folder(folder, name)), "resume": "latest"}
    checkpoint_folder = config["checkpoint"].get("folder")
    if checkpoint_folder:
        own_folder = f"{checkpoint_folder.rstrip('/')}/{name}"
        placed["checkpoint"] = {**config["checkpoint"], "folder": own_folder}
    return placed


def store_plan(
    folder: Path,
    command: str,
    overrides: Sequence[str],
    conf: Sequence[str],
    facts: Mapping[str, object] | None = None,
) -> None:
    """Store the arguments of a study or sweep, so that a later command continues it.

    Also create the folder of the logs.
    command: "study" or "sweep".
    conf: the folders of options that the user named with --conf.
    facts: more values that the continued command needs.
    """
    (folder / LOGS).mkdir(parents=True, exist_ok=True)
    content: Node = {"overrides": list(overrides), "conf": list(conf), **(facts or {})}
    replace_file(plan_file(folder, command), to_yaml(content).encode())


def load_plan(folder: Path, command: str) -> Node:
    """Read study.yaml or sweep.yaml: the command's overrides, --conf folders and further values.

    folder: the folder of the study or sweep.
    command: "study" or "sweep".
    Raise `RefusedError` if the file lacks the overrides or the folders.
    """
    path = plan_file(folder, command)
    plan = load_yaml(path)
    if not {"overrides", "conf"} <= plan.keys():
        raise RefusedError(
            f"{path}: the file lacks the entry 'overrides' or 'conf'. raysim {command} writes "
            f"both. Restore the file, or start the {command} in a new folder."
        )
    return plan


def is_continued(overrides: Sequence[str], command: str, folder: Path) -> bool:
    """Return True if a command continues a study or sweep, False if it starts a new one.

    It continues with resume=latest, unless the folder is missing or empty.
    command: "study" or "sweep".
    Raise `RefusedError` if the folder has files, but nothing that can be continued. Raise it also
    if the folder is missing or empty and the only overrides are `out` and `resume=latest`.
    """
    if not is_resume_requested(overrides, command):
        return False
    if plan_file(folder, command).is_file():
        return True
    old_plan = OLD_PLANS.get(command)
    if old_plan and (folder / old_plan).is_file():
        raise RefusedError(
            f"out={folder}: an earlier version of raysim wrote this {command} ({old_plan}), and "
            "this version cannot continue it. Start a new one in another folder."
        )
    keys = {override.partition("=")[0] for override in overrides}
    is_new = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    if keys <= {"out", "resume"} or not is_new:
        raise wrong_folder_error(command, folder, plan_file(folder, command).name)
    return False


def describe_outcome(
    metric: str, value: float | None, deviation: float | None, rounds: int, seconds: float
) -> str:
    """Describe how a run ended: "accuracy 0.8123 after 20 rounds in 12 s".

    metric: the name of the score.
    value: the score; None if it is unknown.
    deviation: the standard deviation over several seeds; None for a single seed.
    seconds: the wall time.
    """
    score = "unknown" if value is None else plus_minus(value, deviation)
    amount = format_amount(rounds, "round")
    return f"{metric} {score} after {amount} in {format_duration(seconds)}"


def plus_minus(value: float | None, deviation: float | None) -> str:
    """Return a value with its standard deviation as a text: "0.8123 ± 0.0040".

    value: None gives "–".
    deviation: None leaves out the deviation.
    """
    if value is None:
        return "–"
    return f"{value:.4f}" if deviation is None else f"{value:.4f} ± {deviation:.4f}"
