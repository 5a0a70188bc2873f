"""Test that `IdleClients` has exactly the clients that are available and have no job in flight."""

from __future__ import annotations

import numpy as np
import pytest

from raysim.simulation.availability import Intervals
from raysim.simulation.idle_clients import _FEW, IdleClients


def crowds(each: int) -> Intervals:
    """Return when the clients of three groups are available.

    In each period of 100 seconds, the groups are available in the seconds 0 to 50, 50 to 100 and 25
    to 75.

    each: the number of clients in each group.
    """
    bounds = np.array([[0.0, 50.0]] * each + [[50.0, 100.0]] * each + [[25.0, 75.0]] * each)
    clients = np.arange(len(bounds))
    return Intervals(
        bounds.ravel(), np.arange(len(bounds) + 1) * 2, np.full(len(bounds), 100.0), clients, True
    )


@pytest.mark.parametrize("each", [_FEW - 1, _FEW, _FEW + 1, 3 * _FEW])
def test_idle_clients_are_correct_if_several_clients_change_availability_at_once(each: int) -> None:
    presence, members = crowds(each), np.arange(3 * each)
    busy = {0, each, 2 * each}
    waiting = IdleClients(presence, members, busy, 0.0)
    for now in (0.0, 10.0, 25.0, 49.0, 50.0, 60.0, 75.0, 99.0, 100.0, 125.0, 360.0):
        waiting.advance(now)
        there = [c for c in members.tolist() if presence.available(c, now) and c not in busy]
        assert waiting.draw(3 * each, iter(())) == there and len(waiting) == len(there)


def test_draw_returns_all_idle_clients_if_more_are_requested() -> None:
    waiting = IdleClients(crowds(4), np.arange(12), {2}, 0.0)
    assert waiting.draw(3, iter(())) == waiting.draw(9, iter(())) == [0, 1, 3]
    assert waiting.draw(2, iter([0.4, 0.5, 0.7])) == [1, 3]
