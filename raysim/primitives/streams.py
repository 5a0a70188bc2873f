"""Named random streams: every draw of a run comes from a generator derived from (seed, purpose, keys)."""

from __future__ import annotations

import functools
import hashlib

import numpy as np


@functools.cache
def _code(purpose: str) -> int:
    """A 64-bit number for a name, the same in every process (Python's own hash is not)."""
    return int.from_bytes(hashlib.blake2b(purpose.encode(), digest_size=8).digest(), "big")


@functools.lru_cache(maxsize=1 << 16)
def _words(number: int) -> tuple[int, ...]:
    """A non-negative number as 32-bit words, the lowest first."""
    return (number,) if number < 1 << 32 else (number & 0xFFFFFFFF, *_words(number >> 32))


def stream(seed: int, purpose: str, *keys: int) -> np.random.Generator:
    """The generator named (purpose, keys): e.g. ("batches", client, participation). Independent for different names.

    A purpose always has the same number of keys: (3,) and (3, 0) would name the same stream.
    """
    # The words that SeedSequence([seed, code, *keys]) would make itself, a third faster: workers make a stream per job.
    words = [
        *_words(seed),
        *_words(_code(purpose)),
        *(word for key in keys for word in _words(key)),
    ]
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(np.array(words, np.uint32))))


def torch_seed(seed: int, purpose: str, *keys: int) -> int:
    """A seed for torch's generator, for the few things that can draw from nothing else (dropout, initialisation)."""
    return int(stream(seed, purpose, *keys).integers(2**63 - 1))


# --- numbers that are looked up and not drawn in turn -----------------------------------------------------------------
_MASK = (1 << 64) - 1


def stream_key(seed: int, purpose: str) -> int:
    """What `uniform` needs of a seed and a purpose."""
    return int(stream(seed, purpose).integers(1 << 63))


def uniform(key: int, *place: int) -> float:
    """A number in [0, 1) that belongs to this place: the same whenever and in whatever order it is looked up.

    For what a virtual clock asks a million times: making a generator costs ten times as much. Each part of the place
    goes through the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
    """
    for part in place:
        key = (key + 0x9E3779B97F4A7C15 * (part + 1)) & _MASK
        key = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        key = ((key ^ (key >> 27)) * 0x94D049BB133111EB) & _MASK
        key ^= key >> 31
    return (key >> 11) * 2.0**-53
