"""What every part of a run must keep to, for tests of your own parts; raysim's own are tested with the same checks.

    import pytest
    from raysim.conformance import checks

    @pytest.mark.parametrize("check", [*checks(MyMethod(mu=0.1)), *checks(MyModel())], ids=str)
    def test_it_keeps_what_every_part_must(check):
        check()

`checks` takes a method, a model, a source of data, a partition, a schedule, a fleet or an observer.
Each check makes a few tiny runs in this process, a fraction of a second each, and raises an
AssertionError with one sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from raysim.api.method import Method
from raysim.conformance import methods, parts
from raysim.conformance.study import Study
from raysim.data.raw import Source
from raysim.experiment.objects import OBJECT, object_node
from raysim.results.observers import Observer

__all__ = ["Check", "Study", "checks"]


@dataclass(frozen=True)
class Check:
    """Something that a part must keep to; called, it raises an AssertionError where the part does not."""

    name: str
    run: Callable[[], object]

    def __call__(self) -> None:
        self.run()

    def __str__(self) -> str:
        return self.name


def checks(part: object, study: Study | None = None) -> list[Check]:
    """All checks for a part. study: the tiny runs it is tried in, where the usual ones do not suit it.

    Raises TypeError for what is no part.
    """
    name = getattr(part, "name", type(part).__name__)
    return [Check(f"{name}: {text}", run) for text, run in _checks(part, study or Study())]


def _checks(part: object, study: Study) -> Iterator[tuple[str, Callable[[], object]]]:
    if not isinstance(part, Observer):
        yield "a file can hold it", lambda: _stored(part)
    if isinstance(part, Method):
        yield from methods.checks(part, study)
    elif isinstance(part, Observer):
        yield from parts.of_observer(part, study)
    elif isinstance(part, Source):
        yield from parts.of_data(part, study)
    else:
        kinds: dict[str, Callable[[Any, Study], parts.Checks]] = {
            "build": parts.of_model,
            "split": parts.of_partition,
            "decide": parts.of_schedule,
            "devices": parts.of_fleet,
        }
        found = [make for needed, make in kinds.items() if hasattr(part, needed)]
        if len(found) != 1:
            raise TypeError(
                f"{part!r} is no part of a run: give a method, a model, data, a partition, a schedule, ..."
            )
        yield from found[0](part, study)


def _stored(part: object) -> None:
    node = object_node(part)
    assert OBJECT not in node, (
        f"{node['_target_']} cannot be written into a configuration: its class must be found by its name, and its "
        "constructor must keep its arguments, plain values, under their own names and nothing more"
    )
