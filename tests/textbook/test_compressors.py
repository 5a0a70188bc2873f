"""Test each compressor against a computation from its paper."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from raysim.api.compression import Compressor
from raysim.compressors.bits import (
    pack,
    pack_positions,
    unpack,
    unpack_positions,
    words_of_positions,
)
from raysim.compressors.lowrank import PowerSGD
from raysim.compressors.quantized import QSGD, TernGrad
from raysim.compressors.rounded import Float16, Fp8, Int8
from raysim.compressors.signs import SignSGD
from raysim.compressors.sparse import RandK, TopK, largest_entries
from raysim.vectors.layout import Layout, plan_layout

KEY = 0x1234_5678_9ABC_DEF0 >> 1


def layout_of(*modules: nn.Module) -> Layout:
    return plan_layout({"model": nn.Sequential(*modules)}, set())


LAYOUT = layout_of(nn.Linear(30, 20), nn.Conv2d(3, 8, 3), nn.Linear(7, 3))


def values_of(layout: Layout, seed: int = 0) -> np.ndarray:
    numbers = np.random.default_rng(seed).standard_normal(layout.trained, dtype=np.float32)
    return numbers * np.float32(0.01)


def coded(
    compressor: Compressor, values: np.ndarray, layout: Layout = LAYOUT, key: int = KEY
) -> np.ndarray:
    """Return the vector that the receiver decodes, and check the size of the message.

    values: the vector of all trained parameters, which is encoded.
    key: the random number that the compressor gets for this message.
    """
    kept = compressor.initial(layout)
    message = compressor.encode(torch.from_numpy(values), layout, key, kept)
    assert message.dtype == np.uint32
    assert message.shape == (compressor.words(layout),)
    out = torch.full((layout.trained,), torch.nan)
    compressor.decode(message, layout, out)
    return out.numpy()


def mean_coded(compressor: Compressor, values: np.ndarray, draws: int = 600) -> np.ndarray:
    rows = [coded(compressor, values, key=KEY ^ (draw * 7919)) for draw in range(draws)]
    return np.mean(rows, axis=0, dtype=np.float64)


class TestBits:
    @pytest.mark.parametrize("width", [1, 2, 3, 4, 5, 7, 8, 11, 16])
    @pytest.mark.parametrize("count", [1, 31, 32, 33, 100])
    def test_packed_integers_are_unpacked_unchanged(self, width: int, count: int) -> None:
        digits = np.random.default_rng(width).integers(1 << width, size=count).astype(np.uint32)
        words = pack(digits, width)
        assert len(words) == math.ceil(count * width / 32)
        assert (unpack(words, width, count) == digits).all()

    def test_first_packed_integer_takes_the_lowest_bits(self) -> None:
        assert pack(np.array([1, 2, 3, 4], np.uint32), 3).tolist() == [1 + 2 * 8 + 3 * 64 + 4 * 512]

    @pytest.mark.parametrize(("count", "length"), [(1, 1), (1, 999), (7, 8), (50, 50), (40, 4001)])
    def test_packed_positions_are_unpacked_unchanged(self, count: int, length: int) -> None:
        generator = np.random.default_rng(count)
        places = np.sort(generator.choice(length, count, replace=False))
        words = pack_positions(places, length)
        assert len(words) == words_of_positions(count, length)
        assert (unpack_positions(words, count, length) == places).all()

    @pytest.mark.parametrize("length", [0, 1, 8, 999, 70_000])
    def test_no_positions_need_no_words(self, length: int) -> None:
        words = pack_positions(np.empty(0, np.int64), length)
        assert len(words) == words_of_positions(0, length) == 0
        assert len(unpack_positions(words, 0, length)) == 0

    def test_stored_positions_of_one_percent_of_entries_need_below_9_bits_each(self) -> None:
        assert 8 * 10_000 < 32 * words_of_positions(10_000, 1_000_000) < 9 * 10_000


class TestTopK:
    def test_topk_keeps_the_largest_entries_unchanged(self) -> None:
        values = values_of(LAYOUT)
        count = math.ceil(0.03 * len(values))
        largest = sorted(range(len(values)), key=lambda place: -abs(values[place]))[:count]
        expected = np.zeros_like(values)
        expected[largest] = values[largest]
        assert (coded(TopK(0.03), values) == expected).all()

    def test_topk_keeps_the_first_of_equal_entries(self) -> None:
        values = np.array([1, -2, 1, 1, 0, 2], np.float32)
        assert largest_entries(values, 4)[0].tolist() == [0, 1, 2, 5]

    @pytest.mark.parametrize("share", [0.0005, 0.01, 0.2])
    @pytest.mark.parametrize("kind", ["normal", "zeros", "steps", "heavy"])
    def test_topk_of_long_vectors_agrees_with_sorting(self, share: float, kind: str) -> None:
        values = np.random.default_rng(1).standard_normal(300_001, dtype=np.float32)
        values[-1] = 9
        if kind == "zeros":
            values[values < 2] = 0
        if kind == "steps":
            values = np.round(values, 1)
        if kind == "heavy":
            values = values**9 * (np.arange(len(values)) > 290_000)
        count = math.ceil(share * len(values))
        order = np.argsort(-np.abs(values), kind="stable")
        positions, entries = largest_entries(values, count)
        assert (positions == np.sort(order[:count])).all()
        assert (entries == values[positions]).all()

    def test_topk_with_ratio_1_percent_sends_under_1_point_3_percent_of_all_floats(self) -> None:
        layout = layout_of(nn.Linear(1000, 300))
        assert TopK(0.01).words(layout) / layout.trained < 0.013


class TestRandK:
    def test_randk_sends_random_entries_divided_by_the_share(self) -> None:
        values = values_of(LAYOUT)
        compressor = RandK(0.1)
        count = math.ceil(0.1 * len(values))
        decoded = coded(compressor, values)
        sent = np.flatnonzero(decoded)
        assert len(sent) == count
        np.testing.assert_allclose(decoded[sent], values[sent] * (len(values) / count), rtol=1e-6)
        assert (coded(compressor, values, key=KEY + 1) != decoded).any()
        assert compressor.words(LAYOUT) == count + 2

    def test_randk_is_unbiased(self) -> None:
        values = values_of(LAYOUT)
        deviation = 0.01 * math.sqrt(10 / 600)
        assert np.abs(mean_coded(RandK(0.1), values) - values).max() < 6 * 3 * deviation


class TestQSGD:
    @pytest.mark.parametrize(("levels", "width"), [(1, 2), (3, 3), (7, 4), (300, 10)])
    def test_qsgd_rounds_to_a_neighbouring_level(self, levels: int, width: int) -> None:
        values = values_of(LAYOUT)
        decoded = coded(QSGD(levels, bucket=64), values)
        for start in range(0, len(values), 64):
            bucket = values[start : start + 64].astype(np.float64)
            norm = math.sqrt(sum(bucket**2))
            level = np.abs(decoded[start : start + 64]) / norm * levels
            exact = np.abs(bucket) / norm * levels
            np.testing.assert_allclose(level, np.round(level), atol=1e-3)
            assert (np.abs(np.round(level) - exact) < 1).all()
            assert (decoded[start : start + 64] * bucket >= 0).all()
        buckets = math.ceil(len(values) / 64)
        words = buckets + math.ceil(len(values) * width / 32)
        assert QSGD(levels, bucket=64).words(LAYOUT) == words

    def test_qsgd_is_unbiased(self) -> None:
        values = values_of(LAYOUT)
        norm = np.linalg.norm(values[:64])
        error = np.abs(mean_coded(QSGD(3, bucket=64), values) - values)
        assert error.max() < 6 * norm / 3 / 2 / math.sqrt(600) * 1.5

    def test_qsgd_error_is_below_the_papers_bound(self) -> None:
        compressor = QSGD(3, bucket=64)
        values = values_of(LAYOUT)
        errors = [
            np.sum((coded(compressor, values, key=key) - values) ** 2) for key in range(1, 200)
        ]
        omega = min(64 / 9, 8 / 3)
        assert np.mean(errors) < omega * np.sum(values**2)
        assert compressor.contraction(LAYOUT) == pytest.approx(1 / (1 + omega))

    def test_fedpaq_has_one_norm_for_all_entries(self) -> None:
        values = values_of(LAYOUT)
        decoded = coded(QSGD(1, bucket=None), values)
        norm = np.linalg.norm(values.astype(np.float64))
        assert set(np.round(np.abs(decoded) / norm, 5)) == {0.0, 1.0}

    def test_quantized_zeros_stay_zeros(self) -> None:
        assert (coded(QSGD(), np.zeros(LAYOUT.trained, np.float32)) == 0).all()


class TestTernGrad:
    def test_terngrad_entries_are_zero_or_the_largest_value_of_the_tensor(self) -> None:
        values = values_of(LAYOUT)
        decoded = coded(TernGrad(clip=0.0), values)
        for entry in LAYOUT.entries:
            tensor, sent = values[entry.start : entry.stop], decoded[entry.start : entry.stop]
            largest = np.abs(tensor).max()
            assert set(np.abs(sent)) <= {np.float32(0), largest}
            assert (sent * tensor >= 0).all()
        assert TernGrad().words(LAYOUT) == len(LAYOUT.entries) + math.ceil(2 * len(values) / 32)

    def test_terngrad_is_unbiased_after_clipping(self) -> None:
        values = values_of(LAYOUT)
        expected = np.empty_like(values)
        for entry in LAYOUT.entries:
            tensor = values[entry.start : entry.stop]
            bound = 2.5 * tensor.std()
            expected[entry.start : entry.stop] = np.clip(tensor, -bound, bound)
        error = np.abs(mean_coded(TernGrad(), values) - expected)
        assert error.max() < 6 * 0.025 / 2 / math.sqrt(600)
        assert np.abs(expected - values).max() > 0.001


class TestSigns:
    def test_signsgd_decodes_to_signs_times_the_mean_magnitude(self) -> None:
        values = values_of(LAYOUT)
        values[5] = 0
        mean = sum(abs(float(value)) for value in values) / len(values)
        expected = np.where(values < 0, -mean, mean)
        np.testing.assert_allclose(coded(SignSGD(size=None), values), expected, rtol=1e-6)
        assert SignSGD(size=None).words(LAYOUT) == 1 + math.ceil(len(values) / 32)

    def test_signsgd_with_fixed_magnitude_sends_one_bit_per_entry(self) -> None:
        values = values_of(LAYOUT)
        expected = np.where(values < 0, np.float32(-0.5), np.float32(0.5))
        assert (coded(SignSGD(size=0.5), values) == expected).all()
        assert SignSGD(size=0.5).words(LAYOUT) == math.ceil(len(values) / 32)

    def test_signsgd_with_fixed_magnitude_refuses_error_feedback(self) -> None:
        with pytest.raises(ValueError, match=r"compression\.size"):
            SignSGD(size=0.5, feedback="ef21")


class TestRounded:
    def test_float16_rounds_like_numpy_and_clips_values_that_are_too_large(self) -> None:
        values = values_of(LAYOUT)
        values[:2] = 1e9, -1e9
        expected = values.clip(-65504, 65504).astype(np.float16).astype(np.float32)
        assert (coded(Float16(), values) == expected).all()
        assert Float16().words(LAYOUT) == math.ceil(len(values) / 2)

    @pytest.mark.parametrize("block", [1, 50, 256, 10_000])
    def test_int8_rounds_to_multiples_of_the_block_maximum_divided_by_127(self, block: int) -> None:
        values = values_of(LAYOUT)
        expected = np.empty_like(values)
        for start in range(0, len(values), block):
            part = values[start : start + block]
            scale = np.abs(part).max() / np.float32(127)
            expected[start : start + block] = np.rint(part / scale) * scale
        np.testing.assert_allclose(coded(Int8(block), values), expected, rtol=1e-6)
        words = math.ceil(len(values) / block) + math.ceil(len(values) / 4)
        assert Int8(block).words(LAYOUT) == words

    def test_fp8_rounds_to_nearest_representable_number(self) -> None:
        # E4M3: 4 bits of exponent with bias 7, 3 bits of fraction, no infinity.
        numbers = [fraction / 8 * 2.0**-6 for fraction in range(8)]
        for exponent in range(1, 16):
            numbers += [(1 + fraction / 8) * 2.0 ** (exponent - 7) for fraction in range(8)]
        numbers = numbers[:-1]  # the last pattern is not a number
        assert max(numbers) == 448
        table = np.array(numbers)
        values = values_of(LAYOUT)
        decoded = coded(Fp8(256), values)
        for start in range(0, len(values), 256):
            part = values[start : start + 256].astype(np.float64)
            scale = np.abs(part).max() / 448
            nearest = np.abs(np.abs(part)[:, None] / scale - table).min(axis=1)
            error = np.abs(decoded[start : start + 256] - part) / scale
            np.testing.assert_allclose(error, nearest, atol=1e-3)

    def test_fp8_decodes_to_the_same_bits_as_torch(self) -> None:
        codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        middles = (codes[1:] + codes[:-1]) / 2
        infinity = torch.tensor(math.inf)
        neighbours = [middles.nextafter(infinity), middles.nextafter(-infinity)]
        drawn = torch.randn(4000, generator=torch.Generator().manual_seed(0)) * 30
        positive = torch.cat([codes, middles, *neighbours, drawn.clamp(-447, 447)])
        values = torch.cat([positive, -positive])
        values = values[: len(values) // 31 * 31].view(-1, 31)
        # With a largest value of 448, the scale of a block is 1.
        values = torch.cat([torch.full((len(values), 1), 448.0), values], dim=1).flatten()
        decoded = coded(Fp8(32), values.numpy(), layout_of(nn.Linear(len(values), 1, bias=False)))
        expected = values.to(torch.float8_e4m3fn).float()
        assert torch.equal(torch.from_numpy(decoded).view(torch.int32), expected.view(torch.int32))

    def test_blocks_of_zeros_stay_zero_after_rounding(self) -> None:
        zeros = np.zeros(LAYOUT.trained, np.float32)
        assert (coded(Int8(), zeros) == 0).all()
        assert (coded(Fp8(), zeros) == 0).all()


class TestPowerSGD:
    def test_powersgd_projects_matrix_m_onto_the_columns_of_m_times_q(self) -> None:
        compressor = PowerSGD(rank=2)
        values = values_of(LAYOUT)
        decoded = coded(compressor, values)
        used = 0
        sizes = 0
        for entry in LAYOUT.entries:
            part, sent = values[entry.start : entry.stop], decoded[entry.start : entry.stop]
            rows, columns = entry.shape[0], len(part) // entry.shape[0]
            if len(entry.shape) == 1 or 2 * (rows + columns) >= len(part):
                assert (sent == part).all()
                sizes += len(part)
                continue
            query = compressor.initial(LAYOUT)[used : used + 2 * columns].view(columns, 2)
            used += 2 * columns
            sizes += 2 * (rows + columns)
            matrix = part.reshape(rows, columns).astype(np.float64)
            basis = gram_schmidt(matrix @ query.numpy().astype(np.float64))
            expected = basis @ basis.T @ matrix
            np.testing.assert_allclose(sent.reshape(rows, columns), expected, atol=1e-6)
        assert compressor.words(LAYOUT) == sizes
        assert used > 0

    def test_powersgd_error_falls_to_that_of_the_best_approximation(self) -> None:
        layout = layout_of(nn.Linear(40, 30, bias=False))
        generator = np.random.default_rng(0)
        matrix = generator.standard_normal((30, 40)) * 0.7 ** np.arange(40)
        values = torch.from_numpy(matrix.astype(np.float32).ravel())
        compressor = PowerSGD(rank=3)
        kept, errors = compressor.initial(layout), []
        for _ in range(20):
            message = compressor.encode(values, layout, KEY, kept)
            kept = compressor.keep(message, layout)
            out = torch.empty(layout.trained)
            compressor.decode(message, layout, out)
            errors.append(float(torch.linalg.vector_norm(out - values)))
        best = math.sqrt(sum(np.linalg.svd(matrix)[1][3:] ** 2))
        assert errors[0] > errors[1] > errors[-1]
        assert errors[-1] == pytest.approx(best, rel=0.01)


def gram_schmidt(columns: np.ndarray) -> np.ndarray:
    basis: list[np.ndarray] = []
    for column in columns.T:
        rest = column - sum((vector @ column * vector for vector in basis), np.zeros(len(column)))
        basis.append(rest / np.linalg.norm(rest))
    return np.stack(basis, axis=1)


ALL = [
    TopK(0.1), RandK(0.3), QSGD(7, 64), QSGD(3, None), TernGrad(), SignSGD(None), Int8(64), Fp8(64),
    Float16(), PowerSGD(1),
]  # fmt: skip
# Compressors that override `exchange`.
FAST = [
    TopK(0.01), TopK(0.3), RandK(0.01), QSGD(), QSGD(300, 100), QSGD(1, None), TernGrad(), Int8(),
    Int8(100), Fp8(), Float16(), PowerSGD(2),
]  # fmt: skip


class TestFeedback:
    @pytest.mark.parametrize("kind", ["ef21", "ef14"])
    def test_error_feedback_equals_the_algorithm_of_its_paper(self, kind: str) -> None:
        def largest(values: np.ndarray) -> np.ndarray:
            kept = np.zeros_like(values)
            order = np.argsort(-np.abs(values), kind="stable")[: math.ceil(0.1 * len(values))]
            kept[order] = values[order]
            return kept

        compressor = TopK(0.1, feedback=kind)  # type: ignore[arg-type]
        state = {"memory": torch.zeros(LAYOUT.trained)}
        memory = np.zeros(LAYOUT.trained, np.float32)
        for turn in range(4):
            update = values_of(LAYOUT, turn)
            received = torch.from_numpy(update.copy())
            received, state = compressor.send(received, state, LAYOUT, KEY + turn)
            if kind == "ef21":
                memory = expected = memory + largest(update - memory)
            else:
                expected = largest(update + memory)
                memory = update + memory - expected
            np.testing.assert_allclose(received, expected, rtol=1e-6)
            np.testing.assert_allclose(state["memory"], memory, rtol=1e-5, atol=1e-9)

    @pytest.mark.parametrize("compressor", ALL, ids=str)
    @pytest.mark.parametrize("kind", ["ef21", "ef14"])
    def test_received_values_approach_the_exact_update_if_it_is_sent_repeatedly(
        self, compressor: Compressor, kind: str
    ) -> None:
        """Compare the received values with an update that is sent again and again.

        With ef21 the last received value approaches the update; with ef14 the mean of all received
        values does.
        """
        update, received = values_of(LAYOUT), []
        state = {"memory": torch.zeros(LAYOUT.trained), "kept": compressor.initial(LAYOUT)}
        compressor.feedback = kind  # type: ignore[assignment]
        turns = 800 if compressor.contraction(LAYOUT) < 1 else 100
        try:
            for turn in range(turns):
                values = torch.from_numpy(update.copy())
                decoded, state = compressor.send(values, state, LAYOUT, KEY + turn)
                received.append(decoded.numpy().copy())
        finally:
            compressor.feedback = "none"
        final = received[-1] if kind == "ef21" else np.mean(received, axis=0)
        error = np.linalg.norm(final - update) / np.linalg.norm(update)
        once = np.linalg.norm(coded(compressor, update) - update) / np.linalg.norm(update)
        assert error < max(0.25 * once, 1e-5)

    @pytest.mark.parametrize("compressor", FAST, ids=str)
    @pytest.mark.parametrize("kind", ["ef21", "ef14"])
    def test_error_feedback_of_a_compressor_equals_that_of_its_base_class_bit_for_bit(
        self, compressor: Compressor, kind: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(compressor, "feedback", kind)
        layout = layout_of(nn.Linear(1000, 300))
        fast = plain = torch.empty(0)
        for turn in range(3):
            received = torch.from_numpy(values_of(layout, turn))
            expected = received.clone()
            before, old = fast, fast.clone()
            arguments = layout, KEY + turn, compressor.initial(layout)
            message, received, fast = compressor.exchange(received, fast, *arguments)
            words, expected, plain = Compressor.exchange(compressor, expected, plain, *arguments)
            assert (message == words).all()
            assert torch.equal(received.view(torch.int32), expected.view(torch.int32))
            assert torch.equal(fast.view(torch.int32), plain.view(torch.int32))
            assert torch.equal(before, old)


def test_compressor_message_of_wrong_size_is_refused() -> None:
    class Longer(TopK):
        def encode(self, values: Tensor, layout: Layout, key: int, kept: Tensor) -> np.ndarray:
            return np.append(super().encode(values, layout, key, kept), np.uint32(0))

    with pytest.raises(ValueError, match="words"):
        Longer().send(torch.zeros(LAYOUT.trained), {}, LAYOUT, KEY)


def test_compressor_message_may_share_memory_with_its_input() -> None:
    class Halves(TopK):
        def words(self, layout: Layout) -> int:
            return layout.trained // 2

        def encode(self, values: Tensor, layout: Layout, key: int, kept: Tensor) -> np.ndarray:
            return values[: self.words(layout)].numpy().view(np.uint32)

        def decode(self, message: np.ndarray, layout: Layout, out: Tensor) -> None:
            out.zero_()
            out.numpy()[: len(message)] = message.view(np.float32)

    values = values_of(LAYOUT)
    received = torch.from_numpy(values.copy())
    Halves().send(received, {}, LAYOUT, KEY)
    half = LAYOUT.trained // 2
    assert (received.numpy()[:half] == values[:half]).all()
    assert (received.numpy()[half:] == 0).all()
