"""Test that asynchronous methods give the same results as their textbooks.

In most runs, some updates are stale. The methods must also work in synchronous rounds, where no
update is stale.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
from tiny_runs import NORMED_MLP

from raysim.methods.ace import ACE
from raysim.methods.ca2fl import CA2FL
from raysim.methods.fadas import FADAS
from raysim.methods.fedasync import FedAsync
from raysim.methods.fedprox import FedProx
from raysim.simulation.schedule import Buffered
from textbook.ace import ace
from textbook.ca2fl import ca2fl, ca2fl_fadas
from textbook.check import Row, check
from textbook.fadas import fadas
from textbook.fedasync import fedasync
from textbook.world import Book, World

NORMED = {"model": NORMED_MLP}
LONG, BY_SAMPLES = {"rounds": 10}, {"rounds": 10, "weighting": "samples"}
ALONE, PAIRS, FEW = (
    Buffered(concurrency=4, size=1),
    Buffered(concurrency=4, size=2),
    Buffered(concurrency=3, size=3),
)
ADAM = {"lr": 0.4, "beta1": 0.6, "beta2": 0.8, "eps": 1e-3}
SAME = {"server_lr": 0.4, "beta1": 0.6, "beta2": 0.8, "eps": 1e-3}

ROWS = {
    "fedasync": Row(partial(fedasync, alpha=0.6), lambda: [FedAsync()], run=LONG, schedule=ALONE),
    "fedasync in rounds": Row(partial(fedasync, alpha=0.6), lambda: [FedAsync()], NORMED),
    "fedasync of pairs": Row(
        partial(fedasync, alpha=0.5, a=1.3),
        lambda: [FedAsync(0.5, a=1.3)],
        NORMED,
        LONG,
        schedule=PAIRS,
    ),
    "fedasync with a constant rate": Row(
        partial(fedasync, alpha=0.9, kind="constant"),
        lambda: [FedAsync(0.9, "constant")],
        NORMED,
        LONG,
        ALONE,
    ),
    "fedasync with a hinge": Row(
        partial(fedasync, alpha=0.6, kind="hinge", a=0.7, b=1.0),
        lambda: [FedAsync(0.6, "hinge", 0.7, 1.0)],
        run=LONG,
        schedule=ALONE,
    ),
    "fedasync that discards": Row(
        partial(fedasync, alpha=0.6, oldest=1, decay=0.9),
        lambda: [FedAsync(max_staleness=1, alpha_decay=0.9)],
        NORMED,
        LONG,
        PAIRS,
    ),
    "fedasync by samples, with fedprox": Row(
        partial(fedasync, alpha=0.8, rho=0.3),
        lambda: [FedAsync(0.8), FedProx(0.3)],
        run=BY_SAMPLES,
        schedule=PAIRS,
    ),
    "ca2fl": Row(ca2fl, lambda: [CA2FL()], NORMED, LONG, PAIRS),
    "ca2fl of single arrivals": Row(
        partial(ca2fl, lr=0.3), lambda: [CA2FL(0.3, cache="memory")], run=LONG, schedule=ALONE
    ),
    "ca2fl in rounds": Row(ca2fl, lambda: [CA2FL()], NORMED),
    "ca2fl of clients that come twice": Row(ca2fl, lambda: [CA2FL()], run=LONG, schedule=FEW),
    "ca2fl over the clients seen": Row(
        partial(ca2fl, lr=0.5, seen_only=True), lambda: [CA2FL(0.5, "seen")], run=LONG, schedule=FEW
    ),
    "ca2fl with fadas": Row(
        partial(ca2fl_fadas, eta=0.7, threshold=1, **ADAM),
        lambda: [CA2FL(0.7), FADAS(threshold=1, **SAME)],
        run=LONG,
        schedule=PAIRS,
    ),
    "ace": Row(partial(ace, lr=0.5), lambda: [ACE(0.5)], NORMED, LONG, ALONE),
    "ace in rounds": Row(partial(ace, lr=0.5), lambda: [ACE(0.5, cache="memory")], NORMED),
    "ace of buffers": Row(partial(ace, lr=0.5), lambda: [ACE(0.5)], NORMED, LONG, FEW),
    "ace that waits for everybody": Row(
        partial(ace, lr=0.5, initialise=True),
        lambda: [ACE(0.5, initialise=True)],
        NORMED,
        LONG,
        ALONE,
    ),
    "aced": Row(partial(ace, lr=0.5, oldest=3), lambda: [ACE(0.5, 3)], NORMED, LONG, ALONE),
    "aced of pairs": Row(
        partial(ace, lr=0.5, oldest=2), lambda: [ACE(0.5, 2)], NORMED, LONG, PAIRS
    ),
    "aced without a memory": Row(
        partial(ace, lr=0.5, oldest=0), lambda: [ACE(0.5, 0)], NORMED, LONG, ALONE
    ),
    "fadas": Row(
        partial(fadas, **ADAM, threshold=1),
        lambda: [FADAS(threshold=1, **SAME)],
        NORMED,
        LONG,
        PAIRS,
    ),
    "fadas in rounds": Row(
        partial(fadas, **ADAM, threshold=0), lambda: [FADAS(threshold=0, **SAME)], NORMED
    ),
    "fadas of single arrivals, capped": Row(
        partial(fadas, **ADAM, threshold=0, rule="cap"),
        lambda: [FADAS(threshold=0, rule="cap", **SAME)],
        run=LONG,
        schedule=ALONE,
    ),
    "fadas by samples, without a threshold": Row(
        partial(fadas, **ADAM),
        lambda: [FADAS(threshold=None, **SAME)],
        run=BY_SAMPLES,
        schedule=PAIRS,
    ),
    "fadas with bias correction": Row(
        partial(fadas, **ADAM, threshold=2, bias_correction=True),
        lambda: [FADAS(threshold=2, bias_correction=True, **SAME)],
        run=LONG,
        schedule=ALONE,
    ),
}


def late(book: Callable[[World], Book], twice: bool) -> Callable[[World], Book]:
    """Return a textbook that first asserts that some update of the run is stale.

    twice: True: assert also that some aggregation has two updates of the same client. False: assert
    also that in some aggregation every update is stale.
    """

    def sure(world: World) -> Book:
        ages = [
            [version - job.version for job in jobs] for version, jobs in enumerate(world.rounds)
        ]
        again = [len({job.client for job in jobs}) < len(jobs) for jobs in world.rounds]
        assert max(map(max, ages)) > 0 and (any(again) if twice else max(map(min, ages)) > 0)
        return book(world)

    return sure


@pytest.mark.parametrize("name", ROWS)
def test_asynchronous_method_equals_its_textbook_computation(name: str) -> None:
    row = ROWS[name]
    check(
        replace(row, book=late(row.book, row.schedule is FEW))
        if isinstance(row.schedule, Buffered)
        else row
    )
