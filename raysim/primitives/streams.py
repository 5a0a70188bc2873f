"""Make random streams that depend only on the run's seed, a purpose and keys."""

from __future__ import annotations

import functools
import hashlib

import numpy as np

_MASK_64 = (1 << 64) - 1
_MASK_32 = (1 << 32) - 1


@functools.cache
def _purpose_code(purpose: str) -> int:
    """Return a 64-bit number for a purpose; unlike Python's hash it is equal in all processes."""
    return int.from_bytes(hashlib.blake2b(purpose.encode(), digest_size=8).digest(), "big")


@functools.lru_cache(maxsize=1 << 16)
def _words(number: int) -> tuple[int, ...]:
    """Split a non-negative number into 32-bit numbers (words), the lowest one first."""
    if number <= _MASK_32:
        return (number,)
    return (number & _MASK_32, *_words(number >> 32))


@functools.lru_cache(maxsize=1 << 10)
def _first_words(seed: int, purpose: str) -> tuple[int, ...]:
    """Return the integers that begin the seed of a random stream.

    They are the run's seed and the number of the purpose, each split into 32-bit integers.
    """
    return (*_words(seed), *_words(_purpose_code(purpose)))


def stream(seed: int, purpose: str, *keys: int) -> np.random.Generator:
    """Return a random generator that depends only on the seed, the purpose and the keys.

    Different arguments give independent generators. A purpose must always have the same number of
    keys, because () and (0,) give equal generators.
    purpose: a name, such as "batches".
    keys: numbers of 0 or more, such as a client and a round. Only the last key may be 2^32 or more.
    """
    # These are the words that SeedSequence([seed, code, *keys]) would compute. Computing them here
    # is a third faster, and workers make a stream for each job.
    words = _first_words(seed, purpose)
    for key in keys:
        words += _words(key)
    sequence = np.random.SeedSequence(np.array(words, np.uint32))
    return np.random.Generator(np.random.PCG64(sequence))


def torch_seed(seed: int, purpose: str, *keys: int) -> int:
    """Return a seed for torch's generator, which dropout and initialisation use.

    seed, purpose, keys: the arguments of `stream`.
    """
    return int(stream(seed, purpose, *keys).integers(2**63 - 1))


# --- random numbers by key, independent of the order of the calls ---------------------------------
def stream_key(seed: int, purpose: str) -> int:
    """Return the key that `uniform` needs for a purpose: a number from 0 to 2^63 - 1.

    seed: the run's seed.
    """
    return int(stream(seed, purpose).integers(1 << 63))


def uniform(key: int, *numbers: int) -> float:
    """Return a random number in [0, 1) that depends only on the arguments.

    A call takes a tenth of the time of `stream`, which makes a generator.
    key: the result of `stream_key` for the purpose of the random number.
    numbers: numbers that distinguish the draws for this purpose, such as a client and a job.
    """
    # Each number goes through the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
    for number in numbers:
        key = (key + 0x9E3779B97F4A7C15 * (number + 1)) & _MASK_64
        key = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
        key = ((key ^ (key >> 27)) * 0x94D049BB133111EB) & _MASK_64
        key ^= key >> 31
    return (key >> 11) * 2.0**-53
