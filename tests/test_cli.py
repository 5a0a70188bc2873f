"""The commands, as a user types them: what they print, what they leave behind, and their exit status."""

from __future__ import annotations

import contextlib
import errno
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
from raysim.experiment import execute as experiment
from raysim.experiment.build import build
from raysim.experiment.completion import completions
from raysim.primitives.errors import Refused
from raysim.primitives.files import lock_folder
from raysim.results.history import read_history
from raysim.results.progress import Progress
from raysim.simulation import checkpoint
from raysim.simulation.checkpoint import list_complete
from raysim.simulation.events import RunStoppedError

QUICK = (
    *(
        "runtime=inprocess",
        "tracking=none",
        "data=synthetic",
        "partition=iid",
        "partition.clients=10",
    ),
    *("schedule.cohort=3", "local.epochs=1", "rounds=4", "checkpoint.every=2"),
)
OWNER = """
import sys
from pathlib import Path
from raysim.primitives.files import alone
with alone(Path(sys.argv[1]), "data.cache"):
    print(flush=True)
    sys.stdin.read()
"""
KILLED = Path(__file__).parent / "killed.py"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(*words: str, status: int = 0) -> None:
    assert cli.call(["run", *QUICK, *words]) == status


def summary(folder: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(Path(folder, "summary.json").read_text())
    return content


def one_sentence(text: str) -> str:
    assert text.startswith("raysim: ")
    assert text.count("\n") == 1
    return text


def bits(folder: str) -> tuple[str, str]:
    content = summary(folder)
    return content["model_sha256"], content["state_sha256"]


# --- run ----------------------------------------------------------------------------------------------------------
@pytest.mark.pictures
def test_a_run_leaves_its_results_in_its_folder(capsys: pytest.CaptureFixture[str]) -> None:
    run("out=a", "method=[scaffold]")
    names = {path.name for path in Path("a").iterdir()}
    assert {
        "config.yaml",
        "history.parquet",
        "summary.json",
        "model.safetensors",
        "checkpoints",
    } <= names
    assert {"accuracy.png", "loss.png"} <= names
    rows = read_history(Path("a/history.parquet"))
    assert [row["round"] for row in rows] == [1, 2, 3, 4]
    content = summary("a")
    assert content["rounds"] == 4
    assert content["accuracy_global"] == rows[-1]["accuracy_global"]
    assert {
        "best5_mean",
        "last10_mean",
        "last10_std",
        "rounds_to",
        "peak_memory_bytes",
        "identity",
    } <= set(content)
    printed = capsys.readouterr()
    assert "scaffold" in printed.out
    assert (
        "10 with 80 training samples each, 0 without; 20 test samples of their own each"
        in printed.out
    )
    assert "\n          drawing pictures\n" in printed.out, (
        "after the last round, which would be silent otherwise"
    )
    assert printed.out.splitlines()[-1] == "create a report with: raysim report a"
    assert printed.err == ""


def test_a_run_without_out_gets_a_dated_folder() -> None:
    run("rounds=1")
    assert [path.name.endswith("-fedavg-synthetic") for path in Path("runs").iterdir()] == [True]


def test_the_same_settings_give_the_same_bits_and_another_seed_others() -> None:
    for out, seed in (("a", 0), ("b", 0), ("c", 1)):
        run(f"out={out}", f"seed={seed}", "rounds=2")
    assert bits("a") == bits("b")
    assert bits("a") != bits("c")


def test_python_sees_what_the_command_writes() -> None:
    result = experiment.run([*QUICK, "out=a"], quiet=True)
    assert result.folder == Path("a")
    assert result.summary == summary("a")
    assert [row["round"] for row in result.rows] == [1, 2, 3, 4]


def test_quiet_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    run("--quiet", "out=a", "rounds=1")
    assert capsys.readouterr() == ("", "")


def test_quiet_leaves_warnings_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    method = type(
        "Mine", (Method,), {"__module__": __name__, "name": "mine", "gradiant": lambda self: None}
    )()
    experiment.run([*QUICK, "out=a", "rounds=1"], methods=[method], quiet=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert (
        "method 'mine' has a function 'gradiant' that nothing calls: is the hook 'gradient' meant?\n"
        in err
    )


def test_quiet_says_that_a_client_was_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    run("--quiet", "out=a", "rounds=1", "local.lr=1e30", "local.batch=4", "faults.tolerate=1")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("a client failed and was left out of its round: client ")


# --- refusals -----------------------------------------------------------------------------------------------------
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
def test_a_refusal_is_one_sentence_with_status_2_and_leaves_nothing(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status: object = cli.call(words)
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    one_sentence(capsys.readouterr().err)
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["--round", "5"], "did you mean rounds=5? "),
        (["--rounds=5"], "did you mean rounds=5? "),
        (["--lr", "--show"], "did you mean local.lr=VALUE? "),
        (["--method", "fedprox"], "did you mean method=fedprox? "),
        (["--verbose"], ""),
    ],
)
def test_a_setting_written_as_an_option_is_named(
    words: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        cli.call(["run", *words])
    option = words[0].partition("=")[0]
    assert error.value.code == 2
    error_line = capsys.readouterr().err
    assert error_line == f"raysim: there is no flag {option}: {meant}see raysim run -h\n"


def test_an_existing_folder_is_refused_at_once_and_stays_as_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("a").mkdir()
    monkeypatch.setitem(
        sys.modules, "raysim.experiment.execute", None
    )  # before torch is read and data are made
    run("out=a", status=2)
    assert "resume=latest" in one_sentence(capsys.readouterr().err)
    assert list(Path("a").iterdir()) == []


def test_a_folder_that_is_not_there_is_not_continued_as_a_run_of_defaults(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.call(["run", "out=a", "resume=latest"]) == 2
    assert "out=a does not exist" in one_sentence(capsys.readouterr().err)
    assert list(Path().iterdir()) == []


def test_a_run_that_goes_on_by_itself_may_begin_with_the_defaults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[Any] = []
    monkeypatch.setattr(
        "raysim.experiment.execute.run", lambda config, **_: begun.append(config["out"])
    )
    assert cli.call(["run", "--auto-resume", "out=a"]) == 0
    assert begun == ["a"]


def test_a_folder_that_is_no_runs_is_not_resumed(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a").mkdir()
    Path("a/letter.txt").write_text("dear")
    run("out=a", "resume=latest", status=2)
    assert "not the folder of a run" in one_sentence(capsys.readouterr().err)


@pytest.mark.parametrize(
    "make", [os.mkfifo, os.mkdir, lambda path: os.symlink("config.yaml", path)]
)
def test_a_run_whose_configuration_is_no_file_is_refused(
    make: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("a").mkdir()
    make("a/config.yaml")
    run("out=a", "resume=latest", status=2)
    assert "a/config.yaml is no regular file" in one_sentence(capsys.readouterr().err)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_a_run_whose_summary_cannot_be_read_to_its_end_is_refused(
    make: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    run("out=a", "rounds=1")
    Path("a/summary.json").unlink()
    make("a/summary.json")
    run("out=a", "resume=latest", status=2)
    assert "no regular file" in one_sentence(capsys.readouterr().err)


@pytest.mark.parametrize(
    "left", [[], [".held"], [".config.yaml.0a1b"], [".held", ".config.yaml.0a1b"]]
)
def test_a_run_that_was_killed_before_its_first_file_had_its_name_begins_again(
    left: list[str],
) -> None:
    Path("a").mkdir()
    for name in left:
        Path("a", name).touch()
    run("out=a", "resume=latest")
    assert Path("a/summary.json").is_file() and not list(Path("a").glob(".config*"))


def test_a_folder_below_a_file_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a").write_text("file")
    run("out=a/b", status=2)
    assert "a is a file" in one_sentence(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["report", "--paper", "fedbr/table1"], "python -m jobs.papers.report fedbr/table1"),
        *((["bench", name], f"python -m jobs.benchmarks.{name}") for name in cli.IN_CHECKOUT),
    ],
)
def test_what_left_the_package_names_its_new_command(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in printed(words, capsys, status=2)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "resume=latest"], "resume=latest needs the folder of the run: add out=DIR"),
        (["study", "method=fedavg,fedprx"], "method=fedprx does not exist: did you mean fedprox?"),
        (["study", "method=fedavg", "roundz=3"], "roundz does not exist: did you mean rounds?"),
        (["report", "nope"], "nope is no folder"),
    ],
)
def test_what_is_wrong_at_first_sight_is_said_before_torch_is_read(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (
        "torch",
        "raysim.experiment.execute",
        "raysim.experiment.settings",
        "raysim.results.page",
    ):
        monkeypatch.setitem(sys.modules, module, None)
    assert cli.call(words) == 2
    assert said in one_sentence(capsys.readouterr().err)


# --- resume -------------------------------------------------------------------------------------------------------
def test_latest_without_a_checkpoint_starts_at_round_0_and_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run("out=a", "resume=latest")
    assert "starting at round 0" in capsys.readouterr().out
    run("out=b")
    assert bits("a") == bits("b")


def test_latest_on_a_finished_run_does_nothing_and_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run("out=a")
    before = {path: path.stat().st_mtime_ns for path in Path("a").rglob("*")}
    run("out=a", "resume=latest")
    assert "nothing to do" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in Path("a").rglob("*")} == before


@pytest.mark.parametrize(
    "words", [[], ["method=[scaffold]"], ["schedule=buffered", "fleet=lognormal"]], ids=str
)
def test_more_rounds_continue_a_finished_run_to_the_same_bits(words: list[str]) -> None:
    if "schedule=buffered" in words:
        words = [*words, "schedule.concurrency=5", "schedule.size=2"]
        quick = [word for word in QUICK if "cohort" not in word]
    else:
        quick = list(QUICK)
    assert cli.call(["run", *quick, *words, "out=straight", "rounds=5"]) == 0
    assert cli.call(["run", *quick, *words, "out=a", "rounds=2"]) == 0
    assert cli.call(["run", *quick, *words, "out=a", "rounds=5", "resume=latest"]) == 0
    assert bits("a") == bits("straight")
    assert [row["round"] for row in read_history(Path("a/history.parquet"))] == [1, 2, 3, 4, 5]


def test_an_interrupted_run_says_how_to_go_on_and_ends_in_the_same_bits(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run("out=straight")
    seen: list[object] = []

    def update(self: Progress, row: object) -> None:
        seen.append(row)
        if len(seen) == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Progress, "update", update)
        run("out=a", status=130)
    assert "resume=latest" in one_sentence(capsys.readouterr().err)
    assert not Path("a/summary.json").exists()
    run("out=a", "resume=latest")
    assert bits("a") == bits("straight")
    assert [row["round"] for row in read_history(Path("a/history.parquet"))] == [1, 2, 3, 4]


def test_another_study_is_not_continued_in_a_runs_folder(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run("out=a")
    run("out=a", "resume=latest", "rounds=6", "local.lr=0.2", status=2)
    text = one_sentence(capsys.readouterr().err)
    assert "local.lr=0.2" in text
    assert "local.lr=0.1" in text
    run("out=a", "resume=latest", "rounds=6", "runtime.threads=2", status=2)
    run("out=a", "resume=latest", "rounds=6", "runtime.lanes=2", status=2)
    run("out=a", "resume=latest", "rounds=5", "checkpoint.every=1", "faults.tolerate=0.5")


def test_run_of_earlier_version_is_refused_with_the_version(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run("out=a")
    config = Path("a/config.yaml")
    stored = yaml.safe_load(config.read_text())
    del stored["runtime"]["lanes"]
    config.write_text(yaml.safe_dump(stored))
    capsys.readouterr()
    run("out=a", "resume=latest", "rounds=6", status=2)
    text = one_sentence(capsys.readouterr().err)
    assert "runtime.lanes=" in text and raysim.__version__ in text


def test_a_run_in_process_is_the_same_study_on_ray(capsys: pytest.CaptureFixture[str]) -> None:
    run("out=a")
    on_ray = [
        "runtime=local",
        "runtime.workers=2",
        "runtime.strategy=SPREAD",
        "runtime.resources={slot: 1}",
    ]
    assert cli.call(["run", *on_ray, *QUICK[1:], "out=a", "resume=latest"]) == 0
    assert "has finished its 4 rounds: nothing to do" in capsys.readouterr().out


def test_a_folder_in_which_another_process_works_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    refused = []

    def second(row: object) -> None:
        with pytest.raises(Refused) as error:
            experiment.run([*QUICK, "out=a", "resume=latest", "rounds=6"], quiet=True)
        refused.append(str(error.value))

    experiment.run([*QUICK, "out=a"], quiet=True, on_round=second)
    owner = f"a is in use by process {os.getpid()} on {socket.gethostname()}"
    assert refused and all(error.startswith(owner) for error in refused)
    with lock_folder(Path("a")):
        run("out=a", "resume=latest", "rounds=6", status=2)
        assert "a is in use by" in one_sentence(capsys.readouterr().err)
        run(
            "out=a", status=2
        )  # nor as a new one: whoever is told to go on with it would have to wait
        assert "a is in use by" in one_sentence(capsys.readouterr().err)
    run("out=a", "resume=latest", "rounds=6")


def test_a_study_that_another_process_carries_out_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["study", *QUICK, "method=[],[fedprox]", "rounds=1", "out=s"]
    assert cli.call(words) == 0
    with lock_folder(Path("s")):
        assert cli.call(["study", "out=s", "resume=latest"]) == 2
    assert "s is in use by" in capsys.readouterr().err


def samples() -> Samples:
    zeros = np.zeros(2, dtype=np.int64)
    return Samples(np.ones((2, 1, 2, 2), dtype=np.uint8), zeros, zeros, 1, ["a"], ["b"])


@pytest.mark.slow
def test_who_waits_for_a_cache_says_for_whom(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE, stdin=subprocess.PIPE
    )
    assert owner.stdout is not None and owner.stdin is not None
    owner.stdout.readline()
    waiting = threading.Thread(target=lambda: open_or_build(str(tmp_path), "one", {}, samples))
    waiting.start()
    while "waiting" not in (text := capsys.readouterr().err):
        waiting.join(0.01)
    owner.stdin.close()
    waiting.join()
    assert (
        f"raysim: waiting for process {owner.pid} on " in text
        and f"which writes {tmp_path}" in text
    )
    assert owner.wait() == 0 and list(tmp_path.glob("one-*.arrow"))


def test_a_damaged_checkpoint_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    run("out=a")
    last = list_complete(Path("a/checkpoints"))[-1]
    with (last / "server.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    run("out=a", "resume=latest", "rounds=6", status=2)
    text = one_sentence(capsys.readouterr().err)
    assert last.name in text
    assert "round-000002" in text


def test_a_checkpoint_is_continued_in_a_new_folder() -> None:
    run("out=a")
    run("out=b", "resume=a/checkpoints/round-000002")
    assert bits("a") == bits("b")


NoRoomError = SafetensorError(
    "Error while serializing: I/O error: No space left on device (os error 28)"
)


# --- disks without room ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("full", ["fsync", "save_file", "model", "write_text"])
@pytest.mark.parametrize("nth", [1, 2, 5, 9])
def test_a_full_disk_ends_a_run_in_a_sentence_and_the_run_goes_on_when_there_is_room(
    full: str, nth: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {
        "fsync": (os, "fsync"),
        "save_file": (checkpoint, "save_file"),
        "model": (checkpoint, "save_file"),
        "write_text": (Path, "write_text"),
    }
    place, name = places[full]
    original, calls = getattr(place, name), []

    def write(*given: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) >= nth:
            raise (
                OSError(errno.ENOSPC, "No space left on device") if full != "model" else NoRoomError
            )
        return original(*given, **named)

    run("out=whole", "method=[scaffold]")
    with monkeypatch.context() as patch:
        patch.setattr(place, name, write)
        status = cli.call(["run", *QUICK, "out=a", "method=[scaffold]"])
    if len(calls) < nth:
        assert status == 0
        return
    text = one_sentence(capsys.readouterr().err)
    assert status in (1, 2) and ("disk is full" in text or "No space left" in text)
    if status == 1:
        assert "out=a and resume=latest" in text
    run("out=a", "method=[scaffold]", "resume=latest")
    assert bits("a") == bits("whole")
    assert not [path for path in Path("a").rglob(".*") if path.name != ".held"], (
        "nothing unfinished is left"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [["methods"], ["methods", "--json"], ["run", *QUICK], ["report", "a"], ["partition"]]
)
def test_an_output_that_cannot_be_written_is_one_sentence(words: list[str]) -> None:
    if words == ["report", "a"]:
        run("out=a")
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "raysim", *words]
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=600)
    assert "No space left on device" in one_sentence(ended.stderr)
    assert ended.returncode in (1, 2)


class Failing(Method):
    """Fail in a hook."""

    name = "failing"

    def __init__(self, hook: str, error: type[BaseException]):
        self.hook, self.error = hook, error

    def personalise(self, client: PersonalModel) -> None:
        if self.hook == "personalise":
            raise self.error("on purpose")

    def absorb(self, aggregation: Any, server: Any) -> None:
        if self.hook == "absorb":
            raise self.error("on purpose")


@pytest.mark.parametrize("hook", ["personalise", "absorb"])
@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit])
def test_a_hook_that_fails_ends_a_run_with_its_methods_name(
    hook: str, error: type[BaseException]
) -> None:
    built = build([*QUICK, "out=a"])
    built = replace(built, spec=replace(built.spec, methods=(Failing(hook, error),)))
    with pytest.raises(
        RunStoppedError, match=rf"method 'failing' failed.*{error.__name__}: on purpose"
    ):
        experiment.run(built, quiet=True)


# --- failures -----------------------------------------------------------------------------------------------------
def test_too_many_failures_end_a_run_with_status_1_and_the_clients_own_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run("out=a", "local.lr=1e30", "local.batch=4", status=1)
    text = capsys.readouterr().err
    assert text.startswith("raysim: ")
    assert "client" in text
    assert "not finite" in text
    assert "Traceback" in text
    assert not Path("a/summary.json").exists()


def test_tolerated_failures_are_recorded_with_client_round_and_worker() -> None:
    run("out=a", "local.lr=1e30", "local.batch=4", "faults.tolerate=1")
    entries = [json.loads(line) for line in Path("a/failures.jsonl").read_text().splitlines()]
    assert len(entries) == 12
    assert {"round", "client", "worker", "method", "error"} <= set(entries[0])
    assert summary("a")["failures_total"] == 12


# --- the other commands -------------------------------------------------------------------------------------------
def test_methods_are_listed_with_paper_slots_and_parameters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.call(["methods", "--json"]) == 0
    entries = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert entries["fedprox"]["parameters"] == {"mu": 0.01}
    assert "gradient" in entries["fedprox"]["slots"]
    assert all(entry["paper"] and entry["about"] for entry in entries.values())
    assert cli.call(["methods"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("fedavg  (McMahan et al., AISTATS 2017)\n")
    assert "\nscaffold  (Karimireddy et al., ICML 2020)\n" in printed
    assert {"mu=0.01", "max_staleness=null", "bias_correction=false"} <= set(
        printed.split()
    )  # as one types them


def test_a_method_that_is_named_is_explained_and_a_text_that_parts_share_is_printed_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.call(["methods", "fedld+fedavg"]) == 0
    printed = capsys.readouterr().out
    assert (
        printed.count("w_l = lambda_l / sqrt(sum_k lambda_k^2)") == 1
    )  # eq. 7, of the module that both parts share
    assert "\nmethod.fedld_principal.fraction=0.8\n" in printed
    assert "\nfedavg  (" in printed and "fedbr" not in printed
    assert cli.call(["methods", "fedprox", "--json"]) == 0
    assert [entry["name"] for entry in json.loads(capsys.readouterr().out)] == ["fedprox"]
    assert cli.call(["methods", "fedbrr"]) == 2
    assert capsys.readouterr().err == "raysim: there is no method fedbrr: did you mean fedbr?\n"


def test_methods_of_the_users_own_are_listed_and_what_names_none_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own/conf/method").mkdir(parents=True)
    (tmp_path / "own/__init__.py").write_text(
        "from raysim.methods.fedprox import FedProx\n\n\nclass Near(FedProx):\n    paper = 'ours'\n"
    )
    option = tmp_path / "own/conf/method/near.yaml"
    option.write_text("near: {_target_: own.Near, mu: 0.5}")
    assert cli.call(["methods", "--allow", "own"]) == 0
    assert "near  (ours)" in (text := capsys.readouterr().out) and "mu=0.5" in text
    for content, sentence in (
        ("{_target_: raysim.models.Mlp}", "is no method: name a subclass"),
        ("3", "names no class"),
    ):
        option.write_text(f"near: {content}")
        assert cli.call(["methods", "--conf", "own/conf"]) == 2
        assert sentence in capsys.readouterr().err


def test_a_partition_is_described_and_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.call(["partition", "data=synthetic", "partition=shards", "--out", "shards.png"]) == 0
    printed = capsys.readouterr().out
    assert (
        "clients" in printed
        and "effective classes" in printed
        and "_" not in printed.partition("\n")[2]
    )
    assert Path("shards.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.pictures
def test_a_report_compares_runs(capsys: pytest.CaptureFixture[str]) -> None:
    run("out=a")
    run("out=b", "method=[fedprox]")
    capsys.readouterr()
    assert cli.call(["report", "a", "b", "--out", "page"]) == 0
    printed = capsys.readouterr().out
    assert "fedprox" in printed
    assert "<html" in Path("page/report.html").read_text().lower()
    for form in ("--csv", "--latex"):
        assert cli.call(["report", "a", "b", form]) == 0
        printed = capsys.readouterr().out
        assert "fedprox" in printed and not printed.endswith("\n\n")
        assert ("% scores: accuracy on the clients' own tests" in printed) == (form == "--latex")


@pytest.mark.parametrize("out", ["/dev/full", "~nosuchuser/x"])
def test_where_nothing_can_be_written_is_one_sentence(
    out: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run("out=a")
    for words in (
        ["report", "a", "--out", out],
        ["partition", "data=synthetic", "--out", f"{out}/x.png"],
    ):
        capsys.readouterr()
        assert cli.call(words) == 2
        assert out in one_sentence(capsys.readouterr().err)
    assert sorted(path.name for path in Path().iterdir()) == ["a"]


@pytest.mark.parametrize(
    "words",
    [
        ["-h"],
        ["run", "-h"],
        ["partition", "-h"],
        ["fleet", "-h"],
        ["report", "-h"],
        ["methods", "-h"],
        ["bench", "-h"],
    ],
    ids=str,
)
def test_help_teaches_by_example(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.call(words)
    assert ended.value.code == 0
    assert "examples:\n  raysim " in capsys.readouterr().out


@pytest.mark.slow
def test_help_imports_nothing_heavy() -> None:
    heavy = {"torch", "ray", "hydra", "mlflow", "numpy", "matplotlib", "rich"}
    code = f"import sys, raysim.cli; print(*({heavy} & {{*sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == ""


@pytest.mark.slow
def test_the_module_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "raysim", "rnu"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    one_sentence(done.stderr)


@pytest.mark.slow
def test_a_killed_run_is_resumed_to_the_same_bits() -> None:
    run("out=straight", "rounds=8")
    words = [sys.executable, str(KILLED), "a", "run", *QUICK, "rounds=8", "out=a"]
    assert (
        subprocess.run(words, stdout=subprocess.DEVNULL, check=False).returncode == -signal.SIGKILL
    )
    assert [path.name for path in list_complete(Path("a/checkpoints"))] == ["round-000002"]
    run("out=a", "rounds=8", "resume=latest")
    assert bits("a") == bits("straight")
    assert [row["round"] for row in read_history(Path("a/history.parquet"))] == list(range(1, 9))


def test_a_run_on_ray_that_is_told_to_end_says_how_to_go_on(ray_session: None) -> None:
    import ray

    on_ray = [word for word in QUICK if not word.startswith("runtime=")]
    on_ray += [
        "runtime=cluster",
        f"runtime.address={ray.get_runtime_context().gcs_address}",
        "runtime.workers=1",
    ]
    words = [sys.executable, "-m", "raysim", "run", *on_ray, "rounds=100000", "out=a"]
    told = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    while told.poll() is None and not list_complete(Path("a/checkpoints")):
        with contextlib.suppress(subprocess.TimeoutExpired):
            told.wait(timeout=0.1)
    told.terminate()  # as `ray job stop` does
    _, errors = told.communicate()
    assert told.returncode == 130
    assert (
        "out=a and resume=latest continues from the last checkpoint" in errors
        and "SIGTERM" not in errors
    )


# --- help, version, completion, and words of other programs -------------------------------------------------------
def printed(words: list[str], capsys: pytest.CaptureFixture[str], status: int = 0) -> str:
    try:
        ended: object = cli.call(words)
    except SystemExit as error:
        ended = error.code
    assert ended == status
    captured = capsys.readouterr()
    return captured.out if status == 0 else one_sentence(captured.err)


def test_help_is_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(["help"], capsys) == printed(["-h"], capsys) == printed([], capsys)
    assert printed(["help", "study"], capsys) == printed(["study", "-h"], capsys)
    assert "did you mean study?" in printed(["help", "stdy"], capsys, status=2)


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_help_keeps_the_case_of_names(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(["help", command], capsys)
    for name in ("Ray", "Tune", "PyTorch", "HTML", "YAML", "MLflow", "JSON"):
        assert name.lower() not in {*text.replace("raysim", "").replace("--json", "").split()}
    if command == "sweep":
        assert "Search for good settings with Ray Tune" in text


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    import raysim

    assert printed(["--version"], capsys) == f"raysim {raysim.__version__}\n"


def test_the_configuration_is_shown_and_runs_again(capsys: pytest.CaptureFixture[str]) -> None:
    shown = printed(["run", *QUICK, "method=fedprox", "method.fedprox.mu=0.5", "--show"], capsys)
    assert list(Path().iterdir()) == []
    Path("shown.yaml").write_text(shown)
    assert printed(["run", "--config", "shown.yaml", "--show"], capsys) == shown
    assert "mu: 0.5\n" in shown and "${" not in shown
    assert "did you mean rounds?" in printed(["run", "ronds=3", "--show"], capsys, status=2)


def test_a_comment_that_zsh_passes_on_is_no_word(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(["run", "--show", "#", "what", "is it?"], capsys) == printed(
        ["run", "--show"], capsys
    )


@pytest.mark.parametrize(
    ("words", "ours"),
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
def test_words_of_hydra_and_tune_are_answered_with_ours(
    words: list[str], ours: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ours in printed(words, capsys, status=2)


@pytest.mark.parametrize(
    ("prefix", "given", "wanted"),
    [
        ("method=fedpr", [], ["method=fedproto", "method=fedprox"]),
        ("method=fedbr+mi", [], ["method=fedbr+mixup"]),
        ("method=fedavg,fedprox", [], ["method=fedavg,fedprox"]),
        (
            "method=feda",
            [],
            [f"method=fed{name}" for name in ("adagrad", "adam", "ala", "async", "avgm", "avg")],
        ),
        ("local.l", [], ["local.lr=", "local.lr_decay="]),
        ("method.fedprox", ["method=fedprox"], ["method.fedprox.mu="]),
        ("method.fedprox", ["method=fedprx"], []),
        ("seed", ["rounds"], ["seed="]),
        ("schedule=b", [], ["schedule=buffered"]),
        ("nothing", [], []),
    ],
)
def test_words_are_completed(prefix: str, given: list[str], wanted: list[str]) -> None:
    assert completions(prefix, given) == wanted


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_shell_is_told_how_to_complete(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    script = printed(["completion", shell], capsys)
    assert "_python_argcomplete" in script and "raysim" in script
    assert "invalid choice: 'fish'" in printed(["completion", "fish"], capsys, status=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("raysim stu", {"study "}),
        ("raysim run --sh", {"--show "}),
        ("raysim study method=fedavg,fedprox", None),
    ],
)
def test_a_shell_gets_its_completions(line: str, wanted: set[str] | None) -> None:
    code = "import sys; sys.argv[0] = 'raysim'; from raysim.cli import main; main()"
    shell = {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_STDOUT_FILENAME": "found",
        "COMP_LINE": line,
        "IFS": "\013",
    }
    words = {
        "COMP_POINT": str(len(line)),
        "_ARGCOMPLETE_COMP_WORDBREAKS": " \t\n=",
        "_ARGCOMPLETE_IFS": "\013",
    }
    subprocess.run([sys.executable, "-c", code], env={**os.environ, **shell, **words}, check=True)
    assert {*Path("found").read_text().split("\013")} == (wanted or {"fedavg,fedprox "})


# --- what a shell's runs/* finds ----------------------------------------------------------------------------------
def test_folders_that_are_no_run_are_passed_over(capsys: pytest.CaptureFixture[str]) -> None:
    run("out=runs/a", "rounds=2")
    for name in ("mlflow_artifacts/1", "notes"):
        Path("runs", name).mkdir(parents=True)
    Path("runs/mlflow.db").write_text("")
    everything = [*map(str, sorted(Path("runs").iterdir()))]
    capsys.readouterr()
    assert cli.call(["report", *everything]) == 0
    captured = capsys.readouterr()
    assert captured.err == "raysim: passed over, as no run has written there: runs/notes\n"
    assert "fedavg" in captured.out
    assert "is no folder of a run" in printed(["report", "runs/mlflow_artifacts"], capsys, status=2)
    assert "nowhere is no folder" in printed(
        ["report", "nowhere", "runs/mlflow.db"], capsys, status=2
    )
    assert "nowhere is no folder" in printed(["report", "nowhere", "runs/a"], capsys, status=2)
    assert cli.call(["report", *everything, "nowhere"]) == 2
    assert capsys.readouterr().err.count("raysim: ") == 1, (
        "what is refused is said, and nothing besides"
    )


def test_a_study_and_a_sweep_are_reported_by_their_folders(
    capsys: pytest.CaptureFixture[str],
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
    Path("many/runs").rename("many/others")
    assert "many is no folder of a run" in printed(["report", "many"], capsys, status=2)


LOST = """
import os, signal, time, weakref
from raysim import cli

signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it

class Gone: pass

def command(given):
    gone = Gone()
    held = weakref.ref(gone, lambda _: os.kill(os.getpid(), signal.SIGINT))
    del gone  # Python raises nothing there
    time.sleep(60)
    return 0

cli.COMMANDS["completion"] = command
cli.main(["completion", "bash"])
"""


def test_an_interrupt_that_comes_where_nothing_can_be_raised_is_not_lost() -> None:
    ended = subprocess.run([sys.executable, "-c", LOST], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (
        130,
        "raysim: stopped before the run began: nothing was written\n",
    )
