"""Test the removal of secrets from texts, locks of files, and errors for wrong paths."""

from __future__ import annotations

from pathlib import Path

import pytest

from raysim.primitives import files
from raysim.primitives.errors import RefusedError
from raysim.primitives.files import user_path, without_password


@pytest.mark.parametrize(
    ("text", "bare"),
    [
        ("http://me:s3cret@host:5000", "http://host:5000"),
        ("http://me:s3'cret@worker", "http://worker"),
        ("http://me:s3/cret@worker/a", "http://worker/a"),
        (
            "postgresql://me:s@3:cret@worker/db?sslmode=require",
            "postgresql://worker/db?sslmode=require",
        ),
        ("http://s3cret@worker", "http://worker"),
        (
            "memory://worker/y?api_key=s3cret&x=1&secret=s3cret",
            "memory://worker/y?api_key=&x=1&secret=",
        ),
        (
            "http://worker?access_token=s3cret&Password=s3cret",
            "http://worker?access_token=&Password=",
        ),
        ("mssql://worker;UID=a;PWD=s3cret;x=1", "mssql://worker;UID=a;PWD=;x=1"),
        (
            "pg://worker/db?sslpassword=s3cret'x&X-Amz-Signature=s3cret",
            "pg://worker/db?sslpassword=&X-Amz-Signature=",
        ),
    ],
)
def test_secrets_are_removed_from_texts(text: str, bare: str) -> None:
    assert without_password(text) == bare
    assert without_password(f"uri: {text} and more") == f"uri: {bare} and more"


@pytest.mark.parametrize(
    "text",
    [
        "http://host:5000/runs/a@b",
        "s3://bucket/runs@1/a?versionId=3",
        "sqlite:///home/me/runs/mlflow.db",
        "a key=3 and token=4",
        "mail a@b.c",
    ],
)
def test_text_without_a_password_does_not_change_if_passwords_are_removed(text: str) -> None:
    assert without_password(text) == text


def test_short_wait_for_a_lock_is_not_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(files, "SILENT_WAIT_S", 1e9)
    monkeypatch.setattr(files, "_owner", lambda handle: pytest.fail("it is spoken of"))
    with (tmp_path / ".lock").open("a+") as other:
        assert files._lock(other)
        monkeypatch.setattr(
            files.time, "sleep", lambda seconds: other.close()
        )  # who ends as soon as one waits
        with files.wait_for_folder(tmp_path, "a setting"):
            assert other.closed
    assert capsys.readouterr().err == ""


def test_path_that_is_not_valid_utf_8_is_refused() -> None:
    with pytest.raises(RefusedError, match="UTF-8"):
        user_path("runs/\udcff")
