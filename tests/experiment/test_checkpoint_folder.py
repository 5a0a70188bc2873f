"""Test checkpoints that are not in the run's folder but in another folder or behind a URL."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

import raysim
from raysim.commands.study.plan import plan
from raysim.primitives.errors import RefusedError
from raysim.primitives.files import lock_folder
from raysim.primitives.stores import open_store
from raysim.simulation import checkpoint

WORDS = (
    "runtime=inprocess tracking=none data=synthetic data.samples=100 partition=iid "
    "partition.clients=4 model=mlp "
    "model.widths=[4] schedule.cohort=2 local.epochs=1 method=scaffold "
    "evaluate.every=9 state.budget=0"
)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    with contextlib.suppress(FileNotFoundError):
        fsspec.filesystem("memory").rm("/runs", recursive=True)


def run(where: str | None = None, **settings: Any) -> dict[str, Any]:
    found = raysim.run(
        WORDS, quiet=True, checkpoint={"every": 2, "folder": where}, **settings
    ).summary
    return {key: found[key] for key in ("rounds", "model_sha256", "state_sha256")}


@pytest.mark.parametrize("where", ["memory://runs/a", "apart"])
def test_run_continues_from_its_checkpoint_folder_without_its_run_folder(where: str) -> None:
    straight = run(out="straight", rounds=6)
    run(where, out="a", rounds=4)
    assert not Path("a/checkpoints").exists()
    mark = ".held" if where == "apart" else "writer"
    assert {*open_store(where).names()} == {
        "config.yaml",
        "log",
        "round-000002",
        "round-000004",
        mark,
    }
    shutil.rmtree("a")  # the machine it was on
    address = {"resume": f"{where}/round-000004"} if where == "apart" else {"resume": "latest"}
    assert run(where, out="b", rounds=6, **address) == straight
    assert checkpoint.version_of(checkpoint.find_latest(where)) == 6
    assert raysim.load("b").client_model(0) is not None


def test_checkpoint_folder_may_change_on_resume() -> None:
    run(out="a", rounds=2)
    run("memory://runs/a", out="a", rounds=4, resume="latest")
    assert checkpoint.version_of(checkpoint.find_latest("memory://runs/a")) == 4
    assert [row["round"] for row in raysim.load("a").rows] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("where", "place"),
    [("/dev/null", "/dev/null"), ("letter/a", "letter"), ("file://letter", "letter")],
)
def test_impossible_checkpoint_folder_is_refused_before_the_run(where: str, place: str) -> None:
    Path("letter").touch()
    with pytest.raises(RefusedError, match=rf"^checkpoint.folder=.*{place} is a file"):
        run(where, out="a", rounds=2)
    assert not Path("a").exists()
    with pytest.raises(RefusedError, match=r"^out=letter/a .*letter is a file"):
        run(out="letter/a", rounds=2)


def test_checkpoint_folder_of_another_run_is_refused() -> None:
    run(where := "memory://runs/a", out="a", rounds=2)
    before = open_store(where).names()
    with pytest.raises(RefusedError, match=f"^checkpoint.folder={where}"):
        run(where, out="b")
    with pytest.raises(RefusedError, match=r"^local.lr=0.5 .*memory://runs/a"):
        run(where, out="b", resume="latest", local={"lr": 0.5})
    assert open_store(where).names() == before and not Path("b").exists()


def test_existing_output_folder_is_refused_if_the_checkpoint_is_from_another_folder() -> None:
    run(out="a", rounds=2)
    run("apart", out="b", rounds=2)
    for address, action in (
        ("a/checkpoints/round-000002", r"remove out=\.\.\. to continue the run in .*a\.$"),
        ("apart/round-000002", r"Set out to a new folder\.$"),
    ):
        Path("c").mkdir(exist_ok=True)
        match = rf"^out=.*c exists already, but resume=.*{address} .*{action}"
        with pytest.raises(RefusedError, match=match):
            run(out="c", rounds=4, resume=address)
        assert list(Path("c").iterdir()) == []


def test_checkpoint_folder_in_use_is_refused() -> None:
    Path("apart").mkdir()
    with (
        lock_folder(Path("apart")),
        pytest.raises(RefusedError, match=r"apart is in use by process \d+ on "),
    ):
        run("apart", out="a", rounds=2)
    assert not Path("a").exists()


@pytest.mark.parametrize("where", ["nosuch://runs/a", "s3://bucket/a"])
def test_checkpoint_folder_at_unreachable_url_is_refused(where: str) -> None:
    with pytest.raises(RefusedError, match=f"{where} cannot be used"):
        run(where, out="a")
    assert not Path("a").exists()


def test_damaged_remote_checkpoint_is_refused() -> None:
    run(where := "memory://runs/a", out="a", rounds=4)
    files = fsspec.filesystem("memory")
    name = max(files.ls("/runs/a/log", detail=False))
    files.pipe_file(name, files.cat_file(name)[:-1] + b"x")
    with pytest.raises(
        RefusedError,
        match=r"resume=memory://runs/a/round-000004: .*\(log/states-",
    ):
        run(where, out="a", rounds=6, resume="latest")


def test_runs_of_a_study_get_checkpoint_folders_but_a_sweep_refuses_them() -> None:
    words = ["checkpoint.folder=memory://runs/a", *WORDS.split()]
    with pytest.raises(RefusedError, match=r"checkpoint\.folder is for one run"):
        raysim.sweep([*words, "local.lr=0.1,0.2"], quiet=True)
    runs = plan([*words, "seed=0,1"]).runs
    assert [run.config["checkpoint"]["folder"] for run in runs] == [
        f"memory://runs/a/{run.name}" for run in runs
    ]
