"""Test printed tables: what fits on a line, and which value is marked as the best."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from raysim.results.tables import Column, format_table, text_columns, to_csv, to_latex

NAMES = Column("run", ["fedavg", "fedprox"])


def test_columns_that_do_not_fit_form_further_tables_that_repeat_the_first_column() -> None:
    numbers = [Column(f"number {n}", ["0.1234", "0.5"], [0.1234, 0.5]) for n in range(5)]
    wide = format_table([NAMES, *numbers])
    assert wide.count("\n\n") == 0
    for width in (20, 30, 40, 79):
        text = format_table([NAMES, *numbers], width)
        assert all(len(line) <= width for line in text.splitlines())
        blocks = text.split("\n\n")
        assert all(block.startswith("run") and "\nfedprox" in block for block in blocks)
        assert [
            word for block in blocks for word in block.splitlines()[0].split()[1:]
        ] == wide.splitlines()[0].split()[1:]
    assert format_table([NAMES, *numbers], 1000) == wide


def test_column_wider_than_the_terminal_is_not_cut() -> None:
    text = format_table([NAMES, Column("long", ["x" * 50, "y"]), Column("next", ["1", "2"])], 20)
    assert "x" * 50 in text and text.count("\n\n") == 1


@pytest.mark.parametrize(
    ("scores", "deviations", "groups", "better", "best"),
    [
        ([0.5, 0.7, 0.6], None, None, 1, {1}),
        ([0.5, 0.7, 0.6], None, None, -1, {0}),
        ([0.7, 0.7, 0.6], None, None, 1, {0, 1}),
        ([0.5, 0.7, 0.6], None, None, 0, set()),
        ([0.5, 0.7, 0.6], [0.9, 0.05, 0.05], None, 1, {1}),  # the last one's deviation has no say
        ([0.5, 0.7, 0.6], [0.0, 0.05, 0.2], None, 1, set()),
        ([0.5, 0.7, 0.6], [0.0, 0.2, 0.05], None, 1, set()),
        ([0.5, 0.7, 0.6], [None, 0.01, None], None, 1, set()),  # one run each says nothing
        ([0.5, 0.7, None], [0.01, 0.01, None], None, 1, {1}),
        ([0.5, None, None], [0.01, None, None], None, 1, set()),
        ([0.7, 0.7, 0.6], [0.01, 0.01, 0.01], None, 1, set()),
        ([0.5, 0.7, 0.9, 0.8], [0.01] * 4, ["a", "a", "b", "b"], 1, {1, 2}),
        ([0.5, 0.7, 0.9, 0.9], [0.01] * 4, ["a", "a", "b", "b"], 1, {1}),
    ],
)
def test_table_marks_the_best_value_if_it_is_clearly_best(
    scores: list[float | None],
    deviations: list[float | None] | None,
    groups: list[str] | None,
    better: int,
    best: set[int],
) -> None:
    column = Column(
        "accuracy", [str(score) for score in scores], scores, better, deviations, groups
    )
    assert column.best() == best
    stars = {
        i for i, line in enumerate(format_table([column]).splitlines()[2:]) if line.endswith("*")
    }
    assert stars == best


def test_csv_keeps_all_digits_and_writes_integers_without_a_point() -> None:
    rows = [
        {"run": "a, b", "rounds": 5, "score": 2 / 3},
        {"run": "c", "rounds": None, "seed": 1, "done": True, "score": math.nan},
    ]
    head, *lines = to_csv(rows).splitlines()
    assert head == "run,rounds,score,seed,done"
    assert lines == ['"a, b",5,0.6666666666666666,,', "c,,,1,True"]


def test_table_from_rows_of_text_has_one_column_for_each_title() -> None:
    label, count = text_columns(("method", "ms"), [("fedavg", "1.5"), ("fedbr", "20")])
    assert (label.title, label.texts, count.texts) == ("method", ["fedavg", "fedbr"], ["1.5", "20"])
    assert format_table([label, count]).splitlines()[-1] == "fedbr    20"


def test_latex_special_characters_are_escaped() -> None:
    columns = [Column("a_b", ["50%", "x"]), Column("score", ["0.7 ± 0.1", "0.5"], [0.7, 0.5], 1)]
    text = to_latex(columns, "a note")
    assert text.splitlines()[:3] == [
        r"% needs \usepackage{booktabs}",
        "% a note",
        r"\begin{tabular}{lr}",
    ]
    assert r"a\_b & score \\" in text
    assert r"50\% & \textbf{0.7 $\pm$ 0.1} \\" in text


@pytest.mark.parametrize("sign", ["[", "*"])
def test_bracket_or_star_at_the_start_of_a_latex_row_is_put_in_braces(sign: str) -> None:
    text = to_latex([Column("", [f"{sign}1]", "x"]), Column("score", ["1", "2"], [1.0, 2.0])])
    assert f"\\midrule\n{{{sign}}}1] & 1" in text  # not an argument of `\midrule` or `\\`


def test_latex_has_commands_in_place_of_greek_letters() -> None:
    labels = ["FedProx (μ = 0.1, β → 1)", "λ ≥ 0.5 × Δ"]
    text = to_latex([Column("", labels), Column("score", ["0.1", "0.2"], [0.1, 0.2])])
    assert text.isascii()
    assert r"FedProx ($\mu$ = 0.1, $\beta$ $\to$ 1)" in text


def test_rule_named_best_marks_the_best_value_even_without_a_clear_difference() -> None:
    deviations = [0.1, 0.1, 0.1]
    column = Column("score", ["", "", ""], [0.50, 0.52, 0.51], 1, deviations)
    assert column.best() == set()
    assert replace(column, bold="best").best() == {1}
    assert replace(column, bold="best", incomplete={1}).best() == {2}
