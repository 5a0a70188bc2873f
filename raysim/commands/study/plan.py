"""What a study is asked to do: its runs, from the words of the command or from study.yaml.

Imports no torch, so that a wrong word is refused at once.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from raysim.experiment.compose import compose
from raysim.experiment.config_files import Node, load_yaml, to_dict
from raysim.experiment.groups import find_groups
from raysim.experiment.many_runs import (
    asked_to_continue,
    check_free,
    dated_folder,
    not_a_folder_of,
    short_names,
    value_label,
)
from raysim.experiment.run_overrides import expand_override
from raysim.primitives.errors import Refused
from raysim.primitives.files import user_path
from raysim.results.tracking import default_uri

ALWAYS = (
    "method",
    "seed",
)  # in every run's name, so that a study can be continued with more of them


@dataclass(frozen=True)
class Cell:
    """One run of a study: what sets it apart from the others, and its configuration."""

    name: str  # of its folder
    settings: Mapping[
        str, str
    ]  # what varies, without the seed: {"method": "fedprox", "partition.alpha": "0.1"}
    seed: int
    config: Node
    finished: bool = False
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Campaign:
    """What a study is asked to do: its words, and the runs that follow from them."""

    folder: Path
    conf: tuple[str, ...]
    words: Mapping[str, tuple[str, ...]]  # for each key, an override for each of its values
    cells: tuple[Cell, ...] = ()
    is_new: bool = False
    is_dated: bool = False  # whether the folder's name is the time of the start

    @property
    def varied(self) -> list[str]:
        """Keys with several values, in the order in which they were given."""
        return [key for key, words in self.words.items() if len(words) > 1]

    def __str__(self) -> str:
        """How many runs, of what, and where."""
        factors = [f"{len(words)} of {key}" for key, words in self.words.items() if len(words) > 1]
        count = f"{len(self.cells)} run{'s' if len(self.cells) != 1 else ''}"
        return f"{count} ({' x '.join(factors) or 'nothing varies'}) in {self.folder}; what each prints: logs/"

    @property
    def warnings(self) -> list[str]:
        """What the runs are warned of, each once; with the first run and the number of others, if it is not all."""
        said: dict[str, list[str]] = {}
        for cell in self.cells:
            for text in cell.warnings:
                said.setdefault(text, []).append(cell.name)
        lines = []
        for text, (first, *others) in said.items():
            whose = f"{first} and {len(others)} more" if others else first
            lines.append(text if len(others) + 1 == len(self.cells) else f"{text} ({whose})")
        return lines

    def log(self, cell: Cell) -> Path:
        """Where a run's own output goes."""
        return self.folder / "logs" / f"{cell.name}.txt"

    def results(self, cell: Cell) -> Path:
        """The folder of a run."""
        return self.folder / "runs" / cell.name


# --- the plan -------------------------------------------------------------------------------------------------------
def plan(words: Sequence[str], conf: Sequence[str] = ()) -> Campaign:
    """The runs of a study, those of the first seed first; reads study.yaml where it is continued. Raises Refused.

    words: overrides as for `raysim run`, each with any number of values: "method=fedavg,fedprox", "seed=0..4",
    "rounds=20". A key that only some of a group's options have (method.fedprox.mu) is for those runs alone.
    """
    given = {key: tuple(each) for key, each in map(expand_override, words)}
    out, _ = (given.pop(key, ()) for key in ("out", "resume"))
    campaign = Campaign(
        _folder(out), tuple(str(user_path(root).absolute()) for root in conf), given
    )
    if asked_to_continue(words, "study"):
        campaign = _continued(campaign)
    else:
        check_free(campaign.folder)
        campaign = replace(campaign, is_new=True, is_dated=not out)
    return _with_cells(campaign)


def moved(campaign: Campaign, folder: Path) -> Campaign:
    """Return the same study, planned for another folder."""
    return _with_cells(replace(campaign, folder=folder))


def _with_cells(campaign: Campaign) -> Campaign:
    cells = tuple(_cells(campaign))
    names = [cell.name for cell in cells]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise Refused(
            f"two runs of this study would be called {twice}: give each value of a key once"
        )
    return replace(campaign, cells=cells)


def _folder(out: Sequence[str]) -> Path:
    if not out:
        return dated_folder(Path("studies"))
    if len(out) > 1:
        raise Refused(f"{' and '.join(out)} are two folders, but a study has one: name one")
    return user_path(str(to_dict(compose(out))["out"]))


def _continued(campaign: Campaign) -> Campaign:
    """The study in the folder; what is given now takes the place of what its study.yaml says of the same keys."""
    folder, path = campaign.folder, campaign.folder / "study.yaml"
    if not path.is_file():
        if not campaign.words or (
            folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
        ):
            raise not_a_folder_of("study", folder, path.name)
        return campaign
    stored = load_yaml(path)
    if not isinstance(stored, dict) or not {"overrides", "conf"} <= stored.keys():
        raise Refused(f"{path} holds no study: restore it, or start in a new folder")
    before = {key: tuple(each) for key, each in map(expand_override, stored["overrides"])}
    merged = replace(
        campaign, words={**before, **campaign.words}, conf=campaign.conf or tuple(stored["conf"])
    )
    for key in merged.words:
        if key not in ALWAYS and (key in merged.varied) != (len(before.get(key, ())) > 1):
            raise Refused(
                f"the study in {folder} has {'several values' if key in merged.varied else 'one value'} of {key} now, "
                "which would rename its runs: start another study in a new folder"
            )
    return merged


def _cells(campaign: Campaign) -> Iterator[Cell]:
    settings = list(_settings(campaign))
    parts = _name_parts(campaign.varied)
    seeds = campaign.words.get("seed") or ("",)
    for word, (labels, config) in itertools.product(seeds, settings):
        seed = _seed(word) if word else config["seed"]
        varied = [f"{parts[key]}-{label}" for key, label in labels.items() if key != "method"]
        name = "_".join([labels["method"], *varied])
        name = re.sub(r"[^\w.+-]+", "-", f"{name}_seed-{seed}")
        own: dict[str, object] = {
            "seed": seed,
            "out": str(campaign.folder / "runs" / name),
            "resume": "latest",
        }
        if kept := config["checkpoint"].get("folder"):
            own["checkpoint"] = {**config["checkpoint"], "folder": f"{kept.rstrip('/')}/{name}"}
        tracking = config["tracking"]
        if (
            tracking["name"] == "mlflow" and tracking["uri"] is None
        ):  # beside the runs, not among them
            own["tracking"] = {**tracking, "uri": default_uri(campaign.folder)}
        yield Cell(name, labels, seed, {**config, **own})


def _seed(word: str) -> int:
    text = word.partition("=")[2]
    if re.fullmatch(r"\d+-\d+", text):
        raise Refused(
            f"{word} is no number: write seed={text.replace('-', '..')} for all from the first to the last"
        )
    if not text.isdigit():
        raise Refused(f"{word} must be a whole number of at least 0")
    return int(text)


def _settings(campaign: Campaign) -> Iterator[tuple[dict[str, str], Node]]:
    """Each combination of values but the seed's, once: what to call it, and its configuration."""
    words = {key: each for key, each in campaign.words.items() if key != "seed"}
    known = find_groups([Path(root) for root in campaign.conf]).files
    bases: dict[tuple[str, ...], Node] = {}  # the configuration that the chosen options make
    seen, used = set(), set()  # type: set[tuple[str, ...]], set[str]
    for combination in itertools.product(*words.values()):
        chosen = dict(zip(words, combination, strict=True))
        options = tuple(word for key, word in chosen.items() if key in known)
        if options not in bases:
            bases[options] = to_dict(compose(options, campaign.conf))
        base = bases[options]
        fits = {key: word for key, word in chosen.items() if key in known or _has(base, key)}
        used.update(fits)
        if (same := tuple(fits.values())) in seen:
            continue
        seen.add(same)
        config = to_dict(compose(list(fits.values()), campaign.conf))
        labels = {"method": value_label(config["choices"]["method"])}
        labels |= {
            k: fits[k].partition("=")[2].strip("\"'")
            for k in campaign.varied
            if k in fits and k != "method"
        }
        yield labels, config
    if unknown := [
        each[0] for key, each in words.items() if key not in used
    ]:  # refused in the words of a run
        compose(
            [*(each[0] for key, each in words.items() if key in known), *unknown], campaign.conf
        )


def _has(node: object, key: str) -> bool:
    for part in key.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return False
        node = node[part]
    return True


def _name_parts(keys: Sequence[str]) -> dict[str, str]:
    """What each key is called in the names of runs: its last part, or the whole key where another one ends alike.

    Not as short as in tables, because the folders of a study that is continued must be found under their names.
    """
    return {
        key: key if "." in name else name for key, name in zip(keys, short_names(keys), strict=True)
    }
