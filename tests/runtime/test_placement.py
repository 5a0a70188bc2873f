"""Test how many workers a run gets, their memory, placement groups, and runs on several nodes."""

from __future__ import annotations

import io
import multiprocessing
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path, PosixPath
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from rich.console import Console
from tiny_runs import (
    FOLDERS,
    NORMED,
    coordinate,
    equal_clients,
    run,
    run_spec,
    run_to_end,
    several_workers,
    tiny_data,
    with_settings,
)

from raysim.api.declarations import Evaluation
from raysim.api.local_job import LocalJob
from raysim.api.messages import PublishedVersion
from raysim.api.method import Method
from raysim.data.dataset import copy_to_cache
from raysim.experiment.build import build
from raysim.methods.scaffold import Scaffold
from raysim.models import Mlp
from raysim.primitives.errors import RefusedError
from raysim.results.progress import Progress
from raysim.runtime.inprocess import InProcess
from raysim.runtime.placement import (
    GIB,
    NoRoomError,
    RayOptions,
    Size,
    choose_size,
    format_bytes,
    gpu_share,
    limit_by_memory,
    node_capacity,
    size_in_group,
    worker_capacity,
    worker_resources,
)
from raysim.runtime.preflight import MemoryNeed, measure, restrict_data, workers_per_gpu
from raysim.runtime.ray import RayCoordinator
from raysim.simulation.events import Finished, Round, Started, TooManyFailuresError
from raysim.simulation.fleet import Ideal, Lognormal
from raysim.simulation.schedule import Buffered, Synchronous
from raysim.training.run_spec import Checkpoint, RunSpec
from raysim.training.worker import Worker

CLUSTER = [{"CPU": 4.0, "GPU": 1.0}, {"CPU": 2.0}, {"CPU": 2.0}]


# --- what fits ------------------------------------------------------------------------------------
def test_number_of_workers_is_limited_by_cluster_and_clients() -> None:
    assert choose_size(RayOptions(), {"CPU": 1.0}, CLUSTER, 20) == Size(8, {"CPU": 1.0})
    assert choose_size(RayOptions(), {"CPU": 1.0}, CLUSTER, 5).workers == 5
    assert choose_size(RayOptions(), {"CPU": 1.5}, CLUSTER, 20).workers == 4, (
        "a worker lies on one node"
    )
    assert choose_size(RayOptions(strategy="STRICT_PACK"), {"CPU": 1.0}, CLUSTER, 20).workers == 4
    assert choose_size(RayOptions(workers=3), {"CPU": 1.0}, CLUSTER, 20).workers == 3
    assert choose_size(RayOptions(), {}, CLUSTER, 7).workers == 7, (
        "nothing limits workers that reserve nothing"
    )


def test_number_of_workers_is_limited_by_memory() -> None:
    nodes = [{"CPU": 4.0, "memory": 2.0 * GIB}, {"CPU": 4.0}]
    size = Size(8, {"CPU": 1.0})
    assert limit_by_memory(size, RayOptions(), nodes, GIB).workers == 2 + 4
    assert limit_by_memory(size, RayOptions(), nodes[:1], 3 * GIB).workers == 1
    assert limit_by_memory(size, RayOptions(), nodes, GIB // 4) == size
    strict = RayOptions(strategy="STRICT_PACK")
    assert limit_by_memory(Size(4, {"CPU": 1.0}), strict, nodes[:1], GIB).workers == 2


def test_worker_needs_its_whole_gpu_share_on_one_gpu() -> None:
    assert node_capacity({"GPU": 2.0}, {"GPU": 0.6}) == 2
    assert node_capacity({"GPU": 2.0}, {"GPU": 0.5}) == 4
    assert node_capacity({"GPU": 4.0}, {"GPU": 2.0}) == 2
    assert worker_capacity([{"GPU": 2.0}, {"CPU": 8.0}], {"GPU": 0.5, "CPU": 1.0}) == 0, (
        "not on one node"
    )


@pytest.mark.parametrize("workers", [1, 2, 3, 6, 7, 9, 11, 64])
def test_gpu_that_is_divided_among_n_workers_has_room_for_exactly_n_workers(workers: int) -> None:
    assert node_capacity({"GPU": 1.0}, {"GPU": gpu_share(workers)}) == workers


def test_error_of_too_many_workers_lists_nodes_and_the_maximum() -> None:
    nodes = "a node of 4 CPU and 1 GPU and 2 nodes of 2 CPU and 0 GPU each"
    with pytest.raises(NoRoomError, match=rf"^runtime\.workers=9 .*{nodes}.* GPU.*workers=4\.$"):
        choose_size(RayOptions(workers=9), {"CPU": 1.0, "GPU": 0.25}, CLUSTER, 20)


@pytest.mark.parametrize(
    ("options", "each", "nodes", "advice"),
    [
        (RayOptions(), {"CPU": 1.0, "slot": 1.0}, CLUSTER, r"runtime\.resources\.slot"),
        (RayOptions(), {"CPU": 1.0, "GPU": 1.0}, CLUSTER[1:], "device=cpu"),
        (RayOptions(), {"CPU": 1.0, "GPU": 2.0}, CLUSTER, r"runtime\.gpus"),
        (
            RayOptions(workers=5, strategy="STRICT_PACK"),
            {"CPU": 1.0},
            CLUSTER,
            r"runtime\.strategy=STRICT_PACK.* runtime\.workers=4",
        ),
    ],
    ids=["declared resource", "no GPU", "too few GPUs", "one node"],
)
def test_error_of_too_many_workers_says_which_setting_to_change(
    options: RayOptions, each: Any, nodes: Any, advice: str
) -> None:
    with pytest.raises(NoRoomError, match=advice) as error:
        choose_size(options, each, nodes, 20)
    assert options.workers or "runtime.workers" not in str(error.value)


@pytest.mark.parametrize(
    ("gpu_node", "advice"),
    [({"CPU": 4.0, "GPU": 8.0}, "Set runtime.workers=4."), ({"GPU": 8.0}, "Start nodes that have")],
)
def test_error_of_too_many_workers_says_if_cpus_and_gpus_are_on_different_nodes(
    gpu_node: dict[str, float], advice: str
) -> None:
    nodes = [{"CPU": 64.0}, gpu_node]
    with pytest.raises(NoRoomError, match="on the same nodes") as error:
        choose_size(RayOptions(workers=8), {"CPU": 1.0, "GPU": 1.0}, nodes, 20)
    assert "too little" not in str(error.value) and advice in str(error.value)


@pytest.mark.parametrize(
    ("cpus", "advice"), [(5.0, "2 CPU, or set runtime.workers=2."), (1.0, "2 CPU.")]
)
def test_error_after_a_lost_node_suggests_a_number_of_workers_that_fits(
    cpus: float, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from raysim.runtime.ray import cluster

    monkeypatch.setattr(cluster, "node_resources", lambda: [{"CPU": cpus}])
    bundles = [{"node:10.0.0.1": 0.001}, *(3 * [{"CPU": 2.0}])]
    with pytest.raises(NoRoomError, match=r"^runtime\.workers=3: ") as error:
        cluster._check_capacity(bundles, RayOptions())
    assert str(error.value).endswith(f"Start a node with {advice}")


@pytest.mark.parametrize(
    ("free", "reason"), [(1.0, "other runs leave only 1 CPU"), (4.0, "has 4 CPU free, but Ray")]
)
def test_waiting_message_mentions_other_runs_only_if_too_few_cpus_are_free(
    free: float, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from raysim.runtime.ray import cluster

    monkeypatch.setattr(cluster, "node_resources", lambda: [{"CPU": 4.0}])
    monkeypatch.setattr(cluster.ray, "available_resources", lambda: {"CPU": free})
    group, said = MagicMock(), list[str]()
    group.wait.side_effect = [False, True]
    bundles = [{"node:10.0.0.1": 0.001}, {"CPU": 2.0}]
    cluster._wait_for(group, bundles, RayOptions(), said.append)
    (text,) = said
    assert text.startswith("waiting: this run needs 2 CPU") and reason in text


def test_run_waits_for_missing_nodes_only_if_address_and_wait_are_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from raysim.runtime.ray import driver

    now, tries, said = [0.0], [0], list[str]()
    requests = list[Any]()

    def sleep(seconds: float) -> None:
        now[0] += seconds

    def plan_now(*_: Any) -> Size:
        tries[0] += 1
        if tries[0] < 4:
            raise NoRoomError("too few")
        return Size(3, {"CPU": 1.0})

    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=sleep)
    monkeypatch.setattr(driver, "time", clock)
    monkeypatch.setattr(driver, "plan_now", plan_now)
    monkeypatch.setattr(driver, "request_resources", lambda bundles: requests.append(bundles))

    def plan(**settings: Any) -> Size:
        tries[0] = 0
        options = RayOptions(workers=3, **settings)
        return driver.plan_workers(options, run_spec(), 5, said.append)

    assert plan(address="auto", wait=9).workers == 3 and now == [3.0]
    assert requests == [[{"CPU": 1.0}] * 3, []] and len(said) == 1 and "9 s" in said[0]
    for settings in ({"address": "auto"}, {"address": "auto", "wait": 0}, {"wait": 9}):
        with pytest.raises(NoRoomError):
            plan(**settings)
        assert tries[0] == 1
    with pytest.raises(NoRoomError):
        plan(address="auto", wait=2)
    assert requests[2:] == [[{"CPU": 1.0}] * 3, []]


def test_worker_reserves_threads_gpu_and_requested_resources() -> None:
    assert worker_resources(RayOptions(), "cpu", 2) == {"CPU": 2.0}
    assert worker_resources(RayOptions(), "cuda", 1) == {"CPU": 1.0, "GPU": 1.0}
    assert worker_resources(RayOptions(cpus=0, gpus=0.25, resources={"slot": 1.0}), "cpu", 1) == {
        "GPU": 0.25,
        "slot": 1.0,
    }
    with pytest.raises(ValueError, match=r"device=cuda:1 "):
        worker_resources(RayOptions(), "cuda:1", 1)
    with pytest.raises(ValueError, match=r"runtime\.gpus=0 "):
        worker_resources(RayOptions(gpus=0), "cuda", 1)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("runtime.gpus=1.5", "runtime.gpus=1.5"),
        ("runtime.resources={slot: -1}", "runtime.resources.slot=-1"),
        ("runtime.resources={slot: many}", "runtime.resources.slot=many"),
        ("runtime.resources={GPU: 1}", "runtime.gpus"),
        ("runtime.strategy=pack", "runtime.strategy=pack"),
        ("runtime.wait=-1", "runtime.wait=-1"),
    ],
)
def test_wrong_runtime_settings_are_refused(override: str, key: str) -> None:
    with pytest.raises(RefusedError, match=re.escape(key)):
        build([override, "tracking=none"])


def test_first_bundle_of_a_trial_has_no_worker_and_each_other_bundle_has_one() -> None:
    bundles = [{"CPU": 1.0}, {"CPU": 2.0, "GPU": 0.5}, {"CPU": 2.0, "GPU": 0.5}]
    assert size_in_group(RayOptions(), bundles, "cuda") == Size(2, {"CPU": 2.0, "GPU": 0.5})
    assert size_in_group(RayOptions(workers=1, cpus=2), bundles, "cpu").workers == 1
    with pytest.raises(ValueError, match=r"^runtime\.workers=3: .* 2 "):
        size_in_group(RayOptions(workers=3), bundles, "cpu")
    with pytest.raises(ValueError, match=r"^runtime\.workers=3: .* none .* Add 3 to the group\.$"):
        size_in_group(RayOptions(workers=3), bundles[:1], "cpu")
    with pytest.raises(ValueError, match=r"^runtime\.cpus=4 .* 2 CPU"):
        size_in_group(RayOptions(cpus=4), bundles, "cpu")
    with pytest.raises(ValueError, match=r"^device=cuda: "):
        size_in_group(RayOptions(), 2 * [{"CPU": 1.0}], "cuda")


# --- what a job needs -----------------------------------------------------------------------------
def test_memory_of_client_states_reduces_workers_per_gpu() -> None:
    need = MemoryNeed(job=GIB * 13 // 10, room=16 * GIB, state=GIB // 10)
    assert workers_per_gpu(replace(need, state=0), 100, 1) == 11  # 15.2 / 1.3
    assert workers_per_gpu(need, 100, 1) == 4  # (15.2 - 10) / 1.3
    assert workers_per_gpu(need, 100, 2) == 7  # (15.2 - 5) / 1.3
    assert workers_per_gpu(need, 1000, 1) == 0
    assert (
        format_bytes(need.job) == "1.3 GiB"
        and format_bytes(300 * 2**20) == "300 MiB"
        and format_bytes(139 * GIB) == "139 GiB"
    )


class Seen(Method):
    """A method that records (client, number of samples) of each job that trains."""

    name = "seen"
    clients: list[tuple[int, int]] = []  # noqa: RUF012

    def begin(self, job: LocalJob) -> None:
        self.clients.append((job.client, job.samples))


def test_preflight_measures_memory_by_training_only_the_largest_client() -> None:
    Seen.clients.clear()
    need = measure(run_spec(Seen(), Scaffold()), read=lambda device: (7, {"cpu": 70}[device]))
    sizes = tiny_data().partition.train.counts
    assert Seen.clients == [(int(np.argmax(sizes)), int(sizes.max()))]
    vector = coordinate(run_spec(Scaffold())).layout.shared
    assert need == MemoryNeed(7, 70, state=4 * vector), "a control variate"
    assert measure(run_spec()).job > 10 * 2**20, "the resident memory of this process"


def test_data_restricted_to_one_client_contain_no_training_samples_of_others() -> None:
    data = restrict_data(tiny_data(), [2], central=3)
    assert np.flatnonzero(data.partition.train.counts).tolist() == [2]
    assert data.partition.train.rows(2).tolist() == tiny_data().partition.train.rows(2).tolist()
    assert len(data.partition.test) == len(tiny_data().partition.test) and len(data.central) == 3


def test_preflight_measures_memory_of_two_lanes_by_training_largest_client_in_both() -> None:
    data = restrict_data(tiny_data(), [3, 0], central=3)
    assert np.flatnonzero(data.partition.train.counts).tolist() == [0, 3]
    largest = tiny_data().partition.train.rows(3).tolist()
    assert data.partition.train.rows(0).tolist() == data.partition.train.rows(3).tolist() == largest
    Seen.clients.clear()
    measure(run_spec(Seen(), model=Mlp((6,)), lanes=2), read=lambda device: (7, 70))
    sizes = tiny_data().partition.train.counts
    assert [size for _, size in Seen.clients] == 2 * [int(sizes.max())]
    assert {client for client, _ in Seen.clients} == {
        int(np.argmax(sizes)),
        (int(np.argmax(sizes)) + 1) % len(sizes),
    }


# --- what a run shows -----------------------------------------------------------------------------
@pytest.mark.parametrize("methods", [(), (Scaffold(),)], ids=["stateless", "stateful"])
def test_history_has_columns_of_busy_workers_and_object_store_bytes(
    methods: tuple[Method, ...],
) -> None:
    study = run_spec(*methods, data=equal_clients(), model=Mlp((32,)))
    coordinator = coordinate(
        study, Buffered(concurrency=4, size=2), runtime=several_workers(study, 2), rounds=12
    )
    result = run_to_end(coordinator)
    vector = 4 * coordinator.layout.shared
    upload = vector * (2 if methods else 1)  # the model, and the control variate's change
    down = vector * (2 if methods else 1)
    for row in result.rows:
        assert 0 <= row["worker_busy_least"] <= row["worker_busy"] <= 1  # type: ignore[operator]
        # live versions (at most one per job, and the current one), jobs in flight and their states,
        # accepted states
        most = 5 * down + 4 * (upload + vector * len(methods)) + len(methods) * 6 * vector
        assert down <= row["store_bytes"] <= most  # type: ignore[operator]
    assert max(row["worker_busy"] for row in result.rows) > 0  # type: ignore[type-var, operator]


def test_sum_of_updates_uses_as_many_object_store_bytes_as_one_vector() -> None:
    study = run_spec(data=equal_clients(), model=Mlp((32,)))
    coordinator = coordinate(study, Synchronous(4), runtime=several_workers(study, 2), rounds=1)
    (row,) = run_to_end(coordinator).rows
    assert row["store_bytes"] == 4 * coordinator.layout.shared * (1 + 2), "one version, two sums"


def test_progress_without_terminal_has_plain_lines() -> None:
    stream, now = io.StringIO(), [0.0]
    with Progress(30, console=Console(file=stream, width=40), clock=lambda: now[0]) as progress:
        for number in range(1, 31):
            now[0] += 1.0
            progress.update({"round": number, "wall_seconds": float(number), "accuracy": 0.5})
    lines = stream.getvalue().splitlines()
    assert [line.split(" · ")[0] for line in lines] == ["round 10/30", "round 20/30", "round 30/30"]
    assert "\x1b" not in stream.getvalue()


def test_data_set_is_not_copied_to_a_node_again_if_the_node_has_a_copy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    dataset = tiny_data().dataset_path  # written before the folder of the cache changes
    monkeypatch.setenv("RAYSIM_CACHE", str(tmp_path / "other"))
    reads = []

    def read() -> np.ndarray:
        reads.append(1)
        return np.fromfile(dataset, np.uint8)

    paths = {copy_to_cache(dataset.name, read) for _ in range(3)}
    assert paths == {tmp_path / "other" / dataset.name} and len(reads) == 1
    assert next(iter(paths)).read_bytes() == dataset.read_bytes()
    assert [path.suffix for path in (tmp_path / "other").iterdir() if path.suffix] == [".arrow"], (
        "nothing unfinished"
    )


# --- two raylets ----------------------------------------------------------------------------------
class Hidden(PosixPath):
    """A path whose file does not exist on the second node."""

    def exists(self, **_: Any) -> bool:  # type: ignore[override]
        return "SECOND_NODE" not in os.environ and super().exists()


class Failing(Method):
    name = "failing"

    def begin(self, job: LocalJob) -> None:
        raise KeyError("lost")


Call = Callable[..., Any]
_CLUSTERS: list[Any] = []


def _start_cluster(cache: str) -> None:
    """Start a Ray cluster of two nodes with one CPU each, and connect this process to it.

    The first node declares two GPUs to Ray. The machine need not have GPUs.
    cache: raysim's cache folder on the second node.
    """
    from ray.cluster_utils import Cluster

    from raysim.runtime import ray as on_ray

    room = {"num_cpus": 1, "object_store_memory": 100 << 20, "include_dashboard": False}
    _CLUSTERS.append(cluster := Cluster())
    cluster.add_node(**room, num_gpus=2)
    cluster.add_node(**room, env_vars={"RAYSIM_CACHE": cache, "SECOND_NODE": "1"})
    assert on_ray.connect(RayOptions(address=cluster.address))


def _stop_cluster() -> None:
    from raysim.runtime import ray as on_ray

    on_ray.disconnect()
    for cluster in _CLUSTERS:
        cluster.shutdown()


@pytest.fixture(scope="module")
def second_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("second")


@pytest.fixture(scope="module")
def driver(second_cache: Path) -> Iterator[Call]:
    """Yield a function that runs code in the driver of a Ray cluster with two nodes.

    The yielded function has the arguments (function, *args, **options), and returns function(*args,
    **options). The driver is a separate process.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", FOLDERS, prepend=os.pathsep)
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:

            def call(function: Call, *args: Any, **options: Any) -> Any:
                return pool.submit(function, *args, **options).result(timeout=1800)

            try:
                call(_start_cluster, str(second_cache))
                yield call
            finally:
                call(_stop_cluster)


def _silent(_: str) -> None:
    pass


def _groups() -> list[str]:
    """Return the names of the placement groups that exist."""
    import ray

    return [
        each["name"]
        for each in ray.util.placement_group_table().values()
        if each["state"] != "REMOVED"
    ]


def _living_actors(word: str) -> dict[str, Any]:
    """Return the living Ray actors whose names contain a word.

    A key is the text after the first slash of an actor's name.
    """
    import ray

    found = ray.util.list_named_actors(all_namespaces=True)
    return {
        each["name"].partition("/")[2]: ray.get_actor(each["name"], namespace=each["namespace"])
        for each in found
        if word in each["name"]
    }


def _wait_until_empty(what: Callable[[], Any]) -> bool:
    """Wait until the result of `what` is empty, and return True; return False after ten minutes.

    Ray removes actors and placement groups in the background.
    """
    from ray.util import placement_group, remove_placement_group

    for _ in range(600):
        if not what():
            return True
        never = placement_group(
            [{"CPU": 100.0}]
        )  # a second that does not pass in vain: nothing else is asked of Ray
        never.wait(1)
        remove_placement_group(never)
    return False


# --- several nodes --------------------------------------------------------------------------------
LARGE = Mlp((2000,))


def _on_both_nodes() -> tuple[tuple[str, str], list[dict[str, Any]], dict[str, Any]]:
    import ray

    from raysim.runtime import ray as on_ray

    data = replace(equal_clients(), dataset_path=Hidden(equal_clients().dataset_path))
    study = run_spec(Scaffold(), model=LARGE, data=data)
    size = on_ray.plan_workers(RayOptions(), study, 8, _silent)
    before = ray.available_resources()["object_store_memory"]
    longer = with_settings(study, rounds=20, evaluate=Evaluation(every=10))
    events = on_ray.run(
        longer, Buffered(concurrency=4, size=2), Lognormal(), size, RayOptions(), _silent
    )
    seen: dict[str, Any] = {"size": size, "used": []}
    rows = []
    for event in events:
        if isinstance(event, Round):
            rows.append(event.row)
            seen["used"].append(before - ray.available_resources()["object_store_memory"])
            if len(rows) == 1:
                actors = _living_actors("raysim-")
                seen["actors"] = sorted(actors)
                workers = [actor for name, actor in actors.items() if name.startswith("worker")]
                look = [worker.__ray_call__.remote(_where) for worker in workers]
                seen["workers"] = ray.get(look)
                seen["groups"] = len(_groups())
        last = event
    assert isinstance(last, Finished)
    seen["left"] = not _wait_until_empty(lambda: [*_groups(), *_living_actors("raysim-")])
    return (last.model_sha256, last.state_sha256), rows, seen


def _where(actor: Any) -> tuple[str, str, int]:
    """Return the node id of a worker, the path of its data set, and its number of client states."""
    import ray

    worker = actor.held
    return (
        ray.get_runtime_context().get_node_id(),
        str(worker.spec.data.dataset_path),
        len(worker.states.resident),
    )


def test_run_on_two_nodes_has_the_bits_of_one_process(driver: Call, second_cache: Path) -> None:
    study = run_spec(Scaffold(), model=LARGE, data=equal_clients())
    schedule = Buffered(concurrency=4, size=2)
    here = run(study, schedule, Lognormal(), rounds=20, evaluate=Evaluation(every=10))
    bits, rows, seen = driver(_on_both_nodes)
    assert bits == here.bits
    assert [row["accuracy"] for row in rows] == [row["accuracy"] for row in here.rows]
    assert seen["size"] == Size(2, {"CPU": 1.0}), "CPUs alone, on nodes with GPUs"
    # Where they are, and what they read.
    places = [node for node, _, _ in seen["workers"]]
    assert sorted(places.count(node) for node in set(places)) == [1, 1]
    own = second_cache / equal_clients().dataset_path.name
    assert sorted(path for _, path, _ in seen["workers"]) == sorted(
        [str(own), str(equal_clients().dataset_path)]
    )
    assert own.read_bytes() == equal_clients().dataset_path.read_bytes()
    assert all(worked for _, _, worked in seen["workers"]), "each node takes its share of the work"
    # What is seen while it runs, and what is left.
    assert seen["actors"] == ["coordinator", "worker-0", "worker-1"]
    assert seen["groups"] == 1 and not seen["left"]
    # Nothing piles up in Ray's own stores: what the history counts once may lie on both nodes for a
    # while.
    assert max(seen["used"]) <= 2 * max(row["store_bytes"] for row in rows)


SUMMED = with_settings(run_spec(model=LARGE, data=equal_clients(16, 320)), rounds=2)


def _run_with_and_without_sums() -> list[tuple[tuple[str, str], dict[str, set[int]]]]:
    """Make two runs; nodes add up the updates of their workers in the first run only.

    Return for each run the sha256 pair (model, state), and a dictionary from each remote call's
    name to the nodes that received the call.
    """
    from raysim.runtime import ray as on_ray

    size, options = Size(4, {"CPU": 0.5}), RayOptions(combine=True)
    found = []
    with on_ray.reserve(on_ray.run_bundles(size), "adding", options, _silent) as group:
        runtime: Any = on_ray.start_workers_in(
            group, size, "adding", options, on_ray.RayWorker, SUMMED
        )
        call, add_up = runtime.call, runtime.add_up
        for runtime.combine_from in (options.combine_from, RayOptions(combine=False).combine_from):
            called: dict[str, set[int]] = {}

            def watched(worker: int, method: str, *args: Any, **how: Any) -> list[Any]:
                called.setdefault(method, set()).add(runtime.nodes[worker])  # noqa: B023
                return call(worker, method, *args, **how)

            def watched_sum(node: int, *args: Any) -> Any:
                called.setdefault("add_up", set()).add(node)  # noqa: B023
                return add_up(node, *args)

            runtime.call, runtime.add_up = watched, watched_sum
            found.append(
                (run_to_end(coordinate(SUMMED, Synchronous(16), Ideal(), runtime)).bits, called)
            )
        runtime.stop()
    return found


def test_sums_computed_on_nodes_change_no_bit(driver: Call) -> None:
    here = run(SUMMED, Synchronous(16), Ideal()).bits
    (apart, with_it), (together, without) = driver(_run_with_and_without_sums)
    assert apart == together == here
    assert (with_it["train"], with_it["train_apart"], with_it["add_up"]) == ({0}, {1}, {1})
    assert without["train"] == {0, 1} and "add_up" not in without


def _measured() -> list[dict[str, Any]]:
    from jobs.benchmarks import cluster

    options, size = cluster.ClusterOptions(floats=(1_000_000,)), Size(2, {"CPU": 1.0})
    found = list(cluster.costs(options, size, 2, _silent))
    assert cluster.table(found).split("\n\n")[0].count("\n") == 5, (
        "title, head, line and three ways"
    )
    return [asdict(cost) for cost in found]


def test_cluster_benchmark_counts_calls_and_bytes_between_two_nodes(driver: Call) -> None:
    costs = {cost["way"]: cost for cost in driver(_measured)}
    vector = 4 * costs["sums"]["floats"]
    # Eight clients for each of two workers, of which one is on the coordinator's node. Clients of
    # unequal sizes are split more finely than equal ones.
    counted = {
        way: (cost["calls"], cost["arrays"], cost["up"] / vector) for way, cost in costs.items()
    }
    assert counted == {"sums": (2, 4, 2), "sums of nodes": (2, 4, 2), "updates": (2, 16, 8)}
    for cost in costs.values():
        assert (cost["workers"], cost["nodes"], cost["down"]) == (2, 2, vector), (
            "a version goes once to the other node"
        )
        assert 0 < sum(cost["parts"].values()) <= cost["wall"] and cost["cpu"] > 0


# --- one run, one group ---------------------------------------------------------------------------
def _run_after_another_run() -> tuple[list[str], list[str], list[str], bool]:
    """Make a run while two other groups, one after another, hold GPUs that it needs.

    Return the errors of `runtime.wait=0` before and during the run, the messages of the run, the
    ids of its GPUs, and True if none of its actors and groups is left.
    """
    import ray

    from raysim.runtime import ray as on_ray

    study, options = run_spec(), RayOptions(workers=1, cpus=0, gpus=1.0)
    size = on_ray.plan_workers(options, study, 4, _silent)
    arguments = (study, Synchronous(4), Lognormal(), size)
    refused: list[str] = []
    told: list[str] = []

    def try_without_waiting() -> None:
        try:
            next(on_ray.run(*arguments, replace(options, wait=0), _silent))
        except ValueError as error:
            refused.append(str(error))

    other = ray.util.placement_group([{"GPU": 2.0}], name="other")
    assert other.wait(600)
    try_without_waiting()

    def say(text: str) -> None:
        told.append(text)
        ray.util.remove_placement_group(other)  # the others end while this one waits

    events = on_ray.run(*arguments, options, say)
    assert isinstance(next(events), Started)
    (worker,) = [actor for name, actor in _living_actors("raysim-").items() if name == "worker-0"]
    slots = ray.get(worker.__ray_call__.remote(_slots))
    with on_ray.reserve(on_ray.run_bundles(size), "other", options, _silent):
        try_without_waiting()
    events.close()  # type: ignore[attr-defined]  # as Ctrl-C does
    gone = _wait_until_empty(lambda: [*_groups(), *_living_actors("raysim-")])
    return refused, told, slots, gone


def _slots(_: Any) -> list[str]:
    import ray

    return list(ray.get_runtime_context().get_accelerator_ids()["GPU"])


def test_run_reserves_its_gpu_and_waits_or_is_refused_if_no_gpu_is_free(driver: Call) -> None:
    refused, told, slots, gone = driver(_run_after_another_run)
    assert len(refused) == 2, "while others hold both GPUs, and while this run holds one of them"
    for error in refused:
        assert error.startswith("runtime.wait=0: ") and "1 GPU" in error and "0 GPU" in error
        assert "runtime.workers" not in error, "a run needs at least one worker"
    (line,) = told
    assert line.startswith("waiting: ") and "runtime.wait=SECONDS" in line
    assert slots in (["0"], ["1"])
    assert gone


DYING = """
import sys
from raysim.runtime import ray as on_ray
options = on_ray.RayOptions(address=sys.argv[1])
on_ray.connect(options)
with on_ray.reserve([{"CPU": 1.0}], "dying", options, print):
    print("placed", flush=True)
    sys.stdin.read()
"""


def _driver_dies() -> tuple[bool, bool]:
    command = [sys.executable, "-c", DYING, _CLUSTERS[0].address]
    dying = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert dying.stdout is not None and dying.stdin is not None
    with dying:
        assert dying.stdout.readline() == "placed\n"
        there = "dying" in _groups()
        dying.send_signal(signal.SIGKILL)
    return there, _wait_until_empty(lambda: "dying" in _groups())


def test_placement_group_of_killed_driver_is_removed(driver: Call) -> None:
    assert driver(_driver_dies) == (True, True)


# --- fractions of GPUs ----------------------------------------------------------------------------
def _small_job(_: Any) -> MemoryNeed:
    return MemoryNeed(job=GIB * 13 // 10, room=16 * GIB)


def _huge_job(_: Any) -> MemoryNeed:
    return MemoryNeed(job=20 * GIB, room=16 * GIB)


def _fits(
    options: RayOptions, job: Any, most: int, device: str = "cuda", remotely: bool = False
) -> tuple[Size | str, list[str]]:
    """Plan the workers of a run; return the plan or the error's text, and the printed messages.

    job: returns the memory of a job.
    most: the number of clients in flight.
    remotely: True calls `job` in a new process on the cluster, as a run does.
    """
    from raysim.runtime import ray as on_ray
    from raysim.runtime.ray import driver

    told: list[str] = []

    def say(text: str) -> None:
        if not text.startswith(
            "waiting"
        ):  # where Ray is slow to give back what the preflight before had
            told.append(text)

    def measure_here(_: RayOptions, spec: RunSpec, *others: Any) -> MemoryNeed:
        *_, measure = others
        need: MemoryNeed = measure(spec)
        return need

    with pytest.MonkeyPatch.context() as patch:
        if not remotely:
            patch.setattr(driver, "_measure_remotely", measure_here)
        try:
            return on_ray.plan_workers(options, run_spec(device=device), most, say, job), told
        except ValueError as error:
            return str(error), told


def test_number_of_workers_per_gpu_depends_on_the_memory_of_a_job(driver: Call) -> None:
    told = ["a job needs 1.3 GiB of memory, so a GPU has room for 11 workers"]
    one = Size(1, {"CPU": 1.0, "GPU": 1.0})
    measured = driver(_fits, RayOptions(), _small_job, 8, remotely=True)
    assert measured == (one, told), "the node has one CPU"
    assert driver(_fits, RayOptions(cpus=0.125), _small_job, 6) == (
        Size(6, {"CPU": 0.125, "GPU": 0.3333}),
        told,
    )
    many = driver(_fits, RayOptions(cpus=0.01), _small_job, 100)
    assert many == (Size(22, {"CPU": 0.01, "GPU": gpu_share(11)}), told), (
        "as many as fit, on two GPUs"
    )
    refused, _ = driver(_fits, RayOptions(cpus=0.01, workers=23), _small_job, 100)
    assert refused.startswith("runtime.workers=23 ") and "runtime.workers=22" in refused
    given = RayOptions(cpus=0.01, gpus=0.1)
    assert driver(_fits, given, _small_job, 100) == (Size(20, {"CPU": 0.01, "GPU": 0.1}), []), (
        "not measured"
    )
    given = replace(given, gpus=0.05)
    refused, _ = driver(_fits, replace(given, preflight=True), _small_job, 100)
    assert refused.startswith("runtime.gpus=0.05 ") and "runtime.gpus=0.0909" in refused
    refused, _ = driver(_fits, RayOptions(), _huge_job, 8)
    assert refused.startswith("device=cuda: ") and "20 GiB" in refused and "16 GiB" in refused


def _monstrous_job(_: Any) -> MemoryNeed:
    return MemoryNeed(job=10**15, room=0)


def test_cpu_worker_reserves_the_memory_that_was_measured_before_the_run(driver: Call) -> None:
    asked = RayOptions(preflight=True)
    assert driver(_fits, asked, _small_job, 2, "cpu")[0] == Size(
        2, {"CPU": 1.0, "memory": GIB * 13 // 10}
    )
    refused, _ = driver(_fits, asked, _monstrous_job, 2, "cpu")
    assert "too little memory" in refused and "local.batch" in refused


# --- one run after another ------------------------------------------------------------------------
WHOLE = Mlp((20,))


def _three_runs() -> tuple[list[tuple[str, str]], list[dict[str, Any]], bool]:
    """Make three runs that may reuse actors. The last run asks for other resources, and fails.

    Return the sha256 pairs (model, state) of the first two runs, and four dictionaries from names
    of actors to their ids: the actors that live during each run, and those after the last run. The
    last value is True if no actor and no placement group is left after `keep_processes`.
    """
    from raysim.runtime import ray as on_ray

    bits, living = [], []

    def list_actors() -> None:
        actors = _living_actors("together-")
        living.append({name: actor._actor_id.hex() for name, actor in actors.items()})

    def make_run(study: RunSpec, cpus: float) -> None:
        size = Size(1, {"CPU": cpus})
        for event in on_ray.run(study, Synchronous(4), Ideal(), size, RayOptions(), _silent):
            if isinstance(event, Started):
                list_actors()
        assert isinstance(event, Finished)
        bits.append((event.model_sha256, event.state_sha256))

    with on_ray.keep_processes("together"):
        make_run(run_spec(Scaffold(), model=WHOLE), 0.5)
        make_run(run_spec(model=NORMED), 0.5)
        with suppress(TooManyFailuresError):
            make_run(with_settings(run_spec(Failing(), model=NORMED), tolerate=0.0), 0.25)
        list_actors()
    return bits, living, _wait_until_empty(lambda: [*_groups(), *_living_actors("together-")])


def test_worker_processes_are_reused_by_equal_runs_until_a_failure(
    driver: Call,
) -> None:
    scaffold = run(run_spec(Scaffold(), model=WHOLE), Synchronous(4), Ideal(), rounds=3).bits
    plain = run(run_spec(model=NORMED), Synchronous(4), Ideal(), rounds=3).bits
    bits, (first, second, other, after_failure), gone = driver(_three_runs)
    assert bits == [scaffold, plain], "nothing of the earlier run is left"
    assert sorted(first) == ["coordinator", "worker-0"] and second == first
    assert sorted(other) == sorted(first) and not set(other.values()) & set(first.values())
    assert not after_failure and gone


def test_coordinator_writes_no_files_before_the_driver_asks_for_the_first_round(
    tmp_path: Path,
) -> None:
    # The driver makes the run's folder at its start; on a busy machine the coordinator would be
    # there first.
    spec = run_spec()
    spec = replace(spec, settings=replace(spec.settings, rounds=2, checkpoint=Checkpoint(every=1)))
    runtime: Any = InProcess(Worker(spec))
    runtime.participants = None  # no worker to compare with this process
    runtime.watch_nodes = runtime.stop_watch = lambda *_: None
    folder = tmp_path / "run"
    coordinator = RayCoordinator(spec, Synchronous(3), Ideal(), runtime, str(folder), "")
    begun = [event for batch in coordinator.begin() for event in batch]
    assert isinstance(begun[-1], Started) and not folder.exists()
    others = [event for batch in coordinator.events() for event in batch]
    assert isinstance(others[-1], Finished) and folder.exists()
    assert not any(isinstance(event, Started) for event in others)


@pytest.mark.parametrize(
    ("floats", "workers", "is_stored"),
    [
        (50_000, 2, False),
        (50_000, 8, True),  # eight copies are larger than one stored version
        (240_000, 1, True),  # too large for a message
    ],
)
def test_small_version_is_sent_in_messages_and_large_version_is_stored_once(
    floats: int, workers: int, is_stored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from raysim.runtime.ray import actors

    monkeypatch.setenv("RAY_max_direct_call_object_size", "1000000")
    monkeypatch.setattr(actors.ray, "put", lambda value: "stored")
    runtime = actors.RayRuntime(workers, lambda worker: MagicMock())
    version = PublishedVersion(0, np.zeros(floats, np.float32), np.empty(0, np.int64))
    expected: object = "stored" if is_stored else version
    assert runtime.put(version) is expected
