"""Show how the wall time of a run was spent: as a table, a picture, numbers, and a trace."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from raysim.primitives.files import replace_file
from raysim.primitives.output import terminal_width
from raysim.primitives.spans import KINDS, Track
from raysim.results.history import write_json
from raysim.results.tables import format_table, text_columns
from raysim.results.theme import INK, LIGHT, theme
from raysim.simulation.events import Profiled

PROFILE, TRACE, PICTURE = "profile.json", "trace.json", "profile.png"
_MAX_COLUMNS = 5  # a table with more processes shows the mean of the workers
# grey, because the process does not work
_IDLE_COLOURS = {"messages": "#c9cdd2", "waiting": "#e9ebee"}


def shares(profile: Profiled) -> dict[str, dict[str, float]]:
    """Return how much of the wall time each kind of work took in each process.

    The result maps the name of a process, such as "coordinator", to the share of each kind of work,
    0 to 1.
    """
    wall_s = max(profile.stop - profile.start, 1e-9)
    shares_by_process = {}
    for track in profile.tracks:
        shares_by_process[track.name] = {
            kind: track.seconds.get(kind, 0.0) / wall_s for kind in KINDS
        }
    return shares_by_process


def table(profile: Profiled) -> str:
    """Return the shares of wall time as text, a column for each process.

    If there are many workers, one column has the mean over workers.
    """
    by_process = shares(profile)
    if len(by_process) > _MAX_COLUMNS:
        coordinator, *workers = by_process.values()
        mean = {}
        for kind in KINDS:
            mean[kind] = sum(worker[kind] for worker in workers) / len(workers)
        by_process = {"coordinator": coordinator, f"mean of {len(workers)} workers": mean}
    rows = []
    for kind in KINDS:
        rows.append((kind, *(f"{process[kind]:.1%}" for process in by_process.values())))
    wall_s = profile.stop - profile.start
    title = f"share of the wall time ({wall_s:.2f} s) that each process spent in each kind of work"
    return f"{title}\n{format_table(text_columns(('', *by_process), rows), terminal_width())}"


def trace(profile: Profiled) -> dict[str, object]:
    """Return the measured time spans in Chrome's trace format, which Perfetto shows.

    Each process is a thread of the trace. Times are in microseconds.
    """
    events: list[Mapping[str, object]] = []
    for place, track in enumerate(profile.tracks):
        thread = {"pid": 1, "tid": place}
        arguments = {"name": _thread_name(track)}
        events.append({"name": "thread_name", "ph": "M", **thread, "args": arguments})
        for span in track.spans:
            event = {
                "name": span.name,
                "cat": span.kind,
                "ph": "X",
                "ts": round((span.start - profile.start) * 1e6, 1),
                "dur": round((span.stop - span.start) * 1e6, 1),
                **thread,
            }
            events.append(event)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _thread_name(track: Track) -> str:
    omitted = track.count - len(track.spans)
    return f"{track.name}, {omitted} later spans are not shown" if omitted > 0 else track.name


def draw(profile: Profiled, path: Path, title: str = "") -> None:
    """Write a picture with a bar for each process, divided into kinds of work."""
    import matplotlib
    from matplotlib.figure import Figure

    by_process = shares(profile)
    with matplotlib.rc_context(theme(INK)):
        figure = Figure(figsize=(8.0, 2.0 + 0.36 * len(by_process)), layout="constrained")
        ax = figure.subplots()
        left = [0.0] * len(by_process)
        for index, kind in enumerate(KINDS):
            widths = [process[kind] for process in by_process.values()]
            colour = _IDLE_COLOURS.get(kind, LIGHT[index % len(LIGHT)])
            ax.barh(list(by_process), widths, left=left, color=colour, height=0.7, label=kind)
            left = [start + width for start, width in zip(left, widths, strict=True)]
        ax.invert_yaxis()
        wall_s = profile.stop - profile.start
        ax.set(xlim=(0, 1), xlabel=f"share of {wall_s:.1f} s of wall time", title=title)
        figure.legend(loc="outside lower center", ncols=5)
        figure.savefig(path, format="png", dpi=150)


def write(profile: Profiled, folder: Path, title: str = "", prefix: str = "") -> list[Path]:
    """Write numbers, trace and picture into a folder; return the paths, the picture last.

    prefix: the start of the files' names.
    """
    paths = [folder / f"{prefix}{name}" for name in (PROFILE, TRACE, PICTURE)]
    seconds = {}
    for track in profile.tracks:
        seconds[track.name] = {kind: track.seconds.get(kind, 0.0) for kind in KINDS}
    numbers = {
        "wall_seconds": profile.stop - profile.start,
        "seconds": seconds,
        "shares": shares(profile),
    }
    write_json(numbers, paths[0])
    replace_file(paths[1], json.dumps(trace(profile)).encode())
    draw(profile, paths[2], title)
    return paths
