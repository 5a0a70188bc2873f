"""Devices and schedules as their files in conf say, and the devices that are taken."""

from __future__ import annotations

import pytest

from raysim.experiment.compose import groups, load_yaml
from raysim.experiment.instantiate import TARGET, build, resolve
from raysim.simulation.fleet import Ideal, Lognormal


@pytest.mark.parametrize(
    ("group", "name"), [(group, name) for group in ("fleet", "schedule") for name in groups().files[group]]
)
def test_what_is_made_without_arguments_is_what_its_file_says(group: str, name: str) -> None:
    node = load_yaml(groups().files[group][name])
    cls = resolve(node[TARGET], group)
    assert build(cls, node, group) == cls()


def test_a_device_may_be_as_slow_as_it_likes() -> None:
    assert Ideal(speed=0.5).devices(0, 1, lambda: 1.0).trip(0, 0, 0.0, 1.0, 0, 0) == (2.0, True)
    slow = Lognormal(speed=0.5, sigma=0.0, bandwidth_down=0.5, bandwidth_up=0.25, bandwidth_sigma=0.0)
    assert slow.devices(0, 1, lambda: 1.0).trip(0, 0, 0.0, 1.0, 1, 1) == (2.0 + 8.0 + 16.0, True)
