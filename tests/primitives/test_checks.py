"""Test checks of values that a user gave."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from raysim.primitives.checks import above, at_least, between, in_range, one_of, require
from raysim.primitives.errors import RefusedError, errors_as_refusals, first_line

RANGES: list[tuple[Callable[[float], float], list[float], list[float], str]] = [
    (lambda value: at_least("x", value, 1), [1, 1.5], [0, -1], "at least 1"),
    (lambda value: above("x", value, 0.0), [0.1], [0, -1], "above 0"),
    (lambda value: between("x", value, 0.0, 0.5), [0, 0.2, 0.5], [-0.1, 0.6], "from 0 to 0.5"),
    (
        lambda value: in_range("x", value, above=0, most=1),
        [0.1, 1],
        [0, 1.1],
        "above 0 and at most 1",
    ),
    (
        lambda value: in_range("x", value, least=0, below=1),
        [0, 0.9],
        [-0.1, 1],
        "at least 0 and below 1",
    ),
    (lambda value: in_range("x", value), [-1e9, 0], [], "finite"),
]


@pytest.mark.parametrize(("check", "good", "bad", "words"), RANGES, ids=[row[3] for row in RANGES])
def test_range_check_returns_valid_numbers_and_refuses_others(
    check: Callable[[float], float], good: list[float], bad: list[float], words: str
) -> None:
    assert [check(value) for value in good] == good
    for value in [*bad, math.nan, -math.inf]:
        with pytest.raises(ValueError, match=rf"^x={value!r} must be {words}$"):
            check(value)


@pytest.mark.parametrize("row", RANGES, ids=[row[3] for row in RANGES])
def test_number_check_refuses_infinity(
    row: tuple[Callable[[float], float], list[float], list[float], str],
) -> None:
    with pytest.raises(
        ValueError, match=r"^x=inf must be .*(finite|most 1|below 1|to 0.5)( and finite)?$"
    ):
        row[0](math.inf)


@pytest.mark.parametrize("value", ["a", None, [1], {}, 1j])
def test_number_check_refuses_values_that_are_no_numbers(value: Any) -> None:
    for check, _, _, words in RANGES:
        with pytest.raises(
            ValueError, match=rf"^x={re.escape(repr(value))} must be a number, {words}$"
        ):
            check(value)
    with pytest.raises(ValueError, match=r"does not exist: use one of 'cosine', 'linear'$"):
        one_of("kind", value, {"cosine": 1, "linear": 2})


def test_number_check_accepts_numpy_numbers() -> None:
    assert [at_least("x", value, 0) for value in (np.float32(0.5), np.int64(3))] == [0.5, 3]


def test_error_of_a_check_ends_with_the_reason_for_the_limit() -> None:
    with pytest.raises(
        ValueError, match=r"^eps=0 must be above 0: it keeps the divisor away from 0$"
    ):
        above("eps", 0, 0, "it keeps the divisor away from 0")
    with pytest.raises(ValueError, match=r"^names=\[\] must be a list of names$"):
        require("names", [], False, "a list of names")
    assert require("names", ["a"], True, "a list of names") == ["a"]


def test_number_check_compares_huge_integers_exactly() -> None:
    assert at_least("rounds", 10**400, 1) == 10**400
    with pytest.raises(ValueError, match=r"^rounds=-1000.* must be at least 1$"):
        at_least("rounds", -(10**400), 1)
    with pytest.raises(ValueError, match=r"^share=1000.* must be from 0 to 1$"):
        between("share", 10**400, 0, 1)


def test_error_of_an_unknown_choice_lists_choices_and_suggests_one() -> None:
    assert one_of("kind", "cosine", ("cosine", "linear")) == "cosine"
    for value, end in (("cosin", "; did you mean 'cosine'?"), ("zzz", "")):
        with pytest.raises(ValueError) as refused:
            one_of("kind", value, ("cosine", "linear"))
        assert (
            str(refused.value)
            == f"kind={value!r} does not exist: use one of 'cosine', 'linear'{end}"
        )
    with pytest.raises(ValueError, match=r"depth=34 does not exist: use one of 18, 50$"):
        one_of("depth", 34, (18, 50))


def test_first_line_of_a_remote_error_is_the_first_line_of_its_cause() -> None:
    assert first_line(ValueError("\n one\ntwo")) == "one"
    assert first_line(KeyError()) == "KeyError"
    crossed: Any = RuntimeError("a traceback\nof the other side")
    crossed.cause = ValueError("what happened\nthere")
    assert first_line(crossed) == "what happened"


def test_value_error_becomes_a_refusal_but_zero_division_error_stays_unchanged() -> None:
    with pytest.raises(RefusedError, match=r"^one two$"), errors_as_refusals():
        raise ValueError("one\n  two")
    with pytest.raises(ZeroDivisionError), errors_as_refusals():
        raise ZeroDivisionError
