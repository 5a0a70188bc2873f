"""Numbers of fewer bits: float16, and blocks of int8 or fp8 with a scale each.

Source of the formats: Micikevicius et al., "FP8 Formats for Deep Learning" (2022), E4M3 with a
largest value of 448; blocks with a common scale as in Dettmers, Lewis, Shleifer and Zettlemoyer,
"8-bit Optimizers via Block-wise Quantization" (ICLR 2022), with uniform levels for int8.

    float16  the nearest number of 16 bits; beyond 65504 the largest one
    int8     C(v)_i = scale round(v_i / scale), scale = max |v| of the block / 127
    fp8      C(v)_i = scale e4m3(v_i / scale), scale = max |v| of the block / 448
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from raysim.api.compression import WORD_BITS, Compressor, Direction, Feedback
from raysim.compressors.bits import words_of_bits
from raysim.primitives.checks import at_least
from raysim.vectors.layout import Layout

LARGEST_HALF = float(torch.finfo(torch.float16).max)


def _as_words(values: Tensor) -> np.ndarray:
    """Return the bytes of a tensor as words, with zeros at the end to fill the last one."""
    raw = values.view(torch.uint8).numpy()
    missing = -len(raw) % (WORD_BITS // 8)
    return np.pad(raw, (0, missing)).view(np.uint32) if missing else raw.view(np.uint32)


def _from_words(words: np.ndarray, count: int, dtype: torch.dtype) -> Tensor:
    """Return `count` numbers from the words of `_as_words`."""
    raw = torch.from_numpy(np.ascontiguousarray(words).view(np.uint8))
    return raw[: count * dtype.itemsize].view(dtype)


class Float16(Compressor):
    """Floats of 16 bits."""

    name = "float16"

    def words(self, layout: Layout) -> int:
        """Return the size of 16 bits for each entry."""
        return words_of_bits(16 * layout.trained)

    def encode(self, values: Tensor, layout: Layout, key: int, kept: Tensor) -> np.ndarray:
        """Return the rounded entries."""
        return _as_words(values.clamp(-LARGEST_HALF, LARGEST_HALF).half())

    def decode(self, message: np.ndarray, layout: Layout, out: Tensor) -> None:
        """Fill `out` with the entries."""
        out.copy_(_from_words(message, len(out), torch.float16))


class Blocks(Compressor):
    """Numbers of 8 bits in blocks, with the scale of each block as a float of 32 bits.

    block: entries that share a scale.
    """

    largest = 1.0
    dtype = torch.int8

    def __init__(self, block: int = 256, direction: Direction = "up", feedback: Feedback = "none"):
        super().__init__(direction, feedback)
        self.block = at_least("compression.block", block, 1)

    def blocks(self, layout: Layout) -> int:
        """Return the number of blocks; the last one may be shorter."""
        return -(-layout.trained // self.block)

    def words(self, layout: Layout) -> int:
        """Return the size of the scales and of 8 bits for each entry."""
        return self.blocks(layout) + words_of_bits(8 * layout.trained)

    def encode(self, values: Tensor, layout: Layout, key: int, kept: Tensor) -> np.ndarray:
        """Return the scales, then the numbers."""
        rows, rest = self._rows(values)
        scaled = torch.empty(len(values))
        scaled_rows, scaled_rest = self._rows(scaled)
        scales = torch.empty(self.blocks(layout))
        for source, target, scale in (
            (rows, scaled_rows, scales[: len(rows)]),
            (rest, scaled_rest, scales[len(rows) :]),
        ):
            if source.numel():
                torch.linalg.vector_norm(source, torch.inf, dim=1, out=scale)
                scale /= self.largest
                torch.div(
                    source, scale.clamp(min=torch.finfo(torch.float32).tiny)[:, None], out=target
                )
        numbers = self.to_numbers(scaled)
        return np.concatenate([scales.numpy().view(np.uint32), _as_words(numbers)])

    def decode(self, message: np.ndarray, layout: Layout, out: Tensor) -> None:
        """Fill `out` with the numbers times the scale of their block."""
        blocks = self.blocks(layout)
        scales = torch.from_numpy(message[:blocks].view(np.float32))
        out.copy_(_from_words(message[blocks:], len(out), self.dtype))
        rows, rest = self._rows(out)
        rows *= scales[: len(rows), None]
        if rest.numel():
            rest *= scales[-1]

    def to_numbers(self, scaled: Tensor) -> Tensor:
        """Return the numbers of 8 bits that are nearest to values from -largest to largest."""
        raise NotImplementedError

    def _rows(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return views of the whole blocks [blocks, block], and of the rest [0 or 1, entries]."""
        whole = len(values) // self.block * self.block
        rest = values[whole:]
        return values[:whole].view(-1, self.block), rest.view(-1, max(1, len(rest)))


class Int8(Blocks):
    """Integers of 8 bits in blocks."""

    name = "int8"
    paper = "Dettmers et al., ICLR 2022"
    largest = 127.0

    def to_numbers(self, scaled: Tensor) -> Tensor:
        """Round to the nearest integer."""
        return scaled.round_().to(torch.int8)


class Fp8(Blocks):
    """Floats of 8 bits (E4M3) in blocks."""

    name = "fp8"
    paper = "Micikevicius et al., 2022"
    largest = 448.0
    dtype = torch.float8_e4m3fn

    def to_numbers(self, scaled: Tensor) -> Tensor:
        """Round to the nearest float."""
        return scaled.to(torch.float8_e4m3fn)
