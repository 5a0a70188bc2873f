"""Read the published tables. All numbers of a paper come from one JSON file."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from raysim.primitives.errors import RefusedError, suggest

PAPERS = ("fedbr", "fedbss", "fedld", "fraug")
# The end of a note that names a file with more about it, such as "; see fedld.md". Notes are shown
# without it, because raysim does not contain these files.
REFERENCE = re.compile(r"; [^;]*\b\w+\.md\b[^;]*$")


@dataclass(frozen=True)
class Cell:
    """One printed number of a table.

    methods: the names of the methods without FedAvg.
    variant: the methods' parameters in this row, such as {"tau2": 0.5}.
    printed: the label of the row in the paper, or None.
    column: the title of the column in the paper.
    mean: the number with all printed digits.
    deviation: the number after "±", or None.
    rounds_to: the printed numbers of rounds until an accuracy is reached, such as {"0.80": 828};
    None for a dash.
    """

    methods: tuple[str, ...]
    variant: Mapping[str, object]
    printed: str | None
    dataset: str
    column: str
    mean: Decimal
    deviation: Decimal | None
    rounds_to: Mapping[str, int | None]
    unit: str

    @property
    def label(self) -> str:
        """Return the label of the table row that contains this cell, as the paper prints it.

        If the paper prints no label, return the values in `variant` as text, such as "tau2 0.5".
        """
        values = {
            key: "+".join(map(str, value)) if isinstance(value, list) else value
            for key, value in self.variant.items()
        }
        return self.printed or ", ".join(f"{key} {value}" for key, value in values.items())


@dataclass(frozen=True)
class Table:
    """A table of a paper.

    name: such as "fedbr/table1".
    title: the name of the paper and the number of the table.
    metric: which score the table has, and from which rounds it is computed.
    deviation_of: a text about the runs or rounds over which the printed deviations are taken, or
    "".
    momentum: the paper's local momentum, by data set. {} if the paper states none, or one for all
    data sets.
    notes: contradictions and missing information in the paper.
    """

    name: str
    title: str
    caption: str
    metric: str
    deviation_of: str
    momentum: Mapping[str, float]
    notes: tuple[str, ...]
    cells: tuple[Cell, ...]


@functools.cache
def tables(paper: str) -> Mapping[str, Table]:
    """Return all tables of a paper by name, such as "fedbr/table1".

    Raise `RefusedError` for an unknown paper.
    """
    if paper not in PAPERS:
        raise RefusedError(f"{paper}: there is no such paper; {suggest(paper, PAPERS)}")
    content = json.loads(
        (Path(__file__).parent / f"{paper}.json").read_text(encoding="utf-8"), parse_float=Decimal
    )
    return {
        f"{paper}/{key}": _table(f"{paper}/{key}", content["paper"], node)
        for key, node in content["tables"].items()
    }


def find(name: str) -> Table:
    """Return a table by its name, such as "fedbr/table1".

    Raise `RefusedError` with the nearest name for an unknown one.
    """
    known = tables(name.partition("/")[0])
    if name not in known:
        raise RefusedError(f"{name}: there is no such table; {suggest(name, known)}")
    return known[name]


def listing(paper: str) -> str:
    """Return a line for each table of a paper: its name and its caption."""
    known = tables(paper)
    width = max(map(len, known))
    return "\n".join(f"{name:<{width}}  {table.caption}" for name, table in known.items())


def _table(name: str, paper: str, node: Mapping[str, Any]) -> Table:
    momentum = node["setting"].get("momentum")
    cells = tuple(_cell(row) for row in node["rows"])
    return Table(
        name=name,
        title=f"{paper}, {name.rpartition('/')[2].replace('table', 'table ')}",
        caption=node["caption"],
        metric=node["metric"],
        deviation_of=node.get("deviation_of", ""),
        momentum={key: float(value) for key, value in momentum.items()}
        if isinstance(momentum, dict)
        else {},
        notes=tuple(REFERENCE.sub("", note) for note in node.get("notes", ())),
        cells=cells,
    )


def _cell(row: Mapping[str, Any]) -> Cell:
    inner = row["method"] if isinstance(row["method"], dict) else {"method": row["method"]}
    names = inner["method"] if isinstance(inner["method"], list) else [inner["method"]]
    return Cell(
        methods=tuple(name for name in names if name != "fedavg"),
        variant=inner.get("variant", {}),
        printed=row["printed"],
        dataset=row["dataset"],
        column=row["column"],
        mean=Decimal(row["mean"]),
        deviation=None if row["deviation"] is None else Decimal(row["deviation"]),
        rounds_to=row["rounds_to"] or {},
        unit=row["unit"],
    )
