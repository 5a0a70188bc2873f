"""Submitting: what is packed and refused here, what a real cluster with a token makes of it, and the files in jobs/."""

from __future__ import annotations

import http.server
import json
import os
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from raysim import cli
from raysim.commands.submit.package import (
    Command,
    check_command,
    check_size,
    pack,
    pieces,
    runtime_env,
    size,
    with_source,
)
from raysim.experiment.compose import compose
from raysim.primitives.commit import source_commit
from raysim.primitives.errors import Refused

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
ALONE = (
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
RUN = ("runtime.workers=1", *ALONE)
MINE = """
from raysim.api.method import Method


class Broken(Method):
    name = "broken"
    paper = "a test"

    def gradient(self, job, grad, at):
        raise ValueError("no gradient today")


class Harmless(Method):
    name = "harmless"
    paper = "a test"
"""


# --- the package ----------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_the_package_is_what_a_job_needs_and_nothing_else(tmp_path: Path) -> None:
    pack(pieces(), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "LICENSE",
        "README.md",
        "conf",
        "pyproject.toml",
        "raysim",
    ]
    assert not (tmp_path / "jobs").exists()
    program = (
        "import raysim.experiment.compose as c; "
        "from raysim.primitives.files import conf_folder; "
        "print(c.__file__, conf_folder(), c.compose(['rounds=7'])['rounds'])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert ran.stdout.split() == [
        str(tmp_path / "raysim" / "experiment" / "compose.py"),
        str(tmp_path / "conf"),
        "7",
    ]


def test_hidden_files_and_byte_code_stay_behind(tmp_path: Path) -> None:
    for name in (
        "mine/a.py",
        "mine/.secret",
        "mine/.git/config",
        "mine/__pycache__/a.pyc",
        "mine/deep/b.yaml",
    ):
        (path := tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    names = [piece.name for piece in pieces([tmp_path / "mine"])]
    assert [name for name in names if name.startswith("mine/")] == ["mine/a.py", "mine/deep/b.yaml"]
    assert not [name for name in names if "pycache" in name or "/." in name]


def test_links_out_of_a_packed_folder_are_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("hunter2")
    (tmp_path / "mine/sub").mkdir(parents=True)
    (tmp_path / "mine/a.py").write_text("")
    (tmp_path / "mine/b.py").symlink_to("a.py")
    assert "mine/b.py" in {piece.name for piece in pieces([tmp_path / "mine"])}
    for target in (tmp_path / "secret", "../../secret"):
        (link := tmp_path / "mine/sub/c.py").symlink_to(target)
        with pytest.raises(
            Refused, match=f"{link} links out of {tmp_path / 'mine'}, to {tmp_path / 'secret'}"
        ):
            pieces([tmp_path / "mine"])
        link.unlink()
    (tmp_path / "mine/d").symlink_to(tmp_path)
    with pytest.raises(Refused, match="mine/d links to a folder"):
        pieces([tmp_path / "mine"])


@pytest.mark.parametrize("given", ["loop", "~nosuchuser", "a\0b"])
def test_what_is_no_path_cannot_be_packed(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    with pytest.raises(Refused):
        pieces([given])
    with pytest.raises(Refused):
        runtime_env(given)


def test_a_package_that_is_too_large_names_its_largest_files(tmp_path: Path) -> None:
    (mine := tmp_path / "mine").mkdir()
    (mine / "weights.bin").write_bytes(bytes(3_000_000))
    (mine / "small.py").write_text("x = 1\n")
    found = pieces([mine])
    assert "mine 3.0 MB" in size(found)
    check_size(found, 50)
    with pytest.raises(
        Refused,
        match=r"more than --limit 2 MB; its largest files are mine/weights.bin \(3.0 MB\).*--limit",
    ):
        check_size(found, 2)


def test_what_is_added_must_exist_under_a_name_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="--with nowhere does not exist"):
        pieces(["nowhere"])
    (tmp_path / "conf").mkdir()
    with pytest.raises(Refused, match="another conf in the package: rename it"):
        pieces([tmp_path / "conf"])


# --- the command ----------------------------------------------------------------------------------------------------
def command(*words: str, **more: Any) -> Command:
    return Command(words, words[1:], **more)


def test_a_command_joins_the_cluster_unless_it_names_a_runtime_or_is_continued() -> None:
    joined = command("run", "out=/s/a", "local.lr='tag(log, interval(1, 2))'")
    assert shlex.split(joined.entrypoint) == [
        "python",
        "-m",
        "raysim",
        "run",
        "runtime=cluster",
        *joined.words[1:],
    ]
    for word in ("runtime=inprocess", "resume=latest"):
        assert "runtime=cluster" not in command("study", "out=/s/a", word).entrypoint


def test_results_must_outlive_the_job() -> None:
    for words in (
        ("run",),
        ("run", "out=runs/a"),
        ("sweep", "sweep=fedbr"),
        ("study", "resume=latest", "out=a"),
    ):
        with pytest.raises(
            Refused, match=r"(lies|without out=DIR results lie) in the job's own folder"
        ):
            check_command(command(*words), pieces())
    for words in (
        ("run", "out=/shared/a"),
        ("run", "out='~/a'"),
        ("run", "tracking.uri=http://mlflow:5000"),
        ("run", "resume=/shared/a/checkpoints/round-3"),
        ("study", "out='/shared/a'"),
    ):
        check_command(command(*words), pieces())


def test_a_typing_mistake_is_answered_before_anything_is_uploaded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.call(["submit", "run", "out=/s/a", "roundz=3"]) == 2
    assert "did you mean rounds?" in capsys.readouterr().err
    assert cli.call(["submit", "bench"]) == 2
    assert "submit bench: what can be submitted is run, study, sweep" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        cli.call(["submit", "--", "run", "out=/s/a", "--quite"])
    assert ended.value.code == 2


@pytest.mark.parametrize(
    "words",
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
def test_a_wrong_value_is_answered_before_anything_is_uploaded(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.call(["submit", "run", "out=/s/a", *words]) == 2
    told = capsys.readouterr()
    assert told.err.startswith(f"raysim: {words[-1]} must be ") and not told.out


def test_what_only_the_nodes_have_is_not_judged_here(tmp_path: Path) -> None:
    words = [
        "run",
        "out=/s/a",
        "device=cuda",
        "data=parquet",
        "data.root=/nowhere",
        "model.norm=group",
    ]
    check_command(command(*words), pieces())
    text = "mine: {_target_: ofnodes.Mine, mu: 1}\n"
    (tmp_path / "method").mkdir()
    (tmp_path / "method" / "mine.yaml").write_text(text)
    check_command(command("run", "out=/s/a", "method=mine", conf=[str(tmp_path)]), pieces())


def test_of_a_jobs_output_rays_own_first_lines_are_left_out() -> None:
    from raysim.commands.submit.job_server import OF_RAY

    rays = "2026-01-01 10:00:00,123\tINFO job_manager.py:581 -- Runtime env is setting up.\n"
    rays += "Running entrypoint for job raysubmit_a: python -m raysim run\n"
    assert OF_RAY.sub("", f"{rays}methods   fedavg\nround 1\n") == "methods   fedavg\nround 1\n"


def test_folders_of_options_must_be_packed() -> None:
    with pytest.raises(Refused, match="--conf mine/conf is not in the package: add --with mine"):
        check_command(command("run", "out=/s/a", conf=["mine/conf"]), pieces())


def test_the_jobs_environment_is_read_from_a_file_without_a_working_directory(
    tmp_path: Path,
) -> None:
    assert runtime_env(None) == {}
    found = runtime_env(str(ROOT / "jobs" / "runtime_env.yaml"))
    assert (
        found["pip"] == ["${RAY_RUNTIME_ENV_CREATE_WORKING_DIR}[sweep]"]
        and "RAYSIM_CACHE" in found["env_vars"]
    )
    for text, reason in (
        ("working_dir: .", "leave it out"),
        ("- a", "no keys"),
        ("a: [", "no YAML"),
    ):
        (path := tmp_path / "env.yaml").write_text(text)
        with pytest.raises(Refused, match=reason):
            runtime_env(str(path))


# --- the job server, or none ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("given", "url"),
    [
        (None, "http://127.0.0.1:8265"),
        ("auto", "http://127.0.0.1:8265"),
        ("head", "http://head:8265"),
        ("head:8000", "http://head:8000"),
        ("https://user@head/", "https://head:443"),
    ],
)
def test_a_job_server_is_named_in_short(
    given: str | None, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from raysim.commands.submit import job_server as jobs

    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    assert jobs.address(given) == url
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://other:1")
    assert jobs.address(given) == (url if given else "http://other:1")


@pytest.mark.parametrize("given", ["ray://head:10001", "http://", "head:port"])
def test_what_is_no_job_server_is_refused(given: str) -> None:
    from raysim.commands.submit import job_server as jobs

    with pytest.raises(ValueError, match="name it as http://HOST:8265"):
        jobs.address(given)


def test_one_sentence_where_no_cluster_answers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from raysim.commands.submit import job_server as jobs

    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
    with pytest.raises(ValueError, match="no cluster answers there"):
        jobs.connect(url := f"http://127.0.0.1:{free_ports(1)[0]}")
    assert cli.call(["submit", "--address", url, "run", "out=/s/a"]) == 2
    told = capsys.readouterr()
    assert "no cluster answers there" in told.err and not told.out, "nothing is uploaded"


@pytest.mark.slow  # Ray keeps the token that a process found first, and this one may have found another
@pytest.mark.parametrize(
    ("token", "said"),
    [("a" * 32, "what answers there is no Ray job server"), ("", "this process has none: put the")],
)
def test_one_sentence_where_something_else_answers_or_no_token_is_there(
    token: str, said: str, tmp_path: Path
) -> None:
    class Other(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)

        def log_message(self, *_: object) -> None: ...

    server = http.server.HTTPServer(("127.0.0.1", 0), Other)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    env = {
        name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH_TOKEN")
    }
    env |= {"HOME": str(tmp_path), "RAY_AUTH_MODE": "token"} | (
        {"RAY_AUTH_TOKEN": token} if token else {}
    )
    words = ["submit", "--address", f"http://127.0.0.1:{server.server_port}", "run", "out=/s/a"]
    try:
        ran = subprocess.run(
            [sys.executable, "-m", "raysim", *words], env=env, capture_output=True, text=True
        )
        assert ran.returncode == 2 and said in ran.stderr and "Traceback" not in ran.stderr, (
            ran.stderr
        )
    finally:
        server.shutdown()
        server.server_close()


def test_a_token_file_that_is_not_there_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from raysim.commands.submit import job_server as jobs

    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(ValueError, match="none holds no token"):
        jobs.connect("http://127.0.0.1:1")


@pytest.mark.parametrize(
    ("exit_code", "status", "sentence"),
    [
        (1, 1, ""),
        (130, 130, ""),
        (
            137,
            137,
            "ended by signal 9, most often for want of memory: submitted again with resume=latest, it goes on",
        ),
        (-15, 143, "ended by signal 15: submitted again with resume=latest, it goes on"),
    ],
)
def test_a_job_that_could_say_nothing_at_its_end_is_said_to_be_killed(
    exit_code: int, status: int, sentence: str
) -> None:
    from ray.job_submission import JobStatus

    from raysim.commands.submit import job_server as jobs

    details = SimpleNamespace(status=JobStatus.FAILED, driver_exit_code=exit_code, message="")
    client: Any = SimpleNamespace(get_job_info=lambda job: details)
    assert jobs.status(client, "a") == (status, sentence and f"job a was {sentence}")


def test_a_job_is_told_the_commit_that_is_packed_beside_what_the_user_gives() -> None:
    given = {"pip": ["x"], "env_vars": {"A": "1"}}
    env = with_source(given)
    assert env["pip"] == ["x"] and env["env_vars"] == {
        "RAYSIM_SOURCE": json.dumps(source_commit()),
        "A": "1",
    }
    assert given["env_vars"] == {"A": "1"} and with_source({})["env_vars"].keys() == {
        "RAYSIM_SOURCE"
    }


# --- a real cluster -------------------------------------------------------------------------------------------------
@dataclass
class Cluster:
    """A head node of its own, with a token."""

    url: str
    env: dict[str, str]
    token: Path

    def ran(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        """A program of this environment, to its end."""
        program = [str(BIN / words[0]), *words[1:]]
        return subprocess.run(
            program, env=self.env | env, cwd=ROOT, capture_output=True, text=True, timeout=1800
        )

    def submit(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        """`raysim submit`, to its end."""
        return self.ran("raysim", "submit", "--address", self.url, *words, **env)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, outside those that Ray gives its workers."""
    found: list[int] = []
    for port in range(21000 + os.getpid() % 4000, 32000):
        with socket.socket() as probe:
            if len(found) < count and probe.connect_ex(("127.0.0.1", port)):
                found.append(port)
    return found


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return not probe.connect_ex(("127.0.0.1", port))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("r")
    (token := folder / "token").write_text(secrets.token_hex(32))
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
        str(BIN / "ray"), "start", "--head", "--port=0", "--num-cpus=3", "--object-store-memory=100000000",
        f"--dashboard-port={dashboard}", f"--dashboard-agent-listen-port={agent}",
        f"--ray-client-server-port={client}", f"--temp-dir={folder}", "--disable-usage-stats",
    ]  # fmt: skip
    url = f"http://127.0.0.1:{dashboard}"
    for _ in range(5):  # on a busy machine Ray may give a node up that is about to start
        if started := start(words, env, folder / "log"):
            break
    assert started, (folder / "log").read_text()
    try:
        until(lambda: answers(url, token.read_text()) and listens(agent))  # a job needs both
        yield Cluster(url, env, token)
    finally:
        end(started)


def start(words: list[str], env: dict[str, str], log: Path) -> int:
    """A head node that runs: the group of its processes, which are in a session of their own; else 0."""
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
    """These processes, and no others; what does not end by itself is killed, so that nothing outlives the tests."""
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGTERM)
        for _ in range(50):
            time.sleep(0.1)
            os.killpg(group, 0)
        os.killpg(group, signal.SIGKILL)


def until(condition: Callable[[], bool], seconds: float = 1800) -> None:
    """Wait for another process."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.2)


def answers(url: str, token: str) -> bool:
    request = urllib.request.Request(
        f"{url}/api/jobs/", headers={"Authorization": f"Bearer {token}"}
    )
    try:
        return bool(urllib.request.urlopen(request, timeout=60).status == 200)
    except (OSError, urllib.error.URLError):
        return False


@pytest.fixture
def mine(tmp_path: Path) -> tuple[str, ...]:
    """The options that pack two methods of a user's own."""
    (methods := tmp_path / "mine" / "conf" / "method").mkdir(parents=True)
    (tmp_path / "mine" / "__init__.py").write_text(MINE)
    for name in ("broken", "harmless"):
        (methods / f"{name}.yaml").write_text(f"{name}:\n  _target_: mine.{name.capitalize()}\n")
    return "--with", str(tmp_path / "mine"), "run", "--allow", "mine", "--conf", "mine/conf"


def test_ray_job_submit_carries_a_run_to_its_result(cluster: Cluster, tmp_path: Path) -> None:
    out = tmp_path / "run"
    run = shlex.join(["raysim", "run", "runtime=inprocess", *ALONE, f"out={out}"])
    words = [
        "job",
        "submit",
        "--address",
        cluster.url,
        "--working-dir",
        ".",
        "--",
        "sh",
        "-c",
        f"ls && exec {run}",
    ]
    ran = cluster.ran("ray", *words)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert json.loads((out / "summary.json").read_text())["rounds"] == 2
    listed = set(ran.stdout.splitlines())
    assert {"raysim", "conf", "pyproject.toml"} <= listed and not {
        "tests",
        "jobs",
        "notebooks",
    } & listed, ran.stdout


def test_the_helper_shows_a_run_with_the_users_own_code_on_every_node_and_returns_its_status(
    cluster: Cluster, tmp_path: Path, mine: tuple[str, ...]
) -> None:
    ran = cluster.submit(*mine, *RUN, "method=[harmless]", f"out={tmp_path / 'run'}")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    lines = ran.stdout.splitlines()
    assert lines[0].startswith("to upload: ") and " MB (raysim " in lines[0]
    assert "job_manager" not in ran.stdout and "Running entrypoint" not in ran.stdout, (
        "Ray's own lines say nothing"
    )
    assert "round 2/2" in ran.stdout and "results are in" in lines[-2]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["rounds"] == 2


def test_what_raysim_new_wrote_runs_on_a_cluster_by_its_words(
    cluster: Cluster, tmp_path: Path
) -> None:
    assert cluster.ran("raysim", "new", str(tmp_path / "fresh")).returncode == 0
    words = [
        f"{group}=fresh"
        for group in ("method", "model", "data", "partition", "schedule", "fleet", "observer")
    ]
    package = ("--with", str(tmp_path / "fresh" / "fresh"), "run", "--allow", "fresh")
    few = ("rounds=2", "tracking=none", "runtime.workers=1", f"out={tmp_path / 'run'}")
    ran = cluster.submit(*package, *words, *few)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["methods"] == ["fresh"]
    assert (tmp_path / "run" / "best.txt").is_file()


def test_a_run_that_the_cluster_refuses_ends_with_2(cluster: Cluster, tmp_path: Path) -> None:
    ran = cluster.submit("run", *RUN, "runtime.workers=500", f"out={tmp_path / 'run'}")
    assert ran.returncode == 2 and "too little CPU" in ran.stdout, ran.stdout + ran.stderr
    assert not (tmp_path / "run").exists()


def test_a_run_that_fails_ends_with_1(
    cluster: Cluster, tmp_path: Path, mine: tuple[str, ...]
) -> None:
    ran = cluster.submit(
        *mine, "runtime=inprocess", *ALONE, "method=[broken]", f"out={tmp_path / 'run'}"
    )
    assert ran.returncode == 1 and "no gradient today" in ran.stdout, ran.stdout + ran.stderr


def test_a_wrong_token_and_none_are_each_one_sentence(cluster: Cluster, tmp_path: Path) -> None:
    (wrong := tmp_path / "wrong").write_text(secrets.token_hex(32))
    ran = cluster.submit("run", *RUN, "out=/s/a", RAY_AUTH_TOKEN_PATH=str(wrong))
    assert (
        ran.returncode == 2 and f"refuses the token in RAY_AUTH_TOKEN_PATH={wrong}" in ran.stderr
    ), ran.stderr
    assert "to upload" not in ran.stdout
    ran = cluster.submit("run", *RUN, "out=/s/a", RAY_AUTH_MODE="disabled")
    assert ran.returncode == 2 and "asks for its token, and this process has none" in ran.stderr, (
        ran.stderr
    )


# --- the files in jobs/ ---------------------------------------------------------------------------------------------
def test_the_cluster_file_is_what_ray_up_takes_and_keeps_the_token_on() -> None:
    import jsonschema
    import ray

    schema = json.loads((Path(ray.__file__).parent / "autoscaler" / "ray-schema.json").read_text())
    found = yaml.safe_load((ROOT / "jobs" / "cluster.yaml").read_text())
    jsonschema.validate(found, schema)
    starts = [
        line
        for key in ("head", "worker")
        for line in found[f"{key}_start_ray_commands"]
        if "ray start" in line
    ]
    assert len(starts) == 2 and all(line.startswith("RAY_AUTH_MODE=token ") for line in starts)
    assert "~/.ray/auth_token" in found["file_mounts"]
    assert "**/data" not in found["rsync_exclude"], "raysim/data is a part of the package"


def rayjob() -> tuple[dict[str, Any], dict[str, Any]]:
    schema = json.loads((Path(__file__).parent / "rayjob.json").read_text())
    return yaml.safe_load((ROOT / "jobs" / "rayjob.yaml").read_text()), schema


@pytest.mark.parametrize(
    "place", ["spec", "spec.rayClusterSpec", "spec.rayClusterSpec.headGroupSpec.template.spec"]
)
def test_the_rayjob_keeps_to_kuberays_schema(place: str) -> None:
    """A key that does not exist is found wherever it stands, so the schema sees all of the file."""
    import jsonschema

    found, schema = rayjob()
    jsonschema.validate(found, schema)
    node = found
    for name in place.split("."):
        node = node[name]
    node["workers"] = 2
    with pytest.raises(jsonschema.ValidationError, match="workers"):
        jsonschema.validate(found, schema)


def test_the_rayjob_has_a_token_and_a_run_that_exists() -> None:
    found, _ = rayjob()
    spec, cluster = found["spec"], found["spec"]["rayClusterSpec"]
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


def test_the_slurm_script_gives_all_nodes_one_token_and_the_first_one_the_command(
    tmp_path: Path,
) -> None:
    """With stand-ins for Slurm's and Ray's programs, which write down what they were called with."""
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    (programs / "activate").write_text(f'export PATH="{programs}:$PATH"\n')
    stands_in = {
        "srun": 'echo "srun $*"; while [ "$1" != ray ]; do shift; done; "$@"',
        "scontrol": "echo node-7; echo node-8",
        "ray": 'echo "ray $*"; echo "$RAY_AUTH_MODE $(wc -c < "$RAY_AUTH_TOKEN_PATH")"; ls -l "$RAY_AUTH_TOKEN_PATH"',
    }
    for name, text in stands_in.items():
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
    asked = subprocess.run(
        [*script, "run", "method=fedprox"], env=environment, capture_output=True, text=True
    )
    assert asked.returncode == 0, asked.stderr
    called = (
        "ray symmetric-run --address node-7:6379 --min-nodes 2 --num-cpus 16 --disable-usage-stats"
    )
    command = "-- raysim run method=fedprox runtime=cluster"
    lines = asked.stdout.splitlines()
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
        "the words' own counts"
    )
    nothing = subprocess.run(script, env=environment, capture_output=True, text=True)
    assert nothing.returncode == 2 and "name a command" in nothing.stderr


def test_every_submission_in_the_guide_can_be_parsed() -> None:
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
        given = cli._parsed(inner)
        assert given.command in ("run", "sweep", "study", "submit")
