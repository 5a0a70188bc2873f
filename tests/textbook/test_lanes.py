"""Many clients at once end where the textbooks do; one row in ten is quick, the others are slow for their number."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raysim.simulation.schedule import Buffered
from raysim.training.lane import NotInLanes
from textbook import (
    test_asynchronous,
    test_core,
    test_five_more,
    test_fraug,
    test_gradients,
    test_losses,
    test_personal,
    test_server_rules,
    test_stages,
)
from textbook.check import Row, check
from textbook.test_asynchronous import FEW, late

OTHERS = (
    *(test_core, test_five_more, test_fraug, test_gradients, test_losses, test_personal, test_server_rules),
    *(test_stages, test_asynchronous),
)
ROWS: dict[str, Row] = {f"{module.__name__[14:]} {name}": row for module in OTHERS for name, row in module.ROWS.items()}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if i % 10 else ()) for i, name in enumerate(ROWS)]
)
def test_raysim_in_lanes_and_the_textbook_end_alike(name: str) -> None:
    row = ROWS[name]
    if name.startswith("asynchronous") and isinstance(row.schedule, Buffered):
        row = replace(row, book=late(row.book, row.schedule is FEW))
    if "fedmix, fresh" in name:  # whose steps gather raw data
        with pytest.raises(NotInLanes, match=r"runtime.lanes=3: method 'fedmix' cannot train several clients at once"):
            check(row, lanes=3)
        return
    check(row, lanes=3)
