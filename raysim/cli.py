"""The command `raysim`: run, methods, partition, report, bench; parse, call, print.

Exit status: 0 done, 1 the run failed, 2 refused as asked (one sentence on stderr), 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from raysim.errors import Refused, instead, refusing

RUN = """\
examples:
  raysim run                                              the default study, on Ray
  raysim run method=[fedprox] method.fedprox.mu=0.1       another method, and a value of it
  raysim run method=[fedbn,fedadam] model.norm=batch      methods combine
  raysim run data=fashion_mnist model=cnn partition=shards partition.shards_per_client=2
  raysim run schedule=buffered fleet=lognormal method=[fedbuff]
  raysim run experiment=fedbr/rotated_mnist data.root=DIR a row of a paper's table
  raysim run runtime=inprocess rounds=5 tracking=none     quick, without Ray and MLflow
  raysim run out=runs/mine                                where the results go
  raysim run out=runs/mine resume=latest                  go on where it stopped, to the same bits

The groups method, schedule, fleet, data, partition, model, local, evaluate, runtime, tracking and experiment take the
name of an option; all other keys take a value. A wrong name is answered with the nearest right one."""
METHODS = """\
examples:
  raysim methods          a table: name, paper, slots, parameters
  raysim methods --json   the same for programs"""
PARTITION = """\
examples:
  raysim partition                                             the default study's split
  raysim partition partition=dirichlet partition.alpha=0.1     a harder one
  raysim partition data=mnist data.root=DIR partition=shards --out shards.png"""
REPORT = """\
examples:
  raysim report runs/a                    one run
  raysim report runs/a runs/b --out page  a table, overlaid curves, and page/report.html
  raysim report --paper fedbr             the tables of a paper (fedbr, fedbss, fedld, fraug)
  raysim report --paper fedbr/table1 runs/*
                                          that table, the paper's numbers beside ours; commands for what is missing"""
BENCH = """\
examples:
  raysim bench                              all workloads
  raysim bench W2 W3 --blocks 3             some of them, sooner
  raysim bench W1 --data DIR --out w1.json  DIR holds FashionMNIST
  raysim bench steps                        what each method adds to a local step
  raysim bench rules                        what each method adds to the server's step"""
MAIN = """\
examples:
  raysim run                          train the default study
  raysim run method=[fedbr,mixup]     any list of methods
  raysim run -h                       how to choose data, models, schedules
  raysim methods                      what can be in such a list
  raysim partition partition.alpha=1  look at a split before training
  raysim report runs/*                compare runs
  raysim report --paper fedbr/table1  a published table, and how to make its rows"""


class Parser(argparse.ArgumentParser):
    """Answers a wrong command line in one sentence."""

    def error(self, message: str) -> NoReturn:
        """Exit with status 2."""
        self.exit(2, f"raysim: {message}: see {self.prog} -h\n")


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit."""
    sys.exit(call(list(sys.argv[1:] if argv is None else argv)))


def call(words: Sequence[str]) -> int:
    """Run one command; returns the exit status."""
    # Ray reads both when it is imported; a user's own values stay.
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    if words and not words[0].startswith("-") and words[0] not in COMMANDS:
        sys.stderr.write(f"raysim: there is no command {words[0]}: {instead(words[0], COMMANDS)}\n")
        return 2
    given, unknown = (parser := _parser()).parse_known_args(words)
    if dashed := [word for word in unknown if word.startswith("-")]:
        parser.error(f"there is no option {dashed[0]}")
    for words_of in ("overrides", "runs"):  # argparse stops collecting them at the first option
        if unknown and hasattr(given, words_of):
            getattr(given, words_of).extend(unknown)
            unknown = []
    if unknown:
        parser.error(f"'{unknown[0]}' has no meaning here")
    if not given.command:
        parser.print_help()
        return 0
    return _guarded(lambda: COMMANDS[given.command](given))


def _guarded(command: Callable[[], int]) -> int:
    """What ends a command early, as a sentence and a status."""
    try:
        return command()
    except Refused as error:
        return _say(str(error), 2)
    except KeyboardInterrupt as error:
        return _say(str(error) or "stopped before the run began: nothing was written", 130)
    except RuntimeError as error:
        from raysim.events import RunStopped

        if not isinstance(error, RunStopped):
            raise
        return _say(str(error).strip(), 1)
    except BrokenPipeError:  # the reader of our output has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _say(sentence: str, status: int) -> int:
    sys.stderr.write(f"raysim: {sentence}\n")
    return status


def _parser() -> Parser:
    parser = Parser(
        prog="raysim",
        description="Federated-learning simulation: same bits in process and on Ray, synchronous or not.",
        epilog=MAIN,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    def add(name: str, text: str, epilog: str) -> argparse.ArgumentParser:
        style = argparse.RawDescriptionHelpFormatter
        return commands.add_parser(name, help=text, description=text.capitalize(), epilog=epilog, formatter_class=style)

    run = add("run", "train one study and record it", RUN)
    _configurable(run)
    run.add_argument("--quiet", action="store_true", help="print nothing but errors")
    methods = add("methods", "list the methods: paper, slots, parameters", METHODS)
    methods.add_argument("--json", action="store_true", help="as JSON")
    partition = add("partition", "print statistics of a split, and draw it", PARTITION)
    _configurable(partition)
    partition.add_argument("--out", default="partition.png", metavar="FILE", help="the picture (partition.png)")
    report = add("report", "compare runs: one table, overlaid curves, one HTML page", REPORT)
    report.add_argument("runs", nargs="*", metavar="RUN", help="folders that runs wrote")
    report.add_argument("--out", metavar="DIR", help="where the pictures and the page go (report)")
    report.add_argument("--paper", metavar="TABLE", help="print a published table, such as fedbr/table1, beside runs")
    bench = add("bench", "measure speed against a bare PyTorch loop", BENCH)
    bench.add_argument("runs", nargs="*", metavar="WORKLOAD", help="W1, W2 and W3 unless given; or steps, or rules")
    bench.add_argument("--data", metavar="DIR", help="where FashionMNIST is; downloaded if nowhere")
    bench.add_argument("--out", default="bench.json", metavar="FILE", help="the results (bench.json)")
    bench.add_argument("--blocks", type=int, default=7, help="blocks of rounds, each beside one of the bare loop (7)")
    bench.add_argument("--hosts", type=int, default=2, help="processes of one thread, on both sides (2)")
    return parser


def _configurable(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="what differs from the default study")
    parser.add_argument(
        "--conf", action="append", default=[], metavar="DIR", help="a folder of your own options, laid out like conf"
    )
    parser.add_argument(
        "--allow", action="append", default=[], metavar="PREFIX", help="let the configuration name classes of PREFIX"
    )


# --- commands -------------------------------------------------------------------------------------------------------
def _run(given: argparse.Namespace) -> int:
    from raysim.config import compose

    config = compose(given.overrides, given.conf)  # before torch is imported: a typing mistake is answered at once
    if given.allow:
        sys.path.insert(0, os.getcwd())  # as `python` does for code of the user's own
    from raysim.experiment import run

    run(config, quiet=given.quiet, allow=given.allow)
    return 0


def _methods(given: argparse.Namespace) -> int:
    import json

    from raysim.experiment import catalogue

    entries = catalogue()
    if given.json:
        print(json.dumps(entries, indent=2))
        return 0
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table("name", "paper", "slots", "parameters", box=box.SIMPLE_HEAD)
    table.columns[-1].overflow = "fold"
    for entry in entries:
        values = "\n".join(f"{key}={value}" for key, value in entry["parameters"].items())
        table.add_row(entry["name"], entry["paper"], ", ".join(entry["slots"]), values)
    Console().print(table)
    return 0


def _partition(given: argparse.Namespace) -> int:
    from raysim.config import compose

    config = compose(given.overrides, given.conf)
    from raysim.data.federated import draw_partition, statistics
    from raysim.experiment import partition

    data = partition(config, given.allow)
    picture = Path(given.out)
    numbers = statistics(data)
    numbers.pop("counts")
    print(data.title)
    for key, value in numbers.items():
        text = (
            ", ".join(f"{name} {number:g}" for name, number in value.items())
            if isinstance(value, dict)
            else f"{value:g}"
        )
        print(f"  {key.replace('_', ' '):<20}{text}")
    with refusing():
        picture.parent.mkdir(parents=True, exist_ok=True)
        draw_partition(data, picture)
    print(f"drawn in {picture}")
    return 0


def _report(given: argparse.Namespace) -> int:
    if given.paper is not None:
        return _paper(given)
    if not given.runs:
        raise Refused("report needs the folders of runs, or --paper and the name of a published table")
    from raysim.report import compare, load_run, table

    with refusing():
        runs = [load_run(Path(folder)) for folder in given.runs]
        print(table(runs))
        page = compare(runs, Path(given.out or "report"))
    print(f"\ncurves and table: {page}")
    return 0


def _paper(given: argparse.Namespace) -> int:
    """A published table beside runs, or the tables that a paper has."""
    import shutil

    from raysim.papers.comparison import compare
    from raysim.papers.tables import listing
    from raysim.report import load_run

    if given.out is not None:
        raise Refused(f"--out {given.out} has no effect with --paper, which prints text alone: leave it out")
    if "/" not in given.paper:
        if given.runs:
            raise Refused(f"--paper {given.paper} names no table to put runs in: write --paper {given.paper}/table1")
        print(listing(given.paper))
        return 0
    with refusing():
        runs = [load_run(Path(folder)) for folder in given.runs]
        print(compare(given.paper, runs, shutil.get_terminal_size((120, 24)).columns))
    return 0


def _bench(given: argparse.Namespace) -> int:
    from raysim import bench

    with refusing():
        if min(given.blocks, given.hosts) < 1:
            raise Refused(f"--blocks {given.blocks} and --hosts {given.hosts} must be at least 1")
        bench.main(given.runs or list(bench.WORKLOADS), given.data, Path(given.out), given.blocks, given.hosts)
    return 0


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "run": _run,
    "methods": _methods,
    "partition": _partition,
    "report": _report,
    "bench": _bench,
}
