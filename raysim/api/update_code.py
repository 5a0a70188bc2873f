"""The protocol of a code for what travels, for modules below `raysim.api.compression`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal, Protocol

from torch import Tensor

from raysim.vectors.layout import Layout


class UpdateCode(Protocol):
    """What a run does with a `Compressor`."""

    name: ClassVar[str]
    direction: Literal["up", "down", "both"]

    @property
    def compresses_up(self) -> bool:
        """True if clients compress what they send."""

    @property
    def compresses_down(self) -> bool:
        """True if the server compresses what it sends."""

    def words(self, layout: Layout) -> int:
        """Return the size of a message in words of 32 bits; see `Compressor`."""

    def send(
        self, values: Tensor, state: Mapping[str, Tensor], layout: Layout, key: int
    ) -> dict[str, Tensor]:
        """Replace values by what the receiver has; see `Compressor`."""
