"""Test client state between a client's participations, for several methods."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cluster import Workers
from tiny_runs import NORMED, NORMED_MLP, coordinate, run, run_spec, same_arrays, tiny_data

from raysim.api.client_state import from_named_arrays, to_flat_arrays, to_named_arrays
from raysim.api.declarations import Evaluation, Local
from raysim.api.local_job import LocalJob
from raysim.api.method import Method
from raysim.api.setup import Setup
from raysim.methods.fedbn import FedBN
from raysim.methods.fedbss import FedBSS
from raysim.methods.fraug import FRAug
from raysim.methods.scaffold import Scaffold
from raysim.simulation import checkpoint
from raysim.simulation.coordinator import Coordinator
from raysim.simulation.events import Saved
from raysim.simulation.schedule import Buffered, Synchronous
from raysim.training.run_spec import declare_run

LOCAL = Local(lr=0.05, momentum=0.9, batch=8, epochs=3)
SCHEDULES = {"rounds": Synchronous(2), "buffer": Buffered(concurrency=3, size=2)}
ROUNDS = 7


def study(*methods: Any) -> Any:
    return run_spec(*methods, model=NORMED, local=LOCAL, data=tiny_data(clients=5))


def loaded(path: str) -> checkpoint.Snapshot:
    """Return a checkpoint with all client states read from its files."""
    saved = checkpoint.read(path)
    return replace(saved, clients={client: dict(state) for client, state in saved.clients.items()})


def snapshots(coordinator: Coordinator) -> Iterator[checkpoint.Snapshot]:
    """Yield the checkpoint of a run after each round."""
    for event in coordinator.run():
        if isinstance(event, Saved):
            yield loaded(event.path)


def every_round(
    folder: Path, *methods: Any, schedule: str = "rounds", runtime: Any = None
) -> list[checkpoint.Snapshot]:
    settings = {
        "rounds": ROUNDS,
        "checkpoint_every": 1,
        "folder": str(folder),
        "runtime": runtime,
        "evaluate": Evaluation(every=99),
    }
    result = list(snapshots(coordinate(study(*methods), SCHEDULES[schedule], **settings)))
    assert len(result) == ROUNDS
    return result


def of(client: int, snapshot: checkpoint.Snapshot) -> dict[str, np.ndarray]:
    return dict(snapshot.clients.get(client, {}))


def jobs_of_states(snapshot: checkpoint.Snapshot) -> dict[int, int]:
    """Return, for each client with a state, the number of the job that made this state."""
    return dict(snapshot.jobs)


def sat_out(result: list[checkpoint.Snapshot]) -> list[tuple[int, int]]:
    """Return a pair (round, client) for each round that left the state of a client unchanged.

    Clients that have no state yet are left out.
    result: the checkpoint of each round.
    """
    return [
        (index, client)
        for index, (before, after) in enumerate(itertools.pairwise(result), start=1)
        for client, job in jobs_of_states(before).items()
        if jobs_of_states(after)[client] == job
    ]


METHODS: dict[str, Any] = {
    "fedbn": FedBN,
    "fedbss": lambda: FedBSS(warmup_rounds=1, refresh=2),
    "scaffold": Scaffold,
}


@pytest.mark.parametrize(
    ("name", "schedule"), [("fedbn", "rounds"), ("fedbss", "buffer"), ("scaffold", "buffer")]
)
def test_state_of_a_client_that_misses_rounds_on_ray_is_unchanged(
    name: str, schedule: str, workers: Workers, tmp_path: Path
) -> None:
    here = every_round(tmp_path / "here", METHODS[name](), schedule=schedule)
    runtime = workers.runtime(study(METHODS[name]()), 2)
    there = every_round(tmp_path / "there", METHODS[name](), schedule=schedule, runtime=runtime)
    for one, other in zip(here, there, strict=True):
        assert one.jobs == other.jobs and list(one.clients) == list(other.clients)
        assert all(same_arrays(of(client, one), of(client, other)) for client in one.clients)
        assert same_arrays(one.server, other.server)
    rested = sat_out(there)
    assert rested, "or nothing survived anything"
    for index, client in rested:
        assert same_arrays(of(client, there[index - 1]), of(client, there[index]))
    last = jobs_of_states(there[-1])
    assert any(last[client] != jobs_of_states(there[index])[client] for index, client in rested), (
        "somebody came back"
    )


# --- SCAFFOLD -------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_server_control_variate_of_scaffold_is_the_mean_over_all_clients(
    schedule: str, tmp_path: Path
) -> None:
    for index, snapshot in enumerate(every_round(tmp_path, Scaffold(), schedule=schedule)):
        own = [state["scaffold.control"] for state in snapshot.clients.values()]
        mean = np.sum(own, axis=0, dtype=np.float64) / 5  # who never took part has zero
        server = snapshot.server["state/scaffold.control"]
        assert np.abs(server).max() > 0.01, index
        np.testing.assert_allclose(server, mean, rtol=1e-4, atol=1e-6)
    assert len(own) == 5, "by the end all took part"


# --- FedBN ----------------------------------------------------------------------------------------


def test_personal_batchnorm_statistics_continue_from_the_client_state() -> None:
    # With one client a round, FedBN's statistics must count every batch that the client ever saw.
    result = run(study(FedBN()), Synchronous(1), rounds=12)
    turns, counts = result.participations, result.coordinator.counts
    assert max(turns.values()) > 1
    for client, turn in turns.items():
        batches = turn * LOCAL.epochs * math.ceil(counts[client] / LOCAL.batch)  # type: ignore[operator]
        singles = turn * LOCAL.epochs * (counts[client] % LOCAL.batch == 1)  # type: ignore[operator]
        assert result.state(client).counters.tolist() == [batches - singles] * 2


def test_checkpoint_saves_personal_tensors_by_name(tmp_path: Path) -> None:
    saved = every_round(tmp_path, FRAug(rounds=ROUNDS), schedule="rounds")[-1]
    tensors = [(name, array) for state in saved.clients.values() for name, array in state.items()]
    names = {name for name, _ in tensors}
    assert {
        "model.extractor.1.weight",
        "model.extractor.1.running_mean",
        "fraug.prototypes",
    } <= names
    assert any(name.startswith("fraug.rtnet.") for name in names)
    assert not any(name.startswith("personal") for name in names)
    assert all(array.shape == () for name, array in tensors if name.endswith("num_batches_tracked"))


def test_client_state_converted_to_named_arrays_and_back_is_unchanged() -> None:
    result = run(study(FedBN(), Scaffold()), rounds=2)
    layout = result.coordinator.layout
    for state in map(result.state, result.coordinator.client_states.committed_jobs):
        again = from_named_arrays(to_named_arrays(state, layout), layout)
        assert len(state.personal) and len(state.counters)
        assert same_arrays(to_flat_arrays(again), to_flat_arrays(state))


# --- FedBSS ---------------------------------------------------------------------------------------


class Forgetful(FedBSS):
    """A FedBSS whose cached losses and uncertainties are replaced before each job of a client.

    The replacements are descending numbers, so they give a different order of the samples.
    """

    def begin(self, job: LocalJob) -> None:
        for key in ("losses", "uncertainties"):
            job.state[key] = torch.arange(job.samples, 0, -1).float()
        super().begin(job)


@pytest.mark.parametrize(("refresh", "matters"), [(1, False), (2, True)])
def test_fedbss_uses_stored_losses_only_if_the_value_of_refresh_is_above_1(
    refresh: int, matters: bool
) -> None:
    with_cache, without_cache = (
        run(study(kind(1, refresh)), Synchronous(3), rounds=6).finished
        for kind in (FedBSS, Forgetful)
    )
    assert (with_cache.model_sha256 != without_cache.model_sha256) == matters


def test_fedbss_ranks_samples_in_every_second_job_if_the_value_of_refresh_is_2(
    tmp_path: Path,
) -> None:
    result = every_round(tmp_path, FedBSS(warmup_rounds=2, refresh=2))
    checked = 0
    for before, after in zip([None, *result], result, strict=False):
        for client, job in jobs_of_states(after).items():
            if before and jobs_of_states(before).get(client) == job:
                continue
            old = of(client, before) if before else {}
            new, version = of(client, after), after.numbers["version"] - 1
            count = int(old["fedbss.count"][0]) if old else 0
            if version < 2:
                assert int(new["fedbss.version"][0]) == -1
            elif count % 2:
                checked += 1
                for key in ("losses", "uncertainties", "version"):
                    assert np.array_equal(new[f"fedbss.{key}"], old[f"fedbss.{key}"])
            else:
                assert int(new["fedbss.version"][0]) == version
                assert (new["fedbss.losses"] > 0).all()
    assert checked


def test_forward_pass_that_ranks_fedbss_samples_changes_no_state() -> None:
    seen = []

    class Watched(FedBSS):
        def begin(self, job: LocalJob) -> None:
            before = _everything(job)
            super().begin(job)
            seen.append(job.version)
            after = _everything(job)
            assert before.keys() == after.keys()
            assert all(torch.equal(before[key], after[key]) for key in before)
            assert all(module.training for module in job.model.modules())

    assert not run(study(Watched(warmup_rounds=1)), rounds=3).failures
    assert max(seen) > 1


def _everything(job: LocalJob) -> dict[str, torch.Tensor]:
    numbers = np.random.get_state()[1]  # noqa: NPY002
    return {
        "vector": job.vector.data.clone(),
        "counters": job.vector.counters.clone(),
        "torch": torch.get_rng_state(),
        "numpy": torch.tensor(np.asarray(numbers, dtype=np.int64)),
    }


def test_fedbss_ranking_uses_received_model_in_eval_mode() -> None:
    ranked: list[tuple[torch.Tensor, torch.Tensor]] = []

    class Watched(FedBSS):
        def begin(self, job: LocalJob) -> None:
            super().begin(job)
            model = job.frozen()["model"]
            with torch.no_grad():
                parts = [
                    torch.nn.functional.cross_entropy(model(inputs), labels, reduction="none")
                    for inputs, labels in job.data()
                ]
            ranked.append((job.state["losses"], torch.cat(parts)))

    run(study(Watched(warmup_rounds=0)), rounds=2)
    assert ranked
    assert all(torch.equal(cached, again) for cached, again in ranked)


# --- names ----------------------------------------------------------------------------------------


class Keeps(Method):
    """A method whose client state is one tensor under a chosen name."""

    def __init__(self, name: str, saved: str):
        self.name, self._saved = name, saved  # type: ignore[misc]

    def setup(self, run: Setup) -> None:
        run.client_state(self._saved, lambda samples: torch.zeros(3))


@pytest.mark.parametrize(
    ("name", "saved"), [("model", "extractor.2.weight"), ("personal", "counters")]
)
def test_client_state_with_the_name_of_a_personal_tensor_is_refused(name: str, saved: str) -> None:
    methods = [FedBN(), Keeps(name, saved)]
    with pytest.raises(ValueError, match=rf"method '{name}' keeps .* '{name}\.{saved}'"):
        declare_run(run_spec(*methods, model=NORMED_MLP))


@pytest.mark.parametrize("kind", ["client_state", "server_state"])
def test_client_state_declared_twice_is_refused(kind: str) -> None:
    class Twice(Method):
        name = "twice"

        def setup(self, run: Setup) -> None:
            for size in (3, 4):
                getattr(run, kind)("kept", lambda _, size=size: torch.zeros(size))

    with pytest.raises(ValueError, match=f"method 'twice' declares {kind} 'kept' twice"):
        declare_run(run_spec(Twice(), model=NORMED_MLP))


def test_client_states_of_two_methods_with_equal_keys_are_refused() -> None:
    methods = [Keeps("mine", "own.state"), Keeps("mine.own", "state")]
    with pytest.raises(ValueError, match=r"method 'mine\.own' .* 'mine\.own\.state', .*'mine'"):
        declare_run(run_spec(*methods, model=NORMED_MLP))
    fine = [Keeps("mine", "state"), FedBN(), Keeps("yours", "state")]
    declare_run(run_spec(*fine, model=NORMED_MLP))
