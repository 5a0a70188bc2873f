"""Compare rules that select clients, on a fleet with a few very slow devices.

    python -m jobs.selection_study run runs/selection
    python -m jobs.selection_study collect runs/selection
    python -m jobs.selection_study page

`run` executes 15 runs, and continues if it was stopped. Further arguments are overrides. `collect`
and `page` write docs/studies/selection.json, .md and .png.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from jobs.asynchrony_study import mean
from jobs.command import run_study
from jobs.study_curves import curves_figure, draw_panel

PAGE = Path(__file__).parents[1] / "docs" / "studies" / "selection.md"
STORE = PAGE.with_suffix(".json")
SEEDS = range(3)
TARGETS = (0.70, 0.75, 0.80)
COSTS = ("seconds", "megabytes", "energy")
SETTING = [
    "data=fashion_mnist", "model=mlp", "model.widths=[128]", "partition=dirichlet",
    "partition.alpha=0.3", "partition.test_fraction=0.2", "partition.clients=100",
    "local.epochs=1", "local.batch=50", "local.lr=0.1", "schedule=synchronous",
    "schedule.cohort=10", "rounds=120", "evaluate.every=4", "fleet=lognormal", "fleet.sigma=1.2",
    "fleet.dropout=0.1", "fleet.cost.computing_w=5.6", "fleet.cost.receiving_w=3.16",
    "fleet.cost.sending_w=6.21", "fleet.kwh_co2=436", "checkpoint.every=0", "tracking=none",
    "runtime=inprocess",
]  # fmt: skip
RULES: dict[str, list[str]] = {
    "random": ["selection=random"],
    "power of choice, extra pass": ["selection=power_of_choice", "selection.candidates=20"],
    "power of choice, last loss": [
        "selection=power_of_choice", "selection.candidates=20", "selection.loss=last",
    ],
    "Oort": ["selection=oort"],
    "FedCS": [
        "selection=fedcs", "selection.candidates=20", "selection.deadline=1",
        "selection.uplink=own",
    ],
}  # fmt: skip


# --- runs ---------------------------------------------------------------------------------------
def folder_of(folder: Path, rule: str, seed: int) -> Path:
    """Return the folder of a run.

    folder: the folder of all runs.
    rule: the name of the selection.
    """
    return folder / f"{rule.replace(',', '').replace(' ', '_').lower()}-{seed}"


def run_all(folder: Path, more: Sequence[str]) -> None:
    """Execute the unfinished runs of the study that compares selection rules.

    All runs of one seed come before the runs of the next seed.
    folder: contains a folder for each run.
    more: overrides for every run.
    """
    import raysim

    for seed, (rule, overrides) in product(SEEDS, RULES.items()):
        out = folder_of(folder, rule, seed)
        if (out / "summary.json").exists():
            continue
        print(f"run with the selection {rule}, seed {seed}", flush=True)
        resume = ["resume=latest"] if out.exists() else []
        words = [*SETTING, *overrides, f"seed={seed}", f"out={out}", *resume, *more]
        raysim.run(words, quiet=True)


def measured(folder: Path) -> dict[str, Any]:
    """Return the numbers of one finished run for the page docs/studies/selection.md.

    folder: the folder that the run has written.
    """
    from raysim.results.history import read_history
    from raysim.results.jobs import read_jobs

    rows: list[Any] = [*read_history(folder / "history.parquet")]
    summary = json.loads((folder / "summary.json").read_text())
    scored = [row for row in rows if row["accuracy_global"] is not None]

    def costs(row: Any) -> dict[str, float]:
        return {
            "seconds": row["virtual_seconds"],
            "megabytes": 4e-6 * (row["floats_down"] + row["floats_up"]),
            "energy": row["energy_wh"],
        }

    reached = {}
    for target in TARGETS:
        row = next((row for row in scored if row["accuracy_global"] >= target), None)
        reached[f"{target:.2f}"] = None if row is None else costs(row)
    jobs = read_jobs(folder)
    assert jobs is not None, "every run has jobs.parquet"
    return {
        "reached": reached,
        "accuracy": statistics.mean(row["accuracy_global"] for row in scored[-5:]),
        "worst": statistics.mean(row["accuracy_worst"] for row in scored[-5:]),
        "clients": len(np.unique(jobs.client)),
        "total": costs(rows[-1]),
        "co2_g": rows[-1]["co2_g"],
        "curve": [
            [*(round(value, 4) for value in costs(row).values()), round(row["accuracy_global"], 4)]
            for row in scored
        ],
        "model_sha256": summary["model_sha256"],
        "libraries": summary["identity"]["libraries"],
    }


def collect(folder: Path) -> None:
    """Write the numbers of every finished run to docs/studies/selection.json.

    folder: the folder of all runs.
    """
    store: dict[str, Any] = {}
    for rule, seed in product(RULES, SEEDS):
        out = folder_of(folder, rule, seed)
        if (out / "summary.json").exists():
            store.setdefault(rule, {})[str(seed)] = measured(out)
    STORE.write_text(json.dumps(store, indent=1) + "\n")


# --- the page -----------------------------------------------------------------------------------
def table(store: dict[str, Any]) -> str:
    """Return a Markdown table with a row for each selection rule: means over the seeds.

    store: the results of runs that `collect` wrote, by selection rule and seed.
    """
    names = {"seconds": "virtual s", "megabytes": "MB", "energy": "Wh"}
    goal = f"{TARGETS[1]:.2f}"
    heads = ["selection", *(f"{names[cost]} until {TARGETS[1]:.0%}" for cost in COSTS)]
    heads += ["virtual s until 80%", "final accuracy, %", "accuracy of the worst client, %"]
    heads += ["clients that took part", "virtual s of the run", "Wh of the run"]
    lines = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    for rule, by_seed in store.items():
        runs = list(by_seed.values())
        cells = [rule]
        for cost in COSTS:
            at = [one["reached"][goal] for one in runs]
            cells.append(mean([row and row[cost] for row in at], "{:,.2f}"))
        last = [one["reached"]["0.80"] for one in runs]
        cells.append(mean([row and row["seconds"] for row in last], "{:,.0f}"))
        cells += [mean([100 * one[key] for one in runs], "{:.1f}") for key in ("accuracy", "worst")]
        cells.append(mean([one["clients"] for one in runs], "{:.0f}"))
        cells.append(mean([one["total"]["seconds"] for one in runs], "{:,.0f}"))
        cells.append(mean([one["total"]["energy"] for one in runs], "{:.1f}"))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(store: dict[str, Any], path: Path) -> None:
    """Draw the accuracy on the central test set against virtual time, traffic and energy.

    For each selection rule, a line shows the mean over the seeds, and a band the range from lowest
    to highest.
    store: the runs' results, by selection rule and seed, as in selection.json.
    """
    titles = {"seconds": "virtual seconds", "megabytes": "MB, down and up", "energy": "Wh"}
    with curves_figure(path, len(COSTS), height=5, lowest=0.6) as axes:
        for place, (ax, cost) in enumerate(zip(axes, COSTS, strict=True)):
            curves_of: dict[str, Sequence[np.ndarray]] = {
                rule: [np.array(run["curve"])[:, [place, -1]] for run in by_seed.values()]
                for rule, by_seed in store.items()
            }
            draw_panel(ax, curves_of, titles[cost], "{x:g}")


TEXT = """# Which clients to choose on a heavy-tailed fleet

This study compares rules that choose the clients of a round (`selection=`).

The task is Fashion-MNIST on 100 clients by Dirichlet(0.3), an MLP with 128 hidden units, one local
epoch, {rounds}, ten clients in each. Speeds are log-normal with sigma 1.2; a tenth of the jobs is
lost. Devices draw 5.6 W when computing, 3.16 W when receiving and 6.21 W when sending. Numbers are
means over the seeds {seeds} ± sample standard deviation. Accuracy is on the central test set; the final
accuracy and that of the worst client are means of the last five evaluations. Both forms of
power-of-choice draw 20 candidates. FedCS asks 20 drawn clients and takes at most ten that finish
within a second.

{conclusions}

![Accuracy against virtual time, traffic and energy](selection.png)

{table}

All runs share `{setting}`; `selection.json` has the digest of each run. To repeat:

```bash
python -m jobs.selection_study run runs/selection
python -m jobs.selection_study collect runs/selection
python -m jobs.selection_study page
```
"""
# What the stored numbers show.
CONCLUSIONS = """FedCS reaches 75 % and 80 % first, and 75 % with the least energy, because it leaves out slow
clients: less than half of the clients ever take part, and the final accuracy and the worst client
suffer. Oort needs about half of random's time to 80 % although all clients take part, and its worst
client is better than random's. Power-of-choice by the last loss has the best final accuracy and
helps the worst client at about random's cost; its extra pass adds traffic and energy and buys no
time here."""


def write_page() -> None:
    """Write the page docs/studies/selection.md and its picture.

    The picture is selection.png, in the folder of the page. The numbers come from
    docs/studies/selection.json, which `collect` wrote.
    """
    store = json.loads(STORE.read_text())
    seeds = sorted({seed for by_seed in store.values() for seed in by_seed}, key=int)
    rounds = next(word for word in SETTING if word.startswith("rounds=")).partition("=")[2]
    text = TEXT.format(
        rounds=f"{rounds} rounds",
        seeds=", ".join(seeds),
        conclusions=CONCLUSIONS,
        table=table(store),
        setting=" ".join(SETTING),
    )
    PAGE.write_text(text)
    draw(store, PAGE.with_suffix(".png"))


if __name__ == "__main__":
    run_study(__doc__, run_all, collect, write_page)
