"""Test workers on Ray that would compute other bits than the driver."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import FOLDERS, run_spec

import raysim
from raysim.runtime.placement import RayOptions
from raysim.simulation.events import RunStoppedError
from raysim.training.identity import Participants

OTHER_KERNELS = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"}
WORDS = [
    "data=synthetic",
    "data.samples=60",
    "data.test_samples=10",
    "rounds=1",
    "tracking=none",
    "schedule.cohort=4",
    "partition.clients=6",
    "model=mlp",
]
ON_BOTH = ["runtime=cluster", "runtime.workers=2", "runtime.strategy=SPREAD"]

Call = Callable[..., Any]
_CLUSTERS: list[Any] = []


def _start_cluster(environment: dict[str, str], folder: str) -> None:
    """Start a Ray cluster of two nodes with one CPU each, and connect this process to it.

    environment: environment variables that only the second node has.
    folder: this folder becomes the working folder of this process.
    """
    os.chdir(folder)  # where a driver is, workers look for packages first
    from ray.cluster_utils import Cluster

    from raysim.runtime import ray as on_ray

    room = {"num_cpus": 1, "object_store_memory": 100 << 20, "include_dashboard": False}
    _CLUSTERS.append(cluster := Cluster())
    cluster.add_node(**room)
    cluster.add_node(**room, env_vars=environment)
    assert on_ray.connect(RayOptions(address=cluster.address))


def _stop_cluster() -> None:
    from raysim.runtime import ray as on_ray

    on_ray.disconnect()
    for cluster in _CLUSTERS:
        cluster.shutdown()


def _driver(environment: dict[str, str], folder: str) -> Iterator[Call]:
    """Start a Ray cluster of two nodes; yield a function that runs code in its driver.

    The yielded function has the arguments (function, *args) and returns function(*args).
    environment: environment variables of the second node only.
    folder: the driver's working folder.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", FOLDERS, prepend=os.pathsep)
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:

            def call(function: Call, *args: Any) -> Any:
                return pool.submit(function, *args).result(timeout=1800)

            try:
                call(_start_cluster, environment, folder)
                yield call
            finally:
                call(_stop_cluster)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Call]:
    """Start a Ray cluster of two nodes; yield a function that runs code in its driver.

    The yielded function has the arguments (function, *args) and returns function(*args). The second
    node uses other CPU kernels, and another copy of raysim.
    """
    own, empty = tmp_path_factory.mktemp("own"), tmp_path_factory.mktemp("empty")
    shutil.copytree(Path(raysim.__file__).parent, own / "raysim")
    with (own / "raysim/methods/fedprox.py").open("a") as file:
        file.write("# another copy\n")
    yield from _driver({**OTHER_KERNELS, "PYTHONPATH": f"{own}{os.pathsep}{FOLDERS}"}, str(empty))


def _run(words: list[str], out: str) -> str:
    """Run raysim; return the text of its RefusedError, or "" if it raises none.

    words: the overrides.
    out: the folder of the run.
    """
    try:
        raysim.run([*WORDS, *ON_BOTH, *words, f"out={out}"], quiet=True)
        return ""
    except raysim.RefusedError as error:
        return str(error)


def test_worker_with_other_hardware_is_refused_without_runtime_mixed(
    driver: Call, tmp_path: Path
) -> None:
    text = driver(_run, [], str(tmp_path / "refused"))
    refused = {name for name in ("worker-0", "worker-1") if f"{name} on " in text}
    assert text.startswith("runtime.mixed=false: ") and len(refused) == 1, (
        "the other one has the driver's environment"
    )
    for fact in ("CPU capability DEFAULT", "ONEDNN_MAX_CPU_ISA SSE41", "code of raysim"):
        assert fact in text
    assert not (tmp_path / "refused").exists()
    assert driver(_run, ["runtime.mixed=true"], str(tmp_path / "mixed")) == ""
    summary = json.loads((tmp_path / "mixed/summary.json").read_text())
    assert summary["same_bits_promised"] is False
    names = {name for group in summary["processes"] for name in group["names"]}
    assert names == {"driver", "coordinator", "worker-0", "worker-1"}
    other = {
        name
        for group in summary["processes"]
        if group["CPU capability"] == "DEFAULT"
        for name in group["names"]
    }
    assert len(other & {"worker-0", "worker-1"}) == 1 and "driver" not in other


def test_run_ends_if_a_new_worker_would_compute_other_bits(ray_session: None) -> None:
    import ray

    from raysim.runtime.ray.actors import RayRuntime, RayWorker, actor_class, identify_process

    spec = run_spec()
    environments = [{}, OTHER_KERNELS]
    started = []

    def start(index: int) -> Any:
        environment = environments[len(started)]
        options = {"runtime_env": {"env_vars": environment}} if environment else {}
        actor = (
            actor_class(RayWorker).options(num_cpus=0, **options).remote(spec, f"worker-{index}")
        )
        started.append(actor)
        return actor

    runtime = RayRuntime(1, start, participants=Participants(identify_process("driver")))
    runtime.meet_workers(600)
    assert [identity.name for identity in runtime.participants.all] == ["driver", "worker-0"]  # type: ignore[union-attr]
    with pytest.raises(
        RunStoppedError, match=r"worker 0 died.*runtime.mixed=false: .*CPU capability DEFAULT"
    ):
        runtime.revive(0)
    for actor in started:
        ray.kill(actor)
