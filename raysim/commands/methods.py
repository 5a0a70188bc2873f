"""Implement `raysim methods`: list all methods, or explain some of them.

The list shows each method's paper, hooks and parameters.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from raysim.experiment.groups import find_groups, load_option
from raysim.experiment.instantiate import TARGET, format_value
from raysim.experiment.method_sources import MethodSource, read_method, read_module
from raysim.primitives.errors import RefusedError, suggest
from raysim.primitives.files import user_path

INDENT = "    "


@dataclass(frozen=True)
class MethodEntry:
    """A method, as `raysim methods` shows it.

    option: the value of `method=` that selects the method. It may select other methods, too.
    paper: the source, or "".
    about: one line that says what the method does.
    texts: the docstrings of the method's module and class.
    parameters: the method's settings with their defaults.
    """

    name: str
    option: str
    paper: str
    about: str
    texts: Sequence[str]
    hooks: Sequence[str] = ()
    parameters: Mapping[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """Return the method's name, with the paper if it has one."""
        return f"{self.name}  ({self.paper})" if self.paper else self.name

    def facts(self) -> dict[str, Any]:
        """Return the method's entry in the output of `raysim methods --json`."""
        return {
            "name": self.name,
            "option": self.option,
            "paper": self.paper,
            "about": self.about,
            "slots": self.hooks,
            "parameters": self.parameters,
        }


def find_methods(
    names: Sequence[str] = (), conf: Sequence[str] = (), allow: Sequence[str] = ()
) -> list[MethodEntry]:
    """Return the methods that `names` selects; without names, all methods, FedAvg first.

    names: values of the key `method`, such as "fedld+fedavg".
    conf: the user's own folders of options.
    allow: the packages whose classes these options may use.
    Raise `RefusedError` for a name that does not exist.
    """
    files = find_groups([*map(user_path, conf)]).files["method"]
    options = {option: load_option(path, "method") for option, path in files.items()}
    entries = {"fedavg": _fedavg()}
    for option, nodes in options.items():
        for name, node in nodes.items():
            if name != option and name in options:
                continue  # the method also has its own option
            entries[name] = _entry(name, option, node, allow)
    if not names:
        return list(entries.values())
    names_of = {name: [name] for name in entries}
    names_of |= {option: list(nodes) for option, nodes in options.items()}
    chosen = []
    for name in "+".join(names).split("+"):
        if name not in names_of:
            raise RefusedError(f"there is no method {name}: {suggest(name, names_of)}")
        chosen += [entries[part] for part in names_of[name]]
    return chosen


def _fedavg() -> MethodEntry:
    """Return the entry of FedAvg, which has no class: it is a run without any method."""
    text, paper = read_module("raysim.methods.fedavg", "PAPER")
    return MethodEntry("fedavg", "fedavg", paper, first_line(text), [text])


def _entry(name: str, option: str, node: Mapping[str, Any], allow: Sequence[str]) -> MethodEntry:
    if not isinstance(node, Mapping):
        raise RefusedError(f"method.{name}={node} has no class. Set its key _target_.")
    source = read_method(str(node.get(TARGET))) or _import_method(name, node, allow)
    texts = (source.module_text, source.class_text)
    # The docstring of a module with one method is about this method.
    about = first_line(texts[0] if source.is_alone else texts[1])
    parameters = {key: value for key, value in node.items() if key != TARGET}
    return MethodEntry(name, option, source.paper, about, texts, source.hooks, parameters)


def _import_method(name: str, node: Mapping[str, Any], allow: Sequence[str]) -> MethodSource:
    """Import a method's class; return its docstrings, paper and hooks.

    name: the method's name.
    node: the method's configuration; its key `_target_` names the class.
    allow: the packages from which classes may be imported.
    """
    from raysim.api.method import Method
    from raysim.experiment.describe import hook_names
    from raysim.experiment.parts import class_of

    cls = class_of(node, f"method.{name}", Method, allow)
    module = inspect.getmodule(cls)
    classes = [member for member in vars(module).values() if isinstance(member, type)]
    own_classes = [member for member in classes if member.__module__ == cls.__module__]
    methods = [member for member in own_classes if issubclass(member, Method)]
    return MethodSource(
        inspect.getdoc(module) or "",
        inspect.cleandoc(cls.__doc__ or ""),
        cls.paper,
        hook_names(cls),
        len(methods) == 1,
    )


def first_line(text: str) -> str:
    """Return the first line of a docstring; leave out the method's name at its start."""
    line = text.partition("\n")[0]
    return line.partition(": ")[2] or line


def list_methods(entries: Sequence[MethodEntry], width: int) -> str:
    """Return a few lines about each method.

    width: the length of a line in characters.
    """
    return "\n".join(line for entry in entries for line in _lines(entry, width))


def _lines(entry: MethodEntry, width: int) -> Iterator[str]:
    values = [f"{key}={format_value(value)}" for key, value in entry.parameters.items()]
    yield entry.title
    for text in (entry.about, ", ".join(entry.hooks), "  ".join(values)):
        for line in textwrap.wrap(
            text, width - len(INDENT), break_long_words=False, break_on_hyphens=False
        ):
            yield f"{INDENT}{line}"


def explain_methods(entries: Sequence[MethodEntry]) -> str:
    """Return each method's docstrings, hooks, and settings as overrides.

    The docstring of a module with several methods appears once.
    """
    printed: set[str] = set()
    pages = []
    for entry in entries:
        texts = [text for text in entry.texts if text and text not in printed]
        printed.update(texts)
        hooks = [f"hooks: {', '.join(entry.hooks)}"] if entry.hooks else []
        settings = []
        for key, value in entry.parameters.items():
            settings.append(f"method.{entry.name}.{key}={format_value(value)}")
        parts = [entry.title, *texts, *hooks, "\n".join(settings) or "It has no settings."]
        pages.append("\n\n".join(parts))
    return "\n\n\n".join(pages)
