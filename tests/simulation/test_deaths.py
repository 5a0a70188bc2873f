"""Test that a dead worker is replaced, that its calls run again, and that bits are the same."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from tiny_runs import (
    LOCAL,
    MLP,
    NORMED_MLP,
    FinishedRun,
    coordinate,
    run,
    run_spec,
    run_to_end,
    tiny_data,
    with_settings,
)
from torch import Tensor

from raysim.api.declarations import Evaluation, Local
from raysim.api.local_job import LocalJob
from raysim.api.method import Method
from raysim.api.server_view import Aggregation, ServerView
from raysim.methods.fedbn import FedBN
from raysim.methods.fedbss import FedBSS
from raysim.methods.fedmix import FedMix
from raysim.methods.scaffold import Scaffold
from raysim.methods.vhl import Vhl
from raysim.primitives.memory import MemoryState
from raysim.runtime.placement import RayOptions
from raysim.simulation import calls as worker_calls
from raysim.simulation.calls import MAX_CALL_DEATHS, MAX_DEATHS
from raysim.simulation.events import (
    Finished,
    Notice,
    ProcessLostError,
    Round,
    RunStoppedError,
    Waiting,
)
from raysim.simulation.fleet import Lognormal
from raysim.simulation.runtime import START_TIMEOUT_S, LostNode, Runtime, WorkerDiedError
from raysim.simulation.schedule import Buffered, Synchronous
from raysim.training.resident import StateHandle
from raysim.training.run_spec import Faults, RunSpec
from raysim.training.worker import Worker
from raysim.vectors.tree_sum import add_up

SCHEDULES = {"rounds": Synchronous(3), "buffer": Buffered(concurrency=4, size=2)}
METHODS: dict[str, Callable[[], list[Method]]] = {
    "sums on workers": lambda: [],
    # They contribute before round 0, and keep what they receive once.
    "images for all": lambda: [
        Vhl(virtual_batch=4, virtual=20),
        FedMix(means=4, samples_per_mean=3),
    ],
    "upload and state": lambda: [Scaffold()],
    "state and personal models": lambda: [FedBN(), FedBSS(warmup_rounds=1, refresh=2)],
}
# Deaths meet every method under both schedules; other losses replace workers by the same code.
PAIRS = [*zip(METHODS, [*SCHEDULES, *SCHEDULES], strict=True)]
ASKED: dict[str, Any] = {"rounds": 6, "evaluate": Evaluation(every=1)}


def study(name: str) -> RunSpec:
    return run_spec(
        *METHODS[name](),
        model=NORMED_MLP,
        local=Local(lr=0.05, batch=12),
        data=tiny_data(clients=6, samples=90),
    )


# --- workers in this process that die on command --------------------------------------------------
class Ref:
    """A reference to a value on a worker.

    lost: True if the value is lost before the coordinator reads it.
    """

    def __init__(self, value: Any, lost: bool):
        self.value, self.lost = value, lost


class Mortal:
    """Stand-ins for workers, some of which die.

    If a worker dies, the coordinator loses the values that it has not yet read from this worker.

    deaths: the numbers, from 1, of the calls at which the called worker dies.
    """

    is_in_process = False

    def __init__(self, study: RunSpec, workers: int, deaths: set[int]):
        self.study, self.workers, self.deaths = study, workers, deaths
        self.nodes, self.combine_from = (0,) * workers, 0.0
        self.members: list[Worker | None] = [
            Worker(study, f"worker-{index}") for index in range(workers)
        ]
        self.waiting: list[list[list[Ref]]] = [
            [] for _ in range(workers)
        ]  # by worker: refs of calls
        self.calls = self.revived = self.ended = 0

    def node_name(self, worker: int) -> str:
        return f"node-{worker} (10.0.0.{worker})"

    def put(self, value: object) -> object:
        return value

    def call(self, worker: int, method: str, *args: object, returns: int = 1) -> list[Ref]:
        self.calls += 1
        if self.calls in self.deaths:
            self.members[worker] = None
            for refs in self.waiting[worker]:
                for ref in refs:
                    ref.lost = True
        finished_run: list[Any] = [None] * returns
        if (member := self.members[worker]) is not None:
            assert not any(isinstance(arg, Ref) and arg.lost for arg in args), (
                "what is lost is not sent"
            )
            own = [arg.value if isinstance(arg, Ref) else arg for arg in args]
            result = getattr(member, method)(*own)
            finished_run = [result] if returns == 1 else list(result)
        arrived = [
            value.read() if isinstance(value, StateHandle) else value for value in finished_run
        ]
        refs = [Ref(value, member is None) for value in arrived]
        self.waiting[worker].append(refs)
        return refs

    def add_up(self, node: int, parts: Any, refs: Any) -> Ref:
        if any(ref.lost for ref in refs):
            return Ref(None, lost=True)
        return Ref(add_up(parts, *(ref.value for ref in refs)), lost=False)

    def get(self, ref: Any) -> Any:
        if not isinstance(ref, Ref):
            return ref
        if ref.lost:
            raise WorkerDiedError("it was told to")
        for calls in self.waiting:
            calls[:] = [refs for refs in calls if ref not in refs]
        return ref.value

    def ready(self, refs: Any, seconds: float) -> int | None:
        return len(refs) - 1

    def revive(self, worker: int) -> None:
        self.revived += 1
        self.members[worker] = Worker(self.study, f"worker-{worker}")

    def silent_node_timeout(self, worker: int) -> float | None:
        return None

    def stacks(self, worker: int) -> str:
        return ""

    def find_lost_workers(self) -> dict[int, LostNode]:
        return {}

    def release(self, worker: int, may_return: bool = True) -> None:
        self.ended += not may_return

    def take_new_workers(self) -> list[int]:
        return []

    def explain_death(self, worker: int, death: WorkerDiedError) -> str:
        return str(death)

    def take_notices(self) -> list[str]:
        return []


class Vanishing(Mortal):
    """Stand-ins for workers, one of which loses its node and returns two aggregations later.

    When it returns, an additional worker joins.

    number: the number of the call, from 1, at which the called worker loses its node. The calls of
    all workers are counted together.
    is_reachable: True: values on the lost node can still be read.
    """

    def __init__(self, study: RunSpec, workers: int, number: int, is_reachable: bool):
        super().__init__(study, workers, set())
        self.number, self.is_reachable = number, is_reachable
        self.lost: dict[int, LostNode] = {}
        self.released: set[int] = set()
        self.rounds_until_return = 2

    def call(self, worker: int, method: str, *args: object, returns: int = 1) -> list[Ref]:
        assert worker not in self.released or method == "release", method
        if self.calls + 1 == self.number:
            self.lost[worker] = LostNode("vanished", self.is_reachable)
            for refs in self.waiting[worker]:
                for ref in refs:
                    ref.lost = not self.is_reachable
        refs = super().call(worker, method, *args, returns=returns)
        if worker in self.lost and not self.is_reachable:
            for ref in refs:
                ref.lost = True
        return refs

    def ready(self, refs: Any, seconds: float) -> int | None:
        return next((place for place, ref in enumerate(refs) if not ref.lost), None)

    def find_lost_workers(self) -> dict[int, LostNode]:
        return {w: node for w, node in self.lost.items() if w not in self.released}

    def release(self, worker: int, may_return: bool = True) -> None:
        self.released.add(worker)

    def take_new_workers(self) -> list[int]:
        if not self.released:
            return []
        self.rounds_until_return -= 1
        if self.rounds_until_return:
            return []
        back, self.released, self.lost = sorted(self.released), set(), {}
        for worker in back:
            self.members[worker] = Worker(self.study, f"worker-{worker}")
        self.members.append(Worker(self.study, f"worker-{self.workers}"))
        self.waiting.append([])
        self.workers += 1
        self.nodes = (0,) * self.workers
        return [*back, self.workers - 1]


class LateNews(Vanishing):
    """Stand-ins for workers. One worker loses its node, and raysim notices the loss later.

    raysim notices the loss when it tries to restart the worker and fails.
    """

    is_known = False

    def ready(self, refs: Any, seconds: float) -> int | None:
        return len(refs) - 1

    def find_lost_workers(self) -> dict[int, LostNode]:
        return super().find_lost_workers() if self.is_known else {}

    def revive(self, worker: int) -> None:
        self.is_known = True
        raise WorkerDiedError("its node is lost")


class Stopped(Mortal):
    """Workers that stop answering but stay alive.

    deaths: call numbers. All calls are numbered from 1 in the order in which the workers receive
    them. A worker that receives one of these calls never answers again.
    """

    now = 0.0

    def ready(self, refs: Any, seconds: float) -> int | None:
        place = next((place for place, ref in enumerate(refs) if not ref.lost), None)
        Stopped.now += seconds if place is None else 0.01
        return place


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give raysim another clock to measure how long a worker does not answer.

    The new clock is `Stopped.now`. It advances by the whole waiting time if no worker answers, and
    by 0.01 s if a worker answers.
    """
    monkeypatch.setattr(worker_calls, "time", SimpleNamespace(monotonic=lambda: Stopped.now))


@pytest.mark.parametrize(("name", "schedule"), PAIRS)
def test_run_has_the_same_bits_if_a_silent_worker_is_replaced(
    name: str, schedule: str, clock: None
) -> None:
    (whole, calls), revived = calls_of(name, schedule), []
    for number in range(1, calls + 1, 9):
        runtime = Stopped(study(name), 2, {number})
        finished_run = run_to_end(
            coordinate(study(name), SCHEDULES[schedule], runtime=runtime, **ASKED)
        )
        assert (finished_run.bits, finished_run.history) == (whole.bits, whole.history), number
        revived.append(runtime.revived)
    assert set(revived) <= {0, 1} and sum(revived) >= len(revived) - 1, (
        "the last call may be one that nobody waits for"
    )


@pytest.mark.parametrize("is_reachable", [False, True])
@pytest.mark.parametrize(("name", "schedule"), PAIRS)
def test_loss_of_a_node_changes_no_bits(name: str, schedule: str, is_reachable: bool) -> None:
    (whole, calls), texts = calls_of(name, schedule), []
    ended = 0
    for number in range(2, calls + 1, 13):
        runtime = Vanishing(study(name), 2, number, is_reachable)
        events: list[Any] = []
        try:
            for event in coordinate(
                study(name), SCHEDULES[schedule], runtime=runtime, **ASKED
            ).run():
                events.append(event)
        except ProcessLostError as error:  # the run continues from a checkpoint
            assert not is_reachable and "state" in name and "client states" in str(error)
            ended += 1
            continue
        assert (events[-1].model_sha256, events[-1].state_sha256) == whole.bits, number
        texts += [event.text for event in events if isinstance(event, Notice)]
    assert any("leaves: node-" in text and "1 worker is left" in text for text in texts)
    assert "worker 2 joins on node-2 (10.0.0.2)" in texts
    assert (ended > 0) == (not is_reachable and "state" in name)


def test_worker_of_a_lost_node_counts_as_one_worker_death() -> None:
    spec = study("sums on workers")
    runtime = LateNews(spec, 2, 9, is_reachable=False)
    finished_run = run_to_end(coordinate(spec, SCHEDULES["rounds"], runtime=runtime, **ASKED))
    assert runtime.is_known
    assert sum(int(row["worker_deaths"] or 0) for row in finished_run.rows) == 1


def test_loss_of_the_last_node_ends_the_run() -> None:
    spec = study("sums on workers")
    with pytest.raises(ProcessLostError, match="no other worker"):
        run_to_end(
            coordinate(spec, SCHEDULES["rounds"], runtime=Vanishing(spec, 1, 9, False), **ASKED)
        )


def test_event_of_a_silent_worker_contains_the_worker_and_its_node(clock: None) -> None:
    asked = {"rounds": 4, "faults": Faults(timeout=35.0), "evaluate": Evaluation(every=10**9)}
    spec, in_hand = study("sums on workers"), set()
    for number in range(5, 9):
        runtime = Stopped(spec, 2, {number})
        events = list(coordinate(spec, SCHEDULES["rounds"], runtime=runtime, **asked).run())
        told = [event for event in events if isinstance(event, Waiting)]
        assert [round(event.seconds) for event in told] == [10, 20, 30] and runtime.revived == 1
        assert len({(event.worker, event.clients) for event in told}) == 1 and told[0].worker in (
            0,
            1,
        )
        in_hand.add(told[0].clients)
        node = f"node-{told[0].worker} (10.0.0.{told[0].worker})"
        assert {(event.node, event.replaced_after) for event in told} == {(node, 35.0)}
    assert len(in_hand) > 2 and set().union(*in_hand) <= set(range(6))


def test_worker_may_be_silent_for_longer_while_it_starts(clock: None) -> None:
    runtime = Stopped(study("sums on workers"), 2, {1})
    asked = ASKED | {"faults": Faults(timeout=35.0)}
    events = list(
        coordinate(study("sums on workers"), SCHEDULES["rounds"], runtime=runtime, **asked).run()
    )
    assert max(event.seconds for event in events if isinstance(event, Waiting)) > START_TIMEOUT_S


def test_worker_that_never_answers_stops_the_run(clock: None) -> None:
    runtime: Runtime = Stopped(study("upload and state"), 2, set(range(9, 99)))
    with pytest.raises(
        RunStoppedError, match=r"^runtime.workers: .*\(no answer for faults.timeout=3600 s\)"
    ):
        run_to_end(
            coordinate(study("upload and state"), SCHEDULES["rounds"], runtime=runtime, **ASKED)
        )


def calls_of(name: str, schedule: str) -> tuple[FinishedRun, int]:
    runtime = Mortal(study(name), 2, set())
    finished_run = run_to_end(
        coordinate(study(name), SCHEDULES[schedule], runtime=runtime, **ASKED)
    )
    assert runtime.calls > 12
    return finished_run, runtime.calls


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", METHODS)
def test_death_of_a_worker_at_any_call_changes_no_bits(name: str, schedule: str) -> None:
    whole, calls = calls_of(name, schedule)
    assert whole.bits == run(study(name), SCHEDULES[schedule], **ASKED).bits
    for index, deaths in enumerate(
        [*({number} for number in range(1, calls + 1, 7)), set(range(2, calls, 11))]
    ):
        runtime = Mortal(study(name), 2, deaths)
        asked = ASKED | {"state_budget": (float("inf"), 0.0)[index % 2]}
        finished_run = run_to_end(
            coordinate(study(name), SCHEDULES[schedule], runtime=runtime, **asked)
        )
        assert (finished_run.bits, finished_run.history) == (whole.bits, whole.history), deaths
        assert not finished_run.failures
        late = sum(int(row["worker_deaths"] or 0) for row in finished_run.rows)
        assert runtime.revived + runtime.ended - late in (0, 1), (
            "the last row is written before the last evaluation"
        )


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_jobs_are_trained_again_if_the_sum_of_updates_is_lost(schedule: str) -> None:
    class Unreachable(Mortal):
        """Workers that lose the sums of updates from every second call of `train_apart`."""

        separate = 0  # sums

        def call(self, worker: int, method: str, *args: object, returns: int = 1) -> list[Ref]:
            refs = super().call(worker, method, *args, returns=returns)
            if method == "train_apart":
                self.separate += 1
                for ref in refs[1:]:
                    ref.lost = self.separate % 2 == 0
            return refs

    name = "sums on workers"
    whole = run(study(name), SCHEDULES[schedule], **ASKED)
    runtime = Unreachable(study(name), 4, {11})
    runtime.nodes = (0, 1, 1, 1)
    finished_run = run_to_end(
        coordinate(study(name), SCHEDULES[schedule], runtime=runtime, **ASKED)
    )
    assert (finished_run.bits, finished_run.history) == (whole.bits, whole.history)
    assert runtime.separate > 2


def test_repeated_deaths_on_a_node_reduce_its_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = study("upload and state")
    whole = run(spec, SCHEDULES["buffer"], **ASKED)

    def notices(window_s: float) -> list[str]:
        monkeypatch.setattr(worker_calls, "DEATH_WINDOW_S", window_s)
        runtime = Mortal(spec, 3, {8, 14, 20, 26})
        events = list(coordinate(spec, SCHEDULES["buffer"], runtime=runtime, **ASKED).run())
        last = events[-1]
        assert isinstance(last, Finished) and (last.model_sha256, last.state_sha256) == whole.bits
        texts = [event.text for event in events if isinstance(event, Notice)]
        replaced = [text for text in texts if "was replaced (it was told to)" in text]
        assert replaced and all("on node-" in text for text in replaced)
        return [text for text in texts if text not in replaced]

    text, *_ = notices(600.0)
    assert "is not replaced" in text and "runtime.workers=2" in text and "it was told to" in text
    assert notices(0.0) == []


class Doomed(Mortal):
    """Workers that die when they get a job of certain clients.

    is_deadly(worker, client): True if this worker dies when it gets a job of this client.
    """

    def __init__(self, study: RunSpec, workers: int, is_deadly: Callable[[int, Any], bool]):
        super().__init__(study, workers, set())
        self.is_deadly = is_deadly

    def call(self, worker: int, method: str, *args: object, returns: int = 1) -> list[Ref]:
        jobs: Any = args[0] if method == "train" else ()
        if any(self.is_deadly(worker, job.client) for job in jobs):
            self.deaths.add(self.calls + 1)
        return super().call(worker, method, *args, returns=returns)


def test_run_continues_without_a_worker_that_always_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_calls, "DEATH_WINDOW_S", 0.0)  # only deaths in a row count
    spec = study("upload and state")
    runtime = Doomed(spec, 3, lambda worker, client: worker == 1)
    events = list(coordinate(spec, SCHEDULES["rounds"], runtime=runtime, **ASKED).run())
    last = events[-1]
    assert isinstance(last, Finished)
    assert (last.model_sha256, last.state_sha256) == run(spec, SCHEDULES["rounds"], **ASKED).bits
    assert (runtime.revived, runtime.ended) == (MAX_DEATHS - 1, 1)
    texts = [event.text for event in events if isinstance(event, Notice)]
    (text,) = [text for text in texts if "is not replaced" in text]
    assert f"{MAX_DEATHS} times in a row" in text and "minutes" not in text


def test_run_stops_if_a_job_kills_every_worker_that_gets_the_job() -> None:
    spec = study("upload and state")
    runtime = Doomed(spec, 4, lambda worker, client: client == 2)
    with pytest.raises(RunStoppedError, match=r"^runtime\.workers: .*training clients"):
        run_to_end(coordinate(spec, SCHEDULES["rounds"], runtime=runtime, **ASKED))
    assert runtime.ended == MAX_CALL_DEATHS // MAX_DEATHS  # two workers of four


def test_error_of_a_worker_death_mentions_memory_if_the_node_is_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from raysim.runtime import ray as on_ray

    monkeypatch.setattr(on_ray.ray, "wait", lambda refs, timeout: (refs, []))
    monkeypatch.setattr(on_ray.ray, "get", lambda ref: MemoryState(1, 9e9))
    runtime = on_ray.RayRuntime(1, lambda worker: MagicMock())
    death = WorkerDiedError("the actor died.")
    for kills, words in ((1, "the actor died"), (2, "which has 860 MiB, so that the kernel")):
        state = MemoryState(kills, 860 * 2**20)
        monkeypatch.setattr(runtime, "_read_memory", lambda node, state=state: state)
        assert words in runtime.explain_death(0, death)


def test_run_stops_if_each_replacement_of_a_worker_dies_at_once() -> None:
    runtime: Runtime = Mortal(study("upload and state"), 2, set(range(9, 99)))
    with pytest.raises(RunStoppedError) as stopped:
        run_to_end(
            coordinate(study("upload and state"), SCHEDULES["rounds"], runtime=runtime, **ASKED)
        )
    assert re.match(
        r"runtime\.workers: worker [01] .*\(it was told to\).*resume=latest", str(stopped.value)
    )


# --- actors ---------------------------------------------------------------------------------------
class Deadly(Method):
    """A method that sends signals to the worker's process at the end of client 2's jobs.

    folder: a folder in which each process that gets a signal leaves a file.
    signals: the numbers of the signals, one for each job that ends. A repeated job counts again.
    """

    name = "deadly"
    paper = "a test"

    def __init__(self, folder: str, *signals: int):
        self.folder, self.signals = folder, signals

    def end(self, job: LocalJob) -> None:
        done = len(list(Path(self.folder).iterdir()))
        if job.client == 2 and done < len(self.signals):
            Path(self.folder, str(done)).touch()
            os.kill(os.getpid(), self.signals[done])


def test_killed_or_hanging_actor_is_replaced_with_the_same_bits(
    ray_session: None, tmp_path: Path
) -> None:
    """Kill a worker, and stop the process that trains the same job again."""
    from raysim.runtime import ray as on_ray

    def of(*signals: int) -> RunSpec:
        method = Deadly(str(tmp_path), *signals)
        return run_spec(Scaffold(), method, model=MLP, local=LOCAL, data=tiny_data(clients=6))

    whole = run(of(), SCHEDULES["buffer"], **ASKED)
    asked = ASKED | {"faults": Faults(timeout=15.0)}
    study = with_settings(of(signal.SIGKILL, signal.SIGSTOP), **asked)
    size = on_ray.plan_workers(RayOptions(workers=2), study, 3, lambda _: None)
    events = list(on_ray.run(study, SCHEDULES["buffer"], Lognormal(), size, say=lambda _: None))
    assert len(list(tmp_path.iterdir())) == 2
    last = events[-1]
    assert isinstance(last, Finished) and (last.model_sha256, last.state_sha256) == whole.bits
    rows = [event.row for event in events if isinstance(event, Round)]
    assert sum(int(row["worker_deaths"] or 0) for row in rows) == 2
    assert [row["accuracy"] for row in rows] == [row["accuracy"] for row in whole.rows]
    waits = [event for event in events if isinstance(event, Waiting)]
    assert waits and waits[0].stacks == ""


def test_call_stacks_of_a_hanging_worker_are_read(ray_session: None) -> None:
    from raysim.runtime import ray as on_ray

    study = run_spec(model=MLP, local=LOCAL, data=tiny_data(clients=6))
    runtime = on_ray.start_workers(study, 1)
    runtime.get(runtime.call(0, "ready")[0])
    source = on_ray.ray.get(runtime.actors[0].stack_source.remote())
    os.kill(source.process, signal.SIGSTOP)
    while not (stacks := runtime.stacks(0)):  # a process that reads them starts first
        time.sleep(0.1)
    runtime.stop()
    assert "T (stopped)" in stacks


def test_worker_died_error_is_raised_if_a_new_worker_and_its_node_are_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The replacement dies before it reports its identity, and the error names the lost node."""
    from raysim.runtime import ray as on_ray

    identity_of_actor, report = MagicMock(), MagicMock()

    def wait(refs: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        return (refs, []) if refs == [identity_of_actor] else ([], refs)

    def get(ref: Any, timeout: float | None = None) -> Any:
        raise on_ray.ray.exceptions.RayActorError

    for name, instead in {"wait": wait, "get": get, "kill": lambda actor: None}.items():
        monkeypatch.setattr(on_ray.ray, name, instead)
    actor = MagicMock()
    actor.identity.remote.return_value = identity_of_actor
    runtime = on_ray.RayRuntime(
        1, lambda worker: actor, participants=MagicMock(), identify=lambda worker: report
    )
    monkeypatch.setattr(runtime, "find_lost_workers", lambda: {0: LostNode("is gone")})
    with pytest.raises(WorkerDiedError, match=r"node .*lost"):
        runtime.revive(0)


class Sleepy(Method):
    """A method that makes each job 0.4 s longer, as long as the file `alarm` is missing."""

    name = "sleepy"

    def __init__(self, alarm: str):
        self.alarm = alarm

    def end(self, job: LocalJob) -> None:
        if not Path(self.alarm).exists():
            time.sleep(0.4)


def test_workers_that_join_when_another_run_ends_change_no_bit(
    ray_session: None, tmp_path: Path
) -> None:
    from raysim.runtime import ray as on_ray
    from raysim.runtime.ray.node_watch import free_resources

    ray = on_ray.ray
    other = ray.util.placement_group([{"CPU": 1.0}])
    other.wait(60)
    while free_resources()[0].get("CPU") != 1:  # Ray reports it a moment later
        time.sleep(0.1)
    alarm = tmp_path / "alarm"
    study = run_spec(Sleepy(str(alarm)), model=MLP, local=LOCAL, data=tiny_data(clients=6))
    asked = ASKED | {"rounds": 30}
    study = with_settings(study, **asked)
    options, said = RayOptions(address="auto"), list[str]()

    def say(text: str) -> None:
        said.append(text)
        if "joins" in text:
            alarm.touch()

    size = on_ray.plan_workers(options, study, 3, say)
    assert size.workers == 1 and "only 1 of 2 possible workers start now" in said[0]
    events = []
    for event in on_ray.run(study, SCHEDULES["rounds"], Lognormal(), size, options, say):
        events.append(event)
        if isinstance(event, Round) and event.row["round"] == 1:
            ray.util.remove_placement_group(other)
    assert any(text.startswith("worker 1 joins") for text in said)
    last, whole = events[-1], run(study, SCHEDULES["rounds"], **asked)
    assert isinstance(last, Finished) and (last.model_sha256, last.state_sha256) == whole.bits


class Halting(Method):
    """A method that stops the process of the coordinator in the second round."""

    name = "halting"

    def step(self, direction: Tensor, aggregation: Aggregation, server: ServerView) -> Tensor:
        if server.version:
            os.kill(os.getpid(), signal.SIGSTOP)
        return direction


def test_silent_coordinator_raises_process_lost_error(
    ray_session: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from raysim.runtime import ray as on_ray

    monkeypatch.setattr("raysim.runtime.ray.driver.REPLACEMENT_TIMEOUT_S", 1)
    monkeypatch.setattr("raysim.runtime.ray.driver.SILENCE_WARNING_S", 4.0)
    study = with_settings(
        run_spec(Halting(), data=tiny_data(clients=6)), faults=Faults(timeout=10.0)
    )
    size = on_ray.plan_workers(RayOptions(workers=1), study, 3, lambda _: None)
    said: list[str] = []
    folder = tmp_path / "run"
    folder.mkdir()
    with pytest.raises(ProcessLostError, match=r"faults\.timeout=10: .* for 11 s"):
        for _ in on_ray.run(
            study, SCHEDULES["rounds"], Lognormal(), size, say=said.append, folder=str(folder)
        ):
            pass
    assert f"See what its threads execute: {folder}/stacks/coordinator.txt" in said[-1]
    assert "T (stopped)" in (folder / "stacks" / "coordinator.txt").read_text()
    assert [text.partition(". ")[0] for text in said if "no message" in text][-2:] == [
        "no message from the coordinator for 4 s",
        "no message from the coordinator for 8 s",
    ]


@pytest.mark.parametrize(("error", "words"), [("RayActorError", []), ("OutOfMemoryError", ["no"])])
def test_dead_coordinator_raises_process_lost_error(
    error: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from raysim.runtime import ray as on_ray
    from raysim.runtime.ray import driver

    def fail(*_: Any) -> Any:
        raise getattr(on_ray.ray.exceptions, error)(*words)

    monkeypatch.setattr(driver, "start_processes", MagicMock())
    monkeypatch.setattr(driver, "release_processes", lambda *_: None)
    monkeypatch.setattr(driver, "_receive", fail)
    with pytest.raises(ProcessLostError, match="a process of the run died"):
        list(on_ray.run(run_spec(), Synchronous(2), Lognormal(), MagicMock()))


@pytest.mark.parametrize("looks", [1, 3, 10])
def test_run_waits_until_ray_reports_the_lost_node(
    looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from raysim.runtime import ray as on_ray

    waited: list[float] = []

    def wait(refs: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        waited.append(timeout)
        return [], refs

    def nodes() -> list[dict[str, Any]]:
        return [
            {"NodeID": "here", "Alive": True},
            {"NodeID": "there", "Alive": len(waited) < 30 * looks},
        ]

    for name, instead in {"wait": wait, "nodes": nodes, "kill": lambda actor: None}.items():
        monkeypatch.setattr(on_ray.ray, name, instead)
    monkeypatch.setattr(on_ray.ray.util, "get_current_placement_group", lambda: "group")
    places = {"bundles_to_node_id": {0: "here", 1: "there"}}
    monkeypatch.setattr(on_ray.ray.util, "placement_group_table", lambda group: places)
    with pytest.raises(ProcessLostError, match="worker 0 died"):
        on_ray.RayRuntime(1, lambda worker: MagicMock()).revive(0)
    assert waited == [1] * 30 * looks


def test_worker_that_joined_and_died_restarts_on_the_same_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from raysim.runtime import ray as on_ray
    from raysim.runtime.ray.recruiter import WorkerPlace

    monkeypatch.setattr(on_ray.ray, "kill", lambda actor: None)
    monkeypatch.setattr(on_ray.ray, "wait", lambda refs, timeout: (refs, []))
    runtime = on_ray.RayRuntime(1, MagicMock())
    recruiter: Any = MagicMock()
    runtime._recruiter = recruiter
    place = WorkerPlace("node", MagicMock(), 0)
    runtime._start_at(-1, place, recruiter)
    runtime.revive(1)
    recruiter.restart.assert_called_once_with(1, place)
