"""Read the files of options; read and write config.yaml, the configuration of a run.

A configuration consists of dictionaries, lists, texts and numbers.
"""

from __future__ import annotations

import functools
import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias, cast

from omegaconf import DictConfig, ListConfig, OmegaConf
from yaml import MarkedYAMLError

from raysim.primitives.errors import RefusedError, first_line
from raysim.primitives.files import regular_file, without_password

Node: TypeAlias = dict[str, Any]

# The entry of `choices` with the keys and groups that the user set; files do not store it.
SET_KEYS = "_set_"


def to_dict(config: DictConfig | Mapping[str, Any]) -> Node:
    """Return a configuration as plain dictionaries and lists.

    A missing value becomes "???".
    """
    if isinstance(config, DictConfig):
        values = OmegaConf.to_container(config, resolve=True, throw_on_missing=False)
        return cast(Node, values)
    return dict(config)


def to_yaml(config: Node) -> str:
    """Return a configuration as YAML for a run's folder, without the passwords in URLs."""
    text = OmegaConf.to_yaml(OmegaConf.create(drop_set_keys(config)))
    return without_password(str(text))


def load_yaml(path: Path, advice: str = "Restore it, or start in a new folder.") -> Node:
    """Read a configuration file.

    advice: sentence that ends the error and says what the user can do.
    Raise `RefusedError` if the file is broken, or is not a dictionary.
    """
    try:
        text = regular_file(path).read_text(encoding="utf-8")
        node = OmegaConf.to_container(parse_yaml(text))
        if not isinstance(node, dict) or not _has_text_keys(node):
            raise ValueError("its lines must have the form `key: value`, with text as keys")
        if "${oc.env" in str(node).replace(" ", ""):
            raise ValueError(
                "it reads an environment variable, whose value would be stored with the results; "
                "write the value itself"
            )
    except Exception as error:  # a damaged file fails in the YAML reader in many ways
        raise RefusedError(f"{path} cannot be read ({_describe_error(error)}). {advice}") from error
    return cast(Node, node)


def parse_yaml(text: str) -> DictConfig | ListConfig:
    """Return the content of a YAML file.

    text: the text of the file.
    """
    return cast("DictConfig | ListConfig", pickle.loads(_pickled_yaml(text)))


# Every composition reads the same files, and parsing a file takes milliseconds. Reading a pickle
# makes a new copy in a fifth of the time of copy.deepcopy.
@functools.lru_cache(maxsize=512)
def _pickled_yaml(text: str) -> bytes:
    return pickle.dumps(OmegaConf.load(io.StringIO(text)))


def _describe_error(error: Exception) -> str:
    if isinstance(error, MarkedYAMLError) and error.problem and error.problem_mark:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    return first_line(error).rstrip(".:")


def _has_text_keys(node: object) -> bool:
    if isinstance(node, dict):
        return all(isinstance(key, str) and _has_text_keys(value) for key, value in node.items())
    if isinstance(node, list):
        return all(_has_text_keys(item) for item in node)
    return True


def is_set(key: str, node: Node) -> bool:
    """Return True if the user set the key, its group, or a key below it.

    A configuration from a file does not say which keys the user set. For such a configuration,
    return True for every key.
    key: a full name, such as "local.lr".
    """
    set_keys = node["choices"].get(SET_KEYS)
    if set_keys is None:
        return True
    return any(
        f"{key}.".startswith(f"{set_key}.") or set_key.startswith(f"{key}.") for set_key in set_keys
    )


def drop_set_keys(node: Node) -> Node:
    """Return the configuration without the list of keys that the user set (`SET_KEYS`).

    Files do not store this list.
    """
    choices = node.get("choices")
    if not isinstance(choices, Mapping) or SET_KEYS not in choices:
        return node
    return {
        **node,
        "choices": {group: name for group, name in choices.items() if group != SET_KEYS},
    }
