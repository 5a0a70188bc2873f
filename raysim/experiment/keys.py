"""Check the keys that a user sets in a composed configuration, and set their values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from raysim.experiment.groups import LISTS, NONE, Groups, join_options, options_with_key
from raysim.experiment.run_overrides import read_setting
from raysim.primitives.errors import RefusedError, first_line, nearest, suggest

# Keys that may have entries of any name.
FREE_MAPPINGS = (
    "runtime.resources",
    "local.rates",
    "learner.options",
    "learner.run_config",
    "learner.train_config",
    "learner.evaluate_config",
)
# The only keys of runtime that the bits of a run depend on.
RUNTIME_KEYS_OF_BITS = ("runtime.threads", "runtime.lanes", "runtime.graph", "runtime.precision")
# Keys of earlier versions, and their new names.
RENAMED_KEYS = {"runtime.hosts": "runtime.workers", "sweep.hosts": "sweep.workers"}
# Keys of earlier versions that were removed, and why.
REMOVED_KEYS = {"summation": "updates are added up in a fixed order on any number of workers"}
# Usual names in other programs, and the keys that they mean.
OTHER_NAMES = {
    **dict.fromkeys(("learning_rate", "client_lr", "local_lr", "eta"), "local.lr"),
    **dict.fromkeys(("batch_size", "local_batch_size", "bs"), "local.batch"),
    **dict.fromkeys(("num_epochs", "local_epoch", "num_local_epochs", "E"), "local.epochs"),
    **dict.fromkeys(("num_clients", "n_clients", "total_clients"), "partition.clients"),
    **dict.fromkeys(("clients_per_round", "cohort_size", "sample_clients"), "schedule.cohort"),
    **dict.fromkeys(("global_rounds", "global_epoch", "comm_rounds", "T"), "rounds"),
    **dict.fromkeys(("dataset", "dataset_name"), "data"),
    **dict.fromkeys(("algorithm", "strategy", "aggregator"), "method"),
    **dict.fromkeys(("model_name", "network", "net"), "model"),
}
# If the user sets one key, the other becomes null. A checksum belongs to the file of its line.
ALTERNATIVES = (("local.epochs", "local.steps"), ("init.file", "init.sha256"))

_LAUNCHER_ADVICE = (
    "raysim study --parallel N makes runs side by side, raysim sweep on all nodes of a Ray cluster"
)
_SWEEPER_ADVICE = "raysim sweep searches, as sweep.search says: random, grid or optuna"
# Keys of Hydra, and what to use instead.
_HYDRA_ADVICE = {
    "hydra/launcher": _LAUNCHER_ADVICE,
    "hydra.launcher": _LAUNCHER_ADVICE,
    "hydra/sweeper": _SWEEPER_ADVICE,
    "hydra.sweeper": _SWEEPER_ADVICE,
    "hydra.mode": "raysim study makes several runs, raysim sweep searches",
    "hydra": "out=DIR names the folder of the results, and all other settings are raysim's own",
}


def check_key(config: DictConfig, key: str, groups: Groups) -> None:
    """Raise `RefusedError` for a key that the configuration does not have."""
    node: Any = config
    path: list[str] = []
    for part in key.split("."):
        is_inner_key = isinstance(node, DictConfig) and part in node
        if is_inner_key and (path or part != "choices"):
            node = _value_before(node, part)
            path.append(part)
            continue
        if ".".join(path) in FREE_MAPPINGS:
            return
        raise RefusedError(_unknown_key(config, node, path, part, key, groups))


def _unknown_key(
    config: DictConfig, node: Any, path: list[str], part: str, key: str, groups: Groups
) -> str:
    """Return the error text for a key that does not exist.

    node: the value at `path`.
    path: the parts of the key that exist, such as ["local", "optimizer"].
    part: the part after `path`, such as "rate".
    key: the whole key, such as "local.optimizer.rate".
    """
    where = ".".join(path)
    if not isinstance(node, DictConfig):
        if OmegaConf.is_list(node):
            return f"{key} does not exist: {where} is a list, so write {where}=VALUE+VALUE"
        return f"{key} does not exist: {where} is a single value, so write {where}=VALUE"
    renamed = RENAMED_KEYS.get(f"{where}.{part}")
    if renamed is not None:
        return f"{where}.{part} is now called {renamed}"
    if key in REMOVED_KEYS:
        return f"{key} is no longer needed: {REMOVED_KEYS[key]}. Remove it"
    if not path:
        return f"{key} does not exist: {_suggest_top_key(config, key)}"
    if path[0] in LISTS and len(path) == 1:
        return _unknown_list_entry(config, path[0], part, key, groups)
    option = config.choices.get(path[0])
    is_named_option = len(path) == 1 and option not in (None, "default")
    owner = f"{path[0]}={option} has" if is_named_option else f"{where} has"
    names = [str(name) for name in node if not str(name).startswith("_")]
    options = options_with_key(part, path[0], groups) if len(path) == 1 else []
    if options and not names:
        return (
            f"{key} has no effect: {owner} no settings. Leave it out, or choose an option that has "
            f"it: {', '.join(options)}"
        )
    text = f"{where}.{part} does not exist: {suggest(part, names, owner)}"
    if not options:
        return text
    if len(options) == 1:
        return f"{text}; {options[0]} has it"
    return f"{text}; {', '.join(options[:-1])} and {options[-1]} have it"


def _unknown_list_entry(config: DictConfig, group: str, part: str, key: str, groups: Groups) -> str:
    """Return the error text for a key of a method or an observer that is not in the run.

    group: "method" or "observer".
    part: the second part of the key, such as "fedprox".
    key: the whole key, such as "method.fedprox.mu".
    """
    options = groups.files[group]
    if part == NONE.get(group):
        return f"{key} does not exist: {part} is the empty list of the group {group}, without keys"
    if part in options:
        chosen = config.choices.get(group)
        return (
            f"{key} has no effect because {part} is not in {group}={join_options(chosen, group)}: "
            f"write {group}={join_options([*chosen, part])}"
        )
    longer_keys = _keys_ending_with(config, part)
    if longer_keys:
        return f"{key} does not exist: did you mean {' or '.join(longer_keys)}?"
    return f"{key} does not exist: {suggest(part, options)}"


def _suggest_top_key(config: DictConfig, key: str) -> str:
    """Return advice for a key whose first part ("local" in "local.lr") does not exist."""
    if key in OTHER_NAMES:
        return f"did you mean {OTHER_NAMES[key]}?"
    for word, advice in _HYDRA_ADVICE.items():
        if f"{key}.".startswith((f"{word}.", f"{word}/")):
            return advice
    group, _, name = key.partition("_")
    if name and isinstance(config.get(group), DictConfig) and name in config[group]:
        return f"did you mean {group}.{name}?"
    head, _, rest = key.partition(".")
    top_keys = [str(name) for name in config if name != "choices"] + ["experiment"]
    near = nearest(head, top_keys)
    if near:
        return f"did you mean {near}{'.' + rest if rest else ''}?"
    longer_keys = _keys_ending_with(config, key)
    if longer_keys:
        return f"did you mean {' or '.join(longer_keys)}?"
    return f"the valid ones are {', '.join(top_keys)}"


def _keys_ending_with(config: DictConfig, key: str) -> list[str]:
    """Return the full keys of the configuration that end with a short key.

    For example, "lr" is the end of "local.lr", and "mu" of "method.fedprox.mu".
    key: the short key.
    """
    nodes = {str(name): config[name] for name in config}
    for group in LISTS:
        for name, node in config[group].items():
            nodes[f"{group}.{name!s}"] = node
    keys = []
    for name, node in nodes.items():
        if isinstance(node, DictConfig):
            keys += [f"{name}.{leaf!s}" for leaf in node]
    return [name for name in keys if name.endswith(f".{key}")]


def set_value(config: DictConfig, key: str, value: Any, text: str) -> None:
    """Set a key of a configuration, in place.

    value: the new value. For a key with a list, the text "a+b" means the list [a, b].
    text: the override as the user wrote it, for errors.
    """
    try:
        if _is_unbracketed_list(config, key, value):
            value = [read_setting(f"{key}={item}").value for item in value.split("+")]
        is_free = key.rpartition(".")[0] in FREE_MAPPINGS
        OmegaConf.update(config, key, value, merge=True, force_add=is_free)
    except OmegaConfBaseException as error:
        earlier_value = _value_before(config, key)
        reason = f"its value cannot be read ({first_line(error).rstrip('.')}). Correct it."
        if OmegaConf.is_list(earlier_value):
            reason = f"the key {key} takes a list. Write {key}=VALUE+VALUE."
        if OmegaConf.is_dict(earlier_value):
            reason = f"{key} is a group of keys. Set one of its keys: {key}.KEY=VALUE."
        raise RefusedError(f"the override '{text}' cannot be applied: {reason}") from error


def _is_unbracketed_list(config: DictConfig, key: str, value: Any) -> bool:
    # A path may hold a "+".
    is_text = isinstance(value, str) and "/" not in value
    return is_text and OmegaConf.is_list(_value_before(config, key))


def _value_before(config: DictConfig, key: str) -> Any:
    """Return the value of a key; None for a reference, such as ${a.b}, to a missing key."""
    return OmegaConf.select(config, key, throw_on_resolution_failure=False)


def empty_alternatives(config: DictConfig, values: Mapping[str, Any]) -> None:
    """Set a key to null if the user set only the key's alternative.

    For example, local.steps becomes null if the user sets only local.epochs.
    config: the configuration, which changes in place.
    values: the values that the user set, by key.
    """
    for pair in ALTERNATIVES:
        for key, other in (pair, pair[::-1]):
            if values.get(key) is not None and other not in values:
                OmegaConf.update(config, other, None)
