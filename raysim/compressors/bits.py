"""Pack numbers into words of 32 bits.

The numbers are digits with a fixed number of bits, or sorted positions.
"""

from __future__ import annotations

import numpy as np

from raysim.api.compression import WORD_BITS
from raysim.vectors.blocks import compile_function


def words_of_bits(bits: int) -> int:
    """Return the number of words of 32 bits that `bits` bits need."""
    return -(-bits // WORD_BITS)


def _pack(digits: np.ndarray, width: int, words: np.ndarray) -> None:
    """Write digits of `width` bits one after another into words of 32 bits, lowest bit first."""
    pending, filled, place = np.uint64(0), 0, 0
    for digit in digits:
        pending |= np.uint64(digit) << np.uint64(filled)
        filled += width
        if filled >= 32:
            words[place] = np.uint32(pending & np.uint64(0xFFFFFFFF))
            pending >>= np.uint64(32)
            filled -= 32
            place += 1
    if filled:
        words[place] = np.uint32(pending & np.uint64(0xFFFFFFFF))


def _pack_whole(digits: np.ndarray, width: int, words: np.ndarray) -> None:
    """Write the same words as `_pack`, in less time; `width` must divide 32."""
    room = 32 // width
    for place in range(len(digits) // room):
        word = np.uint32(0)
        part = digits[place * room : (place + 1) * room]
        for index in range(room):
            word |= np.uint32(np.uint32(part[index]) << np.uint32(index * width))
        words[place] = word
    first = len(digits) // room * room
    for index in range(first, len(digits)):
        words[len(words) - 1] |= np.uint32(digits[index]) << np.uint32((index - first) * width)


def _unpack(words: np.ndarray, width: int, digits: np.ndarray) -> None:
    """Fill `digits` with the digits that `_pack` wrote into `words`."""
    mask = np.uint64((1 << width) - 1)
    pending, filled, place = np.uint64(0), 0, 0
    for index in range(len(digits)):
        if filled < width:
            pending |= np.uint64(words[place]) << np.uint64(filled)
            filled += 32
            place += 1
        digits[index] = pending & mask
        pending >>= np.uint64(width)
        filled -= width


def _unpack_whole(words: np.ndarray, width: int, digits: np.ndarray) -> None:
    """Fill `digits` as `_unpack` does, in less time; `width` must divide 32."""
    room = 32 // width
    mask = np.uint32((1 << width) - 1)
    for place in range(len(digits) // room):
        word = words[place]
        part = digits[place * room : (place + 1) * room]
        for index in range(room):
            part[index] = np.uint32(word >> np.uint32(index * width)) & mask
    first = len(digits) // room * room
    for index in range(first, len(digits)):
        digits[index] = (words[len(words) - 1] >> np.uint32((index - first) * width)) & mask


def pack(digits: np.ndarray, width: int) -> np.ndarray:
    """Pack digits into words; return uint32 [ceil(n width / 32)].

    digits: [n], each below 2^width.
    width: the bits of a digit.
    """
    words = np.zeros(words_of_bits(len(digits) * width), np.uint32)
    if len(words):
        rule = _pack if WORD_BITS % width else _pack_whole
        compile_function(rule)(digits, width, words)
    return words


def unpack(words: np.ndarray, width: int, count: int, dtype: type = np.uint32) -> np.ndarray:
    """Return the digits that `pack` packed, [count], with the type `dtype`."""
    digits: np.ndarray = np.zeros(count, dtype)
    if count and width:
        rule = _unpack if WORD_BITS % width else _unpack_whole
        compile_function(rule)(words, width, digits)
    return digits


# --- sorted positions -----------------------------------------------------------------------------
def _low_bits(count: int, length: int) -> int:
    """Return the number of low bits of a position that are stored unchanged; see `pack_places`."""
    return max(0, (length // count).bit_length() - 1)


def words_of_places(count: int, length: int) -> int:
    """Return the number of words that `pack_places` returns.

    count: the number of positions.
    length: the bound of the positions.
    """
    low = _low_bits(count, length)
    return words_of_bits(count * low) + words_of_bits(count + ((length - 1) >> low))


def pack_places(places: np.ndarray, length: int) -> np.ndarray:
    """Pack ascending positions below `length` into words; return uint32 [words].

    A position needs about 2 + log2(length / count) bits, where count is the number of positions.
    This is the code of Elias (1974) and Fano (1971): the low bits of each position are stored
    unchanged. A second string of bits stores the high bits: the i-th position p sets the bit (p >>
    low) + i, where low is the number of low bits. The size depends only on `length` and the number
    of positions.
    """
    count, low = len(places), _low_bits(len(places), length)
    lowest = pack(places & ((1 << low) - 1), low)
    bits = np.zeros(words_of_bits(count + ((length - 1) >> low)) * WORD_BITS, np.uint8)
    bits[(places >> low) + np.arange(count)] = 1
    return np.concatenate([lowest, np.packbits(bits, bitorder="little").view(np.uint32)])


def unpack_places(words: np.ndarray, count: int, length: int) -> np.ndarray:
    """Return the positions that `pack_places` packed, int64 [count].

    length: the bound of the positions that `pack_places` got.
    """
    low = _low_bits(count, length)
    cut = words_of_bits(count * low)
    bits = np.unpackbits(words[cut:].view(np.uint8), bitorder="little")
    high = np.flatnonzero(bits) - np.arange(count)
    return (high << low) | unpack(words[:cut], low, count).astype(np.int64)
