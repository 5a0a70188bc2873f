"""Compare schedules and asynchronous algorithms on a fleet with a few very slow devices.

    python jobs/asynchrony_study.py run runs/asynchrony
    python jobs/asynchrony_study.py collect runs/asynchrony
    python jobs/asynchrony_study.py page

`run` executes 48 runs; further arguments are overrides of every run. `collect` writes the numbers,
and `page` the page docs/studies/asynchrony.md.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from jobs.command import run_study
from jobs.study_curves import curves_figure, draw_panel

PAGE = Path(__file__).parents[1] / "docs" / "studies" / "asynchrony.md"
STORE = PAGE.with_suffix(".json")
TARGETS = (0.70, 0.75, 0.80)
RESULTS = 1500  # the updates that a run aggregates, if each aggregation has its full number
SETTING = [
    *("data=fashion_mnist", "model=mlp", "model.widths=[128]"),
    *("partition=dirichlet", "partition.alpha=0.3", "partition.test_fraction=0.2"),
    *("partition.clients=100", "local.epochs=1", "local.batch=50", "local.lr=0.1"),
    *("fleet=lognormal", "fleet.sigma=1.2", "fleet.dropout=0.1"),
    *("checkpoint.every=0", "tracking=none", "runtime=local", "runtime.workers=2"),
]
FEDBR = ["method.fedbr.pseudo_batch=20"]
BUFFERED = ["schedule=buffered", "schedule.concurrency=20", "schedule.size=5"]
IMMEDIATE = ["schedule=immediate", "schedule.concurrency=20"]
# Name: description, overrides, methods, and the number of updates per aggregation. In fact,
# "synchronous" aggregates about 18, because 2 of 20 jobs are lost, and "deadline" about 23.
ALGORITHMS: dict[str, tuple[str, list[str], list[str], int]] = {
    "synchronous": ("waits for all 20", ["schedule.cohort=20"], [], 20),
    "over-selection": (
        "dispatches 26, aggregates the first 20",
        ["schedule=oversample", "schedule.cohort=20", "schedule.factor=1.3"], [], 20,
    ),
    "deadline": (
        "dispatches 26, waits 2 s, aggregates late updates later",
        [
            "schedule=deadline", "schedule.cohort=26", "schedule.seconds=2",
            "schedule.max_staleness=10",
        ],
        [], 20,
    ),
    "FedBuff": ("20 in flight, buffer of 5", BUFFERED, ["fedbuff"], 5),
    "CA2FL": ("as FedBuff", [*BUFFERED, "method.ca2fl.server_lr=0.5"], ["ca2fl"], 5),
    "FADAS": ("as FedBuff", [*BUFFERED, "method.fadas.server_lr=0.003"], ["fadas"], 5),
    "FedAsync": ("20 in flight, each update at once", IMMEDIATE, ["fedasync"], 1),
    "ACE": ("as FedAsync", IMMEDIATE, ["ace"], 1),
}  # fmt: skip
LOCAL = {"FedAvg": [], "FedBR": ["fedbr"]}


# --- runs -----------------------------------------------------------------------------------------
def words(algorithm: str, local: str, seed: int) -> list[str]:
    """Return the overrides of one run.

    algorithm: the server's algorithm, a key of `ALGORITHMS`.
    local: the method that clients train with, a key of `LOCAL`.
    seed: the seed of the run.
    """
    _, own, methods, size = ALGORITHMS[algorithm]
    chosen = [*methods, *LOCAL[local]]
    rounds, every = RESULTS // size, 60 // size
    return [
        *SETTING,
        *own,
        *(FEDBR if local == "FedBR" else []),
        f"method=[{','.join(chosen)}]",
        f"seed={seed}",
        f"rounds={rounds}",
        f"evaluate.every={every}",
    ]


def run_all(folder: Path, more: Sequence[str], seeds: Iterable[int] = range(3)) -> None:
    """Execute the unfinished runs of the study of schedules and asynchronous algorithms.

    All runs of one seed come before the runs of the next seed.
    folder: contains a folder for each run.
    more: overrides for every run.
    """
    import raysim

    for seed, local, algorithm in product(seeds, LOCAL, ALGORITHMS):
        out = folder / f"{algorithm}-{local}-{seed}"
        print(
            f"run of the server algorithm {algorithm} with {local} on the clients, seed {seed}",
            flush=True,
        )
        resume = ["resume=latest"] if out.exists() else []
        raysim.run([*words(algorithm, local, seed), f"out={out}", *resume, *more], quiet=True)


# --- what they did --------------------------------------------------------------------------------
def measured(folder: Path) -> dict[str, Any]:
    """Return the numbers of one finished run for the page docs/studies/asynchrony.md.

    folder: the folder that the run has written.
    """
    import pyarrow.parquet as pq

    rows = pq.read_table(folder / "history.parquet").to_pylist()
    summary = json.loads((folder / "summary.json").read_text())
    scored = [row for row in rows if row["accuracy_global"] is not None]
    jobs = sum(row["clients"] + row["failures"] for row in rows)
    wasted = sum(row["lost"] + row["discarded"] for row in rows)
    walls = np.diff([row["wall_seconds"] for row in rows], prepend=0.0)

    def reached(target: float) -> dict[str, float] | None:
        row = next((row for row in scored if row["accuracy_global"] >= target), None)
        return row and {"seconds": row["virtual_seconds"], "megabytes": _megabytes(row)}

    return {
        "reached": {f"{target:.2f}": reached(target) for target in TARGETS},
        "accuracy": statistics.mean(row["accuracy_global"] for row in scored[-3:]),
        "seconds": rows[-1]["virtual_seconds"],
        "megabytes": _megabytes(rows[-1]),
        "staleness": float(
            np.average([row["staleness"] for row in rows], weights=[row["clients"] for row in rows])
        ),
        "staleness_max": max(row["staleness_max"] for row in rows),
        "unused": wasted / (jobs + wasted),
        "worker_busy": float(np.average([row["worker_busy"] for row in rows], weights=walls)),
        "curve": [
            [round(row["virtual_seconds"], 2), round(row["accuracy_global"], 4)] for row in scored
        ],
        "model_sha256": summary["model_sha256"],
        "libraries": summary["identity"]["libraries"],
    }


def _megabytes(row: dict[str, Any]) -> float:
    return float(4e-6 * (row["floats_down"] + row["floats_up"]))


def collect(folder: Path) -> None:
    """Write the numbers of every finished run to docs/studies/asynchrony.json.

    folder: the folder that contains the folders of all runs.
    """
    found: dict[str, Any] = {}
    for algorithm, local, seed in product(ALGORITHMS, LOCAL, range(100)):
        if (out := folder / f"{algorithm}-{local}-{seed}").joinpath("summary.json").exists():
            run = {"words": " ".join(words(algorithm, local, seed)), **measured(out)}
            found.setdefault(local, {}).setdefault(algorithm, {})[str(seed)] = run
    STORE.write_text(json.dumps(found, indent=1) + "\n")


# --- the page -------------------------------------------------------------------------------------
def mean(values: Sequence[float | None], form: str) -> str:
    """Return the mean and the standard deviation of the values as text; "never" without values.

    The deviation of a single value is left out.
    values: one value for each run; None for a run without a value. If only some runs have a value,
    the text also says how many.
    form: the format of both numbers, such as "{:.1f}".
    """
    reached = [value for value in values if value is not None]
    if not reached:
        return "never"
    text = form.format(statistics.mean(reached))
    if len(reached) > 1:
        text += f" ± {form.format(statistics.stdev(reached))}"
    return text if len(reached) == len(values) else f"{text} ({len(reached)} of {len(values)})"


def table(runs: dict[str, dict[str, Any]]) -> str:
    """Return a Markdown table with a row for each algorithm: means over the seeds.

    runs: the stored numbers of the runs with one client method, by algorithm and seed.
    """
    heads = [
        "algorithm",
        "schedule",
        *(f"virtual s until accuracy {t:.0%}" for t in TARGETS),
        *(f"MB until accuracy {t:.0%}" for t in TARGETS),
    ]
    heads += [
        "final accuracy, %",
        "virtual s of the run",
        "staleness, mean (highest)",
        "unused jobs, %",
        "workers busy, %",
    ]
    lines = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    for algorithm, by_seed in runs.items():
        each = list(by_seed.values())
        at = [[run["reached"][f"{t:.2f}"] for run in each] for t in TARGETS]
        cells = [algorithm, ALGORITHMS[algorithm][0]]
        cells += [mean([got and got["seconds"] for got in column], "{:.0f}") for column in at]
        cells += [mean([got and got["megabytes"] for got in column], "{:,.0f}") for column in at]
        cells += [
            mean([100 * run["accuracy"] for run in each], "{:.1f}"),
            mean([run["seconds"] for run in each], "{:,.0f}"),
        ]
        cells += [
            f"{mean([run['staleness'] for run in each], '{:.1f}')} "
            f"({max(run['staleness_max'] for run in each)})"
        ]
        cells += [
            mean([100 * run[key] for run in each], "{:.0f}") for key in ("unused", "worker_busy")
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def page_text(store: dict[str, Any]) -> str:
    """Return the text of the page docs/studies/asynchrony.md.

    store: the numbers of the runs, as docs/studies/asynchrony.json has them.
    """
    tables = []
    for local, runs in store.items():
        seeds = sorted({seed for by_seed in runs.values() for seed in by_seed}, key=int)
        tables.append(
            f"## {local} on the clients, seed{'s' if len(seeds) > 1 else ''} "
            f"{', '.join(seeds)}\n\n{table(runs)}"
        )
    return TEXT.format(
        setting=" ".join(SETTING), tables="\n\n".join(tables), results=f"{RESULTS:,}"
    )


TEXT = """# Schedules and asynchronous algorithms on a heavy-tailed fleet

This study compares schedules and asynchronous algorithms on devices of very different speeds.

The task is Fashion-MNIST on 100 clients by Dirichlet(0.3), an MLP with 128 hidden units, one
local epoch. Speeds are log-normal with sigma 1.2; a tenth of the jobs is lost. Every run
aggregates {results} updates, with two exceptions. A synchronous run aggregates a tenth fewer,
because lost jobs are not replaced; a run with a deadline aggregates about a sixth more. Time, traffic and
staleness differ. Twenty clients train at a time; over-selection and the deadline
dispatch 26. Numbers are means over seeds ± sample standard deviation. Accuracy is on the central test set;
the final accuracy is the mean of the last three evaluations. *Staleness* is the mean over
updates, in aggregations (in brackets the highest). *Unused* jobs were lost or discarded. *Workers
busy* is the share of wall time in which the two workers trained. A job with FedBR uses its
samples more often and also sends means of data, so it takes longer on the virtual clock. The
server learning rates of CA2FL (0.5) and FADAS (0.003) were chosen by hand on one run each.

Waiting for all clients costs most: the schedules that do not wait reach 80 % in a fraction of the
synchronous time, with about the same traffic. The deadline, which aggregates late updates later,
is close to them. ACE takes the mean of every client's last update, however old it is, and at its
usual server learning rate it stays below the others.

![Accuracy against virtual time](asynchrony.png)

{tables}

All runs share `{setting}`; the overrides and the digest of each run are in `asynchrony.json`. To repeat:

```bash
python jobs/asynchrony_study.py run runs/asynchrony
python jobs/asynchrony_study.py collect runs/asynchrony
python jobs/asynchrony_study.py page
```
"""


def draw(store: dict[str, Any], path: Path) -> None:
    """Draw the accuracy of each server algorithm against virtual time.

    There is a panel for each client method. Lines show means over the seeds, with bands from the
    lowest to the highest accuracy.
    store: the runs' numbers, by client method, server algorithm and seed.
    """
    with curves_figure(path, len(store), height=5.6, lowest=0.5) as axes:
        for ax, (local, runs) in zip(axes, store.items(), strict=True):
            curves_of: dict[str, Sequence[np.ndarray]] = {
                algorithm: [np.array(run["curve"])[:, :2] for run in by_seed.values()]
                for algorithm, by_seed in runs.items()
            }
            draw_panel(ax, curves_of, "virtual seconds", "{x:,.0f}")
            ax.set_title(f"{local} on the clients")


def write_page() -> None:
    """Write the page docs/studies/asynchrony.md and its picture.

    The picture is asynchrony.png, in the folder of the page. The numbers come from
    docs/studies/asynchrony.json, which `collect` wrote.
    """
    store = json.loads(STORE.read_text())
    PAGE.write_text(page_text(store))
    draw(store, PAGE.with_suffix(".png"))


if __name__ == "__main__":
    run_study(__doc__, run_all, collect, write_page)
