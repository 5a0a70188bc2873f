"""Compress clients' updates and the server's steps: compressors and error feedback.

A server's step is the change of the shared parameters in an aggregation. Server and clients add the
same decoded step. BatchNorm statistics and tensors of methods are not compressed.

Let v be the vector to send, and m the sender's memory, which starts at 0. Encoding and decoding
turn a vector x into C(x):

    feedback   encoded   the receiver gets   the next m
    none       v         C(v)                (no memory)
    ef21       v - m     m + C(v - m)        m + C(v - m)
    ef14       v + m     C(v + m)            v + m - C(v + m)

Sources: ef21 is Algorithm 2 of EF21 (Richtarik et al., NeurIPS 2021). ef21 in both directions is
EF21-BC (Fatkhullin et al., 2021). ef14 is the error feedback of Seide et al. (Interspeech 2014), as
analysed by Karimireddy et al. (ICML 2019).

Departures from the papers
- In the papers, v is a gradient. Here v is a client's update or the server's step.
- EF21's server averages the latest decoded vectors of all clients. Here the server aggregates only
  the clients that took part, with their usual weights.
- A client's memory changes only when its update is aggregated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor

from raysim.api.method import Method
from raysim.api.update_code import Direction as Direction
from raysim.primitives.checks import one_of
from raysim.vectors.blocks import new_like
from raysim.vectors.layout import Layout

if TYPE_CHECKING:
    from raysim.api.setup import Setup

Feedback: TypeAlias = Literal["none", "ef21", "ef14"]

WORD_BITS = 32  # a message is a whole number of words, so that traffic is a whole number of floats
MEMORY, KEPT = "memory", "kept"  # names of a compressor's client state and server state


class Exchange(NamedTuple):
    """What happens when a vector is sent with error feedback.

    message: what travels, uint32 [words].
    received: [layout.trained], the vector that the receiver gets.
    memory: [layout.trained], the sender's next memory. With ef21 it may be the same tensor as
    `received`.
    """

    message: np.ndarray
    received: Tensor
    memory: Tensor


class Compressor(Method):
    """An encoder that makes the updates of clients or the steps of the server smaller.

    A subclass sets `name` and overrides `words`, `encode` and `decode`. It passes `direction` and
    `feedback` to this constructor.
    direction: "up" compresses clients' updates, "down" the server's steps, "both" compresses both.
    feedback: the algorithm of error feedback in `raysim.api.compression`: "none", "ef21" or "ef14".
    """

    def __init__(self, direction: Direction = "up", feedback: Feedback = "none"):
        self.direction = one_of("compression.direction", direction, get_args(Direction))
        self.feedback = one_of("compression.feedback", feedback, get_args(Feedback))

    # --- what a compressor overrides --------------------------------------------------------------
    def words(self, layout: Layout) -> int:
        """Return the size of a message in words of 32 bits; it depends on the layout only."""
        raise NotImplementedError

    def encode(self, values: Tensor, layout: Layout, key: int, kept: Tensor) -> np.ndarray:
        """Return the message for `values`: uint32 [words].

        values: float32 [layout.trained] on the CPU, finite; do not change them.
        key: a random number below 2^63, a new one for each message.
        kept: the result of `keep` for the sender's last message, or of `initial` before the first.
        """
        raise NotImplementedError

    def decode(self, message: np.ndarray, layout: Layout, out: Tensor) -> None:
        """Fill `out`, float32 [layout.trained] on the CPU, with the values of a message."""
        raise NotImplementedError

    def initial(self, layout: Layout) -> Tensor:
        """Return the tensor that `encode` gets as the argument `kept` for a first message.

        By default the tensor is empty. Override this function and `keep` if a message depends on
        the sender's previous message.
        """
        return torch.empty(0)

    def keep(self, message: np.ndarray, layout: Layout) -> Tensor:
        """Return the tensor that the sender keeps from a message, to encode its next message.

        `encode` gets this tensor as `kept`. It is empty by default. A subclass that overrides
        `keep` must also override `initial`, which returns the tensor for the first message.
        message: the message that was just sent, uint32 [words].
        """
        return torch.empty(0)

    def contraction(self, layout: Layout) -> float:
        """Return f, the factor on decoded values under error feedback.

        The default is 1. The proofs of convergence need |f C(v) - v| < |v| for every v except 0,
        where C(v) is the decoded vector. If C(v) is random, with the mean v and a variance of at
        most omega |v|^2, return 1 / (1 + omega). The inequality then holds in expectation (EF21,
        Section 2).
        """
        return 1.0

    def exchange(
        self, values: Tensor, memory: Tensor, layout: Layout, key: int, kept: Tensor
    ) -> Exchange:
        """Encode a vector with error feedback, decode the message, and update the memory.

        The docstring of `raysim.api.compression` has the formulas; C includes the factor
        `contraction`.
        values: the vector to send, [layout.trained]. It may be overwritten.
        memory: the sender's memory, [layout.trained]; empty means 0. Do not change it.
        key: a random number below 2^63, a new one for each message.
        kept: on the CPU, the result of `keep` for the sender's previous message, or of `initial`
        for the first message.
        """
        # A subclass may override this function with a faster one that has the same results. Its own
        # subclasses that override `encode` must then override this function as well.
        following = self._add_memory(values, memory)
        message = self._message(following, layout, key, kept)
        factor = self.contraction(layout)
        if self.feedback == "ef14":
            self._receive(message, layout, values, factor)
            following.sub_(values)
            return Exchange(message, values, following)
        self._receive(message, layout, following, factor)
        if len(memory):
            following.add_(memory)
        return Exchange(message, following, following)

    # --- functions for `exchange` -----------------------------------------------------------------
    def _is_direct(self, values: Tensor) -> bool:
        """Return True if `encode` and `decode` can use a vector as it is: float32 on the CPU."""
        return values.device.type == "cpu" and values.dtype == torch.float32

    def _add_memory(self, values: Tensor, memory: Tensor) -> Tensor:
        """Return a new tensor, the vector to encode: v - m with ef21, and v + m with ef14.

        values: [layout.trained], the vector v to send.
        memory: [layout.trained], the memory m of error feedback; empty if m is 0.
        """
        wanted = new_like(values)
        if not len(memory):
            return wanted.copy_(values)
        if self.feedback == "ef21":
            return torch.sub(values, memory, out=wanted)
        return torch.add(values, memory, out=wanted)

    def _message(self, values: Tensor, layout: Layout, key: int, kept: Tensor) -> np.ndarray:
        """Call `encode`; return the message as an array that shares no storage with `values`.

        values: [layout.trained], on any device.
        key, kept: the arguments of `encode`.
        Raise ValueError unless the message is uint32 and has the size that `words` returns.
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
        is_direct = self._is_direct(values)
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
        """Declare this compressor, and the state that senders keep from one message to the next.

        The state is the memory m of error feedback, and the result of `keep`: client state if
        clients compress, server state if the server compresses.
        """
        run.compress(self)
        run.needs_clients("it compresses what clients send and receive")
        has_memory = self.feedback != "none"
        keeps_messages = type(self).initial is not Compressor.initial
        if not keeps_messages and type(self).keep is not Compressor.keep:
            raise TypeError(
                f"{type(self).__name__} defines the function 'keep' but not 'initial'. Define "
                "'initial' too: it returns the tensor that encode gets as kept for a sender's "
                "first message."
            )
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
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compress a vector; return the decoded vector and the sender's next state.

        Do not change the decoded vector: the state may contain the same tensor.
        values: [layout.trained], the vector to send. It may be overwritten.
        state: the state after the previous message, or the initial state.
        key: a random number below 2^63, a new one for each message.
        Raise ValueError if the message does not have the size that `words` returns.
        """
        kept = state.get(KEPT, torch.empty(0)).to("cpu", torch.float32)
        following: dict[str, Tensor] = {}
        received = values
        if MEMORY in state:
            message, received, following[MEMORY] = self.exchange(
                values, state[MEMORY], layout, key, kept
            )
        else:
            message = self._message(values, layout, key, kept)
            self._receive(message, layout, values)
        if KEPT in state:
            following[KEPT] = self.keep(message, layout).to(values)
        return received, following
