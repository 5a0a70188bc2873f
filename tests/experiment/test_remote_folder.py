"""Test runs whose folder is behind a URL."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from ftp_server import serve_ftp

import raysim
from raysim import cli
from raysim.primitives.errors import RefusedError
from raysim.primitives.files import without_password
from raysim.primitives.stores import open_store
from raysim.simulation.events import RunStoppedError

OVERRIDES = (
    "runtime=inprocess tracking=none data=synthetic data.samples=100 partition=iid "
    "partition.clients=4 model=mlp model.widths=[4] schedule.cohort=2 method=scaffold "
    "evaluate.every=9 checkpoint.every=2"
)


@pytest.fixture(params=["memory", "file", "ftp"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Yield the URL of a folder that does not exist yet, for each protocol."""
    if request.param == "ftp":
        with serve_ftp(tmp_path / "served") as address:
            yield f"{address}/runs/first"
        return
    yield f"{request.param}://{tmp_path / 'runs' / 'first'}"
    with contextlib.suppress(FileNotFoundError):
        fsspec.filesystem("memory").rm("/", recursive=True)


def run(**settings: Any) -> dict[str, Any]:
    summary = raysim.run(OVERRIDES, quiet=True, **settings).summary
    return {key: summary[key] for key in ("rounds", "model_sha256", "state_sha256")}


def test_run_folder_at_a_url_is_written_and_continued(url: str, tmp_path: Path) -> None:
    straight = run(out=str(tmp_path / "straight"), rounds=6)
    run(out=url, rounds=4)
    with pytest.raises(RefusedError, match=r"^out="):
        run(out=url, rounds=4)
    assert run(out=url, rounds=6, resume="latest") == straight
    store = open_store(url)
    expected = {path.name for path in (tmp_path / "straight").iterdir()} - {".held"}
    assert {*store.names()} - {"writer"} == expected
    assert "round-000006" in store.names("checkpoints")
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("config.yaml", "summary.json", "history.parquet"):
        with store.local(name) as path:
            (copy / name).write_bytes(path.read_bytes())
    assert len(raysim.load(copy).rows) == 6


def test_load_and_report_read_results_directly_from_a_url(url: str, tmp_path: Path) -> None:
    straight = raysim.run(OVERRIDES, quiet=True, out=str(tmp_path / "straight"), rounds=4)
    run(out=url, rounds=4)
    result = raysim.load(url)
    assert f"{result}".startswith(f"Result({without_password(url)}: 4 rounds")
    assert result.history["accuracy"].equals(straight.history["accuracy"])
    for name, value in result.client_state(1).items():
        assert (value == straight.client_state(1)[name]).all()
    page = tmp_path / "page"
    table = raysim.report([url, tmp_path / "straight"])
    assert [run.summary["model_sha256"] for group in table.groups for run in group.runs] == [
        result.summary["model_sha256"]
    ] * 2
    assert f"{without_password(url)}/config.yaml" in table.write(page)[0].read_text()


def test_run_from_a_configuration_file_at_a_url_has_the_same_model(
    url: str, tmp_path: Path
) -> None:
    first = run(out=url, rounds=2)
    again = tmp_path / "again"
    words = ["run", "--quiet", "--config", f"{url}/config.yaml", f"out={again}"]
    assert cli.call(words) == 0
    assert raysim.load(again).summary["model_sha256"] == first["model_sha256"]


def test_run_continues_from_a_checkpoint_at_a_url(url: str) -> None:
    run(out=url, rounds=4)
    straight = run(out=url, rounds=6, resume="latest")
    other = f"{url}-again"
    again = run(out=other, rounds=6, resume=f"{url}/checkpoints/round-000004")
    assert again == straight


@pytest.mark.parametrize("checkpoints", [[], ["--checkpoints"]], ids=["results", "everything"])
def test_fetch_copies_the_files_of_a_url(
    url: str, checkpoints: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(out=url, rounds=2)
    monkeypatch.chdir(tmp_path)
    assert cli.call(["fetch", url, "here", *checkpoints]) == 0
    assert raysim.load("here").summary["rounds"] == 2
    assert Path("here/checkpoints").exists() == bool(checkpoints)


@pytest.mark.parametrize("words", ["report {}", "fetch {}", "run out={} resume=latest"])
def test_command_that_finds_no_run_at_a_url_prints_an_error_with_the_url(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.call(words.format("memory://nothing/here").split()) == 2
    assert "memory://nothing/here" in capsys.readouterr().err


def test_raysim_load_refuses_a_url_that_contains_no_run() -> None:
    with pytest.raises(RefusedError, match="memory://nothing/here"):
        raysim.load("memory://nothing/here")


def test_files_are_sent_to_the_url_at_each_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    url = "memory://runs/stopped"

    def stop(row: dict[str, Any]) -> None:
        if row["round"] == 5:
            assert "config.yaml" in open_store(url).names()
            raise KeyboardInterrupt

    with contextlib.suppress(raysim.Interrupted):
        raysim.run(OVERRIDES, quiet=True, out=url, rounds=6, on_round=stop)
    assert "round-000004" in open_store(f"{url}/checkpoints").names()
    fsspec.filesystem("memory").rm("/runs", recursive=True)


def test_error_of_a_failing_url_mentions_the_url_and_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(RefusedError, match="nothing://"):
        run(out="nothing://bucket/run", rounds=2)
    from raysim.experiment.remote_folder import FolderCopy

    def fail(self: FolderCopy) -> None:
        raise OSError("the bucket is full")

    monkeypatch.setattr(FolderCopy, "send", fail)
    with pytest.raises(RunStoppedError, match=r"^out=memory://runs/full: .*the bucket is full"):
        run(out="memory://runs/full", rounds=2)
    fsspec.filesystem("memory").rm("/runs", recursive=True)


@pytest.mark.parametrize("command", ["study", "sweep"])
def test_studies_and_sweeps_refuse_results_at_a_url(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = {"study": "seed=0,1", "sweep": "sweep=fedprox"}
    assert cli.call([command, words[command], "out=s3://a/b"]) == 2
    assert "out=s3://a/b" in capsys.readouterr().err
