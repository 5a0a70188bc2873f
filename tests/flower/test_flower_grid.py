import math

import numpy as np
import pytest

flwr_app = pytest.importorskip("flwr.app")

from flwr.app import Message, MetricRecord, RecordDict  # noqa: E402

from raysim.flower.client import AppRunner  # noqa: E402
from raysim.flower.clock import VirtualClock  # noqa: E402
from raysim.flower.grid import VirtualGrid  # noqa: E402
from raysim.flower.identity import set_identity  # noqa: E402
from raysim.flower.project import LoadedClientApp  # noqa: E402
from raysim.flower.worker import AppSpec, AppWorker  # noqa: E402
from raysim.runtime.inprocess import InProcess  # noqa: E402
from raysim.simulation.fleet import Fleet, Ideal, Speeds  # noqa: E402
from raysim.simulation.runtime import WorkerDiedError  # noqa: E402


class Stairs(Fleet):
    """A fleet in which client c takes 1 + c seconds for 100 samples."""

    def speeds(self, seed, clients, sample_flops):
        network = np.full(clients, np.inf)
        return Speeds(100.0 / (1 + np.arange(clients)), network, network)


def answer(message, context):
    seen = context.state["n"]["n"] if "n" in context.state else 0
    context.state["n"] = MetricRecord({"n": seen + 1})
    if "fail" in message.content:
        raise ValueError("as asked")
    numbers = {"client": context.node_config["partition-id"], "seen": seen}
    return Message(RecordDict({"m": MetricRecord(numbers)}), reply_to=message)


def make_grid(clients=4, fleet=None, workers=1, records=None):
    set_identity()
    app = LoadedClientApp(answer, False, True, True)
    spec = AppSpec(app, None, clients)
    runtime = InProcess(*(AppWorker(spec) for _ in range(workers)))
    clock = VirtualClock(fleet or Stairs(), 0, clients, 100)
    return VirtualGrid(runtime, clock, on_message=records.append if records is not None else print)


def messages(nodes, kind="train", ttl=None, **records):
    content = RecordDict({name: MetricRecord({"x": 1}) for name in records})
    return [Message(content, node, kind, ttl=ttl) for node in nodes]


def clients_of(replies):
    return [int(reply.content["m"]["client"]) for reply in replies]


def test_flower_grid_returns_replies_in_the_order_of_virtual_time():
    grid = make_grid()
    nodes = list(grid.get_node_ids())
    replies = grid.send_and_receive(messages(reversed(nodes)))
    assert clients_of(replies) == [0, 1, 2, 3]
    assert grid.clock.now == 4.0
    assert [reply.metadata.created_at for reply in replies] == [1.0, 2.0, 3.0, 4.0]
    assert [reply.metadata.src_node_id for reply in replies] == nodes


def test_flower_grid_omits_replies_that_arrive_after_the_timeout():
    records = []
    grid = make_grid(records=records)
    replies = grid.send_and_receive(messages(grid.get_node_ids()), timeout=2.5)
    assert clients_of(replies) == [0, 1]
    assert grid.clock.now == 2.5
    assert [record.fate for record in records].count("lost") == 2


def test_flower_grid_waits_until_the_next_reply_when_messages_are_pulled():
    grid = make_grid()
    first, second, *_ = grid.get_node_ids()
    ids = list(grid.push_messages(messages([second, first])))
    assert grid.clock.now == 0.0
    (reply,) = grid.pull_messages(ids)
    assert (clients_of([reply]), grid.clock.now) == ([0], 1.0)
    assert reply.metadata.reply_to_message_id == ids[1]
    later = list(grid.push_messages(messages([first])))  # at 1.0, arrives at 2.0
    assert sorted(clients_of(grid.pull_messages([*ids, *later]))) == [0, 1]
    assert grid.clock.now == 2.0
    assert list(grid.pull_messages(ids)) == []


def test_flower_grid_answers_a_lost_message_with_an_error():
    grid = make_grid(fleet=Stairs(dropout=0.5), clients=40)
    replies = list(grid.send_and_receive(messages(grid.get_node_ids())))
    lost = [reply for reply in replies if reply.has_error()]
    assert 5 < len(lost) < 35
    assert "dropped out" in lost[0].error.reason
    assert len(replies) == 40


def test_flower_grid_returns_an_error_if_a_message_exceeds_its_time_to_live():
    grid = make_grid()
    replies = grid.send_and_receive(messages(grid.get_node_ids(), ttl=2.5))
    assert [reply.has_error() for reply in replies] == [False, False, True, True]
    assert [reply.metadata.created_at for reply in replies] == [1.0, 2.0, 2.5, 2.5]


def test_flower_grid_does_not_change_the_state_of_a_client_that_fails():
    grid = make_grid()
    node = next(iter(grid.get_node_ids()))
    seen = []
    for fail in (False, True, False):
        records = {"fail": 1} if fail else {}
        (reply,) = grid.send_and_receive(messages([node], **records))
        if fail:
            assert "as asked" in reply.error.reason
            assert "test_flower_grid.py" in reply.error.reason
        else:
            seen.append(int(reply.content["m"]["seen"]))
    assert seen == [0, 1]


def test_client_in_the_flower_grid_sees_its_state_of_the_previous_message():
    grid = make_grid()
    node = next(iter(grid.get_node_ids()))
    ids = grid.push_messages([*messages([node]), *messages([node])])
    replies = list(grid.pull_messages(ids))
    assert [int(reply.content["m"]["seen"]) for reply in replies] == [0, 1]


def test_clock_of_the_flower_grid_advances_for_training_but_not_for_evaluation():
    grid = make_grid(fleet=Ideal(speed=10))
    grid.send_and_receive(messages(grid.get_node_ids(), "evaluate"))
    assert grid.clock.now == 0.0
    grid.send_and_receive(messages(grid.get_node_ids(), "train.mine"))
    assert grid.clock.now == 10.0


class LateRuntime(InProcess):
    """A runtime that executes a call of a worker only when the call's result is read.

    Worker 0 executes its first call. Each later call raises `WorkerDiedError`, until `revive` was
    called.
    """

    is_in_process = False

    def __init__(self, *members):
        super().__init__(*members)
        self.calls, self.revived = [0] * len(members), []

    def call(self, worker, method, *args):
        self.calls[worker] += 1
        return [(worker, self.calls[worker], method, args)]

    def get(self, ref):
        worker, number, method, args = ref
        if worker == 0 and number > 1 and not self.revived:
            raise WorkerDiedError("as asked")
        return getattr(self.members[worker], method)(*args)

    def revive(self, worker):
        self.revived.append(worker)


def test_flower_grid_resends_all_messages_that_a_dead_worker_received():
    grid = make_grid(clients=20, workers=2)
    grid.runtime = LateRuntime(*grid.runtime.members)
    assert clients_of(grid.send_and_receive(messages(grid.get_node_ids()))) == list(range(20))
    assert grid.runtime.revived == [0]
    assert sum(grid.runtime.calls) == 8 + 2  # a worker has two calls at a time


def test_flower_grid_refuses_a_message_to_an_unknown_node_id():
    with pytest.raises(ValueError, match="dst_node_id=99"):
        make_grid().send_and_receive(messages([99]))


def test_flower_grid_waits_for_available_clients():
    fleet = Stairs(availability="diurnal", hours=1)
    grid = make_grid(fleet=fleet, clients=2)
    counts = [len(list(grid.get_node_ids())) for _ in range(60)]
    assert max(counts) > 0
    assert grid.clock.now > 0
    assert math.isfinite(grid.clock.now)


def test_message_in_the_flower_grid_is_not_changed_after_it_is_sent():
    grid = make_grid(clients=2)
    content = RecordDict({"a": MetricRecord({"x": 1})})
    (key,) = grid.push_messages([Message(content, next(iter(grid.get_node_ids())), "train")])
    content["fail"] = MetricRecord({"x": 1})
    (reply,) = grid.pull_messages([key])
    assert reply.has_content()


def test_random_generators_are_seeded_again_for_each_message():
    import random

    import torch

    drawn = []

    def draw(message, context):
        numpy_draw = np.random.rand()  # noqa: NPY002
        drawn.append((random.random(), numpy_draw, torch.rand(()).item()))
        return Message(RecordDict(), reply_to=message)

    from raysim.flower.messages import instruction

    runner = AppRunner(LoadedClientApp(draw, False, True, True), 3, {}, seed=4)
    for client, number in ((0, 0), (1, 0), (0, 1), (0, 0)):
        runner.answer(instruction(client, RecordDict(), "train", "x"), number, RecordDict())
    assert drawn[0] == drawn[3]
    assert len({row[index] for row in drawn[:3] for index in range(3)}) == 9
