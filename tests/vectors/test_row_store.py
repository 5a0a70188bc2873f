"""Test stores of rows on disk or in memory, whose whole space is reserved when they are made."""

from __future__ import annotations

import shutil
import sys
import tempfile
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from raysim.simulation import checkpoint
from raysim.vectors import row_store as cache
from raysim.vectors.row_store import extend_rows, reserve, rows_with_room


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def in_file(address: int) -> bool:
    """Return whether this address lies in a mapped file."""
    if sys.platform != "linux":
        pytest.skip("only Linux lists what is mapped")
    for line in Path("/proc/self/maps").read_text().splitlines():
        bounds, *rest = line.split(maxsplit=5)
        start, stop = (int(bound, 16) for bound in bounds.split("-"))
        if start <= address < stop:
            return len(rest) == 5 and rest[4].startswith("/")
    return False


def filled(place: cache.Place, count: int = 3) -> Tensor:
    rows = extend_rows(reserve((5, 2, 4), torch.float32, place), count)
    return rows.copy_(torch.arange(rows.numel()).view(rows.shape))


@pytest.mark.parametrize("place", ["disk", "memory"])
def test_growing_a_row_cache_does_not_change_its_rows(place: cache.Place) -> None:
    assert reserve((5, 2, 4), torch.float32, place).shape == (0, 2, 4)
    rows = filled(place)
    rows.as_strided((5, *rows.shape[1:]), rows.stride())[len(rows) :].fill_(
        7
    )  # what memory may hold
    more = extend_rows(rows, 5)
    assert not more[len(rows) :].any()
    assert torch.equal(more[:3], torch.arange(24.0).view(3, 2, 4))
    assert more.data_ptr() == rows.data_ptr() and more.is_contiguous()


def test_row_cache_refuses_more_rows_than_it_has_reserved() -> None:
    with pytest.raises(RuntimeError, match="storage"):
        extend_rows(filled("disk"), 6)


def test_row_cache_on_disk_uses_a_file_that_is_not_listed_in_its_folder(folder: Path) -> None:
    rows = filled("disk")
    assert in_file(rows.data_ptr())
    assert not list(folder.iterdir())
    assert not in_file(filled("memory").data_ptr())


@pytest.mark.parametrize("place", ["disk", "memory"])
def test_row_cache_is_copied_only_if_it_lacks_space_for_more_rows(place: cache.Place) -> None:
    rows = filled(place)
    assert rows_with_room(rows, 5, place) is rows
    found = rows_with_room(rows.clone(), 5, place)
    assert torch.equal(found, rows)
    assert torch.equal(extend_rows(found, 5)[:3], rows)
    assert in_file(found.data_ptr()) == (place == "disk")


def test_row_cache_in_memory_is_moved_to_a_file_if_a_cache_on_disk_is_requested() -> None:
    restored = filled("disk", 5).clone()
    assert in_file(rows_with_room(restored, 5, "disk").data_ptr())


@pytest.mark.parametrize("place", ["disk", "memory"])
def test_row_cache_accepts_rows_of_length_zero(place: cache.Place) -> None:
    rows = reserve((5, 2, 0), torch.float32, place)
    assert (
        extend_rows(rows, 4).shape
        == rows_with_room(extend_rows(rows, 4), 5, place).shape
        == (4, 2, 0)
    )


def test_row_cache_refuses_disk_without_space(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**29))
    with pytest.raises(ValueError, match="TMPDIR"):
        reserve((2, 2**27), torch.float32, "disk")


def test_checkpoint_restores_cached_rows_without_loading_them_into_memory(tmp_path: Path) -> None:
    rows = extend_rows(reserve((64, 2**14), torch.float32, "disk"), 60).normal_(
        generator=torch.manual_seed(0)
    )  # 4 MB
    tracemalloc.start()
    try:
        now = checkpoint.Snapshot({}, {"rows": rows.numpy()}, {}, {})
        path = checkpoint.Checkpoints(tmp_path / "run").write(1, now)
        restored = checkpoint.read(path).server["rows"]
        assert tracemalloc.get_traced_memory()[1] < rows.nbytes / 4
    finally:
        tracemalloc.stop()
    assert np.array_equal(restored, rows.numpy())
    assert in_file(restored.ctypes.data)
    restored[0] = 0  # private: the checkpoint stays whole
    assert not checkpoint.find_damage(path)
