"""Complete a word of the command line when the user presses the Tab key.

A word is completed to a key ("local.lr=") or to an option of a group ("method=fedbr+mixup").
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from raysim.experiment.compose import compose
from raysim.experiment.config_files import Node, to_dict
from raysim.experiment.groups import NONE, SWEEP, config_folders, find_groups
from raysim.experiment.instantiate import TARGET
from raysim.primitives.errors import RefusedError


def completions(
    prefix: str, other_words: Sequence[str] = (), folders: Sequence[str] = ()
) -> list[str]:
    """Return the words to which the shell can complete a word when the user presses the Tab key.

    prefix: the word, up to the cursor.
    other_words: the other words of the command.
    folders: the user's own folders of options.
    """
    try:
        options = find_groups(config_folders(folders)).files
        key, equals, value = prefix.partition("=")
        if equals:
            first_options = re.split(r"[^+,]*$", value)[0]
            names = [*options.get(key, ()), *([NONE[key]] if key in NONE else [])]
            words = [f"{key}={first_options}{name}" for name in names]
        else:
            keys = [*options, *_keys(_compose_or_default(other_words, folders))]
            words = [f"{key}=" for key in dict.fromkeys(keys)]
    except RefusedError:  # a shell shows no errors
        return []
    return [word for word in words if word.startswith(prefix)]


def _compose_or_default(words: Sequence[str], folders: Sequence[str]) -> Node:
    try:
        overrides = [word for word in words if not word.startswith(SWEEP)]
        return to_dict(compose(overrides, folders))
    except RefusedError:  # some words are incomplete
        return to_dict(compose((), folders))


def _keys(node: Mapping[str, object], path: str = "") -> Iterator[str]:
    for name, value in node.items():
        key = f"{path}{name}"
        if isinstance(value, Mapping) and value:
            yield from _keys(value, f"{key}.")
        elif name != TARGET and not key.startswith("choices"):
            yield key
