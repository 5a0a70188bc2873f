"""Classes that a configuration names."""

from __future__ import annotations

from typing import Any

import pytest

from raysim.experiment.instantiate import checked, resolve
from raysim.primitives.errors import Refused
from raysim.simulation.fleet import Ideal, Lognormal
from raysim.simulation.schedule import Buffered, Synchronous


@pytest.mark.parametrize(
    ("earlier", "cls"),
    [
        ("raysim.fleet.Ideal", Ideal),
        ("raysim.fleet.Lognormal", Lognormal),
        ("raysim.schedule.Buffered", Buffered),
        ("raysim.schedule.Synchronous", Synchronous),
    ],
)
def test_a_configuration_of_an_earlier_version_names_classes_where_they_were(earlier: str, cls: type) -> None:
    assert resolve(earlier, "group") is cls


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("age+income", list[str] | None, ["age", "income"]),
        ("2019", list[str] | None, ["2019"]),
        ("1+28+28", list[int] | None, [1, 28, 28]),
        ("a+b", str | list[str] | None, "a+b"),  # a path
    ],
)
def test_a_list_without_brackets_is_one(text: str, kind: Any, value: object) -> None:
    assert checked(text, kind, "key") == value


def test_an_item_that_does_not_fit_is_named() -> None:
    with pytest.raises(Refused, match=r"key\[1\]=x must be an integer"):
        checked("1+x", list[int], "key")
