"""Test runs on machines that a network joins: they have the same bits as runs in one process."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from network_cluster import PORT, Link, NetworkCluster, find_obstacle, parse_link

import raysim
from raysim.primitives.stacks import RAY_MESSAGES, stack_file

pytestmark = pytest.mark.slow
MLP = ("data=synthetic", "data.samples=400", "model=mlp", "model.widths=[32]")
BATCH_NORM = ("data=digits", "model=small_cnn", "model.norm=batch")
OVERRIDES = [
    "partition=iid",
    "schedule.cohort=6",
    "tracking=none",
    "seed=3",
    "checkpoint.every=5",
]
ROUNDS = 150
STATEFUL_ROUNDS = 40
DEADLINE_S = 500.0
NODE_ID = (
    "import ray; ray.init(address='auto', log_to_driver=False); "
    "print(ray.get_runtime_context().get_node_id())"
)

Expected: TypeAlias = Callable[..., str]


@pytest.fixture(scope="module")
def network() -> Iterator[NetworkCluster]:
    obstacle = find_obstacle()
    if obstacle:
        pytest.skip(obstacle)
    with NetworkCluster(3) as cluster:
        cluster.start_ray([1, 1, 1])
        yield cluster


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Expected:
    """Return a function that makes a run in this process and returns the sha256 of its model."""
    models: dict[tuple[object, ...], str] = {}

    def make(rounds: int, *words: str, study: Sequence[str] = MLP) -> str:
        key = (rounds, *words)
        if key not in models:
            folder = tmp_path_factory.mktemp("inprocess") / "run"
            values = {"rounds": rounds, "runtime": "inprocess", "out": str(folder)}
            result = raysim.run([*OVERRIDES, *study, *words], quiet=True, **values)
            models[key] = result.summary["model_sha256"]
        return models[key]

    return make


def start_run(
    network: NetworkCluster, out: Path, rounds: int, *words: str, study: Sequence[str] = MLP
) -> subprocess.Popen[str]:
    command = ["raysim", "run", "runtime=cluster", f"out={out}", f"rounds={rounds}", *OVERRIDES]
    command += [*study, *words]
    log = out.with_suffix(".log").open("w")
    return network.machines[0].popen(command, stdout=log, stderr=subprocess.STDOUT)


def wait_for(condition: Callable[[], Any], run: subprocess.Popen[str], out: Path) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert run.poll() is None and time.monotonic() < end, log_of(out)
        time.sleep(0.1)


def log_of(out: Path) -> str:
    return out.with_suffix(".log").read_text()


def finish(run: subprocess.Popen[str], out: Path) -> dict[str, Any]:
    assert run.wait(timeout=DEADLINE_S) == 0, log_of(out)
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return summary


SLOW = """
import time
from pathlib import Path

from raysim import Method


class Slow(Method):
    name = "slow"

    def end(self, job):
        if not Path(__file__).with_name("fast").exists():
            time.sleep(0.5)
"""


def write_slow_method(folder: Path) -> None:
    """Write a method whose jobs take longer, without using a core, until a file exists."""
    (folder / "slow" / "conf" / "method").mkdir(parents=True)
    (folder / "slow" / "__init__.py").write_text(SLOW)
    (folder / "slow" / "conf" / "method" / "slow.yaml").write_text("slow: {_target_: slow.Slow}\n")


def checkpoints(out: Path) -> list[Path]:
    return list((out / "checkpoints").glob("*")) if out.exists() else []


def test_three_machines_give_the_bits_of_one(network: NetworkCluster, expected: Expected) -> None:
    before = [machine.traffic for machine in network.machines]
    summary = finish(start_run(network, out := network.shared / "equal", 20), out)
    assert summary["model_sha256"] == expected(20)
    addresses = json.dumps(summary["processes"])
    assert all(machine.address in addresses for machine in network.machines)
    # A model of 2,400 parameters goes to each machine in each of 20 rounds.
    for machine, earlier in zip(network.machines[1:], before[1:], strict=True):
        assert machine.traffic.received - earlier.received > 20 * 4 * 2400


def test_network_partition_for_seconds_changes_no_bits(
    network: NetworkCluster, expected: Expected
) -> None:
    run = start_run(network, out := network.shared / "partition", ROUNDS)
    wait_for(lambda: checkpoints(out), run, out)
    network.machines[2].cut()
    time.sleep(4)
    assert run.poll() is None  # it needs the machine
    network.machines[2].join()
    assert finish(run, out)["model_sha256"] == expected(ROUNDS)


def test_lost_client_states_are_restored_with_the_same_bits(
    network: NetworkCluster, expected: Expected
) -> None:
    """A lost machine's client states, control variates and BatchNorm layers, are restored.

    This must be the last test of the file, because it kills a machine of the shared network.
    """
    method, size = "method=fedbn+scaffold", ["runtime.workers=3", "runtime.strategy=SPREAD"]
    out = network.shared / "states"
    run = start_run(network, out, STATEFUL_ROUNDS, method, *size, study=BATCH_NORM)
    wait_for(lambda: checkpoints(out), run, out)
    network.machines[2].kill()
    summary = finish(run, out)
    assert "The run restarts from its last checkpoint" in log_of(out)
    assert summary["model_sha256"] == expected(STATEFUL_ROUNDS, method, study=BATCH_NORM)
    assert "(raylet)" not in log_of(out)
    assert "marked dead" in stack_file(out, RAY_MESSAGES).read_text()


def test_late_node_joins_and_drained_node_leaves(expected: Expected) -> None:
    obstacle = find_obstacle()
    if obstacle:
        pytest.skip(obstacle)
    with NetworkCluster(3) as network:
        head, leaving, late = network.machines
        write_slow_method(network.shared)
        network.environment["PYTHONPATH"] = str(network.shared)
        network.start_ray([1, 1])
        out = network.shared / "late"
        run = start_run(network, out, ROUNDS, "method=slow", "--allow", "slow")
        wait_for(lambda: checkpoints(out), run, out)
        late.start_ray(1)
        wait_for(lambda: "worker 2 joins on machine-2 (10.99.0.3)" in log_of(out), run, out)
        node = leaving.run("python", "-c", NODE_ID).split()[-1]
        drain = ["ray", "drain-node", f"--address={head.address}:{PORT}", "--node-id", node]
        drain += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot"]
        head.run(*drain, "--deadline-remaining-seconds", "600")
        wait_for(lambda: "worker 1 leaves: machine-1 (10.99.0.2)" in log_of(out), run, out)
        (network.shared / "slow" / "fast").touch()
        assert finish(run, out)["model_sha256"] == expected(ROUNDS)


def test_sum_crosses_a_slow_link_once() -> None:
    """A sum of updates crosses a slow link only once.

    It takes more than three seconds on the link. Meanwhile raysim looks for lost nodes every
    second, and must not fetch the sum again. So the coordinator's machine receives at most 30% more
    bytes than the history says.
    """
    obstacle = find_obstacle()
    if obstacle:
        pytest.skip(obstacle)
    with NetworkCluster(2) as network:
        network.start_ray([1, 1])
        head, late = network.machines
        late.set_link(Link(rate=10))
        before = head.traffic.received
        study = ["data=synthetic", "model=mlp", "model.widths=[700,700]", "evaluate.every=99"]
        out = network.shared / "slow"
        finish(start_run(network, out, 4, "runtime.strategy=SPREAD", study=study), out)
        received = head.traffic.received - before
        assert received < 1.3 * sum(row["node_0_in_bytes"] for row in raysim.load(out).rows)


def test_simulated_link_delays_messages() -> None:
    obstacle = find_obstacle()
    if obstacle:
        pytest.skip(obstacle)
    receive = "import socket; s = socket.create_server(('', 5000)); c, _ = s.accept(); c.send(b'1')"
    measure = (
        "import socket, time; t = time.monotonic(); s = socket.create_connection(('{}', 5000)); "
        "s.recv(1); print(time.monotonic() - t)"
    )
    with NetworkCluster(2, {1: Link(delay=100)}) as slow:
        server = slow.machines[1].popen(["python", "-c", receive])
        time.sleep(1)
        assert float(slow.machines[0].run("python", "-c", measure.format("machine-1"))) > 0.4
        server.wait()


def test_command_line_argument_of_a_link_is_parsed() -> None:
    assert parse_link("2:rate=2,delay=100,loss=0.01") == (2, Link(2, 100, 0.01))
