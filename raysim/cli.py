"""Implement the command `raysim`: run, study, sweep, submit, fetch, methods, new, ...

Exit status: 0 done, 1 a run failed or the output cannot be written, 2 refused (one sentence on
stderr), 130 interrupted. `raysim submit` has the exit status of the job.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from raysim.primitives.errors import RefusedError, errors_as_refusals, on_one_line, suggest
from raysim.primitives.files import is_disk_full, make_folder, user_path, without_password
from raysim.primitives.interrupts import keep_interrupts, notice_interrupts
from raysim.primitives.output import lossy_output, terminal_width

RUN = """\
examples:
  raysim run                                              the default configuration, on Ray
  raysim run method=fedprox method.fedprox.mu=0.1         another method, and one of its values
  raysim run method=fedbn+fedadam model.norm=batch        several methods; fedavg is none
  raysim run data=fashion_mnist model=cnn partition=shards partition.shards_per_client=2
  raysim run schedule=buffered fleet=lognormal method=fedbuff
  raysim run experiment=fedbr/rotated_mnist data.root=DIR  a row of a paper's table
  raysim run runtime=inprocess rounds=5 tracking=none     quick, without Ray and MLflow
  raysim run out=runs/mine                                where the results go
  raysim run out=runs/mine resume=latest                  continue, to the same bits
  raysim run out=runs/mine --auto-resume                  start or continue, as clusters need
  raysim run method=fedprox --show                        print the configuration, run nothing

An override is key=value. The groups method, schedule, selection, fleet, topology, data, partition,
model, loss, learner, compression, local, evaluate, runtime, observer, tracking and experiment take
the name of an option; all other keys take a value.
A wrong name is answered with the nearest right one, or with all right ones. No override above needs
quotes in bash or zsh.
Brackets do: 'method=[fedbn,fedadam]' is the same as method=fedbn+fedadam."""
STUDY = """\
examples:
  raysim study method=fedavg,fedprox,scaffold seed=0..4 rounds=20 out=studies/mine
                              15 runs: a comma separates values, 0..4 counts; fedavg is no method
  raysim study method=fedavg,fedbr+mixup  a + joins the methods of one run
  raysim study method=fedavg,fedprox partition.alpha=0.1,0.5 seed=0,1,2 method.fedprox.mu=0.1
                              a key that only some runs have (fedprox.mu) applies only to them
  raysim study out=studies/mine resume=latest
                              continue where it stopped; finished runs stay
  raysim study out=studies/mine resume=latest seed=0..9 --metric best5_mean
                              more seeds, and another number to compare
  raysim report studies/mine              a curve for each setting: the mean over its seeds

The other methods are compared with the first one, seed by seed: mean difference, 95 % interval,
paired t-test with Holm's correction, Wilcoxon's test from six seeds on. Where no method varies, the
values of the first key that varies are compared."""
SUBMIT = """\
examples:
  raysim submit run method=fedprox out=/shared/runs/first
                    on the cluster at $RAY_API_SERVER_ADDRESS or $RAY_ADDRESS, else at
                    http://127.0.0.1:8265
  raysim submit --address http://HEAD:8265 sweep sweep=fedbr method=fedbr out=/shared/sweeps/fedbr
  raysim submit --with mine run --allow mine method=mine out=/shared/runs/mine
  raysim submit --runtime-env jobs/runtime_env.yaml run out=/shared/runs/first
                    where the nodes have Ray alone: installs the rest

Uploads the package and its configuration, and shows the job's output; Ctrl-C leaves the job
running. The exit status is that of the job. The command joins the cluster (runtime=cluster) unless
it names a runtime or continues a study or sweep. See jobs/README.md."""
FETCH = """\
examples:
  raysim fetch raysubmit_Ab12Cd34     the results of this job, into a folder with the
                                      name of the job's out=
  raysim fetch raysubmit_Ab12Cd34 runs/first --address http://HEAD:8265
  raysim fetch raysubmit_Ab12Cd34 --checkpoints --limit 2000
  raysim fetch s3://BUCKET/first      the results of a run with out=s3://BUCKET/first

Works while the job runs, too. Nodes and this machine need no shared disk: the files travel through
the job server's address. Files that exist here are replaced."""
METHODS = """\
examples:
  raysim methods                  a list: name, paper, hooks, parameters
  raysim methods fedbr            one method: formulas, choices, settings
  raysim methods --json           the same for programs
  raysim methods --allow mine     with those of your own package"""
PARTITION = """\
examples:
  raysim partition                                             the default partition
  raysim partition partition=dirichlet partition.alpha=0.1     a more uneven one
  raysim partition data=mnist data.root=DIR partition=shards --out shards.png"""
FLEET = """\
examples:
  raysim fleet convert client_device_capacity client_behave_trace --out trace.parquet
                              FedScale's device data as a trace, for raysim run fleet=trace
  raysim fleet check trace.parquet        describe a trace, or say what is wrong with it

The head of raysim/simulation/trace.py describes the file, for your own traces."""
FLOWER = """\
examples:
  raysim flower run                       the Flower app in this folder, as `flwr run` would
  raysim flower run APP --run-config "num-server-rounds=5 learning-rate=0.05"
                                          another folder, with other values of the app's run config
  raysim flower run APP clients=100 fleet=lognormal fleet.dropout=0.1 samples=600
                                          100 clients on devices of different speeds
  raysim flower run APP out=runs/app      store all replies; the same command with resume=latest
                                          continues after a kill, to the same numbers
  raysim flower run APP seed=0..4         five runs, and a table of their numbers
  raysim flower run APP runtime=inprocess without Ray

Keys: clients, samples (that a training takes on the virtual clock), seed, fleet, runtime, device,
out, resume. raysim run learner=flower learner.folder=APP trains the app's clients with raysim's
schedules and methods; see docs/coming_from.md."""
SWEEP = """\
examples:
  raysim sweep sweep=fedbr method=fedbr                   FedBR's weights, 16 random settings
  raysim sweep sweep=fedbr method=fedbr sweep.search=optuna sweep.scheduler=asha sweep.trials=30
  raysim sweep sweep=methods sweep.seeds=3 rounds=30      methods themselves, each with three seeds
  raysim sweep method=fedprox method.fedprox.mu=0.01,0.1,1 sweep.search=grid
                              a list of values makes a key part of the space
  raysim sweep method=fedavg,fedbr local.lr='tag(log, interval(1e-3, 1))'
                              so does a range; tag(log, ...) draws magnitudes equally often
  raysim sweep method=fedavg local.epochs='int(interval(1, 10))'
                              a range of whole numbers
  raysim sweep sweep=fedbr method=fedbr sweep.scheduler=pbt sweep.interval=5
                              values change during the runs
  raysim sweep sweep=fedprox method=fedprox sweep.workers=2 runtime=cluster
                              two workers for each trial, on a cluster
  raysim sweep out=runs/mine resume=latest                continue where it stopped
  raysim run --config runs/mine/best.yaml seed=7          train the best setting again

The options of a sweep are sweep.search (random, grid, optuna), scheduler (none, asha, pbt), trials,
metric, mode, seeds, concurrent, workers, grace and reduction (of asha), interval (of pbt), minutes.
All other overrides are those of `raysim run` and hold for all trials; a key of the space that is
given one value is not searched."""
NEW = """\
examples:
  raysim new mine                         the folder mine: a part of each kind, options and tests
  raysim run --allow mine method=mine     train with its method, in that folder

Once the package is installed (uv pip install -e .), --allow is not needed."""
REPORT = """\
examples:
  raysim report runs/a                    one run
  raysim report runs/a runs/b --out page  a table, overlaid curves, and page/report.html
  raysim report runs/* --latex            means over seeds, for a paper
  raysim report studies/mine --format pdf --percent --labels fedavg=FedAvg,fedprox=FedProx
                                          figures and LaTeX tables for a paper
  raysim report studies/mine --columns final,rounds_to.0.80 --order fedavg
                                          some numbers, tested against FedAvg
  raysim report runs/* --csv              every number of every run"""
UI = """\
examples:
  raysim ui                             the runs in the folder runs, also while they train
  raysim ui studies/mine                the runs of a study
  raysim ui --port 5001 --no-browser    on another port; prints the address
  raysim ui --update                    only write runs/mlflow.db, for programs that read it
  raysim ui http://MLFLOW:5000          the page of a server

MLflow opens an experiment on traces of language models; this opens it on the charts of its runs.
Ctrl-C ends the server."""
BENCH = """\
examples:
  raysim bench                              all workloads
  raysim bench W2 W3 --blocks 3             some of them, in less time
  raysim bench W1 --data DIR --out w1.json  DIR holds FashionMNIST
  raysim bench W2 --floor --lanes 25        with a tuned loop, too; 25 clients at once on a worker
  raysim bench W1 --profile                 where the time goes
  raysim bench steps                        what each method adds to a local step
  raysim bench gpu --out bench-gpu          what needs a GPU, without Ray"""
WORKLOADS = ("W1", "W2", "W3")
SEPARATE_BENCHMARKS = ("steps", "gpu")  # each is measured by itself
IN_CHECKOUT = ("rules", "scale", "states", "cluster")  # in jobs/benchmarks, not in the package
_BENCH_OUT = "bench.json"
COMPLETION = """\
examples:
  eval "$(raysim completion bash)"    in ~/.bashrc
  eval "$(raysim completion zsh)"     in ~/.zshrc

Then Tab completes commands, flags, keys and the names of a group's options: method=fedbr+mi,
local.l, partition=."""
MAIN = """\
examples:
  raysim run                          train the default configuration
  raysim run method=fedbr+mixup       any list of methods
  raysim run -h                       how to choose data, models, schedules
  raysim study method=fedavg,fedprox seed=0,1,2
                                      methods x seeds as one job with one report
  raysim methods                      the methods that can be in such a list
  raysim partition partition.alpha=1  look at a partition before training
  raysim report runs/*                compare runs
  raysim ui                           the charts of all runs, in MLflow
  raysim help study                   explain a command by examples"""


# Flags of Hydra, of Ray Tune and of earlier versions, with what replaces them.
FOREIGN_FLAGS = {
    **dict.fromkeys(
        ("-m", "--multirun"), "raysim study method=fedavg,fedprox seed=0..4 makes a run of each"
    ),
    **dict.fromkeys(
        ("-c", "--cfg", "-i", "--info", "--resolve"), "raysim run --show prints the configuration"
    ),
    **dict.fromkeys(
        ("-cd", "--config-dir", "-cp", "--config-path"),
        "--conf DIR adds a folder of your own options",
    ),
    **dict.fromkeys(
        ("-cn", "--config-name"),
        "experiment=NAME takes a preset, --config FILE a stored configuration",
    ),
    "--paper": (
        "in a checkout, uv run python -m jobs.papers.report fedbr/table1 prints a published table"
    ),
    **dict.fromkeys(
        ("--num-samples", "--num_samples"), "raysim sweep sweep.trials=N sets the number of trials"
    ),
    "--hosts": "raysim bench --workers N sets the number of workers",
}
STOPPED = "stopped before the command had finished"
CLASS_STATISTICS = ("classes_per_client", "heterogeneity", "pooled_entropy")  # of labels alone


class Parser(argparse.ArgumentParser):
    """An argument parser that reports wrong arguments in one sentence."""

    def error(self, message: str) -> NoReturn:
        """Print the message and exit with status 2."""
        self.exit(2, f"raysim: {message}: see {self.prog} -h\n")


# --- the process --------------------------------------------------------------------------------
def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit.

    argv: the words of the command line after `raysim`; None takes them from `sys.argv`.
    """
    notice_interrupts()
    status = call(list(sys.argv[1:] if argv is None else argv))
    # Exit quietly; Python would print a traceback for a Ctrl-C from here on.
    signal.signal(signal.SIGINT, lambda *_: os._exit(status))
    sys.exit(status)


def call(argv: Sequence[str]) -> int:
    """Run one command; return its exit status."""
    with lossy_output(sys.stdout, sys.stderr):
        return _call(argv)


def _call(argv: Sequence[str]) -> int:
    prepare_ray()
    # zsh passes on a comment that is pasted with a command.
    argv = [*itertools.takewhile(lambda argument: argument != "#", argv)]
    if "_ARGCOMPLETE" in os.environ:
        _complete()
    if argv[:1] == ["help"]:
        argv = [*argv[1:2], "-h"]
    if argv[:1] == ["--version"]:
        return _print_version()
    if argv and not argv[0].startswith("-") and argv[0] not in COMMANDS:
        sys.stderr.write(f"raysim: there is no command {argv[0]}: {suggest(argv[0], COMMANDS)}\n")
        return 2
    arguments = parse_arguments(argv)
    if not arguments.command:
        _parser().print_help()
        return 0
    interrupted = STOPPED
    if arguments.command == "run":
        interrupted = "stopped before the run began; nothing was written"
    return exit_status(
        lambda: COMMANDS[arguments.command](_import_packages(arguments)), interrupted
    )


def prepare_ray() -> None:
    """Set the environment variables that Ray reads at import; keep values that the user set."""
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    os.environ.setdefault("RAY_AUTH_MODE", "token")


def exit_status(command: Callable[[], int], interrupted: str = STOPPED) -> int:
    """Run a command and return its exit status; print an expected error as one sentence.

    interrupted: the sentence after a Ctrl-C, if the `KeyboardInterrupt` has no text of its own.
    """
    try:
        with keep_interrupts():
            status = command()
        sys.stdout.flush()
        return status
    except RefusedError as error:
        return _print_error(on_one_line(error), 2)
    except KeyboardInterrupt as error:
        return _print_error(str(error) or interrupted, 130)
    except RuntimeError as error:
        from raysim.simulation.events import RunStoppedError

        if not isinstance(error, RunStoppedError):
            raise
        return _print_error(str(error).strip(), 1)
    except BrokenPipeError:  # the program that reads our output has ended
        _discard_output()
        return 0
    except OSError as error:
        if not is_disk_full(error):
            raise
        _discard_output()
        return _print_error(f"the output cannot be written: {error.strerror}", 1)


def _discard_output() -> None:
    # The disk or the pipe behind stdout fails, so Python could not write the rest at its exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def warn(sentence: str) -> None:
    """Print a sentence to stderr."""
    _print_error(sentence, 0)


def _print_error(sentence: str, status: int) -> int:
    sys.stderr.write(f"raysim: {sentence}\n")
    return status


# --- the arguments ------------------------------------------------------------------------------
def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Return the arguments of a command; wrong arguments end the process with status 2."""
    parser = _parser()
    for argument in argv:
        replacement = FOREIGN_FLAGS.get(argument.partition("=")[0])
        if replacement:
            parser.exit(2, f"raysim: there is no flag {argument}: {replacement}\n")
    arguments, unknown = parser.parse_known_args(argv)
    command = f"{parser.prog} {arguments.command}" if arguments.command else parser.prog
    flags = [argument for argument in unknown if argument.startswith("-")]
    if flags:
        flag = flags[0].partition("=")[0]
        override = _override_for_flag(arguments, argv, flags[0])
        question = f"did you mean {override}? " if override else ""
        parser.exit(2, f"raysim: there is no flag {flag}: {question}see {command} -h\n")
    for name in ("overrides", "runs", "words"):  # argparse stops collecting them at the first flag
        if unknown and hasattr(arguments, name):
            getattr(arguments, name).extend(unknown)
            unknown = []
    if unknown:
        parser.exit(
            2, f"raysim: '{unknown[0]}' is not an argument of {command}: see {command} -h\n"
        )
    return arguments


def _override_for_flag(arguments: argparse.Namespace, argv: Sequence[str], flag: str) -> str:
    """Return the override that the user probably meant by an unknown flag.

    For "--round 5" this is "rounds=5". Return "" if no key is similar.
    arguments: the parsed arguments, which say whether the command takes overrides.
    argv: all arguments as the user wrote them.
    """
    if not hasattr(arguments, "overrides"):
        return ""
    import difflib

    from raysim.experiment.completion import completions

    keys = [text.removesuffix("=") for text in completions("", arguments.overrides, arguments.conf)]
    names = {key.rpartition(".")[2]: key for key in reversed(keys)}  # lr is local.lr, too
    names |= {key: key for key in keys}
    name, _, value = flag.lstrip("-").partition("=")
    similar = difflib.get_close_matches(name.replace("-", "_"), names, 1, 0.8)
    if not similar:
        return ""
    following = [*argv[argv.index(flag) + 1 :], ""][0]
    if not value and not following.startswith("-") and "=" not in following:
        value = following
    return f"{names[similar[0]]}={value or 'VALUE'}"


def _import_packages(arguments: argparse.Namespace, are_remote: bool = False) -> argparse.Namespace:
    """Import the packages that --allow names, and add their folders of options to `arguments.conf`.

    Return the changed arguments.
    are_remote: True if the command will run on another machine. The folders are then added, but the
    packages are not imported.
    """
    if getattr(arguments, "allow", None):
        from raysim.experiment.plugins import allow_packages, conf_folders_of

        sys.path.insert(0, os.getcwd())  # as `python` does for the user's own code
        folders = (conf_folders_of if are_remote else allow_packages)(arguments.allow)
        arguments.conf = [*map(str, folders), *arguments.conf]
    return arguments


def _complete() -> NoReturn:
    """Print the completions for the shell that requested them."""
    import argcomplete

    argcomplete.autocomplete(_parser())
    sys.exit(0)


class Commands:
    """The subcommands of the parser, with the texts of their help."""

    def __init__(self, parser: argparse.ArgumentParser):
        self._commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    def add(self, name: str, text: str, examples: str = "") -> argparse.ArgumentParser:
        """Add a subcommand and return its parser.

        text: the line in the list of commands.
        examples: shown at the end of the subcommand's help.
        """
        return self._commands.add_parser(
            name,
            help=text,
            description=text[0].upper() + text[1:],  # names keep their case
            epilog=examples,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )


def _parser() -> Parser:
    parser = Parser(
        prog="raysim",
        description="Simulate federated learning, in one process or on Ray, with the same results.",
        epilog=MAIN,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print raysim's version")
    commands = Commands(parser)
    _add_run(commands)
    _add_study(commands)
    _add_sweep(commands)
    _add_submit(commands)
    _add_fetch(commands)
    _add_methods(commands)
    _add_partition(commands)
    _add_fleet(commands)
    _add_flower(commands)
    _add_new(commands)
    _add_report(commands)
    _add_ui(commands)
    _add_bench(commands)
    _add_completion(commands)
    commands.add("help", "show this, or explain a command: raysim help run")
    return parser


def _add_run(commands: Commands) -> None:
    run = commands.add("run", "train one configuration and record it", RUN)
    _add_overrides(run)
    _add_quiet(run)
    run.add_argument(
        "--auto-resume",
        action="store_true",
        help="start the run in out=DIR, or continue it if the folder exists already",
    )
    run.add_argument(
        "--config",
        metavar="FILE",
        help="file with the complete configuration of a run, such as a sweep's best.yaml",
    )
    run.add_argument(
        "--show", action="store_true", help="print the configuration as YAML, and run nothing"
    )


def _add_study(commands: Commands) -> None:
    study = commands.add(
        "study",
        "train all combinations of methods, seeds and settings; print means, deviations and tests",
        STUDY,
    )
    _add_overrides(study)
    study.add_argument(
        "--parallel",
        type=int,
        default=1,
        metavar="N",
        help="number of runs that train at the same time, each in a process of its own (1)",
    )
    study.add_argument(
        "--metric",
        action="append",
        default=[],
        metavar="NAME",
        help="key of summary.json whose values the report compares; may be given several times",
    )


def _add_sweep(commands: Commands) -> None:
    sweep = commands.add("sweep", "search for good settings with Ray Tune", SWEEP)
    _add_overrides(sweep)
    _add_quiet(sweep)


def _add_submit(commands: Commands) -> None:
    submit = commands.add(
        "submit", "run a command on a Ray cluster, print its output, return its exit status", SUBMIT
    )
    submit.add_argument(
        "words",
        nargs=argparse.REMAINDER,
        metavar="COMMAND",
        help="the command to run there: run, study or sweep, with its usual arguments",
    )
    submit.add_argument(
        "--address", metavar="URL", help="the cluster's job server, http://HOST:8265"
    )
    submit.add_argument(
        "--with",
        action="append",
        default=[],
        dest="extra",
        metavar="PATH",
        help="another file or folder to upload with the code; may be given several times",
    )
    submit.add_argument(
        "--limit",
        type=float,
        default=50.0,
        metavar="MB",
        help="largest size of the files to upload, in MB (50)",
    )
    submit.add_argument(
        "--runtime-env",
        metavar="FILE",
        help="YAML file with Ray's runtime_env: packages and variables that each node needs",
    )
    submit.add_argument(
        "--no-wait", action="store_true", help="end at once, without the output of the job"
    )


def _add_fetch(commands: Commands) -> None:
    fetch = commands.add("fetch", "bring the results of a submitted job to this machine", FETCH)
    fetch.add_argument(
        "job", metavar="JOB", help="id that `raysim submit` printed, or out=URL of a run"
    )
    fetch.add_argument(
        "target",
        nargs="?",
        metavar="DIR",
        help="local folder for the results (by default with the name of the job's folder)",
    )
    fetch.add_argument(
        "--address", metavar="URL", help="the cluster's job server, http://HOST:8265"
    )
    fetch.add_argument(
        "--folder",
        metavar="DIR",
        help="folder of the results on the node that ran the job (the out= of its command)",
    )
    fetch.add_argument("--checkpoints", action="store_true", help="also fetch the checkpoints")
    fetch.add_argument(
        "--limit",
        type=float,
        default=200.0,
        metavar="MB",
        help="largest size of the archive to fetch, in MB (200)",
    )


def _add_methods(commands: Commands) -> None:
    methods = commands.add("methods", "list all methods, or explain some of them", METHODS)
    methods.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help="method to explain: its formulas, design choices and settings",
    )
    methods.add_argument("--json", action="store_true", help="print JSON, for programs")
    _add_packages(methods)


def _add_partition(commands: Commands) -> None:
    partition = commands.add("partition", "print statistics of a partition, and draw it", PARTITION)
    _add_overrides(partition)
    partition.add_argument(
        "--out",
        default="partition.png",
        metavar="FILE",
        help="file for the picture of the partition (partition.png)",
    )


def _add_fleet(commands: Commands) -> None:
    fleet = commands.add("fleet", "convert and check traces of devices", FLEET)
    fleet.add_argument(
        "action",
        choices=("convert", "check"),
        help="convert FedScale's files to a trace, or check a trace",
    )
    fleet.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="convert: FedScale's client_device_capacity, then its client_behave_trace; check: a "
        "trace",
    )
    fleet.add_argument(
        "--out",
        default="trace.parquet",
        metavar="FILE",
        help="file for the converted trace (trace.parquet)",
    )


def _add_flower(commands: Commands) -> None:
    flower = commands.add("flower", "run a Flower app on virtual time", FLOWER)
    flower.add_argument("action", choices=("run",), help="run the app")
    flower.add_argument(
        "words",
        nargs="*",
        metavar="FOLDER|KEY=VALUE",
        help="folder of the Flower app (.), and overrides",
    )
    flower.add_argument(
        "--run-config",
        action="append",
        default=[],
        metavar="TEXT",
        help="values for the app's run config: 'key=value key=value', or the path of a TOML file; "
        "may be given several times",
    )


def _add_new(commands: Commands) -> None:
    new = commands.add(
        "new",
        "create a Python package with a method, a model, data, ... of your own, and their tests",
        NEW,
    )
    new.add_argument("name", metavar="NAME", help="the name of the package and of its folder")


def _add_report(commands: Commands) -> None:
    report = commands.add(
        "report", "compare runs in a table and an HTML page with their learning curves", REPORT
    )
    report.add_argument(
        "runs", nargs="*", metavar="RUN", help="folders or URLs that runs, studies and sweeps wrote"
    )
    report.add_argument(
        "--out", metavar="DIR", help="folder for the page, tables and figures (report)"
    )
    report.add_argument(
        "--format",
        default="",
        metavar="F,F",
        help="also write each figure as a file in these formats: pdf, svg, png",
    )
    report.add_argument(
        "--columns",
        default="",
        metavar="A,B",
        help="columns that the table shows: its usual columns, or keys of summary.json",
    )
    report.add_argument(
        "--labels",
        default="",
        metavar="A=X,B=Y",
        help="names that replace those of settings, such as fedavg=FedAvg",
    )
    report.add_argument(
        "--order",
        default="",
        metavar="A,B",
        help="order of the settings in the table; the differences from the first one are tested",
    )
    report.add_argument(
        "--bold",
        default="clear",
        metavar="RULE",
        help="when the best value of a column is bold (or has a star): best, always; clear, only "
        "if its lead is larger than the deviations (clear)",
    )
    report.add_argument(
        "--percent", action="store_true", help="show scores between 0 and 1 in percent"
    )
    report.add_argument(
        "--thresholds",
        default="",
        metavar="X,Y",
        help="scores, such as 0.8,0.9; the report shows the rounds, bytes and time until each "
        "setting reaches them",
    )
    report.add_argument(
        "--width",
        type=float,
        default=3.25,
        help="width of the figures that --format writes, in inches (3.25)",
    )
    form = report.add_mutually_exclusive_group()
    for name, text in {"latex": "for LaTeX (booktabs)", "csv": "as CSV, a row per run"}.items():
        form.add_argument(
            f"--{name}",
            action="store_const",
            const=name,
            dest="form",
            help=f"only print the table {text}, and write no page",
        )


def _add_ui(commands: Commands) -> None:
    ui = commands.add("ui", "show the charts of runs in MLflow", UI)
    ui.add_argument(
        "place",
        nargs="?",
        default="runs",
        help="folder that contains the folders of runs (runs), or the address of a server",
    )
    ui.add_argument("--port", type=int, default=5000, help="port of MLflow's page (5000)")
    ui.add_argument(
        "--no-browser",
        action="store_true",
        help="print the address of the page, and open no browser",
    )
    ui.add_argument(
        "--update",
        action="store_true",
        help="only write the runs to mlflow.db, for programs that read it, and show no page",
    )


def _add_bench(commands: Commands) -> None:
    bench = commands.add("bench", "measure speed against a bare PyTorch loop", BENCH)
    bench.add_argument(
        "runs",
        nargs="*",
        metavar="WORKLOAD",
        help="what to measure: workloads (W1 W2 W3), or steps, or gpu",
    )
    bench.add_argument(
        "--data", metavar="DIR", help="folder with FashionMNIST; without it, downloaded"
    )
    bench.add_argument(
        "--out",
        default=_BENCH_OUT,
        metavar="FILE",
        help="file for the results (bench.json); for gpu, a folder (bench-gpu)",
    )
    bench.add_argument(
        "--blocks",
        type=int,
        default=7,
        help="how often raysim and the bare loop (with steps: a method and its reference) are "
        "measured, one after the other (7)",
    )
    bench.add_argument(
        "--lanes",
        type=int,
        metavar="K",
        help="number of clients that a worker trains at once; by default as in a run",
    )
    bench.add_argument(
        "--floor",
        action="store_true",
        help="also measure a tuned loop, which takes the least time that PyTorch needs",
    )
    bench.add_argument(
        "--profile",
        action="store_true",
        help="also print which parts of raysim take the time of W1, W2 and W3, and write a picture "
        "and a trace for ui.perfetto.dev next to FILE",
    )
    bench.add_argument(
        "--workers",
        type=int,
        default=2,
        help="number of processes of raysim and of the bare loop, each with one thread (2)",
    )
    gpu = bench.add_argument_group("options of raysim bench gpu")
    gpu.add_argument("--device", default="cuda", help="device to measure (cuda)")
    gpu.add_argument("--minutes", type=float, default=28.0, help="time limit in minutes (28)")
    gpu.add_argument(
        "--parts",
        metavar="A,B",
        help="parts to measure: correctness, bits, memory, G1, G2, G3, G4, profile (all)",
    )
    gpu.add_argument(
        "--tiny", action="store_true", help="use tiny workloads, only to test the command"
    )


def _add_completion(commands: Commands) -> None:
    completion = commands.add("completion", "print a script for completion in a shell", COMPLETION)
    completion.add_argument("shell", choices=("bash", "zsh"), help="the shell")


def _add_quiet(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--quiet", action="store_true", help="print nothing but warnings and errors"
    )


def _add_overrides(parser: argparse.ArgumentParser) -> None:
    overrides: Any = parser.add_argument(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="override: a setting that differs from the default configuration",
    )
    overrides.completer = _completions
    _add_packages(parser)


def _add_packages(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--conf",
        action="append",
        default=[],
        metavar="DIR",
        help="folder with options of your own, in the same structure as the folder conf of raysim",
    )
    parser.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="PACKAGE",
        help="package of your own whose classes and options (in its folder conf) may be used",
    )


def _completions(prefix: str, parsed_args: argparse.Namespace, **_: object) -> list[str]:
    from raysim.experiment.completion import completions

    return completions(prefix, parsed_args.overrides or (), parsed_args.conf)


# --- commands -----------------------------------------------------------------------------------
@contextmanager
def _without_collections() -> Iterator[None]:
    """Switch garbage collection off inside `with`, so that imports inside it take less time.

    Later collections ignore all objects that exist at the end of the `with` block.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()  # later collections ignore all objects that exist now
        gc.enable()


def _run(arguments: argparse.Namespace) -> int:
    from raysim.experiment.compose import compose
    from raysim.experiment.config_files import to_dict, to_yaml
    from raysim.experiment.many_runs import folder_to_resume

    # Before torch is imported, so that a wrong override or folder is refused at once.
    overrides = arguments.overrides
    if arguments.auto_resume:
        overrides = _with_auto_resume(overrides)
    config = compose(overrides, arguments.conf, arguments.config)
    if arguments.show:
        print(to_yaml(to_dict(config)), end="")
        return 0
    if config["resume"] == "latest":
        folder_to_resume(config["out"])
    if isinstance(config["out"], str):
        with errors_as_refusals():
            _check_folder(config["out"], config["resume"], arguments)
    with _without_collections():
        from raysim.experiment.execute import run

    run(config, quiet=arguments.quiet, allow=arguments.allow)
    return 0


def _check_folder(out: str, resume: object, arguments: argparse.Namespace) -> None:
    """Raise `RefusedError` if the local folder of a new run exists already.

    Also raise it for `resume=latest` if `out` does not exist and no other key says what to train.
    out, resume: the values of the keys; None without `resume=`.
    """
    from raysim.experiment.many_runs import check_free
    from raysim.primitives.stores import is_url, open_store

    if resume is None and not is_url(out):
        check_free(user_path(out))
    keys = {override.partition("=")[0] for override in arguments.overrides} - {"runtime"}
    is_bare = not (arguments.auto_resume or arguments.config or keys > {"out", "resume"})
    if resume != "latest" or not is_bare:
        return
    exists = bool(open_store(out).names()) if is_url(out) else user_path(out).exists()
    if not exists:
        raise RefusedError(
            f"out={without_password(out)} does not exist, and no override says what to train. "
            "Give the overrides of a new run, or the folder of an existing run."
        )


def _with_auto_resume(overrides: Sequence[str]) -> list[str]:
    """Return the overrides and `resume=latest`, to continue or start the run in `out=`.

    Raise `RefusedError` if `out=` is missing, or if there is a `resume=` already.
    """
    keys = {override.partition("=")[0] for override in overrides}
    if "resume" in keys:
        raise RefusedError(
            "--auto-resume: it has no effect with resume=.... Leave one of them out."
        )
    if "out" not in keys:
        raise RefusedError("--auto-resume: it needs the folder of the run. Add out=DIR.")
    return [*overrides, "resume=latest"]


def _study(arguments: argparse.Namespace) -> int:
    from raysim.commands.study.plan import plan

    planned = plan(arguments.overrides, arguments.conf)  # before torch is imported
    with _without_collections():
        from raysim.commands.study.session import study

    result = study(
        planned, parallel=arguments.parallel, metrics=arguments.metric, allow=arguments.allow
    )
    for name, sentence in result.failures.items():
        sys.stderr.write(f"raysim: run {name} failed: {sentence}\n")
    return 1 if result.failures else 0


def _sweep(arguments: argparse.Namespace) -> int:
    from raysim.commands.sweep.plan import read_request
    from raysim.runtime.placement import RayOptions, listen_on_loopback

    # Before torch and Ray are imported.
    request = read_request(arguments.overrides, arguments.conf)
    for draft in request.plan.drafts.values():
        listen_on_loopback(RayOptions(address=draft["runtime"].get("address")))
    from raysim.commands.sweep.session import sweep

    sweep(request, quiet=arguments.quiet, allow=arguments.allow)
    return 0


def _submit(arguments: argparse.Namespace) -> int:
    from raysim.commands.submit import package

    words = arguments.words
    if words[:1] == ["--"]:
        words = words[1:]
    command = words[0] if words else "nothing"
    if command not in package.COMMANDS:
        advice = suggest(command, package.COMMANDS, "the commands that can be submitted are")
        raise RefusedError(f"submit {command}: this command cannot be submitted; {advice}")
    # Where the job will find them.
    sys.path[:0] = [str(Path(path).resolve().parent) for path in arguments.extra]
    inner = _import_packages(parse_arguments(words), are_remote=True)
    config = getattr(inner, "config", None)
    return package.submit(
        package.JobCommand(words, inner.overrides, inner.conf, config),
        arguments.address,
        arguments.extra,
        arguments.limit,
        arguments.runtime_env,
        wait=not arguments.no_wait,
    )


def _fetch(arguments: argparse.Namespace) -> int:
    from raysim.commands.submit.fetch import fetch

    folder = fetch(
        arguments.job,
        arguments.target,
        arguments.address,
        arguments.folder,
        arguments.checkpoints,
        arguments.limit,
    )
    print(f"results are in {folder}")
    return 0


def _methods(arguments: argparse.Namespace) -> int:
    import json

    from raysim.commands.methods import explain_methods, find_methods, list_methods

    entries = find_methods(arguments.names, arguments.conf, arguments.allow)
    if arguments.json:
        print(json.dumps([entry.facts() for entry in entries], indent=2))
    elif arguments.names:
        print(explain_methods(entries))
    else:
        print(list_methods(entries, terminal_width()))
    return 0


def _partition(arguments: argparse.Namespace) -> int:
    from raysim.experiment.compose import compose

    config = compose(arguments.overrides, arguments.conf)
    from raysim.data.split_picture import draw_partition
    from raysim.data.split_statistics import statistics
    from raysim.experiment.build import partition

    data = partition(config, arguments.allow)
    picture = user_path(arguments.out)
    numbers: dict[str, Any] = statistics(data)
    has_labels = numbers.pop("counts").shape[1] > 1
    print(data.title)
    for key, value in numbers.items():
        if has_labels or key not in CLASS_STATISTICS:
            print(f"  {key.replace('_', ' '):<20}{_format_statistic(value)}")
    with errors_as_refusals():
        make_folder(picture.parent)
        draw_partition(data, picture)
    print(f"the picture of the partition is in {picture}")
    return 0


def _format_statistic(value: Any) -> str:
    if not isinstance(value, dict):
        return f"{value:.4g}"
    return ", ".join(f"{name.replace('_', ' ')} {number:.4g}" for name, number in value.items())


def _fleet(arguments: argparse.Namespace) -> int:
    action, files = arguments.action, arguments.files
    count = {"convert": 2, "check": 1}[action]
    if len(files) != count:
        raise RefusedError(
            f"fleet {action}: the number of files must be {count}, not {len(files)}. See "
            "raysim fleet -h."
        )
    from raysim.commands.fleet.fedscale import convert
    from raysim.simulation.trace import summarise_trace

    with errors_as_refusals():
        if action == "convert":
            capacity, behaviour = files
            print(convert(capacity, behaviour, user_path(arguments.out)))
        else:
            print(summarise_trace(files[0]))
    return 0


def _flower(arguments: argparse.Namespace) -> int:
    from raysim.commands.flower import run_flower

    return run_flower(arguments.words, arguments.run_config)


def _new(arguments: argparse.Namespace) -> int:
    from raysim.commands.new.package import next_steps, write

    with errors_as_refusals():
        print(next_steps(write(arguments.name)))
    return 0


def _report(arguments: argparse.Namespace) -> int:
    if not arguments.runs:
        raise RefusedError(
            "report: no folder is given. Give the folder of a run, or several folders."
        )
    from raysim.results.comparison import check_formats, report

    form, out = arguments.form, arguments.out
    if form and (out is not None or arguments.format):
        flag = f"--out {out}" if out is not None else f"--format {arguments.format}"
        raise RefusedError(
            f"{flag}: --{form} only prints a table and writes no file. Leave out {flag} or "
            f"--{form}."
        )
    formats = _split(arguments.format)
    check_formats(formats)
    comparison = report(
        arguments.runs,
        columns=_split(arguments.columns),
        labels=arguments.labels,
        order=arguments.order,
        percent=arguments.percent,
        thresholds=_split(arguments.thresholds),
        bold=arguments.bold,
        width=arguments.width,
        warn=warn,
    )
    if form == "csv":
        print(comparison.csv())
        return 0
    if form == "latex":
        print(comparison.latex())
        return 0
    print(comparison.text(terminal_width()))
    page, *files = comparison.write(out or "report", formats)
    print(f"\nthe page with curves and table: {page}")
    figures = [path for path in files if path.suffix != ".tex"]
    tables = ", ".join(str(path) for path in files if path.suffix == ".tex")
    print(f"tables for LaTeX: {tables}")
    if figures:
        print(f"number of files with plots: {len(figures)}; the first is {figures[0]}")
    return 0


def _split(text: str) -> list[str]:
    """Return the parts of a text such as "a, b", without spaces."""
    return [part.strip() for part in text.split(",") if part.strip()]


def _ui(arguments: argparse.Namespace) -> int:
    from raysim.commands.ui.server import show_charts, update_database

    with errors_as_refusals():
        if arguments.update:
            return update_database(arguments.place)
        return show_charts(arguments.place, arguments.port, not arguments.no_browser)


def _bench(arguments: argparse.Namespace) -> int:
    names = arguments.runs or list(WORKLOADS)
    _check_workloads(names)
    blocks, workers = arguments.blocks, arguments.workers
    out = user_path(arguments.out)
    with errors_as_refusals():
        if min(blocks, workers) < 1:
            raise RefusedError(
                f"--blocks {blocks} --workers {workers}: both must be at least 1. Increase them."
            )
        if names == ["gpu"]:
            return _bench_gpu(arguments)
        # Before the measurement, so that no result is lost.
        make_folder(out.absolute().parent)
        if names == ["steps"]:
            from raysim.commands.bench import steps

            steps.main(out, blocks, print)
            return 0
        from raysim.commands.bench import loops

        folder = out.absolute().parent if arguments.profile else None
        options = loops.LoopOptions(workers, arguments.lanes, arguments.floor, folder)
        loops.main(names, arguments.data, out, blocks, options)
    return 0


def _check_workloads(names: Sequence[str]) -> None:
    """Raise `RefusedError` if `raysim bench` cannot measure these workloads in one call.

    All names must exist. A name of `SEPARATE_BENCHMARKS` must be the only one.
    """
    known_names = (*WORKLOADS, *SEPARATE_BENCHMARKS)
    for name in names:
        if name in IN_CHECKOUT:
            raise RefusedError(
                f"bench {name}: the package does not have this benchmark. "
                f"In a checkout, run uv run python -m jobs.benchmarks.{name}"
            )
        if name not in known_names:
            raise RefusedError(
                f"bench {name}: this workload does not exist. Use {', '.join(known_names)}"
            )
        if name in SEPARATE_BENCHMARKS and len(names) > 1:
            raise RefusedError(
                f"bench {' '.join(names)}: {name} cannot be measured together with other "
                f"workloads. Run raysim bench {name} alone, and the others in a second command."
            )


def _bench_gpu(arguments: argparse.Namespace) -> int:
    from raysim.commands.bench import gpu
    from raysim.commands.bench.gpu_page import PAGE

    parts = tuple(arguments.parts.split(",")) if arguments.parts else gpu.PARTS
    options = gpu.GpuOptions(arguments.device, arguments.minutes, parts=parts)
    if arguments.tiny:
        options = gpu.tiny_options(options)
    folder = user_path("bench-gpu" if arguments.out == _BENCH_OUT else arguments.out)
    gpu.main(folder, options)
    print(f"the results are in {folder / PAGE}")
    return 0


def _completion(arguments: argparse.Namespace) -> int:
    from argcomplete.shell_integration import shellcode

    print(shellcode(["raysim"], shell=arguments.shell), end="")
    return 0


def _print_version() -> int:
    import raysim

    print(f"raysim {raysim.__version__}")
    return 0


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "run": _run,
    "sweep": _sweep,
    "study": _study,
    "submit": _submit,
    "fetch": _fetch,
    "ui": _ui,
    "methods": _methods,
    "partition": _partition,
    "fleet": _fleet,
    "flower": _flower,
    "new": _new,
    "report": _report,
    "bench": _bench,
    "completion": _completion,
    "help": lambda arguments: 0,  # `call` turns it into -h
}
