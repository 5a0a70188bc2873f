"""Name the settings at which we ran the papers' methods.

A setting is a command of `raysim run` without a method and a seed.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from jobs.papers.comparison import shorten_numbers
from raysim.results.stored_runs import Run

# Overrides that say how a run is executed, or where files are.
EXECUTION = ("device=", "runtime.", "data.root=")


@dataclass(frozen=True)
class Setting:
    """A setting of runs, without method and seed.

    name: a short, unique name.
    title: a description.
    overrides: the overrides, such as "partition=iid", in alphabetical order.
    study: the command that runs the methods at this setting on all seeds; "" for none.
    """

    name: str
    title: str
    overrides: tuple[str, ...]
    study: str = ""

    @property
    def command(self) -> str:
        """Return the command of a run, without its method and seed."""
        preset = [text for text in self.overrides if text.startswith("experiment=")]
        others = [shlex.quote(text) for text in self.overrides if text not in preset]
        return " ".join(["raysim run", *preset, *others])


def _setting(name: str, title: str, overrides: str, study: str) -> Setting:
    """Return a `Setting`, with its overrides as a sorted tuple and its study as a command.

    overrides: the overrides of the setting, separated by spaces.
    study: the name of a study in `jobs/studies.sh`, or a shell command with at least one space.
    """
    command = study if " " in study else f"bash jobs/studies.sh {study}"
    return Setting(name, title, tuple(sorted(overrides.split())), command)


_ROTATED = (
    "experiment=fedbr/rotated_mnist rounds=40 data.rotation.test=spread data.pool=2 local.lr=0.01 "
    "local.steps=20"
)
_FASHION = "experiment=fedbss/fashion_mnist model=small_cnn data.pool=2 partition.fraction=0.2"
_NOISE = f"{_FASHION} partition=iid local.lr=0.1 rounds=60"
_GPU = "bash jobs/papers/gpu.sh"
_SMALL_FASHION = "small CNN, a fifth of the images at 14 x 14 pixels"
SETTINGS = (
    _setting(
        "rotated-small",
        "RotatedMNIST at 14 x 14 pixels, small CNN, 40 rounds of 20 steps",
        f"{_ROTATED} model=small_cnn",
        "small-rotated_mnist",
    ),
    _setting(
        "rotated-cnn",
        "RotatedMNIST at 14 x 14 pixels, the paper's CNN, 40 rounds of 20 steps",
        _ROTATED,
        "rotated_mnist",
    ),
    _setting(
        "rotated-steps",
        "RotatedMNIST at 14 x 14 pixels, small CNN, 100 rounds of 50 steps at rate 0.01",
        "experiment=fedbr/rotated_mnist model=small_cnn rounds=100 data.rotation.test=spread "
        "data.pool=2 local.lr=0.01",
        "fedbr-equal_steps",
    ),
    _setting(
        "rotated-cnn-steps",
        "RotatedMNIST at 14 x 14 pixels, the paper's CNN, 100 rounds of 50 steps at rate 0.01",
        "experiment=fedbr/rotated_mnist rounds=100 data.rotation.test=spread data.pool=2 "
        "local.lr=0.01",
        "fedbr-cnn_equal_steps",
    ),
    _setting(
        "rotated-fast",
        "RotatedMNIST, the paper's CNN, 100 rounds of 50 steps at rate 0.03",
        "experiment=fedbr/rotated_mnist rounds=100 data.rotation.test=spread local.lr=0.03",
        "fedbr-fast_steps",
    ),
    _setting(
        "rotated-paper",
        "the paper's setting",
        "experiment=fedbr/rotated_mnist",
        f"{_GPU} fedbr-rotated_mnist fedbr-rotated_mnist-parts",
    ),
    _setting(
        "cifar10-paper", "the paper's setting", "experiment=fedbr/cifar10", f"{_GPU} fedbr-cifar10"
    ),
    _setting(
        "cifar10-100",
        "CIFAR10 at 16 x 16 pixels, small CNN, 100 clients, 100 rounds",
        "experiment=fedbr/cifar10_100_clients model=small_cnn data.pool=2 rounds=100",
        "fedbr-100_clients",
    ),
    _setting(
        "skew-slow",
        f"{_SMALL_FASHION}, Dirichlet 0.1, rate 0.001, 200 rounds",
        _FASHION,
        "fedbss-small",
    ),
    _setting(
        "skew-fast",
        f"{_SMALL_FASHION}, Dirichlet 0.1, rate 0.1, 150 rounds",
        f"{_FASHION} local.lr=0.1 rounds=150",
        "fedbss-skew_0.1",
    ),
    *(
        _setting(
            f"skew-fast-{alpha}",
            f"{_SMALL_FASHION}, Dirichlet {alpha}, rate 0.1, 150 rounds",
            f"{_FASHION} local.lr=0.1 rounds=150 partition.alpha={alpha}",
            f"fedbss-skew_{alpha}",
        )
        for alpha in ("0.3", "0.5")
    ),
    _setting(
        "skew-paper-80",
        "the paper's CNN, all images, Dirichlet 0.1, 80 of 200 rounds",
        "experiment=fedbss/fashion_mnist rounds=80",
        "fedbss-paper",
    ),
    _setting(
        "skew-slow-100",
        f"{_SMALL_FASHION}, Dirichlet 0.1, rate 0.001, 100 rounds",
        f"{_FASHION} rounds=100",
        "fedbss-deviation-split",
    ),
    _setting(
        "even-slow-100",
        f"{_SMALL_FASHION}, Dirichlet 100, rate 0.001, 100 rounds",
        f"{_FASHION} rounds=100 partition.alpha=100",
        "fedbss-deviation-split",
    ),
    _setting(
        "skew-slow-all",
        f"{_SMALL_FASHION}, Dirichlet 0.1, rate 0.001, 30 rounds of all clients",
        f"{_FASHION} rounds=30 schedule.cohort=100",
        "fedbss-deviation-cohort",
    ),
    _setting(
        "skew-paper",
        "the paper's setting, Dirichlet 0.1",
        "experiment=fedbss/fashion_mnist",
        f"{_GPU} fedbss-skew_0.1",
    ),
    _setting(
        "noise-paper",
        "the paper's setting, 50 % wrong labels",
        "experiment=fedbss/fashion_mnist partition=iid data.label_noise=0.5",
        f"{_GPU} fedbss-noise_0.5",
    ),
    *(
        _setting(
            f"noise-{noise}",
            f"{_SMALL_FASHION}, {100 * float(noise):.0f} % wrong labels, rate 0.1, 60 rounds",
            f"{_NOISE} data.label_noise={noise}",
            f"fedbss-noise_{noise}",
        )
        for noise in ("0.5", "0.3", "0.1")
    ),
    _setting(
        "xrays",
        "chest X-rays (PneumoniaMNIST), small CNN, Dirichlet 0.5, 100 rounds",
        "experiment=fedld/retina model=small_cnn data=pneumonia_mnist rounds=100 "
        "partition.alpha=0.5 evaluate.decompose=5",
        "fedld-chest",
    ),
    _setting(
        "shift",
        "synthetic data with a shift of the inputs, five clients, 100 rounds",
        "experiment=fedld/retina model=small_cnn partition=domain data=synthetic rounds=100 "
        "data.domains=5 data.samples=2000 data.test_samples=2000 data.noise=3 data.shift=3 "
        "evaluate.decompose=5",
        "fedld-shift",
    ),
    _setting(
        "retina-paper",
        "the paper's setting, Split-3",
        "experiment=fedld/retina partition.alpha=0.5",
        "raysim study experiment=fedld/retina partition.alpha=0.5 "
        "method=fedavg,fedld_margin,fedld_principal,fedld data.root=DIR seed=0..4",
    ),
    _setting(
        "digits-small",
        "Digits at 16 x 16 pixels with scikit-learn's digits, 100 rounds",
        "experiment=fraug/digits rounds=100 data.size=16 data.domains=[mnist,mnist_m,usps,digits]",
        "fraug",
    ),
    _setting(
        "digits-tenth",
        "Digits at 16 x 16 pixels with scikit-learn's digits, a tenth of the images, 100 rounds",
        "experiment=fraug/digits rounds=100 data.size=16 data.domains=[mnist,mnist_m,usps,digits] "
        "partition.fraction=0.1",
        "digits_tenth",
    ),
    _setting(
        "digits-tenth-text",
        "Digits as at digits-tenth, FRAug as in the text of its paper",
        "experiment=fraug/digits_text rounds=100 data.size=16 "
        "data.domains=[mnist,mnist_m,usps,digits] partition.fraction=0.1",
        "digits_tenth-text",
    ),
    _setting(
        "digits-300",
        "the paper's setting with scikit-learn's digits in place of SVHN",
        "experiment=fraug/digits data.domains=[mnist,mnist_m,usps,digits]",
        f"{_GPU} fraug-digits",
    ),
    _setting(
        "digits-paper",
        "the paper's setting",
        "experiment=fraug/digits",
        "raysim study experiment=fraug/digits method=fedavg,fedbn,fraug data.root=DIR seed=0..2",
    ),
)


def overrides_of(run: Run) -> tuple[list[str], list[str]]:
    """Return the overrides in a stored run's command as two lists: of methods, and of the setting.

    The first list has the overrides that begin with "method". The second excludes the seed and
    `EXECUTION`.
    """
    overrides = shorten_numbers(str(run.summary.get("command"))).split()[2:]
    methods = [text for text in overrides if text.startswith("method")]
    excluded = ("method", "seed=", *EXECUTION)
    return methods, [text for text in overrides if not text.startswith(excluded)]


def setting_of(overrides: Sequence[str]) -> Setting:
    """Return the setting that has these overrides.

    If it has no name in `SETTINGS`, a checksum of the overrides names it.
    """
    key = tuple(sorted(overrides))
    for setting in SETTINGS:
        if setting.overrides == key:
            return setting
    text = " ".join(overrides)
    digest = hashlib.sha256(text.encode()).hexdigest()[:6]
    return Setting(f"setting-{digest}", text, key)


def find_setting(name: str) -> Setting:
    """Return the setting of a name; raise KeyError for an unknown name."""
    return {setting.name: setting for setting in SETTINGS}[name]
