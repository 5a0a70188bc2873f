"""Read the runs that folders store, and name them by the settings that distinguish them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from raysim.primitives.files import conf_folder, parse_json, without_password
from raysim.primitives.stores import is_url, temporary_copy
from raysim.results.history import lower_metrics, read_history, summarise
from raysim.results.tables import MISSING

UNFINISHED = " (unfinished)"
GROUPS = ("method", "data", "partition")  # configuration groups that the table shows
RUN_FILES = ("config.yaml", "history.parquet")  # files of a run that can be shown
SAMPLES = "samples.txt"  # in a run's folder: text that a language model wrote
CHECKPOINTS = "checkpoints"  # in a run's folder
REPORT_SUFFIXES = (".yaml", ".parquet", ".json", ".jsonl", ".txt")  # of files that reports read
# Keys that do not distinguish the runs of a study.
OMITTED_KEYS = ("_target_", "out", "resume", "choices", "tracking", "hydra")


@dataclass(frozen=True)
class Run:
    """A run as its folder describes it.

    name: the name of the folder.
    rows: the history, a row per round.
    summary: the content of summary.json; computed from the history for an unfinished run.
    folder: the folder on this machine.
    url: where the folder was fetched from; "" if it was not.
    """

    name: str
    config: dict[str, object]
    rows: list[dict[str, int | float | None]]
    summary: dict[str, object]
    folder: Path = Path()
    finished: bool = True
    url: str = ""

    @property
    def address(self) -> str:
        """Return the URL of the run; without a URL, its folder."""
        return self.url or str(self.folder)


# --- reading --------------------------------------------------------------------------------------
def is_result_file(name: str) -> bool:
    """Return True for a file that belongs to a run's results.

    Files of checkpoints are no results. If the name of the file or of a folder in its path starts
    with a dot, the file is no result either: it is a lock or unfinished.
    name: the file's path inside a folder of runs.
    """
    *folders, _ = parts = PurePosixPath(name).parts
    return CHECKPOINTS not in folders and not any(part.startswith(".") for part in parts)


def is_report_file(name: str) -> bool:
    """Return True for a file that `raysim report` reads.

    name: the file's path inside a folder of runs.
    """
    return is_result_file(name) and name.endswith(REPORT_SUFFIXES)


def load_run(folder: Path, url: str = "") -> Run:
    """Read a run's folder; the summary of an unfinished run is computed from its history.

    url: where the folder was fetched from; "" if it was not.
    Raises `ValueError` if the folder is no run, has no finished round, or has a broken file.
    """
    folder = Path(folder)
    if url and not (folder.is_dir() and any(folder.iterdir())):
        raise ValueError(
            f"{without_password(url)} has no files; give a URL that `raysim run out=URL` wrote."
        )
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; give one that `raysim run out=DIR` wrote.")
    missing = [name for name in RUN_FILES if not (folder / name).is_file()]
    if missing:
        inside = sorted(path.parent.name for path in folder.glob("*/history.parquet"))
        hint = "give one that `raysim run out=DIR` wrote."
        if inside:
            hint = f"did you mean {folder / inside[0]}?"
        raise ValueError(
            f"{folder} is not the folder of a run: it has no {' and no '.join(missing)}; {hint}"
        )
    rows = read_history(folder / "history.parquet")
    if not rows:
        raise ValueError(
            f"{folder} has a history without rounds; wait until the run has finished a round."
        )
    finished = (folder / "summary.json").is_file()
    config = _read_mapping(folder / "config.yaml", _parse_yaml)
    if finished:
        summary = _read_mapping(folder / "summary.json", parse_json)
    else:
        summary = summarise(rows, lower=lower_metrics(config))
    return Run(folder.resolve().name, config, rows, summary, folder, finished, url)


def load_runs(paths: Sequence[str | Path], warn: Callable[[str], object]) -> list[Run]:
    """Read the runs at these paths and URLs; skip files and folders that no run wrote.

    warn: function that gets one sentence with the names of the skipped folders. Folders with
    artifacts of MLflow are skipped without a warning.
    Raises `ValueError` if `paths` is empty, there is no run, a path does not exist, or a run has a
    broken file or no finished round.
    """
    from raysim.results.mlflow_server import ARTIFACTS

    if not paths:
        raise ValueError(
            "runs: the list of runs is empty. Give at least one folder of a run, study or sweep."
        )
    urls: dict[Path, str] = {}  # of the folders that were fetched
    paths_found = []
    for name in paths:
        folder = Path(name)
        if is_url(name):
            folder = temporary_copy(str(name), is_report_file)
        for path in find_runs(folder):
            paths_found.append(path)
            if is_url(name):
                inside = path.relative_to(folder).as_posix()
                urls[path] = f"{str(name).rstrip('/')}/{inside}".removesuffix("/.")
    runs = []
    skipped = []
    for path in paths_found:
        if path.is_file():
            continue
        is_run = not path.is_dir() or all((path / name).is_file() for name in RUN_FILES)
        if is_run:
            runs.append(path)
        elif path.name != ARTIFACTS:
            skipped.append(str(path))
    # If there is no run, read the first path: its error says what is missing.
    loaded = [load_run(path, urls.get(path, "")) for path in runs or paths_found]
    if runs and skipped:
        files = " or no ".join(RUN_FILES)
        warn(f"these folders are skipped, because they have no {files}: {', '.join(skipped)}")
    return loaded


def find_runs(folder: Path) -> list[Path]:
    """Return the folders of the runs in a study or a sweep; for any other folder, [folder]."""
    histories = folder.glob("runs/*/history.parquet")
    return sorted(path.parent for path in histories) or [folder]


def _parse_yaml(text: str) -> object:
    import yaml

    # The loader in C takes a sixth of the time.
    loader = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
    try:
        return yaml.load(text, loader)
    except Exception as error:  # the YAML reader raises errors of many kinds
        raise ValueError(str(error)) from error


def _read_mapping(path: Path, parse: Callable[[str], object]) -> dict[str, object]:
    try:
        content = parse(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(
            f"{path} is damaged and cannot be read; restore the file or start the run again."
        ) from error
    mapping = as_mapping(content)
    if not mapping:
        raise ValueError(
            f"{path} contains no keys with values; restore the file or start the run again."
        )
    return dict(mapping)


def as_mapping(value: object) -> Mapping[str, object]:
    """Return a mapping unchanged, and an empty mapping for any other value."""
    return value if isinstance(value, Mapping) else {}


# --- names ----------------------------------------------------------------------------------------
def chosen_option(config: Mapping[str, object], group: str) -> str:
    """Return the option of a group in a run's configuration, such as "dirichlet".

    If a configuration of an older version has no options, guess from the group's settings. Without
    such settings, return "fedavg" for the group "method", else `MISSING`.
    """
    value = as_mapping(config.get("choices")).get(group)
    if value is None:
        value = config.get(group)
    if isinstance(value, Mapping):
        class_name = str(value.get("_target_", "")).rpartition(".")[2]
        value = value.get("name") or class_name or list(value)
    if isinstance(value, (list, tuple)):
        value = " + ".join(str(item) for item in value)
    if value:
        return str(value)
    return "fedavg" if group == "method" else MISSING


def flat_settings(config: Mapping[str, object], prefix: str = "") -> dict[str, str]:
    """Return every value of a config, as text, by a key with dots such as "local.lr".

    Leave out the keys in `OMITTED_KEYS` at every level, because they are no settings.
    prefix: the beginning of all keys.
    """
    flat: dict[str, str] = {}
    for key, value in config.items():
        if key in OMITTED_KEYS:
            continue
        if isinstance(value, Mapping):
            flat.update(flat_settings(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = str(value)
    return flat


def chosen_options(config: Mapping[str, object]) -> dict[str, str]:
    """Map each group in `GROUPS` to its option.

    The group "loss" is added if its option is not "usual".
    config: the configuration of a run.
    """
    has_own_loss = chosen_option(config, "loss") not in (MISSING, "usual")
    groups = (*GROUPS, "loss") if has_own_loss else GROUPS
    return {group: chosen_option(config, group) for group in groups}


def differing_settings(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Return the configuration keys whose values differ between runs, with the runs' values.

    The result maps a key, such as "local.lr", to one text for each run; "–" if a run lacks the key.
    The first keys are configuration groups, such as "method", with options as values.
    """
    settings = [{**chosen_options(run.config), **flat_settings(run.config)} for run in runs]
    keys = dict.fromkeys(key for run_settings in settings for key in run_settings)
    differing = {}
    for key in keys:
        values = [run_settings.get(key, MISSING) for run_settings in settings]
        if len(set(values)) > 1:
            differing[key] = values
    return differing


def distinguishing_settings(runs: Sequence[Run]) -> tuple[dict[str, list[str]], int]:
    """Return the configuration keys that distinguish runs, and the number of omitted keys.

    The first result maps a key of `differing_settings` to a list with the value of each run. A key
    such as `partition.alpha` is omitted if only some runs have it, and all of these use the
    default. The key `partition` already distinguishes such runs. Keys of methods are never omitted.
    """
    differing = differing_settings(runs)
    shown = {}
    for key, values in differing.items():
        if not _is_implied_default(runs, key, values, differing):
            shown[key] = values
    return shown, len(differing) - len(shown)


def _is_implied_default(
    runs: Sequence[Run], key: str, values: Sequence[str], differing: Mapping[str, object]
) -> bool:
    group, _, inside = key.partition(".")
    is_option_listed = bool({group, f"{group}.name"} & differing.keys())
    if MISSING not in values or not inside or group == "method" or not is_option_listed:
        return False
    for run, value in zip(runs, values, strict=True):
        defaults = _defaults(group, chosen_option(run.config, group))
        if value != MISSING and defaults.get(inside) != value:
            return False
    return True


def _defaults(group: str, option: str) -> dict[str, str]:
    """Read the configuration file of an option; return its values as text, by dotted key.

    Return {} if raysim has no such file.
    group, option: for example "partition" and "dirichlet".
    """
    path = conf_folder() / group / f"{option}.yaml"
    if not re.fullmatch(r"\w+", option) or not path.is_file():
        return {}
    return flat_settings(as_mapping(_parse_yaml(path.read_text(encoding="utf-8"))))


def run_labels(runs: Sequence[Run]) -> list[str]:
    """Return a label for each run, in the order of the runs.

    The label is the name of the run's folder. Runs with equal folder names get the differing
    settings ("fedprox, alpha=0.1") as label. Labels that are still equal get the URL or path in
    brackets. The label of an unfinished run ends with " (unfinished)".
    """
    names = [run.name for run in runs]
    for name in {name for name in names if names.count(name) > 1}:
        twins = [index for index, other in enumerate(names) if other == name]
        differing = differing_settings([runs[index] for index in twins])
        # If only some runs have a key, it follows from an option that is named already. It is
        # used only if nothing else differs.
        shared = {key: values for key, values in differing.items() if MISSING not in values}
        settings = _without_implied(shared or differing)
        key_names = short_names(list(settings))
        for place, index in enumerate(twins):
            texts = []
            for (key, values), key_name in zip(settings.items(), key_names, strict=True):
                value = values[place]
                if value != MISSING:
                    texts.append(value if key == "method" else f"{key_name}={value}")
            names[index] = ", ".join(texts) or name

    labels = []
    for name, run in zip(names, runs, strict=True):
        label = f"{name} ({without_password(run.address)})" if names.count(name) > 1 else name
        labels.append(label if run.finished else f"{label}{UNFINISHED}")
    return labels


def _without_implied(settings: Mapping[str, Sequence[str]]) -> dict[str, Sequence[str]]:
    """Remove the settings whose values follow from the runs' methods; return all others.

    The value of a setting follows if runs with equal methods always have equal values of it. The
    key "method" is not removed. If `settings` lacks this key, nothing is removed.
    settings: by key, the value of each run.
    """
    methods = settings.get("method")
    if methods is None:
        return dict(settings)
    kept = {}
    for key, values in settings.items():
        is_implied = len(set(zip(methods, values, strict=True))) == len(set(methods))
        if key == "method" or not is_implied:
            kept[key] = values
    return kept


def short_names(keys: Sequence[str]) -> list[str]:
    """Return a short name for each key: the shortest end of the key that no other key has.

    "method.fedbr.lam" becomes "lam" if no other key ends in "lam".
    """
    names = []
    for key in keys:
        parts = key.split(".")
        count = 1
        while count < len(parts):
            tail = parts[-count:]
            same_tails = [other for other in keys if other.split(".")[-count:] == tail]
            if len(same_tails) < 2:
                break
            count += 1
        names.append(".".join(parts[-count:]))
    return names
