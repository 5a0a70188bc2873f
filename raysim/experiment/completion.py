"""Words that a shell can complete to: keys of the configuration, and names of a group's options, after a + too."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from raysim.experiment.compose import compose
from raysim.experiment.config_files import Node, to_dict
from raysim.experiment.groups import NONE, SWEEP, config_folders, find_groups
from raysim.experiment.instantiate import TARGET
from raysim.primitives.errors import Refused


def completions(prefix: str, given: Sequence[str] = (), folders: Sequence[str] = ()) -> list[str]:
    """What the word that begins so may become; given: the words around it, such as method=fedprox."""
    try:
        options = find_groups(config_folders(folders)).files
        key, equals, value = prefix.partition("=")
        if not equals:
            keys = [*options, *_keys(_composed(given, folders))]
            return [word for name in dict.fromkeys(keys) if (word := f"{name}=").startswith(prefix)]
        before = re.split(r"[^+,]*$", value)[0]
        names = [*options.get(key, ()), *([NONE[key]] if key in NONE else [])]
        return [word for name in names if (word := f"{key}={before}{name}").startswith(prefix)]
    except Refused:  # a shell shows no errors
        return []


def _composed(given: Sequence[str], folders: Sequence[str]) -> Node:
    """The configuration that the words around make, as far as they are complete."""
    try:
        return to_dict(compose([word for word in given if not word.startswith(SWEEP)], folders))
    except Refused:
        return to_dict(compose((), folders))


def _keys(node: Mapping[str, object], path: str = "") -> Iterator[str]:
    for name, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from _keys(value, f"{path}{name}.")
        elif name != TARGET and not f"{path}{name}".startswith("choices"):
            yield f"{path}{name}"
