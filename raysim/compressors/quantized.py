"""Random rounding to a few levels: QSGD, FedPAQ and TernGrad.

Sources: Alistarh, Grubic, Li, Tomioka and Vojnovic, "QSGD: Communication-Efficient SGD via Gradient
Quantization and Encoding" (NeurIPS 2017), Section 3; Reisizadeh, Mokhtari, Hassani, Jadbabaie and
Pedarsani, "FedPAQ: A Communication-Efficient Federated Learning Method with Periodic Averaging and
Quantization" (AISTATS 2020), Example 1; Wen et al., "TernGrad: Ternary Gradients to Reduce
Communication in Distributed Deep Learning" (NeurIPS 2017), Algorithm 1 and Section 3.3.

Let s be the number of levels above 0, and u a random number that is uniform in [0, 1). A bucket is
a range of consecutive entries, and |v| the norm of the bucket of entry v_i. Let m be the largest
absolute value, after clipping, in the tensor of v_i. Then v_i is decoded as

    qsgd      |v| sign(v_i) floor(s |v_i| / |v| + u) / s
    fedpaq    the same as qsgd, with one bucket for all parameters
    terngrad  m sign(v_i) if |v_i| > m u, else 0

Departures from the papers
- QSGD uses fewer bits for frequent levels (Elias coding). Here the level and the sign of an entry
  together take 2 bits for s = 1, 3 bits for s = 3, and 4 bits for s = 7.
- FedPAQ averages uniformly. To do the same, set weighting=uniform.
- In QSGD and TernGrad, v is a gradient. Here v is a client's update or the server's step.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from raysim.api.compression import Compressor, Direction, Exchange, Feedback
from raysim.compressors.bits import pack, unpack, words_of_bits
from raysim.primitives.checks import at_least, in_range
from raysim.vectors.blocks import compile_function
from raysim.vectors.layout import Layout

CHUNK = 512  # entries that are rounded at once
GOLDEN = 0x9E3779B9  # 2^32 divided by the golden ratio; positions times this number are far apart
NOTHING = torch.empty(0)


def _round_randomly(
    values: np.ndarray,
    starts: np.ndarray,
    scales: np.ndarray,
    levels: int,
    key: np.ndarray,
    steps: np.ndarray,
    digits: np.ndarray,
    buffer: np.ndarray,
    old_memory: np.ndarray,
    contraction: float,
) -> None:
    """Round each entry at random to one of 2 s + 1 digits, where s is `levels`.

    The digit of an entry v in a bucket with scale c is

        s + sign(v) floor(s |v| / c + u)

    The random number u in [0, 1) is computed from a 32-bit hash of the key and of the entry's
    position.

    values: float32 [entries]. The sender's next memory overwrites them, unless `buffer` is empty.
    starts: int64 [buckets + 1]; bucket i has the entries from starts[i] to starts[i + 1] - 1.
    scales: [buckets], the scale c of each bucket.
    key: the low and the high word of the message's random number, uint32 [2].
    steps: uint32 [CHUNK], with i * `GOLDEN` modulo 2^32 in entry i.
    digits: [entries], the array to fill.
    buffer, old_memory: float32 arrays, which depend on the error feedback:

        feedback   buffer                                        old_memory
        "none"     empty                                         empty
        "ef14"     [entries], to fill with the decoded values    empty
        "ef21"     [CHUNK], for intermediate values              [entries], the sender's old memory

    While the sender's memory is empty, `buffer` and `old_memory` are empty, too.
    contraction: the factor by which decoded values are multiplied under error feedback.
    """
    # All variables of the hash have 32 bits, so that the CPU computes several entries with one
    # instruction. Numba uses 64 bits for a loop's index and for an argument that is a number, but
    # not for entries of arrays: so `key` and `steps` are arrays.
    low, high = key[0], key[1]
    most = np.float32(levels)
    for bucket in range(len(starts) - 1):
        scale = scales[bucket]
        factor = most / scale if scale > 0 else np.float32(0)
        unit = scale / most
        # A chunk of `len(steps)` entries fits into the fastest cache.
        for first in range(starts[bucket], starts[bucket + 1], len(steps)):
            stop = min(first + len(steps), starts[bucket + 1])
            part, out = values[first:stop], digits[first:stop]
            offset = np.uint32(np.uint32(first) * np.uint32(GOLDEN))
            for index in range(len(part)):
                mixed = np.uint32(np.uint32(offset + steps[index]) ^ low)
                mixed = np.uint32(mixed ^ np.uint32(mixed >> np.uint32(16)))
                mixed = np.uint32(np.uint32(mixed * np.uint32(0x21F0AAAD)) + high)
                mixed = np.uint32(mixed ^ np.uint32(mixed >> np.uint32(15)))
                mixed = np.uint32(mixed * np.uint32(0x735A2D97))
                mixed = np.uint32(mixed ^ np.uint32(mixed >> np.uint32(15)))
                uniform = np.float32(np.int32(mixed >> np.uint32(8))) * np.float32(2.0**-24)
                value = part[index]
                level = min(np.float32(np.floor(abs(value) * factor + uniform)), most)
                out[index] = np.int32(most + np.copysign(level, value))
            if not len(buffer):
                continue
            to = buffer[: len(part)] if len(old_memory) else buffer[first:stop]
            # Products and sums have separate loops. In one loop the compiler could fuse a product
            # and a sum, and round only once. `Compressor.exchange` rounds both.
            for index in range(len(part)):
                decoded = np.float32(np.int32(np.int32(out[index]) - np.int32(levels))) * unit
                to[index] = decoded * contraction
            if not len(old_memory):
                for index in range(len(part)):
                    part[index] -= to[index]
                continue
            old = old_memory[first:stop]
            for index in range(len(part)):
                to[index] += old[index]
            for index in range(len(part)):
                part[index] = to[index]


def _restore(
    digits: np.ndarray, starts: np.ndarray, scales: np.ndarray, levels: int, out: np.ndarray
) -> None:
    """Fill `out`, float32 [entries], with the decoded digits.

    In a bucket with the scale c, the digit k is decoded as c * (k - s) / s, where s is `levels`.
    The arguments except `out` are those of `_round_randomly`.
    """
    most = np.int32(levels)
    for bucket in range(len(starts) - 1):
        unit = scales[bucket] / np.float32(levels)
        part = digits[starts[bucket] : starts[bucket + 1]]
        to = out[starts[bucket] : starts[bucket + 1]]
        for index in range(len(part)):
            to[index] = np.float32(np.int32(np.int32(part[index]) - most)) * unit


def _sum_squares(values: np.ndarray, starts: np.ndarray, squares: np.ndarray) -> None:
    """Write the sum of squares of each bucket's values to `squares`.

    values: float32 [entries].
    starts: int64 [buckets + 1]; bucket i has the entries from starts[i] to starts[i + 1] - 1.
    squares: the array to fill, float64 [buckets].
    """
    for bucket in range(len(starts) - 1):
        part = values[starts[bucket] : starts[bucket + 1]]
        whole = len(part) // 4
        fours = part[: 4 * whole].reshape(whole, 4)
        # four partial sums, because the CPU can make additions to different sums at the same time
        squares_0, squares_1, squares_2, squares_3 = 0.0, 0.0, 0.0, 0.0
        for place in range(whole):
            four = fours[place]
            value_0, value_1 = np.float64(four[0]), np.float64(four[1])
            value_2, value_3 = np.float64(four[2]), np.float64(four[3])
            squares_0 += value_0 * value_0
            squares_1 += value_1 * value_1
            squares_2 += value_2 * value_2
            squares_3 += value_3 * value_3
        for place in range(4 * whole, len(part)):
            value = np.float64(part[place])
            squares_0 += value * value
        squares[bucket] = squares_0 + squares_1 + squares_2 + squares_3


def _sum_powers(
    values: np.ndarray, starts: np.ndarray, sums: np.ndarray, largest: np.ndarray
) -> None:
    """Write the sum, the sum of squares and the largest absolute value of each bucket.

    starts: as in `_round_randomly`.
    sums: float64 [buckets, 2], to fill with the sums and the sums of squares.
    largest: float64 [buckets], to fill with the largest absolute values.
    """
    for bucket in range(len(starts) - 1):
        part = values[starts[bucket] : starts[bucket + 1]]
        whole = len(part) // 4
        fours = part[: 4 * whole].reshape(whole, 4)
        total_0, total_1, total_2, total_3 = 0.0, 0.0, 0.0, 0.0
        squares_0, squares_1, squares_2, squares_3 = 0.0, 0.0, 0.0, 0.0
        largest_0, largest_1, largest_2, largest_3 = 0.0, 0.0, 0.0, 0.0
        for place in range(whole):
            four = fours[place]
            value_0, value_1 = np.float64(four[0]), np.float64(four[1])
            value_2, value_3 = np.float64(four[2]), np.float64(four[3])
            total_0 += value_0
            total_1 += value_1
            total_2 += value_2
            total_3 += value_3
            squares_0 += value_0 * value_0
            squares_1 += value_1 * value_1
            squares_2 += value_2 * value_2
            squares_3 += value_3 * value_3
            largest_0 = max(largest_0, abs(value_0))
            largest_1 = max(largest_1, abs(value_1))
            largest_2 = max(largest_2, abs(value_2))
            largest_3 = max(largest_3, abs(value_3))
        for place in range(4 * whole, len(part)):
            value = np.float64(part[place])
            total_0 += value
            squares_0 += value * value
            largest_0 = max(largest_0, abs(value))
        sums[bucket, 0] = total_0 + total_1 + total_2 + total_3
        sums[bucket, 1] = squares_0 + squares_1 + squares_2 + squares_3
        largest[bucket] = max(max(largest_0, largest_1), max(largest_2, largest_3))


class _Quantizer(Compressor):
    """A compressor that sends a scale for each bucket of entries and a level for each entry.

    A bucket is a range of consecutive entries.
    levels: the number of levels above 0; an entry is sent as a level and a sign.
    """

    levels: int

    def starts(self, layout: Layout) -> np.ndarray:
        """Return the boundaries of the buckets, int64 [buckets + 1].

        Bucket i has the entries from starts[i] to starts[i + 1] - 1.
        """
        raise NotImplementedError

    def scales(self, values: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """Return the scale of each bucket: float32 [buckets].

        values: float32 [layout.trained], the vector to send.
        starts: int64 [buckets + 1]; bucket i has the entries from starts[i] to starts[i + 1] - 1.
        """
        raise NotImplementedError

    @property
    def width(self) -> int:
        """The number of bits that an entry takes in a message, for its level and its sign."""
        return (2 * self.levels).bit_length()

    def words(self, layout: Layout) -> int:
        """Return the size of a message (the scales and the levels) in words of 32 bits."""
        return len(self.starts(layout)) - 1 + words_of_bits(self.width * layout.trained)

    def encode(self, values: Tensor, layout: Layout, key: int, kept: Tensor) -> np.ndarray:
        """Return the message: the scales of all buckets, then the levels of all entries.

        key: the number from which the random rounding is computed.
        kept: not used, because a message does not depend on earlier messages.
        """
        return self._round(values, layout, key, NOTHING, NOTHING)

    def exchange(
        self, values: Tensor, memory: Tensor, layout: Layout, key: int, kept: Tensor
    ) -> Exchange:
        """Encode `values` with error feedback; return all results in an `Exchange`.

        The results are those of `Compressor.exchange`. This function is faster, because it rounds
        and decodes the entries in one pass.
        `values` may be overwritten. An empty `memory` stands for zeros, and `kept` is not used.
        """
        if not (self._is_direct(values) and len(memory)):
            return super().exchange(values, memory, layout, key, kept)
        following = self._add_memory(values, memory)
        if self.feedback == "ef14":
            message = self._round(following, layout, key, values, NOTHING)
            return Exchange(message, values, following)
        message = self._round(following, layout, key, torch.empty(CHUNK), memory)
        return Exchange(message, following, following)

    def _round(
        self, values: Tensor, layout: Layout, key: int, buffer: Tensor, old_memory: Tensor
    ) -> np.ndarray:
        """Encode `values` by random rounding; return the message.

        values: float32 [layout.trained]. The sender's next memory overwrites them, unless `buffer`
        is empty.
        key: the number from which the random rounding is computed.
        buffer, old_memory: as in `_round_randomly`, where `entries` is layout.trained.
        """
        starts, array = self.starts(layout), values.numpy()
        scales = self.scales(array, starts)
        digits = np.empty(len(array), np.uint16 if self.width > 8 else np.uint8)
        compile_function(_round_randomly)(
            array,
            starts,
            scales,
            self.levels,
            np.array([key], np.uint64).view(np.uint32),
            np.arange(CHUNK, dtype=np.uint32) * np.uint32(GOLDEN),
            digits,
            buffer.numpy(),
            old_memory.numpy(),
            np.float32(self.contraction(layout)),
        )
        return np.concatenate([scales.view(np.uint32), pack(digits, self.width)])

    def decode(self, message: np.ndarray, layout: Layout, out: Tensor) -> None:
        """Fill `out` with the decoded entries.

        An entry is c k / s, with the scale c of its bucket, its signed level k, and s = `levels`.
        """
        starts = self.starts(layout)
        buckets = len(starts) - 1
        dtype = np.uint16 if self.width > 8 else np.uint8
        digits = unpack(message[buckets:], self.width, layout.trained, dtype)
        scales = message[:buckets].view(np.float32)
        compile_function(_restore)(digits, starts, scales, self.levels, out.numpy())


class QSGD(_Quantizer):
    """A compressor that rounds entries randomly to multiples of norm / s.

    levels: the number s of levels above 0.
    bucket: the number of consecutive entries that share a norm. None is one norm for all, as in
    FedPAQ.
    direction: "up" compresses clients' updates, "down" the server's steps, "both" compresses both.
    feedback: the error feedback, "none", "ef21" or "ef14"; `Compressor` explains it.
    """

    name = "qsgd"
    paper = "Alistarh et al., NeurIPS 2017"

    def __init__(
        self,
        levels: int = 7,
        bucket: int | None = 512,
        direction: Direction = "up",
        feedback: Feedback = "none",
    ):
        super().__init__(direction, feedback)
        self.levels = int(in_range("compression.levels", levels, least=1, most=32767))
        self.bucket = bucket
        if bucket is not None:
            at_least("compression.bucket", bucket, 1)

    def starts(self, layout: Layout) -> np.ndarray:
        """Return the boundaries of the buckets, int64 [buckets + 1]."""
        size = self.bucket or max(1, layout.trained)
        return np.append(np.arange(0, layout.trained, size), layout.trained)

    def scales(self, values: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """Return the norm of each bucket: float32 [buckets].

        values: float32 [layout.trained], the vector to send.
        starts: int64 [buckets + 1]; bucket i has the entries from starts[i] to starts[i + 1] - 1.
        """
        squares = np.empty(len(starts) - 1)
        compile_function(_sum_squares)(values, starts, squares)
        return np.asarray(np.sqrt(squares), np.float32)

    def contraction(self, layout: Layout) -> float:
        """Return 1 / (1 + omega), by which decoded values are multiplied under error feedback.

        Here omega = min(b / s^2, sqrt(b) / s), with b entries in a bucket and s levels. A vector v
        is decoded with a variance of at most omega |v|^2 (Lemma 3.1).
        """
        size = min(self.bucket or layout.trained, layout.trained)
        omega = min(size / self.levels**2, math.sqrt(size) / self.levels)
        return 1 / (1 + omega)


class TernGrad(_Quantizer):
    """A compressor that rounds entries randomly to -m, 0 or m.

    m is the largest absolute value in the entry's tensor, after clipping.
    clip: before the rounding, entries are clipped to this number of standard deviations of their
    tensor; 0 does not clip.
    direction: "up" compresses clients' updates, "down" the server's steps, "both" compresses both.
    feedback: the error feedback, "none", "ef21" or "ef14"; `Compressor` explains it.
    """

    name = "terngrad"
    paper = "Wen et al., NeurIPS 2017"
    levels = 1

    def __init__(self, clip: float = 2.5, direction: Direction = "up", feedback: Feedback = "none"):
        super().__init__(direction, feedback)
        self.clip = at_least("compression.clip", clip, 0.0)

    def starts(self, layout: Layout) -> np.ndarray:
        """Return the boundaries of the tensors in the vector, int64 [tensors + 1]."""
        entries = [entry.start for entry in layout.entries if entry.stop <= layout.trained]
        return np.array([*entries, layout.trained], np.int64)

    def scales(self, values: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """Return the largest absolute value of each tensor, after clipping: float32 [tensors].

        values: float32 [layout.trained], all tensors one after another.
        starts: int64 [tensors + 1]; tensor i has the entries from starts[i] to starts[i + 1] - 1.
        """
        sums, largest = np.empty((len(starts) - 1, 2)), np.empty(len(starts) - 1)
        compile_function(_sum_powers)(values, starts, sums, largest)
        totals, squares = sums.T
        if not self.clip:
            return np.asarray(largest, np.float32)
        sizes = np.diff(starts)
        deviations = np.sqrt(np.maximum(squares / sizes - (totals / sizes) ** 2, 0))
        # A tensor of equal entries has no deviation, and nothing to clip.
        bounds = np.where(deviations > 0, self.clip * deviations, np.inf)
        return np.asarray(np.minimum(largest, bounds), np.float32)

    def contraction(self, layout: Layout) -> float:
        """Return 2 / (1 + sqrt(b)), by which decoded values are multiplied under error feedback.

        The largest tensor has b entries. A decoded vector's mean squared norm is at most (1 +
        sqrt(b)) / 2 times that of the sent vector.
        """
        largest = int(np.diff(self.starts(layout)).max())
        return 2 / (1 + math.sqrt(largest))
