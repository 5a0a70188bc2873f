"""Checks that every part of a run must pass; use them to test your own parts.

    import pytest
    from raysim.conformance import checks

    @pytest.mark.parametrize("check", [*checks(MyMethod(mu=0.1)), *checks(MyModel())], ids=str)
    def test_part_passes_all_checks(check):
        check()

`checks` takes a method, a learner, a model, a source, a partition, a schedule, a selection, a
topology, a fleet, a compressor or an observer. Most checks make a few tiny runs in this
process. If the part fails, a check raises AssertionError, or the error that stopped a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from raysim.api.compression import Compressor
from raysim.api.learner import Learner
from raysim.api.method import Method
from raysim.conformance import compressors, learners, methods, parts
from raysim.conformance.study import Study
from raysim.data.raw import Source
from raysim.experiment.objects import OBJECT, object_node
from raysim.results.observers import Observer

__all__ = ["Check", "Study", "checks"]


@dataclass(frozen=True)
class Check:
    """A check of one object of a run, such as a method or a partition.

    Call the check without arguments. It may execute short runs. If the tested object is wrong, it
    raises AssertionError, or the error that ended such a run.
    name: the tested object and the tested property.
    """

    name: str
    run: Callable[[], object]

    def __call__(self) -> None:
        self.run()

    def __str__(self) -> str:
        return self.name


def checks(part: object, study: Study | None = None) -> list[Check]:
    """Return all checks for a part of a run, such as a method or a partition.

    study: describes the tiny run of the checks; None uses `Study()`.
    Raise TypeError for an object that is not a part of a run.
    """
    name = getattr(part, "name", type(part).__name__)
    return [Check(f"{name}: {text}", run) for text, run in _checks(part, study or Study())]


def _checks(part: object, study: Study) -> Iterator[tuple[str, Callable[[], object]]]:
    if not isinstance(part, Observer):
        yield "a file can hold it", lambda: _check_storable(part)
    if isinstance(part, Compressor):
        yield from compressors.checks(part, study)
    if isinstance(part, Method):
        yield from methods.checks(part, study)
        if isinstance(part, Learner):
            yield from learners.checks(part, study)
    elif isinstance(part, Observer):
        yield from parts.of_observer(part, study)
    elif isinstance(part, Source):
        yield from parts.of_data(part, study)
    else:
        kinds: dict[str, Callable[[Any, Study], parts.Checks]] = {
            "build": parts.of_model,
            "split": parts.of_partition,
            "decide": parts.of_schedule,
            "select": parts.of_selection,
            "connect": parts.of_topology,
            "devices": parts.of_fleet,
        }
        kinds_of_part = [make for function, make in kinds.items() if hasattr(part, function)]
        if len(kinds_of_part) != 1:
            raise TypeError(
                f"{part!r} is not a part of a run. Give a method, a learner, a model, data, a "
                "partition, a schedule, a selection, a topology, a fleet, a compressor or an "
                "observer."
            )
        yield from kinds_of_part[0](part, study)


def _check_storable(part: object) -> None:
    node = object_node(part)
    assert OBJECT not in node, (
        f"{node['_target_']} cannot be written into a configuration. Define its class in a module, "
        "and let its constructor keep its arguments, which are plain values, under their own names "
        "and nothing else."
    )
