"""Classes that a configuration names."""

from __future__ import annotations

import pytest

from raysim.experiment.instantiate import resolve
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
