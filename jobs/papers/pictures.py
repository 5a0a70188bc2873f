"""Draw the pictures of `docs/papers`: the gains of methods over FedAvg.

If each seed has its own partition, a picture also shows how the gain of one method depends on it.
"""

from __future__ import annotations

import hashlib
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jobs.papers.gains import PairedSetting, by_setting, gains, label_entropy
from jobs.papers.presets import PaperRuns, Score
from raysim.results.figures import figure_file
from raysim.results.significance import MIN_PAIRS
from raysim.results.stored_runs import Run
from raysim.results.theme import LIGHT

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TITLE = "Gains over FedAvg in points: mean over seeds, and 95 % interval (grey if it contains 0)"
SIGNIFICANT, UNDECIDED = LIGHT[0], "#9aa1a7"  # colours of intervals


def checksum(runs: Sequence[Run], paper: PaperRuns) -> str:
    """Return a checksum of all numbers in a paper's picture; "" if there are none."""
    text = "\n".join(gains(runs, paper))
    return hashlib.sha256(text.encode()).hexdigest() if by_setting(runs, paper) else ""


def draw(runs: Sequence[Run], paper: PaperRuns, path: Path) -> None:
    """Draw the gains of a paper's methods over FedAvg, with a row of panels for each setting.

    paper: describes how the paper's runs are compared.
    path: the picture file, whose metadata contains the checksum of all numbers.
    """
    settings = by_setting(runs, paper)
    heights = [max(2.6, 1.3 + 0.27 * len(setting.others)) for setting in settings]
    about = {"Description": checksum(runs, paper)}
    with figure_file(path, TITLE, (11, 0.5 + sum(heights)), about=about) as figure:
        rows = figure.subfigures(len(settings), squeeze=False, height_ratios=heights).flat
        for row, setting in zip(rows, settings, strict=True):
            row.suptitle(textwrap.fill(setting.setting.title, 130), fontsize=10)
            has_order = setting.has_different_splits
            has_order &= len(setting.seeds(setting.most_frequent[1])) > MIN_PAIRS
            panels = row.subplots(1, len(setting.scores) + has_order, squeeze=False)[0]
            for panel, (title, score) in zip(panels, setting.scores.items(), strict=False):
                _draw_intervals(panel, setting, score)
                panel.set_xlabel(f"{title}, points")
                panel.tick_params(labelleft=panel is panels[0])
            if has_order:
                _draw_by_entropy(panels[-1], setting)


def short_name(method: str) -> str:
    """Shorten "method=fedbr method.fedbr.mu=0" to "fedbr, mu=0"."""
    return ", ".join(re.sub(r"^method(\.\w+\.|=)", "", text) for text in method.split())


def _draw_intervals(ax: Axes, setting: PairedSetting, score: Score) -> None:
    """Draw each method's gain over FedAvg: the mean as a point, the 95 % interval as a bar.

    ax: the panel.
    setting: the runs of FedAvg and of the methods.
    score: the score in which the gain is measured.
    """
    names = list(setting.others)
    for y, name in enumerate(names):
        gain = setting.gain(setting.others[name], score)
        assert gain.mean is not None, "a setting has enough seeds"
        if gain.low is not None and gain.high is not None:
            colour = SIGNIFICANT if gain.low > 0 or gain.high < 0 else UNDECIDED
            ax.plot((gain.low, gain.high), (y, y), color=colour, linewidth=2.5)
        ax.plot(gain.mean, y, "o", color=LIGHT[0], markersize=5)
    ax.axvline(0, color="black", linewidth=0.8)
    ax.set(
        yticks=range(len(names)),
        yticklabels=[short_name(name) for name in names],
        ylim=(len(names) - 0.5, -0.5),
    )
    ax.grid(True, axis="x")


def _draw_by_entropy(ax: Axes, setting: PairedSetting) -> None:
    """Draw one method's gain over FedAvg against the label entropy of the partition.

    Each seed is a point, because each seed has its own partition. The method with the most seeds in
    common with FedAvg is drawn.
    """
    name, by_seed = setting.most_frequent
    entropies = [label_entropy(setting.fedavg[seed]) for seed in setting.seeds(by_seed)]
    for colour, (title, score) in zip(LIGHT, setting.scores.items(), strict=False):
        gained = [after - before for before, after in setting.pairs(by_seed, score)]
        ax.plot(entropies, gained, "o", color=colour, markersize=5, label=title)
    ax.axhline(0, color="black", linewidth=0.8)
    ax.set(xlabel="label entropy of a split, nats", ylabel="gain, points")
    title = f"{short_name(name)}, by split"
    ax.locator_params(nbins=5)
    ax.grid(True)
    if len(setting.scores) > 1:
        ax.legend(title=title, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2)
    else:
        ax.set_title(title, fontsize=10)
