"""A Ray that a run starts for itself can be reached from this machine alone, and ends with the run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from raysim.runtime.placement import CLUSTERS, RayOptions

PROGRAM = """
import os, re, sys
from pathlib import Path
from raysim.experiment.execute import run

def descendants(pid):
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            yield child
            yield from descendants(child)

def look(row):
    inodes = set()
    for pid in descendants(os.getpid()):
        print("runs", Path(f"/proc/{pid}/cmdline").read_text().replace("\\0", " "), flush=True)
    for pid in [str(os.getpid()), *descendants(os.getpid())]:
        for descriptor in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                inodes |= {*re.findall(r"socket:\\[(\\d+)", os.readlink(descriptor))}
            except OSError:
                pass
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            local, _, state, inode = (line.split()[place] for place in (1, 2, 3, 9))
            if state == "0A" and inode in inodes:
                print("listens", local.split(":")[0], flush=True)

run(["runtime=local", "runtime.hosts=1", "tracking=none", "data=synthetic", "rounds=1", "out=a"], on_round=look)
"""
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F"}  # 127.0.0.1 as the kernel writes it


@pytest.mark.slow
def test_no_process_of_a_local_run_listens_beyond_loopback(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != CLUSTERS}
    command = [sys.executable, "-c", PROGRAM]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr
    places = [line.split()[1] for line in ended.stdout.splitlines() if line.startswith("listens ")]
    assert len(places) > 3 and set(places) <= LOOPBACK
    assert "raylet" in ended.stdout and not {*re.findall(r"dashboard\.py|monitor\.py", ended.stdout)}


@pytest.mark.slow
@pytest.mark.parametrize("lacks", ["options", "server"])
def test_a_ray_of_other_insides_starts_as_it_would(lacks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._private import node, parameter

    from raysim.runtime.ray.cluster import _nothing_besides

    if lacks == "options":
        monkeypatch.setattr(parameter, "RayParams", lambda redirect_output=None: None)
    else:
        monkeypatch.delattr(node.Node, "start_api_server")
    before = parameter.RayParams, getattr(node.Node, "start_api_server", None)
    with _nothing_besides():
        assert (parameter.RayParams, getattr(node.Node, "start_api_server", None)) == before
    assert (parameter.RayParams, getattr(node.Node, "start_api_server", None)) == before


STOPPED = """
import os, signal
from pathlib import Path
from raysim.runtime import ray
from raysim.runtime.placement import RayOptions
from raysim.runtime.ray import cluster

ray.connect(RayOptions())
looks, wake = [], cluster._wake
cluster._wake = lambda: wake() if looks else looks.append("it is not stopped yet")
own = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
for pid in own:
    if Path(f"/proc/{pid}/comm").read_text().strip() == "raylet":
        os.kill(int(pid), signal.SIGSTOP)
        print("stopped", flush=True)
ray.disconnect()
print("down")
"""


@pytest.mark.slow
def test_a_raylet_that_was_stopped_keeps_nobody_from_leaving() -> None:
    ended = subprocess.run([sys.executable, "-c", STOPPED], capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0 and ended.stdout.split() == ["stopped", "down"], ended.stderr


def test_a_process_that_keeps_ray_to_this_machine_joins_no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    from raysim.runtime import ray

    monkeypatch.setattr(ray.ray, "is_initialized", lambda: False)
    monkeypatch.setenv(CLUSTERS, "0")
    with pytest.raises(ValueError, match=r"runtime.address=10.0.0.1:6379: .* start a new process"):
        ray.connect(RayOptions(address="10.0.0.1:6379"))
