"""Compare compressors on the model of the workload W3 of `raysim bench`, with phones' uplinks.

    python -m jobs.compression_study run runs/compression
    python -m jobs.compression_study collect runs/compression
    python -m jobs.compression_study page

`run` executes 15 runs, and continues if it was stopped. Further arguments are overrides. `collect`
and `page` write docs/studies/compression.json, .md and .png.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jobs.command import run_study
from jobs.study_curves import curves_figure, draw_panel

PAGE = Path(__file__).parents[1] / "docs" / "studies" / "compression.md"
STORE = PAGE.with_suffix(".json")
TARGET = 0.80
SETTING = [
    "data=digit_domains", "data.domains=[usps]", "data.size=28", "data.channels=1",
    "data.mean=[0.5]", "data.std=[0.5]", "data.augment=[]", "model=mlp",
    "model.widths=[2700,2700]", "partition=dirichlet", "partition.alpha=0.5",
    "partition.clients=20", "partition.test_fraction=0.0", "local.epochs=null", "local.steps=2",
    "local.batch=32", "local.lr=0.1", "weighting=uniform", "schedule=synchronous",
    "schedule.cohort=10", "rounds=20", "evaluate.every=2", "fleet=devices",
    "fleet.classes.phone_low.share=0.4", "fleet.classes.phone_mid.share=0.35",
    "fleet.classes.phone_high.share=0.25", "fleet.classes.tablet.share=0",
    "fleet.classes.edge_box.share=0", "checkpoint.every=0", "tracking=none", "runtime=inprocess",
    "runtime.threads=1",
]  # fmt: skip
# The most informative compressors come first.
COMPRESSORS: dict[str, list[str]] = {
    "none": ["compression=none"],
    "topk 1 %, ef14": ["compression=topk", "compression.feedback=ef14"],
    "int8": ["compression=int8"],
    "signsgd, majority": ["compression=signsgd", "compression.size=0.0001"],
    "powersgd rank 2, ef14": ["compression=powersgd", "compression.feedback=ef14"],
    "qsgd 7 levels": ["compression=qsgd"],
    "topk 1 %": ["compression=topk"],
    "randk 1 %, ef14": ["compression=randk", "compression.feedback=ef14"],
    "terngrad": ["compression=terngrad"],
    "float16": ["compression=float16"],
    "fp8": ["compression=fp8"],
    "fedpaq 1023 levels": ["compression=fedpaq", "compression.levels=1023"],
    "topk 1 %, ef14, both": [
        "compression=topk", "compression.direction=both", "compression.feedback=ef14",
    ],
    "topk 1 %, ef21": ["compression=topk", "compression.feedback=ef21"],
    "signs, ef14": [
        "compression=signsgd", "compression.size=null", "compression.direction=up",
        "compression.feedback=ef14",
    ],
}  # fmt: skip
DRAWN = (
    "none", "int8", "qsgd 7 levels", "signsgd, majority", "powersgd rank 2, ef14", "topk 1 %",
    "topk 1 %, ef14", "topk 1 %, ef14, both",
)  # fmt: skip


# --- runs ---------------------------------------------------------------------------------------
def folder_of(folder: Path, name: str) -> Path:
    """Return the folder of a run.

    folder: the folder of all runs.
    name: the compressor's name.
    """
    return folder / re.sub(r"[^a-z0-9]+", "_", name)


def run_all(folder: Path, more: Sequence[str]) -> None:
    """Execute the runs of the study that compares compressors.

    A finished run in `folder` is not repeated.
    folder: the folder that contains the folders of all runs.
    more: overrides for every run.
    """
    import raysim

    for name, overrides in COMPRESSORS.items():
        out = folder_of(folder, name)
        if (out / "summary.json").exists():
            continue
        print(f"run with the compressor {name}", flush=True)
        resume = ["resume=latest"] if out.exists() else []
        raysim.run([*SETTING, *overrides, f"out={out}", *resume, *more], quiet=True)


def measured(folder: Path) -> dict[str, Any]:
    """Return the numbers of one finished run for the page docs/studies/compression.md.

    folder: the folder that the run has written.
    """
    from raysim.results.history import read_history

    rows: list[Any] = [*read_history(folder / "history.parquet")]
    summary = json.loads((folder / "summary.json").read_text())
    scored = [row for row in rows if row["accuracy_global"] is not None]

    def costs(row: Any) -> list[float]:
        sent = 4e-6 * row["floats_up"]
        both = sent + 4e-6 * row["floats_down"]
        return [round(number, 4) for number in (sent, both, row["virtual_seconds"])]

    return {
        "accuracy": round(scored[-1]["accuracy_global"], 4),
        "curve": [[*costs(row), round(row["accuracy_global"], 4)] for row in scored],
        "libraries": summary["identity"]["libraries"],
    }


def collect(folder: Path) -> None:
    """Write the numbers of every finished run to docs/studies/compression.json.

    If a run is missing in `folder` or unfinished, the JSON file keeps the run's earlier numbers.
    folder: the folder that contains the folders of all runs.
    """
    stored: dict[str, Any] = json.loads(STORE.read_text()) if STORE.exists() else {}
    store: dict[str, Any] = {}
    for name in COMPRESSORS:
        out = folder_of(folder, name)
        if (out / "summary.json").exists():
            store[name] = measured(out)
        elif name in stored:
            store[name] = stored[name]
    STORE.write_text(json.dumps(store, indent=1) + "\n")


# --- the page -----------------------------------------------------------------------------------
def reached(curve: Sequence[Sequence[float]]) -> Sequence[float] | None:
    """Return the costs at which a run first reaches the accuracy `TARGET`; None if it never does.

    curve: one row for each scored round: its costs so far, and its accuracy as the last number.
    """
    return next((costs for *costs, accuracy in curve if accuracy >= TARGET), None)


def table(store: dict[str, Any]) -> str:
    """Return a Markdown table with the traffic, virtual time and accuracy of each compressor.

    store: the stored numbers of the runs, by compressor.
    """
    heads = ["compression", "MB that clients send", "MB that they send and receive"]
    heads += ["virtual s", "final accuracy, %", f"MB sent until accuracy {TARGET:.0%}"]
    heads.append(f"virtual s until accuracy {TARGET:.0%}")
    lines = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    for name, one in store.items():
        sent, both, seconds, accuracy = one["curve"][-1]
        cells = [name, f"{sent:,.0f}", f"{both:,.0f}", f"{seconds:,.0f}", f"{100 * accuracy:.1f}"]
        costs = reached(one["curve"])
        cells += ["never", "never"] if costs is None else [f"{costs[0]:,.0f}", f"{costs[2]:,.0f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(store: dict[str, Any], path: Path) -> None:
    """Draw the accuracy against the bytes that clients send, and against virtual time.

    store: the stored numbers of the runs, by compressor.
    path: the path of the picture.
    """
    titles = {0: "MB that clients send", 2: "virtual seconds"}
    with curves_figure(path, len(titles), height=5, lowest=0.1) as axes:
        for ax, (place, title) in zip(axes, titles.items(), strict=True):
            curves_of: dict[str, Sequence[np.ndarray]] = {
                name: [np.array(store[name]["curve"])[:, [place, -1]]]
                for name in DRAWN
                if name in store
            }
            draw_panel(ax, curves_of, title, "{x:g}")


TEXT = """# Compressors on phones' uplinks

This study compares compressors (`compression=`) where sending takes most of the time.

The model is that of the workload W3 of `raysim bench`: an MLP with 9.4 million parameters. It learns the digits of USPS.
There are 20 clients by Dirichlet(0.5), ten of them in each of 20 rounds, with 2 steps of batch 32. The devices are phones (`fleet=devices` without tablets
and edge boxes): they send 1.1 to 2.6 MB per second (medians of the classes) and receive 2.5 to 21 MB. There is one seed, and all
runs have the same learning rate; the size of a vote (0.0001) was set by hand. Accuracy is on the central test set. A compressor works on updates (`direction=up`), unless its
row says *both*; majority vote is both.

{conclusions}

![Accuracy against bytes and virtual time](compression.png)

{table}

All runs share `{setting}`; `compression.json` has the curve of each run. To repeat, in about 20 minutes of one core:

```bash
python -m jobs.compression_study run runs/compression
python -m jobs.compression_study collect runs/compression
python -m jobs.compression_study page
```
"""
# What the stored numbers show.
CONCLUSIONS = """`int8`, `fp8`, `qsgd` and `terngrad` end at the accuracy of full floats (within half a point) with 25 %, 25 %, 13 % and 6 % of the bytes that clients send,
and reach 80 % in less than half of the time. Majority vote, which also compresses what clients receive, is there after a sixth of the
time. With less than 2 % of the bytes the accuracy is lower after 20 rounds: 83.5 % for `powersgd`, 82.1 % for `topk` with `ef14`,
81.5 % with `ef21`, and 78.1 % without error feedback; `randk` is far from done. Signs with their mean size and error feedback end at 79.1 %.
If only uploads are compressed, time does not fall below a third, because each client still receives the whole model. `topk` in both
directions takes a ninth of the time and ends at 79.2 %."""


def page_text(store: dict[str, Any]) -> str:
    """Return the text of the page docs/studies/compression.md.

    store: the numbers of the runs, as docs/studies/compression.json has them.
    """
    rows = table(store)
    missing = [name for name in COMPRESSORS if name not in store]
    if missing:
        rows += f"\n\nThe commands below also run {'; '.join(missing)}."
    return TEXT.format(conclusions=CONCLUSIONS, table=rows, setting=" ".join(SETTING))


def write_page() -> None:
    """Write the page docs/studies/compression.md and its picture.

    The picture is compression.png, in the folder of the page. The numbers come from
    docs/studies/compression.json, which `collect` wrote.
    """
    store = json.loads(STORE.read_text())
    PAGE.write_text(page_text(store))
    draw(store, PAGE.with_suffix(".png"))


if __name__ == "__main__":
    run_study(__doc__, run_all, collect, write_page)
