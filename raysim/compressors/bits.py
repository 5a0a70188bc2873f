"""Pack integers into words of 32 bits.

`pack` takes small integers ("digits") that all have the same number of bits; `pack_positions` takes
ascending positions in a vector.
"""

from __future__ import annotations

import numpy as np

from raysim.api.compression import WORD_BITS
from raysim.vectors.blocks import compile_function

FOLDED = (1, 2, 4)  # widths of digits that are packed 8 at a time
WHOLE = (8, 16, 32)  # widths of digits that need no packing


def words_of_bits(bits: int) -> int:
    """Return the number of words of 32 bits that `bits` bits need."""
    return -(-bits // WORD_BITS)


def _pack(digits: np.ndarray, width: int, words: np.ndarray) -> None:
    """Write digits of `width` bits one after another into words of 32 bits, lowest bit first.

    digits: [n], each below 2^width.
    words: the array to fill, uint32 [n * width / 32, rounded up].
    """
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


def _fold(unpacked: np.ndarray, width: int, packed: np.ndarray) -> None:
    """Pack digits in groups of 8: from a byte for each digit to `width` bits for each digit.

    unpacked: uint64 [n]; each of the 8 bytes of an entry is a digit below 2^width.
    width: 1, 2 or 4.
    packed: the array to fill, [n], unsigned integers of 8 * width bits.
    """
    once, twice = np.uint64(8 - width), np.uint64(16 - 2 * width)
    thrice = np.uint64(32 - 4 * width)
    pairs = np.uint64((1 << 2 * width) - 1) * np.uint64(0x0001000100010001)
    fours = np.uint64((1 << 4 * width) - 1) * np.uint64(0x0000000100000001)
    for place in range(len(unpacked)):
        bits = unpacked[place]
        bits = (bits | (bits >> once)) & pairs
        bits = (bits | (bits >> twice)) & fours
        packed[place] = bits | (bits >> thrice)


def _unpack(words: np.ndarray, width: int, digits: np.ndarray) -> None:
    """Fill `digits` with the digits that `_pack` wrote into `words`.

    words: uint32, the packed digits.
    width: the number of bits of a digit.
    digits: [n], integers, the array to fill.
    """
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


def _unfold(packed: np.ndarray, width: int, unpacked: np.ndarray) -> None:
    """Unpack digits in groups of 8: from `width` bits for each digit to a byte for each digit.

    packed: [n], from `_fold`.
    width: 1, 2 or 4.
    unpacked: the array to fill, uint64 [n]; each of the 8 bytes of an entry gets a digit.
    """
    once, twice = np.uint64(8 - width), np.uint64(16 - 2 * width)
    thrice = np.uint64(32 - 4 * width)
    ones = np.uint64((1 << width) - 1) * np.uint64(0x0101010101010101)
    pairs = np.uint64((1 << 2 * width) - 1) * np.uint64(0x0001000100010001)
    fours = np.uint64((1 << 4 * width) - 1) * np.uint64(0x0000000100000001)
    for place in range(len(unpacked)):
        bits = np.uint64(packed[place])
        bits = (bits | (bits << thrice)) & fours
        bits = (bits | (bits << twice)) & pairs
        unpacked[place] = (bits | (bits << once)) & ones


def _pad(digits: np.ndarray, dtype: str, group: int) -> np.ndarray:
    """Convert digits to `dtype`, and append zeros until the length is a multiple of `group`."""
    digits = np.ascontiguousarray(digits, dtype)
    missing = -len(digits) % group
    return np.pad(digits, (0, missing)) if missing else digits


def pack(digits: np.ndarray, width: int) -> np.ndarray:
    """Pack digits of `width` bits into words of 32 bits.

    digits: [n], each below 2^width.
    Return uint32 [n * width / 32, rounded up].
    """
    if width in WHOLE:
        return _pad(digits, f"u{width // 8}", WORD_BITS // width).view(np.uint32)
    words = np.zeros(words_of_bits(len(digits) * width), np.uint32)
    if width in FOLDED:
        unpacked = _pad(digits, "u1", 8).view(np.uint64)
        compile_function(_fold)(unpacked, width, words.view(f"u{width}"))
    elif len(words):
        compile_function(_pack)(digits, width, words)
    return words


def unpack(words: np.ndarray, width: int, count: int, dtype: type = np.uint32) -> np.ndarray:
    """Return the digits that `pack` packed, [count], with the type `dtype`.

    words: the result of `pack`.
    width: the number of bits of a digit, the argument `width` of `pack`.
    count: the number of digits.
    """
    if width in WHOLE:
        return words.view(f"u{width // 8}")[:count].astype(dtype)
    if width in FOLDED:
        unpacked = np.empty(-(-count // 8), np.uint64)
        compile_function(_unfold)(words.view(f"u{width}"), width, unpacked)
        return unpacked.view(np.uint8)[:count].astype(dtype, copy=False)
    digits: np.ndarray = np.zeros(count, dtype)
    if count and width:
        compile_function(_unpack)(words, width, digits)
    return digits


# --- sorted positions -----------------------------------------------------------------------------
def _low_bits(count: int, length: int) -> int:
    """Return l, the number of lowest bits of each position that `pack_positions` stores unchanged.

    count: the number of positions. Without positions, l has all bits, and no words are needed.
    length: all positions are below this number.
    """
    if not count:
        return length.bit_length()
    return max(0, (length // count).bit_length() - 1)


def words_of_positions(count: int, length: int) -> int:
    """Return the number of words that `pack_positions` returns.

    count: the number of positions.
    length: all positions are below this number.
    """
    low = _low_bits(count, length)
    return words_of_bits(count * low) + words_of_bits(count + ((length - 1) >> low))


def pack_positions(positions: np.ndarray, length: int) -> np.ndarray:
    """Pack ascending positions below `length` into words; return uint32 [words].

    The code of Elias (1974) and Fano (1971) takes about 2 + log2(length / n) bits for each of the n
    positions. First come the l lowest bits of each position, see `_low_bits`. In the string of bits
    after them, bit i + floor(positions[i] / 2^l) is 1 for each i.
    """
    count, low = len(positions), _low_bits(len(positions), length)
    lowest = pack(positions & ((1 << low) - 1), low)
    bits = np.zeros(words_of_bits(count + ((length - 1) >> low)) * WORD_BITS, np.uint8)
    bits[(positions >> low) + np.arange(count)] = 1
    return np.concatenate([lowest, np.packbits(bits, bitorder="little").view(np.uint32)])


def _find_set_bits(words: np.ndarray, positions: np.ndarray) -> None:
    """Fill `positions` with the positions of all bits that are 1, in ascending order.

    Position 0 is the lowest bit of the first word. If `positions` is too short, only the lowest
    positions are written.
    words: uint32, the words to search.
    """
    count, room = 0, len(positions)
    for word in range(len(words)):
        for bit in range(32):
            if count < room:
                positions[count] = 32 * word + bit  # the next bit overwrites that of a 0
            count += (words[word] >> np.uint32(bit)) & np.uint32(1)


def unpack_positions(words: np.ndarray, count: int, length: int) -> np.ndarray:
    """Return the positions that `pack_positions` packed, int64 [count].

    words: the result of `pack_positions`.
    count: the number of positions.
    length: the argument `length` of `pack_positions`; all positions are below this number.
    """
    low = _low_bits(count, length)
    cut = words_of_bits(count * low)
    high: np.ndarray = np.empty(count, np.int64)
    compile_function(_find_set_bits)(words[cut:], high)
    high -= np.arange(count)
    return (high << low) | unpack(words[:cut], low, count).astype(np.int64)
