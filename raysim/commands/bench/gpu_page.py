"""Write the page of `raysim bench gpu`: tables and pictures of the results, as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from raysim.primitives.files import replace_file
from raysim.results.tables import to_markdown
from raysim.results.theme import INK, LIGHT, set_log_scale, theme

PAGE = "page.md"
PLAIN_LOOP = "plain loop"
# Distances are shares of a method's largest change; float32 drifts over about 50 steps.
TOLERANCE = {"float64": 1e-6, "float32": 1e-2}
# The titles of columns whose names in the results file do not say enough.
TITLES = {
    "way": "mode",
    "again": "same bits in a second run",
    "two workers": "same bits with two workers",
    "preflight": "predicted",
    "peak": "measured",
    "ratio": "predicted / measured",
}
SMALLEST_DISTANCE = 1e-17  # drawn in place of 0, which has no logarithm

Rows: TypeAlias = Sequence[Mapping[str, Any]]


def write_page(results: Mapping[str, Any], folder: Path) -> None:
    """Write page.md and its pictures for those parts that were measured."""
    text = "\n".join(_page(results, folder)) + "\n"
    replace_file(folder / PAGE, text.encode())


def _page(results: Mapping[str, Any], folder: Path) -> Iterator[str]:
    about = results["about"]
    yield "# Results of `raysim bench gpu`"
    yield f"\n{about['device']}, torch {about['torch']}, CUDA {about['cuda']}.\n"
    if results.get("correctness"):
        yield from _correctness(results["correctness"], folder)
    if results.get("bits"):
        yield "## The same bits\n"
        yield "True if a second run, or a run on two workers, is bit-identical to the first run.\n"
        yield from _table(("method", "way", "again", "two workers"), results["bits"])
    if results.get("memory"):
        yield "## Largest memory of a worker: predicted and measured\n"
        columns = ("workload", "way", "preflight", "peak", "ratio")
        yield from _table(columns, [_memory_row(row) for row in results["memory"]])
    for name, workload in results.get("workloads", {}).items():
        if results.get(name):
            yield from _speed(name, workload, results[name], folder)
    if results.get("profile"):
        yield "## Where the time goes\n"
        for row in results["profile"]:
            yield f"![{row['way']}]({row['picture']})\n"


def _correctness(rows: Rows, folder: Path) -> Iterator[str]:
    measured = [row for row in rows if "distance" in row]
    beyond = [row for row in measured if not row["distance"] <= row["allowed"]]
    allowed = ", ".join(f"{value:g} in {dtype}" for dtype, value in TOLERANCE.items())
    yield "## The same numbers as on the CPU\n"
    yield "Every run is compared with a run of the same method in the loop on the CPU. A number is"
    yield "the largest distance of a value of the model or of the clients' states, as a share of"
    yield f"the largest change of the model. Allowed are {allowed}. In float32, a larger"
    yield "distance is allowed if it is at most ten times the distance in float64, times the ratio"
    yield "of the rounding errors of both types. Models that draw random numbers in their steps are"
    yield "compared with the loop on the GPU, and are not recorded.\n"
    yield "`loop` trains one client after another, `graph` also records steps as CUDA graphs, and"
    yield "`graph of lanes K` trains K clients at once."
    yield f"Numbers beyond the allowed distance: {len(beyond)} of {len(measured)}.\n"
    if measured:
        _draw_distances(measured, folder / "correctness.png")
        yield "![distances](correctness.png)\n"
    modes = list(dict.fromkeys(row["way"] for row in measured))
    lines: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        if "dtype" in row:
            key = (row["method"], row["dtype"])
            line = lines.setdefault(key, {"method": row["method"], "dtype": row["dtype"]})
            line[row["way"]] = _format_distance(row)
    yield from _table(("method", "dtype", *modes), list(lines.values()))
    refused = [row for row in rows if "refused" in row]
    if refused:
        yield "These runs ended with an error:\n"
        for row in refused:
            yield f"- {row['method']}, {row['way']}: {row['refused']}"
        yield ""


def _format_distance(row: Mapping[str, Any]) -> str:
    if "refused" in row:
        return "refused"
    return f"{row['distance']:.1e}" if "distance" in row else ""


def _memory_row(row: Mapping[str, Any]) -> dict[str, Any]:
    if "peak" not in row:
        return dict(row)
    sizes = {key: f"{row[key] / 2**30:.2f} GiB" for key in ("preflight", "peak")}
    return {**row, **sizes, "ratio": f"{row['preflight'] / row['peak']:.3f}"}


def _speed(name: str, workload: Mapping[str, Any], rows: Rows, folder: Path) -> Iterator[str]:
    measured = [row for row in rows if "seconds_per_round" in row]
    plain = next((row for row in measured if row["way"] == PLAIN_LOOP), None)
    yield f"## {name}: {workload['title']}\n"
    clients = f"{workload['cohort']} of {workload['clients']} clients"
    yield f"{clients} per round, batches of {workload['batch']}. The goal is to be"
    yield f"{workload['least']:g} times as fast as the plain loop.\n"
    columns = (
        "way",
        "seconds per round",
        "client steps/s",
        "times as fast as the plain loop",
        "1,000 rounds",
        "device use",
    )
    yield from _table(columns, [_speed_row(row, plain) for row in rows])
    if measured:
        _draw_speed(name, measured, folder / f"{name}.png")
        yield f"![{name}]({name}.png)\n"


def _speed_row(row: Mapping[str, Any], plain: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a measurement as a row of the table of speeds.

    plain: the measurement of the loop in plain PyTorch; None if it is missing.
    """
    line = dict(row)
    if "seconds_per_round" not in row:
        return line
    seconds, share = row["seconds_per_round"], row.get("device_use")
    line["seconds per round"] = f"{seconds:.4f}"
    line["client steps/s"] = f"{row['client_steps_per_second']:,.0f}"
    line["1,000 rounds"] = f"{1000 * seconds / 60:.1f} min"
    line["device use"] = "unknown" if share is None else f"{share:.0%}"
    if plain is not None:
        speed = plain["seconds_per_round"] / seconds
        line["times as fast as the plain loop"] = f"{speed:.2f}"
    return line


def _table(columns: Sequence[str], rows: Rows) -> Iterator[str]:
    """Yield a Markdown table, then an empty line.

    columns: the names of the columns, which are keys of the rows.
    rows: a dictionary for each measurement. The value of the key "refused" replaces the last cell;
    it is the reason why there is no measurement.
    """
    lines = []
    for row in rows:
        cells = [str(row.get(column, "")) for column in columns]
        if "refused" in row:
            cells[-1] = str(row["refused"]).replace("|", "/")
        lines.append(cells)
    yield to_markdown([TITLES.get(column, column) for column in columns], lines)
    yield ""


def _draw_speed(name: str, rows: Rows, path: Path) -> None:
    import matplotlib
    from matplotlib.figure import Figure

    names = [row["way"] for row in rows]
    rates = [row["client_steps_per_second"] for row in rows]
    colours = [LIGHT[7] if way == PLAIN_LOOP else LIGHT[0] for way in names]
    with matplotlib.rc_context(theme(INK)):
        figure = Figure(figsize=(7.5, 1.2 + 0.32 * len(rows)), layout="constrained")
        ax = figure.subplots()
        ax.barh(names, rates, color=colours)
        ax.invert_yaxis()
        ax.set(xlabel="client steps per second", title=name)
        figure.savefig(path, format="png", dpi=150)


def _draw_distances(rows: Rows, path: Path) -> None:
    import matplotlib
    from matplotlib.figure import Figure

    methods = list(dict.fromkeys(row["method"] for row in rows))
    with matplotlib.rc_context(theme(INK)):
        figure = Figure(figsize=(9, 4), layout="constrained")
        ax = figure.subplots()
        for colour, (dtype, tolerance) in zip(LIGHT, TOLERANCE.items(), strict=False):
            of_dtype = [row for row in rows if row["dtype"] == dtype]
            positions = [methods.index(row["method"]) for row in of_dtype]
            distances = [max(row["distance"], SMALLEST_DISTANCE) for row in of_dtype]
            ax.scatter(positions, distances, s=14, color=colour, label=dtype)
            ax.axhline(tolerance, color=colour, linewidth=0.8)
        set_log_scale(ax)
        ax.set(ylabel="largest distance / largest change")
        ax.set_xticks(range(len(methods)), methods, rotation=90, fontsize=7)
        figure.legend(loc="outside upper right", ncols=2)
        figure.savefig(path, format="png", dpi=150)
