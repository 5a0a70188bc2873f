"""Where a run's wall time went: a table, a picture, numbers, and a trace that Perfetto and Chrome open."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from raysim.primitives.files import replace_file
from raysim.primitives.spans import KINDS, Track
from raysim.results.history import write_json
from raysim.results.tables import format_table, terminal_width, text_columns
from raysim.results.theme import INK, LIGHT, theme
from raysim.simulation.events import Profiled

PROFILE, TRACE, PICTURE = "profile.json", "trace.json", "profile.png"
_COLUMNS = 5  # processes that a table has room for
_IDLE = {"messages": "#c9cdd2", "waiting": "#e9ebee"}  # no work, so no colour


def shares(profile: Profiled) -> dict[str, dict[str, float]]:
    """By process: the share of wall time of each kind."""
    wall = max(profile.stop - profile.start, 1e-9)
    return {
        track.name: {kind: track.seconds.get(kind, 0.0) / wall for kind in KINDS}
        for track in profile.tracks
    }


def table(profile: Profiled) -> str:
    """Return the shares as text, a column for each process; of many workers one for their mean."""
    found = shares(profile)
    if len(found) > _COLUMNS:
        first, *workers = found.values()
        mean = {kind: sum(own[kind] for own in workers) / len(workers) for kind in KINDS}
        found = {"coordinator": first, f"mean of {len(workers)} workers": mean}
    rows = [(kind, *(f"{own[kind]:.1%}" for own in found.values())) for kind in KINDS]
    title = f"share of {profile.stop - profile.start:.2f} s of wall time"
    return f"{title}\n{format_table(text_columns(('', *found), rows), terminal_width())}"


def trace(profile: Profiled) -> dict[str, object]:
    """The spans as events of Chrome's trace format, a thread for each process of the run; times in microseconds."""
    events: list[Mapping[str, object]] = []
    for place, track in enumerate(profile.tracks):
        named = {
            "name": "thread_name",
            "ph": "M",
            "pid": 1,
            "tid": place,
            "args": {"name": _title(track)},
        }
        events.append(named)
        events += [
            {
                "name": span.name,
                "cat": span.kind,
                "ph": "X",
                "ts": round((span.start - profile.start) * 1e6, 1),
                "dur": round((span.stop - span.start) * 1e6, 1),
                "pid": 1,
                "tid": place,
            }
            for span in track.spans
        ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _title(track: Track) -> str:
    more = track.count - len(track.spans)
    return f"{track.name}, {more} later spans are not shown" if more > 0 else track.name


def draw(profile: Profiled, path: Path, title: str = "") -> None:
    """A bar for each process, of which every kind has its share."""
    import matplotlib
    from matplotlib.figure import Figure

    found = shares(profile)
    with matplotlib.rc_context(theme(INK)):
        figure = Figure(figsize=(8.0, 2.0 + 0.36 * len(found)), layout="constrained")
        ax = figure.subplots()
        left = dict.fromkeys(found, 0.0)
        for index, kind in enumerate(KINDS):
            widths = [own[kind] for own in found.values()]
            colour = _IDLE.get(kind, LIGHT[index % len(LIGHT)])
            ax.barh(
                list(found), widths, left=list(left.values()), color=colour, height=0.7, label=kind
            )
            left = {name: left[name] + own[kind] for name, own in found.items()}
        ax.invert_yaxis()
        ax.set(
            xlim=(0, 1),
            xlabel=f"share of {profile.stop - profile.start:.1f} s of wall time",
            title=title,
        )
        figure.legend(loc="outside lower center", ncols=5)
        figure.savefig(path, format="png", dpi=150)


def write(profile: Profiled, folder: Path, title: str = "", prefix: str = "") -> list[Path]:
    """Write numbers, trace and picture; the picture's path last."""
    paths = [folder / f"{prefix}{name}" for name in (PROFILE, TRACE, PICTURE)]
    seconds = {
        track.name: {kind: track.seconds.get(kind, 0.0) for kind in KINDS}
        for track in profile.tracks
    }
    write_json(
        {
            "wall_seconds": profile.stop - profile.start,
            "seconds": seconds,
            "shares": shares(profile),
        },
        paths[0],
    )
    replace_file(paths[1], json.dumps(trace(profile)).encode())
    draw(profile, paths[2], title)
    return paths
