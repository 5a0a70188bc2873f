"""Test what `raysim submit` packs and refuses, jobs on a cluster, and the files in jobs/."""

from __future__ import annotations

import http.server
import io
import json
import multiprocessing
import os
import re
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from test_new import GROUPS

from raysim import cli
from raysim.commands.submit import fetch, job_server, package
from raysim.commands.submit.package import (
    JobCommand,
    PackedFile,
    check_command,
    check_size,
    describe_size,
    find_files,
    pack,
    read_runtime_env,
    with_source,
)
from raysim.experiment.compose import compose
from raysim.primitives.commit import source_commit
from raysim.primitives.errors import RefusedError
from raysim.simulation.events import RunStoppedError

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
SMALL = (
    "rounds=2",
    "tracking=none",
    "data=synthetic",
    "data.samples=60",
    "data.test_samples=10",
    "partition.clients=3",
    "schedule.cohort=2",
    "model=mlp",
    "local.epochs=1",
)
MINE = """
from raysim.api.method import Method


class Broken(Method):
    name = "broken"
    paper = "a test"

    def gradient(self, job, grad, at):
        raise ValueError("no gradient today")
"""


# --- the package --------------------------------------------------------------------------------
class TestPackage:
    @pytest.mark.slow
    def test_copy_of_raysim_in_a_job_runs_without_the_git_checkout(self, tmp_path: Path) -> None:
        pack(find_files(), tmp_path)
        names = sorted(path.name for path in tmp_path.iterdir())
        assert names == ["LICENSE", "README.md", "conf", "pyproject.toml", "raysim"]
        program = (
            "import raysim.experiment.compose as c; "
            "from raysim.primitives.files import conf_folder; "
            "print(c.__file__, conf_folder(), c.compose(['rounds=7'])['rounds'])"
        )
        command = [sys.executable, "-c", program]
        ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        module = tmp_path / "raysim" / "experiment" / "compose.py"
        assert ran.stdout.split() == [str(module), str(tmp_path / "conf"), "7"]

    def test_package_leaves_out_hidden_files_and_byte_code(self, tmp_path: Path) -> None:
        hidden = ("mine/.secret", "mine/.git/config", "mine/__pycache__/a.pyc")
        for name in ("mine/a.py", "mine/deep/b.yaml", *hidden):
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("x")
        names = [file.name for file in find_files([tmp_path / "mine"])]
        mine = [name for name in names if name.startswith("mine/")]
        assert mine == ["mine/a.py", "mine/deep/b.yaml"]
        assert not [name for name in names if "pycache" in name or "/." in name]

    def test_package_refuses_links_that_leave_its_folder(self, tmp_path: Path) -> None:
        (tmp_path / "secret").write_text("hunter2")
        mine = tmp_path / "mine"
        (mine / "sub").mkdir(parents=True)
        (mine / "a.py").write_text("")
        (mine / "b.py").symlink_to("a.py")
        assert "mine/b.py" in {file.name for file in find_files([mine])}
        link = mine / "sub/c.py"
        for target in (tmp_path / "secret", "../../secret"):
            link.symlink_to(target)
            with pytest.raises(RefusedError, match=f"^{link} .*{tmp_path / 'secret'}"):
                find_files([mine])
            link.unlink()
        (mine / "d").symlink_to(tmp_path)
        with pytest.raises(RefusedError, match="mine/d "):
            find_files([mine])

    @pytest.mark.parametrize("argument", ["loop", "~nosuchuser", "a\0b"])
    def test_submit_refuses_paths_that_cannot_be_resolved(
        self, argument: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        Path("loop").symlink_to("loop")
        with pytest.raises(RefusedError):
            find_files([argument])
        with pytest.raises(RefusedError):
            read_runtime_env(argument)

    def test_error_of_too_large_package_mentions_its_largest_file(self, tmp_path: Path) -> None:
        mine = tmp_path / "mine"
        mine.mkdir()
        (mine / "weights.bin").write_bytes(bytes(3_000_000))
        (mine / "small.py").write_text("x = 1\n")
        files = find_files([mine])
        assert "mine 3.0 MB" in describe_size(files)
        check_size(files, 50)
        with pytest.raises(RefusedError, match=r"--limit 2 MB.*mine/weights\.bin \(3\.0 MB\)"):
            check_size(files, 2)

    def test_error_of_too_large_package_mentions_a_file_even_if_all_files_are_small(
        self, tmp_path: Path
    ) -> None:
        files = [PackedFile(tmp_path, f"photos/{number}", 10_000) for number in range(200)]
        with pytest.raises(RefusedError, match=r"largest are photos/0 \(10 kB\)"):
            check_size(files, 1)

    def test_submit_refuses_a_missing_path_and_a_folder_named_conf(self, tmp_path: Path) -> None:
        with pytest.raises(RefusedError, match="--with nowhere"):
            find_files(["nowhere"])
        (tmp_path / "conf").mkdir()
        with pytest.raises(RefusedError, match=f"--with {tmp_path / 'conf'}"):
            find_files([tmp_path / "conf"])


# --- the command --------------------------------------------------------------------------------
def job_command(*words: str, **options: Any) -> JobCommand:
    return JobCommand(words, words[1:], **options)


class TestCommand:
    def test_submitted_run_uses_the_running_cluster_unless_it_sets_a_runtime(self) -> None:
        joined = job_command("run", "out=/s/a", "local.lr='tag(log, interval(1, 2))'")
        start = ["python", "-m", "raysim", "run", "runtime=cluster"]
        assert shlex.split(joined.entrypoint) == [*start, *joined.words[1:]]
        for override in ("runtime=inprocess", "resume=latest"):
            other = job_command("study", "out=/s/a", override)
            assert "runtime=cluster" not in other.entrypoint
        new_or_continued = job_command("study", "out=/s/a", "resume=latest", "rounds=2")
        assert "runtime=cluster" in new_or_continued.entrypoint
        continued = job_command("run", "out=/s/a", "resume=latest")
        assert shlex.split(continued.entrypoint) == [*start, *continued.words[1:]]

    def test_submit_prints_no_password_of_a_url(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        connection = SimpleNamespace(follow=lambda: None)
        monkeypatch.setattr(job_server, "connect", lambda url: None)
        monkeypatch.setattr(job_server, "submit", lambda *arguments: "raysubmit_1")
        monkeypatch.setattr(job_server, "ConnectionToJob", lambda *arguments: connection)
        monkeypatch.setattr(job_server, "wait_for_end", lambda connection: (0, ""))
        command = job_command("run", "out=ftp://me:secret@host/run")
        assert package.submit(command, "http://127.0.0.1:8265") == 0
        output = capsys.readouterr().out
        assert "secret" not in output
        assert output.count("ftp://host/run") == 2

    @pytest.mark.parametrize(
        "words",
        [
            ("run",),
            ("run", "out=runs/a"),
            ("sweep", "sweep=fedbr"),
            ("study", "resume=latest", "out=a"),
        ],
        ids=" ".join,
    )
    def test_submit_refuses_a_results_folder_inside_the_folder_of_the_ray_job(
        self, words: tuple[str, ...]
    ) -> None:
        with pytest.raises(RefusedError, match=r"out="):
            check_command(job_command(*words), find_files())

    @pytest.mark.parametrize(
        "words",
        [
            ("run", "out=/shared/a"),
            ("run", "out='~/a'"),
            ("run", "tracking.uri=http://mlflow:5000"),
            ("run", "resume=/shared/a/checkpoints/round-3"),
            ("study", "out='/shared/a'"),
        ],
        ids=" ".join,
    )
    def test_submit_accepts_a_results_folder_outside_the_folder_of_the_ray_job(
        self, words: tuple[str, ...]
    ) -> None:
        check_command(job_command(*words), find_files())

    def test_submit_checks_keys_and_commands_before_the_upload(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert cli.call(["submit", "run", "out=/s/a", "roundz=3"]) == 2
        assert "did you mean rounds?" in capsys.readouterr().err
        assert cli.call(["submit", "bench"]) == 2
        error = capsys.readouterr().err
        assert "submit bench" in error and "run, study, sweep" in error
        with pytest.raises(SystemExit) as ended:
            cli.call(["submit", "--", "run", "out=/s/a", "--quite"])
        assert ended.value.code == 2

    @pytest.mark.parametrize(
        "overrides",
        [
            ["rounds=ten"],
            ["local.lr=fast"],
            ["runtime.workers=-1"],
            ["method=fedprox", "method.fedprox.mu=big"],
            ["method=fedprox", "method.fedprox.mu=-1.5"],
            ["partition.alpha=some"],
            ["schedule.cohort=1.5"],
        ],
        ids=str,
    )
    def test_submit_refuses_wrong_value_before_the_upload(
        self, overrides: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert cli.call(["submit", "run", "out=/s/a", *overrides]) == 2
        printed = capsys.readouterr()
        assert printed.err.startswith(f"raysim: {overrides[-1]} ") and not printed.out

    def test_submit_accepts_paths_and_packages_that_are_missing_locally(
        self, tmp_path: Path
    ) -> None:
        overrides = ["device=cuda", "data=parquet", "data.root=/nowhere", "model.norm=group"]
        check_command(job_command("run", "out=/s/a", *overrides), find_files())
        (tmp_path / "method").mkdir()
        option = tmp_path / "method" / "mine.yaml"
        option.write_text("mine: {_target_: ofnodes.Mine, mu: 1}\n")
        command = job_command("run", "out=/s/a", "method=mine", conf=[str(tmp_path)])
        check_command(command, find_files())

    def test_submit_refuses_a_configuration_folder_that_is_not_uploaded(self) -> None:
        command = job_command("run", "out=/s/a", conf=["mine/conf"])
        with pytest.raises(RefusedError, match=r"--conf mine/conf.*--with mine"):
            check_command(command, find_files())

    def test_runtime_environment_is_read_from_a_file(self, tmp_path: Path) -> None:
        assert read_runtime_env(None) == {}
        environment = read_runtime_env(str(ROOT / "jobs" / "runtime_env.yaml"))
        assert environment["pip"] == ["${RAY_RUNTIME_ENV_CREATE_WORKING_DIR}[sweep]"]
        assert "RAYSIM_CACHE" in environment["env_vars"]
        path = tmp_path / "env.yaml"
        for text in ("working_dir: .", "- a", "a: ["):
            path.write_text(text)
            with pytest.raises(RefusedError, match=f"--runtime-env {path}"):
                read_runtime_env(str(path))

    def test_runtime_environment_of_a_job_contains_the_commit_of_raysim(self) -> None:
        environment = {"pip": ["x"], "env_vars": {"A": "1"}}
        source = {"RAYSIM_SOURCE": json.dumps(source_commit())}
        assert with_source(environment) == {"pip": ["x"], "env_vars": {**source, "A": "1"}}
        assert environment["env_vars"] == {"A": "1"}, "the argument is unchanged"
        assert with_source({}) == {"env_vars": source}


# --- the job server -----------------------------------------------------------------------------
CONNECT = """
import sys
from raysim.commands.submit import job_server

try:
    job_server.connect(sys.argv[1])
except ValueError as error:
    print(error)
"""


def connection_error(address: str, environment: Mapping[str, str]) -> str:
    """Connect to a job server in a new process; return the error's text, "" without an error.

    address: the address of the job server.
    environment: the environment variables of the new process.
    """
    command = [sys.executable, "-c", CONNECT, address]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return ran.stdout


class TestJobServer:
    @pytest.mark.parametrize(
        ("address", "url"),
        [
            (None, "http://127.0.0.1:8265"),
            ("auto", "http://127.0.0.1:8265"),
            ("head", "http://head:8265"),
            ("head:8000", "http://head:8000"),
            ("https://user@head/", "https://head:443"),
        ],
    )
    def test_address_of_the_job_server_gets_default_scheme_and_port(
        self, address: str | None, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
            monkeypatch.delenv(name, raising=False)
        assert job_server.find_address(address) == url
        monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://other:1")
        assert job_server.find_address(address) == (url if address else "http://other:1")

    @pytest.mark.parametrize("address", ["ray://head:10001", "http://", "head:port"])
    def test_wrong_address_of_the_job_server_is_refused(self, address: str) -> None:
        with pytest.raises(ValueError, match=f"--address {address}"):
            job_server.find_address(address)

    def test_error_of_a_wrong_address_names_its_environment_variable(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("RAY_API_SERVER_ADDRESS", raising=False)
        monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
        with pytest.raises(ValueError, match=r"^RAY_ADDRESS=ray://head:10001 is not"):
            job_server.find_address(None)

    def test_submit_fails_before_the_upload_if_no_server_answers_at_the_address(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
        url = f"http://127.0.0.1:{free_ports(1)[0]}"
        with pytest.raises(ValueError, match=f"--address {url}: no cluster"):
            job_server.connect(url)
        assert cli.call(["submit", "--address", url, "run", "out=/s/a"]) == 2
        printed = capsys.readouterr()
        assert f"--address {url}: no cluster" in printed.err and not printed.out

    @pytest.mark.slow  # Ray keeps the first token of a process, and this one may have another
    @pytest.mark.parametrize(
        ("token", "part"),
        [("a" * 32, "not a Ray job server"), ("", "this process has none")],
    )
    def test_error_contains_address_if_server_or_token_is_wrong(
        self, token: str, part: str, tmp_path: Path
    ) -> None:
        class OtherServer(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_error(404)

            def log_message(self, *_: object) -> None: ...

        server = http.server.HTTPServer(("127.0.0.1", 0), OtherServer)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        environment = {"HOME": str(tmp_path), "RAY_AUTH_MODE": "token"}
        for name, value in os.environ.items():
            if not name.startswith("RAY_AUTH") and name != "HOME":
                environment[name] = value
        if token:
            environment["RAY_AUTH_TOKEN"] = token
        address = f"http://127.0.0.1:{server.server_port}"
        try:
            text = connection_error(address, environment)
        finally:
            server.shutdown()
            server.server_close()
        assert f"--address {address}" in text and part in text

    def test_error_mentions_the_path_of_a_missing_token_file(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
        monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "none"))
        with pytest.raises(ValueError, match=f"RAY_AUTH_TOKEN_PATH={tmp_path / 'none'}"):
            job_server.connect("http://127.0.0.1:1")

    @pytest.mark.parametrize(
        ("exit_code", "status", "signal_number"),
        [(1, 1, None), (2, 2, None), (130, 130, None), (137, 137, 9), (-15, 143, 15)],
    )
    def test_error_of_a_job_killed_by_a_signal_says_how_to_resume(
        self, exit_code: int, status: int, signal_number: int | None
    ) -> None:
        from ray.job_submission import JobStatus

        details = SimpleNamespace(status=JobStatus.FAILED, driver_exit_code=exit_code, message="")
        client: Any = SimpleNamespace(get_job_info=lambda job: details)
        connection = job_server.ConnectionToJob(client, "a", print, print)
        code, sentence = job_server.wait_for_end(connection)
        assert code == status
        if signal_number is None:
            assert sentence == ""
        else:
            assert f"ended by signal {signal_number}" in sentence and "resume=latest" in sentence

    def test_broken_connection_to_a_ray_job_is_restored(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(job_server, "RECONNECT_INTERVAL_S", 0.0)
        client = UnstableClient(breaks_after=[0, 1, 3, None])
        output: list[str] = []
        lines: list[str] = []
        connection = job_server.ConnectionToJob(client, "a", output.append, lines.append)
        connection.follow()
        assert "".join(output) == "".join(UnstableClient.LOG)
        assert len(lines) == 3 and all("http://head:8265" in line for line in lines)

    @pytest.mark.parametrize(
        ("error", "advice"),
        [
            (OSError("refused"), "ray job stop --address http://head:8265 a"),
            (RuntimeError("Job a does not exist"), "resume=latest"),
        ],
    )
    def test_error_of_lost_connection_says_how_to_continue(
        self, error: Exception, advice: str
    ) -> None:
        def fail(job: str) -> None:
            raise error

        client: Any = SimpleNamespace(get_job_info=fail, get_address=lambda: "http://head:8265")
        connection = job_server.ConnectionToJob(client, "a", print, print, wait_s=0.0)
        with pytest.raises(RunStoppedError, match=advice):
            job_server.wait_for_end(connection)

    @pytest.mark.parametrize(
        ("entrypoint", "folder"),
        [
            ("python -m raysim run runtime=cluster 'out=/s/a b' seed=1", "/s/a b"),
            ("python -m raysim run out=/s/a out=/s/b", "/s/b"),
            ("python -m raysim run seed=1", ""),
        ],
    )
    def test_fetch_finds_the_path_of_the_run_folder_in_the_submitted_command(
        self, entrypoint: str, folder: str
    ) -> None:
        assert fetch.find_folder(entrypoint) == folder

    def test_command_fetch_copies_a_folder_whose_path_starts_with_a_tilde(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = tmp_path / "home" / "runs"
        (folder / "checkpoints").mkdir(parents=True)
        (folder / "runs" / "a" / "checkpoints").mkdir(parents=True)
        (folder / "summary.json").write_text("{}")
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        printed = run_fetch_program("~/runs", "9999", "checkpoints")
        fetch.unpack(fetch.read_archive(printed, "~/runs", "a", 1.0), tmp_path / "here")
        here = sorted(path.name for path in (tmp_path / "here").rglob("*"))
        assert here == ["a", "runs", "summary.json"]

    def test_fetch_refuses_a_missing_folder(self, tmp_path: Path) -> None:
        folder = str(tmp_path / "none")
        with pytest.raises(RefusedError, match=f"^job a: .*no folder {folder}.*--folder"):
            fetch.read_archive(run_fetch_program(folder, "9999"), folder, "a", 1.0)

    def test_fetch_error_says_to_fetch_again_if_no_job_server_answers(self) -> None:
        async def tail(job: str) -> AsyncIterator[str]:
            raise RuntimeError(f"Job {job} does not exist")
            yield ""

        details = SimpleNamespace(runtime_env={}, driver_agent_http_address=None)
        client = SimpleNamespace(
            submit_job=lambda **_: "b", tail_job_logs=tail, get_address=lambda: "http://head:8265"
        )
        with pytest.raises(RunStoppedError, match=r"job b, which packs.*raysim fetch"):
            fetch._run_on_node_of(client, details, "true")

    def test_printed_job_output_omits_log_lines_of_ray(self) -> None:
        lines = "2026-01-01 10:00:00,123\tINFO job_manager.py:581 -- Runtime env is setting up.\n"
        lines += "Running entrypoint for job raysubmit_a: python -m raysim run\n"
        output = "methods   fedavg\nround 1\n"
        assert job_server.RAY_LINES.sub("", lines + output) == output


def run_fetch_program(*arguments: str) -> str:
    """Run the program that packs a folder on a node; return everything that it prints."""
    command = [sys.executable, "-c", fetch.PROGRAM, *arguments]
    ran = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return ran.stdout


class UnstableClient:
    """A client of a job server whose connection breaks after some parts of the log."""

    LOG = ("round 1\n", "round", " 2\n", "round 3\n")

    def __init__(self, breaks_after: Sequence[int | None]):
        self._breaks_after = iter(breaks_after)

    def get_address(self) -> str:
        return "http://head:8265"

    async def tail_job_logs(self, job: str) -> AsyncIterator[str]:
        end = next(self._breaks_after)
        for part in self.LOG[:end]:
            yield part
        if end is not None:
            raise ConnectionError("broke")


# --- jobs on a cluster --------------------------------------------------------------------------
@dataclass
class Cluster:
    """A Ray cluster that requires a token, and a process whose commands use this cluster.

    url: the address of the head node, for `--address`.
    env: the head node's environment variables; they name the file with the token.
    process: runs the `raysim` commands.
    """

    url: str
    env: dict[str, str]
    # One process for all commands, because importing PyTorch and Ray each time would take long.
    process: ProcessPoolExecutor

    def raysim(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command of raysim to its end."""
        return self.process.submit(run_command, words).result(timeout=1800)

    def submit(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run `raysim submit` to its end."""
        return self.raysim("submit", "--address", self.url, *words)


def run_command(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a command of raysim in this process; return its exit status and what it printed."""
    output, errors = io.StringIO(), io.StringIO()
    with redirect_stdout(output), redirect_stderr(errors):
        status = cli.call(words)
    return subprocess.CompletedProcess(words, status, output.getvalue(), errors.getvalue())


def set_environment(environment: Mapping[str, str]) -> None:
    """Replace the environment variables of this process, and change to the folder `ROOT`."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)


def free_ports(count: int) -> list[int]:
    """Return ports that are free, outside of those that Ray gives its workers."""
    ports: list[int] = []
    for port in range(21000 + os.getpid() % 4000, 32000):
        with socket.socket() as probe:
            if len(ports) < count and probe.connect_ex(("127.0.0.1", port)):
                ports.append(port)
    return ports


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return not probe.connect_ex(("127.0.0.1", port))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    # The paths of Ray's sockets may have 107 characters, which is too few for pytest's own folders.
    with tempfile.TemporaryDirectory(prefix="r", ignore_cleanup_errors=True) as folder:
        yield from start_cluster(Path(folder))


def start_cluster(folder: Path) -> Iterator[Cluster]:
    token = folder / "token"
    token.write_text(secrets.token_hex(32))
    dropped = ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "RAY_AUTH_TOKEN", "PYTHONPATH")
    env = {key: value for key, value in os.environ.items() if key not in dropped}
    env |= {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    }
    env["PATH"] = f"{BIN}{os.pathsep}{env['PATH']}"
    dashboard, agent, client = free_ports(3)
    words = [
        str(BIN / "ray"),
        "start",
        "--head",
        "--port=0",
        "--num-cpus=1",
        "--object-store-memory=100000000",
        f"--dashboard-port={dashboard}",
        f"--dashboard-agent-listen-port={agent}",
        f"--ray-client-server-port={client}",
        f"--temp-dir={folder}",
        "--disable-usage-stats",
    ]
    url = f"http://127.0.0.1:{dashboard}"
    for _ in range(5):  # on a busy machine Ray may give a node up that is about to start
        started = start(words, env, folder / "log")
        if started:
            break
    assert started, (folder / "log").read_text()
    try:
        wait_until(
            lambda: answers(url, token.read_text()) and is_listening(agent)
        )  # a job needs both
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, context, set_environment, (env,)) as process:
            yield Cluster(url, env, process)
    finally:
        end(started)


def start(words: list[str], env: dict[str, str], log: Path) -> int:
    """Start a head node; return the number of its process group, 0 if it did not start.

    words, env: the command that starts the head node, with environment variables.
    log: the file for the command's output.
    """
    with log.open("w") as stream:
        starting = subprocess.Popen(
            words, env=env, stdout=stream, stderr=stream, start_new_session=True
        )
    try:
        if starting.wait(1800) == 0:
            return starting.pid
    except BaseException:
        end(starting.pid)
        raise
    end(starting.pid)
    return 0


def end(group: int) -> None:
    """End a group of processes; kill those that do not end by themselves."""
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGTERM)
        for _ in range(50):
            time.sleep(0.1)
            os.killpg(group, 0)
        os.killpg(group, signal.SIGKILL)


def wait_until(condition: Callable[[], bool], timeout_s: float = 1800) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.2)


def answers(url: str, token: str) -> bool:
    request = urllib.request.Request(
        f"{url}/api/jobs/", headers={"Authorization": f"Bearer {token}"}
    )
    try:
        return bool(urllib.request.urlopen(request, timeout=60).status == 200)
    except (OSError, urllib.error.URLError):
        return False


@dataclass
class Submitted:
    """A job on the Ray cluster that ended without an error.

    package: the folder from `raysim new`.
    out: the folder that the job's run wrote.
    job: the job's name on the cluster.
    lines: the lines that `raysim submit` printed.
    """

    package: Path
    out: Path
    job: str
    lines: list[str]


FRESH = ("--allow", "fresh", *(f"{group}=fresh" for group in GROUPS), "rounds=2", "tracking=none")


@pytest.fixture(scope="module")
def submitted(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Submitted:
    """Submit a run that uses all parts of a package from `raysim new`.

    Several tests look at this one run.
    """
    folder = tmp_path_factory.mktemp("submitted")
    assert cli.call(["new", str(folder / "fresh")]) == 0
    package = folder / "fresh"
    out = folder / "on the node" / "first"
    words = ("--with", str(package / "fresh"), "run", *FRESH, "runtime.workers=1", f"out={out}")
    ran = cluster.submit(*words)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    job = re.search(r"raysim fetch (\S+) --address", ran.stdout)
    assert job is not None, ran.stdout
    return Submitted(package, out, job[1], ran.stdout.splitlines())


def test_ray_job_submit_executes_a_run(cluster: Cluster, tmp_path: Path) -> None:
    out = tmp_path / "run"
    run = shlex.join(["raysim", "run", "runtime=inprocess", *SMALL, f"out={out}"])
    command = [str(BIN / "ray"), "job", "submit", "--address", cluster.url, "--working-dir", "."]
    command += ["--", "sh", "-c", f"ls && exec {run}"]
    ran = subprocess.run(command, env=cluster.env, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert json.loads((out / "summary.json").read_text())["rounds"] == 2
    listed = set(ran.stdout.splitlines())
    assert {"raysim", "conf", "pyproject.toml"} <= listed and not {
        "tests",
        "jobs",
        "notebooks",
    } & listed, ran.stdout


def test_submit_shows_the_output_of_the_run(submitted: Submitted) -> None:
    lines = submitted.lines
    assert lines[0].startswith("uploading ") and " MB (raysim " in lines[0]
    output = "\n".join(lines)
    assert "job_manager" not in output and "Running entrypoint" not in output, (
        "Ray's own lines say nothing"
    )
    assert "round 2/2" in output and "results are in" in lines[-3]
    assert lines[-1].startswith(f"bring {submitted.out} to this machine with: raysim fetch ")


def test_submitted_run_with_a_user_package_is_bit_identical_to_a_local_run(
    submitted: Submitted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(submitted.package)
    assert cli.call(["run", *FRESH, "runtime=inprocess", "out=here", "--quiet"]) == 0
    here, there = (
        json.loads((out / "summary.json").read_text()) for out in (Path("here"), submitted.out)
    )
    assert (there["methods"], there["rounds"]) == (["fresh", "fresh_means"], 2)
    for checksum in ("model_sha256", "state_sha256"):
        assert here[checksum] == there[checksum]
    assert (submitted.out / "best.txt").is_file()


def test_fetch_copies_the_results_of_a_job(
    cluster: Cluster, submitted: Submitted, tmp_path: Path
) -> None:
    here = tmp_path / "here"
    words = ("fetch", submitted.job, str(here), "--address", cluster.url)
    fetched = cluster.raysim(*words)
    assert fetched.returncode == 0, fetched.stderr
    names = {path.name for path in submitted.out.iterdir()}
    assert {path.name for path in here.iterdir()} == names - {"checkpoints"}
    summary = (here / "summary.json").read_bytes()
    assert summary == (submitted.out / "summary.json").read_bytes()
    package = str(submitted.package)
    too_large = cluster.raysim(*words, "--folder", package, "--limit", "0.0001")
    assert too_large.returncode == 2
    assert "--limit" in too_large.stderr and package in too_large.stderr
    unknown = cluster.raysim("fetch", "raysubmit_none", "--address", cluster.url)
    assert unknown.returncode == 2 and "raysubmit_none" in unknown.stderr


def test_submitted_run_that_fails_exits_with_1(cluster: Cluster, tmp_path: Path) -> None:
    methods = tmp_path / "mine" / "conf" / "method"
    methods.mkdir(parents=True)
    (tmp_path / "mine" / "__init__.py").write_text(MINE)
    (methods / "broken.yaml").write_text("broken:\n  _target_: mine.Broken\n")
    package = ("--with", str(tmp_path / "mine"), "run", "--allow", "mine", "--conf", "mine/conf")
    words = ("runtime=inprocess", *SMALL, "method=[broken]", f"out={tmp_path / 'run'}")
    ran = cluster.submit(*package, *words)
    assert ran.returncode == 1 and "no gradient today" in ran.stdout, ran.stdout + ran.stderr


def test_connection_error_mentions_the_token_if_it_is_wrong_or_missing(
    cluster: Cluster, tmp_path: Path
) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text(secrets.token_hex(32))
    text = connection_error(cluster.url, cluster.env | {"RAY_AUTH_TOKEN_PATH": str(wrong)})
    assert f"RAY_AUTH_TOKEN_PATH={wrong}" in text
    text = connection_error(cluster.url, cluster.env | {"RAY_AUTH_MODE": "disabled"})
    assert f"--address {cluster.url}" in text and "token" in text


# --- the files in jobs/ -------------------------------------------------------------------------
def test_cluster_file_fits_the_schema_of_ray_and_uses_a_token() -> None:
    import jsonschema
    import ray

    schema = json.loads((Path(ray.__file__).parent / "autoscaler" / "ray-schema.json").read_text())
    config = yaml.safe_load((ROOT / "jobs" / "cluster.yaml").read_text())
    jsonschema.validate(config, schema)
    starts = [
        line
        for key in ("head", "worker")
        for line in config[f"{key}_start_ray_commands"]
        if "ray start" in line
    ]
    assert len(starts) == 2 and all(line.startswith("RAY_AUTH_MODE=token ") for line in starts)
    assert all("PATH=$HOME/raysim-env/bin:$PATH " in line for line in starts), "a job's Python"
    assert "~/.ray/auth_token" in config["file_mounts"]
    assert "**/data" not in config["rsync_exclude"], "raysim/data is a part of the package"


def rayjob() -> tuple[dict[str, Any], dict[str, Any]]:
    schema = json.loads((Path(__file__).parent / "rayjob.json").read_text())
    return yaml.safe_load((ROOT / "jobs" / "rayjob.yaml").read_text()), schema


def test_rayjob_file_fits_the_schema_of_kuberay_which_rejects_unknown_keys() -> None:
    import jsonschema

    config, schema = rayjob()
    validator_class = jsonschema.validators.validator_for(schema)
    validator_class.check_schema(schema)
    validator = validator_class(schema)
    validator.validate(config)
    for place in ("spec", "spec.rayClusterSpec", "spec.rayClusterSpec.headGroupSpec.template.spec"):
        mapping = config
        for name in place.split("."):
            mapping = mapping[name]
        mapping["workers"] = 2
        with pytest.raises(jsonschema.ValidationError, match="workers"):
            validator.validate(config)
        del mapping["workers"]


def test_rayjob_file_requires_an_authentication_token_and_starts_a_valid_run() -> None:
    config, _ = rayjob()
    spec = config["spec"]
    cluster = spec["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token", "secretName": "raysim-token"}
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for group in groups:
        pod = group["template"]["spec"]
        mounted = {
            mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]
        }
        assert mounted == {volume["name"] for volume in pod["volumes"]} == {"shared", "shm"}
    words = shlex.split(spec["entrypoint"])
    assert words[:2] == ["raysim", "run"] and compose(words[2:])["runtime"]["name"] == "cluster"
    assert yaml.safe_load(spec["runtimeEnvYAML"]).keys() == {"env_vars"}


def test_slurm_script_starts_all_ray_processes_with_the_same_token(
    tmp_path: Path,
) -> None:
    """Replace Slurm's and Ray's programs by ones that print their arguments."""
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    (programs / "activate").write_text(f'export PATH="{programs}:$PATH"\n')
    stand_ins = {
        "srun": 'echo "srun $*"; while [ "$1" != ray ]; do shift; done; "$@"',
        "scontrol": "echo node-7; echo node-8",
        "ray": 'echo "ray $*"; echo "$RAY_AUTH_MODE $(wc -c < "$RAY_AUTH_TOKEN_PATH")"; '
        'ls -l "$RAY_AUTH_TOKEN_PATH"',
    }
    for name, text in stand_ins.items():
        (programs / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (programs / name).chmod(0o755)
    (programs / "python").symlink_to(sys.executable)
    slurm = {
        "JOB_NODELIST": "node-[7-8]",
        "NNODES": "2",
        "CPUS_PER_TASK": "16",
        "SUBMIT_DIR": str(tmp_path),
    }
    environment = {f"SLURM_{key}": value for key, value in slurm.items()} | {
        "PATH": os.environ["PATH"]
    }
    script = ["bash", str(ROOT / "jobs" / "slurm.sh")]
    ran = subprocess.run(
        [*script, "run", "method=fedprox"], env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    called = (
        "ray symmetric-run --address node-7:6379 --min-nodes 2 --num-cpus 16 --disable-usage-stats"
    )
    command = "-- raysim run method=fedprox runtime=cluster"
    lines = ran.stdout.splitlines()
    assert lines[:3] == [
        f"srun --nodes=2 --ntasks=2 {called} {command}",
        f"{called} {command}",
        "token 65",
    ]
    assert lines[3].startswith("-rw-------")
    assert not list(tmp_path.glob(".ray-token-*"))
    named = subprocess.run(
        [*script, "run", "runtime=inprocess", "out=a b"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert named.stdout.splitlines()[1] == f"{called} -- raysim run runtime=inprocess out=a b", (
        "an override of the runtime counts"
    )
    nothing = subprocess.run(script, env=environment, capture_output=True, text=True)
    assert nothing.returncode == 2 and "name a command" in nothing.stderr


def test_submit_commands_in_the_guide_are_valid() -> None:
    text = (ROOT / "jobs" / "README.md").read_text().replace("\\\n", " ")
    lines = [
        line.split(" # ")[0]
        for line in text.splitlines()
        if line.startswith(("raysim submit", "ray job submit"))
    ]
    assert len(lines) >= 6
    for line in lines:
        words = shlex.split(line)
        inner = words[words.index("--") + 1 :] if words[0] == "ray" else words
        inner = inner[1:] if inner[0] == "raysim" else inner[inner.index("raysim") + 1 :]
        arguments = cli.parse_arguments(inner)
        assert arguments.command in ("run", "sweep", "study", "submit")
