"""The page of `raysim bench gpu`: tables and pictures of what was measured, as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from raysim.primitives.files import replace_file
from raysim.results.tables import to_markdown
from raysim.results.theme import INK, LIGHT, set_log_scale, theme

PAGE = "page.md"
# Of a method's largest change; float32 drifts over some 50 steps.
TOLERANCE = {"float64": 1e-6, "float32": 1e-2}

Rows = Sequence[Mapping[str, Any]]


def write_page(found: Mapping[str, Any], folder: Path) -> None:
    """page.md and its pictures, of the parts that there are."""
    text = "\n".join(_page(found, folder)) + "\n"
    replace_file(folder / PAGE, text.encode())


def _page(found: Mapping[str, Any], folder: Path) -> Iterator[str]:
    about = found["about"]
    yield "# What a GPU shows"
    yield f"\n{about['device']}, torch {about['torch']}, CUDA {about['cuda']}.\n"
    if rows := found.get("correctness"):
        yield from _correctness(rows, folder)
    if rows := found.get("bits"):
        yield "## The same bits\n"
        yield from _table(("method", "way", "again", "two workers"), rows)
    if rows := found.get("memory"):
        yield "## Memory: the preflight and the peak\n"
        yield from _table(
            ("workload", "way", "preflight", "peak", "ratio"), [_with_ratio(row) for row in rows]
        )
    for name, work in found.get("workloads", {}).items():
        if rows := found.get(name):
            yield from _speed(name, work, rows, folder)
    if rows := found.get("profile"):
        yield "## Where the time goes\n"
        for row in rows:
            yield f"![{row['way']}]({row['picture']})\n"


def _correctness(rows: Rows, folder: Path) -> Iterator[str]:
    far = [row for row in rows if "distance" in row and not row["distance"] <= row["allowed"]]
    yield "## The same numbers as on the CPU\n"
    allowed = ", ".join(f"{value:g} in {dtype}" for dtype, value in TOLERANCE.items())
    yield "Largest distance from the loop on the CPU, of the model and of what clients keep, as a share of the model's"
    yield f"largest change; allowed: {allowed}, in float32 also ten times what its coarser rounding makes of the"
    yield "distance in float64."
    yield "Models that draw in their steps are compared with the loop on the device, and are not recorded."
    yield f"Beyond: {len(far)}.\n"
    measured = [row for row in rows if "distance" in row]
    if measured:
        _draw_distances(measured, folder / "correctness.png")
        yield "![distances](correctness.png)\n"
    ways = list(dict.fromkeys(row["way"] for row in measured))
    by = {(row["method"], row["dtype"], row["way"]): row for row in rows if "dtype" in row}
    lines = []
    for method, dtype in dict.fromkeys((method, dtype) for method, dtype, _ in by):
        own = {way: by.get((method, dtype, way), {}) for way in ways}
        lines.append(
            {"method": method, "dtype": dtype, **{way: _distance(row) for way, row in own.items()}}
        )
    yield from _table(("method", "dtype", *ways), lines)
    refused = [row for row in rows if "refused" in row]
    if refused:
        yield "Refused:\n"
        yield from (f"- {row['method']}, {row['way']}: {row['refused']}" for row in refused)
        yield ""


def _distance(row: Mapping[str, Any]) -> str:
    return "refused" if "refused" in row else f"{row['distance']:.1e}" if "distance" in row else ""


def _with_ratio(row: Mapping[str, Any]) -> dict[str, Any]:
    if "peak" not in row:
        return dict(row)
    gib = {key: f"{row[key] / 2**30:.2f} GiB" for key in ("preflight", "peak")}
    return {**row, **gib, "ratio": f"{row['preflight'] / row['peak']:.3f}"}


def _speed(name: str, work: Mapping[str, Any], rows: Rows, folder: Path) -> Iterator[str]:
    measured = {row["way"]: row for row in rows if "seconds_per_round" in row}
    plain = measured.get("plain loop")
    yield f"## {name}: {work['title']}\n"
    yield f"{work['cohort']} of {work['clients']} clients a round, batches of {work['batch']};"
    yield f"asked: {work['least']:g} times the plain loop.\n"
    lines = []
    for row in rows:
        line = dict(row)
        if row["way"] in measured:
            line["seconds a round"] = f"{row['seconds_per_round']:.4f}"
            line["client steps/s"] = f"{row['client_steps_per_second']:,.0f}"
            line["1,000 rounds"] = f"{1000 * row['seconds_per_round'] / 60:.1f} min"
            if plain is not None:
                line["to the plain loop"] = (
                    f"{plain['seconds_per_round'] / row['seconds_per_round']:.2f}"
                )
            line["device use"] = (
                "unknown" if row.get("device_use") is None else f"{row['device_use']:.0%}"
            )
        lines.append(line)
    columns = (
        "way",
        "seconds a round",
        "client steps/s",
        "to the plain loop",
        "1,000 rounds",
        "device use",
    )
    yield from _table(columns, lines)
    if measured:
        _draw_speed(name, list(measured.values()), folder / f"{name}.png")
        yield f"![{name}]({name}.png)\n"


def _table(columns: Sequence[str], rows: Rows) -> Iterator[str]:
    """Rows that were refused say why in their last cell."""
    every = [[str(row.get(column, "")) for column in columns] for row in rows]
    for row, cells in zip(rows, every, strict=True):
        if "refused" in row:
            cells[-1] = str(row["refused"]).replace("|", "/")
    yield to_markdown(columns, every)
    yield ""


def _draw_speed(name: str, rows: Rows, path: Path) -> None:
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(theme(INK)):
        figure = Figure(figsize=(7.5, 1.2 + 0.32 * len(rows)), layout="constrained")
        ax = figure.subplots()
        colours = [LIGHT[7] if row["way"] == "plain loop" else LIGHT[0] for row in rows]
        ax.barh(
            [row["way"] for row in rows],
            [row["client_steps_per_second"] for row in rows],
            color=colours,
        )
        ax.invert_yaxis()
        ax.set(xlabel="steps of clients a second", title=name)
        figure.savefig(path, format="png", dpi=150)


def _draw_distances(rows: Rows, path: Path) -> None:
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(theme(INK)):
        figure = Figure(figsize=(9, 4), layout="constrained")
        ax = figure.subplots()
        methods = list(dict.fromkeys(row["method"] for row in rows))
        for place, dtype in enumerate(TOLERANCE):
            own = [row for row in rows if row["dtype"] == dtype]
            x, y = (
                [methods.index(row["method"]) for row in own],
                [max(row["distance"], 1e-17) for row in own],
            )
            ax.scatter(x, y, s=14, color=LIGHT[place], label=dtype)
            ax.axhline(TOLERANCE[dtype], color=LIGHT[place], linewidth=0.8)
        set_log_scale(ax)
        ax.set(ylabel="share of the largest change")
        ax.set_xticks(range(len(methods)), methods, rotation=90, fontsize=7)
        figure.legend(loc="outside upper right", ncols=2)
        figure.savefig(path, format="png", dpi=150)
