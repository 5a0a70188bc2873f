"""Test that blocks cover a vector once and in order, with any number of threads.

An error in one block is raised to the caller.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import ROUNDS, run_spec, with_settings

from raysim.runtime import inprocess
from raysim.simulation.fleet import Ideal
from raysim.training.determinism import openblas_threads
from raysim.vectors import blocks
from raysim.vectors.blocks import compile_function, in_blocks, new_like


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 100])
def test_blocks_cover_a_vector_once_and_in_order(length: int) -> None:
    parts = in_blocks(length, lambda part: part, 8)
    assert [i for part in parts for i in range(part.start, part.stop)] == list(range(length))
    assert all(part.stop - part.start <= 8 for part in parts)


def test_blocks_of_a_vector_are_computed_by_several_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(blocks, "num_threads", lambda: 3)
    blocks._pool.cache_clear()
    meeting = threading.Barrier(3, timeout=600)
    in_blocks(
        3, lambda part: meeting.wait(), 1
    )  # each waits for the others: one thread alone would time out
    blocks._pool.cache_clear()


def test_error_while_computing_a_block_is_raised_to_the_caller() -> None:
    def work(part: slice) -> None:
        if part.start == 16:
            raise ValueError("block 2")

    with pytest.raises(ValueError, match="block 2"):
        in_blocks(100, work, 8)


def test_run_limits_numpy_to_one_thread_and_restores_the_old_limit() -> None:
    def threads() -> set[int]:
        return {library["num_threads"] for library in openblas_threads().info()}

    with openblas_threads().limit(limits=2):
        before = threads()
        during = [
            threads() for _ in inprocess.run(with_settings(run_spec(), rounds=1), ROUNDS, Ideal())
        ]
        assert during and all(found == {1} for found in during)
        assert threads() == before


class TestNewLike:
    LENGTH = blocks.LARGE_PAGES_BYTES // 4

    @pytest.fixture(autouse=True)
    def _no_unused_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(blocks._RecycledMemory, "_unused", [])

    def test_new_vector_reuses_memory_of_a_deleted_vector(self) -> None:
        example = torch.empty(self.LENGTH)
        vector = new_like(example)
        place = vector.data_ptr()
        del vector
        again = new_like(example)
        assert again.data_ptr() == place
        assert again.shape == example.shape
        assert again.dtype == example.dtype

    def test_new_vector_does_not_reuse_memory_that_is_still_referenced(self) -> None:
        example = torch.empty(self.LENGTH)
        first, second = new_like(example).fill_(1), new_like(example).fill_(1)
        array, part = first.numpy(), second[3:]
        copied = pickle.loads(pickle.dumps(new_like(example).fill_(1).numpy()))
        del first, second
        others = [new_like(example).fill_(2) for _ in range(3)]
        assert (array == 1).all()
        assert (part == 1).all()
        assert (copied == 1).all()
        assert all((other == 2).all() for other in others)

    def test_new_vector_does_not_reuse_memory_of_another_size(self) -> None:
        longer = new_like(torch.empty(2 * self.LENGTH))
        place = longer.data_ptr()
        del longer
        vector = new_like(torch.empty(self.LENGTH))
        assert vector.data_ptr() != place
        assert len(vector) == self.LENGTH

    def test_unused_memory_that_is_stored_for_reuse_is_limited(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(blocks, "MAX_UNUSED_BYTES", 2 * blocks.LARGE_PAGES_BYTES)
        vectors = [new_like(torch.empty(self.LENGTH)) for _ in range(4)]
        vectors.clear()
        assert len(blocks._RecycledMemory._unused) == 2


# --- machine code on disk -------------------------------------------------------------------------
RULE = """
SCALE = {scale}


def rule(into, given):
    for i in range(len(into)):
        into[i] = given[i] * SCALE + {constant}
"""


def load_rule(folder: Path, scale: float = 2.0, constant: float = 1.0) -> Any:
    """Write the file rule.py with a function rule(into, given), and return this function.

    rule sets into[i] to scale * given[i] + constant. All files have the same size and time, so that
    only their content differs.
    scale, constant: numbers of three characters, such as 2.0.
    """
    (path := folder / "rule.py").write_text(RULE.format(scale=scale, constant=constant))
    os.utime(path, (0, 0))
    spec = importlib.util.spec_from_file_location("rule", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    exec(
        compile(path.read_text(), str(path), "exec"), module.__dict__
    )  # without byte code of an older file
    return module.rule


def result(made: Any) -> tuple[float, int]:
    """Call a compiled rule on an array with the single value 3.

    Return the computed value, and how many times the machine code came from the cache.
    made: the compiled rule, called as made(output, input). It writes to `output`.
    """
    into = np.zeros(1)
    made(into, np.full(1, 3.0))
    return float(into[0]), sum(made.stats.cache_hits.values())


def test_machine_code_is_stored_for_the_next_process(tmp_path: Path) -> None:
    assert result(compile_function(load_rule(tmp_path))) == (7.0, 0)
    assert result(compile_function(load_rule(tmp_path))) == (7.0, 1)


def test_machine_code_of_changed_source_code_is_not_used(
    tmp_path: Path,
) -> None:
    assert result(compile_function(load_rule(tmp_path))) == (7.0, 0)
    assert result(compile_function(load_rule(tmp_path, constant=2.0))) == (8.0, 0)
    assert result(compile_function(load_rule(tmp_path, scale=3.0))) == (10.0, 0)
    assert result(compile_function(load_rule(tmp_path))) == (7.0, 1)


def test_damaged_machine_code_is_compiled_again(tmp_path: Path) -> None:
    assert result(compile_function(load_rule(tmp_path))) == (7.0, 0)
    for path in tmp_path.rglob("*.nb?"):
        path.write_bytes(b"damaged")
    assert result(compile_function(load_rule(tmp_path))) == (7.0, 0)


def test_each_process_compiles_a_function_if_machine_code_cannot_be_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "numba.core.caching.CompileResultCacheImpl._locator_classes", []
    )  # as where none is writable
    assert [result(compile_function(load_rule(tmp_path))) for _ in range(2)] == [(7.0, 0)] * 2


def test_compiled_code_is_stored_for_each_array_dtype(tmp_path: Path) -> None:
    made = [compile_function(load_rule(tmp_path)) for _ in range(2)]
    for kind, each in zip((np.float32, np.float64), made, strict=True):
        each(np.zeros(1, kind), np.ones(1, kind))
    again = compile_function(load_rule(tmp_path))
    for kind in (np.float32, np.float64):
        again(into := np.zeros(1, kind), np.full(1, 3, kind))
        assert into[0] == 7.0
    assert sum(again.stats.cache_hits.values()) == 2
