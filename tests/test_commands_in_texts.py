"""Test that each command in a text can be pasted into bash or zsh, and that raysim accepts it.

The texts are Markdown files (bash blocks, and inline code that begins with `raysim`), comments in
configuration and job files, and the command's help.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from jobs.papers.comparison import PAPER_RUNS
from jobs.papers.tables import tables
from raysim import cli
from raysim.commands.new import package
from raysim.commands.study import plan
from raysim.commands.sweep import plan as sweep_plan
from raysim.experiment.compose import compose
from raysim.experiment.config_files import to_dict
from raysim.experiment.plugins import conf_folders_of
from raysim.primitives.errors import RefusedError

ROOT = Path(__file__).parent.parent
WRITTEN = [
    path for path in ROOT.glob("docs/**/*.md") if "reference" not in path.parts
]  # the others are made
MARKDOWN = sorted(
    [*ROOT.glob("*.md"), *WRITTEN, *ROOT.glob("jobs/*.md"), *ROOT.glob("conf/**/*.md")]
)
YAML = sorted([*ROOT.glob("conf/**/*.yaml"), *ROOT.glob("jobs/*.yaml")])
SHELLS = {
    "bash": ["--norc", "--noprofile", "-s"],
    "zsh": ["-f", "-i", "-s"],
}  # zsh as one types into it
NO_COMMAND = re.compile(r"\.\.\.|…|\b(NAME|TABLE|COMMAND|WORKLOAD)\b")  # a form, not a command
# Stands for all commands of texts: raysim's words go to a file, of other commands what follows
# their raysim.
LISTENING = """
raysim() { printf '%s\\0' "$@" >> "$OUT"; }
after() {
    while [ $# -gt 0 ] && [ "$1" != raysim ]; do shift; done
    [ $# -gt 0 ] && shift && raysim "$@"
}
uv() { after "$@"; }
ray() { after "$@"; }
ssh() { :; }
pip() { :; }
"""


# --- finding them ---------------------------------------------------------------------------------
def fences(path: Path) -> list[str]:
    return re.findall(
        r"^```(?:bash|sh|shell|console|zsh)\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL
    )


def commands_of(block: str) -> Iterator[str]:
    """Yield the commands in a block of text.

    A line that ends with a backslash is joined with the next line.
    """
    for line in block.replace("\\\n", " ").splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            yield line.strip().removeprefix("$ ")


def in_markdown(path: Path) -> Iterator[str]:
    for block in fences(path):
        yield from commands_of(block)
    prose = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    quoted = (" ".join(each.split()) for each in re.findall(r"`((?:uv run )?raysim [^`]+)`", prose))
    yield from (
        f"raysim sweep {words}"
        for words in re.findall(r'raysim\.sweep\("([^"]+)"', path.read_text())
    )
    yield from (
        each for each in quoted if re.search("raysim (-|[a-z]+ .)", each)
    )  # `raysim sweep` is but its name


def in_comments(path: Path) -> Iterator[str]:
    comments = re.findall(r"#.*$", path.read_text(), re.MULTILINE)
    yield from (
        found[1]
        for each in comments
        if (found := re.search(r"\b(raysim [a-z]+ [^`]*[^`.,;)])", each))
    )
    yield from re.findall(r"^\s+entrypoint: (.*)$", path.read_text(), re.MULTILINE)


def in_help() -> Iterator[str]:
    for name, text in vars(cli).items():
        if name.isupper() and isinstance(text, str):
            yield from (
                re.split(r" {2,}", line.strip())[0]
                for line in text.splitlines()
                if "raysim " in line[:9]
            )


def find_commands() -> dict[str, list[str]]:
    """Return the commands of each text, by the text's path.

    Commands with placeholders are left out.
    """
    places = {str(path.relative_to(ROOT)): [*in_markdown(path)] for path in MARKDOWN}
    places |= {str(path.relative_to(ROOT)): [*in_comments(path)] for path in YAML}
    places["help"] = [*in_help()]
    return {
        place: [each for each in all_of_it if raysims(each)] for place, all_of_it in places.items()
    }


def raysims(command: str) -> bool:
    return re.search(r"\braysim [a-z-]", command) is not None and not NO_COMMAND.search(command)


COMMANDS = {command: place for place, all_of_it in find_commands().items() for command in all_of_it}
# Options and classes of the package `mine` in `folder`. A composition with its files takes longer.
OF_MINE = re.compile(r"mine|my_method|pinball")


# --- what they name -------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with all runs, configuration files and methods that the commands mention."""
    root = tmp_path_factory.mktemp("texts")
    for run in ("runs/a", "runs/b", "runs/mine", "studies/mine/runs/fedavg_seed-0"):
        (root / run).mkdir(parents=True)
    shutil.copytree(package.write(str(root / "new/mine")) / "mine", root / "mine")
    (root / "conf/fleet").mkdir(parents=True)
    shutil.copy(ROOT / "conf/fleet/lognormal.yaml", root / "conf/fleet/mine.yaml")
    (root / "conf/model").mkdir()
    shutil.copy(ROOT / "conf/model/mlp.yaml", root / "conf/model/mynet.yaml")
    for conf, name in (("mine/conf", "my_method"), ("conf", "lasso")):
        (root / conf / "method").mkdir(parents=True, exist_ok=True)
        (root / conf / "method" / f"{name}.yaml").write_text(f"{name}: {{_target_: mine.Mine}}\n")
    (root / "mine/conf/loss").mkdir()
    (root / "mine/conf/loss/pinball.yaml").write_text("_target_: mine.pinball\nshare: 0.9\n")
    for path in ("best.yaml", "runs/mine/best.yaml"):
        (root / path).write_text(yaml.safe_dump(to_dict(compose())))
    return root


# --- the shells -----------------------------------------------------------------------------------
def here(shell: str) -> str:
    if (path := shutil.which(shell)) is None:
        pytest.skip(f"{shell} is not installed: .ci/run installs it where it may")
    return path


def words_of(shell: str, folder: Path) -> dict[str, list[str]]:
    """Type all commands of `COMMANDS` into a shell; return the arguments that raysim gets.

    The result maps each command to the words after `raysim`. A command that does not run raysim in
    this shell, such as one of `ssh`, has an empty list.

    shell: "bash" or "zsh".
    """
    out = folder / f"{shell}.txt"
    typed = "\n".join(f"{command}\nprintf '\\n' >> $OUT" for command in COMMANDS)
    environment = {"OUT": str(out), "PATH": "/usr/bin:/bin", "HOME": str(folder), "TERM": "dumb"}
    program = [here(shell), *SHELLS[shell]]
    subprocess.run(
        program,
        input=f"{LISTENING}{typed}\n",
        cwd=folder,
        env=environment,
        text=True,
        capture_output=True,
    )
    words = [line.split("\0")[:-1] for line in out.read_text().splitlines()]
    assert len(words) == len(COMMANDS), "a command goes on after its line"
    return dict(zip(COMMANDS, words, strict=True))


@pytest.fixture(scope="module")
def in_bash(folder: Path) -> dict[str, list[str]]:
    return words_of("bash", folder)


@pytest.fixture(scope="module")
def in_zsh(folder: Path) -> dict[str, list[str]]:
    return words_of("zsh", folder)


def test_documented_commands_are_found_in_pages_and_job_files() -> None:
    places = {*COMMANDS.values()}
    assert {
        "README.md",
        "CONTRIBUTING.md",
        "jobs/README.md",
        "jobs/rayjob.yaml",
        "conf/sweep/default.yaml",
    } <= places
    assert len(COMMANDS) > 50


def test_command_gets_same_arguments_in_zsh_and_bash(
    in_bash: dict[str, list[str]], in_zsh: dict[str, list[str]]
) -> None:
    """raysim gets the same arguments from a command in an interactive zsh as in bash.

    The test removes comments first, because an interactive zsh passes them to the command.
    """
    for command, words in in_zsh.items():
        assert without_comment(words) == in_bash[command], f"{COMMANDS[command]}: {command}"


def without_comment(words: list[str]) -> list[str]:
    return words[: words.index("#")] if "#" in words else words


def check_accepted(words: list[str]) -> None:
    """Check that raysim accepts the arguments of a command, without running the command.

    Raises RefusedError or SystemExit if raysim refuses the arguments.

    words: the arguments after the word `raysim`.
    """
    if words[0] in ("help", "--version") or words[-1] == "-h":
        return
    assert words[0] in cli.COMMANDS
    given = cli.parse_arguments(words)
    goes_on = "resume=latest" in getattr(given, "overrides", ())
    if hasattr(given, "conf") and OF_MINE.search(" ".join(words)):
        given.conf = [*map(str, conf_folders_of(["mine"])), *given.conf]  # as if it were installed
    if words[0] in ("run", "partition"):
        compose(given.overrides, given.conf, getattr(given, "config", None))
    elif words[0] == "study" and not goes_on:
        plan.plan([word for word in given.overrides if not word.startswith("out=")], given.conf)
    elif words[0] == "sweep" and not goes_on:
        sweep_plan.plan(given.overrides, given.conf)
    elif words[0] == "submit" and given.words:
        check_accepted(given.words)


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", COMMANDS, ids=[f"{place}: {text}"[:90] for text, place in COMMANDS.items()]
)
def test_raysim_accepts_every_documented_command(
    command: str, in_bash: dict[str, list[str]], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    words = in_bash[command]
    assert words, f"{COMMANDS[command]}: nothing reaches raysim of: {command}"
    try:
        check_accepted(words)
    except (RefusedError, SystemExit) as error:
        pytest.fail(f"{COMMANDS[command]}: {command}: {error}")


def test_commands_of_published_tables_need_no_quotes_in_a_shell() -> None:
    for paper, runs in PAPER_RUNS.items():
        for table in tables(paper).values():
            for cell in table.cells:
                words = runs.command(table, cell).arguments()
                assert all(re.fullmatch(r"[\w./+,:=-]+", word) for word in words), words


@pytest.mark.parametrize("path", MARKDOWN, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_block_of_commands_is_valid_in_bash_and_zsh(path: Path) -> None:
    for shell in filter(shutil.which, SHELLS):
        for block in fences(path):
            done = subprocess.run([shell, "-n"], input=block, text=True, capture_output=True)
            assert done.returncode == 0 and not done.stderr, done.stderr


def test_programs_named_in_the_documentation_exist() -> None:
    """Texts call programs by `python -m jobs...` and `python tests/...`; their files must exist."""
    sources = [
        *ROOT.glob("jobs/**/*.py"),
        *ROOT.glob("jobs/*.sh"),
        *ROOT.glob("tests/tools/*.py"),
        *ROOT.glob("docs/*.py"),
    ]
    text = "\n".join(path.read_text() for path in [*MARKDOWN, *sources, Path(cli.__file__)])
    modules = set(re.findall(r"python -m (jobs\.\w+\.\w+)", text)) | {
        f"jobs.benchmarks.{name}" for name in cli.IN_CHECKOUT
    }
    files = set(re.findall(r"python ((?:jobs|docs|tests)/[\w/]+\.py)", text))
    assert len(modules) > 5 and len(files) > 3
    missing = [name for name in modules if not (ROOT / f"{name.replace('.', '/')}.py").is_file()]
    assert missing + [name for name in files if not (ROOT / name).is_file()] == []


def test_no_instruction_installs_raysim_from_a_package_index() -> None:
    """No text installs raysim or raysim-fl from a package index.

    On the index, raysim is an unrelated package, and raysim-fl is not published.
    """
    asking = re.compile(
        r"\b(?:install|add|uvx|--with)\s+(?:-[-\w]+\s+)*[\"']?raysim(?:-fl)?(?:\[[\w,]+\])?[\"']?(?=[\s,;:`)]|$)"
    )
    texts = [
        *MARKDOWN,
        *YAML,
        *ROOT.glob("raysim/**/*.py"),
        *ROOT.glob("notebooks/*.ipynb"),
        *ROOT.glob("Dockerfile*"),
    ]
    found = [(path.name, match[0]) for path in texts for match in asking.finditer(path.read_text())]
    assert found == []
    for wrong in ("pip install raysim", "pip install -U 'raysim[sweep]'", "uv add raysim-fl"):
        assert asking.search(wrong)
    for right in (
        "pip install raysim_fl-0.1.0-py3-none-any.whl",
        "pip install git+https://HOST/raysim.git",
    ):
        assert not asking.search(right)


# --- for real -------------------------------------------------------------------------------------
REAL = """
raysim run method=fedbr+mixup runtime=inprocess rounds=2 partition.clients=20 out=runs/mixed
raysim run --show method=fedprox > shown.yaml
raysim run --config shown.yaml runtime=inprocess rounds=2 tracking=none partition.clients=20 \
    out=runs/shown
raysim study method=fedavg,fedprox runtime=inprocess rounds=2 tracking=none partition.clients=20 \
    out=studies/mine
raysim ui --update
raysim report runs/*
raysim partition partition=dirichlet partition.alpha=0.1
raysim methods
raysim help study
raysim --version
"""


# In this shell raysim is the process of the test: a pipe brings it the words, quoted for a shell,
# and another one its exit status; its output comes back in a file.
ASKING = """
set -e
raysim() {
    local exit_status
    print -r -- "${(q-)@}" >&$ASK
    read -r exit_status <&$ANSWER
    cat $PRINTED
    return $exit_status
}
"""


@pytest.mark.slow
def test_short_example_commands_finish_without_errors_in_zsh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    printed = tmp_path / "printed"
    (asked, ask), (answer, answered) = os.pipe(), os.pipe()
    environment = {"ASK": ask, "ANSWER": answer, "PRINTED": printed, "PATH": os.environ["PATH"]}
    shell = subprocess.Popen(
        [here("zsh"), "-f", "-c", f"{ASKING}{REAL}"],
        env={name: str(value) for name, value in environment.items()},
        pass_fds=(ask, answer),
        stdout=subprocess.DEVNULL,
    )
    for end in (ask, answer):
        os.close(end)
    commands = []
    with shell, open(asked) as requests, open(answered, "w", buffering=1) as answers:
        for line in requests:
            words = shlex.split(line)
            commands.append(words[0])
            try:
                status = cli.call(words)
            except SystemExit as stop:  # of a command that only prints its help
                status = int(stop.code or 0)
            output = capsys.readouterr()
            assert status == 0, f"{line}: {output.err}"
            assert "passed over" not in output.err, "files next to runs are raysim's own"
            printed.write_text(output.out)
            answers.write(f"{status}\n")
    assert shell.returncode == 0
    assert commands == [line.split()[1] for line in commands_of(REAL)]
    assert (tmp_path / "runs/mlflow_artifacts").is_dir()
    assert {each.name for each in (tmp_path / "studies/mine/runs").iterdir()} == {
        "fedavg_seed-0",
        "fedprox_seed-0",
    }
