"""Test that checkpoints are complete or absent and are verified, and that killed runs resume."""

from __future__ import annotations

import ast
import contextlib
import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_runs import (
    BUFFER,
    FOLDERS,
    NORMED,
    FinishedRun,
    coordinate,
    run,
    run_spec,
    run_to_end,
    same_arrays,
)

import raysim
from raysim.api.client_state import from_named_arrays
from raysim.api.messages import Arrays
from raysim.methods.fedbn import FedBN
from raysim.methods.fedbuff import FedBuff
from raysim.methods.scaffold import Scaffold
from raysim.primitives import stores
from raysim.primitives.stores import LocalStore
from raysim.primitives.version import __version__
from raysim.simulation import checkpoint, state_log
from raysim.simulation.checkpoint import Checkpoints, Snapshot
from raysim.simulation.events import Round, Saved, Started
from raysim.simulation.state_log import StatesByClient

PACKAGE = Path(raysim.__file__).parent


def snapshot(value: float = 1.0) -> Snapshot:
    server = {
        "vector": np.full(5, value, np.float32),
        "state/a.b": np.array([[1, 2], [3, 4]])[:, ::-1],
    }
    clients = {3: {"x.y": np.arange(4.0)}, 11: {"empty": np.empty((0, 2), np.float32)}}
    numbers = {"version": int(value), "now": 0.1 + 0.2, "turns": [[3, 1]], "row": {"loss": None}}
    return Snapshot(numbers, server, clients, {11: 8, 3: 9})


def write(folder: Path, version: int, now: Snapshot) -> Path:
    """Write a checkpoint with a new `Checkpoints` object, and return the path of the checkpoint."""
    return Path(Checkpoints(folder).write(version, now))


def same_states(one: Mapping[int, Arrays], other: Mapping[int, Arrays]) -> bool:
    return set(one) == set(other) and all(
        same_arrays(dict(one[client]), dict(other[client])) for client in one
    )


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def content(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_checkpoint_that_is_written_and_read_has_the_same_bits(tmp_path: Path) -> None:
    path = write(tmp_path, 7, snapshot())
    assert path == tmp_path / "round-000007"
    back = checkpoint.read(path)
    assert back.numbers == snapshot().numbers
    assert back.jobs == snapshot().jobs and list(back.jobs) == [11, 3], (
        "in the order in which they were accepted"
    )
    assert same_arrays(dict(back.server), dict(snapshot().server))
    assert same_states(back.clients, snapshot().clients)


def test_checkpoint_stores_many_client_states_in_several_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (checkpoint, state_log):
        monkeypatch.setattr(module, "MAX_TENSORS", 2)
    states = {client: {"x.y": np.full((), client)} for client in range(5)}
    path = write(tmp_path, 1, Snapshot({}, {}, states, {client: client for client in states}))
    assert names(path) == ["index.safetensors", "manifest.json", "run.json", "server.safetensors"]
    assert names(tmp_path / "log") == [
        f"states-0000000{number}.safetensors" for number in (1, 2, 3)
    ]
    assert same_states(checkpoint.read(path).clients, states)
    assert checkpoint.read(path).server == {}
    (tmp_path / "log/states-00000002.safetensors").unlink()
    assert "states-00000002.safetensors is not a regular file" in checkpoint.find_damage(path)


@pytest.mark.parametrize(("limit", "most"), [("MAX_TENSORS", 2), ("SERVER_FILE_BYTES", 16)])
def test_checkpoint_stores_many_server_tensors_in_several_files(
    limit: str, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, limit, most)
    server = {f"a.{number}": np.full(1, float(number)) for number in range(5)}
    path = write(tmp_path, 1, Snapshot({}, server, {}, {}))
    assert sum(name.startswith("server") for name in names(path)) == 3
    assert same_arrays(dict(checkpoint.read(path).server), server)


def test_number_of_stored_checkpoints_is_limited(tmp_path: Path) -> None:
    result = Checkpoints(tmp_path / "three", keep=3), Checkpoints(tmp_path / "two")
    for version in (2, 9, 10, 100):
        for each in result:
            each.write(version, snapshot(version))
    assert names(tmp_path / "three") == ["log", "round-000009", "round-000010", "round-000100"]
    assert [path.name for path in checkpoint.list_complete(tmp_path / "two")] == [
        "round-000010",
        "round-000100",
    ]
    assert (
        checkpoint.list_complete(tmp_path / "nowhere") == []
        and checkpoint.find_latest(tmp_path / "nowhere") == ""
    )


def test_later_checkpoints_do_not_write_earlier_history_rows_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "_ROWS", 3)
    rows = [{"round": number, "loss": 1 / number} for number in range(1, 12)]
    run = Checkpoints(tmp_path)
    before: dict[str, bytes] = {}
    for version in (2, 3, 7, 8, 11):
        path = run.write(version, Snapshot({"rows": rows[:version]}, {}, {}, {}))
        assert checkpoint.read(path).numbers["rows"] == rows[:version]
        now = content(tmp_path / "log")
        assert now.items() >= before.items() and len(now) == version // 3
        before = now
        if version == 3:  # as another process goes on
            run = Checkpoints(tmp_path, resume=path)
    assert len(json.loads(Path(path, "run.json").read_text())["rows"]) == 2


def test_checkpoint_with_damaged_history_rows_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "_ROWS", 2)
    path = write(tmp_path, 4, Snapshot({"rows": [{"round": 1}, {"round": 2}]}, {}, {}, {}))
    (tmp_path / "log/rows-00000001.json").write_text("[]")
    with pytest.raises(ValueError, match=r"rows-00000001\.json"):
        checkpoint.read(path)


def test_checkpoints_are_sorted_by_version_number_and_not_alphabetically(tmp_path: Path) -> None:
    for version in (999_998, 999_999, 1_000_000, 1_000_001):
        path = write(tmp_path, version, snapshot(version))
        assert path.is_dir(), "the one that was written last is never the oldest"
    assert [each.name for each in checkpoint.list_complete(tmp_path)] == [
        "round-1000000",
        "round-1000001",
    ]


def test_removal_of_old_checkpoints_deletes_only_checkpoint_folders(tmp_path: Path) -> None:
    (tmp_path / "round-best").mkdir()
    (tmp_path / "round-000000").write_text("a file")
    for version in (1, 2, 3):
        write(tmp_path, version, snapshot(version))
    assert names(tmp_path) == ["log", "round-000000", "round-000002", "round-000003", "round-best"]


def test_permissions_of_checkpoint_files_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write(tmp_path, 1, snapshot())
    finally:
        os.umask(before)
    assert {oct(file.stat().st_mode & 0o777) for file in tmp_path.rglob("*.*")} == {oct(0o640)}


# --- the log --------------------------------------------------------------------------------------


def states(clients: Iterable[int], job: int, size: int = 1000) -> Snapshot:
    """Return a snapshot of a run in which each client has a committed state of one array.

    The state of client k is from the job number `job` + k. All `size` entries of the array are this
    number.
    """
    jobs = {client: job + client for client in clients}
    tensors = {client: {"x": np.full(size, number, np.float32)} for client, number in jobs.items()}
    return Snapshot({"rows": []}, {}, tensors, jobs)


def after(before: Snapshot, *changed: int, job: int) -> Snapshot:
    """Return a later snapshot of the same run, in which some clients have new states.

    changed: the numbers of these clients.
    job: the new state of client k comes from the job with the number `job` + k.
    """
    new = states(changed, job)
    return replace(
        before, clients={**before.clients, **new.clients}, jobs={**before.jobs, **new.jobs}
    )


def log_inodes(folder: Path) -> dict[str, int]:
    """Return the inode number of each file in the folder `log`, by file name.

    A file that was rewritten gets another inode number, and a file that was only extended does not.
    """
    return {path.name: path.stat().st_ino for path in (folder / "log").iterdir()}


def test_checkpoint_writes_only_changed_client_states(tmp_path: Path) -> None:
    run, now = Checkpoints(tmp_path), states(range(100), job=1)
    read_clients: list[int] = []
    run.write(1, now)
    for version in range(2, 12):
        now = after(now, version, 50, job=1000 * version)
        before = log_inodes(tmp_path)
        seen = StatesByClient(
            now.clients, lambda client, now=now: read_clients.append(client) or now.clients[client]
        )  # type: ignore[func-returns-value,misc]
        path = run.write(version, replace(now, clients=seen))
        assert (
            set(read_clients)
            == {version, 50, *([] if version == 2 else [version - 1])} & set(read_clients)
            >= {version, 50}
        )
        new = {
            name: inode for name, inode in log_inodes(tmp_path).items() if before.get(name) != inode
        }
        assert (
            len(new) == 1
            and sum((tmp_path / "log" / name).stat().st_size for name in new) < 4 * 4096
        )
        back = checkpoint.read(path)
        assert back.jobs == now.jobs and same_states(back.clients, now.clients)
        read_clients.clear()
        if version == 6:  # as another process goes on
            run = Checkpoints(tmp_path, resume=path)


def test_size_of_the_client_state_log_is_bounded(
    tmp_path: Path,
) -> None:
    run, now, written = Checkpoints(tmp_path, keep=1), states(range(40), job=1), 0
    rng = np.random.default_rng(0)
    for version in range(1, 60):
        now = after(now, *rng.choice(40, 5, replace=False).tolist(), job=1000 * version)
        before = log_inodes(tmp_path) if version > 1 else {}
        path = run.write(version, now)
        sizes = {file.name: file.stat().st_size for file in (tmp_path / "log").iterdir()}
        written += sum(size for name, size in sizes.items() if name not in before)
        assert sum(sizes.values()) < 2.2 * 40 * 4000
    assert written < 2.2 * (40 + 5 * 59) * 4000, "at most about twice what changed"
    assert same_states(checkpoint.read(path).clients, now.clients)


def test_many_small_files_of_the_client_state_log_are_merged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_log, "MAX_SMALL_FILES", 8)
    run, now = Checkpoints(tmp_path), states([0], job=1)
    for version in range(1, 30):
        now = after(now, version, job=1)  # every client takes part once
        path = run.write(version, now)
        assert len(names(tmp_path / "log")) <= 8 + 2 + 8
    assert same_states(checkpoint.read(path).clients, now.clients)


def test_run_that_resumes_from_an_earlier_checkpoint_removes_later_checkpoints(
    tmp_path: Path,
) -> None:
    run = Checkpoints(tmp_path, keep=3)
    runs = {
        version: after(states(range(5), job=1), version % 5, job=100 * version)
        for version in (10, 20, 30)
    }
    paths = {version: run.write(version, now) for version, now in runs.items()}
    again = Checkpoints(tmp_path, resume=paths[10])
    assert again.write(10, snapshot()) == paths[10], "it is there already"
    assert checkpoint.read(paths[10]).jobs == runs[10].jobs
    now = after(runs[10], 4, job=999)
    again.write(11, now)
    assert names(tmp_path) == ["log", "round-000010", "round-000011"]
    assert checkpoint.find_latest(tmp_path) == f"{tmp_path}/round-000011"
    for path, whole in ((paths[10], runs[10]), (tmp_path / "round-000011", now)):
        assert same_states(checkpoint.read(path).clients, whole.clients)


def test_resume_uses_the_earlier_checkpoint_if_a_crash_damaged_the_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Checkpoints(tmp_path)
    paths = [run.write(version, snapshot(version)) for version in (1, 2)]
    again = Checkpoints(tmp_path, resume=paths[0])
    monkeypatch.setattr(checkpoint, "_write_json", crash)
    with pytest.raises(Crash):
        again.write(2, snapshot(3.0))
    assert checkpoint.find_latest(tmp_path) == paths[0]


def test_run_resumed_in_another_folder_copies_all_client_states(tmp_path: Path) -> None:
    first = Checkpoints(tmp_path / "a").write(1, states(range(5), job=1))
    before = content(tmp_path / "a")
    now = after(states(range(5), job=1), 2, job=50)
    path = Checkpoints(tmp_path / "b", resume=first).write(2, now)
    shutil.rmtree(tmp_path / "a" / "log")
    assert same_states(checkpoint.read(path).clients, now.clients)
    assert before and checkpoint.find_damage(first)


def test_checkpoint_stores_an_empty_client_state_and_omits_removed_states(tmp_path: Path) -> None:
    now = after(states(range(3), job=1), 5, job=9)
    now = replace(now, clients={**now.clients, 1: {}})
    run = Checkpoints(tmp_path)
    assert same_states(checkpoint.read(run.write(1, now)).clients, now.clients)
    fewer = states(range(2), job=1)
    assert same_states(checkpoint.read(run.write(2, fewer)).clients, fewer.clients)


def test_copied_checkpoint_is_readable_without_the_original(tmp_path: Path) -> None:
    run = Checkpoints(tmp_path / "a")
    run.write(1, states(range(5), job=1))
    now = after(states(range(5), job=1), 2, job=50)
    checkpoint.copy(run.write(2, now), tmp_path / "b")
    shutil.rmtree(tmp_path / "a")
    assert same_states(checkpoint.read(tmp_path / "b/round-000002").clients, now.clients)


class Crash(Exception):
    """An exception that stands for a crash of the machine."""


def crash(*_: object, **__: object) -> None:
    raise Crash


@pytest.mark.parametrize("where", ["save_file", "_digest", "_write_json", "_digest_of_manifest"])
def test_failed_write_of_a_checkpoint_leaves_no_file(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Checkpoints(tmp_path)
    good = run.write(1, snapshot())
    before = content(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, where, crash)
        with pytest.raises(Crash):
            run.write(2, replace(snapshot(), jobs={11: 8, 3: 12}))
    assert content(tmp_path) == before, (
        "nothing half-written is left, which may be what fills the disk"
    )
    assert not checkpoint.find_damage(good)
    run.write(2, snapshot())
    assert names(tmp_path) == ["log", "round-000001", "round-000002"]


def test_failed_removal_of_checkpoints_is_reported_and_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Checkpoints(tmp_path, keep=1)
    run.write(1, snapshot())
    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "remove", refuse_removal)
        assert run.write(2, snapshot()) == f"{tmp_path}/round-000002"
    assert run.removal_failure == "the folder is read-only"
    assert not checkpoint.find_damage(tmp_path / "round-000002")
    run.write(3, snapshot())
    assert not run.removal_failure
    assert names(tmp_path) == ["log", "round-000003"]


def refuse_removal(*_: object) -> None:
    raise PermissionError("the folder is read-only")


def test_next_checkpoint_removes_the_incomplete_files_of_a_killed_process(
    tmp_path: Path,
) -> None:
    (tmp_path / "round-000001").mkdir()
    (tmp_path / "log").mkdir()
    for name in (
        "round-000001/run.json",
        "round-000001/.server.safetensors.1f",
        "log/states-00000001.safetensors",
    ):
        (tmp_path / name).write_text("{")
    assert checkpoint.list_complete(tmp_path) == []
    path = write(tmp_path, 2, snapshot())
    assert names(tmp_path) == ["log", "round-000002"]
    assert not checkpoint.find_damage(path)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


FILES = [
    "run.json",
    "server.safetensors",
    "index.safetensors",
    "manifest.json",
    "../log/states-00000002.safetensors",
]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize(
    "harm", [flip, cut, Path.unlink], ids=["a changed bit", "a missing end", "a missing file"]
)
def test_error_of_a_damaged_checkpoint_suggests_a_valid_one(
    harm: Callable[[Path], None], file: str, tmp_path: Path
) -> None:
    run = Checkpoints(tmp_path)
    good, bad = (run.write(version, states(range(3), job=version * 10)) for version in (4, 8))
    harm(Path(bad, file))
    with pytest.raises(ValueError, match=f"{bad}.*") as error:
        checkpoint.read(bad)
    assert "\n" not in str(error.value)
    if (Path(bad) / "manifest.json").exists():  # else there is none
        assert f"resume={bad}: " in str(error.value)
        assert f"Set resume={good} " in str(error.value)
    assert not checkpoint.find_damage(good)


def test_error_says_that_no_checkpoint_is_valid_if_all_are_damaged(tmp_path: Path) -> None:
    first, second = (write(tmp_path, version, snapshot()) for version in (4, 8))
    flip(first / "run.json")
    flip(second / "run.json")
    with pytest.raises(ValueError, match=f"resume={second}: .* no other"):
        checkpoint.read(second)


def test_checkpoint_version_is_minus_1_if_the_folder_name_has_another_form() -> None:
    assert checkpoint.version_of("runs/a/checkpoints/round-000050") == 50
    for name in ("50", "round-", "round-5-old"):
        assert checkpoint.version_of(f"runs/a/checkpoints/{name}") == -1


def test_missing_checkpoint_is_refused_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"resume={tmp_path / 'nothing'}: "):
        checkpoint.read(tmp_path / "nothing")


@pytest.mark.parametrize(
    "manifest",
    [
        "{}",
        "null",
        "[]",
        "3",
        '"run.json"',
        "[" * 100_000,
        '{"run.json": 3}',
        '{"../round-000004/run.json": "x"}',
    ],
)
def test_checkpoint_with_an_incomplete_or_malformed_manifest_is_refused(
    manifest: str, tmp_path: Path
) -> None:
    good, bad = (write(tmp_path, version, snapshot()) for version in (4, 8))
    (bad / "manifest.json").write_text(manifest)
    with pytest.raises(ValueError, match=f"resume={bad}: .* Set resume={good} "):
        checkpoint.read(bad)


@pytest.mark.parametrize("entry", ["manifest.json", "log/states-00000001.safetensors"])
def test_checkpoint_whose_manifest_lacks_an_entry_is_damaged(entry: str, tmp_path: Path) -> None:
    path = write(tmp_path, 1, snapshot())
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest[entry]
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert (
        checkpoint.find_damage(path) == "manifest.json does not match the checksum that it contains"
    )


@pytest.mark.parametrize("file", ["run.json", "manifest.json"])
def test_damage_check_finds_a_named_pipe_in_place_of_a_checkpoint_file(
    file: str, tmp_path: Path
) -> None:
    path = write(tmp_path, 1, snapshot())
    (path / file).unlink()
    os.mkfifo(path / file)
    assert f"{file} is not a regular file" in checkpoint.find_damage(path)


def test_checkpoint_ignores_other_files_in_its_folder(tmp_path: Path) -> None:
    path = write(tmp_path, 1, snapshot())
    (path / "notes.txt").write_text("mine")
    assert not checkpoint.find_damage(path)


# --- no pickle ------------------------------------------------------------------------------------

UNSAFE = (
    "pickle.",
    "cloudpickle.",
    "dill.",
    "joblib.",
    "shelve.",
    "marshal.",
    "torch.load",
    "torch.save",
    "np.load",
    "np.save",
)
# Bytes in memory that are not kept, and a copy that is made as a message would be.
IN_MEMORY = {
    "conformance/methods.py": {"pickle.dumps"},
    "conformance/compressors.py": {"pickle.dumps", "pickle.loads"},
    "experiment/config_files.py": {"pickle.dumps", "pickle.loads"},
    "experiment/hydra_composition.py": {"pickle.dumps", "pickle.loads"},
    "experiment/objects.py": {"pickle.dumps"},
}
ERRORS = {"pickle.UnpicklingError", "pickle.PickleError"}  # catching one reads nothing


def pickle_functions(text: str) -> list[str]:
    """Find functions that read or write pickles; return their names.

    Functions that only check the classes in a pickle are left out.
    text: the Python source that is searched.
    """
    result = []
    tree = ast.parse(text)
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    deciding = {id(base) for cls in classes if _chooses_classes(cls) for base in cls.bases}
    deciding |= {
        id(node.func)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and _forbids_pickles(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            result += [f"{node.module}.{alias.name}" for alias in node.names]
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and id(node) not in deciding
        ):
            result.append(f"{node.value.id}.{node.attr}")
        elif isinstance(node, ast.keyword) and node.arg in ("allow_pickle", "weights_only"):
            safe = isinstance(node.value, ast.Constant) and node.value.value is (
                node.arg == "weights_only"
            )
            result += [] if safe else [f"pickle.{node.arg}"]
    return [name for name in result if name.startswith(UNSAFE) and name not in ERRORS]


def _forbids_pickles(call: ast.Call) -> bool:
    said = {word.arg: getattr(word.value, "value", None) for word in call.keywords}
    return said.get("allow_pickle") is False or said.get("weights_only") is True


def _chooses_classes(cls: ast.ClassDef) -> bool:
    return any(isinstance(part, ast.FunctionDef) and part.name == "find_class" for part in cls.body)


def test_raysim_does_not_pickle() -> None:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE).as_posix()
        names = set(pickle_functions(path.read_text())) - IN_MEMORY.get(name, set())
        if names:
            found[name] = names
    assert found == {}


@pytest.mark.parametrize(
    "line",
    [
        "pickle.loads(b'')",
        "from pickle import loads",
        "torch.load('x')",
        "f(weights_only=False)",
        "f(allow_pickle=True)",
        "np.load(path)",
        "np.load(path, allow_pickle=flag)",
    ],
)
def test_search_in_source_code_detects_lines_that_can_load_pickles(line: str) -> None:
    assert pickle_functions(line)


# --- going on -------------------------------------------------------------------------------------


def test_history_of_a_resumed_run_has_each_round_exactly_once(
    tmp_path: Path,
) -> None:
    study = run_spec(Scaffold())
    straight = run(study, rounds=6, checkpoint_every=2, folder=str(tmp_path))
    assert names(tmp_path / "checkpoints") == ["log", "round-000004", "round-000006"]
    events = list(
        coordinate(study, rounds=6, resume=str(tmp_path / "checkpoints" / "round-000004")).run()
    )
    assert isinstance(events[0], Started)
    new = [event.row for event in events if isinstance(event, Round)]
    assert [row["round"] for row in events[0].rows] == [1, 2, 3, 4]
    assert [row["round"] for row in new] == [5, 6]
    assert events[0].rows == straight.rows[:4]
    walls = [row["wall_seconds"] for row in [*events[0].rows, *new]]
    assert walls == sorted(walls), "time already spent is not forgotten"  # type: ignore[type-var]


def test_finished_run_does_nothing_when_resumed(tmp_path: Path) -> None:
    straight = run(
        run_spec(FedBN(), model=NORMED), rounds=2, checkpoint_every=1, folder=str(tmp_path)
    )
    resumed = run(
        run_spec(FedBN(), model=NORMED),
        rounds=2,
        resume=str(tmp_path / "checkpoints" / "round-000002"),
    )
    assert resumed.bits == straight.bits
    assert resumed.rows == straight.rows


def test_resumed_run_can_be_resumed_again(tmp_path: Path) -> None:
    study = run_spec(FedBN(), FedBuff(), model=NORMED)
    setup = {"rounds": 8, "checkpoint_every": 2}
    straight = run(study, BUFFER, rounds=8)
    for stop in (2, 4, 6):
        folder, resume = (
            tmp_path / str(stop),
            tmp_path / str(stop - 2) / "checkpoints" / f"round-{stop - 2:06d}",
        )
        events = coordinate(
            study, BUFFER, **setup, folder=str(folder), resume=str(resume) if stop > 2 else ""
        ).run()
        folder.mkdir()
        next(event for event in events if isinstance(event, Saved) and event.version == stop)
        events.close()  # type: ignore[attr-defined]
    last = tmp_path / "6" / "checkpoints" / "round-000006"
    resumed = run(study, BUFFER, rounds=8, resume=str(last))
    assert (resumed.bits, resumed.history) == (straight.bits, straight.history)


def test_checkpoint_in_the_format_of_an_old_raysim_release_is_refused(tmp_path: Path) -> None:
    path = Checkpoints(tmp_path).write(1, states(range(2), job=1))
    manifest = json.loads((Path(path) / "manifest.json").read_text())
    manifest["clients.safetensors"] = manifest.pop("index.safetensors")
    (Path(path) / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=rf"^resume=.*{re.escape(__version__)}"):
        checkpoint.read(path)


def test_client_state_without_tensor_names_is_refused() -> None:
    layout = run(run_spec(FedBN(), model=NORMED), rounds=1).coordinator.layout
    flats = {"personal": np.zeros(layout.total - layout.shared, np.float32)}
    with pytest.raises(ValueError, match=re.escape(__version__)):
        from_named_arrays(flats, layout)


def test_checkpoint_of_another_format_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, 1, replace(snapshot(), numbers={"format": 1}))
    with pytest.raises(ValueError, match=rf"^resume={re.escape(str(path))}: .* format 1"):
        checkpoint.read(path)


# --- killed ---------------------------------------------------------------------------------------


def test_kill_between_any_two_writes_changes_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "_ROWS", 2)
    study = run_spec(Scaffold())
    setup = {"rounds": 4, "checkpoint_every": 1}
    folder = tmp_path / "run"
    result: dict[frozenset[str], Path] = {}  # what a kill would leave, by the names of the files

    def killed_here() -> None:
        if len(checkpoint.list_complete(folder / "checkpoints")) > 1:
            left = frozenset(content(folder))
            result.setdefault(left, tmp_path / f"kill-{len(result)}")
            if not result[left].exists():
                shutil.copytree(folder, result[left])

    new, remove = LocalStore.new, LocalStore.remove

    @contextlib.contextmanager
    def watched(self: LocalStore, name: str) -> Iterator[Path]:
        with new(self, name) as draft:
            yield draft
            killed_here()
        killed_here()

    def watched_remove(self: LocalStore, name: str) -> None:
        remove(self, name)
        killed_here()

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "new", watched)
        patch.setattr(LocalStore, "remove", watched_remove)
        straight = run(study, **setup, folder=str(folder))
    assert len(result) > 15
    kept = names(folder / "checkpoints/log")
    for left in result.values():
        last = checkpoint.find_latest(left / "checkpoints")
        assert checkpoint.version_of(last) >= 2 and not checkpoint.find_damage(last)
        again = run(study, **setup, folder=str(left), resume=last)
        assert (again.bits, again.history) == (straight.bits, straight.history)
        assert names(left / "checkpoints") == ["log", "round-000003", "round-000004"]
        assert names(left / "checkpoints/log") == kept, "nothing is left of what was begun"


# A process that imports this module once, and forks a process for each run.
KILL_RUNS = """
import os, sys
sys.path[:0] = {tests!r}.split(os.pathsep)
import {module} as here
for where in here.KILLED:
    run = os.fork()
    if run == 0:
        os.chdir(where)
        here.run_until_killed(where)
    print(os.waitstatus_to_exitcode(os.waitpid(run, 0)[1]))
"""


def kill_me(*_: object, **__: object) -> None:
    """Kill this process."""
    os.kill(os.getpid(), signal.SIGKILL)


KILLED: dict[str, dict[str, Any]] = {
    "while a client trains": {"methods": [Scaffold()], "schedule": {"schedule": BUFFER}},
    "while a checkpoint is written": {"methods": [FedBN()], "schedule": {}},
}


def study_and_settings(where: str) -> tuple[Any, dict[str, Any]]:
    return run_spec(*KILLED[where]["methods"], model=NORMED), {
        "rounds": 7,
        **KILLED[where]["schedule"],
    }


def run_until_killed(where: str) -> None:
    """Start a run in the working directory, and kill this process in the middle of the run.

    where: the moment of the kill, a key of `KILLED`.
    """
    from raysim.training.trainer import Trainer

    study, settings = study_and_settings(where)
    count = 0
    owner, name, last = (
        (Trainer, "begin", 11) if where == "while a client trains" else (checkpoint, "save_file", 6)
    )
    original = getattr(owner, name)

    def counted(*args: Any, **others: Any) -> Any:
        nonlocal count
        count += 1
        return kill_me() if count == last else original(*args, **others)

    setattr(owner, name, counted)
    run(study, **settings, checkpoint_every=1 if owner is checkpoint else 2, folder=os.getcwd())


@pytest.fixture(scope="module")
def killed_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Start the runs `KILLED`, which are killed; return the parent folder of their folders."""
    parent = tmp_path_factory.mktemp("killed")
    for where in KILLED:
        (parent / where).mkdir()
    text = KILL_RUNS.format(tests=FOLDERS, module=Path(__file__).stem)
    paths = os.pathsep.join([str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths}
    words = [sys.executable, "-u", "-c", text]
    ended = subprocess.run(words, cwd=parent, env=environment, capture_output=True, text=True)
    assert ended.stdout.split() == [str(-signal.SIGKILL)] * len(KILLED), ended.stderr
    return parent


@pytest.mark.slow
@pytest.mark.parametrize("where", KILLED)
def test_killed_run_resumes_to_the_same_bits(where: str, killed_runs: Path) -> None:
    left = checkpoint.list_complete(killed_runs / where / "checkpoints")
    assert left
    assert not any(map(checkpoint.find_damage, left))
    version = checkpoint.read(left[-1]).numbers["version"]
    assert 0 < version < 7
    study, settings = study_and_settings(where)
    straight: FinishedRun = run(study, **settings)
    resumed = run(study, **settings, resume=str(left[-1]))
    assert (resumed.bits, resumed.history) == (straight.bits, straight.history)


def test_saved_model_is_the_final_shared_model(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    result = run_to_end(coordinate(run_spec(FedBN(), model=NORMED), rounds=2, folder=str(tmp_path)))
    saved = load_file(tmp_path / "model.safetensors")
    assert same_arrays(saved, result.tensors)
    assert "model.head.weight" in saved
    assert not any("running_mean" in name for name in saved), "personal entries are no part of it"
    (tmp_path / "other").touch()
    modes = [(tmp_path / name).stat().st_mode for name in ("model.safetensors", "other")]
    assert modes[0] == modes[1], "as the umask says"
    assert names(tmp_path) == ["best.safetensors", "model.safetensors", "other"]


def test_checkpoint_folder_is_made_with_its_parents(tmp_path: Path) -> None:
    path = write(tmp_path / "runs" / "one", 1, snapshot())
    assert not checkpoint.find_damage(path)


def test_manifest_of_a_checkpoint_is_written_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, synced = tmp_path / "round-000001/manifest.json", dict[bool, set[int]]()
    monkeypatch.setattr(
        os,
        "fsync",
        lambda file: synced.setdefault(manifest.exists(), set()).add(os.fstat(file).st_ino),
    )
    path = write(tmp_path, 1, snapshot())
    assert synced[False] >= {
        file.stat().st_ino for folder in (path, tmp_path / "log") for file in folder.iterdir()
    }
    assert synced[False] >= {folder.stat().st_ino for folder in (path, tmp_path / "log")}
    assert synced[True] == {folder.stat().st_ino for folder in (path, tmp_path)}


def test_checkpoint_flushes_files_then_folder_to_disk_before_it_writes_the_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, synced = tmp_path / "round-000001/manifest.json", list[int]()

    def record(file: int) -> None:
        if not manifest.exists():
            synced.append(os.fstat(file).st_ino)

    monkeypatch.setattr(os, "fsync", record)
    path = write(tmp_path, 1, snapshot())
    files = {file.stat().st_ino for file in path.iterdir() if file != manifest}
    after_files = synced[max(synced.index(file) for file in files) :]
    assert path.stat().st_ino in after_files


def test_manifest_of_an_old_checkpoint_is_removed_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed, remove = list[str](), LocalStore.remove

    def record(self: LocalStore, name: str) -> None:
        removed.append(name)
        remove(self, name)

    run = Checkpoints(tmp_path, keep=1)
    run.write(1, snapshot())
    monkeypatch.setattr(LocalStore, "remove", record)
    run.write(2, snapshot(2.0))
    first, second = (removed.index(f"round-000001{end}") for end in ("/manifest.json", ""))
    assert first < second


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "the disk is full"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "a quota or a limit of the file size is"),
        (RuntimeError("I/O error: File too large"), "a quota or a limit of the file size is"),
    ],
)
def test_error_of_a_full_disk_says_how_many_bytes_are_needed(
    error: Exception, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise error

    monkeypatch.setattr(checkpoint, "save_file", full)
    path = tmp_path / "model.safetensors"
    with pytest.raises(
        OSError, match=rf"{problem}.*: {path} needs 400 bytes, [0-9,]+ bytes are free"
    ):
        checkpoint.save_model({"weight": np.zeros(100, np.float32)}, path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("remote", [False, True])
def test_resumed_run_reuses_the_files_of_the_client_state_log(remote: bool, tmp_path: Path) -> None:
    where: Any = f"memory://{tmp_path.name}" if remote else tmp_path
    Checkpoints(where, 3).write(4, snapshot())
    there = stores.open_store(where)
    before = [name for name in there.names("log") if name.startswith("states")]
    Checkpoints(where, 3, f"{where}/round-000004").write(8, snapshot())
    assert before and [name for name in there.names("log") if name.startswith("states")] == before


def test_run_stops_if_another_process_writes_to_the_same_url(
    tmp_path: Path,
) -> None:
    where = f"memory://{tmp_path.name}-two"
    earlier, later = Checkpoints(where), Checkpoints(where)
    earlier.write(1, snapshot())
    path = later.write(2, snapshot(2.0))
    with pytest.raises(OSError, match=f"^process {os.getpid()} on .*{where}"):
        earlier.write(3, snapshot(3.0))
    assert checkpoint.find_latest(where) == path and not checkpoint.find_damage(path)
    later.write(3, snapshot(3.0))


def test_manifest_that_lists_files_outside_the_checkpoint_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, 1, snapshot())
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(dict(reversed(manifest.items()))))
    assert checkpoint.find_damage(path) == ""
    del manifest["manifest.json"]
    manifest["../secret.json"] = "0" * 64
    manifest["manifest.json"] = checkpoint._digest_of_manifest(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))
    damage = checkpoint.find_damage(path)
    assert "list of files in manifest.json" in damage and "outside" in damage
