"""The checks for parts of a user's own: a good part passes all, a bad one is caught by the check that is meant."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from raysim import CSR, Fleet, Method, ModelRecipe, Observer, Partition, Partitioner, Raw, Source
from raysim.conformance import Study, checks
from raysim.data.partition import IID
from raysim.data.sources import Synthetic
from raysim.methods.fedprox import FedProx
from raysim.methods.scaffold import Scaffold
from raysim.models import Mlp
from raysim.simulation.fleet import Ideal, Speeds
from raysim.simulation.schedule import Buffered, Dispatch, Synchronous, Wait


def failed(part: object, study: Study | None = None) -> dict[str, str]:
    """By name, the checks that a part does not pass, and what they say."""
    found = {}
    for check in checks(part, study):
        try:
            check()
        except AssertionError as error:
            found[str(check).partition(": ")[2]] = str(error)
    return found


@pytest.mark.parametrize(
    "part",
    [
        Scaffold(),
        Mlp((6,)),
        Synthetic(samples=60, test_samples=5),
        IID(clients=5),
        Buffered(3, 2),
        Ideal(),
        Observer(),
    ],
    ids=lambda part: type(part).__name__,
)
def test_raysims_own_parts_pass(part: object) -> None:
    assert failed(part) == {}


def test_what_is_no_part_is_refused() -> None:
    with pytest.raises(TypeError, match="3 is no part of a run"):
        checks(3)


# --- methods ----------------------------------------------------------------------------------------------------------
class Counting(FedProx):
    """Remembers, outside its declared state, how often it trained."""

    name = "counting"

    def __init__(self) -> None:
        super().__init__()
        self.jobs = 0

    def gradient(self, job: Any, grad: Any, at: slice) -> None:
        self.jobs += 1
        grad.add_(float(self.jobs))


class Greedy(FedProx):
    """Uploads what it does not declare."""

    name = "greedy"

    def end(self, job: Any) -> None:
        job.upload["mean"] = torch.ones(3)


class Understating(Greedy):
    """Uploads more floats than it declares."""

    def setup(self, run: Any) -> None:
        run.upload("mean", 2)


class Hooked(Method):
    """Has an argument with the name of a hook."""

    name = "hooked"
    paper = "a test"

    def __init__(self, weigh: float = 1.0):
        self.weigh = weigh  # type: ignore[method-assign,assignment]


ROUNDS = Study(schedules=(Synchronous(4),))


def test_a_method_that_remembers_on_its_own_ends_at_other_bits() -> None:
    found = failed(Counting(), ROUNDS)
    assert "the same bits on one worker and on two, under synchronous" in found
    assert "the same bits straight and resumed, under synchronous" in found


@pytest.mark.parametrize("method", [Greedy(), Understating()])
def test_upload_beyond_the_declaration_is_caught(method: Method) -> None:
    name = "what travels is declared and is not what clients keep, under synchronous"
    assert "upload['mean']" in failed(method, ROUNDS)[name]


class Remembering(FedProx):
    """Keeps its last update, which it sends as every method does."""

    name = "remembering"

    def setup(self, run: Any) -> None:
        run.client_state("last", run.zeros)

    def end(self, job: Any) -> None:
        size = job.layout.trained
        job.state["last"] = (job.params[:size] - job.broadcast[:size]).clone()


class Telling(FedProx):
    """Sends what it keeps in its report."""

    name = "telling"

    def setup(self, run: Any) -> None:
        run.client_state("secret", lambda samples: torch.zeros(8))

    def end(self, job: Any) -> None:
        secret = torch.linspace(0.1, 0.9, 8) * (1 + job.client)
        job.state["secret"] = secret
        job.report["hint"] = secret.clone().numpy()


class Hoarding(FedProx):
    """Keeps a small part of its update, which nobody could tell from a secret in it."""

    name = "hoarding"

    def setup(self, run: Any) -> None:
        run.client_state("part", lambda samples: torch.zeros(1))

    def end(self, job: Any) -> None:
        size = job.layout.trained // 4
        job.state["part"] = (job.params[:size] - job.broadcast[:size]).clone()


TRAVELS = "what travels is declared and is not what clients keep, under "


def test_the_update_that_is_sent_anyway_may_be_kept_and_other_state_that_travels_is_named() -> None:
    assert failed(Remembering(), Study(schedules=(Synchronous(4), Buffered(4, 1)))) == {}
    found = failed(Hoarding(), Study(schedules=(Buffered(4, 1),)))
    assert any(
        "'hoarding.part', which a client keeps, is in `delta`" in said for said in found.values()
    )
    said = failed(Telling(), ROUNDS)[f"{TRAVELS}synchronous"]
    assert (
        "'telling.secret', which a client keeps, is in `report` of a message, byte for byte" in said
    )


def test_an_argument_with_the_name_of_a_hook_is_named() -> None:
    check = next(check for check in checks(Hooked()) if "arguments of its own" in str(check))
    with pytest.raises(AssertionError, match="an argument with the name of a hook: weigh"):
        check()


def own(**attributes: Any) -> Method:
    """A method of a class of the user's own, with these hooks."""
    return type("Mine", (Method,), {"__module__": __name__, "name": "mine", **attributes})()  # type: ignore[no-any-return]


def failed_in_runs(method: Method) -> dict[str, str]:
    """The checks that it does not pass, but for that of a file, which cannot hold a class of a function."""
    return {
        name: said for name, said in failed(method, ROUNDS).items() if name != "a file can hold it"
    }


NAMES = "its hooks and what it keeps have names that fit"


@pytest.mark.parametrize(
    ("method", "sentence"),
    [
        (
            own(gradiant=lambda self, job, grad, at: None),
            "a function 'gradiant' that nothing calls: is the hook",
        ),
        (own(), "method 'mine' fills no hook and does nothing"),
        (own(end=lambda self: None), "def end(self, job)"),
        (own(finish=lambda self, ctx: None), "'finish' was renamed to 'end'"),
    ],
)
def test_a_misspelt_hook_or_name_is_caught(method: Method, sentence: str) -> None:
    check = next(check for check in checks(method) if NAMES in str(check))
    with pytest.raises(AssertionError) as said:
        check()
    assert sentence in str(said.value)


def test_a_hook_that_returns_nothing_is_named_by_every_check_that_runs_it() -> None:
    found = failed_in_runs(own(combine=lambda self, aggregation, server: None))
    assert len(found) == 4
    assert all(
        "method 'mine' returns nothing from combine: return a tensor" in said
        for said in found.values()
    )


def test_state_that_is_nowhere_declared_is_caught() -> None:
    def end(self: Any, job: Any) -> None:
        job.state["last"] = torch.zeros(2)

    found = failed_in_runs(own(end=end))
    assert len(found) == 4
    assert all(
        "job.state['last'] of method 'mine' is not declared" in said for said in found.values()
    )


def test_a_method_needs_no_paper() -> None:
    def loss(self: Any, job: Any, out: Any, loss: Any) -> Any:
        return loss + 0.1 * out.logits.square().mean()

    assert failed_in_runs(own(loss=loss)) == {}


# --- the other parts --------------------------------------------------------------------------------------------------
def only(part: object, name: str) -> str:
    """What one check says; "" if it passes."""
    check = next(check for check in checks(part) if name in str(check))
    try:
        check()
    except AssertionError as error:
        return str(error)
    return ""


class Loose(ModelRecipe):
    """Networks whose values nobody seeds."""

    def extractor(self, input_shape: Any) -> tuple[nn.Module, int]:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 4)), 4

    def build(self, input_shape: Any, num_classes: int, seed: int, *more: Any) -> Any:
        model = super().build(input_shape, num_classes, seed)
        nn.init.normal_(model.head.weight)
        return model


class Wide(ModelRecipe):
    """Says another number of features than it makes."""

    def extractor(self, input_shape: Any) -> tuple[nn.Module, int]:
        return nn.Sequential(nn.Flatten(), nn.LazyLinear(4)), 4

    def build(self, input_shape: Any, num_classes: int, seed: int, *more: Any) -> Any:
        model = Mlp((4,)).build(input_shape, num_classes, seed)
        model.feature_dim = 5
        return model


def test_a_model_whose_values_no_seed_decides_is_caught() -> None:
    assert "one seed gives two networks" in only(Loose(), "a seed gives the same values")
    assert "must be [4, feature_dim]" in only(Wide(), "features and a head")


@dataclass(frozen=True)
class Drawing(Source):
    """Images from NumPy's global generator, some of a class without a name."""

    def read(self) -> Raw:
        images = np.random.randint(0, 256, (30, 1, 8, 8)).astype(np.uint8)  # noqa: NPY002
        return Raw(images, np.arange(30) % 3, 25, ["a", "b"])


def test_data_that_nobody_can_read_twice_or_name_are_caught() -> None:
    assert "differ when the data are read again" in only(Drawing(), "the same samples twice")
    assert "a label has no name: there are 2" in only(Drawing(), "labels and domains")


@dataclass(frozen=True)
class Doubling(Partitioner):
    """Gives every client the same rows, in an order that no seed decides."""

    def split(self, labels: Any, domains: Any, num_classes: int, seed: int) -> Partition:
        rows = np.random.permutation(len(labels))[:20]  # noqa: NPY002
        part = CSR(np.concatenate([rows, rows]).astype(np.int64), np.array([0, 20, 40]))
        return Partition(part, CSR(np.empty(0, np.int64), np.zeros(3, np.int64)))


def test_a_partition_that_gives_a_sample_out_twice_is_caught() -> None:
    assert "one seed gives two splits" in only(Doubling(), "the same split")
    assert "a sample is given out twice" in only(Doubling(), "no sample belongs")


class Forgetful(Synchronous):
    """Sends more off than it says, and keeps a count."""

    def decide(self, view: Any) -> Any:
        object.__setattr__(self, "asked", getattr(self, "asked", 0) + 1)
        if not view.running and not view.arrived:
            return Dispatch(self.cohort + 1)
        return super().decide(view) if not view.running else Wait()


def test_a_schedule_that_keeps_something_is_caught() -> None:
    assert "the schedule has changed" in only(Forgetful(3), "it keeps to what it says")


@dataclass(frozen=True)
class Random(Fleet):
    """Speeds that no seed decides."""

    def speeds(self, seed: int, clients: int, sample_flops: Callable[[], float]) -> Speeds:
        each = np.random.uniform(1, 2, clients)  # noqa: NPY002
        return Speeds(each, each, each)


def test_a_fleet_that_no_seed_decides_is_caught() -> None:
    assert "takes another time with one seed" in only(Random(), "a seed gives the same devices")


class Failing(Observer):
    """Fails in the second round."""

    def on_round(self, run: Any, event: Any) -> None:
        assert event.row["round"] < 2, "no ink"


def test_an_observer_that_fails_is_named() -> None:
    with pytest.raises(
        RuntimeError, match="your observer Failing raised AssertionError in on_round: no ink"
    ):
        checks(Failing())[0]()
