"""Test that runs on several machines have the same bits as runs in one process."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from network_cluster import PORT, Link, NetworkCluster, find_obstacle, parse_link

import raysim
from raysim.primitives.stacks import RAY_MESSAGES, stack_file

pytestmark = pytest.mark.slow
LARGE_MLP = ("data=synthetic", "model=mlp", "model.widths=[700,700]", "evaluate.every=99")
BATCH_NORM = ("data=synthetic", "data.samples=400", "model=small_cnn", "model.norm=batch")
METHODS = "method=fedbn+scaffold"
OVERRIDES = [
    "partition=iid",
    "schedule.cohort=6",
    "tracking=none",
    "seed=3",
    "checkpoint.every=2",
]
ROUNDS = 40
DEADLINE_S = 500.0
NODE_ID = (
    "import ray; ray.init(address='auto', log_to_driver=False); "
    "print(ray.get_runtime_context().get_node_id())"
)


@pytest.fixture(scope="module")
def network() -> Iterator[NetworkCluster]:
    """Yield three machines for all tests of this file.

    At first, Ray runs on machines 0 and 1. The last test changes this, so the tests must run in the
    order of the file.
    """
    obstacle = find_obstacle()
    if obstacle:
        pytest.skip(obstacle)
    with NetworkCluster(3, has_job_server=False) as cluster:
        write_slow_method(cluster.shared)
        folders = [str(cluster.shared), cluster.environment.get("PYTHONPATH", "")]
        cluster.environment["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
        cluster.start_ray([1, 1])
        yield cluster


def checksums(summary: dict[str, Any]) -> tuple[str, str]:
    """Return the checksums of a run's model and state."""
    return summary["model_sha256"], summary["state_sha256"]


def expected(folder: Path, rounds: int, *words: str) -> tuple[str, str]:
    """Make a run with `runtime=inprocess`; return the checksums of its model and state.

    A run on the cluster must have the same checksums.
    folder: the parent folder of the run's folder.
    words: overrides, in addition to `OVERRIDES`.
    """
    words = (*OVERRIDES, *words, f"rounds={rounds}", "runtime=inprocess", f"out={folder / 'run'}")
    return checksums(raysim.run(words, quiet=True).summary)


def start_run(
    network: NetworkCluster, out: Path, rounds: int, *words: str
) -> subprocess.Popen[str]:
    command = ["raysim", "run", "runtime=cluster", f"out={out}", f"rounds={rounds}", *OVERRIDES]
    log = out.with_suffix(".log").open("w")
    return network.machines[0].popen([*command, *words], stdout=log, stderr=subprocess.STDOUT)


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
            time.sleep(2)
"""


def write_slow_method(folder: Path) -> None:
    """Write the package `slow`, a method whose jobs sleep for two seconds at their end.

    Jobs no longer sleep once the file `slow/fast` exists in the folder.
    folder: the folder in which the package is made.
    """
    (folder / "slow" / "conf" / "method").mkdir(parents=True)
    (folder / "slow" / "__init__.py").write_text(SLOW)
    (folder / "slow" / "conf" / "method" / "slow.yaml").write_text("slow: {_target_: slow.Slow}\n")


def checkpoints(out: Path) -> list[Path]:
    return list((out / "checkpoints").glob("*")) if out.exists() else []


def test_sum_of_updates_is_sent_only_once_over_a_slow_link(
    network: NetworkCluster, tmp_path: Path
) -> None:
    """Train over a slow link; each sum of updates is sent once, and the results stay the same.

    Sending a sum takes longer than the time between two checks for lost nodes. The coordinator's
    machine receives at most 30% more bytes than the history says.
    """
    head, far, _ = network.machines
    far.set_link(Link(rate=10))
    before = head.traffic.received
    out = network.shared / "sums"
    summary = finish(start_run(network, out, 4, "runtime.strategy=SPREAD", *LARGE_MLP), out)
    received = head.traffic.received - before
    assert received < 1.3 * sum(row["node_0_in_bytes"] for row in raysim.load(out).rows)
    assert checksums(summary) == expected(tmp_path, 4, *LARGE_MLP)
    addresses = json.dumps(summary["processes"])
    assert head.address in addresses and far.address in addresses
    far.set_link(Link())


def test_run_with_client_states_has_equal_bits_if_machines_change(
    network: NetworkCluster, tmp_path: Path
) -> None:
    """Change the machines of a run: machine 2 joins, machine 1 leaves, and machine 2 is killed.

    Before the kill, machine 2 has no network for four seconds. The kill loses its client states, so
    the run restarts from the last checkpoint.
    """
    head, leaving, late = network.machines
    out = network.shared / "changing"
    slow = (f"{METHODS}+slow", "--allow", "slow")
    run = start_run(network, out, ROUNDS, *BATCH_NORM, *slow)
    wait_for(lambda: checkpoints(out), run, out)
    late.start_ray(1)
    wait_for(lambda: "worker 2 joins on machine-2 (10.99.0.3)" in log_of(out), run, out)
    node = leaving.run("python", "-c", NODE_ID).split()[-1]
    drain = ["ray", "drain-node", f"--address={head.address}:{PORT}", "--node-id", node]
    drain += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot"]
    head.run(*drain, "--deadline-remaining-seconds", "600")
    wait_for(lambda: "worker 1 leaves: machine-1 (10.99.0.2)" in log_of(out), run, out)

    late.cut()
    time.sleep(4)
    earlier = checkpoints(out)
    late.join()
    wait_for(lambda: set(checkpoints(out)) - set(earlier), run, out)

    late.kill()
    wait_for(lambda: "The run restarts from its last checkpoint" in log_of(out), run, out)
    (network.shared / "slow" / "fast").touch()
    assert checksums(finish(run, out)) == expected(tmp_path, ROUNDS, METHODS, *BATCH_NORM)
    rows, expected_rows = (raysim.load(folder).rows for folder in (out, tmp_path / "run"))
    assert [row["train_loss"] for row in rows] == [row["train_loss"] for row in expected_rows]
    assert "(raylet)" not in log_of(out)
    assert "marked dead" in stack_file(out, RAY_MESSAGES).read_text()


def test_messages_over_a_slow_simulated_link_arrive_later() -> None:
    obstacle = find_obstacle()
    if obstacle:
        pytest.skip(obstacle)
    receive = "import socket; s = socket.create_server(('', 5000)); c, _ = s.accept(); c.send(b'1')"
    # Only the attempt that finds the server listening is measured.
    measure = """
import socket, time
while True:
    start = time.monotonic()
    try:
        connection = socket.create_connection(("machine-1", 5000))
        break
    except ConnectionRefusedError:
        time.sleep(0.1)
connection.recv(1)
print(time.monotonic() - start)
"""
    with NetworkCluster(2, {1: Link(delay=100)}) as slow:
        server = slow.machines[1].popen(["python", "-c", receive])
        assert float(slow.machines[0].run("python", "-c", measure)) > 0.4
        server.wait()


def test_network_link_is_parsed_from_a_command_line_argument() -> None:
    assert parse_link("2:rate=2,delay=100,loss=0.01") == (2, Link(2, 100, 0.01))
