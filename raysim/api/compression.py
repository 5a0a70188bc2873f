"""Compress clients' updates and the server's steps: compressors and error feedback.

A client encodes the change of the shared parameters (up), and the server uses the decoded change.
The server encodes its step (down), and the next version is the current version plus the decoded
step, on the server and on the clients. BatchNorm statistics and tensors of methods travel
unchanged.

Error feedback, with C the code (encode, then decode), v the vector to send, and m a memory that
starts at 0:

    none   send C(v)
    ef21   send C(v - m); the receiver's value is m + C(v - m), which is the next m
    ef14   send C(v + m); the next m is v + m - C(v + m)

Sources: ef21 is Algorithm 2 of Richtarik, Sokolov and Fatkhullin, "EF21: A New, Simpler,
Theoretically Better, and Practically Faster Error Feedback" (NeurIPS 2021). With direction="both"
it is EF21-BC of Fatkhullin et al. (2021). ef14 is the error feedback of Seide et al. (Interspeech
2014), as analysed by Karimireddy et al. (ICML 2019).

Departures from the papers
- v is a client's update after several local steps, or the server's step, and not a gradient.
- With ef21 sender and receiver both compute m from the earlier messages. The server aggregates the
  decoded updates of the clients that took part, with its usual weights; EF21 averages the latest
  decoded vectors of all clients.
- A client's memory changes only when its update is aggregated, like all client state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from raysim.api.method import Method
from raysim.primitives.checks import one_of
from raysim.vectors.blocks import BLOCK, new_like, split_range
from raysim.vectors.layout import Layout

if TYPE_CHECKING:
    from raysim.api.setup import Setup

Direction: TypeAlias = Literal["up", "down", "both"]
Feedback: TypeAlias = Literal["none", "ef21", "ef14"]

WORD_BITS = 32  # a message is a whole number of words, so that traffic is a whole number of floats
MEMORY, KEPT = "memory", "kept"  # names of a compressor's client state and server state


class Compressor(Method):
    """An encoder that makes the update of a client, or the step of the server, smaller.

    direction: "up" compresses clients' updates, "down" the server's steps, "both" compresses both.
    feedback: the algorithm of error feedback: "none", "ef21" or "ef14"; the top of this file has
    the formulas.

    A subclass sets `name` and overrides `words`, `encode` and `decode`. Its constructor passes
    `direction` and `feedback` to the constructor of this class. The size of a message must be known
    in advance, because the virtual clock needs it before the training.
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
        kept: the tensor that `keep` made from the sender's last message; for the first message, the
        tensor that `initial` returned.
        """
        raise NotImplementedError

    def decode(self, message: np.ndarray, layout: Layout, out: Tensor) -> None:
        """Fill `out`, float32 [layout.trained] on the CPU, with the values of a message."""
        raise NotImplementedError

    def initial(self, layout: Layout) -> Tensor:
        """Return the value of `kept` with which `encode` is called for a sender's first message.

        By default the tensor is empty. A compressor overrides this function and `keep` if a message
        depends on the one before. PowerSGD, for example, starts from the directions of the last
        message.
        """
        return torch.empty(0)

    def keep(self, message: np.ndarray, layout: Layout) -> Tensor:
        """Return the value of `kept` with which `encode` is called for the sender's next message.

        By default the tensor is empty. A compressor that overrides this function must also override
        `initial`.

        message: the message that the sender has just sent.
        """
        return torch.empty(0)

    def contraction(self, layout: Layout) -> float:
        """Return the factor on decoded values that error feedback needs; the default is 1.

        Error feedback converges only if |C(v) - v| < |v| for the code C and every vector v. A code
        that draws random numbers may be unbiased, E C(v) = v, with a variance up to omega |v|^2.
        Such a code returns 1 / (1 + omega), because the scaled code C(v) / (1 + omega) satisfies
        the inequality in expectation (EF21, Section 2). Without error feedback, the factor is not
        used.
        """
        return 1.0

    def exchange(
        self, values: Tensor, memory: Tensor, layout: Layout, key: int, kept: Tensor
    ) -> tuple[np.ndarray, Tensor]:
        """Send `values` with error feedback; return the message and the sender's next memory.

        Fill `values` with the values that the receiver has. A compressor may override this function
        with a faster one that has the same results. A subclass of such a compressor that overrides
        `encode` must override this function as well.
        values: [layout.trained], the vector v at the top of this file.
        memory: [layout.trained], the sender's memory m, which must not be changed; empty if m is 0.
        key, kept: see `encode`.
        All tensors but `kept` are on the device of the sender.
        """
        following = self._add_memory(values, memory)
        message = self._message(following, layout, key, kept)
        self._receive(message, layout, values, self.contraction(layout))
        is_on_cpu = values.device.type == "cpu"
        for part in split_range(0, len(values), BLOCK if is_on_cpu else len(values)):
            received = values[part]
            if self.feedback == "ef14":
                following[part].sub_(received)
                continue
            if len(memory):
                received.add_(memory[part])
            following[part].copy_(received)
        return message, following

    # --- functions for `exchange` -----------------------------------------------------------------
    def _add_memory(self, values: Tensor, memory: Tensor) -> Tensor:
        """Return the vector to encode in a new tensor: v - m with ef21, and v + m with ef14.

        values: [layout.trained], the vector v.
        memory: [layout.trained], the memory m; empty if m is 0.
        """
        wanted = new_like(values)
        if not len(memory):
            return wanted.copy_(values)
        if self.feedback == "ef21":
            return torch.sub(values, memory, out=wanted)
        return torch.add(values, memory, out=wanted)

    def _message(self, values: Tensor, layout: Layout, key: int, kept: Tensor) -> np.ndarray:
        """Return the message of `encode`, which shares no memory with `values`.

        values: [layout.trained], the vector to encode, on any device.
        key, kept: see `encode`.
        Raise ValueError if the message does not have the declared size.
        """
        sent = values.to("cpu", torch.float32)
        message = self.encode(sent, layout, key, kept)
        if np.may_share_memory(message, sent.numpy()):
            message = message.copy()  # decoding overwrites `values`
        words = self.words(layout)
        if message.dtype != np.uint32 or message.shape != (words,):
            raise ValueError(
                f"compression={self.name}: the function 'encode' returned {message.dtype} "
                f"{list(message.shape)}, but it must return uint32 [{words}], because the function "
                f"'words' returned {words}. Correct one of the two functions."
            )
        return message

    def _receive(
        self, message: np.ndarray, layout: Layout, values: Tensor, factor: float = 1.0
    ) -> None:
        """Fill `values` with the decoded message, multiplied by `factor`.

        values: [layout.trained], on any device.
        """
        is_direct = values.device.type == "cpu" and values.dtype == torch.float32
        out = values if is_direct else torch.empty(len(values))
        self.decode(message, layout, out)
        if factor != 1.0:
            out *= factor
        if not is_direct:
            values.copy_(out)

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
        """Declare this compressor, and the memory of its senders as client or server state."""
        run.compress(self)
        run.needs_clients("it compresses what clients send and receive")
        has_memory = self.feedback != "none"
        keeps_messages = type(self).initial is not Compressor.initial
        if has_memory and self.compresses_up:
            # Empty in place of zeros: most of a first job's cost would be to make and add them.
            run.client_state(MEMORY, lambda samples: torch.empty(0))
        if has_memory and self.compresses_down:
            run.server_state(MEMORY, run.zeros)
        if keeps_messages and self.compresses_up:
            run.client_state(KEPT, lambda samples: self.initial(run.layout))
        if keeps_messages and self.compresses_down:
            run.server_state(KEPT, lambda server: self.initial(run.layout))

    def send(
        self, values: Tensor, state: Mapping[str, Tensor], layout: Layout, key: int
    ) -> dict[str, Tensor]:
        """Replace `values`, in place, by what the receiver decodes; return the sender's next state.

        values: [layout.trained], the vector to send.
        state: the sender's state after its last message. With error feedback it has the entry
        "memory", where an empty tensor stands for zeros. If the compressor overrides `initial`, it
        has "kept".
        key: a random number below 2^63, which `encode` gets for this message.
        Raise ValueError if the message does not have the size that `words` returns.
        """
        kept = state.get(KEPT, torch.empty(0)).to("cpu", torch.float32)
        following: dict[str, Tensor] = {}
        if MEMORY in state:
            message, memory = self.exchange(values, state[MEMORY], layout, key, kept)
            following[MEMORY] = memory
        else:
            message = self._message(values, layout, key, kept)
            self._receive(message, layout, values)
        if KEPT in state:
            following[KEPT] = self.keep(message, layout).to(values)
        return following
