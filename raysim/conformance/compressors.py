"""Check the messages that a compressor encodes: their size, decoding and error feedback.

A compressor is a method, so it must also pass the checks in `raysim.conformance.methods`.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor

from raysim.api.compression import Compressor
from raysim.conformance.study import Study
from raysim.primitives.streams import stream
from raysim.training.run_spec import declare_run
from raysim.vectors.layout import Layout

KEY = 2**62 + 1  # of a message; a client draws one for each


def checks(compressor: Compressor, study: Study) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the checks of a compressor's messages, each with its name.

    study: describes a tiny run (`raysim.conformance.Study`), whose model gives the layout of the
    vectors.
    """
    layout = declare_run(study.spec()).layout
    yield "a message has the declared size", partial(check_size, compressor, layout)
    yield "decoding needs the message alone", partial(check_decoding, compressor, layout)
    if compressor.feedback != "none":
        yield "error feedback shortens errors", partial(check_contraction, compressor, layout)


def _examples(layout: Layout) -> dict[str, Tensor]:
    """Return a dictionary of example vectors that the checks encode.

    A value is a vector, float32 [layout.trained]. Its key describes it in error messages, such as
    "zeros".
    """
    numbers = stream(0, "compressor").standard_normal(layout.trained, dtype=np.float32)
    normal = torch.from_numpy(numbers)
    one = torch.zeros_like(normal)
    one[len(one) // 2] = -3.0
    return {"normal numbers": normal, "zeros": torch.zeros_like(normal), "one entry": one}


def _encode(compressor: Compressor, values: Tensor, layout: Layout) -> np.ndarray:
    return compressor.encode(values, layout, KEY, compressor.initial(layout)).copy()


def check_size(compressor: Compressor, layout: Layout) -> None:
    """Check that messages have the size that `words` declares.

    Check also that `encode` returns the same message for the same arguments, and does not change
    the values that it encodes.
    """
    words = compressor.words(layout)
    for what, values in _examples(layout).items():
        before = values.clone()
        message = _encode(compressor, values, layout)
        assert message.dtype == np.uint32 and message.shape == (words,), (
            f"encode returns {message.dtype} {list(message.shape)} for {what}, and words declares "
            f"uint32 [{words}]. Correct one of them."
        )
        assert torch.equal(values, before), f"encode changes its values, {what}. Copy them."
        again = _encode(compressor, values, layout)
        assert np.array_equal(message, again), (
            f"two messages of {what} with one key differ. Draw random numbers from the key."
        )


def check_decoding(compressor: Compressor, layout: Layout) -> None:
    """Check that a receiver decodes a finite value for every entry, from the message alone."""
    for what, values in _examples(layout).items():
        receiver = pickle.loads(pickle.dumps(compressor))
        message = _encode(compressor, values, layout)
        decoded = []
        for fill in (float("nan"), 7.0):
            out = torch.full((layout.trained,), fill)
            receiver.decode(message.copy(), layout, out)
            decoded.append(out)
        assert bool(decoded[0].isfinite().all()), (
            f"decode leaves entries of `out` unset, or sets values that are not finite, for {what}."
        )
        assert torch.equal(*decoded), (
            f"two calls of decode with one message of {what} set other values. Set all of `out`, "
            "from the message alone."
        )
        here = torch.empty(layout.trained)
        compressor.decode(message, layout, here)
        assert torch.equal(here, decoded[0]), (
            f"a copy of the compressor decodes other values for {what}. Put all that decode needs "
            "into the message."
        )


def check_contraction(compressor: Compressor, layout: Layout) -> None:
    """Check that |f C(v) - v| < |v|, which error feedback needs.

    f is the result of the compressor's `contraction`. C(v) are the decoded values of a vector v of
    normal random numbers.
    """
    values = _examples(layout)["normal numbers"]
    out = torch.empty(layout.trained)
    compressor.decode(_encode(compressor, values, layout), layout, out)
    error = float((compressor.contraction(layout) * out - values).norm() / values.norm())
    assert error < 1, (
        f"the error of a message is {error:.2f} times its values, and error feedback needs less "
        "than 1. Return a smaller `contraction`, or refuse `feedback`."
    )
