"""Named random streams: every draw of a run comes from a generator derived from (seed, purpose, keys)."""

from __future__ import annotations

import functools
import hashlib

import numpy as np


@functools.cache
def _code(purpose: str) -> int:
    """A 64-bit number for a name, the same in every process (Python's own hash is not)."""
    return int.from_bytes(hashlib.blake2b(purpose.encode(), digest_size=8).digest(), "big")


def stream(seed: int, purpose: str, *keys: int) -> np.random.Generator:
    """The generator named (purpose, keys): e.g. ("batches", client, turn). Independent for different names.

    A purpose always has the same number of keys: (3,) and (3, 0) would name the same stream.
    """
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, _code(purpose), *keys])))


def torch_seed(seed: int, purpose: str, *keys: int) -> int:
    """A seed for torch's generator, for the few things that can draw from nothing else (dropout, initialisation)."""
    return int(stream(seed, purpose, *keys).integers(2**63 - 1))
