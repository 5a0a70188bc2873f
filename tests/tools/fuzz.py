"""Run raysim with random command lines, configurations and damaged files.

    uv run python tests/tools/fuzz.py --cases 5000 --log fuzz.jsonl

This command makes 5000 cases of each kind. After an interruption, the same command continues. A
case must succeed, fail with the exit status 1, or be refused with one sentence and the exit status
2. No case may:
- raise an exception that is not handled,
- need a minute of CPU time, or wait for a minute,
- need over 1 GiB more memory than any earlier case,
- leave a file after a refusal.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from hypothesis import HealthCheck, Phase, given, seed, settings, strategies as st

sys.path.append(str(Path(__file__).parents[1] / "data"))

from tiny import picture, write_mnist, write_parquet, write_picture, write_strips

from raysim import cli
from raysim.experiment.compose import compose
from raysim.experiment.config_files import to_dict
from raysim.primitives.memory import peak_memory_bytes
from raysim.results.observers import Pictures
from raysim.results.tracked_run import flatten

QUICK = (
    *(
        "runtime=inprocess",
        "tracking=none",
        "data=synthetic",
        "data.samples=60",
        "data.test_samples=10",
    ),
    *(
        "partition=iid",
        "partition.clients=5",
        "schedule.cohort=2",
        "local.epochs=1",
        "model=mlp",
        "rounds=1",
    ),
)
STATEFUL = (
    "method=scaffold",
    "schedule.cohort=5",
)  # every client keeps something, so that checkpoints have a log
CASE_TIMEOUT_S = 60  # of work, or of waiting
LOOK = 6  # seconds between two looks at whether a case still works
MEMORY = 1 << 30  # bytes by which a case may raise the peak of those before it
LIMIT = 8 << 30  # bytes that this process may have, so that no case takes the machine with it
BATCH = 50  # cases that are made from one seed, and are one line of the log
SLOW = {
    "rounds",
    "local.epochs",
    "local.steps",
    "evaluate.finetune.epochs",
    "data.samples",
}  # a large one is meant


class Hang(BaseException):
    """A command gave no result in time."""


@dataclass
class Findings:
    """The results of cases.

    counts: the number of cases by kind and outcome.
    broken: descriptions of the broken cases.
    strict: True: stop at the first broken case, and let Hypothesis search a smaller one.
    """

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)
    strict: bool = True


FOUND = Findings()


# --- one case -------------------------------------------------------------------------------------
@contextlib.contextmanager
def _limited() -> Iterator[None]:
    """Raise `Hang` in a command that works or waits for longer than `CASE_TIMEOUT_S` seconds.

    Work is measured in CPU time, so a busy machine does not matter.
    """
    start = worked = time.process_time()
    idle = 0

    def look(*_: object) -> None:
        nonlocal worked, idle
        before, worked = worked, time.process_time()
        idle = idle + LOOK if worked - before < 1e-3 * LOOK else 0
        if max(idle, worked - start) >= CASE_TIMEOUT_S:
            raise Hang

    before = signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, LOOK, LOOK)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def outcome(words: list[str]) -> str:
    """Run a command, and return how it ended: "run", "refused", "failed" or a text about a bug.

    words: the arguments of `raysim`.
    """
    out, err = io.StringIO(), io.StringIO()
    try:
        with _limited(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                status = cli.call(words)
            except SystemExit as stopped:
                status = int(stopped.code or 0)
    except Hang:
        return "hangs"
    except BaseException as error:
        at = [
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            if "/raysim/" in frame.filename
        ][-1]
        return f"raises {type(error).__name__}: {str(error)[:200]} ({at.filename}:{at.lineno})"
    sentences = [line for line in err.getvalue().splitlines() if line.startswith("raysim: ")]
    if status == 2 and len(sentences) == 1:
        return "refused"
    return {0: "run", 1: "failed"}.get(
        status, f"status {status}, {len(sentences)} sentences: {err.getvalue()[:300]}"
    )


def files(folder: Path) -> set[str]:
    """Return the paths of all files and folders below a folder, except those in `cache`."""
    return {
        str(path) for path in folder.rglob("*") if "cache" not in path.relative_to(folder).parts[:1]
    }


def case(kind: str, words: list[str], folder: Path) -> None:
    """Run one `raysim` command, and count its result under `kind` in `FOUND`.

    The case is broken if the command shows a bug, such as an unhandled exception. Raise
    AssertionError for a broken case if `FOUND.strict` is set.
    folder: the working directory.
    """
    before, here, peak = files(folder), os.getcwd(), peak_memory_bytes()
    os.chdir(folder)
    try:
        found = outcome(words)
    finally:
        os.chdir(here)
    if found == "refused" and (left := files(folder) - before):
        found = f"leaves {sorted(left)[0]}"
    if (more := peak_memory_bytes() - peak) > MEMORY:
        found = f"takes {more / 2**30:.1f} GiB"
    good = found in ("run", "refused", "failed")
    FOUND.counts[kind, found if good else "broken"] += 1
    if not good:
        FOUND.broken.append(f"{kind}: {words}: {found}")
        keep(folder)
    assert good or not FOUND.strict, f"{words}: {found}"


def keep(folder: Path) -> None:
    """Copy the folder of a broken case, so that its files can be examined later.

    The copy is a new subfolder of the folder that the environment variable RAYSIM_FUZZ_KEEP names.
    Without this variable, nothing is copied.
    """
    if place := os.environ.get("RAYSIM_FUZZ_KEEP"):
        target = Path(place, f"{len(list(Path(place).glob('*')))}")
        subprocess.run(
            ["cp", "-a", folder, target], check=False
        )  # pipes, loops and devices as they are


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """Yield a new empty folder, in which raysim also caches data until the end of the block."""
    before = os.environ.get("RAYSIM_CACHE")
    with tempfile.TemporaryDirectory(prefix="raysim-fuzz-") as text:
        os.environ["RAYSIM_CACHE"] = f"{text}/cache"
        try:
            yield Path(text)
        finally:
            os.environ.pop("RAYSIM_CACHE") if before is None else os.environ.update(
                RAYSIM_CACHE=before
            )


# --- what is thrown -------------------------------------------------------------------------------
ODD = st.sampled_from(
    (
        *(
            "null",
            "[]",
            "{}",
            "''",
            "true",
            "-1",
            "0",
            "1e400",
            "nan",
            "-inf",
            "[[]]",
            "[null]",
            "{a: {b: 1}}",
            "latest",
        ),
        *(
            "~",
            "~nosuchuser",
            "/dev/full",
            "/dev/null",
            "..",
            ".",
            "a\0b",
            "${seed}",
            "${oc.env:HOME}",
            "${",
            "\udcff",
        ),
        *(
            str(10**12),
            str(2**63),
            str(2**64),
            "1" + "0" * 400,
            "x" * 5000,
            "a/" * 3000,
            "[1,2,3]",
            "0.5",
            "2",
            "7",
        ),
    )
)
VALUES = st.one_of(
    ODD,
    st.integers().map(str),
    st.floats().map(repr),
    st.text(max_size=20),
    st.lists(ODD, max_size=3).map(lambda each: f"[{','.join(each)}]"),
)
NODES = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=10), st.just("???")
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.one_of(st.text(max_size=5), st.integers(), st.just("_target_")), inner, max_size=3
        ),
    ),
    max_leaves=6,
)


@cache
def keys() -> list[str]:
    """Return the configuration keys that random cases change.

    They are the keys of a run with three methods, except for those of tracking. The names of all
    groups, three sections and the wrong key "nothing" are added.
    """
    config = to_dict(compose([*QUICK, "method=[fedprox,scaffold,fedavgm]"]))
    names = [key for key in flatten(config) if key.split(".")[0] not in ("choices", "tracking")]
    return [*names, *config["choices"], "nothing", "method.fedprox", "data.rotation", "local"]


def _words(key: str, value: str) -> list[str]:
    number = value.lstrip("-").split(".")[0].split("e")[0]
    if key in SLOW and number.isdigit() and len(number) > 1:
        value = "2"
    return [f"{key}={value}"]


OVERRIDES = st.one_of(
    st.builds(_words, st.sampled_from(keys()), VALUES),
    st.builds(
        lambda option, value: [option, value],
        st.sampled_from(["--conf", "--config", "--allow"]),
        VALUES,
    ),
    st.text(max_size=30).map(lambda text: [text]),
)


def _rest(given: list[str]) -> list[str]:
    """Return the overrides of the quick run, without the keys that `given` overrides."""
    return [
        word for word in QUICK if word.split("=")[0] not in {each.split("=")[0] for each in given}
    ]


def command_lines(data: Any) -> None:
    """Run a command with one or two settings as a user might mistype them.

    data: Hypothesis' source of random values.
    """
    given_words = [
        word for words in data.draw(st.lists(OVERRIDES, min_size=1, max_size=2)) for word in words
    ]
    with temporary_folder() as folder:
        methods = "method=[fedprox,scaffold,fedavgm]"
        case("command line", ["run", "out=out", *_rest(given_words), methods, *given_words], folder)


COMMANDS: Mapping[
    str, list[str]
] = {  # others that read words, in a folder with a finished run: out
    "partition": ["partition", *QUICK[2:7], "--out", "picture.png"],
    "report": ["report", "out"],
    "methods": ["methods"],
    "new": ["new"],
    "fleet": ["fleet", "check"],
    "submit": ["submit", "--address", "http://127.0.0.1:9", "--no-wait", "run"],
    "study": ["study", *QUICK[:2], "out=study", "resume=latest"],
    "sweep": ["sweep", *QUICK[:2], "out=sweep", "resume=latest"],
    "help": ["help"],
    "": [],
}


def other_commands(data: Any) -> None:
    """Run a random command with the arguments that it requires, and one to three random arguments.

    data: Hypothesis' source of random values.
    """
    name = data.draw(st.sampled_from(sorted(COMMANDS)))
    words = [
        word for words in data.draw(st.lists(OVERRIDES, min_size=1, max_size=3)) for word in words
    ]
    with temporary_folder() as folder:
        shutil.copytree(prepared("run"), folder, dirs_exist_ok=True)
        case(f"command {name}".rstrip(), [*COMMANDS[name], *words], folder)


def stored_configurations(data: Any) -> None:
    """Run a stored configuration after a random change of one entry, or of some bytes.

    data: Hypothesis' source of random values.
    """
    config: Any = to_dict(compose([*QUICK, "out=out"]))
    if data.draw(st.booleans()):
        path = data.draw(st.sampled_from(sorted(flatten(config)))).split(".")
        path = path[: data.draw(st.integers(1, len(path)))]
        node = config
        for part in path[:-1]:
            node = node[part]
        if data.draw(st.integers(0, 3)):
            value = data.draw(NODES)
            node[path[-1]] = 2 if ".".join(path) in SLOW and isinstance(value, int) else value
        else:
            del node[path[-1]]
        text = yaml.safe_dump(config).encode()
    else:
        text = change_bytes(data, yaml.safe_dump(config).encode())
    with temporary_folder() as folder:
        (folder / "stored.yaml").write_bytes(text)
        short = [*QUICK[:2], "rounds=1", "local.epochs=1"]
        case("configuration", ["run", "--config", "stored.yaml", "out=out", *short], folder)


def change_bytes(data: Any, content: bytes) -> bytes:
    """Return the content after one to three random changes.

    A change alters one byte, cuts off the end, or inserts, zeroes or deletes some bytes.
    data: Hypothesis' source of random values.
    """
    changed = bytearray(content)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(changed)))
        kind = data.draw(st.sampled_from(["change", "cut", "insert", "zero", "drop"]))
        if kind == "change" and place < len(changed):
            changed[place] ^= data.draw(st.integers(1, 255))
        elif kind == "cut":
            del changed[place:]
        elif kind == "insert":
            changed[place:place] = data.draw(st.binary(min_size=1, max_size=8))
        elif kind == "zero":
            changed[place : place + 64] = bytes(len(changed[place : place + 64]))
        else:
            del changed[place : place + data.draw(st.integers(1, 64))]
    return bytes(changed)


def damage(data: Any, path: Path) -> None:
    """Damage the file `path` in a random way.

    The file is deleted, emptied, changed in some bytes, or replaced by a folder, a pipe or a link.
    data: Hypothesis' source of random values.
    """
    kind = data.draw(
        st.sampled_from(["bytes"] * 8 + ["pipe", "folder", "loop", "missing", "empty", "device"])
    )
    content = path.read_bytes()
    path.unlink()
    if kind == "bytes":
        path.write_bytes(change_bytes(data, content))
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "empty":
        path.touch()


@cache
def prepared(kind: str) -> Path:
    """Return a folder with undamaged files. A case damages a copy of this folder.

    kind: "parquet", "strips", "pictures", "idx", "numpy", "leaf", "trace", "fedscale" or "options".
    For another text, the folder has a finished run in `out` and cached data in `cache`.
    """
    root = Path(tempfile.mkdtemp(prefix="raysim-fuzz-"))
    names = [f"{index}.png" for index in range(8)]
    if kind == "parquet":
        for split in ("train", "test"):
            pixels, labels = [picture() for _ in range(20)], [0, 1] * 10
            write_parquet(root / f"data/{split}.parquet", pixels, labels, domain=["a"] * 20)
    elif kind == "strips":
        write_strips(root / "data", rows=(20, 10))
    elif kind == "pictures":
        for label in ("cat", "dog"):
            for name in names:
                write_picture(root / "data" / label / name, picture())
        pairs = [(label, name) for label in ("cat", "dog") for name in names]
        rows = [
            f"{label}/{name},x,{label},{'test' if name[0] > '5' else 'train'}"
            for label, name in pairs
        ]
        (root / "data/split.csv").write_text("path,domain,class,split\n" + "\n".join(rows) + "\n")
    elif kind == "idx":
        write_mnist(root / "data", 20, 10)
    elif kind == "numpy":
        _write_arrays(root / "data")
    elif kind == "leaf":
        _write_leaf(root / "data")
    elif kind == "trace":
        rows = {"client": list(range(5)), "start": [[0.0, 50.0]] * 5, "end": [[40.0, 90.0]] * 5}
        rows |= {
            name: [value] * 5
            for name, value in (("period", 1e3), ("speed", 50.0), ("down", 1e6), ("up", 1e6))
        }
        pq.write_table(pa.table(rows), root / "trace.parquet")
    elif kind == "fedscale":
        capacity = {
            number: {"computation": 100.0 + number, "communication": 1e4} for number in range(1, 6)
        }
        behaviour = {
            n: {
                "duration": 211625,
                "inactive": [2e4, 9e4],
                "finish_time": 211625,
                "active": [12.0, 5e4],
                "model": "CPH1801",
            }
            for n in range(5)
        }
        for name, content in (("capacity", capacity), ("behaviour", behaviour)):
            (root / name).write_bytes(pickle.dumps(content))
    elif kind == "options":
        (root / "conf/method").mkdir(parents=True)
        (root / "conf/method/mine.yaml").write_text(
            "mine:\n  _target_: raysim.methods.fedprox.FedProx\n  mu: 0.1\n"
        )
        (root / "runtime_env.yaml").write_text("pip: [numpy]\nenv_vars: {A: b}\n")
    else:
        os.environ["RAYSIM_CACHE"] = str(root / "cache")
        here = os.getcwd()
        os.chdir(root)
        assert (
            outcome(
                ["run", *QUICK, *STATEFUL, "rounds=2", "checkpoint.every=1", "out=out", "--quiet"]
            )
            == "run"
        )
        os.chdir(here)
    return root


def _write_arrays(folder: Path) -> None:
    folder.mkdir()
    x, y = np.linspace(0, 1, 40 * 6, dtype=np.float32).reshape(40, 6), np.arange(40) % 2
    np.savez(folder / "train.npz", x=x, y=y)
    np.savez(folder / "test.npz", x=x[:10], y=y[:10])


def _write_leaf(folder: Path) -> None:
    for split in ("train", "test"):
        (folder / split).mkdir(parents=True)
        users = {name: {"x": ["But, soft! "] * 4, "y": ["w"] * 4} for name in ("ROMEO", "JULIET")}
        (folder / split / "all.json").write_text(
            json.dumps({"users": [*users], "user_data": users})
        )


def _reading(*words: str) -> list[str]:
    """Return a command that runs on the data set in the folder `data`.

    words: further overrides.
    """
    return [
        "run",
        *(word for word in QUICK if not word.startswith("data")),
        *words,
        "data.root=data",
        "out=new",
    ]


GO_ON = ["run", *QUICK, *STATEFUL, "out=out", "resume=latest", "rounds=3"]
READERS: Mapping[
    str, tuple[str, list[str]]
] = {  # which of the prepared files is damaged, and what reads it
    "parquet": ("data/*.parquet", _reading("data=parquet")),
    "strips": ("data/*", _reading("data=strips")),
    "pictures": ("data/**/*.*", _reading("data=image_folder")),
    "idx": ("data/MNIST/raw/*", _reading("data=mnist", "data.download=false")),
    "cache": ("cache/*.arrow", ["run", *QUICK, "out=new"]),
    "checkpoint": ("out/checkpoints/*/*", GO_ON),
    "run folder": ("out/*.*", GO_ON),
    "report": ("out/*.*", ["report", "out", "--out", "page"]),
    "numpy": ("data/*.npz", _reading("data=numpy", "model.hidden=[4]")),
    "leaf": ("data/*/*.json", _reading("data=leaf", "model=gru")),
    "trace": (
        "trace.parquet",
        ["run", *QUICK, "fleet=trace", "fleet.file=trace.parquet", "out=new"],
    ),
    "trace, checked": ("trace.parquet", ["fleet", "check", "trace.parquet"]),
    "fedscale": ("*", ["fleet", "convert", "capacity", "behaviour"]),
    "options": (
        "conf/method/mine.yaml",
        ["run", *QUICK, "--conf", "conf", "method=mine", "out=new"],
    ),
    "configuration": (
        "out/config.yaml",
        ["run", "--config", "out/config.yaml", *QUICK[:2], "out=new"],
    ),
}


def damaged_files(data: Any) -> None:
    """Damage a random file of a type in `READERS`, and run a command that reads it.

    data: Hypothesis' source of random values.
    """
    kind = data.draw(st.sampled_from(sorted(READERS)))
    pattern, words = READERS[kind]
    with temporary_folder() as folder:
        shutil.copytree(prepared(kind.partition(",")[0]), folder, dirs_exist_ok=True)
        found = sorted(path for path in folder.glob(pattern) if path.is_file())
        damage(data, data.draw(st.sampled_from(found)))
        case(kind, words, folder)


LABELS = st.one_of(
    st.integers(-2, 3),
    st.sampled_from((200, 10**6, 10**12, -(2**63))),
    st.floats(width=32),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.booleans(),
    st.dates(),
    st.none(),
)


def odd_labels(data: Any) -> None:
    """Run raysim on a Parquet data set with labels of a random type.

    The training and test files may have labels of different types.
    data: Hypothesis' source of random values.
    """
    kinds = st.sampled_from(
        [LABELS, st.lists(LABELS, max_size=2), st.lists(st.lists(LABELS, max_size=1), max_size=2)]
    )
    with temporary_folder() as folder:
        usual = pa.array([0, 1] * 10)
        for split in ("train", "test"):
            rows = [data.draw(data.draw(kinds))] * data.draw(st.sampled_from([0, 1, 20]))
            good = data.draw(st.sampled_from([[0, 1], ["a", "b"], [[0], [1]], [["a"], ["b", "a"]]]))
            try:
                labels = pa.array([*rows, *good * 10][:20])
            except (
                pa.ArrowInvalid,
                pa.ArrowTypeError,
                OverflowError,
            ):  # of two types, which no column can have
                labels = usual
            pixels = [picture() for _ in range(20)]
            write_parquet(folder / f"data/{split}.parquet", pixels, labels)
        case("labels", _reading("data=parquet"), folder)


TARGETS: Mapping[str, Callable[[Any], None]] = {
    "command_lines": command_lines,
    "other_commands": other_commands,
    "stored_configurations": stored_configurations,
    "damaged_files": damaged_files,
    "odd_labels": odd_labels,
}


def fuzz(target: str, cases: int, start: int = 0) -> None:
    """Run `cases` random cases of one type.

    target: the type, a key of `TARGETS`.
    start: the seed of Hypothesis, from which all these cases are drawn.
    """
    check = [
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.filter_too_much,
        HealthCheck.large_base_example,
    ]

    @seed(start)
    @settings(
        max_examples=cases,
        deadline=None,
        database=None,
        suppress_health_check=check,
        phases=[Phase.generate],
        print_blob=False,
    )
    @given(st.data())
    def run(data: Any) -> None:
        TARGETS[target](data)

    run()


def main(cases: int, targets: Sequence[str], log: Path) -> int:
    """Run raysim with random command lines, configurations and damaged files.

    Print how all cases of the log file ended. Return 1 if one of them is broken; otherwise 0.
    cases: the number of cases of each type. Those in the log file are not repeated.
    targets: the types, keys of `TARGETS`.
    log: the file to which each finished batch of cases adds one line.
    """
    FOUND.strict = False
    resource.setrlimit(resource.RLIMIT_DATA, (LIMIT, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    Pictures.on_finish = lambda *_: None  # type: ignore[method-assign]  # they are half of the time
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    done = {(line["target"], line["start"]) for line in lines}
    for start in range(0, cases, BATCH):
        for target in targets:
            if (target, start) in done:
                continue
            FOUND.counts, FOUND.broken = Counter(), []
            fuzz(target, min(BATCH, cases - start), start)
            counts = [[kind, found, count] for (kind, found), count in FOUND.counts.items()]
            lines.append(
                {"target": target, "start": start, "counts": counts, "broken": FOUND.broken}
            )
            with log.open("a") as file:
                file.write(json.dumps(lines[-1]) + "\n")
    total: Counter[tuple[str, str]] = Counter()
    for line in lines:
        total.update({(kind, found): count for kind, found, count in line["counts"]})
    for (kind, found), count in sorted(total.items()):
        print(f"{count:6d}  {kind:20s} {found}")
    broken = dict.fromkeys(text for line in lines for text in line["broken"])
    for text in broken:
        print(text[:500])
    return 1 if broken else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=300, help="of each kind (300)")
    parser.add_argument("--only", choices=TARGETS, help="one kind alone")
    parser.add_argument(
        "--log", type=Path, default=Path("fuzz.jsonl"), help="what was found, a line for 50 cases"
    )
    parsed = parser.parse_args()
    sys.exit(main(parsed.cases, [parsed.only] if parsed.only else [*TARGETS], parsed.log))
