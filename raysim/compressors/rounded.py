"""Send numbers with fewer bits: as float16, or as int8 or fp8 with a scale for each block.

A block is a range of consecutive entries. Let m be the largest absolute value in the block of entry
v_i. Let e4m3(x) be the number of the 8-bit format E4M3 that is nearest to x. Then v_i is decoded as

    float16  the nearest number of 16 bits; beyond -65504 and 65504, the nearer of these two
    int8     s * round(v_i / s), with s = m / 127
    fp8      s * e4m3(v_i / s), with s = m / 448

Sources: for fp8, Micikevicius et al., "FP8 Formats for Deep Learning" (2022). For blocks, Dettmers,
Lewis, Shleifer and Zettlemoyer, "8-bit Optimizers via Block-wise Quantization" (ICLR 2022). The
levels of int8 are uniform here.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from raysim.api.compression import Compressor, Direction, Exchange, Feedback
from raysim.compressors.bits import words_of_bits
from raysim.primitives.checks import at_least
from raysim.vectors.blocks import compile_function, new_like, split_range
from raysim.vectors.layout import Layout

LARGEST_HALF = float(torch.finfo(torch.float16).max)
PART = 1 << 18  # entries of a part; the arrays that it needs fit into a CPU's second cache


def _count_beyond(values: np.ndarray, bound: float) -> int:
    """Return how many values have an absolute value above `bound`."""
    count = 0
    for index in range(len(values)):
        count += abs(values[index]) > np.float32(bound)
    return count


class _Partwise(Compressor):
    """A base class of compressors that encode a vector part by part.

    A part is a range of consecutive entries, which is encoded without knowledge of other parts. A
    subclass overrides `words`, `slots`, `encode_part` and `decode_part`.
    """

    block = 2  # parts start at multiples of this number of entries

    def slots(self, message: np.ndarray, layout: Layout) -> tuple[np.ndarray, ...]:
        """Return the arrays in a message that contain the encoded entries.

        The arrays are views of the message: a change of them changes the message.
        message: the message, uint32 [words].
        layout: the layout of the vector.
        """
        raise NotImplementedError

    def encode_part(self, values: Tensor, part: slice, slots: tuple[np.ndarray, ...]) -> None:
        """Encode the entries of a part, and write the result into the message.

        values: float32, the entries at the positions `part` of the vector.
        slots: the arrays of the message, from the method `slots`.
        """
        raise NotImplementedError

    def decode_part(self, out: Tensor, part: slice, slots: tuple[np.ndarray, ...]) -> None:
        """Decode the entries of a part from the message.

        out: the tensor to fill, float32, for the positions `part` of the vector.
        slots: the arrays of the message, from the method `slots`.
        """
        raise NotImplementedError

    def _parts(self, length: int) -> list[slice]:
        """Divide a vector into parts that fit into the CPU's cache."""
        return split_range(0, length, max(1, PART // self.block) * self.block)

    def encode(self, values: Tensor, layout: Layout, key: int, kept: Tensor) -> np.ndarray:
        """Return the message with the encoded entries, uint32 [words].

        values: the entries of the vector.
        key, kept: not used, because this compressor is not random and remembers nothing.
        """
        message = np.zeros(self.words(layout), np.uint32)
        slots = self.slots(message, layout)
        for part in self._parts(len(values)):
            self.encode_part(values[part], part, slots)
        return message

    def decode(self, message: np.ndarray, layout: Layout, out: Tensor) -> None:
        """Fill `out` with the decoded entries of a message.

        message: the message, uint32 [words].
        layout: the layout of the vector.
        """
        slots = self.slots(message, layout)
        for part in self._parts(len(out)):
            self.decode_part(out[part], part, slots)

    def exchange(
        self, values: Tensor, memory: Tensor, layout: Layout, key: int, kept: Tensor
    ) -> Exchange:
        """Encode `values` with error feedback; return all results in an `Exchange`.

        The results are those of `Compressor.exchange`. For speed, the vector is processed in ranges
        that fit into the CPU's cache.
        `values` may be overwritten. An empty `memory` stands for zeros; `key` and `kept` are not
        used.
        """
        if not (self._is_direct(values) and len(memory)):
            return super().exchange(values, memory, layout, key, kept)
        message = np.zeros(self.words(layout), np.uint32)
        slots, following = self.slots(message, layout), new_like(values)
        for part in self._parts(len(values)):
            old, new, received = memory[part], following[part], values[part]
            if self.feedback == "ef14":
                torch.add(received, old, out=new)
                self.encode_part(new, part, slots)
                self.decode_part(received, part, slots)
                new.sub_(received)
            else:
                torch.sub(received, old, out=new)
                self.encode_part(new, part, slots)
                self.decode_part(new, part, slots)
                new.add_(old)
        return Exchange(message, values if self.feedback == "ef14" else following, following)


class Float16(_Partwise):
    """A compressor that sends floats of 16 bits."""

    name = "float16"

    def words(self, layout: Layout) -> int:
        """Return the size of a message in words of 32 bits; an entry takes 16 bits."""
        return words_of_bits(16 * layout.trained)

    def slots(self, message: np.ndarray, layout: Layout) -> tuple[np.ndarray, ...]:
        """Return a tuple with one array: the message as floats of 16 bits.

        Item i is entry i of the vector. A change of the array changes the message.
        message: uint32 [words].
        """
        return (message.view(np.float16),)

    def encode_part(self, values: Tensor, part: slice, slots: tuple[np.ndarray, ...]) -> None:
        """Round the entries of a part to floats of 16 bits, and write them into the message.

        values: float32, the entries at the positions `part` of the vector; they are clipped to
        ±65504.
        slots: the result of the method `slots`.
        """
        if compile_function(_count_beyond)(values.numpy(), LARGEST_HALF):
            values = values.clamp(-LARGEST_HALF, LARGEST_HALF)
        torch.from_numpy(slots[0][part]).copy_(values)

    def decode_part(self, out: Tensor, part: slice, slots: tuple[np.ndarray, ...]) -> None:
        """Copy the entries of a part from the message.

        out: the tensor to fill, float32, for the positions `part` of the vector.
        slots: the result of the method `slots`.
        """
        out.copy_(torch.from_numpy(slots[0][part]))


def _encode_blocks(
    values: np.ndarray,
    bits: np.ndarray,
    block: int,
    largest: float,
    scales: np.ndarray,
    scale_bits: np.ndarray,
    quotients: np.ndarray,
    quotient_bits: np.ndarray,
    codes: np.ndarray,
    is_integer: bool,
) -> None:
    """Compute the scale of each block, and encode each value divided by this scale.

    The scale is the block's largest absolute value, divided by `largest`.
    bits, scale_bits, quotient_bits: the memory of `values`, `scales` and `quotients`, as int32.
    largest: the largest absolute value of an encoded number, such as 127.
    scales, codes: float32 [blocks] and uint8 [entries], to fill.
    quotients: float32 [block], working memory.
    is_integer: True encodes as integers of 8 bits, False in the format E4M3.
    """
    for place in range(len(scales)):
        part = values[place * block : (place + 1) * block]
        to = codes[place * block : (place + 1) * block]
        # Without the sign bit, the bits of floats have the same order as their absolute values. So
        # the maximum is found by comparing integers, which is faster.
        longest = np.int32(0)
        for number in bits[place * block : (place + 1) * block]:
            longest = max(longest, np.int32(number & np.int32(0x7FFFFFFF)))
        scale_bits[place] = longest
        scale = scales[place] / np.float32(largest)
        scales[place] = scale
        divisor = scale if scale > 0 else np.float32(1)
        if is_integer:
            for index in range(len(part)):
                to[index] = np.int32(np.rint(part[index] / divisor))
            continue
        # A float of 32 bits has 20 more bits of the mantissa than E4M3, and its exponent is larger
        # by 120. Half of the last remaining bit is added before the other bits are cut off, and one
        # unit less if the remaining number is even: this rounds to the nearest number.
        for index in range(len(part)):
            quotients[index] = part[index] / divisor
        for index in range(len(part)):
            number = np.int32(quotient_bits[index] & np.int32(0x7FFFFFFF))
            sign = np.int32(quotient_bits[index] >> np.int32(24)) & np.int32(0x80)
            is_odd = np.int32(number >> np.int32(20)) & np.int32(1)
            rounded = np.int32(number + np.int32(0x7FFFF) + is_odd)
            code = np.int32(rounded - np.int32(120 << 23)) >> np.int32(20)
            if number < np.int32(121 << 23):  # below 2^-6 the numbers are multiples of 2^-9
                code = np.int32(np.rint(abs(quotients[index]) * np.float32(512)))
            to[index] = np.int32(code | sign)


def _decode_integers(codes: np.ndarray, block: int, scales: np.ndarray, out: np.ndarray) -> None:
    """Multiply integers of 8 bits by the scale of their block.

    codes: int8 [entries].
    block: the number of entries in a block.
    scales: float32 [blocks].
    out: float32 [entries], the array to fill.
    """
    for place in range(len(scales)):
        part = codes[place * block : (place + 1) * block]
        to = out[place * block : (place + 1) * block]
        scale = scales[place]
        for index in range(len(part)):
            to[index] = np.float32(part[index]) * scale


def _decode_floats(
    codes: np.ndarray, block: int, scales: np.ndarray, out: np.ndarray, bits: np.ndarray
) -> None:
    """Multiply floats of the format E4M3 by the scales of their blocks.

    codes: the bits of the floats, uint8 [entries].
    block: the number of entries in a block.
    out: the array to fill, float32 [entries].
    bits: the memory of `out` as int32 [entries].
    """
    for place in range(len(scales)):
        first = place * block
        part = codes[first : first + block]
        to, to_bits = out[first : first + block], bits[first : first + block]
        scale = scales[place]
        for index in range(len(part)):
            code = np.int32(part[index])
            number = np.int32((code & np.int32(0x7F)) << np.int32(20)) + np.int32(120 << 23)
            to_bits[index] = number | np.int32((code & np.int32(0x80)) << np.int32(24))
        for index in range(len(part)):
            code = np.int32(part[index])
            size = np.int32(code & np.int32(0x7F))
            value = to[index]
            if size < 8:  # below 2^-6 the numbers are multiples of 2^-9
                value = np.copysign(np.float32(size) * np.float32(2.0**-9), value)
            to[index] = value * scale


class Blocks(_Partwise):
    """A compressor that sends numbers of 8 bits, and a scale for each block of entries.

    Subclasses set `dtype`, the type of the numbers of 8 bits. They also set `largest`, the largest
    absolute value of such a number.
    block: the number of entries that share a scale. A scale is a float of 32 bits.
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

    def slots(self, message: np.ndarray, layout: Layout) -> tuple[np.ndarray, ...]:
        """Return the arrays of a message: the blocks' scales and the 8 bits of each entry.

        The scales are float32 [blocks]. The bits are uint8 [n], where n is the number of entries,
        rounded up to a multiple of 4. A change of these arrays changes the message.
        message: uint32 [words].
        """
        blocks = self.blocks(layout)
        return message[:blocks].view(np.float32), message[blocks:].view(np.uint8)

    def _scales(self, part: slice, scales: np.ndarray) -> np.ndarray:
        """Return the scales of the blocks in a part of the vector.

        part: the positions of the part in the vector.
        scales: the scales of all blocks, float32 [blocks].
        """
        return scales[part.start // self.block : -(-part.stop // self.block)]

    def encode_part(self, values: Tensor, part: slice, slots: tuple[np.ndarray, ...]) -> None:
        """Write the scales of a part's blocks, and its entries in 8 bits, into the message.

        values: the entries of the part, float32.
        slots: the arrays of the message: scales, float32 [blocks], and entries, uint8 [entries].
        """
        scales, array = self._scales(part, slots[0]), values.numpy()
        quotients = np.empty(self.block, np.float32)
        compile_function(_encode_blocks)(
            array,
            array.view(np.int32),
            self.block,
            self.largest,
            scales,
            scales.view(np.int32),
            quotients,
            quotients.view(np.int32),
            slots[1][part],
            not self.dtype.is_floating_point,
        )

    def decode_part(self, out: Tensor, part: slice, slots: tuple[np.ndarray, ...]) -> None:
        """Decode a part of the vector: multiply each number of 8 bits by the scale of its block.

        out: the tensor to fill, float32, for the positions `part` of the vector.
        slots: the scales and numbers of all blocks, from the method `slots`.
        """
        codes, scales, array = slots[1][part], self._scales(part, slots[0]), out.numpy()
        if self.dtype.is_floating_point:
            run = compile_function(_decode_floats)
            run(codes, self.block, scales, array, array.view(np.int32))
        else:
            compile_function(_decode_integers)(codes.view(np.int8), self.block, scales, array)


class Int8(Blocks):
    """A compressor that sends integers of 8 bits, and a scale for each block of entries."""

    name = "int8"
    paper = "Dettmers et al., ICLR 2022"
    largest = 127.0


class Fp8(Blocks):
    """A compressor that sends floats of 8 bits (E4M3), and a scale for each block of entries."""

    name = "fp8"
    paper = "Micikevicius et al., 2022"
    largest = 448.0
    dtype = torch.float8_e4m3fn
