"""Test the addition of vectors in a fixed binary tree.

The bits of the sum do not depend on how the leaves of the tree are divided among processes.
"""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, strategies as st

from raysim.vectors.tree_sum import (
    TreeLeaf,
    add_up,
    covered_ranges,
    halves,
    sum_in_tree,
    weighted_sum,
)

COUNTS = st.integers(1, 40)


def vectors(count: int) -> list[np.ndarray]:
    return list(np.random.default_rng(count).standard_normal((count, 5)).astype(np.float32))


def tree(leaves: list[np.ndarray | None]) -> np.ndarray | None:
    """Add neighbouring leaves in pairs, then these sums in pairs, and so on; return the last sum.

    leaves: the values. A missing value is None, and is skipped. If all are missing, return None.
    """
    while len(leaves) > 1:
        pairs = [leaves[start : start + 2] for start in range(0, len(leaves), 2)]
        present = [[value for value in pair if value is not None] for pair in pairs]
        leaves = [sum(pair[1:], pair[0]) if pair else None for pair in present]
    return leaves[0]


def test_tree_sum_of_four_vectors_adds_two_pairs() -> None:
    rows, weights = vectors(4), [0.1, 3.0, 1 / 3, -2.0]
    a, b, c, d = (row * np.float32(weight) for row, weight in zip(rows, weights, strict=True))
    assert np.array_equal(weighted_sum(rows, weights).numpy(), (a + b) + (c + d))


@given(st.lists(st.booleans(), min_size=1, max_size=40))
def test_tree_sum_skips_missing_vectors(present: list[bool]) -> None:
    leaves = [
        TreeLeaf(row, 0.3) if exists else None
        for row, exists in zip(vectors(len(present)), present, strict=True)
    ]
    scaled = [None if leaf is None else leaf.array * np.float32(leaf.weight) for leaf in leaves]
    total, expected = sum_in_tree(leaves), tree(scaled)
    assert (total is None) == (expected is None)
    if total is not None:
        assert np.array_equal(total.numpy(), expected)


@given(COUNTS, st.data())
def test_tree_sum_has_same_bits_for_any_split_over_processes(
    count: int, data: st.DataObject
) -> None:
    rows, weights = vectors(count), np.random.default_rng(1).uniform(0, 9, count).tolist()
    owners = data.draw(st.lists(st.integers(0, 4), min_size=count, max_size=count))
    failed = data.draw(st.sets(st.integers(0, count - 1)))
    leaves = [
        None if place in failed else TreeLeaf(row, weight)
        for place, (row, weight) in enumerate(zip(rows, weights, strict=True))
    ]
    sums: dict[range, np.ndarray | None] = {}
    for owner in set(owners):
        for part in covered_ranges([p for p in range(count) if owners[p] == owner], count):
            total = sum_in_tree(leaves[part.start : part.stop])
            sums[part] = None if total is None else total.numpy()
    whole = sum_in_tree(leaves)
    parts = add_up(list(sums), *sums.values())
    assert (whole is None) == (parts is None)
    if whole is not None:
        assert np.array_equal(whole.numpy(), parts)
        raw_first = {part: total for part, total in sums.items() if part.start}
        assert torch.equal(sum_in_tree(leaves, raw_first), whole)  # type: ignore[arg-type]


@given(COUNTS, st.data())
def test_leaves_of_the_summation_tree_are_covered_by_the_fewest_subtrees(
    count: int, data: st.DataObject
) -> None:
    positions = data.draw(st.sets(st.integers(0, count - 1)))
    ranges = covered_ranges(positions, count)
    assert [place for part in ranges for place in part] == sorted(positions)
    siblings = {}
    stack = [range(count)]
    while stack:
        part = stack.pop()
        if len(part) > 1:
            first, second = halves(part)
            siblings[first], siblings[second] = second, first
            stack += [first, second]
    assert all(part == range(count) or part in siblings for part in ranges)
    assert all(siblings.get(part) not in ranges for part in ranges)


def test_subtrees_that_cover_a_set_of_leaves_are_the_ones_computed_by_hand() -> None:
    assert covered_ranges(range(10), 10) == [range(10)]
    assert covered_ranges(range(8, 10), 10) == [range(8, 10)]
    assert covered_ranges([1, 2, 3, 4], 10) == [range(1, 2), range(2, 4), range(4, 5)]


def test_tree_sum_written_to_a_tensor_does_not_change_its_inputs() -> None:
    rows = vectors(4)
    first = weighted_sum(rows[:2], [1.0, 2.0]).numpy()
    first.flags.writeable = False
    place = torch.zeros(5)
    leaves = [None, None, TreeLeaf(rows[2], 3.0), TreeLeaf(rows[3], 4.0)]
    total = sum_in_tree(leaves, {range(2): first}, place)
    assert total is place
    assert torch.equal(place, weighted_sum(rows, [1.0, 2.0, 3.0, 4.0]))


def test_tree_sum_with_numpy_weights_equals_that_with_python_floats() -> None:
    rows = vectors(2)
    weights = [np.float64(0.1), np.float64(0.7)]
    assert torch.equal(weighted_sum(rows, weights), weighted_sum(rows, [0.1, 0.7]))
