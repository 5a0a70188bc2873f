"""Test output on streams whose encoding lacks some characters."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

import raysim
from raysim import cli
from raysim.primitives.output import HANDLER, ascii_equivalent, lossy_output
from raysim.results.progress import Progress, waiting_line

TINY = [
    "runtime=inprocess",
    "data=synthetic",
    "model=mlp",
    "rounds=2",
    "schedule.cohort=2",
    "partition.clients=3",
]
UNTRACKED = [*TINY, "tracking=none"]
ENCODINGS = ("ascii", "cp932")
RUN = Path("runs-of-all/first")


def strict(encoding: str) -> io.TextIOWrapper:
    """Return a stream that raises an error for characters that its encoding lacks."""
    return io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict", write_through=True)


def written(stream: io.TextIOWrapper) -> str:
    """Return the text that was written to a stream that the function `strict` returned."""
    assert isinstance(stream.buffer, io.BytesIO)
    return stream.buffer.getvalue().decode(stream.encoding)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoding") / "first"
    raysim.run([*UNTRACKED, f"out={folder}"], quiet=True)
    return folder


COMMANDS = [
    ["run", *UNTRACKED],
    ["run", "--show"],
    ["run", "-h"],
    ["study", *UNTRACKED, "method=fedavg,fedprox", "out=s"],
    ["methods"],
    ["methods", "fedbr"],
    ["methods", "--json"],
    ["partition", *UNTRACKED],
    ["new", "mine"],
    ["report", "RUN"],
    ["report", "RUN", "--csv"],
    ["report", "RUN", "--latex"],
    ["completion", "bash"],
    ["run", "out=ü", "nö=1"],
    ["wróng"],
    ["report", "\udcff"],
]
# One that writes a table, one that draws a bar, and two errors.
IN_CP932 = [["methods"], ["run", *UNTRACKED], ["wróng"], ["report", "\udcff"]]


@pytest.mark.parametrize(
    ("words", "encoding"),
    [
        *((words, "ascii") for words in COMMANDS),
        *((words, "cp932") for words in IN_CP932),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_command_succeeds_in_every_output_encoding(
    words: list[str],
    encoding: str,
    run_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    streams = strict(encoding), strict(encoding)
    monkeypatch.setattr(sys, "stdout", streams[0])
    monkeypatch.setattr(sys, "stderr", streams[1])
    try:
        status = cli.call([str(run_folder) if word == "RUN" else word for word in words])
    except SystemExit as ended:
        status = ended.code
    assert status == (2 if words[-1] in ("nö=1", "wróng", "\udcff") else 0), written(streams[1])
    assert "".join(map(written, streams))
    assert all(stream.errors == "strict" for stream in streams), "as they were"


def test_python_function_raysim_run_prints_only_ascii_to_an_ascii_console(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stream = strict("ascii")
    raysim.run([*UNTRACKED, f"out={tmp_path / 'run'}"], console=Console(file=stream, width=200))
    text = written(stream)
    assert "+/-" in text and "accuracy" in text and stream.errors == "strict"
    output = strict("ascii")
    monkeypatch.setattr(sys, "stdout", output)
    raysim.run([*UNTRACKED, f"out={tmp_path / 'other'}"])
    assert "+/-" in written(output)


@pytest.mark.parametrize("encoding", [*ENCODINGS, "utf-8"])
def test_terminal_shows_bars_and_spinners_in_any_encoding(encoding: str) -> None:
    stream = strict(encoding)
    console = Console(file=stream, force_terminal=True, width=100)
    with lossy_output(stream):
        with waiting_line(console) as show:
            show("waiting for Ray")
        with Progress(2, console=console) as progress:
            progress.update({"round": 1, "wall_seconds": 1.0, "accuracy": 0.5})
    assert "waiting for Ray" in written(stream) and "round 1/2" in written(stream)


def test_characters_that_an_encoding_lacks_are_replaced_by_readable_ones() -> None:
    text = "μ ± σ · café → 東"
    assert text.encode("ascii", HANDLER) == b"mu +/- sigma | cafe -> ?"
    assert "ー".encode("cp932", HANDLER) == "ー".encode("cp932"), "what an encoding has stays"
    assert [ascii_equivalent(character) for character in "━⠋\udcff"] == ["-", "*", "?"]


def test_function_lossy_output_accepts_stringio_objects_and_none_and_closed_streams() -> None:
    with lossy_output(io.StringIO(), None, closed := strict("ascii")):
        closed.close()
