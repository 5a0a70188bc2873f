"""Test the results, traffic and virtual time of runs with compression.

Some of these runs also have a method, such as SCAFFOLD.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import (
    BUFFER,
    NORMED_MLP,
    ROUNDS,
    FinishedRun,
    Spy,
    coordinate,
    run,
    run_spec,
    run_to_end,
)

from raysim.api.compression import Compressor
from raysim.api.method import Method
from raysim.compressors.lowrank import PowerSGD
from raysim.compressors.quantized import QSGD, TernGrad
from raysim.compressors.rounded import Float16, Fp8, Int8
from raysim.compressors.signs import SignSGD
from raysim.compressors.sparse import RandK, TopK
from raysim.conformance import checks
from raysim.methods.centralized import Centralized
from raysim.methods.dp_fedavg import DPFedAvg
from raysim.methods.fedbuff import FedBuff
from raysim.methods.fedopt import FedAvgM
from raysim.methods.scaffold import Scaffold
from raysim.simulation.fleet import Lognormal
from raysim.simulation.schedule import Schedule, Synchronous
from raysim.simulation.selection_rules import PowerOfChoice
from raysim.simulation.topologies import Gossip, Hierarchical
from raysim.training.run_spec import declare_run

# The others take part in the same checks among the slow tests.
QUICK = [TopK(0.1, "both", "ef21"), SignSGD(), PowerSGD(2, "both", "ef14")]
SLOW = [
    RandK(0.3, "up", "ef14"), QSGD(7, 64, "both"), TernGrad(2.5, "down"), Float16(), Fp8(64),
    SignSGD(None, "up", "ef14"), Int8(64, "both", "ef14"),
]  # fmt: skip
CONFORMING = [*QUICK, *(pytest.param(each, marks=pytest.mark.slow) for each in SLOW)]


@pytest.mark.parametrize("compressor", CONFORMING, ids=str)
def test_every_compressor_passes_all_public_checks(compressor: Compressor) -> None:
    for check in checks(compressor):
        # The sign of an entry near 0 depends on the last bit, which recorded steps may change.
        if not (isinstance(compressor, SignSGD) and "recorded" in str(check)):
            check()


def first_step(*methods: Method, **settings: Any) -> tuple[FinishedRun, np.ndarray, list[Any]]:
    """Run one round of four clients; return the run, the model's change and the updates.

    The model's change is the shared vector after the round minus the initial one, [d].
    """
    spec = run_spec(*methods)
    spy = Spy(spec)
    finished = run_to_end(coordinate(spec, Synchronous(4), runtime=spy, rounds=1, **settings))
    start = finished.coordinator.initial.shared.numpy()
    step = finished.coordinator.server.vector.numpy() - start
    return finished, step, spy.updates


def plain_deltas() -> tuple[np.ndarray, np.ndarray]:
    """Return the deltas of a round without compression, [clients, d], and their weights."""

    class Reader(Method):
        name = "reader"

        def setup(self, run: Any) -> None:
            run.read_updates()

    _, _, updates = first_step(Reader())
    deltas = np.stack([update.delta for update in updates if update.delta is not None])
    return deltas, np.array([update.samples for update in updates], float)


def decoded(compressor: Compressor, values: np.ndarray) -> np.ndarray:
    layout = declare_run(run_spec()).layout
    received = torch.from_numpy(values.copy())
    compressor.send(received, {"kept": compressor.initial(layout)}, layout, 1)
    return received.numpy()


class TestValues:
    @pytest.mark.parametrize("compressor", [TopK(0.1), Int8(64), PowerSGD(1)], ids=str)
    def test_server_averages_the_decoded_messages_of_clients(self, compressor: Compressor) -> None:
        deltas, weights = plain_deltas()
        rows = np.stack([decoded(compressor, delta) for delta in deltas])
        expected = weights @ rows / weights.sum()
        _, step, _ = first_step(compressor)
        np.testing.assert_allclose(step, expected, atol=2e-7)
        assert np.abs(step - weights @ deltas / weights.sum()).max() > 1e-5

    def test_sum_of_decoded_updates_is_bit_identical_on_workers_and_on_the_server(self) -> None:
        summed, _, updates = first_step(TopK(0.1))
        assert all(update.delta is None for update in updates)
        single, _, updates = first_step(TopK(0.1), Spectator())
        assert all(update.delta is not None for update in updates)
        assert summed.bits[0] == single.bits[0]

    def test_signsgd_in_both_directions_is_a_majority_vote(self) -> None:
        deltas, _ = plain_deltas()
        votes = np.where(deltas < 0, -1, 1).sum(0)
        _, step, _ = first_step(SignSGD(0.01), weighting="uniform")
        clear = votes != 0
        np.testing.assert_allclose(step[clear], 0.01 * np.sign(votes[clear]), rtol=1e-3)
        assert clear.any()

    def test_server_sends_clients_the_compressed_change_of_the_model(self) -> None:
        _, exact, _ = first_step()
        _, step, _ = first_step(TopK(0.1, "down"))
        np.testing.assert_allclose(step, decoded(TopK(0.1), exact), atol=2e-7)

    def test_server_state_has_the_compression_error_of_the_model_change(self) -> None:
        first, step, _ = first_step(TopK(0.1, "down", "ef14"))
        _, exact, _ = first_step()
        memory = first.coordinator.server.state["topk.memory"].numpy()
        np.testing.assert_allclose(memory, exact - step, atol=2e-7)

    def test_client_state_has_the_compression_error_of_the_last_upload(self) -> None:
        deltas, _ = plain_deltas()
        finished, _, updates = first_step(TopK(0.1, "up", "ef14"))
        for update, delta in zip(updates, deltas, strict=True):
            memory = finished.state(update.client).methods["topk.memory"]
            np.testing.assert_allclose(memory, delta - decoded(TopK(0.1), delta), atol=1e-8)

    def test_batchnorm_statistics_are_not_compressed(self) -> None:
        spec = run_spec(TopK(0.01), model=NORMED_MLP)
        plain = run(run_spec(model=NORMED_MLP), Synchronous(4), rounds=1)
        compressed = run(spec, Synchronous(4), rounds=1)
        trained = compressed.coordinator.layout.trained
        left, right = (each.coordinator.server.vector[trained:] for each in (plain, compressed))
        assert torch.equal(left, right)
        assert len(left) > 0


class Spectator(Method):
    """A method that sees single updates and changes nothing."""

    name = "spectator"

    def setup(self, run: Any) -> None:
        run.read_updates()

    def absorb(self, aggregation: Any, server: Any) -> None:
        return None


class TestTraffic:
    def test_upload_traffic_is_the_number_of_32_bit_words_of_each_message(self) -> None:
        compressor = TopK(0.05)
        finished = run(run_spec(compressor), Synchronous(4))
        layout = finished.coordinator.layout
        words = compressor.words(layout) + layout.shared - layout.trained
        assert finished.rows[-1]["floats_up"] == 3 * 4 * words
        assert finished.rows[-1]["floats_down"] == 3 * 4 * layout.shared

    def test_client_downloads_all_server_steps_made_since_its_last_job(self) -> None:
        compressor = TopK(0.05, "down")
        finished = run(run_spec(compressor), Synchronous(4), rounds=6)
        layout = finished.coordinator.layout
        words, last, total = compressor.words(layout), {}, 0
        for aggregation in finished.aggregations:
            for job in aggregation.dispatched:
                missed = job.version - last.get(job.client, -math.inf)
                floats = min(layout.trained, missed * words) + layout.shared - layout.trained
                assert job.down == floats
                last[job.client] = job.version
                total += floats
        assert finished.rows[-1]["floats_down"] == total
        assert total < 6 * 4 * layout.shared

    def test_smaller_messages_shorten_the_virtual_time(self) -> None:
        slow = Lognormal(bandwidth_up=1e3, bandwidth_sigma=0.0, sigma=0.0, dropout=0.0)
        plain = run(run_spec(), Synchronous(4), slow)
        compressed = run(run_spec(TopK(0.05)), Synchronous(4), slow)
        layout = plain.coordinator.layout
        saved = (layout.trained - TopK(0.05).words(layout)) * 4 / 1e3
        seconds = [float(each.rows[-1]["virtual_seconds"] or 0) for each in (plain, compressed)]
        assert seconds[0] - seconds[1] == pytest.approx(3 * saved)


class TestOtherParts:
    @pytest.mark.parametrize(
        ("methods", "schedule"),
        [
            ([Scaffold(), TopK(0.1, "both", "ef21")], ROUNDS),
            ([FedBuff(), QSGD(7, 64, "both", "ef14")], BUFFER),
            ([DPFedAvg(noise=0.0, clip=0.1), TopK(0.1)], Synchronous(4)),
            ([FedAvgM(), PowerSGD(1, "down")], ROUNDS),
        ],
        ids=str,
    )
    def test_methods_train_without_failures_if_updates_are_compressed(
        self, methods: list[Method], schedule: Schedule
    ) -> None:
        finished = run(run_spec(*methods), schedule)
        assert not finished.failures
        assert torch.isfinite(finished.coordinator.server.vector).all()

    def test_dp_fedavg_clips_decoded_updates(self) -> None:
        deltas, _ = plain_deltas()
        rows = [decoded(TopK(0.1), delta) for delta in deltas]
        clipped = [row * min(1, 0.05 / np.linalg.norm(row)) for row in rows]
        method = DPFedAvg(noise=0.0, clip=0.05, quantile=None)
        _, step, _ = first_step(method, TopK(0.1))
        np.testing.assert_allclose(step, np.mean(clipped, axis=0), atol=2e-7)

    def test_scaffold_sends_uncompressed_control_variates(self) -> None:
        finished = run(run_spec(Scaffold(), TopK(0.1)), Synchronous(4))
        layout = finished.coordinator.layout
        words = TopK(0.1).words(layout) + layout.shared - layout.trained
        assert finished.rows[-1]["floats_up"] == 3 * 4 * (words + layout.trained)

    def test_compression_with_two_lanes_stores_a_compression_error_per_client(self) -> None:
        spec = run_spec(TopK(0.1, "up", "ef21"), lanes=2)
        finished = run(spec, Synchronous(4))
        assert not finished.failures
        update = finished.state(int(np.flatnonzero(finished.coordinator.planner.accepted)[0]))
        assert np.count_nonzero(update.methods["topk.memory"])

    @pytest.mark.parametrize(
        ("methods", "settings", "key"),
        [
            ([Centralized(), TopK()], {}, "topk"),
            ([TopK(), RandK()], {}, "compressor"),
            ([TopK()], {"topology": Gossip()}, "compression"),
            ([TopK(direction="down")], {"topology": Hierarchical(edges=2)}, "compression"),
            ([TopK(direction="down")], {"selection": PowerOfChoice(loss="measured")}, "selection"),
        ],
        ids=str,
    )
    def test_impossible_combination_with_compression_is_refused(
        self, methods: list[Method], settings: dict[str, Any], key: str
    ) -> None:
        with pytest.raises(ValueError, match=key):
            coordinate(run_spec(*methods, **settings), Synchronous(4))


class Forgetful(Float16):
    """A compressor that keeps a tensor, but has none for a sender's first message."""

    def keep(self, message: np.ndarray, layout: Any) -> torch.Tensor:
        return torch.ones(1)


def test_compressor_that_overrides_method_keep_but_not_method_initial_is_refused() -> None:
    with pytest.raises(TypeError, match=r"^Forgetful .*initial"):
        declare_run(run_spec(Forgetful()))
