"""Own models of several clients scored at once: the scores of a loop, and nobody else in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import NORMED_MLP, coordinate, even, run_spec
from torch import Tensor, nn

from raysim.api.declarations import Finetune
from raysim.api.messages import Report, Task
from raysim.api.private_state import PrivateState, StoredState
from raysim.methods.fedbn import FedBN
from raysim.models.classifier import ModelRecipe, Shape
from raysim.training.host import Host
from raysim.training.lane import NotInLanes
from raysim.training.lane_scores import LaneScores, pays, width

CLIENTS = 7


def study(**others: Any) -> Any:
    return run_spec(FedBN(), **({"model": NORMED_MLP, "data": even(CLIENTS, 140), "dtype": torch.float64} | others))


def scoring(lanes: int = 3, **others: Any) -> Host:
    """A host that scores in lanes, also on a CPU."""
    host = Host(study(lanes=lanes, **others))
    if lanes > 1:
        host._scores = LaneScores(host.loop, host.spec.score_batch)  # type: ignore[arg-type]
    return host


def asked() -> tuple[list[Task], list[StoredState | None]]:
    """Clients whose normalisation differs, with 1 to 20 rows each; one fine-tuned, and rows of the shared model."""
    layout, draw = coordinate(study()).layout, np.random.default_rng(0)
    tasks, states = [Task(-1, np.arange(30))], [None]
    for client in range(CLIENTS):
        rows = np.arange(client, client + 1 + 3 * client)
        tasks.append(Task(client, rows, 0, finetune=Finetune(1) if client == 4 else None))
        counters = np.zeros(layout.total_counters - layout.shared_counters, np.int64)
        states.append(PrivateState(draw.uniform(0.5, 2.0, layout.personal), counters, {}))
    return tasks, states


def scores(host: Host, tasks: Sequence[Task], states: Sequence[StoredState | None]) -> list[Report]:
    return host.evaluate(tasks, coordinate(study()).server.published(), *states)


@pytest.mark.parametrize("score_batch", [1024, 6], ids=["at once", "in passes"])
def test_models_are_scored_in_lanes_as_in_a_loop(score_batch: int) -> None:
    loop, lanes = (scores(scoring(count, score_batch=score_batch), *asked()) for count in (1, 3))
    assert [report.client for report in lanes] == [report.client for report in loop]
    for one, other in zip(loop, lanes, strict=True):
        assert np.array_equal(one.scores, other.scores)
        np.testing.assert_allclose(other.losses, one.losses, rtol=1e-12)
    assert len({report.losses[0] for report in lanes}) > CLIENTS / 2, "their models differ"


def test_a_score_depends_on_nobody_else() -> None:
    host, (tasks, states) = scoring(dtype=torch.float32), asked()
    together = scores(host, tasks, states)
    for some in ([3], [7, 1, 2], [5, 4]):
        for place, report in zip(some, scores(host, [tasks[i] for i in some], [states[i] for i in some]), strict=True):
            assert np.array_equal(report.losses, together[place].losses)


def test_rows_of_a_pass_are_few_more_than_a_client_has() -> None:
    widths = {1: 1, 2: 2, 3: 3, 5: 6, 7: 8, 16: 16, 17: 24, 20: 24, 25: 32, 5000: 1024}
    assert {rows: width(rows, 1024) for rows in widths} == widths
    assert not pays(torch.device("cpu")) and pays(torch.device("cuda"))


class Drawing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x)


class Noisy(ModelRecipe):
    """Draws in a layer that nobody knows to draw."""

    def extractor(self, input_shape: Shape) -> tuple[nn.Module, int]:
        size = int(np.prod(input_shape))
        return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(size), Drawing()), size


def test_a_model_that_draws_where_that_is_not_known_is_refused() -> None:
    host, published = scoring(model=Noisy()), coordinate(replace(study(), model=Noisy())).server.published()
    with pytest.raises(NotInLanes, match=r"runtime.lanes=3: the model or the loop cannot score several clients"):
        host.evaluate([Task(0, np.arange(3))], published)
