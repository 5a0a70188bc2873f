"""Test how raysim finds nodes that do not answer, without starting Ray."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from raysim.runtime.ray import node_watch
from raysim.runtime.ray.node_watch import (
    PREFACE,
    ClusterState,
    NodeWatch,
    avoid_silent_nodes,
    is_answering,
    probe,
)


def entry(port: int, name: str = "node", alive: bool = True) -> dict[str, Any]:
    address = {"NodeManagerAddress": "127.0.0.1", "NodeManagerPort": port}
    return {"NodeID": name, "Alive": alive, "Resources": {"CPU": 2.0}, **address}


@pytest.fixture
def server() -> Iterator[socket.socket]:
    """Yield a socket that accepts connections and never answers, like a stopped process."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def port_of(server: socket.socket) -> int:
    return int(server.getsockname()[1])


def test_open_port_that_does_not_answer_counts_as_a_silent_node(server: socket.socket) -> None:
    assert not is_answering(entry(port_of(server)), timeout_s=0.2)

    def answer() -> None:
        connection, _ = server.accept()  # that of the probe before
        connection, _ = server.accept()
        assert connection.recv(100) == PREFACE
        connection.send(b"\0")

    thread = threading.Thread(target=answer)
    thread.start()
    assert probe([entry(port_of(server))], timeout_s=5.0) == [True]
    thread.join()


def test_node_with_a_closed_port_counts_as_not_answering(server: socket.socket) -> None:
    port = port_of(server)
    server.close()
    assert probe([entry(port)], timeout_s=5.0) == [False]
    assert probe([]) == []


def watch(monkeypatch: pytest.MonkeyPatch, *nodes: dict[str, Any], draining: set[str]) -> NodeWatch:
    """Return a watch on the nodes of a Ray cluster, without its thread.

    The watch's clock always shows 0.
    nodes: what `ray.nodes()` returns, an entry for each node.
    draining: the ids of the nodes that Ray is shutting down.
    """
    clock = SimpleNamespace(monotonic=lambda: 0.0)
    monkeypatch.setattr(node_watch, "time", clock)
    monkeypatch.setattr(node_watch.ray, "nodes", lambda: nodes)
    state = ClusterState(draining, {"good": {"CPU": 1.0}})
    monkeypatch.setattr(node_watch, "cluster_state", lambda address: state)
    monkeypatch.setattr(NodeWatch, "_watch", lambda self: None)
    context = SimpleNamespace(get_node_id=lambda: "own")
    monkeypatch.setattr(node_watch.ray, "get_runtime_context", lambda: context)
    return NodeWatch(9.0)


def test_node_watch_finds_nodes_that_are_lost_silent_or_leaving(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dead = entry(1, "dead", alive=False)
    nodes = [dead, entry(1, "silent"), entry(2, "leaving"), entry(3, "good"), entry(1, "own")]
    watched = watch(monkeypatch, *nodes, draining={"leaving"})
    monkeypatch.setattr(
        node_watch, "probe", lambda nodes: [node["NodeManagerPort"] > 1 for node in nodes]
    )
    watched._look("")
    assert {name: node.is_reachable for name, node in watched.lost.items()} == {
        "dead": False,
        "leaving": True,
    }
    assert watched.is_silent("silent") and not watched.is_silent("good")
    assert [node["NodeID"] for node in watched.usable_nodes()] == ["good", "own"]
    assert watched.free_resources("good") == {"CPU": 1.0} and not watched.free_resources("own")
    watched._look("")
    assert "silent" not in watched.lost, "6 s of 9 s"
    watched._look("")
    assert "faults.node_timeout" in watched.lost["silent"].reason
    assert "own" not in watched.lost, "this process is there"
    monkeypatch.setattr(node_watch, "probe", lambda nodes: [True] * len(nodes))
    watched._look("")
    assert "silent" not in watched.lost and len(watched.usable_nodes()) == 3


def test_new_workers_are_not_started_on_silent_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [entry(1, "far"), entry(2, "here"), entry(3, "gone", alive=False), entry(1, "away")]
    monkeypatch.setattr(node_watch.ray, "nodes", lambda: nodes)
    context = SimpleNamespace(get_node_id=lambda: "here")
    monkeypatch.setattr(node_watch.ray, "get_runtime_context", lambda: context)
    answers = {"far": True, "away": False}
    monkeypatch.setattr(
        node_watch, "probe", lambda nodes: [answers[node["NodeID"]] for node in nodes]
    )
    assert [node["NodeID"] for node in node_watch.living_nodes()] == ["here", "far"]
    assert avoid_silent_nodes(2) == [{"ray.io/node-id": "!in(away)"}] * 2
    answers["away"] = True
    assert avoid_silent_nodes(2) is None
