"""Blocks cover a vector once, in order, whatever threads share them; what fails in one is raised."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from studies import ROUNDS, recipe

from raysim import blocks
from raysim.blocks import folded, grouped, in_blocks
from raysim.coordinator import Settings
from raysim.fleet import Ideal
from raysim.host import openblas
from raysim.runtime import inprocess


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 100])
def test_blocks_cover_the_entries_once_and_results_keep_their_order(length: int) -> None:
    parts = in_blocks(length, lambda part: part, 8)
    assert [i for part in parts for i in range(part.start, part.stop)] == list(range(length))
    assert all(part.stop - part.start <= 8 for part in parts)


def test_threads_share_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "cores", lambda: 3)
    blocks._pool.cache_clear()
    meeting = threading.Barrier(3, timeout=20)
    in_blocks(3, lambda part: meeting.wait(), 1)  # each waits for the others: one thread alone would time out
    blocks._pool.cache_clear()


def test_an_error_in_a_block_is_raised() -> None:
    def work(part: slice) -> None:
        if part.start == 16:
            raise ValueError("block 2")

    with pytest.raises(ValueError, match="block 2"):
        in_blocks(100, work, 8)


def test_a_sum_may_have_a_place_and_what_a_host_has_summed_enters_as_it_is() -> None:
    rows = [np.random.default_rng(i).standard_normal(50, np.float32) for i in range(4)]
    place = torch.zeros(50)
    whole = folded(grouped(rows, [1.0, 2.0, 3.0, 4.0], 2))
    first = folded([(rows[:2], [1.0, 2.0])]).numpy()
    first.flags.writeable = False
    again = folded([([first], [1.0]), (rows[2:], [3.0, 4.0])], place)
    assert again is place and torch.equal(again, whole)


def test_a_run_in_this_process_multiplies_on_one_thread_and_leaves_numpys_threads_as_they_were() -> None:
    def threads() -> set[int]:
        return {library["num_threads"] for library in openblas().info()}

    with openblas().limit(limits=2):
        before = threads()
        during = [threads() for _ in inprocess.run(recipe(), ROUNDS, Ideal(), Settings(rounds=1))]
        assert during and all(found == {1} for found in during)
        assert threads() == before
