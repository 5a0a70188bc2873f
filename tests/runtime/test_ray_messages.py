"""Test that messages of Ray's threads go to a file. The tests imitate Ray and do not start it."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

from raysim.primitives.stacks import RAY_MESSAGES, stack_file
from raysim.runtime.ray.ray_messages import messages_written_to, separate_messages

NODE_LOST = "\x1b[33m(raylet)\x1b[0m The node was marked dead"
PLAIN = "(raylet) The node was marked dead\n"


def print_in_thread(name: str, text: str) -> None:
    thread = threading.Thread(target=print, args=(text,), name=name)
    thread.start()
    thread.join()


def print_as_ray(text: str = NODE_LOST) -> None:
    print_in_thread("ray_listen_error_messages", text)


def test_ray_messages_go_to_the_run_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with separate_messages():
        print_as_ray()  # before the folder exists
        with messages_written_to(tmp_path) as file:
            assert file is not None and not file.is_empty
            print_as_ray("a second one")
            print_in_thread("observer", "line of a user's thread")
            print("round 1")
    assert stack_file(tmp_path, RAY_MESSAGES).read_text() == f"{PLAIN}a second one\n"
    output = capsys.readouterr()
    assert output.out == "line of a user's thread\nround 1\n" and not output.err


def test_ray_message_file_is_removed_if_it_is_empty(tmp_path: Path) -> None:
    with separate_messages(), messages_written_to(tmp_path) as file:
        assert file is not None and file.is_empty and file.path.exists()
    assert not list(tmp_path.iterdir())


def test_ray_messages_without_folder_reach_standard_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with separate_messages():
        print_as_ray()
    assert capsys.readouterr() == ("", PLAIN)


def test_ray_messages_go_to_file_during_a_progress_bar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ray's messages go to their file although a progress bar replaces sys.stdout in the meantime.

    The bar replaces sys.stdout when it starts, and restores it when it ends.
    """
    original = sys.stdout
    with separate_messages():
        before_bar = sys.stdout
        monkeypatch.setattr(sys, "stdout", sys.stderr)
        with messages_written_to(tmp_path):
            print_as_ray()
            monkeypatch.setattr(sys, "stdout", before_bar)
    assert sys.stdout is original
    assert capsys.readouterr() == ("", "")
    assert stack_file(tmp_path, RAY_MESSAGES).read_text() == PLAIN


def test_messages_of_ray_are_not_written_to_a_file_if_the_user_started_ray(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with messages_written_to(tmp_path) as file:
        print_as_ray()
    assert file is None and not list(tmp_path.iterdir())
    assert capsys.readouterr().out == f"{NODE_LOST}\n"
