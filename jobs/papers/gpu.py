"""Run the papers' studies at full scale on a GPU, in limited time, without Ray or Hydra.

    python -m jobs.papers.gpu prepare DIR data.root=DATA [NAME...]
    python -m jobs.papers.gpu run DIR [--minutes 25] [--device cuda] [NAME...]
    python -m jobs.papers.results DIR/runs/NAME...

A NAME is a study. `prepare` writes the runs and the data sets to DIR, and needs all dependencies of
raysim. DIR can be copied to another machine. There, `run` starts or continues unfinished runs, and
needs only the packages of `raysim bench gpu`. The third command stores finished runs for the
papers' pages.
"""

from __future__ import annotations

import argparse
import pickle
import platform
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import torch

from jobs.command import run as run_program
from raysim.primitives.errors import RefusedError, suggest
from raysim.primitives.files import replace_file, user_path
from raysim.primitives.version import __version__
from raysim.results.history import summarise, write_history, write_json
from raysim.runtime import inprocess
from raysim.simulation import checkpoint
from raysim.simulation.events import Finished, Round, Row, Started
from raysim.training.run_spec import Checkpoint, RunSpec, declare_run
from raysim.training.step_mode import default_lanes

CHECKPOINTS = Checkpoint(every=10, keep=1)
PLAN, CONFIG, SUMMARY, HISTORY = "plan.pickle", "config.yaml", "summary.json", "history.parquet"


@dataclass(frozen=True)
class GpuStudy:
    """The runs that test a claim of a paper, with the paper's model and number of rounds.

    There is a run for each method and seed.
    name: selects the study on the command line.
    setting: overrides of all runs.
    methods: overrides for each method.
    """

    name: str
    setting: tuple[str, ...]
    methods: tuple[tuple[str, ...], ...]
    seeds: tuple[int, ...] = (0,)

    def runs(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Yield name and overrides of each run: all methods of the first seed, then of the next."""
        for seed in self.seeds:
            for method in self.methods:
                label = "-".join(map(_label, method))
                yield f"{self.name}-{label}-{seed}", (*self.setting, *method, f"seed={seed}")


def _label(override: str) -> str:
    """Return the part of a run's name that stands for an override of its method.

    "method=fedbr" becomes "fedbr", and "method.fedbr.mu=0.5" becomes "mu_0_5".
    """
    key, _, value = override.partition("=")
    name = "" if key == "method" else f"{key.rpartition('.')[2]}_"
    return f"{name}{value}".replace(".", "_")


FEDAVG, FEDBSS, FEDBR = ("method=fedavg",), ("method=fedbss",), ("method=fedbr",)
# Runs are made in this order.
STUDIES = (
    GpuStudy("fedbss-skew_0.1", ("experiment=fedbss/fashion_mnist",), (FEDAVG, FEDBSS), (0, 1, 2)),
    GpuStudy(
        "fedbss-noise_0.5",
        ("experiment=fedbss/fashion_mnist", "partition=iid", "data.label_noise=0.5"),
        (FEDAVG, FEDBSS),
        (0, 1, 2),
    ),
    GpuStudy(
        "fedbr-rotated_mnist", ("experiment=fedbr/rotated_mnist",), (FEDAVG, FEDBR), (0, 1, 2)
    ),
    GpuStudy(
        "fraug-digits",
        ("experiment=fraug/digits", "data.domains=[mnist,mnist_m,usps,digits]"),
        (FEDAVG, ("method=fedbn",), ("method=fraug",)),
        (0, 1, 2),
    ),
    GpuStudy("fedbr-cifar10", ("experiment=fedbr/cifar10",), (FEDAVG, FEDBR), (0, 1, 2)),
    # FedBR's ablation, and both methods with Mixup.
    GpuStudy(
        "fedbr-rotated_mnist-parts",
        ("experiment=fedbr/rotated_mnist",),
        (
            (*FEDBR, "method.fedbr.mu=0"),
            (*FEDBR, "method.fedbr.lam=0"),
            (*FEDBR, "method.fedbr.max_step=false"),
            ("method=mixup",),
            ("method=fedbr+mixup",),
        ),
        (0, 1, 2),
    ),
)


def chosen_studies(names: Sequence[str]) -> list[GpuStudy]:
    """Return the studies of these names in the order of `STUDIES`; without names, all studies."""
    by_name = {study.name: study for study in STUDIES}
    for name in names:
        if name not in by_name:
            raise RefusedError(f"{name}: there is no such study; {suggest(name, by_name)}")
    return [study for study in STUDIES if not names or study.name in names]


# --- prepare --------------------------------------------------------------------------------------
def prepare(folder: Path, overrides: Sequence[str], names: Sequence[str]) -> None:
    """Prepare the runs that are not prepared yet, and copy their data sets.

    folder: gets runs/NAME for each run, and data/ for the data sets.
    overrides: further overrides of all runs, such as "data.root=DIR".
    names: the names of the studies; empty means all.
    """
    for study in chosen_studies(names):
        for name, words in study.runs():
            run_folder = folder / "runs" / name
            if not (run_folder / PLAN).is_file():
                _prepare_run(folder, run_folder, [*words, *overrides])
                print(f"prepared the run {run_folder}", flush=True)


def _prepare_run(folder: Path, run_folder: Path, overrides: Sequence[str]) -> None:
    import raysim
    from raysim.experiment.describe import identity, split_facts

    device_overrides = ["runtime=inprocess", "tracking=none", "device=cpu"]
    experiment = raysim.build([*overrides, *device_overrides])
    data = experiment.spec.data
    stored = folder / "data" / data.dataset_path.name
    if not stored.is_file():
        stored.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(data.dataset_path, stored)
    spec = replace(experiment.spec, data=replace(data, dataset_path=Path(stored.name)))
    plan = {
        "spec": spec,
        "schedule": experiment.schedule,
        "fleet": experiment.fleet,
        "config": experiment.config,
        "split": split_facts(data),
        "identity": identity(experiment),
    }
    run_folder.mkdir(parents=True, exist_ok=True)
    replace_file(run_folder / PLAN, pickle.dumps(plan))


# --- run ------------------------------------------------------------------------------------------
def run(folder: Path, names: Sequence[str], device: str, minutes: float) -> None:
    """Start or continue the prepared runs until the time is over.

    folder: the folder in which the runs were prepared.
    names: the names of the studies; empty means all.
    minutes: the time for all runs.
    """
    deadline = monotonic() + 60 * minutes
    for study in chosen_studies(names):
        for name, _ in study.runs():
            run_folder = folder / "runs" / name
            if (run_folder / SUMMARY).is_file():
                continue
            if not (run_folder / PLAN).is_file():
                raise RefusedError(
                    f"{run_folder}: this run is not prepared. Use the command `prepare` first."
                )
            if monotonic() >= deadline or not _continue_run(folder, run_folder, device, deadline):
                print(
                    f"stopped, because the time limit (--minutes {minutes:g}) has passed. Run the "
                    "same command again to continue",
                    flush=True,
                )
                return


def _continue_run(folder: Path, run_folder: Path, device: str, deadline: float) -> bool:
    """Start or continue one run; return False if it stops at the deadline before its end.

    folder: contains data/ with the data sets.
    run_folder: the folder from `prepare`.
    deadline: a value of `time.monotonic`. The run stops after the first round that ends later.
    """
    plan = pickle.loads((run_folder / PLAN).read_bytes())
    spec = plan["spec"]
    data = replace(spec.data, dataset_path=folder.resolve() / "data" / spec.data.dataset_path)
    settings = replace(spec.settings, checkpoint=CHECKPOINTS)
    spec = replace(spec, data=data, settings=settings, device=device)
    spec = _with_step_mode(spec, plan["schedule"].concurrency)
    started = monotonic()
    rows: list[Row] = []
    resume = checkpoint.find_latest(CHECKPOINTS.folder_for(run_folder))
    events = inprocess.run(spec, plan["schedule"], plan["fleet"], str(run_folder), resume)
    for event in events:
        if isinstance(event, Started):
            rows = list(event.rows)
        elif isinstance(event, Round):
            rows.append(event.row)
            print(
                f"run {run_folder.name}: round {len(rows)} of {settings.rounds} is finished",
                flush=True,
            )
            if monotonic() >= deadline and len(rows) < settings.rounds:
                events.close()  # type: ignore[attr-defined]
                return False
        elif isinstance(event, Finished):
            _finish(run_folder, rows, event, spec, plan, monotonic() - started)
    return True


def _with_step_mode(spec: RunSpec, concurrency: int) -> RunSpec:
    """Return the spec with raysim's default number of lanes, and with recorded steps on a GPU.

    concurrency: the largest number of clients in flight.
    """
    spec = replace(spec, graph=spec.device.startswith("cuda"), lanes=1)
    return replace(spec, lanes=default_lanes(spec, declare_run(spec), concurrency))


def _finish(
    run_folder: Path,
    rows: Sequence[Row],
    end: Finished,
    spec: RunSpec,
    plan: Mapping[str, Any],
    seconds: float,
) -> None:
    """Write configuration, history and summary, which complete a run folder.

    spec: the run with this machine's device and number of lanes.
    plan: the dict that `_prepare_run` has stored.
    seconds: the wall time since the run was started or continued.
    """
    config = plan["config"]
    runtime = config["runtime"] | {"lanes": spec.lanes, "graph": spec.graph}
    # Every JSON file is also YAML, and JSON needs no further library.
    write_json(config | {"device": spec.device, "runtime": runtime}, run_folder / CONFIG)
    write_history(rows, run_folder / HISTORY)
    summary = {
        **summarise(rows),
        "rounds": len(rows),
        "wall_seconds": seconds,
        "model_sha256": end.model_sha256,
        "state_sha256": end.state_sha256,
        "split": plan["split"],
        "identity": plan["identity"] | _identity_here(spec),
    }
    write_json(summary, run_folder / SUMMARY)


def _identity_here(spec: RunSpec) -> dict[str, object]:
    """Return the hardware and the versions with which this machine executes a run.

    They replace the values of the machine that prepared the run.
    """
    is_gpu = spec.device.startswith("cuda")
    return {
        "device": torch.cuda.get_device_name(spec.device) if is_gpu else spec.device,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
        "lanes": spec.lanes,
        "graph": spec.graph,
        "python": platform.python_version(),
        "libraries": {"raysim": __version__, "torch": torch.__version__, "numpy": np.__version__},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Prepare the papers' runs for a machine with a GPU, or execute the prepared runs.

    `prepare` stores each run's configuration and data. `run` trains the stored runs until the time
    is over.
    arguments: None reads the command line.
    """
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m jobs.papers.gpu", description=__doc__, formatter_class=style
    )
    parser.add_argument(
        "command",
        choices=("prepare", "run"),
        help="prepare: store the configuration and the data of each run; run: train these runs",
    )
    parser.add_argument("folder", metavar="DIR", help="folder of configurations, data and runs")
    parser.add_argument(
        "words",
        metavar="NAME or KEY=VALUE",
        nargs="*",
        help="names of studies (all), and for `prepare` overrides of all runs",
    )
    parser.add_argument(
        "--minutes", type=float, default=25.0, help="time limit of `run` in minutes (25)"
    )
    parser.add_argument(
        "--device", default="cuda", help="device on which `run` trains: cuda, cuda:1 or cpu (cuda)"
    )
    options = parser.parse_intermixed_args(arguments)

    folder = user_path(options.folder)
    overrides = [word for word in options.words if "=" in word]
    names = [word for word in options.words if "=" not in word]
    if options.command == "prepare":
        prepare(folder, overrides, names)
    elif overrides:
        raise RefusedError(
            f"{overrides[0]}: the command `run` takes no overrides. Give this one to `prepare`."
        )
    else:
        run(folder, names, options.device, options.minutes)


if __name__ == "__main__":
    run_program(main)
