"""`raysim submit`: pack the package and its configuration, send them to a cluster's job server, follow the job.

What a job sees is a folder with `raysim/`, `conf/`, what an installer needs, and what --with names; nothing else of the
folder that one happens to be in.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from raysim.experiment.compose import compose
from raysim.experiment.config_files import to_dict
from raysim.experiment.groups import config_folders, find_groups
from raysim.experiment.plugins import conf_folders_of, installed_packages
from raysim.primitives.commit import SOURCE, source_commit
from raysim.primitives.errors import Refused, errors_as_refusals
from raysim.primitives.files import conf_folder, user_path

COMMANDS = ("run", "study", "sweep")
PROJECT = ("pyproject.toml", "README.md", "LICENSE")  # what building the package takes
MB = 1_000_000
LARGEST = 5  # files that are named when there is too much


# --- the package ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Piece:
    """A file of the package: where it lies, its name there, its bytes."""

    source: Path
    name: str
    size: int


def pieces(extra: Sequence[str | Path] = ()) -> list[Piece]:
    """All files that a job needs: the package, its configuration, and the files and folders in `extra`.

    Hidden files and byte code stay behind. Raises Refused.
    """
    package = Path(__file__).resolve().parents[2]
    found = _below(package)
    if (conf := conf_folder()).parent != package:  # a checkout
        found += _below(conf)
        found += [
            _piece(path, path.name) for name in PROJECT if (path := package.parent / name).is_file()
        ]
    taken = {piece.name.partition("/")[0] for piece in found}
    for given in extra:
        path = Path(os.path.realpath(user_path(given)))
        if not path.exists():
            raise Refused(f"--with {given} does not exist: name a file or a folder that does")
        if path.name in taken:
            raise Refused(
                f"--with {given} would take the place of another {path.name} in the package: rename it"
            )
        taken.add(path.name)
        found += _below(path) if path.is_dir() else [_piece(path, path.name)]
    return found


def _below(root: Path) -> list[Piece]:
    pieces = []
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if not _left_out(name))
        for name in folders:
            if Path(folder, name).is_symlink():
                raise Refused(
                    f"{Path(folder, name)} links to a folder: put the folder there, or name it with --with"
                )
        for name in sorted(files):
            path = Path(folder, name)
            if not _left_out(name) and path.is_file():
                if not path.resolve().is_relative_to(root):
                    raise Refused(
                        f"{path} links out of {root}, to {path.resolve()}: put the file there, or leave it out"
                    )
                pieces.append(_piece(path, str(path.relative_to(root.parent))))
    return pieces


def _left_out(name: str) -> bool:
    return name.startswith(".") or name == "__pycache__" or name.endswith(".pyc")


def _piece(path: Path, name: str) -> Piece:
    return Piece(path, name, path.stat().st_size)


def size(found: Sequence[Piece]) -> str:
    """What there is to upload, in a line: "212 files, 1.6 MB (raysim 1.1 MB, conf 0.5 MB)"."""
    parts: Counter[str] = Counter()
    for piece in found:
        top, nested, _ = piece.name.partition("/")
        parts[top if nested else "single files"] += piece.size
    told = ", ".join(f"{name} {_mb(amount)}" for name, amount in parts.most_common())
    return f"{len(found)} files, {_mb(parts.total())} ({told})"


def check_size(found: Sequence[Piece], limit: float) -> None:
    """Refuse more than `limit` MB, with the names of the largest files."""
    total = sum(piece.size for piece in found)
    if total > limit * MB:
        largest = sorted(found, key=lambda piece: -piece.size)[:LARGEST]
        named = ", ".join(
            f"{piece.name} ({_mb(piece.size)})" for piece in largest if piece.size > total / 100
        )
        raise Refused(
            f"the package has {_mb(total)}, more than --limit {limit:g} MB; its largest files are {named}: keep data "
            f"on storage of the cluster and name it in data.root, or set --limit {-(-total // MB)}"
        )


def _mb(count: int) -> str:
    return f"{count / MB:.1f} MB" if count >= MB / 10 else f"{count / 1000:.0f} kB"


def pack(found: Sequence[Piece], folder: Path) -> None:
    """Copy the files into an empty folder."""
    for piece in found:
        target = folder / piece.name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(piece.source, target)


# --- the job --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Command:
    """What a job runs: `words` as typed; the folders and the file of its --conf and --config."""

    words: Sequence[str]
    overrides: Sequence[str] = ()
    conf: Sequence[str] = ()
    config: str | None = None

    @property
    def given(self) -> dict[str, str]:
        """What is set on the command line, as text."""
        pairs = (word.partition("=") for word in self.overrides)
        return {key: value.strip("\"'") for key, equals, value in pairs if equals}

    @property
    def entrypoint(self) -> str:
        """The command for the cluster's shell. A run joins the cluster, unless it names a runtime or is continued."""
        joins = [] if {"runtime", "resume"} & self.given.keys() else ["runtime=cluster"]
        # Overrides first: argparse takes no more of them after an option.
        return shlex.join(["python", "-m", "raysim", self.words[0], *joins, *self.words[1:]])


def with_plugins(command: Command, extra: Sequence[str | Path]) -> tuple[Command, list[str | Path]]:
    """The command and what is packed besides, with the user's installed packages that the command names parts of.

    The nodes of a cluster do not have them; there they are found in the job's folder, by --allow.
    """
    packed, words = list(extra), list(command.words)
    for package, folder in _named(command).items():
        if folder.name not in {Path(os.path.realpath(user_path(given))).name for given in packed}:
            packed.append(folder)
        if package not in words:
            words += ["--allow", package]
    return replace(command, words=words), packed


def _named(command: Command) -> dict[str, Path]:
    """Installed packages and their folders, of those whose options or classes the command names."""
    folders = {
        name: conf[0].parent for name in installed_packages() if (conf := conf_folders_of([name]))
    }
    if not folders:
        return {}
    files, words = find_groups(config_folders(command.conf)).files, command.given.items()
    options = [
        files.get(group, {}).get(name)
        for group, value in words
        for name in re.findall(r"[\w/.-]+", value)
    ]
    path = user_path(command.config) if command.config else None
    stored = path.read_text() if path and path.is_file() else ""
    return {
        name: folder
        for name, folder in folders.items()
        if any(option and option.is_relative_to(folder) for option in options)
        or f"_target_: {name}." in stored
    }


def check_command(command: Command, found: Sequence[Piece]) -> None:
    """Refuse on this machine what a cluster would refuse, or would lose, later."""
    given, packed = command.given, {piece.name.partition("/")[0] for piece in found}
    tracked = given.get("tracking.uri", "").startswith(("http://", "https://", "databricks"))
    home = given.get("out") or ("" if command.words[0] != "run" else given.get("resume", ""))
    if not home.startswith(("/", "~")) and not tracked:
        what = f"out={given['out']} lies" if "out" in given else "without out=DIR results lie"
        raise Refused(
            f"{what} in the job's own folder, which the cluster deletes: name a folder on "
            "storage that outlives the job, such as out=/shared/runs/first, or set tracking.uri to an MLflow server"
        )
    for option, value in [
        *(("--conf", folder) for folder in command.conf),
        ("--config", command.config),
    ]:
        if value and not value.startswith(("/", "~")) and Path(value).parts[0] not in packed:
            raise Refused(
                f"{option} {value} is not in the package: add --with {Path(value).parts[0]} before the command"
            )
    files = [*command.conf, *([command.config] if command.config else [])]
    if command.words[0] == "run" and all(user_path(path).exists() for path in files):
        config = compose(command.overrides, command.conf, command.config)
        from raysim.experiment.parts import check_values

        check_values(to_dict(config))


def runtime_env(path: str | None) -> dict[str, Any]:
    """What a file says of the job's environment, as Ray reads it: pip, env_vars, ... Raises Refused."""
    if path is None:
        return {}
    if not user_path(path).is_file():
        raise Refused(
            f"--runtime-env {path} is no file: name a YAML file such as jobs/runtime_env.yaml"
        )
    try:
        node = yaml.safe_load(user_path(path).read_text())
    except Exception as error:  # the YAML reader fails in many ways
        raise Refused(f"--runtime-env {path} is no YAML: see jobs/runtime_env.yaml") from error
    if not isinstance(node, Mapping):
        raise Refused(f"--runtime-env {path} holds no keys and values: see jobs/runtime_env.yaml")
    if "working_dir" in node:
        raise Refused(f"--runtime-env {path}: working_dir is what raysim packs: leave it out")
    return dict(node)


def submit(
    command: Command,
    address: str | None = None,
    extra: Sequence[str | Path] = (),
    limit: float = 50.0,
    environment: str | None = None,
    wait: bool = True,
) -> int:
    """Pack, upload, submit, show the job's output as it comes; the job's exit status (0 at once unless wait).

    Raises Refused for what is wrong before the job runs, RunStoppedError where the connection to it breaks, and
    KeyboardInterrupt, after which the job goes on, with how to look at it again.
    """
    command, extra = with_plugins(command, extra)
    found = pieces(extra)
    check_command(command, found)
    env = runtime_env(environment)
    check_size(found, limit)
    from raysim.commands.submit import job_server as jobs

    with errors_as_refusals():
        url = jobs.address(address)
        client = jobs.connect(url)
    _say(f"to upload: {size(found)}")
    with tempfile.TemporaryDirectory(prefix="raysim-") as folder, errors_as_refusals():
        pack(found, Path(folder))
        job = jobs.submit(client, command.entrypoint, {**with_source(env), "working_dir": folder})
    _say(f"job {job} at {url}: {command.entrypoint}")
    if not wait:
        _say(jobs.again(url, job))
        return 0
    try:
        jobs.follow(client, job, _show)
        code, sentence = jobs.status(client, job)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"job {job} goes on: {jobs.again(url, job)}") from None
    if sentence:
        sys.stderr.write(f"raysim: {sentence}\n")
    return code


def with_source(env: Mapping[str, Any]) -> dict[str, Any]:
    """The job's environment, which knows the commit that was packed."""
    return {**env, "env_vars": {SOURCE: json.dumps(source_commit()), **(env.get("env_vars") or {})}}


def _say(text: str) -> None:
    print(text, flush=True)


def _show(text: str) -> None:
    print(text, end="", flush=True)
