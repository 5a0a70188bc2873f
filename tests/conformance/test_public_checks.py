"""Test the checks for methods and other objects that users write.

A correct object passes all checks, and an object with one error fails the check for this error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from raysim import (
    CSR,
    Compressor,
    Fleet,
    Method,
    ModelRecipe,
    Observer,
    Partition,
    Partitioner,
    Raw,
    Selection,
    SelectionView,
    Source,
)  # fmt: skip
from raysim.api.declarations import Task
from raysim.api.learner import Parameters
from raysim.api.local_job import LocalJob
from raysim.api.local_training import LocalResult
from raysim.conformance import Study, checks
from raysim.data.partition import IID
from raysim.data.sources import Synthetic
from raysim.learners import SklearnLinear
from raysim.methods.fedprox import FedProx
from raysim.models import Mlp
from raysim.primitives.kinds import IGNORED
from raysim.simulation.fleet import Ideal, Speeds
from raysim.simulation.schedule import Buffered, Dispatch, Synchronous, Wait
from raysim.simulation.selection_rules import FewestJobs
from raysim.simulation.topologies import Hierarchical

FEW = Synthetic(samples=80, test_samples=10, classes=5)


def failed_checks(part: object, study: Study | None = None) -> dict[str, str]:
    """Return the messages of the public checks that fail, by the name of the check.

    part: the method, schedule, fleet or similar object to check.
    study: the data and settings of the checks' runs; None for small data.
    """
    messages = {}
    for check in checks(part, study or Study(data=FEW)):
        try:
            check()
        except AssertionError as error:
            messages[str(check).partition(": ")[2]] = str(error)
    return messages


@pytest.mark.parametrize(
    "part",
    [
        SklearnLinear(),
        Mlp((6,)),
        Synthetic(samples=60, test_samples=5),
        IID(clients=5),
        Buffered(3, 2),
        FewestJobs(),
        Hierarchical(2, every=2),
        Ideal(),
        Observer(),
    ],
    ids=lambda part: type(part).__name__,
)
def test_built_in_options_of_raysim_pass_the_public_checks(part: object) -> None:
    assert failed_checks(part) == {}


def test_checks_refuse_object_that_fits_no_option_group() -> None:
    with pytest.raises(TypeError, match="3 is not a part"):
        checks(3)


# --- methods -----------------------------------------------------------------------------------
class Counting(FedProx):
    """A method that counts its steps in an attribute, and not in a declared state."""

    name = "counting"

    def __init__(self) -> None:
        super().__init__()
        self.jobs = 0

    def gradient(self, job: Any, grad: Any, at: slice) -> None:
        self.jobs += 1
        grad.add_(float(self.jobs))


class Greedy(FedProx):
    """A method that uploads a tensor that it does not declare."""

    name = "greedy"

    def end(self, job: Any) -> None:
        job.upload["mean"] = torch.ones(3)


class Understating(Greedy):
    """A method that uploads more floats than it declares."""

    def setup(self, run: Any) -> None:
        run.upload("mean", 2)


class Hooked(Method):
    """A method that has a setting with the name of a hook."""

    name = "hooked"
    paper = "a test"

    def __init__(self, weigh: float = 1.0):
        self.weigh = weigh  # type: ignore[method-assign,assignment]


ROUNDS = Study(data=FEW, schedules=(Synchronous(4),))


def test_check_finds_method_that_keeps_state_outside_checkpoints() -> None:
    messages = failed_checks(Counting(), ROUNDS)
    assert "the same bits on one worker and on two, under synchronous" in messages
    assert "the same bits straight and resumed, under synchronous" in messages


@pytest.mark.parametrize("method", [Greedy(), Understating()])
def test_check_finds_upload_that_is_not_declared(method: Method) -> None:
    name = "what travels is declared and is not what clients keep, under synchronous"
    assert "upload['mean']" in failed_checks(method, ROUNDS)[name]


class Remembering(FedProx):
    """A method whose client state is the client's last update."""

    name = "remembering"

    def setup(self, run: Any) -> None:
        run.client_state("last", run.zeros)

    def end(self, job: Any) -> None:
        size = job.layout.trained
        job.state["last"] = (job.params[:size] - job.broadcast[:size]).clone()


class Telling(FedProx):
    """A method that sends client state in the report of a job."""

    name = "telling"

    def setup(self, run: Any) -> None:
        run.client_state("secret", lambda samples: torch.zeros(8))

    def end(self, job: Any) -> None:
        secret = torch.linspace(0.1, 0.9, 8) * (1 + job.client)
        job.state["secret"] = secret
        job.report["hint"] = secret.clone().numpy()


class Hoarding(FedProx):
    """A method whose client state is the first quarter of the update that the client uploads."""

    name = "hoarding"

    def setup(self, run: Any) -> None:
        run.client_state("part", lambda samples: torch.zeros(1))

    def end(self, job: Any) -> None:
        size = job.layout.trained // 4
        job.state["part"] = (job.params[:size] - job.broadcast[:size]).clone()


TRAVELS = "what travels is declared and is not what clients keep, under "


def test_check_accepts_a_method_that_stores_last_updates_as_client_state() -> None:
    assert (
        failed_checks(Remembering(), Study(data=FEW, schedules=(Synchronous(4), Buffered(4, 1))))
        == {}
    )


@pytest.mark.parametrize(
    ("method", "schedule", "state", "place"),
    [
        (Hoarding(), Buffered(4, 1), "hoarding.part", "`delta`"),
        (Telling(), Synchronous(4), "telling.secret", "`report`"),
    ],
    ids=["update", "report"],
)
def test_check_finds_client_state_in_a_message(
    method: Method, schedule: Any, state: str, place: str
) -> None:
    study = Study(data=FEW, schedules=(schedule,))
    message = failed_checks(method, study)[f"{TRAVELS}{type(schedule).__name__.lower()}"]
    assert state in message and place in message


def test_check_finds_method_argument_named_like_a_hook() -> None:
    check = next(check for check in checks(Hooked()) if "arguments of its own" in str(check))
    with pytest.raises(AssertionError, match=r"hooked.*weigh"):
        check()


def users_method(**attributes: Any) -> Method:
    """Return an object of a new method class, as a user would write it.

    attributes: the class's hooks and other attributes, by name.
    """
    return type("Mine", (Method,), {"__module__": __name__, "name": "mine", **attributes})()  # type: ignore[no-any-return]


def failed_in_runs(method: Method) -> dict[str, str]:
    """Return the messages of the checks that a federated method fails, by check name.

    The check that the method can be pickled is left out: tests define classes inside functions, and
    Python cannot pickle objects of such classes.
    """
    messages = failed_checks(method, ROUNDS)
    messages.pop("a file can hold it", None)
    return messages


NAMES = "its hooks and what it keeps have names that fit"


@pytest.mark.parametrize(
    ("method", "text"),
    [
        (
            users_method(gradiant=lambda self, job, grad, at: None),
            "'gradiant'",
        ),
        (users_method(), "method 'mine' overrides no hook"),
        (users_method(end=lambda self: None), "def end(self, job)"),
        (users_method(finish=lambda self, ctx: None), "no hook 'finish' any more"),
    ],
)
def test_check_finds_misspelt_hook(method: Method, text: str) -> None:
    check = next(check for check in checks(method) if NAMES in str(check))
    with pytest.raises(AssertionError) as error:
        check()
    assert text in str(error.value)


def test_error_mentions_the_hook_that_returns_nothing() -> None:
    method = users_method(combine=lambda self, aggregation, server: None)
    messages = failed_in_runs(method)
    assert len(messages) == 4
    assert all("'mine' returns nothing from combine" in text for text in messages.values())


def test_check_finds_undeclared_client_state() -> None:
    def end(self: Any, job: Any) -> None:
        job.state["last"] = torch.zeros(2)

    messages = failed_in_runs(users_method(end=end))
    assert len(messages) == 4
    assert all("job.state['last'] of method 'mine'" in text for text in messages.values())


def test_check_accepts_method_without_paper() -> None:
    def loss(self: Any, job: Any, out: Any, loss: Any) -> Any:
        return loss + 0.1 * out.logits.square().mean()

    assert failed_in_runs(users_method(loss=loss)) == {}


# --- the other parts ---------------------------------------------------------------------------
def message_of(part: object, name: str) -> str:
    """Return the message of one check, or "" if the part passes it."""
    check = next(check for check in checks(part) if name in str(check))
    try:
        check()
    except AssertionError as error:
        return str(error)
    return ""


class Loose(ModelRecipe):
    """A recipe whose initial values do not depend on the seed."""

    def extractor(self, input_shape: Any) -> tuple[nn.Module, int]:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 4)), 4

    def build(self, input_shape: Any, num_classes: int, seed: int, *more: Any) -> Any:
        model = super().build(input_shape, num_classes, seed)
        nn.init.normal_(model.head.weight)
        return model


class Wide(ModelRecipe):
    """A recipe whose networks have 4 features, but the attribute `feature_dim` is 5."""

    def extractor(self, input_shape: Any) -> tuple[nn.Module, int]:
        return nn.Sequential(nn.Flatten(), nn.LazyLinear(4)), 4

    def build(self, input_shape: Any, num_classes: int, seed: int, *more: Any) -> Any:
        model = Mlp((4,)).build(input_shape, num_classes, seed)
        model.feature_dim = 5
        return model


def test_check_finds_an_unseeded_model_and_a_wrong_shape_of_features() -> None:
    assert "one seed gives two networks" in message_of(Loose(), "a seed gives the same values")
    assert "must be [4, feature_dim]" in message_of(Wide(), "features and a head")


@dataclass(frozen=True)
class Drawing(Source):
    """A source with two errors.

    It draws images from NumPy's global generator. It has three classes, but names for only two.
    """

    def read(self) -> Raw:
        images = np.random.randint(0, 256, (30, 1, 8, 8)).astype(np.uint8)  # noqa: NPY002
        return Raw(images, np.arange(30) % 3, 25, ["a", "b"])


def test_check_finds_classes_without_a_name_and_samples_that_change_when_read_again() -> None:
    assert "differ when the data are read again" in message_of(Drawing(), "the same samples twice")
    assert "a label has no name: there are 2" in message_of(Drawing(), "labels and domains")


@dataclass(frozen=True)
class Unlabelled(Source):
    """A source in which some samples have no label."""

    def read(self) -> Raw:
        labels = np.where(np.arange(30) % 3, np.arange(30) % 2, IGNORED)
        return Raw(np.zeros((30, 1, 8, 8), np.uint8), labels, 25, ["a", "b"])


def test_check_accepts_samples_without_a_label() -> None:
    assert message_of(Unlabelled(), "labels and domains") == ""


@dataclass(frozen=True)
class Normalising(SklearnLinear):
    """A learner with two errors.

    Its initial values do not depend on the seed. Its outputs for a sample depend on the other
    samples of the batch.
    """

    name = "normalising"

    def initial(self, task: Task, rng: np.random.Generator) -> Parameters:
        values = super().initial(task, rng)
        return {**values, "drawn": np.random.rand(3)}  # noqa: NPY002

    def fit(
        self, parameters: Parameters, inputs: np.ndarray, labels: np.ndarray, job: LocalJob
    ) -> tuple[Parameters, LocalResult]:
        returned, result = super().fit(parameters, inputs, labels, job)
        return {**returned, "drawn": parameters["drawn"]}, result

    def predict(self, parameters: Parameters, inputs: np.ndarray) -> np.ndarray:
        return super().predict(parameters, inputs - inputs.mean(axis=0))


def test_checks_reject_a_learner_that_ignores_the_seed_and_normalises_over_a_batch() -> None:
    assert {
        "its initial parameters depend on the given generator only",
        "its outputs for a sample do not depend on the other samples",
    } <= failed_checks(Normalising()).keys()


class Doubling(Partitioner):
    """A partition that gives both clients the same random rows, without a seed."""

    def split(self, labels: Any, domains: Any, num_classes: int, seed: int) -> Partition:
        rows = np.random.permutation(len(labels))[:20]  # noqa: NPY002
        part = CSR(np.concatenate([rows, rows]).astype(np.int64), np.array([0, 20, 40]))
        return Partition(part, CSR(np.empty(0, np.int64), np.zeros(3, np.int64)))


def test_check_finds_partition_with_shared_samples() -> None:
    assert "one seed gives two splits" in message_of(Doubling(), "the same split")
    assert "belongs to two clients" in message_of(Doubling(), "no sample belongs")


class Forgetful(Synchronous):
    """A wrong schedule: it dispatches more jobs than `concurrency`.

    It also changes an attribute of the schedule in `decide`, which is forbidden.
    """

    def decide(self, view: Any) -> Any:
        object.__setattr__(self, "asked", getattr(self, "asked", 0) + 1)
        if not view.running and not view.arrived:
            return Dispatch(self.cohort + 1)
        return super().decide(view) if not view.running else Wait()


def test_check_finds_schedule_that_changes_its_own_state() -> None:
    assert "the schedule has changed" in message_of(Forgetful(3), "it keeps its promises")


@dataclass(frozen=True)
class Random(Fleet):
    """A wrong fleet: it draws speeds without the run's seed, so each run has different speeds."""

    def speeds(self, seed: int, clients: int, sample_flops: Callable[[], float]) -> Speeds:
        each = np.random.uniform(1, 2, clients)  # noqa: NPY002
        return Speeds(each, each, each)


def test_check_finds_unseeded_fleet() -> None:
    assert "takes another time with one seed" in message_of(
        Random(), "a seed gives the same devices"
    )


class CountingSelection(Selection):
    """A selection that chooses the first clients, and counts its decisions in an attribute."""

    def __init__(self) -> None:
        self.decisions = 0

    def select(self, view: SelectionView) -> np.ndarray:
        self.decisions += 1
        return view.clients[: view.count]


def test_check_finds_selection_that_changes_its_own_state() -> None:
    assert (
        "the selection has changed"
        in failed_checks(CountingSelection())["it keeps no state in itself"]
    )


class Failing(Observer):
    """An observer that fails in the second round."""

    def on_round(self, run: Any, event: Any) -> None:
        assert event.row["round"] < 2, "no ink"


def test_error_of_a_check_mentions_the_class_of_the_failing_observer() -> None:
    with pytest.raises(
        RuntimeError, match="your observer Failing raised AssertionError in on_round: no ink"
    ):
        checks(Failing())[0]()


# --- compressors -------------------------------------------------------------------------------
class Halves(Compressor):
    """A compressor that sends only the first half of the parameters."""

    name = "halves"

    def words(self, layout: Any) -> int:
        return int(layout.trained // 2)

    def encode(self, values: Any, layout: Any, key: int, kept: Any) -> np.ndarray:
        half: np.ndarray = values[: self.words(layout)].numpy().view(np.uint32)
        return half

    def decode(self, message: np.ndarray, layout: Any, out: Any) -> None:
        out.zero_()
        out.numpy()[: len(message)] = message.view(np.float32)


class TooLong(Halves):
    """A compressor that sends one 32-bit word more than it declares."""

    def encode(self, values: Any, layout: Any, key: int, kept: Any) -> np.ndarray:
        return np.append(super().encode(values, layout, key, kept), np.uint32(0))


class Drawn(Halves):
    """A compressor that draws the first 32-bit word of a message from a generator without a seed.

    Random parts of a message should depend only on the argument `key`.
    """

    def encode(self, values: Any, layout: Any, key: int, kept: Any) -> np.ndarray:
        message = super().encode(values, layout, key, kept).copy()
        message[0] = np.random.default_rng().integers(2**32)
        return message


class Changing(Halves):
    """A wrong compressor: `encode` changes its argument `values` in place."""

    def encode(self, values: Any, layout: Any, key: int, kept: Any) -> np.ndarray:
        values += 1.0
        return super().encode(values, layout, key, kept)


class Adding(Halves):
    """A compressor whose `decode` leaves the old values in the second half of `out`."""

    def decode(self, message: np.ndarray, layout: Any, out: Any) -> None:
        out.numpy()[: len(message)] = message.view(np.float32)


class Telepathic(Halves):
    """A compressor that decodes with a number that is not in the message."""

    def encode(self, values: Any, layout: Any, key: int, kept: Any) -> np.ndarray:
        self.mean = float(values.mean()) + 1.0
        return super().encode(values, layout, key, kept)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "mean": 0.0}

    def decode(self, message: np.ndarray, layout: Any, out: Any) -> None:
        super().decode(message, layout, out)
        out[len(message) :] = self.mean


class Tripled(Halves):
    """A wrong compressor: it multiplies the correctly decoded values by 3."""

    def decode(self, message: np.ndarray, layout: Any, out: Any) -> None:
        super().decode(message, layout, out)
        out *= 3.0


@pytest.mark.parametrize(
    ("compressor", "name"),
    [
        (TooLong(), "a message has the declared size"),
        (Drawn(), "a message has the declared size"),
        (Changing(), "a message has the declared size"),
        (Adding(), "decoding needs the message alone"),
        (Telepathic(), "decoding needs the message alone"),
        (Tripled(feedback="ef14"), "error feedback shortens errors"),
    ],
    ids=lambda part: type(part).__name__,
)
def test_check_rejects_a_compressor_that_writes_wrong_messages(
    compressor: Compressor, name: str
) -> None:
    assert message_of(compressor, name)


def test_check_accepts_valid_messages_of_a_compressor() -> None:
    part = Halves(feedback="ef14")
    names = [str(check).partition(": ")[2] for check in checks(part)]
    for name in names[1:4]:
        assert message_of(part, name) == ""
