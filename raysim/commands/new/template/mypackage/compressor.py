"""A compressor: each block of neighbouring parameters is sent as one number, its mean."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from raysim import Compressor
from raysim.api.compression import Direction, Feedback
from raysim.primitives.checks import at_least
from raysim.vectors.layout import Layout


class MyCompressor(Compressor):
    """A compressor that sends the mean of each block of neighbouring parameters.

    block: the number of parameters in a block.
    direction: "up" compresses clients' updates, "down" the server's steps, "both" compresses both.
    feedback: the error feedback, "none", "ef21" or "ef14"; see `help(raysim.Compressor)`.
    """

    name = "mypackage_means"
    paper = "none"

    def __init__(self, block: int = 2, direction: Direction = "up", feedback: Feedback = "ef14"):
        super().__init__(direction, feedback)
        self.block = at_least("compression.block", block, 1)

    def words(self, layout: Layout) -> int:
        """Return the size of a message in words of 32 bits: one float for each block."""
        return -(-layout.trained // self.block)

    def encode(self, values: Tensor, layout: Layout, key: int, kept: Tensor) -> np.ndarray:
        """Return the means of the blocks as words of 32 bits, uint32 [self.words(layout)].

        values: float32 [layout.trained]; the last block is filled up with zeros.
        key, kept: not used, because this compressor is not random and remembers nothing.
        """
        padded = np.zeros(self.words(layout) * self.block, np.float32)
        padded[: len(values)] = values.numpy()
        means: np.ndarray = padded.reshape(-1, self.block).mean(1)
        return means.view(np.uint32)

    def decode(self, message: np.ndarray, layout: Layout, out: Tensor) -> None:
        """Set each entry of `out` to the mean of its block."""
        out.numpy()[:] = message.view(np.float32).repeat(self.block)[: len(out)]
