"""The command `raysim`: run, study, sweep, submit, methods, new, report, bench and others; parse, call, print.

Exit status: 0 done, 1 the run failed, 2 refused as asked (one sentence on stderr), 130 interrupted.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

from raysim.primitives.errors import Refused, errors_as_refusals, on_one_line, suggest
from raysim.primitives.files import is_disk_full, lock_folder, make_folder, user_path
from raysim.primitives.output import lossy_output
from raysim.results.tables import terminal_width

RUN = """\
examples:
  raysim run                                              the default study, on Ray
  raysim run method=fedprox method.fedprox.mu=0.1         another method, and a value of it
  raysim run method=fedbn+fedadam model.norm=batch        methods combine; fedavg is what remains without any
  raysim run data=fashion_mnist model=cnn partition=shards partition.shards_per_client=2
  raysim run schedule=buffered fleet=lognormal method=fedbuff
  raysim run experiment=fedbr/rotated_mnist data.root=DIR  a row of a paper's table
  raysim run runtime=inprocess rounds=5 tracking=none     quick, without Ray and MLflow
  raysim run out=runs/mine                                where the results go
  raysim run out=runs/mine resume=latest                  go on where it stopped, to the same bits
  raysim run out=runs/mine --auto-resume                  start, or go on: for what starts commands again by itself
  raysim run method=fedprox --show                        print the configuration, run nothing

The groups method, schedule, fleet, data, partition, model, loss, local, evaluate, runtime, tracking and experiment take
the name of an option; all other keys a value. A wrong name is answered with the nearest right one. No word above needs
quotes in bash or zsh; those with brackets do: 'method=[fedbn,fedadam]' is method=fedbn+fedadam."""
STUDY = """\
examples:
  raysim study method=fedavg,fedprox,scaffold seed=0..4 rounds=20 out=studies/mine
                                          15 runs: a comma separates values, 0..4 counts; fedavg is no method at all
  raysim study method=fedavg,fedbr+mixup  a + joins the methods of one run
  raysim study method=fedavg,fedprox partition.alpha=0.1,0.5 seed=0,1,2 method.fedprox.mu=0.1
                                          a key that only some runs have (fedprox.mu) is for these alone
  raysim study out=studies/mine resume=latest
                                          go on where it stopped: what is finished stays
  raysim study out=studies/mine resume=latest seed=0..9 --metric best5_mean
                                          more seeds, and another number to compare
  raysim report studies/mine              every run of it as a curve of its own

The first method is the one that the others are compared to, seed by seed: mean difference, 95 % interval, paired
t-test with Holm's correction, Wilcoxon's test from six seeds on. Where no method varies, the first key that does."""
SUBMIT = """\
examples:
  raysim submit run method=fedprox out=/shared/runs/first
                                          on the cluster at $RAY_API_SERVER_ADDRESS, else http://127.0.0.1:8265
  raysim submit --address http://HEAD:8265 sweep sweep=fedbr method=fedbr out=/shared/sweeps/fedbr
  raysim submit --with mine run --allow mine method=mine out=/shared/runs/mine
  raysim submit --runtime-env jobs/runtime_env.yaml run out=/shared/runs/first
                                          where the nodes have Ray alone: installs the rest

Uploads the package and its configuration, and shows the job's output; Ctrl-C leaves the job running. The exit status is
the job's own. The command joins the cluster (runtime=cluster) unless it names a runtime. See jobs/README.md."""
METHODS = """\
examples:
  raysim methods                  a list: name, paper, slots, parameters
  raysim methods fedbr            one in its own words: formulas, choices, settings
  raysim methods --json           the same for programs
  raysim methods --allow mine     with those of a package of your own"""
PARTITION = """\
examples:
  raysim partition                                             the default study's split
  raysim partition partition=dirichlet partition.alpha=0.1     a harder one
  raysim partition data=mnist data.root=DIR partition=shards --out shards.png"""
FLEET = """\
examples:
  raysim fleet convert client_device_capacity client_behave_trace --out trace.parquet
                                          FedScale's device data as a trace, for raysim run fleet=trace
  raysim fleet check trace.parquet        refuses a trace that is wrong, and says how much is in one that is right

The head of raysim/simulation/trace.py describes the file, for traces of your own."""
SWEEP = """\
examples:
  raysim sweep sweep=fedbr method=fedbr                   FedBR's weights and temperatures, 16 random settings
  raysim sweep sweep=fedbr method=fedbr sweep.search=optuna sweep.scheduler=asha sweep.trials=30
  raysim sweep sweep=methods sweep.seeds=3 rounds=30      methods themselves, each under three seeds
  raysim sweep method=fedprox method.fedprox.mu=0.01,0.1,1 sweep.search=grid
                                                          a list of values makes a key part of the space
  raysim sweep method=fedavg,fedbr local.lr='tag(log, interval(1e-3, 1))' local.epochs='int(interval(1, 10))'
                                                          so does a range; without tag(log, ...) all is as likely
  raysim sweep sweep=fedbr method=fedbr sweep.scheduler=pbt sweep.interval=5
                                                          values change while the runs go on
  raysim sweep sweep=fedprox method=fedprox sweep.workers=2 runtime=cluster
                                                          two workers for each trial, on a cluster
  raysim sweep out=runs/mine resume=latest                go on where it stopped
  raysim run --config runs/mine/best.yaml seed=7          train the best setting again

A search is described by sweep.search (random, grid, optuna), scheduler (none, asha, pbt), trials, metric, mode, seeds,
concurrent, workers, grace and reduction (of asha), interval (of pbt), minutes. All other words are those of
`raysim run` and hold for all trials; a key of the space that is given one value is not searched."""
NEW = """\
examples:
  raysim new mine                         the folder mine, with one part of each kind, their options and their tests
  raysim run --allow mine method=mine     in that folder; once it is installed (uv pip install -e .) without --allow"""
REPORT = """\
examples:
  raysim report runs/a                    one run
  raysim report runs/a runs/b --out page  a table, overlaid curves, and page/report.html
  raysim report runs/* --latex            means over seeds, for a paper; --csv: every number of every run"""
UI = """\
examples:
  raysim ui                             what is in runs/mlflow.db, where runs are sent without tracking.uri
  raysim ui studies/mine                the runs of a study
  raysim ui --port 5001 --no-browser    on another port; prints the address
  raysim ui http://MLFLOW:5000          the page of a server

MLflow opens an experiment on traces of language models; this opens it on the charts of its runs. Ctrl-C ends it."""
BENCH = """\
examples:
  raysim bench                              all workloads
  raysim bench W2 W3 --blocks 3             some of them, sooner
  raysim bench W1 --data DIR --out w1.json  DIR holds FashionMNIST
  raysim bench W2 --floor --lanes 25        beside a tuned loop, 25 clients at once on every worker
  raysim bench W1 --profile                 where the time goes
  raysim bench steps                        what each method adds to a local step
  raysim bench gpu --out bench-gpu          what only a GPU can show, without Ray"""
WORKLOADS = ("W1", "W2", "W3")
ALONE = ("steps", "gpu")  # what `raysim bench` measures by itself
IN_CHECKOUT = (
    "rules",
    "scale",
    "states",
    "cluster",
)  # benchmarks of a checkout, in jobs/benchmarks
_BENCH_OUT = "bench.json"
COMPLETION = """\
examples:
  eval "$(raysim completion bash)"    in ~/.bashrc
  eval "$(raysim completion zsh)"     in ~/.zshrc

Then the tabulator completes commands, options, keys and the names of a group: method=fedbr+mi, local.l, partition=."""
MAIN = """\
examples:
  raysim run                          train the default study
  raysim run method=fedbr+mixup       any list of methods
  raysim run -h                       how to choose data, models, schedules
  raysim study method=fedavg,fedprox seed=0,1,2
                                      methods x seeds as one job with one report
  raysim methods                      what can be in such a list
  raysim partition partition.alpha=1  look at a split before training
  raysim report runs/*                compare runs
  raysim ui                           the charts of all runs, in MLflow
  raysim help study                   what a command takes, by example"""


# Options of Hydra, of Ray Tune and of earlier versions, and what serves instead.
ELSEWHERE = {
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
    "--paper": "in a checkout, uv run python -m jobs.papers.report fedbr/table1 prints a published table",
    **dict.fromkeys(
        ("--num-samples", "--num_samples"), "raysim sweep sweep.trials=N makes so many trials"
    ),
}


OF_CLASSES = (
    "classes_per_client",
    "heterogeneity",
    "pooled_entropy",
)  # numbers of a split that others do not have


class Parser(argparse.ArgumentParser):
    """Answers a wrong command line in one sentence."""

    def error(self, message: str) -> NoReturn:
        """Exit with status 2."""
        self.exit(2, f"raysim: {message}: see {self.prog} -h\n")


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit."""
    sys.unraisablehook = _heard(sys.unraisablehook)
    status = call(list(sys.argv[1:] if argv is None else argv))
    signal.signal(
        signal.SIGINT, lambda *_: os._exit(status)
    )  # all is said; Python would show where it was
    sys.exit(status)


def _heard(usual: Callable[[Any], object]) -> Callable[[Any], object]:
    """Repeats a Ctrl-C that came where Python can raise nothing (a weak reference's callback), and would be lost."""

    def hook(lost: Any) -> None:
        if issubclass(lost.exc_type, KeyboardInterrupt):
            again = threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGINT))
            again.daemon = True
            again.start()
        else:
            usual(lost)

    return hook


def call(words: Sequence[str]) -> int:
    """Run one command; returns the exit status."""
    with lossy_output(sys.stdout, sys.stderr):
        return _call(words)


def _call(words: Sequence[str]) -> int:
    prepare_ray()
    words = [
        *itertools.takewhile(lambda word: word != "#", words)
    ]  # zsh passes on a comment that is pasted
    if "_ARGCOMPLETE" in os.environ:
        _complete()
    if words[:1] == ["help"]:
        words = [*words[1:2], "-h"]
    if words[:1] == ["--version"]:
        return _say_version()
    if words and not words[0].startswith("-") and words[0] not in COMMANDS:
        sys.stderr.write(f"raysim: there is no command {words[0]}: {suggest(words[0], COMMANDS)}\n")
        return 2
    given = _parsed(words)
    if not given.command:
        _parser().print_help()
        return 0
    return exit_status(lambda: COMMANDS[given.command](_allowed(given)))


def prepare_ray() -> None:
    """Set the environment variables that Ray reads when it is imported; a user's own values stay."""
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    os.environ.setdefault("RAY_AUTH_MODE", "token")


def _parsed(words: Sequence[str]) -> argparse.Namespace:
    """The words as a command and its options; a wrong one ends the process with status 2."""
    parser = _parser()
    for word in words:
        if ours := ELSEWHERE.get(word.partition("=")[0]):
            parser.exit(2, f"raysim: there is no option {word}: {ours}\n")
    given, unknown = parser.parse_known_args(words)
    if dashed := [word for word in unknown if word.startswith("-")]:
        command = f"{parser.prog} {given.command}" if given.command else parser.prog
        meant = f"did you mean {setting}? " if (setting := _meant(given, words, dashed[0])) else ""
        parser.exit(
            2,
            f"raysim: there is no option {dashed[0].partition('=')[0]}: {meant}see {command} -h\n",
        )
    for words_of in ("overrides", "runs"):  # argparse stops collecting them at the first option
        if unknown and hasattr(given, words_of):
            getattr(given, words_of).extend(unknown)
            unknown = []
    if unknown:
        parser.error(f"'{unknown[0]}' has no meaning here")
    return given


def _meant(given: argparse.Namespace, words: Sequence[str], option: str) -> str:
    """The setting that an option is called like, with the value that was given to it: rounds=5 of --round 5, or ""."""
    if not hasattr(given, "overrides"):
        return ""
    import difflib

    from raysim.experiment.completion import completions

    keys = [word.removesuffix("=") for word in completions("", given.overrides, given.conf)]
    names = {key.rpartition(".")[2]: key for key in reversed(keys)} | {
        key: key for key in keys
    }  # lr is local.lr, too
    name, _, value = option.lstrip("-").partition("=")
    near = difflib.get_close_matches(name.replace("-", "_"), names, 1, 0.8)
    following = [*words[words.index(option) + 1 :], ""][0]
    value = value or ("" if following.startswith("-") or "=" in following else following)
    return f"{names[near[0]]}={value or 'VALUE'}" if near else ""


def _allowed(given: argparse.Namespace, elsewhere: bool = False) -> argparse.Namespace:
    """With the packages that --allow names at hand, and the options that they bring. elsewhere: they may be there."""
    if getattr(given, "allow", None):
        from raysim.experiment.plugins import allow_packages, conf_folders_of

        sys.path.insert(0, os.getcwd())  # as `python` does for code of the user's own
        given.conf = [
            *map(str, (conf_folders_of if elsewhere else allow_packages)(given.allow)),
            *given.conf,
        ]
    return given


def exit_status(command: Callable[[], int]) -> int:
    """Run a command and return its exit status; what ends it early is printed as one sentence."""
    try:
        status = command()
        sys.stdout.flush()
        return status
    except Refused as error:
        return _say(on_one_line(error), 2)
    except KeyboardInterrupt as error:
        return _say(str(error) or "stopped before the run began: nothing was written", 130)
    except RuntimeError as error:
        from raysim.simulation.events import RunStoppedError

        if not isinstance(error, RunStoppedError):
            raise
        return _say(str(error).strip(), 1)
    except BrokenPipeError:  # the reader of our output has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if not is_disk_full(error):
            raise
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # or the rest of it fails at the end
        return _say(f"the output cannot be written: {error.strerror}", 1)


def _complete() -> NoReturn:
    """Answer a shell that asks for completions, on the channel that it has opened for them."""
    import argcomplete

    argcomplete.autocomplete(_parser())
    sys.exit(0)


def warn(sentence: str) -> None:
    """Print a sentence to stderr."""
    _say(sentence, 0)


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
    parser.add_argument("--version", action="store_true", help="print raysim's version")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    def add(name: str, text: str, epilog: str) -> argparse.ArgumentParser:
        style = argparse.RawDescriptionHelpFormatter
        about = text[0].upper() + text[1:]  # names keep their case
        return commands.add_parser(
            name, help=text, description=about, epilog=epilog, formatter_class=style
        )

    run = add("run", "train one study and record it", RUN)
    _configurable(run)
    run.add_argument("--quiet", action="store_true", help="print nothing but warnings and errors")
    run.add_argument(
        "--auto-resume",
        action="store_true",
        help="the same command starts a run and goes on with it: resume=latest",
    )
    run.add_argument(
        "--config",
        metavar="FILE",
        help="start from a stored configuration, such as a sweep's best.yaml",
    )
    run.add_argument(
        "--show", action="store_true", help="print the configuration as YAML, and run nothing"
    )
    study = add(
        "study",
        "methods x seeds x partitions as one job: means, deviations, tests of differences",
        STUDY,
    )
    _configurable(study)
    study.add_argument(
        "--parallel", type=int, default=1, metavar="N", help="runs side by side, in processes (1)"
    )
    study.add_argument(
        "--metric",
        action="append",
        default=[],
        metavar="NAME",
        help="a number of summary.json to compare; repeatable",
    )
    sweep = add("sweep", "search for good settings with Ray Tune", SWEEP)
    _configurable(sweep)
    sweep.add_argument("--quiet", action="store_true", help="print nothing but warnings and errors")
    submit = add(
        "submit", "run a command on a cluster: pack, upload, follow, return its exit status", SUBMIT
    )
    submit.add_argument(
        "words", nargs=argparse.REMAINDER, metavar="COMMAND", help="run, study or sweep, as usual"
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
        help="a file or folder to pack besides",
    )
    submit.add_argument(
        "--limit", type=float, default=50.0, metavar="MB", help="refuse to upload more (50)"
    )
    submit.add_argument(
        "--runtime-env", metavar="FILE", help="what nodes install and set, as Ray's runtime_env"
    )
    submit.add_argument("--no-wait", action="store_true", help="do not follow the job")
    methods = add("methods", "list the methods: paper, slots, parameters", METHODS)
    methods.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help="one to explain: its formulas, choices and settings",
    )
    methods.add_argument("--json", action="store_true", help="as JSON")
    _own_parts(methods)
    partition = add("partition", "print statistics of a split, and draw it", PARTITION)
    _configurable(partition)
    partition.add_argument(
        "--out", default="partition.png", metavar="FILE", help="the picture (partition.png)"
    )
    fleet = add("fleet", "convert and check traces of devices", FLEET)
    fleet.add_argument("action", choices=("convert", "check"), help="what to do")
    fleet.add_argument(
        "files", nargs="+", metavar="FILE", help="FedScale's two files, capacity first; or a trace"
    )
    fleet.add_argument(
        "--out", default="trace.parquet", metavar="FILE", help="the trace (trace.parquet)"
    )
    new = add(
        "new",
        "write a package of your own: a method, a model, data, ... with options and tests",
        NEW,
    )
    new.add_argument(
        "name", metavar="NAME", help="the package, and the folder that it is written into"
    )
    report = add("report", "compare runs: one table, overlaid curves, one HTML page", REPORT)
    report.add_argument(
        "runs", nargs="*", metavar="RUN", help="folders that runs, studies and sweeps wrote"
    )
    report.add_argument("--out", metavar="DIR", help="where the pictures and the page go (report)")
    form = report.add_mutually_exclusive_group()
    for name, text in {"latex": "for LaTeX (booktabs)", "csv": "as CSV, a row per run"}.items():
        form.add_argument(
            f"--{name}",
            action="store_const",
            const=name,
            dest="form",
            help=f"print the table {text}, and no page",
        )
    ui = add("ui", "show the charts of runs in MLflow", UI)
    ui.add_argument(
        "place",
        nargs="?",
        default="runs",
        help="the folder that runs are in (runs), or a server's address",
    )
    ui.add_argument("--port", type=int, default=5000, help="where MLflow's page is served (5000)")
    ui.add_argument("--no-browser", action="store_true", help="print the address alone")
    bench = add("bench", "measure speed against a bare PyTorch loop", BENCH)
    bench.add_argument(
        "runs",
        nargs="*",
        metavar="WORKLOAD",
        help="W1, W2 and W3 unless given; or steps; or gpu",
    )
    bench.add_argument("--data", metavar="DIR", help="where FashionMNIST is; downloaded if nowhere")
    bench.add_argument(
        "--out",
        default=_BENCH_OUT,
        metavar="FILE",
        help="the results (bench.json); of gpu a folder (bench-gpu)",
    )
    bench.add_argument("--device", default="cuda", help="of gpu: what is measured (cuda)")
    bench.add_argument("--minutes", type=float, default=28.0, help="of gpu: in which it ends (28)")
    bench.add_argument(
        "--parts", metavar="A,B", help="of gpu: some of correctness, bits, memory, G1..G4, profile"
    )
    bench.add_argument(
        "--tiny", action="store_true", help="of gpu: sizes that only try the command out"
    )
    bench.add_argument(
        "--blocks",
        type=int,
        default=7,
        help="blocks of rounds, each beside one of the bare loop (7)",
    )
    bench.add_argument(
        "--lanes",
        type=int,
        metavar="K",
        help="clients that a worker trains at once; as in a run unless given",
    )
    bench.add_argument(
        "--floor",
        action="store_true",
        help="measure a tuned loop as well, the least that PyTorch needs",
    )
    bench.add_argument(
        "--profile",
        action="store_true",
        help="where the time of W1, W2 and W3 goes: a table, and beside FILE a picture and a trace for ui.perfetto.dev",
    )
    bench.add_argument(
        "--workers", type=int, default=2, help="processes of one thread, on both sides (2)"
    )
    completion = add("completion", "print what makes a shell complete raysim's words", COMPLETION)
    completion.add_argument("shell", choices=("bash", "zsh"), help="which shell")
    commands.add_parser("help", help="show this, or what a command takes: raysim help run")
    return parser


def _configurable(parser: argparse.ArgumentParser) -> None:
    overrides: Any = parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="what differs from the default study"
    )
    overrides.completer = _completions
    _own_parts(parser)


def _own_parts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--conf",
        action="append",
        default=[],
        metavar="DIR",
        help="a folder of your own options, laid out like conf",
    )
    parser.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="PACKAGE",
        help="a package of your own: its classes, and the options in its folder conf",
    )


def _completions(prefix: str, parsed_args: argparse.Namespace, **_: object) -> list[str]:
    from raysim.experiment.completion import completions

    return completions(prefix, parsed_args.overrides or (), parsed_args.conf)


# --- commands -------------------------------------------------------------------------------------------------------
def _run(given: argparse.Namespace) -> int:
    from raysim.experiment.compose import compose
    from raysim.experiment.config_files import to_dict, to_yaml
    from raysim.experiment.many_runs import to_continue

    # before torch is imported: a typing mistake, and a folder of which nothing can come, are answered at once
    words = _going_on(given.overrides) if given.auto_resume else given.overrides
    config = compose(words, given.conf, given.config)
    if given.show:
        print(to_yaml(to_dict(config)), end="")
        return 0
    if config["resume"] == "latest":
        to_continue(config["out"])
    if isinstance(config["out"], str):
        with errors_as_refusals():
            _check_folder(user_path(config["out"]), config["resume"], given)
    from raysim.experiment.execute import run

    run(config, quiet=given.quiet, allow=given.allow)
    return 0


def _check_folder(folder: Path, resume: object, given: argparse.Namespace) -> None:
    """Refuse a folder that is taken, and to continue one that is not there, as a run of nothing but defaults."""
    from raysim.experiment.many_runs import check_free

    if resume is None:
        check_free(folder)
    said = (
        given.auto_resume
        or given.config
        or {word.partition("=")[0] for word in given.overrides} > {"out", "resume"}
    )
    if resume == "latest" and not said and not folder.exists():
        raise Refused(
            f"out={folder} does not exist, and no word says what to train: give those of the run"
        )


def _going_on(words: Sequence[str]) -> list[str]:
    """The words of a run that goes on wherever it was stopped."""
    keys = {word.partition("=")[0] for word in words}
    if "resume" in keys or "out" not in keys:
        lacks = (
            "has no effect beside resume=..."
            if "resume" in keys
            else "needs the folder of the run: add out=DIR"
        )
        raise Refused(f"--auto-resume {lacks}")
    return [*words, "resume=latest"]


def _study(given: argparse.Namespace) -> int:
    from raysim.commands.study.plan import move, plan

    if given.parallel < 1:
        raise Refused(f"--parallel {given.parallel} must be at least 1")
    study = plan(given.overrides, given.conf)  # before torch is imported
    from rich.console import Console

    from raysim.commands.study.report import check_metrics, report
    from raysim.commands.study.runner import check, make_runs, store
    from raysim.commands.study.tracking import track
    from raysim.experiment.many_runs import new_folder
    from raysim.results.progress import waiting_line

    check_metrics(given.metric)
    study = check(study, given.allow, given.parallel)
    with ExitStack() as stack:
        with errors_as_refusals():
            if study.is_new:
                folder = stack.enter_context(new_folder(study.folder, study.is_dated))
            else:
                folder = make_folder(study.folder)
                stack.enter_context(lock_folder(folder))
        if folder != study.folder:  # another study that began in the same second has the name
            study = check(move(study, folder), given.allow, given.parallel)
        print("\n".join([str(study), *study.warnings]), flush=True)
        with errors_as_refusals():
            store(study)

        def say(text: str) -> None:
            print(text, flush=True)

        with track(study, say):
            with waiting_line(Console()) as show:
                failures = make_runs(
                    study, parallel=given.parallel, allow=given.allow, say=say, show=show
                )
            with errors_as_refusals():
                print(f"\n{report(study, given.metric, failures, terminal_width())}")
    for name, sentence in failures.items():
        sys.stderr.write(f"raysim: run {name} failed: {sentence}\n")
    return 1 if failures else 0


def _sweep(given: argparse.Namespace) -> int:
    from raysim.commands.sweep.plan import read_request
    from raysim.runtime.placement import RayOptions, listen_on_loopback

    request = read_request(given.overrides, given.conf)  # before torch and Ray are imported
    for draft in request.plan.drafts.values():
        listen_on_loopback(RayOptions(address=draft["runtime"].get("address")))
    from raysim.commands.sweep.session import sweep

    sweep(request, quiet=given.quiet, allow=given.allow)
    return 0


def _submit(given: argparse.Namespace) -> int:
    from raysim.commands.submit import package as submission

    words = given.words[1:] if given.words[:1] == ["--"] else given.words
    if not words or words[0] not in submission.COMMANDS:
        named = words[0] if words else "nothing"
        raise Refused(
            f"submit {named}: {suggest(named, submission.COMMANDS, 'what can be submitted is')}"
        )
    sys.path[:0] = [
        str(Path(each).resolve().parent) for each in given.extra
    ]  # where the job will find them
    inner = _allowed(_parsed(words), elsewhere=True)
    command = submission.Command(words, inner.overrides, inner.conf, getattr(inner, "config", None))
    return submission.submit(
        command, given.address, given.extra, given.limit, given.runtime_env, not given.no_wait
    )


def _methods(given: argparse.Namespace) -> int:
    import json

    from raysim.commands.methods import catalogue, listing, pages

    parts = catalogue(given.names, given.conf, given.allow)
    if given.json:
        print(json.dumps([part.facts() for part in parts], indent=2))
    else:
        print(pages(parts) if given.names else listing(parts, terminal_width()))
    return 0


def _partition(given: argparse.Namespace) -> int:
    from raysim.experiment.compose import compose

    config = compose(given.overrides, given.conf)
    from raysim.data.split_picture import draw_partition
    from raysim.data.split_statistics import statistics
    from raysim.experiment.build import partition

    data = partition(config, given.allow)
    picture = user_path(given.out)
    numbers = statistics(data)
    if numbers.pop("counts").shape[1] == 1:  # type: ignore[attr-defined]
        numbers = {key: numbers[key] for key in numbers if key not in OF_CLASSES}
    print(data.title)
    for key, value in numbers.items():
        parts = value.items() if isinstance(value, dict) else [("", value)]
        text = ", ".join(f"{name.replace('_', ' ')} {number:.4g}".strip() for name, number in parts)
        print(f"  {key.replace('_', ' '):<20}{text}")
    with errors_as_refusals():
        make_folder(picture.parent)
        draw_partition(data, picture)
    print(f"drawn in {picture}")
    return 0


def _fleet(given: argparse.Namespace) -> int:
    if len(given.files) != (wanted := {"convert": 2, "check": 1}[given.action]):
        raise Refused(
            f"fleet {given.action} takes {wanted} of your {len(given.files)} files: see raysim fleet -h"
        )
    from raysim.commands.fleet.fedscale import convert
    from raysim.simulation.trace import summarise_trace

    with errors_as_refusals():
        file, *more = given.files
        print(convert(file, more[0], user_path(given.out)) if more else summarise_trace(file))
    return 0


def _new(given: argparse.Namespace) -> int:
    from raysim.commands.new.package import next_steps, write

    with errors_as_refusals():
        print(next_steps(write(given.name)))
    return 0


def _report(given: argparse.Namespace) -> int:
    if not given.runs:
        raise Refused("report: needs the folder of a run. Name one or several")
    from raysim.results.report import (
        as_csv,
        comparison_table,
        describe_scores,
        group_by_setting,
        load_runs,
        result_columns,
    )
    from raysim.results.tables import to_latex

    with errors_as_refusals():
        runs = load_runs(given.runs, warn)
        if given.form:
            if given.out is not None:
                raise Refused(
                    f"--out {given.out} has no effect with --{given.form}, which prints a table alone"
                )
            groups = group_by_setting(runs)
            print(
                as_csv(groups)
                if given.form == "csv"
                else to_latex(result_columns(groups), describe_scores(runs))
            )
            return 0
        print(comparison_table(runs, terminal_width()))
        from raysim.results.page import write_report  # which imports torch

        page = write_report(group_by_setting(runs), user_path(given.out or "report"))
    print(f"\ncurves and table: {page}")
    return 0


def _ui(given: argparse.Namespace) -> int:
    from raysim.commands.ui import charts

    with errors_as_refusals():
        return charts(given.place, given.port, not given.no_browser)


def _bench(given: argparse.Namespace) -> int:
    names = given.runs or list(WORKLOADS)
    _check_workloads(names)
    with errors_as_refusals():
        if min(given.blocks, given.workers) < 1:
            raise Refused(
                f"--blocks {given.blocks} and --workers {given.workers} must be at least 1"
            )
        if names == ["gpu"]:
            return _bench_gpu(given)
        if names == ["steps"]:
            from raysim.commands.bench import steps

            steps.main(user_path(given.out), given.blocks, print)
            return 0
        from raysim.commands.bench import loops

        folder = user_path(given.out).absolute().parent if given.profile else None
        options = loops.Options(given.workers, given.lanes, given.floor, folder)
        loops.main(names, given.data, user_path(given.out), given.blocks, options)
    return 0


def _check_workloads(names: Sequence[str]) -> None:
    """Raise `Refused` for a workload that does not exist, or that must be named alone."""
    for name in names:
        if name in IN_CHECKOUT:
            command = f"uv run python -m jobs.benchmarks.{name}"
            raise Refused(
                f"bench {name}: the package does not have this benchmark. In a checkout, run {command}"
            )
        if name not in (*WORKLOADS, *ALONE):
            raise Refused(
                f"bench {name}: this workload does not exist. Use {', '.join((*WORKLOADS, *ALONE))}"
            )
        if name in ALONE and len(names) > 1:
            raise Refused(f"bench {name}: this benchmark runs in one process. Name it alone")


def _bench_gpu(given: argparse.Namespace) -> int:
    from raysim.commands.bench import gpu
    from raysim.commands.bench.gpu_page import PAGE

    parts = tuple(given.parts.split(",")) if given.parts else gpu.PARTS
    options = gpu.Options(given.device, given.minutes, parts=parts)
    folder = user_path("bench-gpu" if given.out == _BENCH_OUT else given.out)
    gpu.main(folder, gpu.tried_out(options) if given.tiny else options)
    print(f"{folder / PAGE} says what was found")
    return 0


def _completion(given: argparse.Namespace) -> int:
    from argcomplete.shell_integration import shellcode

    print(shellcode(["raysim"], shell=given.shell), end="")
    return 0


def _say_version() -> int:
    import raysim

    print(f"raysim {raysim.__version__}")
    return 0


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "run": _run,
    "sweep": _sweep,
    "study": _study,
    "submit": _submit,
    "ui": _ui,
    "methods": _methods,
    "partition": _partition,
    "fleet": _fleet,
    "new": _new,
    "report": _report,
    "bench": _bench,
    "completion": _completion,
    "help": lambda given: 0,  # `call` has made it -h
}
