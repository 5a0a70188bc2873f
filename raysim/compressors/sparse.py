"""Sparse messages: the largest entries, or random ones.

Sources: Aji and Heafield, "Sparse Communication for Distributed Gradient Descent" (EMNLP 2017), and
Alistarh et al., "The Convergence of Sparsified Gradient Methods" (NeurIPS 2018), for the largest
entries; Stich, Cordonnier and Jaggi, "Sparsified SGD with Memory" (NeurIPS 2018), for both.

With k of d entries sent:

    topk   C(v)_i = v_i for the k entries of the largest |v_i|, else 0
    randk  C(v)_i = (d / k) v_i for k random entries, else 0; under error feedback without d / k

Choices where the papers are silent
- If entries have equal |v_i|, the ones with the lowest positions are sent.
- k is share * d, rounded up; entries are chosen among all parameters together, not by layer.
- The positions of randk follow from a seed of 64 bits, which is in the message.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from raysim.api.compression import Compressor, Direction, Feedback
from raysim.compressors.bits import pack_positions, unpack_positions, words_of_positions
from raysim.primitives.checks import in_range
from raysim.vectors.blocks import compile_function
from raysim.vectors.layout import Layout

SAMPLE = 1 << 14  # entries from which the threshold of a long vector is estimated
SMALL = 1 << 17  # entries of a vector that is partitioned as a whole
GROUP = 16  # entries that are compared at once; of 100 groups about 20 have a large entry
WITHOUT_SIGN = np.uint32(0x7FFFFFFF)  # the bits of a float32 but for its sign


def _collect(
    groups: np.ndarray, threshold: int, positions: np.ndarray, magnitudes: np.ndarray
) -> int:
    """Find the entries whose magnitude is at least `threshold`; return how many there are.

    The magnitude of an entry v is an integer: the bits of |v|. It has the same order as |v|.
    If less than GROUP places are left in `positions` for the next row, stop and return the length
    of `positions` plus 1: there are probably too many such entries.
    groups: uint32 [n, GROUP], the bits of all entries, row by row.
    positions: the array to fill with the positions of the entries.
    magnitudes: the array to fill with the magnitudes of the entries, uint32, as long as
    `positions`.
    """
    count, room = 0, len(positions) - GROUP
    for group in range(len(groups)):
        largest = np.uint32(0)
        for index in range(GROUP):
            largest = max(largest, groups[group, index] & WITHOUT_SIGN)
        if largest < threshold:
            continue
        if count > room:
            return len(positions) + 1
        for index in range(GROUP):
            magnitude = groups[group, index] & WITHOUT_SIGN
            positions[count], magnitudes[count] = group * GROUP + index, magnitude
            count += magnitude >= threshold  # the next entry overwrites one that is too small
    return count


def largest_positions(values: np.ndarray, count: int) -> np.ndarray:
    """Return the positions of the `count` entries with the largest absolute values, ascending.

    Of entries with equal absolute values, the ones with the lowest positions are taken. The bits of
    floats without the sign bit are compared as integers, which gives the same order in less time.
    values: float32 [d], finite.
    """
    bits = values.view(np.uint32)
    positions, magnitudes = _candidates(bits, count) or (None, bits & WITHOUT_SIGN)
    threshold = np.partition(magnitudes, len(magnitudes) - count)[len(magnitudes) - count]
    is_large = magnitudes >= threshold
    surplus = np.count_nonzero(is_large) - count
    if surplus:
        ties = np.flatnonzero(magnitudes == threshold)
        is_large[ties[len(ties) - surplus :]] = False
    return np.flatnonzero(is_large) if positions is None else positions[is_large]


def _candidates(bits: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Return positions and magnitudes of some entries, among them the `count` largest ones.

    The magnitude of an entry v is an integer: the bits of |v|. A threshold is estimated from a
    sample of the magnitudes. The result has all entries whose magnitude is at least the threshold,
    in the order of their positions.

    Return None if the vector is short, if `count` is large, or if the threshold selects too few or
    too many entries. The caller then compares all entries.
    bits: uint32 [d], the bits of all entries.
    """
    length = len(bits)
    if length <= SMALL or 4 * count >= length:
        return None
    sample = bits[:: length // SAMPLE] & WITHOUT_SIGN
    wanted = math.ceil(len(sample) * count / length * 1.25) + 16
    threshold = np.partition(sample, len(sample) - wanted)[len(sample) - wanted]
    positions = np.empty(2 * count + length // 64, np.int64)
    magnitudes = np.empty(len(positions), np.uint32)
    whole = length // GROUP * GROUP
    collected = compile_function(_collect)(
        bits[:whole].reshape(-1, GROUP), threshold, positions, magnitudes
    )
    last = bits[whole:] & WITHOUT_SIGN
    is_large = last >= threshold
    # The sample was not typical: too many entries are that large, or too few.
    if collected > len(positions) or collected + np.count_nonzero(is_large) < count:
        return None
    return (
        np.concatenate([positions[:collected], whole + np.flatnonzero(is_large)]),
        np.concatenate([magnitudes[:collected], last[is_large]]),
    )


class _Sparse(Compressor):
    """A compressor that sends only some entries of the vector.

    share: the share of the entries that are sent, above 0 and at most 1.
    direction: "up" compresses clients' updates, "down" the server's steps, "both" compresses both.
    feedback: the error feedback, "none", "ef21" or "ef14"; `Compressor` explains it.
    """

    def __init__(
        self, share: float = 0.01, direction: Direction = "up", feedback: Feedback = "none"
    ):
        super().__init__(direction, feedback)
        self.share = in_range("compression.share", share, above=0, most=1)

    def count(self, layout: Layout) -> int:
        """Return k, the number of entries in a message."""
        return math.ceil(self.share * layout.trained)


class TopK(_Sparse):
    """A compressor that sends the entries with the largest absolute values.

    Their positions are sent as well.
    """

    name = "topk"
    paper = "Aji and Heafield, EMNLP 2017"

    def words(self, layout: Layout) -> int:
        """Return the size of a message (k floats and their positions) in words of 32 bits."""
        count = self.count(layout)
        return count + words_of_positions(count, layout.trained)

    def encode(self, values: Tensor, layout: Layout, key: int, kept: Tensor) -> np.ndarray:
        """Return the k entries with the largest absolute values, then their positions.

        key, kept: not used, because this compressor is not random and remembers nothing.
        """
        array = values.numpy()
        positions = largest_positions(array, self.count(layout))
        return np.concatenate(
            [array[positions].view(np.uint32), pack_positions(positions, len(array))]
        )

    def decode(self, message: np.ndarray, layout: Layout, out: Tensor) -> None:
        """Fill `out` with the entries of the message at their positions, and with 0 elsewhere."""
        entries = message[: self.count(layout)].view(np.float32)
        out.zero_()
        out.numpy()[self._positions(message, layout)] = entries

    def remove_sent(
        self, message: np.ndarray, layout: Layout, decoded: Tensor, wanted: Tensor
    ) -> None:
        """Set to 0 the entries of `wanted` that the message contains.

        What is left in `wanted` becomes the sender's next memory for error feedback ef14. The
        entries in the message need no correction, because the receiver decodes them exactly.
        decoded: the decoded message, [layout.trained]; not used here.
        wanted: the vector that the sender encoded, [layout.trained]; it is changed in place.
        """
        positions = torch.from_numpy(self._positions(message, layout)).to(wanted.device)
        wanted[positions] = 0

    def _positions(self, message: np.ndarray, layout: Layout) -> np.ndarray:
        count = self.count(layout)
        return unpack_positions(message[count:], count, layout.trained)


class RandK(_Sparse):
    """A compressor that sends random entries.

    The message contains a seed, from which the receiver draws the same positions.
    """

    name = "randk"
    paper = "Stich et al., NeurIPS 2018"

    def words(self, layout: Layout) -> int:
        """Return the size of a message (a seed and k floats) in words of 32 bits."""
        return self.count(layout) + 2

    def _positions(self, seed: np.ndarray, layout: Layout) -> np.ndarray:
        generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed)))
        return generator.choice(layout.trained, self.count(layout), replace=False, shuffle=False)

    def encode(self, values: Tensor, layout: Layout, key: int, kept: Tensor) -> np.ndarray:
        """Return the seed, then the k entries.

        key: the number that becomes the seed.
        kept: not used, because a message does not depend on earlier messages.
        """
        seed = np.array([key], np.uint64).view(np.uint32)
        entries = values.numpy()[self._positions(seed, layout)]
        return np.concatenate([seed, entries.view(np.uint32)])

    def decode(self, message: np.ndarray, layout: Layout, out: Tensor) -> None:
        """Fill `out` with the entries times d / k at their positions, and with 0 elsewhere."""
        count = self.count(layout)
        out.zero_()
        entries = message[2:].view(np.float32) * np.float32(layout.trained / count)
        out.numpy()[self._positions(message[:2], layout)] = entries

    def contraction(self, layout: Layout) -> float:
        """Return k / d, the factor for decoded values under error feedback.

        A message has k of the d entries, and `decode` multiplies them by d / k. The factor k / d
        turns them back into the original entries.
        """
        return self.count(layout) / layout.trained
