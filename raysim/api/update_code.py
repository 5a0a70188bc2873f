"""Define the protocol of a compressor: the attributes and functions that a run uses.

`raysim.api.compression` imports the interface of methods. To avoid an import cycle, the modules of
that interface use this protocol instead of the class `Compressor`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal, Protocol, TypeAlias

from torch import Tensor

from raysim.vectors.layout import Layout

Direction: TypeAlias = Literal["up", "down", "both"]


class UpdateCode(Protocol):
    """The interface through which a run uses a compressor; `Compressor` implements it."""

    name: ClassVar[str]
    direction: Direction

    @property
    def compresses_up(self) -> bool:
        """True if clients compress what they send."""

    @property
    def compresses_down(self) -> bool:
        """True if the server compresses what it sends."""

    def words(self, layout: Layout) -> int:
        """Return the size of a message in words of 32 bits."""

    def send(
        self, values: Tensor, state: Mapping[str, Tensor], layout: Layout, key: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compress and send a vector; return what the receiver gets, and the sender's next state.

        Do not change the decoded vector [layout.trained]; it may share memory with the next state.

        values: [layout.trained], the vector to send. It may be overwritten.
        state: the sender's state after its last message, by name.
        key: a random number below 2^63 for this message.
        """
