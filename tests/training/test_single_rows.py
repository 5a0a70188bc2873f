"""Test batches of one row, and networks that cannot train on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from raysim.api.local_job import LocalJob
from raysim.api.method import Method
from raysim.api.setup import Setup
from raysim.data.listed import store_lists
from raysim.experiment.build import build
from raysim.experiment.execute import run
from raysim.experiment.settings import Experiment
from raysim.methods.fedbr import FedBR
from raysim.methods.fedbss import FedBSS
from raysim.models.single_rows import refusing_layer
from raysim.primitives.errors import RefusedError

HERE = ["runtime=inprocess", "tracking=none", "device=cpu", "rounds=3", "checkpoint.every=0"]
SIZES = [
    9,
    1,
    8,
    2,
    1,
    7,
    5,
]  # training rows of each client; 9 and 5 leave one row behind batches of 4
SINGLE = [1, 4]  # clients of one row


class Centred(nn.Module):
    """A user's layer that divides by the deviation over the batch, which is nan for one row."""

    def forward(self, inputs: Tensor) -> Tensor:
        centred: Tensor = inputs / (inputs.std(dim=0) + 0.1)
        return centred


class Pair(nn.Module):
    """A user's layer that raises its own error for a batch of one row."""

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training and len(inputs) < 2:
            raise RuntimeError("two rows at least")
        return inputs


class Squeezed(nn.Module):
    """A layer that takes 4 features as one pixel of 4 channels, and applies BatchNorm2d.

    BatchNorm2d then has as many values per channel as the batch has rows.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(4)

    def forward(self, inputs: Tensor) -> Tensor:
        normal: Tensor = self.norm(inputs.view(-1, 4, 1, 1))
        return normal.flatten(1)


def network(layer: nn.Module, dropout: float = 0.2) -> nn.Module:
    noise = [nn.Dropout(dropout)] if dropout else []
    return nn.Sequential(nn.Linear(4, 4), layer, nn.ReLU(), *noise, nn.Linear(4, 3))


REFUSING = {
    "BatchNorm1d": lambda: nn.BatchNorm1d(4),
    "BatchNorm1d without statistics": lambda: nn.BatchNorm1d(4, track_running_stats=False),
    "BatchNorm2d of one pixel": Squeezed,
    "GroupNorm of one value": lambda: nn.GroupNorm(4, 4),
    "deviation": Centred,
    "own error": Pair,
}
FINE = {
    "LayerNorm": lambda: nn.LayerNorm(4),
    "GroupNorm": lambda: nn.GroupNorm(2, 4),
    "none": nn.Identity,
}


def data(sizes: Sequence[int] = SIZES) -> tuple[Any, list[list[int]]]:
    """Return random training and test samples, and for each client the positions of its samples.

    sizes: for each client, its number of training samples.
    """
    generator = np.random.default_rng(0)
    total = sum(sizes)
    train = (generator.standard_normal((total, 4)).astype(np.float32), np.arange(total) % 3)
    test = (generator.standard_normal((12, 4)).astype(np.float32), np.arange(12) % 3)
    bounds = np.cumsum([0, *sizes]).tolist()
    rows = [list(range(start, stop)) for start, stop in pairwise(bounds)]
    return (train, test), rows


def build_experiment(
    layer: Any,
    *words: str,
    sizes: Sequence[int] = SIZES,
    methods: Sequence[Method] | None = None,
    dropout: float = 0.2,
    **partition: float,
) -> Experiment:
    """Build an experiment with a network that contains a layer.

    layer: the class of the layer.
    words: overrides.
    sizes: for each client, its number of training samples.
    dropout: the dropout rate of the network.
    partition: settings of the partition.
    """
    samples, rows = data(sizes)
    model = network(layer(), dropout)
    schedule = [] if any(word.startswith("schedule") for word in words) else ["schedule.cohort=3"]
    partition = {"test_fraction": 0.0} | partition
    return build(
        [*HERE, "local.batch=4", *schedule, *words],
        data=samples,
        partition=replace(store_lists(rows), **partition),
        model=model,
        methods=methods,
    )


# --- the network ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REFUSING)
def test_layer_that_cannot_train_on_one_sample_is_found(name: str) -> None:
    model = network(REFUSING[name]())
    assert refusing_layer(model, lambda rows: torch.randn(rows, 4)).startswith("layer '1")


@pytest.mark.parametrize("name", FINE)
def test_layer_is_accepted_if_it_can_train_on_a_batch_of_one_sample(name: str) -> None:
    assert refusing_layer(network(FINE[name]()), lambda rows: torch.randn(rows, 4)) == ""


def test_convolutions_with_batchnorm_train_on_one_sample() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(72, 2))
    assert refusing_layer(model, lambda rows: torch.randn(rows, 1, 8, 8)) == ""


def test_no_layer_is_named_if_the_network_fails_on_batches_of_every_size() -> None:
    assert refusing_layer(network(nn.Linear(7, 7)), lambda rows: torch.randn(rows, 4)) == ""


def test_search_for_layers_that_need_two_samples_does_not_change_the_network() -> None:
    model = network(nn.BatchNorm1d(4)).eval()
    model[1].train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(5)
    refusing_layer(model, lambda rows: torch.zeros(rows, 4))
    drawn = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(3))
    assert [module.training for module in model] == [False, True, False, False, False]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


# --- clients of one row ---------------------------------------------------------------------------

SCHEDULES = {
    "rounds": [],
    "partial participation": ["schedule.cohort=1"],
    "oversample": ["schedule=oversample", "schedule.cohort=3"],
    "deadline": ["schedule=deadline", "schedule.cohort=3"],
    "buffered": ["schedule=buffered", "schedule.concurrency=4", "schedule.size=2"],
    "immediate": ["schedule=immediate", "schedule.concurrency=3"],
    "tiered": ["schedule=tiered", "schedule.tiers=2", "schedule.cohort=2"],
}


def run_without_failures(experiment: Experiment, folder: Path) -> None:
    """Run an experiment to its end, and assert that no client failed and all losses are finite."""
    execution = replace(experiment.execution, out=str(folder / "run"))
    result = run(replace(experiment, execution=execution), quiet=True)
    assert result.summary["failures_total"] == 0
    assert np.isfinite(result.history["train_loss"]).all()


@pytest.mark.parametrize("name", REFUSING)
def test_plan_warns_that_clients_of_one_sample_are_left_out(name: str) -> None:
    experiment = build_experiment(REFUSING[name])
    (text,) = [text for text in experiment.warnings if "one training sample" in text]
    assert text.startswith("partition: 2 of 7 clients")
    assert experiment.spec.data.partition.train.counts[SINGLE].tolist() == [0, 0]


@pytest.mark.parametrize("name", FINE)
def test_client_with_one_sample_is_included_if_the_network_can_train_on_it(name: str) -> None:
    experiment = build_experiment(FINE[name])
    assert not [text for text in experiment.warnings if "one training sample" in text]
    assert experiment.spec.data.partition.train.counts.tolist() == SIZES


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule_never_draws_a_client_of_one_sample(name: str, lanes: int, tmp_path: Path) -> None:
    # Several clients with BatchNorm are trained at once from recorded steps, which dropout
    # excludes.
    recorded, dropout = (["runtime.graph=true"], 0.0) if lanes > 1 else ([], 0.2)
    words = ["rounds=8", "faults.tolerate=0", f"runtime.lanes={lanes}", *recorded, *SCHEDULES[name]]
    run_without_failures(
        build_experiment(REFUSING["BatchNorm1d"], *words, dropout=dropout), tmp_path
    )


@pytest.mark.parametrize(
    ("name", "sampling", "budget"),
    [
        *((name, "shuffle", "local.epochs=2") for name in REFUSING),
        ("BatchNorm1d", "shuffle", "local.steps=5"),
        ("BatchNorm1d", "replacement", "local.epochs=2"),
        ("BatchNorm1d", "replacement", "local.steps=5"),
    ],
)
def test_run_never_trains_on_a_batch_of_one_sample(
    name: str, sampling: str, budget: str, tmp_path: Path
) -> None:
    words = ["rounds=4", "faults.tolerate=0", f"local.sampling={sampling}", budget]
    run_without_failures(build_experiment(REFUSING[name], *words), tmp_path)


@pytest.mark.parametrize("name", REFUSING)
def test_batches_of_one_sample_are_refused_before_the_start(name: str) -> None:
    with pytest.raises(RefusedError, match=r"^local\.batch: .*layer '.*1"):
        build_experiment(REFUSING[name], "local.batch=1")


@pytest.mark.parametrize("name", FINE)
def test_batches_of_one_sample_are_used_if_the_network_can_train_on_them(
    name: str, tmp_path: Path
) -> None:
    run_without_failures(
        build_experiment(FINE[name], "local.batch=1", "faults.tolerate=0"), tmp_path
    )


def test_run_whose_clients_all_have_one_sample_is_refused() -> None:
    with pytest.raises(RefusedError, match=r"^partition: "):
        build_experiment(REFUSING["BatchNorm1d"], sizes=[1, 1, 1, 1])


def test_cohort_larger_than_the_number_of_clients_that_can_train_is_refused() -> None:
    assert build_experiment(REFUSING["BatchNorm1d"], "schedule.cohort=5").schedule.size == 5
    with pytest.raises(RefusedError, match=r"^schedule\.cohort=6 "):
        build_experiment(REFUSING["BatchNorm1d"], "schedule.cohort=6")


@pytest.mark.parametrize("head", [False, True])
def test_client_of_one_sample_is_not_finetuned(head: bool, tmp_path: Path) -> None:
    words = ["faults.tolerate=0", "evaluate.finetune.epochs=1", "evaluate.finetune.samples=all"]
    words += [f"evaluate.finetune.head={str(head).lower()}"]
    halves = {"sizes": [12, 3, 12, 12, 3, 12], "test_fraction": 0.34, "fraction": 0.5}
    experiment = build_experiment(REFUSING["BatchNorm1d"], *words, **halves)  # type: ignore[arg-type]
    partition = experiment.spec.data.partition
    assert partition.spare is not None
    assert [part.counts[1] for part in (partition.train, partition.spare, partition.test)] == [
        0,
        1,
        1,
    ]
    run_without_failures(experiment, tmp_path)


def test_centralized_training_includes_samples_of_clients_with_one_sample(tmp_path: Path) -> None:
    experiment = build_experiment(REFUSING["BatchNorm1d"], "method=centralized")
    assert experiment.spec.data.partition.train.counts.tolist() == [sum(SIZES)]
    run_without_failures(experiment, tmp_path)


# --- methods that choose the samples of an epoch --------------------------------------------------


class First(Method):
    """A method that trains on one sample in the first epoch and on all samples later.

    every: True: train on one sample in every epoch.
    """

    name = "first"

    def __init__(self, every: bool) -> None:
        self.every = every

    def setup(self, run: Setup) -> None:
        run.select(self.choose)

    def choose(self, job: LocalJob, epoch: int, epochs: int) -> np.ndarray:
        return np.arange(1 if self.every or epoch == 1 else job.samples)


# Which layers need two samples is shown above; what a method chooses does not depend on the layer.
@pytest.mark.parametrize("budget", ["local.epochs=3", "local.steps=6"])
@pytest.mark.parametrize("make", [lambda: FedBSS(0), lambda: First(False)], ids=["fedbss", "first"])
def test_epoch_is_left_out_if_a_method_chooses_a_single_sample_for_it(
    budget: str, make: Any, tmp_path: Path
) -> None:
    words = ["rounds=4", "faults.tolerate=0", budget]
    experiment = build_experiment(REFUSING["BatchNorm1d"], *words, methods=[make()])
    run_without_failures(experiment, tmp_path)


def test_method_that_chooses_one_sample_per_epoch_is_refused_with_batchnorm(tmp_path: Path) -> None:
    experiment = build_experiment(REFUSING["BatchNorm1d"], methods=[First(True)])
    with pytest.raises(Exception, match=r"method 'first'"):
        run_without_failures(experiment, tmp_path)


def test_fedbr_refuses_pseudo_batches_of_one_sample() -> None:
    def of(layer: Any, rows: int) -> Experiment:
        return build_experiment(layer, methods=[FedBR(pseudo_batch=rows)])

    with pytest.raises(RefusedError, match=r"^method\.fedbr\.pseudo_batch: .*layer '.*1"):
        of(REFUSING["BatchNorm1d"], 1)
    assert of(REFUSING["BatchNorm1d"], 2) and of(FINE["LayerNorm"], 1)


@pytest.mark.parametrize(
    "name", ["fraug", "ditto", "fedbn", "partialfed", "pfedavg", "fedpac", "fedrep", "moon"]
)
def test_batches_that_a_method_makes_have_at_least_two_samples(name: str, tmp_path: Path) -> None:
    experiment = build_experiment(
        REFUSING["BatchNorm1d"], f"method={name}", "rounds=4", "faults.tolerate=0"
    )
    run_without_failures(experiment, tmp_path)
