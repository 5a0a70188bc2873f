"""Test training on a GPU: it has the results of a CPU, and a repeated run has the same bits."""

from __future__ import annotations

import pytest
import torch

from raysim.commands.bench import gpu

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
NAMES = ("fedavg", "dann", "fedbr", "fedmix", "fedsr", "fraug", "scaffold")


@pytest.mark.parametrize("name", NAMES)
def test_gpu_results_equal_those_of_the_cpu(name: str) -> None:
    rows = gpu.measure_correctness(gpu.GpuOptions(methods=(name,)), lambda: True)
    assert len(rows) >= 2 and not [
        row for row in rows if not row.get("distance", 1.0) <= row["allowed"]
    ]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "fedsr"])
def test_gpu_gives_the_same_bits_on_two_workers(name: str) -> None:
    rows = gpu.measure_bits(gpu.GpuOptions(methods=(name,)), lambda: True)
    assert rows and all(row.get("again") and row.get("two workers") for row in rows)
