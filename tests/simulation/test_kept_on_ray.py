"""Test that a run on Ray has the same results as a run in one process.

Both runs start from weights in a file. The test compares final parameters, best models and
histories, which include scores of unseen clients.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cluster import Workers
from safetensors.torch import save_file
from tiny_runs import NORMED_MLP, SEED, coordinate, run_spec, run_to_end

from raysim.api.declarations import Evaluation, Finetune
from raysim.api.method import Method
from raysim.data.federated import federate, hold_out_clients
from raysim.data.partition import IID
from raysim.data.sources import Synthetic
from raysim.methods.fedbn import FedBN
from raysim.simulation.schedule import Buffered, Synchronous
from raysim.training.initial_weights import Init, read_initial_weights
from raysim.training.run_spec import build_networks


@pytest.mark.parametrize(
    ("methods", "schedule"),
    [([], Synchronous(4)), ([FedBN()], Buffered(concurrency=4, size=2))],
    ids=["fedavg", "fedbn"],
)
def test_run_on_ray_has_the_results_of_an_in_process_run(
    methods: list[Method], schedule: Any, workers: Workers, tmp_path: Path
) -> None:
    partition = IID(clients=8, test_fraction=0.25, validation_fraction=0.2)
    data = hold_out_clients(
        federate(Synthetic(samples=240, test_samples=20, classes=5), partition, SEED), 0.25, SEED
    )
    networks, _ = build_networks(run_spec(model=NORMED_MLP, data=data, seed=SEED + 1))
    save_file(networks["model"].state_dict(), tmp_path / "start.safetensors")
    _, weights = read_initial_weights(Init(str(tmp_path / "start.safetensors")))
    spec = run_spec(*methods, model=NORMED_MLP, data=data, weights=weights)
    settings = {"rounds": 4, "evaluate": Evaluation(finetune=Finetune(1))}
    expected, actual = tmp_path / "here", tmp_path / "there"
    for folder in (expected, actual):
        folder.mkdir()
    one = run_to_end(coordinate(spec, schedule, folder=str(expected), **settings))
    other = run_to_end(
        coordinate(spec, schedule, runtime=workers.runtime(spec, 2), folder=str(actual), **settings)
    )
    assert (
        one.rows[-1]["accuracy_unseen"] is not None
        and one.rows[-1]["accuracy_unseen_finetuned"] is not None
    )
    assert other.history == one.history and other.bits == one.bits
    assert other.finished.best_model == one.finished.best_model
    assert (expected / "best.safetensors").read_bytes() == (
        actual / "best.safetensors"
    ).read_bytes()
