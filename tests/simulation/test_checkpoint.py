"""Checkpoints appear complete or not at all, are verified, and a killed run goes on from them to the same bits."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_runs import BUFFER, FOLDERS, NORMED, Ran, coordinate, ran, run, run_spec, same

import raysim
from raysim.api.private_state import flat, from_named
from raysim.methods.fedbn import FedBN
from raysim.methods.fedbuff import FedBuff
from raysim.methods.scaffold import Scaffold
from raysim.simulation import checkpoint
from raysim.simulation.checkpoint import Snapshot
from raysim.simulation.coordinator import Round, Saved, Started

PACKAGE = Path(raysim.__file__).parent


def snapshot(value: float = 1.0) -> Snapshot:
    server = {"vector": np.full(5, value, np.float32), "state/a.b": np.array([[1, 2], [3, 4]])[:, ::-1]}
    clients = {"3/x.y": np.arange(4.0), "11/empty": np.empty((0, 2), np.float32)}
    return Snapshot(
        {"version": int(value), "now": 0.1 + 0.2, "turns": [[3, 1]], "row": {"loss": None}}, server, clients
    )


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_was_written_is_read_back_with_the_same_bits(tmp_path: Path) -> None:
    path = checkpoint.write(tmp_path, 7, snapshot())
    assert path == tmp_path / "round-000007"
    back = checkpoint.read(path)
    assert back.numbers == snapshot().numbers
    assert same(back.server, snapshot().server)
    assert same(back.clients, snapshot().clients)


def test_more_tensors_than_fit_into_a_file_go_into_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_MOST", 2)
    clients = {f"{client}/x.y": np.full((), client) for client in range(5)}
    path = checkpoint.write(tmp_path, 1, Snapshot({}, {}, clients))
    parts = ["clients-1.safetensors", "clients-2.safetensors", "clients.safetensors", "server.safetensors"]
    assert names(path) == [*parts[:3], "manifest.json", "run.json", parts[3]]
    assert same(checkpoint.read(path).clients, clients)
    assert checkpoint.read(path).server == {}
    (path / "clients-1.safetensors").unlink()
    assert checkpoint.damage(path)


def test_the_newest_two_are_kept(tmp_path: Path) -> None:
    for version in (2, 9, 10, 100):
        checkpoint.write(tmp_path, version, snapshot(version))
    assert names(tmp_path) == ["round-000010", "round-000100"]
    assert [path.name for path in checkpoint.available(tmp_path)] == ["round-000010", "round-000100"]
    assert checkpoint.available(tmp_path / "nowhere") == []


def test_rows_of_a_long_history_are_written_once_and_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_ROWS", 3)
    rows = [{"round": number, "loss": 1 / number} for number in range(1, 12)]
    shared: dict[str, str] = {}
    paths = {}
    for version in (2, 3, 7, 8, 11):
        paths[version] = checkpoint.write(tmp_path, version, Snapshot({"rows": rows[:version]}, {}, {}), shared)
        assert checkpoint.read(paths[version]).numbers["rows"] == rows[:version]
    assert len(json.loads((paths[11] / "run.json").read_text())["rows"]) == 2
    for name in ("rows-000000.json", "rows-000001.json"):
        assert (paths[11] / name).samefile(paths[8] / name)
    assert not (paths[8] / "rows-000002.json").exists()


def test_rows_are_written_anew_where_files_cannot_be_linked_and_where_they_are_not_this_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no links here")

    monkeypatch.setattr(checkpoint, "_ROWS", 2)
    shared: dict[str, str] = {}
    checkpoint.write(tmp_path, 5, Snapshot({"rows": [{"round": 9}] * 5}, {}, {}))  # of an earlier run
    rows = [{"round": number} for number in range(1, 8)]
    for version in (6, 7):
        path = checkpoint.write(tmp_path, version, Snapshot({"rows": rows[:version]}, {}, {}), shared)
        assert checkpoint.read(path).numbers["rows"] == rows[:version]
        monkeypatch.setattr(checkpoint.os, "link", refuse)


def test_damaged_rows_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_ROWS", 2)
    path = checkpoint.write(tmp_path, 4, Snapshot({"rows": [{"round": 1}, {"round": 2}]}, {}, {}))
    (path / "rows-000000.json").write_text("[]")
    with pytest.raises(ValueError, match=r"rows-000000\.json does not have the checksum"):
        checkpoint.read(path)


def test_a_run_with_a_long_history_goes_on_to_the_same_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_ROWS", 2)
    every: Any = {"checkpoint_every": 1}
    whole = ran(coordinate(run_spec(), folder=str(tmp_path / "whole"), rounds=6, **every))
    ran(coordinate(run_spec(), folder=str(tmp_path / "first"), rounds=5, **every))
    last = str(tmp_path / "first/checkpoints/round-000005")
    again = ran(coordinate(run_spec(), folder=str(tmp_path / "again"), resume=last, rounds=6, **every))
    assert [row["round"] for row in again.rows] == [1, 2, 3, 4, 5, 6]
    assert again.bits == whole.bits
    assert len(list((tmp_path / "again/checkpoints/round-000006").glob("rows-*.json"))) == 3


def test_rounds_are_counted_not_spelt(tmp_path: Path) -> None:
    for version in (999_998, 999_999, 1_000_000, 1_000_001):
        path = checkpoint.write(tmp_path, version, snapshot(version))
        assert path.is_dir(), "the one that was written last is never the oldest"
    assert [each.name for each in checkpoint.available(tmp_path)] == ["round-1000000", "round-1000001"]


def test_folders_of_ones_own_beside_checkpoints_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "round-best").mkdir()
    (tmp_path / "round-000000").write_text("a file")
    for version in (1, 2, 3):
        checkpoint.write(tmp_path, version, snapshot(version))
    assert names(tmp_path) == ["round-000000", "round-000002", "round-000003", "round-best"]


def test_files_have_the_mode_that_the_umask_gives(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        path = checkpoint.write(tmp_path, 1, snapshot())
    finally:
        os.umask(before)
    assert {file.name: oct(file.stat().st_mode & 0o777) for file in path.iterdir()} == dict.fromkeys(
        names(path), oct(0o640)
    )


def test_the_same_version_may_be_written_again(tmp_path: Path) -> None:
    checkpoint.write(tmp_path, 3, snapshot(1))
    path = checkpoint.write(tmp_path, 3, snapshot(2))
    assert checkpoint.read(path).numbers["version"] == 2


class Crash(Exception):
    """The machine stops here."""


def crash(*_: object, **__: object) -> None:
    raise Crash


@pytest.mark.parametrize("where", ["save_file", "_digest", "_sync"])
def test_a_write_that_is_cut_short_leaves_no_checkpoint_and_does_no_harm(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = checkpoint.write(tmp_path, 1, snapshot())
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, where, crash)
        with pytest.raises(Crash):
            checkpoint.write(tmp_path, 2, snapshot())
    assert checkpoint.available(tmp_path) == [good]
    assert not checkpoint.damage(good)
    checkpoint.write(tmp_path, 2, snapshot())
    assert names(tmp_path) == ["round-000001", "round-000002"], "nothing half-written is left"


def test_a_half_written_one_of_another_process_is_cleared_away(tmp_path: Path) -> None:
    (tmp_path / ".round-000001.99999").mkdir(parents=True)
    checkpoint.write(tmp_path, 2, snapshot())
    assert names(tmp_path) == ["round-000002"]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


@pytest.mark.parametrize("file", ["run.json", "server.safetensors", "clients.safetensors", "manifest.json"])
@pytest.mark.parametrize("harm", [flip, cut, Path.unlink], ids=["a changed bit", "a missing end", "a missing file"])
def test_a_damaged_checkpoint_is_refused_with_the_last_good_one(
    harm: Callable[[Path], None], file: str, tmp_path: Path
) -> None:
    good, bad = (checkpoint.write(tmp_path, version, snapshot()) for version in (4, 8))
    harm(bad / file)
    with pytest.raises(ValueError, match=f"checkpoint {bad} is damaged .*; resume={good} continues"):
        checkpoint.read(bad)
    assert not checkpoint.damage(good)


def test_a_damaged_checkpoint_without_another_says_so(tmp_path: Path) -> None:
    first, second = (checkpoint.write(tmp_path, version, snapshot()) for version in (4, 8))
    flip(first / "run.json")
    flip(second / "run.json")
    with pytest.raises(ValueError, match="no other checkpoint is left"):
        checkpoint.read(second)


def test_a_missing_checkpoint_is_refused_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"resume={tmp_path / 'nothing'}: no checkpoint there"):
        checkpoint.read(tmp_path / "nothing")


@pytest.mark.parametrize(
    "manifest",
    ["{}", "null", "[]", "3", '"run.json"', "[" * 100_000, '{"run.json": 3}', '{"../round-000004/run.json": "x"}'],
)
def test_a_manifest_that_does_not_name_the_files_is_damage(manifest: str, tmp_path: Path) -> None:
    good, bad = (checkpoint.write(tmp_path, version, snapshot()) for version in (4, 8))
    (bad / "manifest.json").write_text(manifest)
    with pytest.raises(ValueError, match=f"checkpoint {bad} is damaged .*; resume={good} continues"):
        checkpoint.read(bad)


def test_an_entry_cannot_leave_the_manifest_unnoticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_MOST", 1)
    path = checkpoint.write(tmp_path, 1, snapshot())
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["clients-1.safetensors"]
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert checkpoint.damage(path) == "manifest.json does not have its own checksum"


def test_a_checkpoint_of_before_manifests_had_a_checksum_of_their_own_is_read(tmp_path: Path) -> None:
    path = checkpoint.write(tmp_path, 1, snapshot())
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["manifest.json"]
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert same(checkpoint.read(path).clients, snapshot().clients)


@pytest.mark.parametrize("file", ["run.json", "manifest.json"])
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(file: str, tmp_path: Path) -> None:
    path = checkpoint.write(tmp_path, 1, snapshot())
    (path / file).unlink()
    os.mkfifo(path / file)
    assert f"{file} is no regular file" in checkpoint.damage(path)


def test_files_that_the_manifest_does_not_list_are_no_part_of_a_checkpoint(tmp_path: Path) -> None:
    path = checkpoint.write(tmp_path, 1, snapshot())
    assert set(json.loads((path / "manifest.json").read_text())) == {
        "run.json", "server.safetensors", "clients.safetensors", "manifest.json",
    }  # fmt: skip


# --- no pickle ----------------------------------------------------------------------------------------------------

UNSAFE = ("pickle.", "cloudpickle.", "dill.", "joblib.", "shelve.", "marshal.", "torch.load", "torch.save", "np.load",
          "np.save")  # fmt: skip
COMPARED = {"conformance/methods.py", "experiment/objects.py"}  # bytes in memory that are looked at and not kept
ERRORS = {"pickle.UnpicklingError", "pickle.PickleError"}  # catching one reads nothing


def unsafe(text: str) -> list[str]:
    """Names that read or write pickles; a reader that decides itself what a file may name is none of them."""
    found = []
    tree = ast.parse(text)
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    deciding = {id(base) for cls in classes if _decides(cls) for base in cls.bases}
    deciding |= {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call) and _refuses(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and id(node) not in deciding:
            found.append(f"{node.value.id}.{node.attr}")
        elif isinstance(node, ast.keyword) and node.arg in ("allow_pickle", "weights_only"):
            safe = isinstance(node.value, ast.Constant) and node.value.value is (node.arg == "weights_only")
            found += [] if safe else [f"pickle.{node.arg}"]
    return [name for name in found if name.startswith(UNSAFE) and name not in ERRORS]


def _refuses(call: ast.Call) -> bool:
    """Whether a call says that it reads arrays and no pickles."""
    return any(k.arg == "allow_pickle" and getattr(k.value, "value", None) is False for k in call.keywords)


def _decides(cls: ast.ClassDef) -> bool:
    return any(isinstance(part, ast.FunctionDef) and part.name == "find_class" for part in cls.body)


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_nothing_of_ours_pickles(path: Path) -> None:
    compared = {"pickle.dumps"} if path.relative_to(PACKAGE).as_posix() in COMPARED else set()
    assert not set(unsafe(path.read_text())) - compared


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
def test_the_search_for_pickles_finds_them(line: str) -> None:
    assert unsafe(line)


# --- going on -----------------------------------------------------------------------------------------------------


def test_resuming_begins_with_the_rows_that_exist_and_ends_without_gap_or_duplicate(tmp_path: Path) -> None:
    study = run_spec(Scaffold())
    straight = run(study, rounds=6, checkpoint_every=2, folder=str(tmp_path))
    assert names(tmp_path / "checkpoints") == ["round-000004", "round-000006"]
    events = list(coordinate(study, rounds=6, resume=str(tmp_path / "checkpoints" / "round-000004")).run())
    assert isinstance(events[0], Started)
    new = [event.row for event in events if isinstance(event, Round)]
    assert [row["round"] for row in events[0].rows] == [1, 2, 3, 4]
    assert [row["round"] for row in new] == [5, 6]
    assert events[0].rows == straight.rows[:4]
    walls = [row["wall_seconds"] for row in [*events[0].rows, *new]]
    assert walls == sorted(walls), "time already spent is not forgotten"  # type: ignore[type-var]


def test_a_finished_run_resumed_has_nothing_left_to_do(tmp_path: Path) -> None:
    straight = run(run_spec(FedBN(), model=NORMED), rounds=2, checkpoint_every=1, folder=str(tmp_path))
    resumed = run(run_spec(FedBN(), model=NORMED), rounds=2, resume=str(tmp_path / "checkpoints" / "round-000002"))
    assert resumed.bits == straight.bits
    assert resumed.rows == straight.rows


def test_a_run_may_be_resumed_from_a_resumed_run(tmp_path: Path) -> None:
    study, asked = run_spec(FedBN(), FedBuff(), model=NORMED), {"rounds": 8, "checkpoint_every": 2}
    straight = run(study, BUFFER, rounds=8)
    for stop in (2, 4, 6):
        folder, resume = tmp_path / str(stop), tmp_path / str(stop - 2) / "checkpoints" / f"round-{stop - 2:06d}"
        events = coordinate(study, BUFFER, **asked, folder=str(folder), resume=str(resume) if stop > 2 else "").run()
        folder.mkdir()
        next(event for event in events if isinstance(event, Saved) and event.version == stop)
        events.close()  # type: ignore[attr-defined]
    last = tmp_path / "6" / "checkpoints" / "round-000006"
    resumed = run(study, BUFFER, rounds=8, resume=str(last))
    assert (resumed.bits, resumed.history) == (straight.bits, straight.history)


def test_a_checkpoint_from_before_personal_tensors_had_names_resumes_to_the_same_bits(tmp_path: Path) -> None:
    study, asked = run_spec(FedBN(), Scaffold(), model=NORMED), {"rounds": 6, "checkpoint_every": 3}
    straight = run(study, **asked, folder=str(tmp_path))
    saved = checkpoint.read(tmp_path / "checkpoints" / "round-000003")
    layout = straight.coordinator.layout
    tensors: dict[str, dict[str, np.ndarray]] = {}
    for key, array in saved.clients.items():
        client, _, name = key.partition("/")
        tensors.setdefault(client, {})[name] = array
    old = {
        f"{client}/{key}": array
        for client, own in tensors.items()
        for key, array in flat(from_named(own, layout)).items()
    }
    assert {key.partition("/")[2] for key in old} == {"personal", "personal.counters", "scaffold.control"}
    older = checkpoint.write(tmp_path / "older", 3, Snapshot(saved.numbers, saved.server, old))
    assert run(study, rounds=6, resume=str(older)).bits == straight.bits


# --- killed -------------------------------------------------------------------------------------------------------

CHILD = """
import os, signal, sys
sys.path[:0] = {tests!r}.split(os.pathsep)
import {module} as here
here.killed({folder!r}, {where!r})
"""


def kill_me(*_: object, **__: object) -> None:
    """The operating system takes the process away."""
    os.kill(os.getpid(), signal.SIGKILL)


KILLED: dict[str, dict[str, Any]] = {
    "while a client trains": {"methods": [Scaffold()], "schedule": {"schedule": BUFFER}},
    "while a checkpoint is written": {"methods": [FedBN()], "schedule": {}},
}


def asked(where: str) -> tuple[Any, dict[str, Any]]:
    return run_spec(*KILLED[where]["methods"], model=NORMED), {"rounds": 7, **KILLED[where]["schedule"]}


def killed(folder: str, where: str) -> None:
    """Run in a process of its own; it does not survive."""
    from raysim.training.trainer import Trainer

    study, settings = asked(where)
    count = 0
    owner, name, last = (Trainer, "begin", 11) if where == "while a client trains" else (checkpoint, "save_file", 6)
    original = getattr(owner, name)

    def counted(*args: Any, **others: Any) -> Any:
        nonlocal count
        count += 1
        return kill_me() if count == last else original(*args, **others)

    setattr(owner, name, counted)
    run(study, **settings, checkpoint_every=1 if owner is checkpoint else 2, folder=folder)


@pytest.mark.slow
@pytest.mark.parametrize("where", KILLED)
def test_a_killed_run_resumes_to_the_bits_of_the_undisturbed_one(where: str, tmp_path: Path) -> None:
    text = CHILD.format(tests=FOLDERS, module=Path(__file__).stem, folder=str(tmp_path), where=where)
    paths = os.pathsep.join([str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")])
    child = subprocess.run([sys.executable, "-c", text], env=os.environ | {"PYTHONPATH": paths}, capture_output=True)
    assert child.returncode == -signal.SIGKILL, child.stderr.decode()
    left = checkpoint.available(tmp_path / "checkpoints")
    assert left
    assert not any(map(checkpoint.damage, left))
    version = checkpoint.read(left[-1]).numbers["version"]
    assert 0 < version < 7
    study, settings = asked(where)
    straight: Ran = run(study, **settings)
    resumed = run(study, **settings, resume=str(left[-1]))
    assert (resumed.bits, resumed.history) == (straight.bits, straight.history)


def test_the_saved_model_is_the_final_shared_model(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    found = ran(coordinate(run_spec(FedBN(), model=NORMED), rounds=2, folder=str(tmp_path)))
    saved = load_file(tmp_path / "model.safetensors")
    assert same(saved, found.tensors)
    assert "model.head.weight" in saved
    assert not any("running_mean" in name for name in saved), "personal entries are no part of it"
    (tmp_path / "other").touch()
    modes = [(tmp_path / name).stat().st_mode for name in ("model.safetensors", "other")]
    assert modes[0] == modes[1], "as the umask says"
    assert names(tmp_path) == ["model.safetensors", "other"]


def test_a_folder_is_made_with_those_above_it(tmp_path: Path) -> None:
    path = checkpoint.write(tmp_path / "runs" / "one", 1, snapshot())
    assert not checkpoint.damage(path)


def test_all_files_are_on_the_disk_before_the_checkpoint_has_its_name_and_its_name_before_the_write_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    final, synced = tmp_path / "round-000001", dict[bool, set[int]]()
    monkeypatch.setattr(os, "fsync", lambda file: synced.setdefault(final.exists(), set()).add(os.fstat(file).st_ino))
    checkpoint.write(tmp_path, 1, snapshot())
    draft, folder = {path.stat().st_ino for path in (*final.iterdir(), final)}, {tmp_path.stat().st_ino}
    assert synced == {False: draft, True: folder}
