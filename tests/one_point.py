"""Let tests replace every plot with a picture of one pixel, because drawing takes long."""

from __future__ import annotations

import base64
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

ONE_POINT: dict[str, Any] = {
    "png": base64.b64decode(
        "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg=="
    ),
    "svg": (
        '<svg xmlns="http://www.w3.org/2000/svg" width="1pt" height="1pt" viewBox="0 0 1 1"></svg>'
    ),
}


def replace_pictures(set_attribute: Callable[[Any, str, Any], None] = setattr) -> None:
    """Replace the functions that draw plots by functions that write a picture of one pixel.

    set_attribute: `setattr` or a function with the same arguments, such as `monkeypatch.setattr`.
    """
    from matplotlib.figure import Figure

    from raysim.results import curves

    # Each run draws these; their panels alone take half of the time of a tiny run.
    set_attribute(curves, "_draw_png", lambda *_: ONE_POINT["png"])

    def savefig(figure: Figure, file: Any, format: str, **_: object) -> None:
        with nullcontext(file) if hasattr(file, "write") else open(file, "wb") as stream:
            stream.write(ONE_POINT[format])

    set_attribute(Figure, "savefig", savefig)
