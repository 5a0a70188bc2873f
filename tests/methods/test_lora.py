"""Test which parameters of a model with adapters are sent and stored.

Also test adapters whose ranks differ between clients.
"""

from __future__ import annotations

import gc
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cluster import Workers
from tiny_runs import MLP, ROUNDS, Spy, coordinate, run, run_spec, run_to_end, tiny_data

from raysim.api.declarations import Labels
from raysim.api.method import Method
from raysim.conformance import agreement
from raysim.methods.fedprox import FedProx
from raysim.methods.fedsa_lora import FedSALoRA
from raysim.methods.ffa_lora import FFALoRA
from raysim.methods.flexlora import FlexLoRA
from raysim.methods.flora import FLoRA
from raysim.methods.hetlora import HetLoRA, tail_sum
from raysim.methods.lora_factors import find_factors
from raysim.models import Lora, Mlp
from raysim.runtime import inprocess
from raysim.simulation.events import Round
from raysim.simulation.fleet import Ideal
from raysim.simulation.schedule import Synchronous
from raysim.training.run_spec import RunSpec, declare_run, share_frozen_weights

RANK, WIDTH = 4, 512
FACTORS = 64 + WIDTH  # floats of a rank, 8 x 8 pixels to the hidden layer
HEAD = 5 * WIDTH + 5
BASE = 64 * WIDTH + WIDTH
ADAPTED = Mlp((WIDTH,), Lora(RANK))
SMALL = Mlp((12,), Lora(3))


def file_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    ("methods", "floats_up"),
    [([], RANK * FACTORS + HEAD), ([FFALoRA()], RANK * WIDTH + HEAD)],
    ids=["fedavg", "ffa_lora"],
)
def test_lora_base_is_neither_sent_nor_stored(
    methods: list[Method], floats_up: int, tmp_path: Path
) -> None:
    spec = run_spec(*methods, model=ADAPTED)
    ended = run_to_end(coordinate(spec, ROUNDS, checkpoint_every=1, folder=str(tmp_path)))
    jobs = [job for aggregation in ended.aggregations for job in aggregation.dispatched]
    assert all(job.down == job.up == floats_up for job in jobs)
    model = tmp_path / "model.safetensors"
    assert 4 * floats_up <= model.stat().st_size < 4 * floats_up + 2000
    checkpoint = max((tmp_path / "checkpoints").glob("round-*"))
    assert file_bytes(checkpoint) < 4 * BASE / 2


@pytest.mark.parametrize("base", ["float32", "bfloat16"])
def test_memory_holds_a_single_lora_base_for_any_number_of_clients(base: Any) -> None:
    model = Mlp((WIDTH,), Lora(RANK, base=base))

    def count_bases(clients: int) -> int:
        data = tiny_data(clients=clients, samples=200)
        spec = run_spec(FedSALoRA(), model=model, data=data)
        counts = []
        for event in inprocess.run(spec, Synchronous(clients), Ideal()):
            if isinstance(event, Round):
                gc.collect()
                tensors = [value for value in gc.get_objects() if isinstance(value, torch.Tensor)]
                bases = {value.data_ptr() for value in tensors if value.shape == (WIDTH, 64)}
                counts.append(len(bases))
        return max(counts)

    assert count_bases(2) == count_bases(16) == 1


def test_flora_sends_stacked_factors_and_the_head_but_no_base_weights() -> None:
    ended = run(run_spec(FLoRA(), model=ADAPTED, size=4), ROUNDS)
    jobs = [job for aggregation in ended.aggregations for job in aggregation.dispatched]
    assert {job.up for job in jobs} == {RANK * FACTORS + HEAD}
    stack = min(64 * WIDTH, 4 * RANK * FACTORS)  # of the four clients of a round
    assert {job.down for job in jobs} == {HEAD, stack + HEAD}


@pytest.mark.parametrize("method", [FlexLoRA, HetLoRA, FLoRA])
def test_ranks_of_lora_methods_follow_the_kind_of_device(method: Any) -> None:
    kinds = np.array([0, 1, 0, 1, 1, 0], np.int16)
    devices = Labels(("phone", "tablet"), kinds)
    spec = run_spec(method({"phone": 1, "tablet": 3}), model=SMALL, devices=devices)
    ended = run(spec, ROUNDS)
    head = 5 * 12 + 5
    for aggregation in ended.aggregations:
        for job in aggregation.dispatched:
            rank = 3 if kinds[job.client] else 1
            assert job.up == rank * (64 + 12) + head


def test_hetlora_rows_and_columns_above_the_rank_of_the_client_stay_zero() -> None:
    # the proximal term pulls to the received factors, which have all ranks
    spec = run_spec(FedProx(1.0), HetLoRA([1], lam=0.0), model=SMALL)
    spy = Spy(spec)
    run_to_end(coordinate(spec, ROUNDS, runtime=spy))
    (factors,) = find_factors(declare_run(spec).layout)
    received = {job.number: published for job, published in spy.sent}
    for update in spy.updates:
        assert update.delta is not None
        ended = torch.from_numpy(received[update.job].vector + update.delta)
        a, b = factors.matrices(ended)
        assert a[0].any() and not a[1:].any() and not b[:, 1:].any()


def test_hetlora_penalty_is_the_product_of_the_norms_of_penalised_rows_and_columns() -> None:
    layout = declare_run(run_spec(HetLoRA(), model=SMALL)).layout
    (factors,) = find_factors(layout)
    params = torch.linspace(-1.0, 2.0, layout.trained)
    tail = torch.zeros(layout.trained)
    a_tail, b_tail = factors.matrices(tail)
    a_tail[1:], b_tail[:, 1:] = 1.0, 1.0
    a, b = factors.matrices(params)
    expected = b[:, 1:].norm() * a[1:].norm()
    torch.testing.assert_close(tail_sum(params, tail, layout), expected)


@pytest.mark.parametrize(
    "ranks",
    [
        *([], [0], [1, 2.5], [4]),
        {"phone": 1},
        {"phone": 1, "car": 2},
        {"phone": 1, "tablet": 2, "car": 2},
    ],
)
@pytest.mark.parametrize("method", [FlexLoRA, HetLoRA, FLoRA])
def test_hetlora_refuses_wrong_ranks(method: Any, ranks: Any) -> None:
    devices = Labels(("phone", "tablet"), np.zeros(6, np.int16))
    with pytest.raises(ValueError, match=rf"method\.{method.name}\.ranks"):
        declare_run(run_spec(method(ranks), model=SMALL, devices=devices))


@pytest.mark.parametrize("method", [FFALoRA, FlexLoRA, HetLoRA, FLoRA])
def test_methods_for_adapters_refuse_models_without_adapters(method: Any) -> None:
    with pytest.raises(ValueError, match=r"model\.lora\.rank"):
        declare_run(run_spec(method(), model=MLP))


def test_hetlora_reduces_the_ranks_of_clients_if_the_penalty_is_strong() -> None:
    spec = run_spec(HetLoRA(lam=5.0, gamma=0.5), model=SMALL)
    ranks = [row["hetlora.rank"] for row in run(spec, ROUNDS, rounds=6).rows]
    assert ranks[0] == 3.0 and ranks[-1] < 3.0


@pytest.mark.parametrize("method", [None, FFALoRA, FedSALoRA, FlexLoRA, HetLoRA])
def test_lora_base_in_shared_memory_is_never_written(method: Any) -> None:
    methods = [] if method is None else [method()]
    spec = run_spec(FedProx(0.1), *methods, model=SMALL)
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(share_frozen_weights(spec), 5, buffer_callback=buffers.append)
    # Like arrays from Ray's store, those over bytes cannot be written.
    received: RunSpec = pickle.loads(pickled, buffers=[bytes(buffer) for buffer in buffers])
    assert received.frozen is not None
    arrays = received.frozen.arrays
    before = {name: array.copy() for name, array in arrays.items()}
    assert before and not any(array.flags.writeable for array in arrays.values())
    agreement.check_same(run(received), run(spec), "with a shared base and without")
    assert all(np.array_equal(array, before[name]) for name, array in arrays.items())


@pytest.mark.parametrize("base", ["float32", "bfloat16"])
def test_lora_base_in_shared_memory_is_bit_identical_on_two_ray_workers(
    base: Any, workers: Workers
) -> None:
    model = Mlp((WIDTH,), Lora(RANK, base=base))

    def make() -> RunSpec:
        return share_frozen_weights(run_spec(model=model))

    assert make().frozen is not None
    agreement.check_workers(make, ROUNDS, runtime=workers.runtime(make(), 2))
