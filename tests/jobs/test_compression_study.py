"""Test the study of compressors: its configurations are valid, its page has stored results."""

from __future__ import annotations

import json

from jobs import compression_study as study
from raysim.experiment.compose import compose
from raysim.experiment.groups import find_groups


def test_compression_study_is_valid_and_has_every_compressor() -> None:
    chosen = set()
    for overrides in study.COMPRESSORS.values():
        config = compose([*study.SETTING, *overrides])
        assert list(config.model.widths) == [2700, 2700]
        chosen.add(config.choices.compression)
    assert chosen == set(find_groups().files["compression"])


def test_compression_page_shows_the_stored_runs() -> None:
    store = json.loads(study.STORE.read_text())
    assert study.page_text(store) == study.PAGE.read_text()
    assert "none" in store and set(store) <= set(study.COMPRESSORS)


def test_compression_study_finds_the_first_score_at_or_above_the_target() -> None:
    curve = [[1.0, 2.0, 3.0, 0.5], [2.0, 4.0, 6.0, study.TARGET], [3.0, 6.0, 9.0, 0.99]]
    assert study.reached(curve) == [2.0, 4.0, 6.0]
    assert study.reached(curve[:1]) is None
