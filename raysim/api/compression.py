"""Compression of what travels: the interface of a compressor, and error feedback.

Up: a client encodes the change of the shared parameters, and the server sees what it decodes. Down:
the server encodes its step, and the next version is the current one plus the decoded step, on the
server and on the clients. Statistics of BatchNorm and what methods send travel unchanged.

Error feedback, with C the code (encode, then decode), v what should travel, and m a memory that is
0 at first:

    none   send C(v)
    ef21   send C(v - m); the receiver's value is m + C(v - m), which is the next m
    ef14   send C(v + m); the next m is v + m - C(v + m)

Sources: Richtarik, Sokolov and Fatkhullin, "EF21: A New, Simpler, Theoretically Better, and
Practically Faster Error Feedback" (NeurIPS 2021), Algorithm 2; its bidirectional form is EF21-BC of
Fatkhullin et al. (2021). ef14 is the error feedback of Seide et al. (Interspeech 2014), as analysed
by Karimireddy et al. (ICML 2019).

Departures from the papers
- v is a client's update after several local steps, or the server's step, and not a gradient.
- With ef21 the receivers know m from the messages before. The server aggregates the values of the
  clients of this aggregation, with its usual weights; EF21 averages those of all clients.
- A client's memory changes only when its update is aggregated, as all client state does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from raysim.api.method import Method
from raysim.primitives.checks import one_of
from raysim.vectors.layout import Layout

if TYPE_CHECKING:
    from raysim.api.setup import Setup

Direction: TypeAlias = Literal["up", "down", "both"]
Feedback: TypeAlias = Literal["none", "ef21", "ef14"]

WORD_BITS = 32  # a message is a whole number of words, so that traffic counts whole floats
MEMORY, KEPT = "memory", "kept"  # names of a compressor's client state and server state


class Compressor(Method):
    """A code for the update of a client or for the step of the server.

    direction: "up" compresses what clients send, "down" what the server sends, "both" does both.
    feedback: error feedback, see the top of this file.

    A subclass has a `name`, passes these two arguments on, and overrides `words`, `encode` and
    `decode`. The size of a message is known before it exists, because the virtual clock needs it
    before the training.
    """

    def __init__(self, direction: Direction = "up", feedback: Feedback = "none"):
        self.direction = one_of("compression.direction", direction, ("up", "down", "both"))
        self.feedback = one_of("compression.feedback", feedback, ("none", "ef21", "ef14"))

    # --- what a compressor overrides --------------------------------------------------------------
    def words(self, layout: Layout) -> int:
        """Return the size of a message in words of 32 bits; it depends on the layout only."""
        raise NotImplementedError

    def encode(self, values: Tensor, layout: Layout, key: int, kept: Tensor) -> np.ndarray:
        """Return the message for `values`: uint32 [words].

        values: float32 [layout.trained] on the CPU, finite; do not change them.
        key: a random number below 2^63 for this message.
        kept: what the sender kept of its last message.
        """
        raise NotImplementedError

    def decode(self, message: np.ndarray, layout: Layout, out: Tensor) -> None:
        """Fill `out`, float32 [layout.trained] on the CPU, with the values of a message."""
        raise NotImplementedError

    def initial(self, layout: Layout) -> Tensor:
        """Return what a sender keeps before its first message, float32; by default nothing."""
        return torch.empty(0)

    def keep(self, message: np.ndarray, layout: Layout) -> Tensor:
        """Return what the sender keeps of a message for its next one."""
        return torch.empty(0)

    def contraction(self, layout: Layout) -> float:
        """Return the factor on decoded values under error feedback.

        Error feedback needs a code that shortens the error: |C(v) - v| < |v|. An unbiased code of
        relative variance omega becomes one when it is divided by 1 + omega (EF21, Section 2).
        """
        return 1.0

    # --- the run ----------------------------------------------------------------------------------
    @property
    def compresses_up(self) -> bool:
        """True if clients compress what they send."""
        return self.direction in ("up", "both")

    @property
    def compresses_down(self) -> bool:
        """True if the server compresses what it sends."""
        return self.direction in ("down", "both")

    def setup(self, run: Setup) -> None:
        """Declare the code, and the memory of its senders."""
        run.compress(self)
        run.needs_clients("it compresses what clients send and receive")
        has_memory = self.feedback != "none"
        keeps_messages = type(self).initial is not Compressor.initial
        if has_memory and self.compresses_up:
            run.client_state(MEMORY, run.zeros)
        if has_memory and self.compresses_down:
            run.server_state(MEMORY, run.zeros)
        if keeps_messages and self.compresses_up:
            run.client_state(KEPT, lambda samples: self.initial(run.layout))
        if keeps_messages and self.compresses_down:
            run.server_state(KEPT, lambda server: self.initial(run.layout))

    def send(
        self, values: Tensor, state: Mapping[str, Tensor], layout: Layout, key: int
    ) -> dict[str, Tensor]:
        """Replace values, in place, by what the receiver has; return the sender's next state.

        values: [layout.trained].
        state: `memory` and `kept`, if the sender has them.
        Raise ValueError if the message does not have the declared size.
        """
        memory = state.get(MEMORY)
        wanted = values
        if memory is not None:
            wanted = values - memory if self.feedback == "ef21" else values + memory
        kept = state.get(KEPT, torch.empty(0)).to("cpu", torch.float32)
        sent = wanted.to("cpu", torch.float32)
        message = self.encode(sent, layout, key, kept)
        if np.may_share_memory(message, sent.numpy()):
            message = message.copy()  # decoding overwrites the values
        words = self.words(layout)
        if message.dtype != np.uint32 or message.shape != (words,):
            raise ValueError(
                f"compression={self.name}: encode returned {message.dtype} {list(message.shape)}, "
                f"and words declares uint32 [{words}]. Correct one of them."
            )
        self._receive(message, layout, values, has_memory=memory is not None)
        following: dict[str, Tensor] = {}
        if memory is not None:
            if self.feedback == "ef21":
                values += memory
                following[MEMORY] = values.clone()
            else:
                following[MEMORY] = wanted.sub_(values)
        if KEPT in state:
            following[KEPT] = self.keep(message, layout).to(values)
        return following

    def _receive(
        self, message: np.ndarray, layout: Layout, values: Tensor, has_memory: bool
    ) -> None:
        """Fill `values` with what the message says."""
        is_direct = values.device.type == "cpu" and values.dtype == torch.float32
        out = values if is_direct else torch.empty(len(values))
        self.decode(message, layout, out)
        factor = self.contraction(layout) if has_memory else 1.0
        if factor != 1.0:
            out *= factor
        if not is_direct:
            values.copy_(out)
