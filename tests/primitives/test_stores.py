"""Test stores of files in a local folder or behind a URL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from ftp_server import serve_ftp

from raysim.primitives.stores import Store, open_store, split_address
from raysim.simulation import checkpoint
from raysim.simulation.checkpoint import Checkpoints, Snapshot


def put(there: Store, name: str, text: str) -> None:
    with there.new(name) as draft:
        draft.write_text(text)


@pytest.fixture
def ftp(tmp_path: Path) -> Iterator[str]:
    with serve_ftp(tmp_path / "served") as url:
        yield f"{url}/runs/a"


@pytest.fixture(params=["{}", "file://{}", "memory:/{}", "ftp"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the path or URL of a folder that does not exist yet, for each kind of store."""
    if request.param == "ftp":
        return str(request.getfixturevalue("ftp"))
    return str(request.param.format(tmp_path / "store"))


def test_files_of_a_store_are_written_listed_and_read(address: str) -> None:
    there = open_store(address)
    assert there.names() == there.names("log") == []
    put(there, "log/a.json", "1")
    put(there, "b.json", "2")
    put(there, "b.json", "3")
    assert (there.names(), there.names("log")) == (["b.json", "log"], ["a.json"])
    assert there.files() == ["b.json", "log/a.json"]
    with there.local("b.json") as path:
        assert path.read_text() == "3"
    with pytest.raises(RuntimeError), there.new("b.json") as draft:
        draft.write_text("half")
        raise RuntimeError
    assert there.names() == ["b.json", "log"]
    with there.local("b.json") as path:
        assert path.read_text() == "3", "what was there before"
    there.settle("log", "", "nowhere")
    for name in ("log", "b.json", "nothing"):
        there.remove(name)
    assert there.names() == []
    with pytest.raises((OSError, ValueError), match=r"b\.json"), there.local("b.json"):
        pass


@pytest.mark.parametrize(
    ("url", "why"),
    [("nosuch://bucket/run", "Protocol not known"), ("s3://bucket/run", "s3fs")],
)
def test_error_of_an_unusable_url_contains_no_password(url: str, why: str) -> None:
    with pytest.raises(ValueError, match=why) as error:
        open_store(url.replace("://", "://me:secret@"))
    assert "secret" not in str(error.value)


def test_address_is_split_into_its_folder_and_its_last_part() -> None:
    assert split_address("s3://bucket/run/round-000010/") == ("s3://bucket/run", "round-000010")
    assert split_address(Path("a/b/round-000010")) == ("a/b", "round-000010")
    assert split_address("round-000010") == (".", "round-000010")


def test_store_keeps_only_the_newest_checkpoints(address: str) -> None:
    checkpoints = Checkpoints(address, keep=2)
    for version in range(1, 5):
        checkpoints.write(version, Snapshot({}, {}, {}, {}))
    kept = [name for name in open_store(address).names() if name.startswith("round-")]
    assert kept == ["round-000003", "round-000004"]
    assert checkpoint.find_latest(address) == f"{address}/round-000004"
    assert not checkpoints.removal_failure
