"""FedRep's phases: what moves in each of them; where they end is `textbook/fedrep.py`."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_runs import LOCAL, NORMED_MLP, run, run_spec, setup
from torch import Tensor

from raysim.api.context import Context
from raysim.api.declarations import FORWARD
from raysim.api.hooked_method import HookedMethod
from raysim.methods.fedrep import FedRep, head_steps
from raysim.simulation.schedule import Synchronous

HEAVY = replace(LOCAL, momentum=0.9, weight_decay=0.5, epochs=3)


class Watching(HookedMethod):
    """Keeps the model as it is in each step, once its statistics moved."""

    name = "watching"
    paper = "a test"

    def __init__(self) -> None:
        self.seen: list[dict[str, Tensor]] = []

    def term(self, ctx: Context, out: Any, batch: Any) -> Tensor:
        self.seen.append({name: tensor.detach().clone() for name, tensor in ctx.model.state_dict().items()})
        return out.logits.new_zeros(())


def test_head_steps_come_first_and_neither_weight_decay_nor_momentum_moves_what_is_fixed() -> None:
    watching = Watching()
    run(run_spec(FedRep(head_epochs=2), watching, model=NORMED_MLP, local=HEAVY), Synchronous(1), rounds=1)
    seen = watching.seen
    cut = head_steps(len(seen), 2, 1)
    assert 1 < cut < len(seen) - 1
    for step, (before, after) in enumerate(pairwise(seen)):
        moved = {name for name in before if not torch.equal(before[name], after[name])}
        parameters = {name for name in moved if "running" not in name and "num_batches" not in name}
        assert parameters and {name.partition(".")[0] for name in parameters} == {"head" if step < cut else "extractor"}
        assert any("running_mean" in name for name in moved), "the extractor is in train mode all along"


def test_in_mode_joint_both_parts_move_together() -> None:
    watching = Watching()
    run(run_spec(FedRep("joint"), watching, model=NORMED_MLP, local=HEAVY), Synchronous(1), rounds=1)
    first, second = watching.seen[:2]
    assert all(not torch.equal(first[f"{part}.weight"], second[f"{part}.weight"]) for part in ("head", "extractor.1"))


def test_the_paper_spends_ten_epochs_on_the_head_and_one_on_the_extractor() -> None:
    assert (FedRep().head_epochs, FedRep().body_epochs) == (10, 1)
    assert head_steps(11 * 7, 10, 1) == 70


@pytest.mark.parametrize(
    ("local", "message"),
    [
        (replace(LOCAL, epochs=1), r"local\.epochs: 1 .* local\.epochs=11"),
        (replace(LOCAL, epochs=None, steps=1), r"local\.steps: 1 .* local\.steps=2"),
    ],
    ids=["epochs", "steps"],
)
def test_a_budget_that_is_not_the_sum_of_both_phases_is_refused(local: Any, message: str) -> None:
    nothing: Any = SimpleNamespace()
    with pytest.raises(ValueError, match=message):
        FedRep().check(setup(nothing, local, {}))
    assert FedRep("joint").check(setup(nothing, local, {})) == ()
    for fine in (replace(LOCAL, epochs=11), replace(LOCAL, epochs=None, steps=2)):
        assert FedRep().check(setup(nothing, fine, {})) == ()


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match=r"fedrep\.mode='both'"):
        FedRep("both")  # type: ignore[arg-type]


def test_steps_of_the_head_save_the_extractors_backward_pass() -> None:
    job = SimpleNamespace(trained=120)
    assert FedRep(head_epochs=2, body_epochs=1).cost(job).samples == pytest.approx((FORWARD - 1) * 80)  # type: ignore[arg-type]
