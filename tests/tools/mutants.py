"""Change one thing in the source at a time, and report the changes that no test notices.

    export RAYSIM_SHARED=DIR
    uv run python tests/tools/mutants.py --count 700 --seed 0 --jobs 2 --out mutants.json
    # some of them again, with all tests:
    uv run python tests/tools/mutants.py ... --map mutants.map.json --ids 12,57 --cap 0

A mutant is the source with one change, in a copy of the working tree. `coverage` shows which tests
run the changed line; --map reuses an earlier result. A few quick tests come first. Then further
tests run, for at most --cap seconds of CPU time (0: no limit).

Ids stay the same for the same source, --seed, --count and --only. equivalent_mutants.toml lists
mutants that no test can notice, with the reason.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import fnmatch
import functools
import importlib.util
import itertools
import json
import operator
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Generator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import pytest
from mutations import Mutant, Places, changes, inner_lines

TOOLS = Path(__file__).resolve().parent
ROOT = TOOLS.parents[1]
CORE = [
    f"raysim/{name}.py"
    for name in (
        *("training/step", "training/trainer", "vectors/optimizer", "data/partition"),
        *(
            f"simulation/{each}"
            for each in ("server", "schedule", "planner", "waiting", "fleet", "availability")
        ),
        *(f"simulation/{each}" for each in ("evaluator", "checkpoint", "client_states")),
    )
]
ROOMS = [*CORE, "raysim/methods/*.py"]
LEAST = {True: 25, False: 4}  # mutants of a core file, and of another
CLOSE = (
    "textbook/",
    "vectors",
    "test_functions",
    "one_mathematics",
    "conformance",
    "methods/",
)  # best judges first
DEFAULTS = "/test_defaults.py::"  # they look at signatures, and run no line of what they look at
# They look at the declarations of all methods, in seconds; no quicker test of their files does.
DECLARED = ("/test_requirements.py::", "::test_only_listed_pairs_of_methods_exclude_each_other")
QUICK, QUICK_FILES, QUICK_SECONDS = 20, 5, 4.0  # the first portion
PATIENCE = 20  # wall time per CPU time that a child may take: others may use the machine, too
MOST_BYTES = 8 << 30  # of a child: a mutant that loops may also hoard


def sampled(root: Path, globs: Sequence[str], count: int, seed: int) -> list[Mutant]:
    """Return about `count` mutants, which are spread evenly over each file.

    Every file gets a few mutants (`LEAST`), and further ones in proportion to its possible mutants.
    globs: patterns for the paths of the files to change.
    """
    rng = random.Random(seed)
    files = sorted({str(path.relative_to(root)) for room in ROOMS for path in root.glob(room)})
    chosen_files = [
        file for file in files if any(fnmatch.fnmatch(file, pattern) for pattern in globs)
    ]
    places = {file: Places(file, (root / file).read_bytes()).found for file in chosen_files}
    quota = {file: min(LEAST[file in CORE], len(found)) for file, found in places.items()}
    free = {file: len(found) - quota[file] for file, found in places.items()}
    least = sum(quota.values())
    share = max(0.0, min(1.0, (count - least) / max(1, sum(free.values()))))
    scale = min(1.0, count / max(1, least))
    chosen: list[Mutant] = []
    for file, found in places.items():
        number = round(scale * quota[file]) + round(share * free[file])
        found.sort(key=lambda mutant: (mutant.start, mutant.end, mutant.new))
        cuts = [i * len(found) // number for i in range(number + 1)] if number else []
        source = (root / file).read_bytes()
        for a, b in pairwise(cuts):
            stratum = rng.sample(found[a:b], b - a)
            chosen += next(([mutant] for mutant in stratum if changes(mutant, source)), [])
    return chosen


# --- which test runs which line -------------------------------------------------------------------
def cpu_seconds_of_this_process() -> float:
    """Return the CPU time of this process and of its children that have ended.

    Unlike wall time, it stays the same when other programs use the machine.
    """
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


class Mapper:
    """A pytest plugin that records which lines each test executes.

    Lines of a fixture that several tests share are recorded for the fixture, and count for each of
    these tests.
    """

    def __init__(self, copy: Path):
        import coverage

        os.environ["COVERAGE_CORE"] = "ctrace"  # the one that knows contexts in every Python
        self.copy, self.seconds, self.failed, self.caches = (
            copy,
            dict[str, float](),
            list[str](),
            list[Any](),
        )
        self.fixtures: dict[str, list[str]] = collections.defaultdict(list)
        self.coverage = coverage.Coverage(
            data_file=None, include=[f"{copy}/raysim/*"], config_file=False
        )
        self.coverage.start()

    def pytest_collection_finish(self) -> None:
        own = [
            m
            for m in sys.modules.values()
            if str(self.copy / "tests") in (getattr(m, "__file__", "") or "")
        ]
        found = [
            value
            for m in own
            for value in vars(m).values()
            if getattr(value, "__module__", "") == m.__name__
        ]
        self.caches = [value for value in found if hasattr(value, "cache_clear")]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Function) -> Generator[None, Any, Any]:
        for function in self.caches:  # else only the first test that asks would run these lines
            function.cache_clear()
        for name in item.fixturenames:
            self.fixtures[f"fixture {name}"].append(item.nodeid)
        self.coverage.switch_context(item.nodeid)
        started = cpu_seconds_of_this_process()
        result = yield
        # A mutant's tests run in a process of their own, which would have to start Ray first.
        self.seconds[item.nodeid] = (
            cpu_seconds_of_this_process() - started + 5.0 * ("ray_session" in item.fixturenames)
        )
        self.coverage.switch_context("")
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Generator[None, Any, Any]:
        if fixturedef.scope == "function":
            return (yield)
        self.coverage.switch_context(f"fixture {fixturedef.argname}")
        try:
            return (yield)
        finally:
            self.coverage.switch_context(request._pyfuncitem.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)

    def result(self) -> dict[str, Any]:
        """Return the results of the test run.

        "seconds": the CPU seconds of each test.
        "failed": the tests that failed.
        "lines": a hexadecimal number for each line inside a function. Bit k is 1 if the k-th test
        in "seconds" executes the line.
        """
        self.coverage.stop()
        data, lines = self.coverage.get_data(), dict[str, dict[int, str]]()
        bit = {test: 1 << index for index, test in enumerate(self.seconds)}
        bits = {test: {test} for test in bit} | {
            name: set(tests) for name, tests in self.fixtures.items()
        }
        mask = {name: sum(bit[test] for test in tests) for name, tests in bits.items()}
        for file in (
            each for each in data.measured_files() if each.endswith(".py")
        ):  # templates are run too
            inner = inner_lines(
                Path(file).read_bytes()
            )  # a test that imports first runs all others, and knows nothing
            lines[str(Path(file).relative_to(self.copy))] = {
                line: hex(functools.reduce(operator.or_, (mask.get(name, 0) for name in names)))
                for line, names in data.contexts_by_lineno(file).items()
                if line in inner
            }
        return {"seconds": self.seconds, "failed": self.failed, "lines": lines}


class Map:
    """A record of which tests execute which lines, and of the CPU seconds of each test.

    lines[file][line]: an integer, whose bit k is 1 if tests[k] executes the line.
    stored: the record in the format of `Mapper.result`.
    """

    def __init__(self, stored: dict[str, Any]):
        self.stored, self.tests = stored, list(stored["seconds"])
        self.seconds: dict[str, float] = stored["seconds"]
        self.lines = {
            f: {int(n): int(bits, 16) for n, bits in by.items()}
            for f, by in stored["lines"].items()
        }

    @classmethod
    def join(cls, parts: Sequence[dict[str, Any]]) -> Map:
        """Combine the records of all test files, and return one record.

        The returned record leaves out tests that fail on the unchanged source.
        parts: for each test file, the dictionary that `Mapper.result` returned.
        """
        seconds: dict[str, float] = {}
        lines: dict[str, dict[str, int]] = collections.defaultdict(
            lambda: collections.defaultdict(int)
        )
        for part in parts:
            good = sum(
                1 << i for i, test in enumerate(part["seconds"]) if test not in part["failed"]
            )
            for file, by in part["lines"].items():
                for line, bits in by.items():
                    lines[file][line] |= (int(bits, 16) & good) << len(seconds)
            seconds |= part["seconds"]
        stored = {f: {line: hex(bits) for line, bits in by.items()} for f, by in lines.items()}
        return cls(
            {
                "seconds": seconds,
                "failed": sorted({t for p in parts for t in p["failed"]}),
                "lines": stored,
            }
        )

    def tests_of(self, mutant: Mutant) -> list[str]:
        """Return all tests that may notice a mutant.

        First are those that execute the mutant's line. If none is known, they are those that
        execute its function, class or file. Last are test_defaults.py and the test file of the
        mutant's file.
        """
        by, tests = self.lines.get(mutant.file, {}), list[str]()
        for first, last in (mutant.lines, *mutant.scopes, (1, 1 << 30)):
            bits = functools.reduce(
                operator.or_, (m for n, m in by.items() if first <= n <= last), 0
            )
            if bits:
                tests = [test for index, test in enumerate(self.tests) if bits >> index & 1]
                break
        blind = (
            DEFAULTS,
            f"/test_{Path(mutant.file).stem}.py::",
        )  # they may look at what has run at import
        return [
            *tests,
            *(
                test
                for test in self.tests
                if any(name in test for name in blind) and test not in tests
            ),
        ]

    def portions(self, mutant: Mutant, cap: float) -> list[list[str]]:
        """Return the tests to run for a mutant: a list of quick tests, then a list of other tests.

        Quick tests are from the files closest to the mutant's file. The second list begins with the
        tests most likely to notice the mutant. Empty lists are left out.
        cap: the CPU seconds of the second list; 0 for no limit.
        """
        own = f"/test_{Path(mutant.file).stem.partition('_')[0]}"
        close = (own, *CLOSE)
        files: dict[str, list[str]] = collections.defaultdict(list)
        for test in sorted(self.tests_of(mutant), key=lambda test: (self.seconds[test], test)):
            files[test.split("::")[0]].append(test)
        ranked = sorted(
            files, key=lambda f: (next((i for i, part in enumerate(close) if part in f), 99), f)
        )
        rounds = (
            files[f][i] for i in range(QUICK) for f in ranked[:QUICK_FILES] if i < len(files[f])
        )
        first, spent = list[str](), 0.0
        for test in rounds:
            if len(first) < QUICK and spent + self.seconds[test] <= QUICK_SECONDS:
                first, spent = [*first, test], spent + self.seconds[test]
        named = [f for f in ranked if own in f or DEFAULTS in f"{f}::"]
        declared = [
            test
            for f in ranked
            for test in files[f]
            if f not in named and any(part in test for part in DECLARED)
        ]
        about = [*(test for f in named for test in files[f]), *declared]
        others = [
            test
            for each in itertools.zip_longest(*(files[f] for f in ranked if f not in named))
            for test in each
            if test not in declared
        ]
        rest, taken = [test for test in (*about, *others) if test and test not in set(first)], 0.0
        within = [t for t in rest if (taken := taken + self.seconds[t]) <= cap or not cap]
        return [part for part in (first, within) if part]


# --- running --------------------------------------------------------------------------------------
WARM = """torch torchvision numpy pyarrow.parquet hydra omegaconf sklearn.datasets
    matplotlib.pyplot safetensors.torch safetensors.numpy scipy.stats numba numba.core.caching ray
    mlflow rich torch.utils.flop_counter threadpoolctl"""


@dataclasses.dataclass
class Asked:
    """A request to run tests in a child process, in a copy of the working tree.

    limit: the allowed CPU time in seconds.
    mapped: True runs whole files, and records which lines each test executes. False stops at the
    first failure.
    """

    tests: Sequence[str]
    limit: float
    mapped: bool = False


RAN = (0, 1, 5)  # pytest's exit codes: all passed, some failed, none in this file
Outcome = dict[str, Any]
Trial = Callable[[Path], Generator[Asked, Outcome, Any]]


class Judge:
    """A pytest plugin that runs only the requested tests, and records the first failed one."""

    def __init__(self, wanted: Sequence[str]):
        self.wanted, self.first = set(wanted), ""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [
            item for item in items if item.nodeid in self.wanted
        ] or items  # a mutant may rename its tests

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.first = self.first or (report.nodeid if report.failed else "")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.first = self.first or (f"import of {report.nodeid}" if report.failed else "")


def warm(packages: Sequence[str]) -> None:
    """Import slow packages, and use one thread, because a fork does not copy other threads.

    packages: the packages, and modules of them. Those that are not installed are left out.
    """
    import torch

    torch.set_num_threads(1)
    for name in packages:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    if "numba" in packages:
        import numba

        numba.njit(lambda x: x + 1.0)(1.0)  # the first compilation loads most of numba


def child(copy: Path, asked: Asked) -> NoReturn:
    """Run tests in this process, write the result to a file, and end this process.

    copy: a copy of the working tree, from which the tests import raysim. It contains the mutant, if
    one is tested. The result goes to its file `.answer`.
    """
    code = 70
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setsid()  # so that whatever the tests start can be ended with it
        os.chdir(copy)
        log = os.open(copy / ".log", os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.path[:] = [
            str(copy),
            *(path for path in sys.path if Path(path).resolve() not in (ROOT, TOOLS)),
        ]
        os.environ["PYTHONPATH"] = str(copy)
        spec = importlib.util.find_spec("raysim")
        assert spec is not None and str(spec.origin).startswith(str(copy)), (
            f"raysim comes from {spec}"
        )
        options = [
            "-q",
            "--no-header",
            "-o",
            "addopts=",
            "-p",
            "no:cacheprovider",
            f"--basetemp={copy}/.tmp",
        ]
        judge: Any = Mapper(copy) if asked.mapped else Judge(asked.tests)
        options += ["-m", "not slow"] if asked.mapped else ["-x"]
        code = int(
            pytest.main(
                [*options, *dict.fromkeys(test.split("::")[0] for test in asked.tests)], [judge]
            )
        )
        answer = judge.result() if asked.mapped else {"first": judge.first}
        if not asked.mapped or code in RAN:
            (copy / ".answer").write_text(json.dumps(answer))
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        sys.stdout.flush()
        os._exit(code)


def stop(pid: int) -> None:
    """End a child process and its descendants."""
    for end in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            end(pid, signal.SIGKILL)


def resident(pid: int) -> int:
    """Return the bytes of memory of a process."""
    with contextlib.suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process and of its children that have ended."""
    with contextlib.suppress(OSError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def drive(trials: Sequence[Trial], copies: Sequence[Path], done: Callable[[Any], None]) -> None:
    """Run trials in parallel, at most one at a time in each copy of the working tree.

    trials: functions that take the folder of a copy and return a generator. The generator yields
    requests to run tests (`Asked`), and receives a dictionary for each request:
    - "verdict": "passed", "killed" (a test failed or the process crashed) or "timeout" (too much
      time or memory).
    - "first": the first test that failed, or another reason.
    - "cpu": the CPU seconds of the tests.
    done: is called with the return value of each generator.
    """
    waiting, free = collections.deque(trials), list(copies)
    running: dict[int, tuple[Path, Generator[Asked, Outcome, Any], float, float]] = {}

    def go_on(copy: Path, trial: Generator[Asked, Outcome, Any], outcome: Any) -> None:
        try:
            asked = trial.send(outcome)
        except StopIteration as end:
            free.append(copy)
            done(end.value)
            return
        (copy / ".answer").unlink(missing_ok=True)
        if not (pid := os.fork()):
            child(copy, asked)
        running[pid] = copy, trial, asked.limit, time.monotonic() + PATIENCE * asked.limit

    try:
        while waiting or running:
            while waiting and free:
                copy = free.pop()
                go_on(copy, waiting.popleft()(copy), None)
            for pid, (copy, trial, limit, deadline) in list(running.items()):
                ended, status, used = os.wait4(pid, os.WNOHANG)
                late = time.monotonic() > deadline or cpu_seconds(pid) > limit
                large = resident(pid) > MOST_BYTES
                if not (ended or late or large):
                    continue
                if not ended:
                    stop(pid)
                    used = os.wait4(pid, 0)[2]
                stop(pid)
                del running[pid]
                answered = (copy / ".answer").exists()
                outcome = (
                    json.loads((copy / ".answer").read_text()) if answered else {"first": "a crash"}
                )
                code = os.waitstatus_to_exitcode(status) if ended else 0
                outcome["verdict"] = (
                    "passed" if ended and code == 0 else "killed" if ended else "timeout"
                )
                outcome["cpu"] = used.ru_utime + used.ru_stime
                outcome["first"] = (
                    "too much memory" if large else outcome.get("first") or f"exit code {code}"
                )
                go_on(copy, trial, outcome)
            time.sleep(0.01)
    finally:
        for pid in running:
            stop(pid)


def copy_working_tree(folder: Path, number: int) -> Path:
    """Copy the working tree to folder/copyNUMBER, and return this path.

    Files that git ignores are not copied.
    """
    copy, command = (
        folder / f"copy{number}",
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
    )
    for name in subprocess.run(
        command, cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    return copy


def map_tests(paths: Sequence[str], copies: Sequence[Path]) -> Map:
    """Run each test file once, in a process of its own, and return the map of lines to tests.

    paths: test files or folders.
    copies: the copies of the working tree to run in.
    """
    found = {
        f
        for path in paths
        for f in ([ROOT / path] if path.endswith(".py") else (ROOT / path).rglob("test_*.py"))
    }
    files = sorted(found, key=lambda file: -file.stat().st_size)
    parts: list[dict[str, Any]] = []

    def trial(file: Path, copy: Path) -> Generator[Asked, Outcome, Any]:
        outcome = yield Asked([str(file.relative_to(ROOT))], 3600.0, mapped=True)
        if "seconds" not in outcome:
            sys.exit(f"no map of {file}: {(copy / '.log').read_text()[-2000:]}")
        return outcome

    def done(part: dict[str, Any]) -> None:
        parts.append(part)
        tests = sum(len(part["seconds"]) for part in parts)
        progress(f"map: {len(parts)} of {len(files)} test files, {tests} tests")

    drive([functools.partial(trial, file) for file in files], copies, done)
    return Map.join(parts)


def check_unmutated(tests: set[str], copies: Sequence[Path]) -> None:
    """End this program with an error if one of these tests fails on the unchanged source.

    copies: the folders with copies of the working tree, in which the tests run in parallel.
    """
    files = sorted({test.split("::")[0] for test in tests})

    def trial(own: set[str], copy: Path) -> Generator[Asked, Outcome, Any]:
        outcome = yield Asked(sorted(test for test in tests if test.split("::")[0] in own), 3600.0)
        if outcome["verdict"] != "passed":
            log = (copy / ".log").read_text()[-3000:]
            sys.exit(
                f"without a mutant, {outcome['first']} is {outcome['verdict']}: "
                f"correct that first\n{log}"
            )

    parts = [set(files[i :: len(copies)]) for i in range(len(copies))]
    drive([functools.partial(trial, part) for part in parts if part], copies, lambda _: None)


def run_mutant(
    number: int, mutant: Mutant, known: Map, cap: float, copy: Path
) -> Generator[Asked, Outcome, Any]:
    """Write a mutant into a copy of the working tree, run tests, and restore the file.

    This generator yields requests to run tests, for `drive`. It returns the result.
    number: the id of the mutant.
    known: which tests execute which lines.
    cap: the largest CPU seconds of the tests after the quick ones; 0 means no limit.
    copy: the folder with the copy.
    """
    path, started = copy / mutant.file, time.monotonic()
    source, stat = path.read_bytes(), path.stat()
    before, after = mutant.texts(source)
    line = source[: mutant.start].count(b"\n") + 1
    result: dict[str, Any] = {
        "id": number,
        "file": mutant.file,
        "line": line,
        "kind": mutant.kind,
        "before": before,
        "after": after,
        "label": mutant.label,
    }
    result |= {
        "verdict": "survived",
        "by": "",
        "tests": 0,
        "covering": len(known.tests_of(mutant)),
        "cpu": 0.0,
    }
    try:
        path.write_bytes(source[: mutant.start] + mutant.new + source[mutant.end :])
        # A time of its own: compiled files of Python and of numba know a source by its time and
        # size.
        os.utime(path, (stat.st_mtime + 2 + number,) * 2)
        for tests in known.portions(mutant, cap):
            seconds = sum(known.seconds[test] for test in tests)
            outcome = yield Asked(tests, min(max(60.0, 5 * seconds), 1800.0))
            result |= {
                "tests": result["tests"] + len(tests),
                "cpu": round(result["cpu"] + outcome["cpu"], 2),
            }
            if outcome["verdict"] != "passed":
                result |= {"verdict": outcome["verdict"], "by": outcome["first"]}
                break
    finally:
        path.write_bytes(source)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    return result | {"seconds": round(time.monotonic() - started, 2)}


# --- telling --------------------------------------------------------------------------------------
def progress(text: str) -> None:
    """Write a line over the previous one on a terminal."""
    print(
        f"\r\033[K{text}" if sys.stdout.isatty() else text,
        end="" if sys.stdout.isatty() else "\n",
        flush=True,
    )


def format_survivor(one: dict[str, Any]) -> str:
    """Return a survivor as a small diff."""
    ran = f"{one['tests']} of {one['covering']} tests" if one["covering"] else "no test runs it"
    texts = [
        f"{sign} {line}"
        for sign, key in (("-", "before"), ("+", "after"))
        for line in one[key].splitlines()
    ]
    reason = [f"= {one['reason']}"] if "reason" in one else []
    place = f"[{one['id']}] {one['file']}:{one['line']} {one['kind']}, {ran}"
    return "\n".join([place, one["label"], *texts, *reason])


def print_results(results: Sequence[dict[str, Any]]) -> None:
    """Print a table of the results by file, and the mutants that survived."""
    rows: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for one in results:
        rows[one["file"]][one["verdict"]] += 1
        rows["all"][one["verdict"]] += 1
    print(
        f"\n{'file':<40}{'made':>6}{'killed':>8}{'timeout':>9}"
        f"{'equiv.':>8}{'survived':>10}{'killed %':>10}"
    )
    for file in sorted(rows, key=lambda name: (name == "all", name)):
        n, made = rows[file], sum(rows[file].values())
        share = 100 * (n["killed"] + n["timeout"]) / max(1, made - n["equivalent"])
        counts = f"{n['killed']:>8}{n['timeout']:>9}{n['equivalent']:>8}{n['survived']:>10}"
        counts += f"{share:>10.1f}"
        print(f"{file:<40}{made:>6}{counts}")
    for one in results:
        if one["verdict"] in ("survived", "equivalent"):
            print(f"\n{format_survivor(one)}")


def chosen(root: Path, args: argparse.Namespace) -> dict[int, Mutant]:
    """Return the mutants to run, by id.

    The id of a mutant is its position in the list of `sampled` for --only, --count and --seed. With
    --ids, only mutants with these ids are returned.
    """
    mutants = dict(enumerate(sampled(root, args.only, args.count, args.seed)))
    return (
        {number: mutants[number] for number in map(int, args.ids.split(","))}
        if args.ids
        else mutants
    )


def print_mutants(mutants: dict[int, Mutant]) -> None:
    """Print the mutants without running tests."""
    for number, mutant in mutants.items():
        before, after = mutant.texts((ROOT / mutant.file).read_bytes())
        print(f"[{number}] {mutant.file} {mutant.kind}\n- {before}\n+ {after}")
    print(f"{len(mutants)} mutants")


def main() -> None:
    """Test mutants of raysim, each of which is the source with one change.

    Print which mutants no test notices, and write all results to the JSON file of --out. With
    --list, only print the mutants.
    """
    about = __doc__.partition("\n")[0]
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--count", type=int, default=700, help="mutants, about")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("mutants.json"))
    parser.add_argument(
        "--map", type=Path, help="which test runs which line, as an earlier run stored it"
    )
    parser.add_argument(
        "--tests", nargs="+", default=["tests"], help="files or folders that the map is made from"
    )
    parser.add_argument("--only", nargs="+", default=ROOMS, help="files to mutate (globs)")
    parser.add_argument(
        "--ids", help="only these of the sample, e.g. 12,57; their results replace those in --out"
    )
    parser.add_argument(
        "--cap",
        type=float,
        default=30.0,
        help="most CPU seconds of tests per mutant by the map; 0: all",
    )
    parser.add_argument(
        "--warm",
        nargs="*",
        default=WARM.split(),
        help="slow packages to import once, before the tests; few tests need few of them",
    )
    parser.add_argument("--list", action="store_true", help="print the mutants and stop")
    args = parser.parse_args()

    if args.list:
        return print_mutants(chosen(ROOT, args))
    if os.environ.get("RAYSIM_SHARED"):
        os.environ["RAYSIM_SHARED"] = str(Path(os.environ["RAYSIM_SHARED"]).resolve())
    # Asked for by a test of pytest-xdist, its own tests would leave as workers do, without a map.
    os.environ.pop("PYTEST_XDIST_WORKER", None)
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that children and copies go
    warm(args.warm)
    reasons = {(entry["file"], entry["change"]): entry["reason"] for entry in equivalents()}
    old = json.loads(args.out.read_text())["mutants"] if args.ids and args.out.exists() else []
    results: dict[int, dict[str, Any]] = {one["id"]: one for one in old}
    new, started = list[dict[str, Any]](), time.monotonic()

    def write_results() -> list[dict[str, Any]]:
        """Write the results so far to --out, and return them in the order of their ids."""
        ordered = [results[number] for number in sorted(results)]
        settings = {"count": args.count, "seed": args.seed, "only": args.only, "cap": args.cap}
        args.out.write_text(json.dumps({**settings, "mutants": ordered}, indent=1))
        return ordered

    def done(one: dict[str, Any]) -> None:
        reason = reasons.get((one["file"], one["label"]))
        if one["verdict"] == "survived" and reason:
            one |= {"verdict": "equivalent", "reason": reason}
        results[one["id"]] = one
        new.append(one)
        if len(new) % 10 == 0:
            write_results()
        if sys.stdout.isatty() or len(new) % 10 == 0:
            left, minutes = (
                sum(each["verdict"] == "survived" for each in new),
                (time.monotonic() - started) / 60,
            )
            progress(f"{len(new)} of {len(mutants)} mutants, {left} survived, {minutes:.1f} min")

    with tempfile.TemporaryDirectory(
        prefix="raysim-mutants-", ignore_cleanup_errors=True
    ) as folder:
        copies = [copy_working_tree(Path(folder), number) for number in range(args.jobs)]
        mutants = chosen(copies[0], args)
        known = Map(json.loads(args.map.read_text())) if args.map else map_tests(args.tests, copies)
        if not args.map:
            args.out.with_suffix(".map.json").write_text(json.dumps(known.stored))
        print(
            f"\n{len(known.tests)} tests; left out, as they fail without a mutant: "
            f"{known.stored['failed'] or 'none'}"
        )
        portions = [known.portions(mutant, args.cap)[:1] for mutant in mutants.values()]
        check_unmutated({test for parts in portions for part in parts for test in part}, copies)
        started = time.monotonic()
        trials = [
            functools.partial(run_mutant, number, mutant, known, args.cap)
            for number, mutant in mutants.items()
        ]
        with contextlib.suppress(KeyboardInterrupt):
            drive(trials, copies, done)
    print_results(write_results())


def equivalents() -> list[dict[str, str]]:
    """Return the mutants that no test can notice, with the reason for each."""
    return list(tomllib.loads((TOOLS / "equivalent_mutants.toml").read_text())["mutant"])


if __name__ == "__main__":
    main()
