"""Signs: signSGD with majority vote, and signs with a scale.

A vector v of d entries is decoded as

    C(v) = size * sign(v)           if `size` is a number
    C(v) = (|v|_1 / d) * sign(v)    if size=None

For majority vote, set `size` and compress in both directions. Each parameter then moves by `size`
in the direction for which most clients voted.

Sources: Bernstein, Wang, Azizzadenesheli and Anandkumar, "signSGD: Compressed Optimisation for
Non-Convex Problems" (ICML 2018), Algorithm 3. For size=None: Karimireddy, Rebjock, Stich and Jaggi,
"Error Feedback Fixes SignSGD and other Gradient Compression Schemes" (ICML 2019), Algorithm 1.

Choice that the papers leave open
- sign(0) is 1.

Departure from the papers
- A vote has the weight of the client's update. In the paper each client has one vote; to do the
  same, set weighting=uniform.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from raysim.api.compression import Compressor, Direction, Feedback
from raysim.compressors.bits import words_of_bits
from raysim.primitives.checks import above
from raysim.vectors.blocks import compile_function
from raysim.vectors.layout import Layout


def _pack_signs(values: np.ndarray, words: np.ndarray) -> None:
    """Fill `words` with one bit for each value: 1 if the value is at least 0."""
    for word in range(len(words)):
        bits = np.uint32(0)
        first = 32 * word
        for index in range(min(32, len(values) - first)):
            bits |= np.uint32(values[first + index] >= 0) << np.uint32(index)
        words[word] = bits


def _sum_sizes(values: np.ndarray) -> float:
    """Return the sum of the absolute values.

    It is computed as eight partial sums, because the CPU can make additions to different sums at
    the same time.
    """
    whole = len(values) // 8
    eights = values[: 8 * whole].reshape(whole, 8)
    sum_0, sum_1, sum_2, sum_3, sum_4, sum_5, sum_6, sum_7 = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    for place in range(whole):
        eight = eights[place]
        sum_0 += np.float64(abs(eight[0]))
        sum_1 += np.float64(abs(eight[1]))
        sum_2 += np.float64(abs(eight[2]))
        sum_3 += np.float64(abs(eight[3]))
        sum_4 += np.float64(abs(eight[4]))
        sum_5 += np.float64(abs(eight[5]))
        sum_6 += np.float64(abs(eight[6]))
        sum_7 += np.float64(abs(eight[7]))
    for place in range(8 * whole, len(values)):
        sum_0 += np.float64(abs(values[place]))
    return sum_0 + sum_1 + sum_2 + sum_3 + sum_4 + sum_5 + sum_6 + sum_7


def _unpack_signs(words: np.ndarray, scale: float, out: np.ndarray) -> None:
    """Fill `out` with `scale` for each bit that is 1, and -`scale` for each bit that is 0.

    words: uint32, the bits; the lowest bit of a word comes first.
    """
    for word in range(len(words)):
        bits = words[word]
        first = 32 * word
        for index in range(min(32, len(out) - first)):
            out[first + index] = scale if (bits >> np.uint32(index)) & 1 else -scale


class SignSGD(Compressor):
    """A compressor that sends one bit, the sign, for each entry.

    size: the absolute value of each decoded entry. None uses the mean absolute value of the
    entries, which is sent with the signs. Error feedback needs None.
    direction: "up" compresses clients' updates, "down" the server's steps, "both" compresses both.
    feedback: the error feedback, "none", "ef21" or "ef14"; `Compressor` explains it.
    """

    name = "signsgd"
    paper = "Bernstein et al., ICML 2018"

    def __init__(
        self,
        size: float | None = 0.001,
        direction: Direction = "both",
        feedback: Feedback = "none",
    ):
        super().__init__(direction, feedback)
        self.size = size
        if size is not None:
            above("compression.size", size, 0)
            if feedback != "none":
                raise ValueError(
                    f"compression.size={size} cannot be used with "
                    f"compression.feedback={feedback}. With error feedback, each decoded value "
                    "must be plus or minus the mean absolute value of the encoded vector, but "
                    "compression.size is a fixed number. Set compression.size=null."
                )

    def words(self, layout: Layout) -> int:
        """Return the length of a message in words of 32 bits.

        A message has one bit for each entry: the entry's sign. If `compression.size` is None, it
        also has a word with the mean absolute value of the entries.
        """
        return words_of_bits(layout.trained) + (self.size is None)

    def encode(self, values: Tensor, layout: Layout, key: int, kept: Tensor) -> np.ndarray:
        """Return a message with the sign of each entry, in one bit per entry.

        If `self.size` is None, the message begins with the mean absolute value of `values`.
        values: float32 [layout.trained], the vector to send.
        key, kept: not used, because this compressor is not random and remembers nothing.
        """
        signs = np.empty(words_of_bits(len(values)), np.uint32)
        compile_function(_pack_signs)(values.numpy(), signs)
        if self.size is not None:
            return signs
        total = compile_function(_sum_sizes)(values.numpy())
        mean = np.array([total / max(1, len(values))], np.float32)
        return np.concatenate([mean.view(np.uint32), signs])

    def decode(self, message: np.ndarray, layout: Layout, out: Tensor) -> None:
        """Fill `out` with the decoded entries, which all have the same absolute value.

        This value is `compression.size`. If that setting is None, it is the mean absolute value in
        the message.
        """
        scale, signs = np.float32(self.size or 0), message
        if self.size is None:
            scale, signs = message[:1].view(np.float32)[0], message[1:]
        compile_function(_unpack_signs)(signs, scale, out.numpy())
