"""The pictures of `docs/papers`: what methods gain over FedAvg, and how that goes with how uneven a split is."""

from __future__ import annotations

import hashlib
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jobs.papers.gains import Setting, by_setting, entropy, gains
from jobs.papers.presets import PaperRuns, Score
from raysim.results.figures import figure_file
from raysim.results.report import Run
from raysim.results.significance import MIN_PAIRS
from raysim.results.theme import LIGHT

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ABOUT = "Gains over FedAvg in points: mean over seeds, and 95 % interval (grey where it reaches beyond 0)"
OUR, NONE = LIGHT[0], "#9aa1a7"


def numbers(runs: Sequence[Run], paper: PaperRuns) -> str:
    """Return a checksum of all that is drawn; "" if nothing is."""
    text = "\n".join(gains(runs, paper))
    return hashlib.sha256(text.encode()).hexdigest() if by_setting(runs, paper) else ""


def draw(runs: Sequence[Run], paper: PaperRuns, path: Path) -> None:
    """Draw a row of panels for each setting; the file holds the checksum of its numbers."""
    settings = by_setting(runs, paper)
    heights = [max(2.6, 1.3 + 0.27 * len(setting.others)) for setting in settings]
    about = {"Description": numbers(runs, paper)}
    with figure_file(path, ABOUT, (11, 0.5 + sum(heights)), about=about) as figure:
        parts = figure.subfigures(len(settings), squeeze=False, height_ratios=heights).flat
        for part, setting in zip(parts, settings, strict=True):
            part.suptitle(textwrap.fill(setting.words, 130), fontsize=10)
            ordered = setting.uneven and len(setting.seeds(setting.commonest[1])) > MIN_PAIRS
            panels = part.subplots(1, len(setting.scores) + ordered, squeeze=False)[0]
            for panel, (title, score) in zip(panels, setting.scores.items(), strict=False):
                _intervals(panel, setting, score)
                panel.set_xlabel(f"{title}, points")
                panel.tick_params(labelleft=panel is panels[0])
            if ordered:
                _by_entropy(panels[-1], setting)


def short(method: str) -> str:
    """ "method=fedbr method.fedbr.mu=0" as "fedbr, mu=0"."""
    return ", ".join(re.sub(r"^method(\.\w+\.|=)", "", word) for word in method.split())


def _intervals(ax: Axes, setting: Setting, score: Score) -> None:
    """Draw the mean gain of each method and its interval, a line per method."""
    names = list(setting.others)
    for place, name in enumerate(names):
        found = setting.gain(setting.others[name], score)
        assert found.mean is not None, "a setting has enough seeds"
        if found.low is not None and found.high is not None:
            sure = found.low > 0 or found.high < 0
            ax.plot(
                (found.low, found.high), (place, place), color=OUR if sure else NONE, linewidth=2.5
            )
        ax.plot(found.mean, place, "o", color=OUR, markersize=5)
    ax.axvline(0, color="black", linewidth=0.8)
    ax.set(
        yticks=range(len(names)),
        yticklabels=[short(name) for name in names],
        ylim=(len(names) - 0.5, -0.5),
    )
    ax.grid(True, axis="x")


def _by_entropy(ax: Axes, setting: Setting) -> None:
    """The gain on each split of the method that has the most."""
    name, own = setting.commonest
    entropies = [entropy(setting.fedavg[seed]) for seed in setting.seeds(own)]
    for colour, (title, score) in zip(LIGHT, setting.scores.items(), strict=False):
        gained = [after - before for before, after in setting.pairs(own, score)]
        ax.plot(entropies, gained, "o", color=colour, markersize=5, label=title)
    ax.axhline(0, color="black", linewidth=0.8)
    ax.set(xlabel="label entropy of a split, nats", ylabel=f"gain of {short(name)}, points")
    ax.locator_params(nbins=5)
    ax.grid(True)
    if len(setting.scores) > 1:
        ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2)
