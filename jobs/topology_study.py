"""Compare topologies on clients with different labels, and on clients with rotated images.

    python -m jobs.topology_study run runs/topology
    python -m jobs.topology_study collect runs/topology
    python -m jobs.topology_study page

`run` executes 36 runs, and continues if it was stopped. Further arguments are overrides. `collect`
and `page` write docs/studies/topology.json, .md and two pictures.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from jobs.asynchrony_study import mean
from jobs.command import run_study
from jobs.study_curves import curves_figure, draw_panel

PAGE = Path(__file__).parents[1] / "docs" / "studies" / "topology.md"
STORE = PAGE.with_suffix(".json")
SEEDS = range(3)
CLIENTS, ROUNDS, EDGES = 100, 30, 4
EVERY = 3  # the number of rounds between two evaluations
FLOAT_MB = 4e-6
SETTING = [
    "data.pool=2", "model=mlp", "model.widths=[64]", f"partition.clients={CLIENTS}",
    "partition.fraction=0.2", "partition.test_fraction=0.2", "local.epochs=1", "local.batch=20",
    "schedule=synchronous", "fleet=lognormal", "fleet.sigma=1.2", "fleet.cost.computing_w=5.6",
    "fleet.cost.receiving_w=3.16", "fleet.cost.sending_w=6.21", "checkpoint.every=0",
    "tracking=none", "runtime=inprocess", "runtime.threads=1", "runtime.lanes=8",
]  # fmt: skip
DATA: dict[str, list[str]] = {
    "labels": [
        "data=fashion_mnist", "partition=dirichlet", "partition.alpha=0.3", "local.lr=0.1",
    ],
    "turned": [
        "data=mnist", "partition=iid", "data.rotation.per=client",
        "data.rotation.angles=[0,90,180,270]", "local.lr=0.5",
    ],
}  # fmt: skip
# Norms at which clusters are split: the longest updates are about 1 on both data sets, the mean
# update falls to 0.1 with other labels and stays longer with turned images.
NORMS = {
    "labels": ["topology.mean_norm=0.12", "topology.max_norm=0.8"],
    "turned": ["topology.mean_norm=1.0", "topology.max_norm=0.5"],
}
ALL = [f"schedule.cohort={CLIENTS}", f"rounds={ROUNDS}", f"evaluate.every={EVERY}"]
TOPOLOGIES: dict[str, list[str]] = {
    "star": ALL,
    "hierarchical": [
        "topology=hierarchical", f"topology.edges={EDGES}", f"schedule.cohort={CLIENTS // EDGES}",
        f"rounds={EDGES * ROUNDS}", f"evaluate.every={EDGES * EVERY}",
    ],
    "clustered by loss": [*ALL, "topology=clustered", "topology.rule=loss", "topology.clusters=4"],
    "clustered by updates": [
        *ALL, "topology=clustered", "topology.rule=updates", "topology.clusters=4",
        "topology.start=8",
    ],
    "gossip on a ring": [*ALL, "topology=gossip"],
    "gossip on an expander": [*ALL, "topology=gossip", "topology.graph=expander"],
}  # fmt: skip
CENTRAL = "accuracy of the mean of models, %"
COSTS = ("virtual seconds", "MB on all links", "Wh of the devices")  # columns of a curve


def cases() -> Iterator[tuple[int, str, str]]:
    """Yield the seed, the data and the topology of each run; all runs of a seed come together."""
    yield from product(SEEDS, DATA, TOPOLOGIES)


def folder_of(folder: Path, data: str, topology: str, seed: int) -> Path:
    """Return the folder of a run.

    folder: the folder of all runs.
    """
    return folder / f"{data}-{topology.replace(' ', '_')}-{seed}"


def run_all(folder: Path, more: Sequence[str]) -> None:
    """Execute the unfinished runs of the study that compares topologies.

    All runs of one seed come before the runs of the next seed.
    folder: contains a folder for each run.
    more: overrides for every run.
    """
    import raysim

    for seed, data, topology in cases():
        out = folder_of(folder, data, topology, seed)
        if (out / "summary.json").exists():
            continue
        print(f"run of the data {data} with the topology {topology}, seed {seed}", flush=True)
        norms = NORMS[data] if topology == "clustered by updates" else []
        words = [*SETTING, *DATA[data], *TOPOLOGIES[topology], *norms, f"seed={seed}"]
        resume = ["resume=latest"] if out.exists() else []
        raysim.run([*words, f"out={out}", *resume, *more], quiet=True)


def measured(folder: Path, topology: str) -> dict[str, Any]:
    """Return the numbers of one finished run for the page docs/studies/topology.md.

    folder: the folder that the run has written.
    topology: the name of the run's topology, such as "star".
    """
    from raysim.results.history import read_history

    rows: list[Any] = [*read_history(folder / "history.parquet")]
    summary = json.loads((folder / "summary.json").read_text())
    scored = [row for row in rows if row["accuracy"] is not None]
    last = rows[-1]
    between_clients = topology.startswith("gossip")
    floats = last["floats_down"] + last["floats_up"]

    def total(row: Any) -> float:
        # Bytes from one client to another are counted for both clients.
        of_clients = (row["floats_down"] + row["floats_up"]) / (2 if between_clients else 1)
        return FLOAT_MB * float(of_clients + (row.get("floats_links") or 0))

    return {
        "accuracy": scored[-1]["accuracy"],
        "worst": scored[-1]["accuracy_worst"],
        "central": scored[-1]["accuracy_global"],
        "clusters": last.get("topology.clusters"),
        "seconds": last["virtual_seconds"],
        "client_server_mb": 0.0 if between_clients else FLOAT_MB * floats,
        "client_client_mb": FLOAT_MB * floats / 2 if between_clients else 0.0,
        "edge_cloud_mb": FLOAT_MB * float(last.get("floats_links") or 0),
        "energy": last["energy_wh"],
        "curve": [
            [
                round(row["virtual_seconds"], 3),
                round(total(row), 3),
                round(row["energy_wh"], 5),
                round(row["accuracy"], 4),
            ]
            for row in scored
        ],
        "model_sha256": summary["model_sha256"],
    }


def collect(folder: Path) -> None:
    """Write the numbers of the finished runs to docs/studies/topology.json.

    folder: the folder that contains the folders of all runs.

    A seed is left out unless all of its runs have finished.
    """
    store: dict[str, Any] = {}
    for seed in SEEDS:
        pairs = [*product(DATA, TOPOLOGIES)]
        folders = [folder_of(folder, data, topology, seed) for data, topology in pairs]
        if not all((out / "summary.json").exists() for out in folders):
            continue
        for (data, topology), out in zip(pairs, folders, strict=True):
            by_seed = store.setdefault(data, {}).setdefault(topology, {})
            by_seed[str(seed)] = measured(out, topology)
    STORE.write_text(json.dumps(store, indent=1) + "\n")


# --- the page -----------------------------------------------------------------------------------
def table(of_data: dict[str, Any]) -> str:
    """Return a Markdown table with a row for each topology: means over the seeds.

    of_data: the stored numbers of the runs on one data set of `DATA`, by topology and seed.
    """
    heads = ["topology", "accuracy of clients, %", "accuracy of the worst client, %", CENTRAL]
    heads.append("virtual s")
    heads += ["MB between clients and servers", "MB between edges and cloud", "MB between clients"]
    heads.append("Wh of the devices")
    lines = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    for topology, by_seed in of_data.items():
        runs = list(by_seed.values())
        cells = [topology]
        cells += [
            mean([100 * one[key] for one in runs], "{:.1f}")
            for key in ("accuracy", "worst", "central")
        ]
        cells.append(mean([one["seconds"] for one in runs], "{:,.0f}"))
        for key in ("client_server_mb", "edge_cloud_mb", "client_client_mb"):
            cells.append(f"{np.mean([one[key] for one in runs]):,.0f}")
        cells.append(mean([one["energy"] for one in runs], "{:.2f}"))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(of_data: dict[str, Any], path: Path) -> None:
    """Draw the clients' accuracy against virtual time, traffic and energy.

    of_data: the stored numbers of the runs on one data set of `DATA`, by topology and seed.
    path: the path of the picture.
    """
    label = "accuracy of clients with their model"
    with curves_figure(path, len(COSTS), height=5, lowest=0.2, label=label) as axes:
        for place, cost in enumerate(COSTS):
            curves_of: dict[str, Sequence[np.ndarray]] = {
                topology: [np.array(one["curve"])[:, [place, -1]] for one in by_seed.values()]
                for topology, by_seed in of_data.items()
            }
            draw_panel(axes[place], curves_of, cost, "{x:g}")


TEXT = """# One server, edges, clusters or peers

This study compares topologies on clients with different labels and on clients with different
inputs.

*Labels*: Fashion-MNIST on {clients} clients by Dirichlet(0.3). *Turned*: MNIST on {clients}
clients, all images of a client turned by 0, 90, 180 or 270 degrees. Images have 14 x 14 pixels, a
client has about 96 training samples, the model is an MLP with 64 hidden units, and each client
trains one epoch in each of {rounds} rounds. Speeds are log-normal with sigma 1.2. Devices draw
5.6 W when computing, 3.16 W when receiving and 6.21 W when sending. The hierarchy has {edges} edges
that exchange every two rounds. Clusters are at most four. A split by updates is possible
from round 8 on ({norms}). Accuracy is that of each client's model on the client's own test samples
after the last round; the *mean of models* is scored on the central test set. Numbers are means over
the seeds {seeds} ± sample standard deviation.

{conclusions}

[Another study](selection.md) compares the rules that choose the clients of a round (random,
power-of-choice, Oort and FedCS) on Fashion-MNIST with the same split and the same distribution of
speeds.

## Labels
![Accuracy of clients with other labels against virtual time, traffic and energy](topology-labels.png)

{labels}

## Turned
![Accuracy of clients with turned images against virtual time, traffic and energy](topology-turned.png)

{turned}

All runs share `{setting}`; *labels* adds `{labels_setting}` and *turned* `{turned_setting}`.
`topology.json` has the digest of each run. To repeat, in about {minutes} minutes of one core:

```bash
DATA=~/data bash jobs/studies.sh topology
```
"""
# What the stored numbers show.
CONCLUSIONS = """Clusters pay where the inputs differ: on turned images both rules are at least 20
points better for the clients than one model, and splits by updates cost no more time, traffic or
energy than the star, while the choice by loss downloads four models and takes more than twice the
time and energy. With other labels only the choice by loss helps the clients, by about three points
at two and a half times the star's traffic. The hierarchy equals the star and adds 2 % of traffic
between edges and cloud; gossip needs no server and equals it in the mean with other labels, but its
worst clients are worse, devices need 1.3 (ring) to 1.9 times (expander) the energy, and on a ring
turned images spread too slowly in 30 rounds."""


def write_page() -> None:
    """Write the page docs/studies/topology.md and its two pictures.

    The pictures are topology-labels.png and topology-turned.png, in the folder of the page. The
    numbers come from docs/studies/topology.json, which `collect` wrote.
    """
    store = json.loads(STORE.read_text())
    seeds = sorted({seed for by_topology in store.values() for seed in by_topology["star"]})
    norms = "; ".join(f"{data}: `{' '.join(words)}`" for data, words in NORMS.items())
    text = TEXT.format(
        clients=CLIENTS,
        rounds=ROUNDS,
        edges=EDGES,
        norms=norms,
        seeds=", ".join(seeds),
        conclusions=CONCLUSIONS,
        labels=table(store["labels"]),
        turned=table(store["turned"]),
        setting=" ".join(SETTING),
        labels_setting=" ".join(DATA["labels"]),
        turned_setting=" ".join(DATA["turned"]),
        minutes=8,
    )
    PAGE.write_text(text)
    for data, of_data in store.items():
        draw(of_data, PAGE.with_name(f"topology-{data}.png"))


if __name__ == "__main__":
    run_study(__doc__, run_all, collect, write_page)
