"""Test the fragments of Streaming DiLoCo, its traffic, and what it refuses."""

from __future__ import annotations

import itertools

import pytest
from tiny_runs import run, run_spec

from raysim.compressors.sparse import TopK
from raysim.methods.streaming_diloco import Pattern, StreamingDiLoCo, due_fragments, fragments_of
from raysim.models import Mlp
from raysim.simulation.schedule import Synchronous
from raysim.training.run_spec import declare_run

DEEP = Mlp((12, 8, 6))
SIZES = [64 * 12 + 12, 12 * 8 + 8, 8 * 6 + 6, 6 * 5 + 5]  # of the layers; pixels to five classes


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("strided", [SIZES[0] + SIZES[2], SIZES[1] + SIZES[3]]),
        ("sequential", [SIZES[0] + SIZES[1], SIZES[2] + SIZES[3]]),
    ],
)
def test_diloco_fragments_cover_each_layer_once(pattern: Pattern, expected: list[int]) -> None:
    layout = declare_run(run_spec(model=DEEP)).layout
    fragments = fragments_of(layout, 2, pattern)
    assert [sum(place.stop - place.start for place in part) for part in fragments] == expected
    places = sorted((place.start, place.stop) for part in fragments for place in part)
    assert places[0][0] == 0 and places[-1][1] == layout.trained
    assert all(one[1] == other[0] for one, other in itertools.pairwise(places))


def test_diloco_client_downloads_fragments_due_since_its_last_job() -> None:
    assert due_fragments(4, 5, 3) == [1]
    assert due_fragments(2, 5, 3) == [2, 0, 1]
    assert due_fragments(0, 9, 3) == [0, 1, 2]  # all, each of them once


def test_diloco_traffic_of_a_round_is_the_size_of_its_fragment() -> None:
    ended = run(run_spec(StreamingDiLoCo(2), model=DEEP), Synchronous(6), rounds=4)
    layout = ended.coordinator.layout
    first, second = SIZES[0] + SIZES[2], SIZES[1] + SIZES[3]
    for version, aggregation in enumerate(ended.aggregations[:4]):
        assert {job.up for job in aggregation.dispatched} == {(first, second)[version % 2]}
        down = layout.trained if version == 0 else (second, first)[version % 2]
        assert {job.down for job in aggregation.dispatched} == {down}


def test_diloco_round_changes_only_its_fragment() -> None:
    bodies = []
    for rounds in (1, 2, 3):
        ended = run(run_spec(StreamingDiLoCo(2), model=Mlp((12,))), Synchronous(6), rounds=rounds)
        bodies.append((ended.tensors["model.extractor.1.weight"], ended.tensors["model.head.bias"]))
    (body, head), (same_body, new_head), (new_body, same_head) = bodies
    assert (body == same_body).all() and not (head == new_head).all()
    assert not (new_body == same_body).all() and (same_head == new_head).all()


def test_diloco_warns_of_more_fragments_than_layers() -> None:
    (text,) = declare_run(run_spec(StreamingDiLoCo(5), model=DEEP)).warnings
    assert text.startswith("method.streaming_diloco.fragments=5: 1 ")
    assert not [*declare_run(run_spec(StreamingDiLoCo(4), model=DEEP)).warnings]


def test_diloco_refuses_fragments_with_compression() -> None:
    with pytest.raises(ValueError, match=r"streaming_diloco.*topk"):
        declare_run(run_spec(StreamingDiLoCo(2), TopK(), model=DEEP))
