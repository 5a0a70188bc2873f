"""Implement `raysim submit`: send a command and its files, and print the output.

A cluster executes the command as a job of Ray. The job's folder has only `raysim/`, `conf/`,
`PROJECT_FILES`, the files of --with, and the plugins that the command uses. If raysim is installed
from a wheel, `conf/` is inside `raysim/`, and `PROJECT_FILES` are missing.
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
from raysim.experiment.many_runs import local_folder
from raysim.experiment.plugins import conf_folders_of, installed_packages
from raysim.primitives.commit import SOURCE, source_commit
from raysim.primitives.errors import RefusedError, errors_as_refusals
from raysim.primitives.files import conf_folder, user_path, without_password

COMMANDS = ("run", "study", "sweep")
PROJECT_FILES = ("pyproject.toml", "README.md", "LICENSE")  # needed to build the package
MB = 1_000_000
MAX_NAMED_FILES = 5  # in the error about a package that is too large
REMOTE_TRACKING = ("http://", "https://", "databricks")


# --- the package --------------------------------------------------------------------------------
@dataclass(frozen=True)
class PackedFile:
    """A file to send to the cluster.

    source: the path of the file on this machine.
    name: the path of the file in the job's folder.
    size_bytes: the size of the file.
    """

    source: Path
    name: str
    size_bytes: int


def find_files(extra: Sequence[str | Path] = ()) -> list[PackedFile]:
    """Return the files to send: raysim, conf, `PROJECT_FILES`, and the files of --with.

    Hidden files and byte code in folders are left out.
    extra: the files and folders of --with.
    Raise `RefusedError` for a path of --with that does not exist or whose name is already used.
    Also raise it if a sent folder has a link to a folder, or a link to a file outside of it.
    """
    package = Path(__file__).resolve().parents[2]
    files = _files_below(package)
    conf = conf_folder()
    if conf.parent != package:  # in a checkout of the repository, conf is next to the package
        files += _files_below(conf)
        for name in PROJECT_FILES:
            if (package.parent / name).is_file():
                files.append(_packed_file(package.parent / name, name))
    names = {file.name.partition("/")[0] for file in files}
    for argument in extra:
        path = Path(os.path.realpath(user_path(argument)))
        if not path.exists():
            raise RefusedError(
                f"--with {argument} does not exist. Give an existing file or folder."
            )
        if path.name in names:
            raise RefusedError(
                f"--with {argument}: another file or folder to upload is also called {path.name}. "
                "Rename one of them."
            )
        names.add(path.name)
        files += _files_below(path) if path.is_dir() else [_packed_file(path, path.name)]
    return files


def _files_below(root: Path) -> list[PackedFile]:
    packed = []
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if not _is_left_out(name))
        for name in folders:
            if Path(folder, name).is_symlink():
                raise RefusedError(
                    f"{Path(folder, name)} is a link to a folder, and links to folders are not "
                    "packed. Replace the link by the folder, or remove the link and name the "
                    "folder with --with."
                )
        for name in sorted(files):
            path = Path(folder, name)
            if _is_left_out(name) or not path.is_file():
                continue
            if not path.resolve().is_relative_to(root):
                raise RefusedError(
                    f"{path} is a link to {path.resolve()}, outside of {root}, and such links "
                    "are not packed. Replace the link by the file, or remove the link."
                )
            packed.append(_packed_file(path, str(path.relative_to(root.parent))))
    return packed


def _is_left_out(name: str) -> bool:
    return name.startswith(".") or name == "__pycache__" or name.endswith(".pyc")


def _packed_file(path: Path, name: str) -> PackedFile:
    return PackedFile(path, name, path.stat().st_size)


def describe_size(files: Sequence[PackedFile]) -> str:
    """Return number and size of the files as text.

    For example "212 files, 1.6 MB (raysim 1.1 MB, conf 0.5 MB)".
    """
    sizes: Counter[str] = Counter()
    for file in files:
        top, slash, _ = file.name.partition("/")
        sizes[top if slash else "single files"] += file.size_bytes
    parts = [f"{name} {_format_size(size)}" for name, size in sizes.most_common()]
    return f"{len(files)} files, {_format_size(sizes.total())} ({', '.join(parts)})"


def check_size(files: Sequence[PackedFile], limit_mb: float) -> None:
    """Raise `RefusedError` if all files together are larger than the limit.

    limit_mb: the limit in MB. The error lists the largest files.
    """
    total = sum(file.size_bytes for file in files)
    if total <= limit_mb * MB:
        return
    largest = sorted(files, key=lambda file: -file.size_bytes)[:MAX_NAMED_FILES]
    named: list[str] = []
    for file in largest:
        if not named or file.size_bytes > total / 100:
            named.append(f"{file.name} ({_format_size(file.size_bytes)})")
    raise RefusedError(
        f"--limit {limit_mb:g} MB: the files to upload have {_format_size(total)} together; the "
        f"largest are {', '.join(named)}. Keep data on storage of the cluster and name it in "
        f"data.root, or set --limit {-(-total // MB)}"
    )


def _format_size(size_bytes: int) -> str:
    if size_bytes >= MB / 10:
        return f"{size_bytes / MB:.1f} MB"
    return f"{size_bytes / 1000:.0f} kB"


def pack(files: Sequence[PackedFile], folder: Path) -> None:
    """Copy files into an empty folder, each to the path `folder / file.name`."""
    for file in files:
        target = folder / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file.source, target)


# --- the job ------------------------------------------------------------------------------------
@dataclass(frozen=True)
class JobCommand:
    """The raysim command that a Ray job executes on the cluster.

    words: the command line, starting with "run", "study" or "sweep".
    overrides: the overrides among the words.
    conf: the folders of --conf.
    config: the file of --config; None without one.
    """

    words: Sequence[str]
    overrides: Sequence[str] = ()
    conf: Sequence[str] = ()
    config: str | None = None

    @property
    def settings(self) -> dict[str, str]:
        """Return the values of the overrides, as text."""
        pairs = (override.partition("=") for override in self.overrides)
        return {key: value.strip("\"'") for key, equals, value in pairs if equals}

    @property
    def entrypoint(self) -> str:
        """Return the command line for the cluster's shell.

        `runtime=cluster` is added if the command has no `runtime=`. It is not added to a study or
        sweep whose only overrides are `out` and `resume`.
        """
        # Such a command cannot start a new study or sweep. The stored plan has a runtime.
        only_continues = self.words[0] != "run" and set(self.settings) == {"out", "resume"}
        joins = [] if only_continues or "runtime" in self.settings else ["runtime=cluster"]
        # Overrides come first: argparse takes no more of them after a flag.
        return shlex.join(["python", "-m", "raysim", self.words[0], *joins, *self.words[1:]])


def with_plugins(
    command: JobCommand, extra: Sequence[str | Path]
) -> tuple[JobCommand, list[str | Path]]:
    """Let a submitted command send and use the plugins that it needs.

    A plugin is an installed package with classes for raysim, which the cluster may lack. Return the
    command with a flag --allow for each plugin that it uses, and the files and folders to send:
    `extra` and the folders of these plugins.
    """
    packed = list(extra)
    words = list(command.words)
    for package, folder in _used_packages(command).items():
        names = {Path(os.path.realpath(user_path(argument))).name for argument in packed}
        if folder.name not in names:
            packed.append(folder)
        if package not in words:
            words += ["--allow", package]
    return replace(command, words=words), packed


def _used_packages(command: JobCommand) -> dict[str, Path]:
    """Return the folders of the installed packages that a command uses, by the package's name."""
    folders = {}
    for name in installed_packages():
        conf = conf_folders_of([name])
        if conf:
            folders[name] = conf[0].parent
    if not folders:
        return {}
    files = find_groups(config_folders(command.conf)).files
    options = []
    for group, value in command.settings.items():
        for name in re.findall(r"[\w/.-]+", value):
            if name in files.get(group, {}):
                options.append(files[group][name])
    stored = ""
    if command.config and user_path(command.config).is_file():
        stored = user_path(command.config).read_text()
    used = {}
    for name, folder in folders.items():
        has_option = any(option.is_relative_to(folder) for option in options)
        if has_option or f"_target_: {name}." in stored:
            used[name] = folder
    return used


def check_command(command: JobCommand, files: Sequence[PackedFile]) -> None:
    """Check a command on this machine, before anything is sent to the cluster.

    Raise `RefusedError` if a relative path of --conf or --config is not among `files`, or if the
    cluster would delete the results. For a study or a sweep, also raise it if `out=` is a URL. For
    `raysim run`, also raise it for impossible overrides. They are checked only if all paths of
    --conf and --config exist on this machine.
    """
    _check_out(command)
    _check_packed(command, files)
    paths = [*command.conf, *([command.config] if command.config else [])]
    if command.words[0] == "run" and all(user_path(path).exists() for path in paths):
        config = compose(command.overrides, command.conf, command.config)
        from raysim.experiment.parts import check_values

        check_values(to_dict(config))


def _check_out(command: JobCommand) -> None:
    settings = command.settings
    out = settings.get("out", "")
    if command.words[0] != "run":
        local_folder(out)  # refuses a URL
    place = out or (settings.get("resume", "") if command.words[0] == "run" else "")
    is_tracked = settings.get("tracking.uri", "").startswith(REMOTE_TRACKING)
    if place.startswith(("/", "~")) or "://" in place or is_tracked:
        return
    subject = f"out={out} is" if out else "without out=DIR the results are"
    raise RefusedError(
        f"{subject} in the job's own folder, which the cluster deletes. Choose a permanent "
        "folder, such as out=/shared/runs/first or out=s3://bucket/first. Or store the results on "
        "an MLflow server: set tracking.uri to its address."
    )


def _check_packed(command: JobCommand, files: Sequence[PackedFile]) -> None:
    names = {file.name.partition("/")[0] for file in files}
    arguments = [("--conf", folder) for folder in command.conf]
    if command.config:
        arguments.append(("--config", command.config))
    for flag, value in arguments:
        if not value or value.startswith(("/", "~")):
            continue
        top = Path(value).parts[0]
        if top not in names:
            raise RefusedError(
                f"{flag} {value} is not among the files to upload. Add --with {top} directly "
                f"after submit: raysim submit --with {top} {command.words[0]} ..."
            )


def read_runtime_env(path: str | None) -> dict[str, Any]:
    """Read the runtime environment of a Ray job, such as its pip packages, from a YAML file.

    path: None returns an empty dictionary.
    Raise `RefusedError` if the file is missing, has another format, or sets `working_dir`.
    """
    if path is None:
        return {}
    example = "See jobs/runtime_env.yaml"
    if not user_path(path).is_file():
        raise RefusedError(f"--runtime-env {path} is not a file. {example}")
    try:
        node = yaml.safe_load(user_path(path).read_text())
    except Exception as error:  # the YAML reader fails in many ways
        raise RefusedError(f"--runtime-env {path} cannot be read as YAML. {example}") from error
    if not isinstance(node, Mapping):
        raise RefusedError(f"--runtime-env {path} does not contain keys and values. {example}")
    if "working_dir" in node:
        raise RefusedError(
            f"--runtime-env {path}: raysim sets working_dir itself. Remove this key."
        )
    return dict(node)


def with_source(environment: Mapping[str, Any]) -> dict[str, Any]:
    """Return the runtime environment of a Ray job with the git commit of the current folder.

    The commit is added as an environment variable, unless the user has set this variable.
    environment: the result of `read_runtime_env`.
    """
    variables = {SOURCE: json.dumps(source_commit()), **(environment.get("env_vars") or {})}
    return {**environment, "env_vars": variables}


def submit(
    command: JobCommand,
    address: str | None = None,
    extra: Sequence[str | Path] = (),
    limit_mb: float = 50.0,
    environment: str | None = None,
    wait: bool = True,
) -> int:
    """Pack, upload and start a job; with `wait`, return the exit status of its command.

    address: the URL of the job server; None reads Ray's environment variables, or takes the local
    server.
    extra: the files and folders of --with.
    limit_mb: the largest size of the files in MB.
    wait: True prints the job's output until its end; False returns 0 after the start.

    Raise `RefusedError` if the job cannot be started. Raise `RunStoppedError` if the job server no
    longer answers or knows the job. Ctrl-C raises KeyboardInterrupt with the commands that show and
    stop the job, which continues.
    """
    command, extra = with_plugins(command, extra)
    files = find_files(extra)
    check_command(command, files)
    runtime_env = with_source(read_runtime_env(environment))
    check_size(files, limit_mb)
    from raysim.commands.submit import job_server

    with errors_as_refusals():
        url = job_server.find_address(address)
        client = job_server.connect(url)
    _print(f"uploading {describe_size(files)}")
    with tempfile.TemporaryDirectory(prefix="raysim-") as folder, errors_as_refusals():
        pack(files, Path(folder))
        runtime_env["working_dir"] = folder
        job = job_server.submit(client, command.entrypoint, runtime_env)
    _print(without_password(f"started job {job} at {url} with {command.entrypoint}"))
    if not wait:
        _print(job_server.describe_commands(url, job))
        return 0
    try:
        connection = job_server.ConnectionToJob(client, job, _write, _print)
        connection.follow()
        status, sentence = job_server.wait_for_end(connection)
    except KeyboardInterrupt:
        commands = job_server.describe_commands(url, job)
        raise KeyboardInterrupt(f"job {job} continues on the cluster. {commands}") from None
    if sentence:
        sys.stderr.write(f"raysim: {sentence}\n")
    if "out" in command.settings:
        folder = without_password(command.settings["out"])
        _print(f"bring {folder} to this machine with: raysim fetch {job} --address {url}")
    return status


def _print(text: str) -> None:
    print(text, flush=True)


def _write(text: str) -> None:
    print(text, end="", flush=True)
