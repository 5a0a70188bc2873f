"""Test that a local run's Ray cluster is reachable only from this machine and ends with the run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from raysim.runtime.placement import RAY_CLUSTERS_VARIABLE, RayOptions

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

words = ["runtime=local", "runtime.workers=1", "tracking=none", "data=synthetic", "rounds=1"]
run([*words, "out=a"], on_round=look)
"""
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F"}  # 127.0.0.1 as the kernel writes it


@pytest.mark.slow
def test_local_run_listens_on_loopback_only(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != RAY_CLUSTERS_VARIABLE}
    command = [sys.executable, "-c", PROGRAM]
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    assert ended.returncode == 0, ended.stderr
    places = [line.split()[1] for line in ended.stdout.splitlines() if line.startswith("listens ")]
    assert len(places) > 3 and set(places) <= LOOPBACK
    assert "raylet" in ended.stdout


def test_cluster_gets_an_authentication_token_if_the_user_has_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from raysim.runtime.ray import cluster

    joined: list[object] = []
    monkeypatch.setattr(cluster.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(cluster.ray, "init", lambda **options: joined.append(options["address"]))
    monkeypatch.setattr(cluster.signal, "signal", lambda *_: None)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, "")  # which are put back in the end
        monkeypatch.delenv(name)
    cluster.connect(RayOptions())
    token = os.environ["RAY_AUTH_TOKEN"]
    cluster.connect(RayOptions())
    assert (
        len(token) >= 32 and os.environ["RAY_AUTH_TOKEN"] == token and not list(tmp_path.iterdir())
    )
    del os.environ["RAY_AUTH_TOKEN"]
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray/auth_token").write_text("mine")
    cluster.connect(RayOptions())
    assert "RAY_AUTH_TOKEN" not in os.environ and joined == ["local"] * 3


def test_runtime_address_is_refused_if_ray_is_limited_to_loopback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from raysim.runtime import ray

    monkeypatch.setattr(ray.ray, "is_initialized", lambda: False)
    monkeypatch.setenv(RAY_CLUSTERS_VARIABLE, "0")
    with pytest.raises(ValueError, match=r"^runtime\.address=10\.0\.0\.1:6379: "):
        ray.connect(RayOptions(address="10.0.0.1:6379"))
