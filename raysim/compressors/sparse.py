"""Sparse messages: the largest entries, or random ones.

A message has k of the d entries of a vector. All other entries are decoded as 0. A sent entry v_i
is decoded as

    topk   v_i; the k entries have the largest |v_i|
    randk  (d / k) v_i, or v_i with error feedback; the k entries are random

Sources: for topk, Aji and Heafield, "Sparse Communication for Distributed Gradient Descent" (EMNLP
2017), and Alistarh et al., "The Convergence of Sparsified Gradient Methods" (NeurIPS 2018). For
topk and randk, Stich, Cordonnier and Jaggi, "Sparsified SGD with Memory" (NeurIPS 2018).

Choices that the papers leave open
- k is share * d, rounded up. The k entries are chosen among all parameters together.
- If entries have equal |v_i|, topk sends those with the lowest positions.
- A message of randk has a seed of 64 bits in place of positions.
"""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

from raysim.api.compression import Compressor, Direction, Exchange, Feedback
from raysim.compressors.bits import pack_positions, unpack_positions, words_of_positions
from raysim.primitives.checks import in_range
from raysim.vectors.blocks import compile_function, new_like
from raysim.vectors.layout import Layout

SAMPLE = 1 << 14  # entries from which the threshold of a long vector is estimated
SMALL = 1 << 17  # entries of a vector that is partitioned as a whole
CHUNK = 1 << 10  # entries that are compared at once; the results stay in the fastest cache
# Byte 7 - i of this number is i. A word whose only bit that is 1 is the lowest bit of byte i, times
# this number, has i in its highest byte.
BYTE_INDEX = 0x0001020304050607
NOTHING = np.empty(0, np.float32)


def _collect(
    values: np.ndarray,
    memory: np.ndarray,
    threshold: float,
    flags: np.ndarray,
    words: np.ndarray,
    positions: np.ndarray,
    entries: np.ndarray,
) -> int:
    """Collect the entries of `values - memory` with an absolute value of at least `threshold`.

    Return their number, or len(positions) + 1 if they may not fit into `positions`. An empty
    `memory` stands for zeros.
    flags, words: the same working memory, as uint8 [CHUNK] and as uint64.
    positions, entries: the arrays to fill with the ascending positions and the entries.
    """
    # A chunk of entries is compared first: each entry gets a byte, 1 if it is large, else 0. Then 8
    # of these bytes are read as one word. Most words are 0, so the loop over bits is short.
    count, room = 0, len(positions) - 8
    for start in range(0, len(values), len(flags)):
        part = values[start : start + len(flags)]
        old = memory[start : start + len(flags)]
        if len(old):
            for index in range(len(part)):
                flags[index] = abs(part[index] - old[index]) >= threshold
        else:
            for index in range(len(part)):
                flags[index] = abs(part[index]) >= threshold
        for index in range(len(part), len(flags)):
            flags[index] = 0
        for word in range(len(words)):
            bits = words[word]
            if bits and count > room:
                return len(positions) + 1
            while bits:
                lowest = bits & (~bits + np.uint64(1))
                byte = np.int64((lowest * np.uint64(BYTE_INDEX)) >> np.uint64(56))
                place = 8 * word + byte
                entry = part[place] - old[place] if len(old) else part[place]
                positions[count], entries[count] = start + place, entry
                count += 1
                bits ^= lowest
    return count


def _copy_memory(memory: np.ndarray, out: np.ndarray) -> None:
    """Copy `memory` to `out`, and replace -0 by 0; both are float32 [d]."""
    for index in range(len(memory)):
        out[index] = memory[index] + np.float32(0)


def largest_entries(
    values: np.ndarray, count: int, memory: np.ndarray = NOTHING
) -> tuple[np.ndarray, np.ndarray]:
    """Find the `count` entries of the difference `values - memory` with largest absolute values.

    Return the ascending positions and the values of these entries. Of equal absolute values, the
    lower position is taken.
    values, memory: float32 [d], finite; an empty `memory` stands for zeros.
    """
    candidates = _candidates(values, count, memory)
    positions, entries = candidates or (None, _difference(values, memory))
    magnitudes = np.abs(entries)
    threshold = np.partition(magnitudes, len(magnitudes) - count)[len(magnitudes) - count]
    is_large = magnitudes >= threshold
    surplus = np.count_nonzero(is_large) - count
    if surplus:
        ties = np.flatnonzero(magnitudes == threshold)
        is_large[ties[len(ties) - surplus :]] = False
    chosen = np.flatnonzero(is_large)
    return chosen if positions is None else positions[chosen], entries[chosen]


def _difference(
    values: np.ndarray, memory: np.ndarray, chosen: slice | np.ndarray = slice(None)
) -> np.ndarray:
    """Return the chosen entries of values - memory; an empty memory stands for zeros.

    chosen: a slice of the entries, or their positions.
    """
    return values[chosen] - memory[chosen] if len(memory) else values[chosen]


def _candidates(
    values: np.ndarray, count: int, memory: np.ndarray
) -> tuple[np.ndarray, np.ndarray] | None:
    """Find candidates for the `count` largest absolute values in the difference `values - memory`.

    A sample of the entries gives a threshold. The candidates are all entries with an absolute value
    of at least this threshold. Return their ascending positions and their values in the difference.
    The `count` largest entries are among them.
    Return None for a short vector, a large `count`, or a threshold that was too low or too high. An
    empty `memory` stands for zeros.
    """
    length = len(values)
    if length <= SMALL or 4 * count >= length:
        return None
    step = length // SAMPLE
    sample = np.abs(_difference(values, memory, slice(None, None, step)))
    wanted = math.ceil(len(sample) * count / length * 1.25) + 16
    threshold = np.partition(sample, len(sample) - wanted)[len(sample) - wanted]
    positions = np.empty(2 * count + length // 64, np.int64)
    entries = np.empty(len(positions), np.float32)
    flags = np.empty(CHUNK, np.uint8)
    collect = compile_function(_collect)
    collected = collect(values, memory, threshold, flags, flags.view(np.uint64), positions, entries)
    # The sample was not typical: too many entries are that large, or too few.
    if collected > len(positions) or collected < count:
        return None
    return positions[:collected], entries[:collected]


class _Sparse(Compressor):
    """A compressor that sends only some entries of the vector.

    A subclass overrides `words`, `_encode` and `_decode`.
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

    def _encode(
        self, values: np.ndarray, layout: Layout, key: int, memory: np.ndarray = NOTHING
    ) -> np.ndarray:
        """Return the message for the vector `values` - `memory`.

        values: float32 [layout.trained].
        key: a random number below 2^63.
        memory: float32 [layout.trained]; an empty array stands for zeros.
        """
        raise NotImplementedError

    def _decode(self, message: np.ndarray, layout: Layout) -> tuple[np.ndarray, np.ndarray]:
        """Return the k entries that a message contains.

        The result is a pair: the positions of these entries in the vector, [k], and their decoded
        values, [k].
        """
        raise NotImplementedError

    def encode(self, values: Tensor, layout: Layout, key: int, kept: Tensor) -> np.ndarray:
        """Return the message: k entries, and what the receiver needs to find their positions.

        key: a random number below 2^63.
        kept: not used, because a message does not depend on earlier messages.
        """
        return self._encode(values.numpy(), layout, key)

    def decode(self, message: np.ndarray, layout: Layout, out: Tensor) -> None:
        """Fill `out` with the decoded entries at their positions, and with 0 elsewhere."""
        positions, entries = self._decode(message, layout)
        out.zero_()
        out.numpy()[positions] = entries

    def exchange(
        self, values: Tensor, memory: Tensor, layout: Layout, key: int, kept: Tensor
    ) -> Exchange:
        """Encode `values` with error feedback; return all results in an `Exchange`.

        The results are those of `Compressor.exchange`. This function is faster, because it decodes
        only the k entries of the message.
        `values` may be overwritten. An empty `memory` stands for zeros, and `kept` is not used.
        """
        if not (self._is_direct(values) and len(memory)):
            return super().exchange(values, memory, layout, key, kept)
        if self.feedback == "ef14":
            following = self._add_memory(values, memory)
            message = self._message(following, layout, key, kept)
            positions, entries = self._decode(message, layout)
            entries = entries * np.float32(self.contraction(layout))
            values.zero_()
            values.numpy()[positions] = entries
            following.numpy()[positions] -= entries
            return Exchange(message, values, following)
        message = self._encode(values.numpy(), layout, key, memory.numpy())
        positions, entries = self._decode(message, layout)
        entries = entries * np.float32(self.contraction(layout))
        following = new_like(memory)
        compile_function(_copy_memory)(memory.numpy(), following.numpy())
        following.numpy()[positions] += entries
        return Exchange(message, following, following)


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

    def _encode(
        self, values: np.ndarray, layout: Layout, key: int, memory: np.ndarray = NOTHING
    ) -> np.ndarray:
        """Return the k entries with the largest absolute values, then their positions."""
        positions, entries = largest_entries(values, self.count(layout), memory)
        return np.concatenate([entries.view(np.uint32), pack_positions(positions, len(values))])

    def _decode(self, message: np.ndarray, layout: Layout) -> tuple[np.ndarray, np.ndarray]:
        count = self.count(layout)
        positions = unpack_positions(message[count:], count, layout.trained)
        return positions, message[:count].view(np.float32)


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

    def _encode(
        self, values: np.ndarray, layout: Layout, key: int, memory: np.ndarray = NOTHING
    ) -> np.ndarray:
        """Return the seed, then the k entries. The seed is `key`."""
        seed = np.array([key], np.uint64).view(np.uint32)
        entries = _difference(values, memory, self._positions(seed, layout))
        return np.concatenate([seed, entries.view(np.uint32)])

    def _decode(self, message: np.ndarray, layout: Layout) -> tuple[np.ndarray, np.ndarray]:
        """Return the positions of the k sent entries in the vector, and these entries times d / k.

        d is the number of entries of the vector.
        """
        scale = np.float32(layout.trained / self.count(layout))
        return self._positions(message[:2], layout), message[2:].view(np.float32) * scale

    def contraction(self, layout: Layout) -> float:
        """Return k / d, by which decoded values are multiplied under error feedback.

        A message has k of the d entries, which `decode` multiplies by d / k. The factor k / d
        restores the original entries.
        """
        return self.count(layout) / layout.trained
