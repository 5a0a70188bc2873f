"""Test the commands as a user types them: what they print and write, and their exit status."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors import SafetensorError

import raysim
from raysim import cli
from raysim.api.local_job import PersonalModel
from raysim.api.method import Method
from raysim.data.dataset import Samples, open_or_build
from raysim.experiment import execute
from raysim.experiment.build import build
from raysim.experiment.completion import completions
from raysim.primitives.errors import RefusedError
from raysim.primitives.files import lock_folder
from raysim.results.history import read_history
from raysim.results.progress import Progress
from raysim.simulation import checkpoint
from raysim.simulation.checkpoint import list_complete
from raysim.simulation.events import RunStoppedError

QUICK = (
    "runtime=inprocess",
    "tracking=none",
    "data=synthetic",
    "partition=iid",
    "partition.clients=10",
    "schedule.cohort=3",
    "local.epochs=1",
    "rounds=4",
    "checkpoint.every=2",
    "model=mlp",
)
OWNER = """
import sys
from pathlib import Path
from raysim.primitives.files import wait_for_folder
with wait_for_folder(Path(sys.argv[1]), "data.cache"):
    print(flush=True)
    sys.stdin.read()
"""
KILLED = Path(__file__).parent / "killed.py"


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(*overrides: str, status: int = 0) -> None:
    assert cli.call(["run", *QUICK, *overrides]) == status


def summary(folder: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(Path(folder, "summary.json").read_text())
    return content


def rounds(folder: str) -> list[object]:
    return [row["round"] for row in read_history(Path(folder, "history.parquet"))]


def bits(folder: str) -> tuple[str, str]:
    content = summary(folder)
    return content["model_sha256"], content["state_sha256"]


def one_sentence(text: str) -> str:
    assert text.startswith("raysim: ")
    assert text.count("\n") == 1
    return text


def printed(words: list[str], capsys: pytest.CaptureFixture[str], status: int = 0) -> str:
    """Assert the exit status of a command; return what it prints.

    For the status 0 this is its standard output. Otherwise it is standard error, which must be one
    line that begins with "raysim: ".
    """
    try:
        ended: object = cli.call(words)
    except SystemExit as error:
        ended = error.code
    assert ended == status
    captured = capsys.readouterr()
    return captured.out if status == 0 else one_sentence(captured.err)


# --- run ----------------------------------------------------------------------------------------
# An unfinished file of a process that was killed.
DRAFT = ".config.yaml." + "0f" * 16


class TestRun:
    @pytest.mark.pictures
    def test_run_writes_its_results_into_its_folder(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        run("out=a", "method=[scaffold]")
        names = {path.name for path in Path("a").iterdir()}
        files = {"config.yaml", "history.parquet", "summary.json", "model.safetensors"}
        assert files | {"checkpoints", "accuracy.png", "loss.png"} <= names
        rows = read_history(Path("a/history.parquet"))
        assert [row["round"] for row in rows] == [1, 2, 3, 4]
        content = summary("a")
        assert content["rounds"] == 4
        assert content["accuracy_global"] == rows[-1]["accuracy_global"]
        keys = {"best5_mean", "last10_mean", "last10_std", "rounds_to"}
        assert keys | {"peak_memory_bytes", "identity"} <= set(content)
        output = capsys.readouterr()
        assert "scaffold" in output.out
        clients = "10 with 80 training samples each, 0 without; 20 test samples of their own each"
        assert clients in output.out
        assert "\n          drawing pictures\n" in output.out, "the end would be silent otherwise"
        assert output.out.splitlines()[-1].endswith("raysim report a")
        assert output.err == ""

    def test_run_without_out_gets_a_dated_folder(self) -> None:
        run("rounds=1")
        (folder,) = Path("runs").iterdir()
        assert folder.name.endswith("-fedavg-synthetic")

    def test_same_command_has_the_same_bits_unless_its_seed_differs(self) -> None:
        for out, seed in (("a", 0), ("b", 0), ("c", 1)):
            run(f"out={out}", f"seed={seed}", "rounds=2")
        assert bits("a") == bits("b")
        assert bits("a") != bits("c")

    def test_raysim_run_called_from_python_returns_the_written_summary(self) -> None:
        result = execute.run([*QUICK, "out=a"], quiet=True)
        assert result.folder == Path("a")
        assert result.summary == summary("a")
        assert [row["round"] for row in result.rows] == [1, 2, 3, 4]

    def test_quiet_run_prints_nothing(self, capsys: pytest.CaptureFixture[str]) -> None:
        run("--quiet", "out=a", "rounds=1")
        assert capsys.readouterr() == ("", "")

    def test_quiet_run_prints_warnings_to_stderr(self, capsys: pytest.CaptureFixture[str]) -> None:
        members = {"__module__": __name__, "name": "mine", "gradiant": lambda self: None}
        method = type("Mine", (Method,), members)()
        execute.run([*QUICK, "out=a", "rounds=1"], methods=[method], quiet=True)
        output = capsys.readouterr()
        assert output.out == ""
        assert "'mine'" in output.err and "'gradiant'" in output.err

    def test_quiet_run_reports_a_failed_client(self, capsys: pytest.CaptureFixture[str]) -> None:
        run("--quiet", "out=a", "rounds=1", "local.lr=1e30", "local.batch=4", "faults.tolerate=1")
        output = capsys.readouterr()
        assert output.out == ""
        assert "client" in output.err and "failed" in output.err


# --- refusals -----------------------------------------------------------------------------------
class TestRefusals:
    @pytest.mark.parametrize(
        "words",
        [
            ["run", "datta=mnist"],
            ["run", "method=[fedavgm,fedadam]", "runtime=inprocess"],
            ["run", "--allow"],
            ["run", "--fast"],
            ["rnu"],
            ["report", "nowhere"],
            ["partition", "partition=nothing"],
            ["bench", "W9"],
            ["bench", "steps", "W1"],
            ["bench", "scale"],
            ["report"],
            ["report", "--paper", "fedbr/table1", "runs"],
        ],
        ids=" ".join,
    )
    def test_refused_command_prints_one_sentence_and_writes_no_file(
        self, words: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        printed(words, capsys, status=2)
        assert list(Path().iterdir()) == []

    @pytest.mark.parametrize(
        ("words", "override"),
        [
            (["--round", "5"], "rounds=5"),
            (["--rounds=5"], "rounds=5"),
            (["--lr", "--show"], "local.lr=VALUE"),
            (["--method", "fedprox"], "method=fedprox"),
            (["--verbose"], ""),
        ],
    )
    def test_error_of_an_unknown_flag_suggests_the_override(
        self, words: list[str], override: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        flag = words[0].partition("=")[0]
        question = f"did you mean {override}? " if override else ""
        error = printed(["run", *words], capsys, status=2)
        assert error == f"raysim: there is no flag {flag}: {question}see raysim run -h\n"

    @pytest.mark.parametrize("words", [["ui", "--update", "a", "b"], ["ui", "a", "b"]])
    def test_error_of_a_superfluous_argument_names_the_command(
        self, words: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        error = printed(words, capsys, status=2)
        assert "'b'" in error and error.endswith("see raysim ui -h\n")

    def test_existing_folder_is_refused_before_torch_is_imported(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        Path("a").mkdir()
        monkeypatch.setitem(sys.modules, "raysim.experiment.execute", None)
        run("out=a", status=2)
        assert "resume=latest" in one_sentence(capsys.readouterr().err)
        assert list(Path("a").iterdir()) == []

    def test_resume_without_overrides_refuses_missing_folder(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert "out=a " in printed(["run", "out=a", "resume=latest"], capsys, status=2)
        assert list(Path().iterdir()) == []

    def test_auto_resume_is_accepted_if_out_folder_is_set_and_resume_is_not_set(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folders: list[Any] = []

        def record_folder(config: Any, **_: object) -> None:
            folders.append(config["out"])

        monkeypatch.setattr("raysim.experiment.execute.run", record_folder)
        assert cli.call(["run", "--auto-resume", "out=a"]) == 0
        assert folders == ["a"]

    @pytest.mark.parametrize(
        ("words", "missing"),
        [(["out=a", "resume=latest"], "resume="), (["rounds=1"], "out=DIR")],
    )
    def test_auto_resume_is_refused_without_out_folder_or_if_resume_is_set(
        self, words: list[str], missing: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        error = printed(["run", "--auto-resume", *words], capsys, status=2)
        assert "--auto-resume" in error and missing in error

    def test_resume_refuses_folder_that_is_no_run(self, capsys: pytest.CaptureFixture[str]) -> None:
        Path("a").mkdir()
        Path("a/letter.txt").write_text("dear")
        run("out=a", "resume=latest", status=2)
        assert "out=a" in one_sentence(capsys.readouterr().err)

    @pytest.mark.parametrize(
        "make", [os.mkfifo, os.mkdir, lambda path: os.symlink("config.yaml", path)]
    )
    def test_resume_refuses_config_yaml_that_is_not_a_regular_file(
        self, make: Any, capsys: pytest.CaptureFixture[str]
    ) -> None:
        Path("a").mkdir()
        make("a/config.yaml")
        run("out=a", "resume=latest", status=2)
        assert "a/config.yaml" in one_sentence(capsys.readouterr().err)

    @pytest.mark.parametrize(
        "make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)]
    )
    def test_resume_refuses_summary_that_is_no_regular_file(
        self, make: Any, capsys: pytest.CaptureFixture[str]
    ) -> None:
        run("out=a", "rounds=1")
        Path("a/summary.json").unlink()
        make("a/summary.json")
        run("out=a", "resume=latest", status=2)
        assert "a/summary.json" in one_sentence(capsys.readouterr().err)

    @pytest.mark.parametrize("names", [[], [".held"], [DRAFT], [".held", DRAFT]])
    def test_run_killed_before_it_wrote_a_file_can_be_started_again(self, names: list[str]) -> None:
        Path("a").mkdir()
        for name in names:
            Path("a", name).touch()
        run("out=a", "resume=latest")
        assert Path("a/summary.json").is_file() and not list(Path("a").glob(".config*"))

    def test_run_folder_is_refused_if_its_parent_is_a_file(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        Path("a").write_text("file")
        run("out=a/b", status=2)
        assert "out=a/b" in one_sentence(capsys.readouterr().err)

    def test_bench_checks_its_folder_before_it_measures(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        Path("a").write_text("file")
        assert "/a is not a folder" in printed(
            ["bench", "W3", "--out", "a/b.json"], capsys, status=2
        )

    @pytest.mark.parametrize(
        ("words", "command"),
        [
            (["report", "--paper", "fedbr/table1"], "python -m jobs.papers.report fedbr/table1"),
            *((["bench", name], f"python -m jobs.benchmarks.{name}") for name in cli.IN_CHECKOUT),
            (["bench", "--hosts", "2"], "raysim bench --workers N"),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, list) else "",
    )
    def test_error_for_a_removed_command_mentions_its_replacement(
        self, words: list[str], command: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert command in printed(words, capsys, status=2)

    @pytest.mark.parametrize(
        ("words", "part"),
        [
            (["run", "resume=latest"], "out=DIR"),
            (["study", "method=fedavg,fedprx"], "did you mean fedprox?"),
            (["study", "method=fedavg", "roundz=3"], "did you mean rounds?"),
            (["report", "nope"], "nope"),
        ],
    )
    def test_obvious_mistake_is_refused_without_importing_torch(
        self,
        words: list[str],
        part: str,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        own_modules = ("experiment.execute", "experiment.settings", "results.page")
        for module in ("torch", *(f"raysim.{name}" for name in own_modules)):
            monkeypatch.setitem(sys.modules, module, None)
        assert part in printed(words, capsys, status=2)


# --- resume -------------------------------------------------------------------------------------
class TestResume:
    def test_resume_without_a_checkpoint_starts_at_round_0(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        run("out=a", "resume=latest")
        assert "starting at round 0" in capsys.readouterr().out
        run("out=b")
        assert bits("a") == bits("b")

    def test_resume_removes_unfinished_files_of_a_killed_process(self) -> None:
        run("out=a", "rounds=1")
        drafts = [Path("a", DRAFT), Path("a", "checkpoints", DRAFT)]
        for draft in drafts:
            draft.write_bytes(b"half of a file")
        run("out=a", "resume=latest")
        assert not any(draft.exists() for draft in drafts)

    def test_resume_of_a_finished_run_does_nothing(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        run("out=a")
        before = {path: path.stat().st_mtime_ns for path in Path("a").rglob("*")}
        run("out=a", "resume=latest")
        assert "nothing to do" in capsys.readouterr().out
        assert {path: path.stat().st_mtime_ns for path in Path("a").rglob("*")} == before

    @pytest.mark.parametrize(
        "overrides",
        [
            [],
            ["method=[scaffold]"],
            ["schedule=buffered", "fleet=lognormal", "schedule.concurrency=5", "schedule.size=2"],
        ],
        ids=str,
    )
    def test_finished_run_continues_to_more_rounds_bit_for_bit(self, overrides: list[str]) -> None:
        quick = list(QUICK)
        if "schedule=buffered" in overrides:
            quick.remove("schedule.cohort=3")
        command = ["run", *quick, *overrides]
        assert cli.call([*command, "out=straight", "rounds=5"]) == 0
        assert cli.call([*command, "out=a", "rounds=2"]) == 0
        assert cli.call([*command, "out=a", "rounds=5", "resume=latest"]) == 0
        assert bits("a") == bits("straight")
        assert rounds("a") == [1, 2, 3, 4, 5]

    def test_interrupted_run_continues_to_the_same_bits(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run("out=straight")
        updates: list[object] = []

        def update(self: Progress, row: object) -> None:
            updates.append(row)
            if len(updates) == 3:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(Progress, "update", update)
            run("out=a", status=130)
        assert "resume=latest" in one_sentence(capsys.readouterr().err)
        assert not Path("a/summary.json").exists()
        run("out=a", "resume=latest")
        assert bits("a") == bits("straight")
        assert rounds("a") == [1, 2, 3, 4]

    def test_resume_refuses_settings_that_differ_from_the_stored_ones(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        run("out=a")
        run("out=a", "resume=latest", "rounds=6", "local.lr=0.2", status=2)
        error = one_sentence(capsys.readouterr().err)
        assert "local.lr=0.2" in error
        assert "local.lr=0.1" in error
        run("out=a", "resume=latest", "rounds=6", "method=moon", status=2)
        assert "method=moon differs from method=fedavg" in one_sentence(capsys.readouterr().err)
        run("out=a", "resume=latest", "rounds=6", "data=wine", "model=mlp", status=2)
        assert "data=wine differs from data=" in one_sentence(capsys.readouterr().err)
        run("out=a", "resume=latest", "rounds=6", "runtime.threads=2", status=2)
        run("out=a", "resume=latest", "rounds=6", "runtime.lanes=2", status=2)
        run("out=a", "resume=latest", "rounds=5", "checkpoint.every=1", "faults.tolerate=0.5")

    def test_error_contains_key_and_raysim_version_if_resumed_run_lacks_the_key(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        run("out=a")
        config = Path("a/config.yaml")
        stored = yaml.safe_load(config.read_text())
        del stored["runtime"]["lanes"]
        config.write_text(yaml.safe_dump(stored))
        capsys.readouterr()
        run("out=a", "resume=latest", "rounds=6", status=2)
        error = one_sentence(capsys.readouterr().err)
        assert "runtime.lanes=" in error and raysim.__version__ in error

    def test_resume_of_a_finished_run_accepts_another_runtime(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        run("out=a")
        workers = ["runtime.workers=2", "runtime.strategy=SPREAD", "runtime.resources={slot: 1}"]
        on_ray = ["runtime=local", *workers, *QUICK[1:]]
        assert cli.call(["run", *on_ray, "out=a", "resume=latest"]) == 0
        assert "nothing to do" in capsys.readouterr().out

    def test_run_whose_folder_is_in_use_is_refused(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        errors = []

        def run_again(row: object) -> None:
            with pytest.raises(RefusedError) as error:
                execute.run([*QUICK, "out=a", "resume=latest", "rounds=6"], quiet=True)
            errors.append(str(error.value))

        execute.run([*QUICK, "out=a"], quiet=True, on_round=run_again)
        owner = f"a is in use by process {os.getpid()} on {socket.gethostname()}"
        assert errors and all(error.startswith(owner) for error in errors)
        with lock_folder(Path("a")):
            run("out=a", "resume=latest", "rounds=6", status=2)
            assert "a is in use by" in one_sentence(capsys.readouterr().err)
            # A new run is not told to continue the folder, because it would have to wait.
            run("out=a", status=2)
            assert "a is in use by" in one_sentence(capsys.readouterr().err)
        run("out=a", "resume=latest", "rounds=6")

    def test_study_whose_folder_is_in_use_is_refused(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert cli.call(["study", *QUICK, "method=[],[fedprox]", "rounds=1", "out=s"]) == 0
        with lock_folder(Path("s")):
            assert cli.call(["study", "out=s", "resume=latest"]) == 2
        assert "s is in use by" in capsys.readouterr().err

    def test_error_of_a_damaged_checkpoint_contains_its_name(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        run("out=a")
        last = list_complete(Path("a/checkpoints"))[-1]
        with (last / "server.safetensors").open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\xff")
        run("out=a", "resume=latest", "rounds=6", status=2)
        error = one_sentence(capsys.readouterr().err)
        assert last.name in error
        assert "round-000002" in error

    def test_run_can_continue_from_a_checkpoint_into_a_new_folder(self) -> None:
        run("out=a")
        run("out=b", "resume=a/checkpoints/round-000002")
        assert bits("a") == bits("b")

    @pytest.mark.slow
    def test_killed_run_continues_to_the_same_bits(self) -> None:
        run("out=straight", "rounds=8")
        command = [sys.executable, str(KILLED), "a", "run", *QUICK, "rounds=8", "out=a"]
        ended = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
        assert ended.returncode == -signal.SIGKILL
        assert [path.name for path in list_complete(Path("a/checkpoints"))] == ["round-000002"]
        run("out=a", "rounds=8", "resume=latest")
        assert bits("a") == bits("straight")
        assert rounds("a") == list(range(1, 9))

    def test_terminated_run_on_ray_can_be_continued(self, ray_session: None) -> None:
        import ray

        overrides = [override for override in QUICK if not override.startswith("runtime=")]
        address = f"runtime.address={ray.get_runtime_context().gcs_address}"
        overrides += ["runtime=cluster", address, "runtime.workers=1", "rounds=100000", "out=a"]
        command = [sys.executable, "-m", "raysim", "run", *overrides]
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        while process.poll() is None and not list_complete(Path("a/checkpoints")):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=0.1)
        process.terminate()  # as `ray job stop` does
        _, errors = process.communicate()
        assert process.returncode == 130
        assert "out=a" in errors and "resume=latest" in errors and "SIGTERM" not in errors


# --- the cache of data --------------------------------------------------------------------------
def two_samples() -> Samples:
    zeros = np.zeros(2, dtype=np.int64)
    return Samples(np.ones((2, 1, 2, 2), dtype=np.uint8), zeros, zeros, 1, ["a"], ["b"])


@pytest.mark.slow
def test_message_says_which_process_holds_the_lock_of_a_data_cache(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, "-c", OWNER, str(tmp_path)]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE)
    assert owner.stdout is not None and owner.stdin is not None
    owner.stdout.readline()
    arguments = (str(tmp_path), "one", {}, two_samples)
    thread = threading.Thread(target=open_or_build, args=arguments)
    thread.start()
    text = ""
    while "waiting" not in text:
        text = capsys.readouterr().err
        thread.join(0.01)
    owner.stdin.close()
    thread.join()
    assert f"process {owner.pid} on " in text and str(tmp_path) in text
    assert owner.wait() == 0 and list(tmp_path.glob("one-*.arrow"))


# --- full disks ---------------------------------------------------------------------------------
NO_SPACE = OSError(errno.ENOSPC, "No space left on device")
NO_SPACE_FOR_TENSORS = SafetensorError(
    "Error while serializing: I/O error: No space left on device (os error 28)"
)
WRITERS: dict[str, tuple[Any, str, Exception]] = {
    "fsync": (os, "fsync", NO_SPACE),
    "save_file": (checkpoint, "save_file", NO_SPACE),
    "model": (checkpoint, "save_file", NO_SPACE_FOR_TENSORS),
}


class TestFullDisk:
    @pytest.fixture(scope="class")
    def complete_bits(self, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
        folder = tmp_path_factory.mktemp("complete") / "run"
        run(f"out={folder}", "method=[scaffold]")
        return bits(str(folder))

    @pytest.mark.parametrize(
        ("writer", "first_failure"),
        [
            *itertools.product(["fsync"], [1, 2, 5, 9]),
            *itertools.product(["save_file"], [1, 2, 5]),
            ("model", 1),
        ],
    )
    def test_run_that_stopped_at_a_full_disk_can_be_resumed_to_the_same_bits(
        self,
        writer: str,
        first_failure: int,
        complete_bits: tuple[str, str],
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        owner, name, error = WRITERS[writer]
        original = getattr(owner, name)
        calls: list[int] = []

        def write(*values: Any, **options: Any) -> Any:
            calls.append(1)
            if len(calls) >= first_failure:
                raise error
            return original(*values, **options)

        capsys.readouterr()  # the complete run
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, write)
            status = cli.call(["run", *QUICK, "out=a", "method=[scaffold]"])
        assert len(calls) >= first_failure
        text = one_sentence(capsys.readouterr().err)
        assert status in (1, 2) and ("disk is full" in text or "No space left" in text)
        if status == 1:
            assert "out=a" in text and "resume=latest" in text
        run("out=a", "method=[scaffold]", "resume=latest")
        assert bits("a") == complete_bits
        assert not [path for path in Path("a").rglob(".*") if path.name != ".held"]

    @pytest.mark.parametrize(
        "words",
        [
            ["methods", "--json"],
            ["report", "a"],
            ["partition", "data=synthetic"],
        ],
        ids=lambda words: words[0],
    )
    def test_error_of_printing_to_a_full_disk_is_one_sentence(
        self,
        words: list[str],
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        if words == ["report", "a"]:
            run("out=a")
        with open("/dev/full", "w") as full, monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", full)
            status = cli.call(words)
        assert "No space left on device" in one_sentence(capsys.readouterr().err)
        assert status in (1, 2)

    @pytest.mark.slow
    @pytest.mark.parametrize("words", [["methods"], ["run", *QUICK]], ids=lambda words: words[0])
    def test_process_whose_output_is_a_full_disk_prints_one_sentence_until_its_end(
        self, words: list[str]
    ) -> None:
        command = [sys.executable, "-m", "raysim", *words]
        with open("/dev/full", "w") as full:
            ended = subprocess.run(
                command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=600
            )
        assert "No space left on device" in one_sentence(ended.stderr)
        assert ended.returncode in (1, 2)

    @pytest.mark.parametrize("out", ["/dev/full", "~nosuchuser/x"])
    def test_error_of_an_unusable_output_folder_is_one_sentence(
        self, out: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        run("out=a")
        capsys.readouterr()
        assert out in printed(["report", "a", "--out", out], capsys, status=2)
        words = ["partition", "data=synthetic", "--out", f"{out}/x.png"]
        assert out in printed(words, capsys, status=2)
        assert sorted(path.name for path in Path().iterdir()) == ["a"]


# --- failures -----------------------------------------------------------------------------------
class Failing(Method):
    """A method that raises an error in a hook."""

    name = "failing"

    def __init__(self, hook: str, error: type[BaseException]):
        self.hook, self.error = hook, error

    def personalise(self, client: PersonalModel) -> None:
        if self.hook == "personalise":
            raise self.error("on purpose")

    def absorb(self, aggregation: Any, server: Any) -> None:
        if self.hook == "absorb":
            raise self.error("on purpose")


class TestFailures:
    @pytest.mark.parametrize("hook", ["personalise", "absorb"])
    @pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit])
    def test_error_of_a_failing_hook_contains_the_name_of_the_federated_method(
        self, hook: str, error: type[BaseException]
    ) -> None:
        experiment = build([*QUICK, "out=a"])
        spec = replace(experiment.spec, methods=(Failing(hook, error),))
        with pytest.raises(RunStoppedError, match=rf"'failing'.*{error.__name__}: on purpose"):
            execute.run(replace(experiment, spec=spec), quiet=True)

    def test_diverging_clients_stop_the_command_with_a_one_line_error(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        run("out=a", "local.lr=1e30", "local.batch=4", status=1)
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("raysim: ")
        for part in ("client", "not finite", "local.lr"):
            assert part in line
        assert not Path("a/summary.json").exists()

    def test_tolerated_failures_are_written_to_the_run_folder(self) -> None:
        run("out=a", "local.lr=1e30", "local.batch=4", "faults.tolerate=1")
        lines = Path("a/failures.jsonl").read_text().splitlines()
        entries = [json.loads(line) for line in lines]
        assert len(entries) == 12
        assert {"round", "client", "worker", "method", "error"} <= set(entries[0])
        assert summary("a")["failures_total"] == 12


# --- methods and partition ----------------------------------------------------------------------
class TestMethods:
    def test_methods_command_lists_all_methods(self, capsys: pytest.CaptureFixture[str]) -> None:
        content = json.loads(printed(["methods", "--json"], capsys))
        entries = {entry["name"]: entry for entry in content}
        assert entries["fedprox"]["parameters"] == {"mu": 0.01}
        assert "gradient" in entries["fedprox"]["slots"]
        assert all(entry["paper"] and entry["about"] for entry in entries.values())
        text = printed(["methods"], capsys)
        assert text.startswith("fedavg  (McMahan et al., AISTATS 2017)\n")
        assert "\nscaffold  (Karimireddy et al., ICML 2020)\n" in text
        assert {"mu=0.01", "max_staleness=null", "bias_correction=false"} <= set(text.split())

    def test_methods_command_explains_each_requested_method_once(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        text = printed(["methods", "fedld+fedavg"], capsys)
        equation = "w_l = lambda_l / sqrt(sum_k lambda_k^2)"
        assert text.count(equation) == 1, "both methods are in one module"
        assert "\nmethod.fedld_principal.fraction=0.8\n" in text
        assert "\nfedavg  (" in text and "fedbr" not in text
        entries = json.loads(printed(["methods", "fedprox", "--json"], capsys))
        assert [entry["name"] for entry in entries] == ["fedprox"]
        assert "did you mean fedbr?" in printed(["methods", "fedbrr"], capsys, status=2)

    def test_methods_command_lists_user_methods_and_refuses_faulty_methods(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "own/conf/method").mkdir(parents=True)
        code = "from raysim.methods.fedprox import FedProx\n\n\n"
        code += "class Near(FedProx):\n    paper = 'ours'\n"
        (tmp_path / "own/__init__.py").write_text(code)
        option = tmp_path / "own/conf/method/near.yaml"
        option.write_text("near: {_target_: own.Near, mu: 0.5}")
        text = printed(["methods", "--allow", "own"], capsys)
        assert "near  (ours)" in text and "mu=0.5" in text
        for content in ("{_target_: raysim.models.Mlp}", "3"):
            option.write_text(f"near: {content}")
            error = printed(["methods", "--conf", "own/conf"], capsys, status=2)
            assert "method.near" in error


def test_partition_command_describes_and_draws_the_split(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["partition", "data=synthetic", "partition=shards", "--out", "shards.png"]
    text = printed(words, capsys)
    assert "clients" in text and "effective classes" in text
    assert "_" not in text.partition("\n")[2]
    assert Path("shards.png").read_bytes().startswith(b"\x89PNG")


# --- report -------------------------------------------------------------------------------------
class TestReport:
    def test_report_command_compares_runs(self, capsys: pytest.CaptureFixture[str]) -> None:
        run("out=a")
        run("out=b", "method=[fedprox]")
        capsys.readouterr()
        assert "fedprox" in printed(["report", "a", "b", "--out", "page"], capsys)
        assert "<html" in Path("page/report.html").read_text().lower()
        for form in ("--csv", "--latex"):
            text = printed(["report", "a", "b", form], capsys)
            assert "fedprox" in text and not text.endswith("\n\n")
            has_note = "% scores: accuracy on the clients' own tests" in text
            assert has_note == (form == "--latex")

    def test_report_leaves_out_folders_without_a_run(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        run("out=runs/a", "rounds=2")
        for name in ("mlflow_artifacts/1", "notes"):
            Path("runs", name).mkdir(parents=True)
        Path("runs/mlflow.db").write_text("")
        paths = [*map(str, sorted(Path("runs").iterdir()))]
        capsys.readouterr()
        assert cli.call(["report", *paths]) == 0
        output = capsys.readouterr()
        assert "runs/notes" in one_sentence(output.err)
        assert "fedavg" in output.out
        error = printed(["report", "runs/mlflow_artifacts"], capsys, status=2)
        assert "runs/mlflow_artifacts" in error
        for other in ("runs/mlflow.db", "runs/a"):
            assert "nowhere" in printed(["report", "nowhere", other], capsys, status=2)
        printed(["report", *paths, "nowhere"], capsys, status=2)

    def test_report_of_a_study_folder_compares_its_runs(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for seed, name in enumerate(("one", "two")):
            run(f"out=many/runs/{name}", "rounds=2", f"seed={seed}")
        Path("many/runs/begun").mkdir()
        Path("many/study.yaml").write_text("")
        capsys.readouterr()
        table = printed(["report", "many", "--csv"], capsys)
        assert table == printed(["report", "many/runs/one", "many/runs/two", "--csv"], capsys)
        assert ",one," in table and ",two," in table
        assert cli.call(["report", "many"]) == 0
        capsys.readouterr()
        Path("many/runs").rename("many/others")
        assert "many " in printed(["report", "many"], capsys, status=2)

    def test_report_command_refuses_the_flags_csv_and_out_together(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        words = ["report", "a", "--csv", "--out", "page"]
        assert "--out page: --csv" in printed(words, capsys, status=2)


# --- help and version ---------------------------------------------------------------------------
class TestHelp:
    @pytest.mark.parametrize("command", ["", "run", "partition", "fleet", "report", "methods"])
    def test_help_of_every_command_has_examples(
        self, command: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        words = [command, "-h"] if command else ["-h"]
        assert "examples:\n  raysim " in printed(words, capsys)

    def test_help_command_prints_the_same_as_the_help_flag(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert printed(["help"], capsys) == printed(["-h"], capsys) == printed([], capsys)
        assert printed(["help", "study"], capsys) == printed(["study", "-h"], capsys)
        assert "did you mean study?" in printed(["help", "stdy"], capsys, status=2)

    @pytest.mark.parametrize("command", cli.COMMANDS)
    def test_help_writes_product_names_with_capitals(
        self, command: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        text = printed(["help", command], capsys)
        words = {*text.replace("raysim", "").replace("--json", "").split()}
        for name in ("Ray", "Tune", "PyTorch", "HTML", "YAML", "MLflow", "JSON"):
            assert name.lower() not in words
        if command == "sweep":
            assert "Search for good settings with Ray Tune" in text

    @pytest.mark.slow
    def test_import_of_raysim_cli_loads_no_large_libraries(self) -> None:
        heavy = {"torch", "ray", "hydra", "mlflow", "numpy", "matplotlib", "rich"}
        code = f"import sys, raysim.cli; print(*({heavy} & {{*sys.modules}}))"
        command = [sys.executable, "-c", code]
        ran = subprocess.run(command, check=True, capture_output=True, text=True)
        assert ran.stdout.strip() == ""

    def test_version_flag_prints_the_package_version(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert printed(["--version"], capsys) == f"raysim {raysim.__version__}\n"

    def test_printed_configuration_can_be_run(self, capsys: pytest.CaptureFixture[str]) -> None:
        words = ["run", *QUICK, "method=fedprox", "method.fedprox.mu=0.5", "--show"]
        text = printed(words, capsys)
        assert list(Path().iterdir()) == []
        Path("shown.yaml").write_text(text)
        assert printed(["run", "--config", "shown.yaml", "--show"], capsys) == text
        assert "mu: 0.5\n" in text and "${" not in text
        assert "did you mean rounds?" in printed(["run", "ronds=3", "--show"], capsys, status=2)

    def test_comment_after_a_command_is_ignored(self, capsys: pytest.CaptureFixture[str]) -> None:
        with_comment = printed(["run", "--show", "#", "what", "is it?"], capsys)
        assert with_comment == printed(["run", "--show"], capsys)

    @pytest.mark.slow
    def test_python_m_raysim_runs_the_raysim_command(self) -> None:
        command = [sys.executable, "-m", "raysim", "rnu"]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        assert ran.returncode == 2
        one_sentence(ran.stderr)

    @pytest.mark.parametrize(
        ("words", "replacement"),
        [
            (["run", "-m", "seed=0,1"], "raysim study"),
            (["-m", "seed=0,1"], "raysim study"),
            (["run", "--multirun"], "raysim study"),
            (["run", "seed=0,1"], "raysim study seed=0,1"),
            (["run", "--cfg", "job"], "raysim run --show"),
            (["study", "--info"], "raysim run --show"),
            (["run", "--config-dir=mine"], "--conf DIR"),
            (["run", "--config-name", "mine"], "experiment=NAME"),
            (["run", "hydra/launcher=joblib"], "raysim study --parallel N"),
            (["sweep", "hydra/sweeper=optuna", "local.lr=0.1,0.2"], "raysim sweep searches"),
            (["sweep", "--num-samples", "8"], "sweep.trials=N"),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, list) else "",
    )
    def test_error_of_a_flag_of_hydra_or_ray_tune_suggests_a_replacement(
        self, words: list[str], replacement: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert replacement in printed(words, capsys, status=2)


# --- completion ---------------------------------------------------------------------------------
class TestCompletion:
    @pytest.mark.parametrize(
        ("prefix", "overrides", "expected"),
        [
            ("method=fedpr", [], ["method=fedproto", "method=fedprox"]),
            ("method=fedbr+mi", [], ["method=fedbr+mixup"]),
            ("method=fedavg,fedprox", [], ["method=fedavg,fedprox"]),
            (
                "method=feda",
                [],
                [
                    f"method=fed{name}"
                    for name in ("adagrad", "adam", "ala", "async", "avgm", "avg")
                ],
            ),
            ("local.l", [], ["local.lr=", "local.lr_decay="]),
            ("method.fedprox", ["method=fedprox"], ["method.fedprox.mu="]),
            ("method.fedprox", ["method=fedprx"], []),
            ("seed", ["rounds"], ["seed="]),
            ("schedule=b", [], ["schedule=buffered"]),
            ("nothing", [], []),
        ],
    )
    def test_completion_lists_options_and_keys_of_overrides(
        self, prefix: str, overrides: list[str], expected: list[str]
    ) -> None:
        assert completions(prefix, overrides) == expected

    @pytest.mark.parametrize("shell", ["bash", "zsh"])
    def test_completion_script_is_printed_for_a_shell(
        self, shell: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        script = printed(["completion", shell], capsys)
        assert "_python_argcomplete" in script and "raysim" in script
        assert "'fish'" in printed(["completion", "fish"], capsys, status=2)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("line", "expected"),
        [
            ("raysim stu", {"study "}),
            ("raysim run --sh", {"--show "}),
            ("raysim study method=fedavg,fedprox", {"fedavg,fedprox "}),
        ],
    )
    def test_completion_works_in_a_shell(self, line: str, expected: set[str]) -> None:
        code = "import sys; sys.argv[0] = 'raysim'; from raysim.cli import main; main()"
        shell = {
            "_ARGCOMPLETE": "1",
            "_ARGCOMPLETE_STDOUT_FILENAME": "completions",
            "_ARGCOMPLETE_COMP_WORDBREAKS": " \t\n=",
            "_ARGCOMPLETE_IFS": "\013",
            "COMP_LINE": line,
            "COMP_POINT": str(len(line)),
            "IFS": "\013",
        }
        subprocess.run([sys.executable, "-c", code], env={**os.environ, **shell}, check=True)
        assert {*Path("completions").read_text().split("\013")} == expected


# --- Ctrl-C -------------------------------------------------------------------------------------
INTERRUPTED_COMMAND = """
import os, signal, time, weakref
from raysim import cli

signal.signal(signal.SIGINT, signal.default_int_handler)  # background processes ignore it

class Target: pass

def interrupt_a_callback(arguments):
    target = Target()
    reference = weakref.ref(target, lambda _: os.kill(os.getpid(), signal.SIGINT))
    del target  # Python raises nothing in the callback
    time.sleep(60)
    return 0

def answer_with_another_error(arguments):
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
    except KeyboardInterrupt:
        raise ValueError("invalid bounding box") from None
    return 0

cli.COMMANDS["completion"] = COMMAND
cli.main(["completion", "bash"])
"""


@pytest.mark.parametrize("function", ["interrupt_a_callback", "answer_with_another_error"])
def test_run_stops_although_a_library_suppresses_the_interrupt(function: str) -> None:
    program = INTERRUPTED_COMMAND.replace("= COMMAND", f"= {function}")
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 130
    # Only `raysim run` knows that it has written nothing.
    assert "before the command had finished" in one_sentence(ended.stderr)
