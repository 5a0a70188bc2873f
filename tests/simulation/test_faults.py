"""Test that failed clients are recorded and left out, and that too many of them stop the run."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cluster import Workers
from tiny_runs import NORMED, ROUNDS, coordinate, run, run_spec, run_to_end, same_arrays
from torch import Tensor

from raysim.api.context import Outputs
from raysim.api.hook_checks import HookError
from raysim.api.local_job import LocalJob
from raysim.api.messages import Failure
from raysim.api.method import Method
from raysim.api.server_view import Aggregation, ServerView
from raysim.api.setup import Setup
from raysim.methods.fedbn import FedBN
from raysim.methods.scaffold import Scaffold
from raysim.primitives.errors import RefusedError
from raysim.simulation import checkpoint
from raysim.simulation.coordinator import Coordinator
from raysim.simulation.events import Round, RunStoppedError, Saved, TooManyFailuresError
from raysim.simulation.failures import check_failures
from raysim.simulation.fleet import Ideal
from raysim.simulation.schedule import Buffered, Synchronous
from raysim.training.run_spec import Faults

# Who fails: (client, version of the model it received).
HITS = frozenset({(2, 1), (5, 2), (0, 2)})
ALL = Synchronous(6)


class Raising(Method):
    """A method that raises an error in certain jobs.

    hits: these jobs, as pairs (client, version of the model that the client received).
    """

    name = "raising"

    def __init__(self, hits: frozenset[tuple[int, int]] = HITS):
        self.hits = hits

    def hit(self, job: LocalJob) -> bool:
        return (job.client, job.version) in self.hits

    def begin(self, job: LocalJob) -> None:
        if self.hit(job):
            raise KeyError("lost")


class Diverging(Raising):
    """A method that fills the gradients with nan in certain jobs.

    hits: these jobs, as pairs (client, version of the model that the client received).
    """

    name = "diverging"

    def gradient(self, job: LocalJob, grad: Tensor, at: slice) -> None:
        if self.hit(job):
            grad.fill_(torch.nan)

    def begin(self, job: LocalJob) -> None:
        pass


class Infinite(Method):
    """A method that makes the loss of each batch infinite."""

    name = "infinite"

    def setup(self, run: Setup) -> None:
        run.owns("loss")

    def loss(self, job: LocalJob, out: Outputs, loss: Tensor) -> Tensor:
        return out.logits.mean() + torch.inf


class Overflowing(Raising):
    """A method that uploads infinite numbers in certain jobs.

    hits: these jobs, as pairs (client, version of the model that the client received).
    """

    name = "overflowing"

    def setup(self, run: Setup) -> None:
        run.upload("value", 3)

    def end(self, job: LocalJob) -> None:
        job.upload["value"] = torch.full((3,), torch.inf if self.hit(job) else 1.0)

    def begin(self, job: LocalJob) -> None:
        pass


class Spoiling(Raising):
    """A method that sets a personal parameter to nan in certain jobs.

    hits: these jobs, as pairs (client, version of the model that the client received).
    """

    name = "spoiling"

    def end(self, job: LocalJob) -> None:
        if self.hit(job):
            job.vector.personal[0] = torch.nan

    def begin(self, job: LocalJob) -> None:
        pass


class Absent(Method):
    """A method that gives the weight 0 to the jobs in `HITS`, which are trained without an error.

    Other methods of this file make these jobs fail, so the two results can be compared.
    """

    name = "absent"

    def weigh(self, aggregation: Aggregation, server: ServerView) -> Aggregation:
        gone = [(update.client, update.version) in HITS for update in aggregation.updates]
        return aggregation.with_weights(
            [0.0 if out else w for out, w in zip(gone, aggregation.weights, strict=True)]
        )


class Leaving(Raising):
    """A method that raises SystemExit in certain jobs, as third-party code may do.

    hits: these jobs, as pairs (client, version of the model that the client received).
    """

    name = "leaving"

    def begin(self, job: LocalJob) -> None:
        if self.hit(job):
            raise SystemExit(7)


class Long(Raising):
    """A method that makes an update's norm very large, but finite, in certain jobs.

    hits: these jobs, as pairs (client, version that the client received).
    length: the new value of the trained model's first parameter.
    """

    name = "long"

    def __init__(self, hits: frozenset[tuple[int, int]] = HITS, length: float = 1e20):
        self.hits, self.length = hits, length

    def begin(self, job: LocalJob) -> None:
        pass

    def end(self, job: LocalJob) -> None:
        if self.hit(job):
            job.params[0] = self.length


class Server(Method):
    """A method with a hook that fails on the server in the third round."""

    name = "server"

    def __init__(self, hook: str, error: type[BaseException] = ZeroDivisionError):
        self.hook, self.error = hook, error

    def fail(self, hook: str, server: ServerView) -> None:
        if hook == self.hook and server.version == 2:
            raise self.error("on purpose")

    def weigh(self, aggregation: Aggregation, server: ServerView) -> Aggregation:
        self.fail("weigh", server)
        return aggregation

    def step(self, direction: Tensor, aggregation: Aggregation, server: ServerView) -> Tensor:
        self.fail("step", server)
        return direction

    def absorb(self, aggregation: Aggregation, server: ServerView) -> None:
        self.fail("absorb", server)


class Weightless(Method):
    """A method that gives all clients weight 0."""

    name = "weightless"

    def weigh(self, aggregation: Aggregation, server: ServerView) -> Aggregation:
        return aggregation.with_weights([0.0 for _ in aggregation.weights])


def where(failures: Sequence[Failure]) -> set[tuple[int, int]]:
    return {(failure.client, failure.version) for failure in failures}


@pytest.mark.parametrize(
    "kind", [Raising, Diverging, Overflowing, Leaving], ids=lambda kind: kind.name
)
def test_failed_client_does_not_change_the_aggregate(kind: Any) -> None:
    result = run(run_spec(kind()), ALL, Ideal(), rounds=4, tolerate=0.5)
    without = run(run_spec(Absent()), ALL, Ideal(), rounds=4)
    assert result.finished.model_sha256 == without.finished.model_sha256
    assert where(result.failures) == HITS
    assert [(row["failures"], row["clients"]) for row in result.rows] == [
        (0, 6),
        (1, 5),
        (2, 4),
        (0, 6),
    ]
    assert [row["virtual_seconds"] for row in result.rows] == [
        row["virtual_seconds"] for row in without.rows
    ]
    assert [row["floats_down"] for row in result.rows] == [
        row["floats_down"] for row in without.rows
    ]
    assert (
        result.finished.model_sha256
        != run(run_spec(), ALL, Ideal(), rounds=4).finished.model_sha256
    )


def test_failure_record_contains_client_and_version_and_method_and_worker() -> None:
    (failure,) = run(run_spec(Raising(frozenset({(2, 1)}))), ALL, tolerate=0.5).failures
    assert (failure.client, failure.version, failure.worker, failure.method) == (
        2,
        1,
        "worker-0",
        "raising",
    )
    text, _, line = failure.error.partition(" (")
    assert text == "client 2, version 1, worker worker-0: KeyError: 'lost'"
    assert line.startswith("test_faults.py, line ") and 'raise KeyError("lost")' in line
    assert "in begin" in failure.traceback


def test_error_of_a_diverged_client_mentions_the_learning_rate() -> None:
    (failure,) = run(run_spec(Diverging(frozenset({(2, 1)}))), ALL, tolerate=0.5).failures
    assert "the loss is not finite from step 2 of" in failure.error
    assert "learning rate 0.05" in failure.error
    assert "local.clip" in failure.error and "method 'diverging'" in failure.error


def test_error_about_an_infinite_loss_in_the_first_step_omits_local_lr() -> None:
    spec = run_spec(Infinite(), FedBN(), model=NORMED)
    failure = run(spec, ALL, rounds=1, tolerate=1.0).failures[0]
    assert "the loss is not finite from step 1 of" in failure.error
    assert "method 'infinite'" in failure.error and "local.lr" not in failure.error


def test_error_of_an_upload_with_infinite_values_contains_name_of_method() -> None:
    (failure,) = run(run_spec(Overflowing(frozenset({(2, 1)}))), ALL, tolerate=0.5).failures
    assert failure.method == "overflowing"
    assert "overflowing.value" in failure.error


def test_infinite_personal_parameter_is_never_stored() -> None:
    result = run(run_spec(FedBN(), Spoiling(), model=NORMED), ALL, rounds=4, tolerate=0.5)
    assert where(result.failures) == HITS, "each of them only once: the state before it is kept"


def test_run_on_ray_equals_an_in_process_run_if_clients_fail(workers: Workers) -> None:
    study = run_spec(Raising())
    here = run(study, ALL, rounds=4, tolerate=0.5)
    there = run_to_end(
        coordinate(study, ALL, runtime=workers.runtime(study, 2), rounds=4, tolerate=0.5)
    )
    assert there.bits == here.bits
    assert there.history == here.history
    assert where(there.failures) == HITS
    assert {failure.worker for failure in there.failures} <= {"worker-0", "worker-1"}


def test_buffered_aggregation_leaves_out_failed_clients() -> None:
    hits = frozenset((client, version) for client in (0, 3) for version in range(20))
    result = run(run_spec(Raising(hits)), Buffered(concurrency=4, size=3), rounds=8, tolerate=0.7)
    assert {failure.client for failure in result.failures} == {0, 3}
    assert sum(row["failures"] for row in result.rows) == len(result.failures)  # type: ignore[misc]
    assert all(row["clients"] + row["failures"] == 3 for row in result.rows)  # type: ignore[operator]


def test_round_whose_jobs_all_fail_does_not_change_the_model() -> None:
    hits = frozenset((client, 1) for client in range(6))
    result = run(run_spec(Raising(hits)), ALL, Ideal(), rounds=3, tolerate=1.0)
    assert result.rows[1]["train_loss"] is None
    assert result.rows[1]["clients"] == 0
    assert result.rows[1]["accuracy_global"] == result.rows[0]["accuracy_global"]
    assert result.rows[1]["loss_global"] == result.rows[0]["loss_global"]
    assert len(result.rows) == 3


def test_failed_job_leaves_the_client_state_unchanged(tmp_path: Path) -> None:
    coordinator = coordinate(
        run_spec(Scaffold(), Raising()),
        ALL,
        rounds=4,
        tolerate=0.5,
        checkpoint_every=1,
        folder=str(tmp_path),
    )
    read = (checkpoint.read(event.path) for event in coordinator.run() if isinstance(event, Saved))
    states = [dict(saved.clients) for saved in read]
    for version in range(1, 4):
        for client in range(6):
            before, after = states[version - 1 : version + 1]
            assert same_arrays(before[client], after[client]) == ((client, version) in HITS)


# --- too many -------------------------------------------------------------------------------------


def events_until_stopped(coordinator: Coordinator) -> tuple[list[Any], TooManyFailuresError]:
    events = []
    with pytest.raises(TooManyFailuresError) as stopped:
        for event in coordinator.run():
            events.append(event)
    return events, stopped.value


@pytest.mark.parametrize("methods", [[], [Scaffold()]], ids=["fedavg", "scaffold"])
@pytest.mark.parametrize(
    "schedule", [ALL, Buffered(concurrency=5, size=4)], ids=["rounds", "buffer"]
)
def test_error_of_a_run_with_too_many_failures_mentions_its_checkpoint(
    schedule: Any, methods: list[Method], tmp_path: Path
) -> None:
    hits = frozenset((client, version) for client in (0, 2) for version in (2, 3, 4))
    study = run_spec(*methods, Raising(hits))
    straight = run(study, schedule, rounds=7, tolerate=1.0)
    assert straight.failures, "or nothing stops"
    events, error = events_until_stopped(
        coordinate(study, schedule, rounds=7, tolerate=0.0, folder=str(tmp_path))
    )
    finished = [event.row["round"] for event in events if isinstance(event, Round)]
    (path,) = checkpoint.list_complete(tmp_path / "checkpoints")
    assert path.name == f"round-{finished[-1]:06d}"
    assert f"resume={path}" in str(error)
    assert "faults.tolerate=0.0" in str(error)
    assert "client " in str(error)
    assert "method 'raising'" in str(error)
    resumed = run(study, schedule, rounds=7, tolerate=1.0, resume=str(path))
    assert resumed.bits == straight.bits
    assert resumed.history == straight.history


def test_tolerated_failures_do_not_stop_a_run() -> None:
    hits = frozenset({(client, 0) for client in range(6)} - {(0, 0), (1, 0)})
    assert len(run(run_spec(Raising(hits)), ALL, rounds=1, tolerate=4 / 6).failures) == 4
    with pytest.raises(TooManyFailuresError, match="4 of 6 clients failed in round 1"):
        run(run_spec(Raising(hits)), ALL, rounds=1, tolerate=0.5)


@pytest.mark.parametrize(("failed", "jobs"), [(1, 3), (2, 7), (29, 100), (58, 100)])
def test_value_that_the_error_suggests_for_faults_tolerate_is_large_enough(
    failed: int, jobs: int
) -> None:
    saver: Any = SimpleNamespace(has_folder=False)
    failures = [Failure(number, number, 0, "worker-0", "", "an error") for number in range(failed)]
    with pytest.raises(TooManyFailuresError) as stopped:
        check_failures(failures, jobs, 0, 0.0, saver)
    share = re.search(r"set faults\.tolerate=([0-9.]*[0-9])", str(stopped.value))
    assert share is not None
    check_failures(failures, jobs, 0, float(share[1]), saver)


def test_error_of_a_failed_run_without_a_folder_does_not_mention_resume() -> None:
    hits = frozenset((client, 0) for client in range(6))
    with pytest.raises(TooManyFailuresError) as stopped:
        run(run_spec(Raising(hits)), ROUNDS)
    assert "resume" not in str(stopped.value)


# --- hooks of a user's own ------------------------------------------------------------------------
def user_method(**attributes: Any) -> Method:
    """Return a method of a new class, as a user would define it.

    attributes: the attributes of the class, such as its hooks.
    """
    return type("Mine", (Method,), {"__module__": __name__, "name": "mine", **attributes})()  # type: ignore[no-any-return]


def raises(self: Any, job: LocalJob) -> None:
    raise ValueError("my bug")


def reads(self: Any, job: LocalJob) -> None:
    job.state["x"].clone()


def writes(self: Any, job: LocalJob) -> None:
    job.state["x"] = torch.zeros(1)


def removes(self: Any, job: LocalJob) -> None:
    del job.state["x"]


def reports(self: Any, job: LocalJob) -> None:
    job.report["z"] = None  # type: ignore[assignment]


def uploads(self: Any, job: LocalJob) -> None:
    job.upload["x"] = torch.zeros(2)


def uploads_without_name(self: Any, job: LocalJob) -> None:
    job.context.upload["x"] = torch.ones(100_000)


def keeps(self: Any, run: Setup) -> None:
    run.client_state("x", lambda samples: torch.zeros(1))


def declares_upload(self: Any, run: Setup) -> None:
    run.upload("x", 3)


def setup_with_draw(value: Any) -> Any:
    """Return a `setup` hook of a method, which declares the random draw "x".

    value: what each draw returns in place of random numbers.
    """

    def setup(self: Any, run: Setup) -> None:
        run.draw("x", lambda job, generator: value)

    return setup


def stopped_by(method: Method) -> list[str]:
    """Return the lines of the error that ends a run with this method."""
    with pytest.raises((RunStoppedError, RefusedError)) as stopped:
        run(run_spec(method), ALL, rounds=1)
    return str(stopped.value).splitlines()


UNDECLARED = "job.state['x'] of method 'mine' is not declared"


@pytest.mark.parametrize(
    ("method", "sentence"),
    [
        (user_method(loss=lambda *given: None), "method 'mine' returns nothing from loss"),
        (user_method(batch=lambda *given: None), "method 'mine' returns nothing from batch"),
        (
            user_method(perturb=lambda *given: 1.0),
            "method 'mine' returns a value of type float from perturb",
        ),
        (
            user_method(setup=setup_with_draw(None)),
            "method 'mine' returns nothing from the function of run.draw",
        ),
        (
            user_method(setup=setup_with_draw([])),
            "method 'mine' returns 0 tensors from the function of run.draw",
        ),
        (user_method(end=reports), "job.report['z'] of method 'mine' is None"),
        (user_method(end=writes), UNDECLARED),
        (user_method(end=removes, setup=keeps), "job.state['x'] of method 'mine' was removed"),
        (user_method(end=uploads), "job.upload['x'] of method 'mine' is not declared"),
        (user_method(end=uploads_without_name), "job.upload['x'] is not declared"),
        (user_method(setup=declares_upload), "job.upload['x'] is missing"),
        (
            user_method(end=uploads, setup=declares_upload),
            "job.upload['x'] of method 'mine' has 2 floats",
        ),
    ],
)
def test_error_of_an_invalid_client_hook_has_one_line(method: Method, sentence: str) -> None:
    (line,) = stopped_by(method)
    assert line.startswith(
        "6 of 6 clients failed in round 1. The first failure: client 1, version 0, worker "
        "worker-0: " + sentence
    )
    assert "tolerate" not in line, "nobody would be left"


@pytest.mark.parametrize(
    ("hook", "sentence"), [(raises, "ValueError: my bug"), (reads, UNDECLARED)]
)
def test_error_of_a_failing_hook_shows_lines_of_the_users_code(hook: Any, sentence: str) -> None:
    first, *trace = stopped_by(user_method(end=hook))
    assert first.startswith(
        "6 of 6 clients failed in round 1. The first failure: method 'mine', client 1, version 0, "
        "worker worker-0: "
    )
    assert sentence in first
    assert trace[0] == "Traceback (most recent call last):"
    assert [line for line in trace if line.startswith("  File ")] == [trace[1]]
    assert f"in {hook.__name__}" in trace[1]


# --- the server -----------------------------------------------------------------------------------
WHERE = "on the server in round 1: "


def reports_text(self: Any, aggregation: Any, server: Any) -> None:
    server.report["z"] = "much"


@pytest.mark.parametrize(
    ("hooks", "sentence"),
    [
        (
            {"combine": lambda *given: None},
            "method 'mine' returns nothing from combine",
        ),
        (
            {"combine": lambda *given: torch.zeros(3)},
            "method 'mine' returns a tensor of shape [3] from combine",
        ),
        (
            {"step": lambda *given: None},
            "method 'mine' returns nothing from step",
        ),
        (
            {"weigh": lambda *given: None},
            "method 'mine' returns nothing from weigh",
        ),
        (
            {"weigh": lambda s, a, server: a.with_weights([1.0])},
            "method 'mine' returns 1 weights from weigh for 6 updates",
        ),
        (
            {"weigh": lambda s, a, server: a.with_weights(None)},
            "method 'mine' returns no weights from weigh for 6 updates",
        ),
        (
            {"weigh": lambda s, a, server: a.with_weights([math.nan] * 6)},
            "method 'mine' returns the weight nan from weigh for client",
        ),
        ({"absorb": reports_text}, "server.report['z'] of method 'mine' is a value of type str"),
    ],
)
def test_error_of_an_invalid_server_hook_is_one_line(
    hooks: Mapping[str, Any], sentence: str
) -> None:
    (line,) = stopped_by(user_method(**hooks))
    assert line.startswith(WHERE) and sentence in line
    assert line.endswith("Continue the run with resume=latest.")


def sends_a_number(self: Any, run: Setup) -> None:
    run.send("x", lambda server: 1.0, 1)  # type: ignore[arg-type,return-value]


def scores_nothing(self: Any, run: Setup) -> None:
    run.scores(lambda server: None)  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize(
    ("setup", "sentence"),
    [
        (sends_a_number, r"a value of type float from the function of run\.send"),
        (scores_nothing, "nothing from scores"),
    ],
)
def test_hook_that_returns_no_tensor_raises_hook_error(setup: Any, sentence: str) -> None:
    with pytest.raises(HookError, match=f"method 'mine' returns {sentence}"):
        run(run_spec(user_method(setup=setup)), ALL, rounds=1)


@pytest.mark.parametrize("error", [ZeroDivisionError, ValueError, SystemExit])
@pytest.mark.parametrize("hook", ["weigh", "step", "absorb"])
def test_error_of_a_failing_server_hook_contains_the_name_of_the_federated_method(
    hook: str, error: type[BaseException]
) -> None:
    with pytest.raises(RunStoppedError) as stopped:
        run(run_spec(Server(hook, error)), ALL, rounds=4)
    first, *rest = str(stopped.value).splitlines()
    assert first.startswith(
        f"method 'server' failed on the server in round 3: {error.__name__}: on purpose"
    )
    assert any(f"in {hook}" in line for line in rest)


def test_infinite_vector_never_becomes_a_version(tmp_path: Path) -> None:
    coordinator = coordinate(run_spec(Weightless()), ALL, rounds=2, folder=str(tmp_path))
    with pytest.raises(
        RunStoppedError, match=r"not finite after round 1 \(all weights of clients \d, .* are 0\)"
    ) as stopped:
        run_to_end(coordinator)
    assert "faults.norm" not in str(stopped.value), "no update is too long"
    assert coordinator.server.version == 0 and coordinator.server.vector.isfinite().all()
    assert not (tmp_path / "model.safetensors").exists()


class Exploding(Method):
    """A method that multiplies the server's step by 3e38 after the first round.

    float32 then overflows.
    """

    name = "exploding"

    def step(self, direction: Tensor, aggregation: Aggregation, server: ServerView) -> Tensor:
        return direction * (3e38 if server.version else 1.0)


def test_error_of_a_diverged_server_lists_clients_with_largest_update_norms() -> None:
    hits = frozenset({(2, 1), (4, 1)})
    with pytest.raises(
        RunStoppedError,
        match=r"after round 2 \(the longest updates are \S+ of client [24], \S+ of client [24]",
    ):
        run(run_spec(Long(hits, 1e5), Absent(), Exploding()), ALL, rounds=3)


@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize(
    ("length", "norm", "sentence"),
    [(1e5, 1e3, "faults.norm=1000"), (1e20, None, "nan or infinite")],
)
def test_client_whose_update_exceeds_the_norm_limit_counts_as_failed(
    single: bool, length: float, norm: float | None, sentence: str
) -> None:
    methods = [Long(length=length), *([Absent()] if single else [])]
    result = run(run_spec(*methods), ALL, rounds=4, faults=Faults(0.5, norm=norm))
    without = run(run_spec(Absent()), ALL, rounds=4)
    assert where(result.failures) == HITS and sentence in result.failures[0].error
    assert result.finished.model_sha256 == without.finished.model_sha256
