"""`raysim methods`: every method with its paper, slots and parameters; one that is named, in its own words."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from raysim.api.method import Method
from raysim.experiment.describe import slots
from raysim.experiment.groups import find_groups, load_option
from raysim.experiment.instantiate import TARGET, format_value
from raysim.experiment.parts import class_of
from raysim.methods import fedavg
from raysim.primitives.errors import Refused, suggest
from raysim.primitives.files import user_path


@dataclass(frozen=True)
class Part:
    """One that can be in a list of methods. about: what it does, in a line. texts: of its module, and its own."""

    name: str
    option: str  # the word that brings it, maybe with others
    paper: str
    about: str
    texts: Sequence[str]
    slots: Sequence[str] = ()
    parameters: Mapping[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """Its name, and its paper if it has one."""
        return f"{self.name}  ({self.paper})" if self.paper else self.name

    def facts(self) -> dict[str, Any]:
        """For programs."""
        named = {"name": self.name, "option": self.option, "paper": self.paper, "about": self.about}
        return {**named, "slots": self.slots, "parameters": self.parameters}


def catalogue(
    words: Sequence[str] = (), conf: Sequence[str] = (), allow: Sequence[str] = ()
) -> list[Part]:
    """Every part of every method, FedAvg first, which has no class; or those that some words of `method=` bring.

    conf: folders of options of one's own. allow: the packages whose classes they may name. Raises Refused.
    """
    files = find_groups([*map(user_path, conf)]).files["method"]
    options = {option: load_option(path, "method") for option, path in files.items()}
    text = inspect.cleandoc(fedavg.__doc__ or "")
    parts = {"fedavg": Part("fedavg", "fedavg", fedavg.PAPER, first_line(text), [text])}
    for option, nodes in options.items():
        for name, node in nodes.items():
            if name == option or name not in options:  # else it has an option of its own as well
                parts[name] = _part(
                    name, option, node, class_of(node, f"method.{name}", Method, allow)
                )
    if not words:
        return list(parts.values())
    brought = {name: [name] for name in parts} | {
        option: list(nodes) for option, nodes in options.items()
    }
    chosen = [each for word in words for each in word.split("+")]
    for each in chosen:
        if each not in brought:
            raise Refused(f"there is no method {each}: {suggest(each, brought)}")
    return [parts[name] for each in chosen for name in brought[each]]


def _part(name: str, option: str, node: Mapping[str, Any], cls: type[Method]) -> Part:
    module = inspect.getmodule(cls)
    ours = [
        each
        for each in vars(module).values()
        if isinstance(each, type) and each.__module__ == cls.__module__
    ]
    alone = sum(issubclass(each, Method) for each in ours) == 1
    texts = inspect.getdoc(module) or "", inspect.cleandoc(cls.__doc__ or "")
    parameters = {key: value for key, value in node.items() if key != TARGET}
    return Part(
        name, option, cls.paper, first_line(texts[0 if alone else 1]), texts, slots(cls), parameters
    )


def first_line(text: str) -> str:
    """Of a docstring, without a name in front of it."""
    line = text.partition("\n")[0]
    return line.partition(": ")[2] or line


def listing(parts: Sequence[Part], width: int) -> str:
    """A few lines for each."""
    return "\n".join(line for part in parts for line in _lines(part, width))


def _lines(part: Part, width: int) -> Iterator[str]:
    values = "  ".join(f"{key}={format_value(value)}" for key, value in part.parameters.items())
    yield part.title
    for text in (part.about, ", ".join(part.slots), values):
        for line in textwrap.wrap(text, width - 4, break_long_words=False, break_on_hyphens=False):
            yield f"    {line}"


def pages(parts: Sequence[Part]) -> str:
    """Each in its own words: formulas, what was chosen where the sources differ, and its settings as one types them."""
    said: set[str] = set()  # of a module that has several
    return "\n\n\n".join(_page(part, said) for part in parts)


def _page(part: Part, said: set[str]) -> str:
    texts = [text for text in part.texts if text and text not in said]
    said.update(texts)
    hooks = [f"hooks: {', '.join(part.slots)}"] if part.slots else []
    keys = [
        f"method.{part.name}.{key}={format_value(value)}" for key, value in part.parameters.items()
    ]
    return "\n\n".join([part.title, *texts, *hooks, "\n".join(keys) or "It has no settings."])
