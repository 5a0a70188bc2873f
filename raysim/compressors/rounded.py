"""Numbers of fewer bits: float16, or int8 and fp8 in blocks that each have a scale.

    float16  C(v)_i = the nearest number of 16 bits; a number beyond 65504 becomes 65504
    int8     C(v)_i = scale round(v_i / scale), scale = max |v| of the block / 127
    fp8      C(v)_i = scale e4m3(v_i / scale), scale = max |v| of the block / 448

Sources: for fp8, the format E4M3 of Micikevicius et al., "FP8 Formats for Deep Learning" (2022),
with a largest value of 448. For blocks with a common scale, Dettmers, Lewis, Shleifer and
Zettlemoyer, "8-bit Optimizers via Block-wise Quantization" (ICLR 2022). The levels of int8 are
uniform here.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from raysim.api.compression import WORD_BITS, Compressor, Direction, Feedback
from raysim.compressors.bits import words_of_bits
from raysim.primitives.checks import at_least
from raysim.vectors.blocks import compile_function
from raysim.vectors.layout import Layout

LARGEST_HALF = float(torch.finfo(torch.float16).max)


def _count_beyond(values: np.ndarray, bound: float) -> int:
    """Return how many values have an absolute value above `bound`."""
    count = 0
    for index in range(len(values)):
        count += abs(values[index]) > np.float32(bound)
    return count


def _as_words(values: Tensor) -> np.ndarray:
    """Return the bytes of a tensor as words of 32 bits; the last word is filled up with zeros.

    values: a tensor on the CPU; each number has 8 or 16 bits.
    """
    raw = values.view(torch.uint8).numpy()
    missing = -len(raw) % (WORD_BITS // 8)
    return np.pad(raw, (0, missing)).view(np.uint32) if missing else raw.view(np.uint32)


def _from_words(words: np.ndarray, count: int, dtype: torch.dtype) -> Tensor:
    """Return the first `count` numbers of a tensor that `_as_words` has turned into words.

    dtype: the type of the tensor's numbers.
    """
    raw = torch.from_numpy(np.ascontiguousarray(words).view(np.uint8))
    return raw[: count * dtype.itemsize].view(dtype)


class Float16(Compressor):
    """A compressor that sends floats of 16 bits."""

    name = "float16"

    def words(self, layout: Layout) -> int:
        """Return the size of a message in words of 32 bits; an entry takes 16 bits."""
        return words_of_bits(16 * layout.trained)

    def encode(self, values: Tensor, layout: Layout, key: int, kept: Tensor) -> np.ndarray:
        """Return the entries, rounded to 16 bits.

        key, kept: not used, because this compressor is not random and remembers nothing.
        """
        if compile_function(_count_beyond)(values.numpy(), LARGEST_HALF):
            values = values.clamp(-LARGEST_HALF, LARGEST_HALF)
        return _as_words(values.half())

    def decode(self, message: np.ndarray, layout: Layout, out: Tensor) -> None:
        """Fill `out` with the entries of the message."""
        out.copy_(_from_words(message, len(out), torch.float16))


def _scale_blocks(
    values: np.ndarray,
    bits: np.ndarray,
    block: int,
    largest: float,
    scales: np.ndarray,
    scale_bits: np.ndarray,
    out: np.ndarray,
    is_rounded: bool,
) -> None:
    """Compute the scale of each block, and divide the block's values by this scale.

    The scale is max|v| / `largest`, where max|v| is the largest absolute value of the block.
    values: float32 [entries].
    bits: the same memory as `values`, as int32 [entries].
    block: the number of entries in a block.
    largest: the largest absolute value that the result may have, such as 127.
    scales: the array to fill with the scales, float32 [blocks].
    scale_bits: the same memory as `scales`, as int32 [blocks].
    out: the array to fill with the quotients, [entries]; of integers if `is_rounded`, else floats.
    is_rounded: True rounds each quotient to the nearest integer.
    """
    for place in range(len(scales)):
        part = values[place * block : (place + 1) * block]
        to = out[place * block : (place + 1) * block]
        # Without the sign bit, the bits of floats have the same order as their absolute values. So
        # the maximum is found by comparing integers, which is faster.
        longest = np.int32(0)
        for number in bits[place * block : (place + 1) * block]:
            longest = max(longest, np.int32(number & np.int32(0x7FFFFFFF)))
        scale_bits[place] = longest
        scale = scales[place] / np.float32(largest)
        scales[place] = scale
        divisor = scale if scale > 0 else np.float32(1)
        for index in range(len(part)):
            quotient = part[index] / divisor
            to[index] = np.rint(quotient) if is_rounded else quotient


def _restore_blocks(
    codes: np.ndarray, block: int, table: np.ndarray, scales: np.ndarray, out: np.ndarray
) -> None:
    """Convert 8-bit codes to floats, and multiply each float by the scale of its block.

    codes: uint8 [entries].
    block: the number of entries in a block.
    table: float32 [256]; table[c] is the number that code c stands for.
    scales: float32 [blocks].
    out: float32 [entries], the array to fill.
    """
    for place in range(len(scales)):
        part = codes[place * block : (place + 1) * block]
        to = out[place * block : (place + 1) * block]
        scale = scales[place]
        for index in range(len(part)):
            to[index] = table[part[index]] * scale


class Blocks(Compressor):
    """A compressor that sends numbers of 8 bits, and a scale for each block of entries.

    A subclass overrides the function `to_numbers` and two attributes: `dtype`, the type of the
    numbers, and `largest`, their largest absolute value.
    block: the number of entries that share a scale, which is a float of 32 bits.
    direction: "up" compresses clients' updates, "down" the server's steps, "both" compresses both.
    feedback: the error feedback, "none", "ef21" or "ef14"; `Compressor` explains it.
    """

    largest = 1.0
    dtype = torch.int8

    def __init__(self, block: int = 256, direction: Direction = "up", feedback: Feedback = "none"):
        super().__init__(direction, feedback)
        self.block = int(at_least("compression.block", block, 1))

    def blocks(self, layout: Layout) -> int:
        """Return the number of blocks; the last one may be shorter."""
        return -(-layout.trained // self.block)

    def words(self, layout: Layout) -> int:
        """Return the size of a message in words of 32 bits.

        A message has the scales, and 8 bits for each entry.
        """
        return self.blocks(layout) + words_of_bits(8 * layout.trained)

    def encode(self, values: Tensor, layout: Layout, key: int, kept: Tensor) -> np.ndarray:
        """Return the scales, then the numbers of 8 bits.

        key, kept: not used, because this compressor is not random and remembers nothing.
        """
        scales = np.empty(self.blocks(layout), np.float32)
        numbers = self.to_numbers(values.numpy(), scales)
        return np.concatenate([scales.view(np.uint32), _as_words(numbers)])

    def decode(self, message: np.ndarray, layout: Layout, out: Tensor) -> None:
        """Fill `out` with the numbers, each multiplied by the scale of its block."""
        blocks = self.blocks(layout)
        codes = message[blocks:].view(np.uint8)[: len(out)]
        table = torch.arange(256, dtype=torch.uint8).view(self.dtype).float().numpy()
        scales = message[:blocks].view(np.float32)
        compile_function(_restore_blocks)(codes, self.block, table, scales, out.numpy())

    def to_numbers(self, values: np.ndarray, scales: np.ndarray) -> Tensor:
        """Compute the scale of each block, and return the scaled values as numbers of 8 bits.

        A scaled value is the value divided by the scale of its block.
        values: float32 [layout.trained], the vector to send.
        scales: the array to fill with the scale of each block, float32 [blocks].
        """
        raise NotImplementedError

    def _fill(
        self, values: np.ndarray, scales: np.ndarray, out: np.ndarray, is_rounded: bool
    ) -> None:
        bits, scale_bits = values.view(np.int32), scales.view(np.int32)
        run = compile_function(_scale_blocks)
        run(values, bits, self.block, self.largest, scales, scale_bits, out, is_rounded)


class Int8(Blocks):
    """A compressor that sends integers of 8 bits, and a scale for each block of entries."""

    name = "int8"
    paper = "Dettmers et al., ICLR 2022"
    largest = 127.0

    def to_numbers(self, values: np.ndarray, scales: np.ndarray) -> Tensor:
        """Compute the scale of each block; return the scaled values as integers of 8 bits."""
        numbers = np.empty(len(values), np.int8)
        self._fill(values, scales, numbers, is_rounded=True)
        return torch.from_numpy(numbers)


class Fp8(Blocks):
    """A compressor that sends floats of 8 bits (E4M3), and a scale for each block of entries."""

    name = "fp8"
    paper = "Micikevicius et al., 2022"
    largest = 448.0
    dtype = torch.float8_e4m3fn

    def to_numbers(self, values: np.ndarray, scales: np.ndarray) -> Tensor:
        """Compute the scale of each block; return the scaled values as floats of 8 bits."""
        scaled = np.empty_like(values)
        self._fill(values, scales, scaled, is_rounded=False)
        return torch.from_numpy(scaled).to(torch.float8_e4m3fn)
