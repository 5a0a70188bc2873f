"""Test how the classes that a configuration names are found, and how arguments are converted."""

from __future__ import annotations

import re
from typing import Any

import pytest

from raysim.experiment.instantiate import convert, resolve
from raysim.primitives.errors import RefusedError
from raysim.primitives.version import __version__


def test_error_of_missing_class_mentions_the_raysim_version() -> None:
    with pytest.raises(
        RefusedError, match=rf"^group\._target_=raysim\.fleet\.Ideal.*{re.escape(__version__)}"
    ):
        resolve("raysim.fleet.Ideal", "group")


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("age+income", list[str] | None, ["age", "income"]),
        ("2019", list[str] | None, ["2019"]),
        ("1+28+28", list[int] | None, [1, 28, 28]),
        ("a+b", str | list[str] | None, "a+b"),  # a path
    ],
)
def test_list_with_plus_signs_needs_no_brackets(text: str, kind: Any, value: object) -> None:
    assert convert(text, kind, "key") == value


def test_error_of_wrong_list_item_mentions_its_index() -> None:
    with pytest.raises(RefusedError, match=r"key\[1\]=x must be an integer"):
        convert("1+x", list[int], "key")
