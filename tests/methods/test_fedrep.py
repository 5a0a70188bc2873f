"""Test which parameters change in FedRep's phases, and which numbers of epochs it refuses."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from tiny_runs import LOCAL, NORMED_MLP, participation_facts, run, run_spec
from torch import Tensor

from raysim.api.declarations import FORWARD
from raysim.api.local_job import LocalJob
from raysim.api.method import Method
from raysim.methods.fedrep import FedRep, head_steps
from raysim.simulation.schedule import Synchronous
from raysim.training.run_spec import declare_run

HEAVY = replace(LOCAL, momentum=0.9, weight_decay=0.5, epochs=3)


class Watching(Method):
    """A method that stores the model's tensors in each step.

    It stores them after the forward pass, which updates BatchNorm's statistics, and before the
    optimizer step.
    """

    name = "watching"
    paper = "a test"

    def __init__(self) -> None:
        self.seen: list[dict[str, Tensor]] = []

    def loss(self, job: LocalJob, out: Any, loss: Tensor) -> Tensor:
        tensors = job.model.state_dict().items()
        self.seen.append({name: tensor.detach().clone() for name, tensor in tensors})
        return loss


def models_of_steps(method: FedRep) -> list[dict[str, Tensor]]:
    """Return the model's tensors in each step of one job, by name; see `Watching`."""
    watching = Watching()
    run(run_spec(method, watching, model=NORMED_MLP, local=HEAVY), Synchronous(1), rounds=1)
    return watching.seen


def test_fedrep_trains_only_the_head_first_and_only_the_extractor_later() -> None:
    seen = models_of_steps(FedRep(head_epochs=2))
    cut = head_steps(len(seen), 2, 1)
    assert 1 < cut < len(seen) - 1
    for step, (before, after) in enumerate(pairwise(seen)):
        moved = {name for name in before if not torch.equal(before[name], after[name])}
        statistics = {name for name in moved if "running" in name or "num_batches" in name}
        parts = {name.partition(".")[0] for name in moved - statistics}
        assert parts == {"head" if step < cut else "extractor"}
        assert any("running_mean" in name for name in statistics), "always in train mode"


def test_fedrep_joint_mode_changes_both_parts_together() -> None:
    first, second = models_of_steps(FedRep("joint"))[:2]
    for part in ("head", "extractor.1"):
        assert not torch.equal(first[f"{part}.weight"], second[f"{part}.weight"])


def test_fedrep_defaults_are_the_epochs_of_the_paper() -> None:
    assert (FedRep().head_epochs, FedRep().body_epochs) == (10, 1)
    assert head_steps(11 * 7, 10, 1) == 70


@pytest.mark.parametrize(
    ("key", "wrong", "right"),
    [
        ("epochs", replace(LOCAL, epochs=1), replace(LOCAL, epochs=11)),
        ("steps", replace(LOCAL, epochs=None, steps=1), replace(LOCAL, epochs=None, steps=2)),
    ],
)
def test_fedrep_refuses_epochs_or_steps_too_few_for_both_phases(
    key: str, wrong: Any, right: Any
) -> None:
    with pytest.raises(ValueError, match=rf"^local\.{key}\b"):
        declare_run(run_spec(FedRep(), local=wrong))
    declare_run(run_spec(FedRep("joint"), local=wrong))
    declare_run(run_spec(FedRep(), local=right))


def test_fedrep_refuses_unknown_mode() -> None:
    with pytest.raises(ValueError, match=r"^method\.fedrep\.mode\b"):
        FedRep("both")  # type: ignore[arg-type]


def test_fedrep_steps_of_the_head_need_no_backward_pass_of_the_extractor() -> None:
    cost = FedRep(head_epochs=2, body_epochs=1).cost(participation_facts(None, 40, 120))
    assert cost == pytest.approx((FORWARD - 1) * 80)
