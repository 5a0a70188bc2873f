"""Stores of files in a local folder or behind a URL."""

from __future__ import annotations

from pathlib import Path

import pytest

from raysim.primitives.stores import Store, open_store, split_address


def put(there: Store, name: str, text: str) -> None:
    with there.new(name) as draft:
        draft.write_text(text)


@pytest.mark.parametrize(
    "where", ["{}", "file://{}", "memory:/{}"], ids=["folder", "file URL", "other URL"]
)
def test_store_holds_files(where: str, tmp_path: Path) -> None:
    there = open_store(where.format(tmp_path / "store"))
    assert there.names() == there.names("log") == []
    put(there, "log/a.json", "1")
    put(there, "b.json", "2")
    put(there, "b.json", "3")
    assert (there.names(), there.names("log")) == (["b.json", "log"], ["a.json"])
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
def test_unusable_url_error_has_no_password(url: str, why: str) -> None:
    with pytest.raises(ValueError, match=why) as error:
        open_store(url.replace("://", "://me:secret@"))
    assert "secret" not in str(error.value)


def test_split_address() -> None:
    assert split_address("s3://bucket/run/round-000010/") == ("s3://bucket/run", "round-000010")
    assert split_address(Path("a/b/round-000010")) == ("a/b", "round-000010")
    assert split_address("round-000010") == (".", "round-000010")
