"""Test that a report is one file.

This also holds if names contain markup, or if files of the reported runs are missing.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from test_report import make, seeded

from raysim.results import page, report, tables
from raysim.results.clients import ClientLabels, write_split
from raysim.results.jobs import JobWriter
from raysim.simulation.events import JobRecord

pytestmark = pytest.mark.slow

EVIL = "<script>alert(1)</script>"


class Tags(HTMLParser):
    """The tags, attributes and texts of a page."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def written(runs: list[report.Run], folder: Path) -> str:
    return page.write_report(report.group_by_setting(runs), folder / "out").read_text()


def section(text: str, title: str) -> str:
    """Return the HTML below a heading, up to the next one."""
    return re.split(r"<h2", text.partition(f">{title}</h2>")[2])[0]


def test_page_escapes_markup_and_loads_no_external_files(tmp_path: Path) -> None:
    config = json.dumps(
        {"method": {EVIL: {"mu": EVIL}}, "data": f"'\"><img src=x onerror={EVIL}>", "note": EVIL}
    )
    folder = tmp_path / "<i onclick=x>{{7*7}}{% raw %}"
    runs = [make(folder, [0.5, 0.6], config), make(tmp_path / "{y}", [0.4, 0.5], "{method: {}}")]
    runs[0].summary.update(
        title=EVIL,
        model_sha256=EVIL,
        identity={EVIL: EVIL},
        choices={"method": [EVIL]},
        failures_total=EVIL,
    )
    lines = [json.dumps({"error": EVIL, "method": EVIL, "round": 1}), "no json", "[" * 99_999, "3"]
    (folder / "failures.jsonl").write_text("\n".join(lines))
    classes = [EVIL, "</svg>" + EVIL]
    write_split(
        ClientLabels(np.array([0, 1]), np.array([0, 1]), np.array([2, 3]), 3, classes), folder
    )
    found = Tags(text := written(runs, tmp_path))
    assert not {"script", "img", "iframe", "link", "object"} & {*found.tags}
    assert not [name for name, _ in found.attributes if name.startswith("on")]
    targets = [
        value or ""
        for name, value in found.attributes
        if name in ("src", "href", "srcset", "action")
    ]
    assert all(target.startswith(("#", "data:image/png;base64,")) for target in targets)
    assert "http" not in text and "@import" not in text
    assert "alert(1)" in "".join(found.words) and "{{7*7}}" in "".join(found.words)


def test_page_of_an_older_run_says_which_results_are_missing(tmp_path: Path) -> None:
    run = make(tmp_path / "one", [0.5, 0.75], "seed: 3")
    text = written([replace(run, summary={"rounds": 2, "accuracy": 0.75})], tmp_path)
    assert (
        "no deviation" not in text and "What differs" not in text and "On virtual time" not in text
    )
    assert "No run stores the scores of single clients" in section(text, "Spread over clients")
    assert "No run stores its split" in section(text, "Split of the data")
    assert "No client failed" in section(text, "Failures")
    assert "raysim run --config" in section(text, "How to repeat it")


def test_page_says_that_numbers_after_plus_minus_are_deviations(tmp_path: Path) -> None:
    runs = seeded(tmp_path, "fedprox", [0.5, 0.75, 1.0]) + seeded(
        tmp_path, "fedavgm", [0.25, 0.25, 0.25]
    )
    text = written(runs, tmp_path)
    results = section(text, "Results")
    assert "Mean ± sample standard deviation over the seeds." in results
    assert "<b>0.7500 ±\u00a00.2500</b>" in results and "0.2500 ±\u00a00.0000" in results
    assert "bands ± one sample standard deviation" in section(text, "Curves")
    alone = written(runs[::3], tmp_path)
    assert "One seed of each setting, so no deviation can be given" in section(alone, "Results")


def test_page_lists_configuration_keys_that_differ_between_runs(tmp_path: Path) -> None:
    runs = [
        make(tmp_path / f"r{n}", [0.5], f"{{method: {{}}, local: {{lr: {lr}, batch: 4}}}}")
        for n, lr in enumerate((1, 2, 2))
    ]
    runs[2] = replace(
        runs[2], name="third", config=runs[2].config | {"method": {"fedprox": {"mu": 1}}}
    )
    different = section(written(runs, tmp_path), "What differs")
    keys = re.findall(r"<code>(.*?)</code>", different)
    assert keys == ["method", "local.lr", "method.fedprox.mu"]
    assert "batch" not in different


def test_rerun_commands_of_a_page_write_to_different_folders(tmp_path: Path) -> None:
    runs = seeded(tmp_path, "fedprox", [0.5, 0.75])
    places = re.findall(r"out=\S*?(?=<)", section(written(runs, tmp_path), "How to repeat it"))
    assert places == ["out=again/1", "out=again/2"]
    assert re.findall(
        r"out=\S*?(?=<)", section(written(runs[:1], tmp_path), "How to repeat it")
    ) == ["out=again"]


def test_page_shows_the_first_12_characters_of_a_checksum(tmp_path: Path) -> None:
    run = make(tmp_path / "one", [0.5])
    run.summary.update(model_sha256="0123456789abcdef" * 4)
    text = section(written([run], tmp_path), "How to repeat it")
    assert f'<td title="{"0123456789abcdef" * 4}">0123456789ab</td>' in text
    assert "all of them are in the run&#39;s summary.json" in text


def test_page_omits_the_state_checksum_if_there_is_no_state(tmp_path: Path) -> None:
    run = make(tmp_path / "one", [0.5])
    run.summary.update(
        model_sha256="0123456789abcdef" * 4, state_sha256=hashlib.sha256().hexdigest()
    )
    text = section(written([run], tmp_path), "How to repeat it")
    assert "0123456789ab</td>" in text and "e3b0c442" not in text


def test_page_allows_a_line_break_only_before_the_plus_minus_sign(tmp_path: Path) -> None:
    """The line may break between a mean and "±", but not between "±" and the deviation.

    Without the break before "±", the last columns of a study's results would not fit on the page.
    """
    text = section(written(seeded(tmp_path, "fedprox", [0.5, 0.75]), tmp_path), "Results")
    assert (
        '<td class="number pair">0.6250 ±\u00a00.1768</td>' in text
        and '<td class="number">2</td>' in text
    )


def test_page_counts_failures_and_lists_errors(tmp_path: Path) -> None:
    run, other = make(tmp_path / "bad", [0.5, 0.75]), make(tmp_path / "good", [0.5, 0.75])
    for row in run.rows:
        row |= {"failures": 2, "lost": 3, "discarded": 0}
    errors = [
        {"method": "moon", "error": "loss is nan"},
        {"error": "boom"},
        {"method": "moon", "error": "loss is nan"},
    ]
    (tmp_path / "bad/failures.jsonl").write_text(
        "".join(json.dumps(each) + "\n" for each in errors)
    )
    cells = re.findall(r"<td[^>]*>(.*?)</td>", section(written([run, other], tmp_path), "Failures"))
    plain = [re.sub("<.*?>", "", cell) for cell in cells]
    assert plain[:6] == ["1bad", "4", "6", "2good", "0", "–"]
    assert plain[6:] == ["2", "bad", "method moon: loss is nan", "1", "bad", "boom"]


def test_page_limits_the_list_of_errors(tmp_path: Path) -> None:
    run = make(tmp_path / "bad", [0.5])
    run.rows[0]["failures"] = 9
    lines = (json.dumps({"error": f"{number} {'x' * 5000}"}) + "\n" for number in range(100))
    (tmp_path / "bad/failures.jsonl").write_text("".join(lines))
    text = section(written([run], tmp_path), "Failures")
    assert f"{100 - page.MAX_ERRORS} more kinds" in text
    assert "x" * page.ERROR_LENGTH not in text


@pytest.mark.pictures
def test_page_shows_a_split_once_if_several_runs_have_the_same_split(tmp_path: Path) -> None:
    runs = [make(tmp_path / name, [0.5], f"{{method: {{{name}: {{}}}}}}") for name in "abc"]
    same = ClientLabels(
        np.array([0, 0, 2]), np.array([0, 1, 1]), np.array([3, 1, 4]), 3, ["cat", "dog"]
    )
    for run, split in zip(
        runs, (same, same, replace(same, samples=np.array([1, 1, 6]))), strict=True
    ):
        write_split(split, run.folder)
    text = section(written(runs, tmp_path), "Split of the data")
    assert text.count("<h3>") == 2 and "<h3>a; b</h3>" in text and "<h3>c</h3>" in text
    assert "0 / 4 / 4" in text  # the client without samples counts
    assert "cat" in text


@pytest.mark.pictures
def test_page_draws_client_sizes_only_if_they_differ(tmp_path: Path) -> None:
    def drawn(name: str, sizes: list[int]) -> str:
        run = make(tmp_path / name, [0.5])
        clients = np.arange(len(sizes))
        write_split(
            ClientLabels(clients, clients % 2, np.array(sizes), len(sizes), ["cat", "dog"]),
            run.folder,
        )
        return section(written([run], tmp_path), "Split of the data")

    same, others = drawn("a", [51] * 20), drawn("b", [51, 52, 54])
    assert ">51 each<" in same and "51 / 51" not in same
    assert (same.count("<svg"), others.count("<svg")) == (1, 2)
    bars = others.rpartition("<svg")[2]
    assert "training samples" in bars
    assert not re.findall(r">\d+\.\d+</text>", bars), "numbers of samples and of clients are whole"


def test_page_shows_notes_below_results(tmp_path: Path) -> None:
    runs = [make(tmp_path / "a", [0.5])]
    columns = [tables.Column("", ["a"])]
    page.write_report(
        report.group_by_setting(runs),
        tmp_path,
        "t",
        [],
        page.ReportSection("Results", "", columns, notes=["set <norm>"]),
    )
    assert "<p>set &lt;norm&gt;</p>" in section((tmp_path / "report.html").read_text(), "Results")


@pytest.mark.pictures
def test_picture_of_classes_per_client_has_the_colours_of_the_page(tmp_path: Path) -> None:
    """The style sheet of the page sets the colours of the picture.

    A picture with fixed colours for a light page would be hard to see on a dark page.
    """
    run = make(tmp_path / "a", [0.5])
    write_split(
        ClientLabels(np.arange(2), np.arange(2), np.full(2, 3), 2, ["cat", "dog"]), run.folder
    )
    text = written([run], tmp_path)
    assert "<image" in section(text, "Split of the data")
    assert ".plot image { filter: url(#tint); }" in text and "flood-color: var(--c0)" in text


def test_page_shows_a_timeline_only_for_runs_with_stale_or_lost_jobs(tmp_path: Path) -> None:
    run, other = make(tmp_path / "late", [0.5, 0.75]), make(tmp_path / "even", [0.5, 0.75])
    for folder, stale in ((run.folder, 1), (other.folder, 0)):
        writer = JobWriter.open(folder, 0)
        assert writer is not None
        writer.add(
            [
                JobRecord(0, 0, 0, 0.0, 1.0, "aggregated", 1, 0),
                JobRecord(1, 0, 0, 0.0, 1.0, "aggregated", 1, stale),
            ]
        )
        writer.write()
    text = written([run, other], tmp_path)
    assert "late: clients, fleet and workers" in text and "even: clients" not in text


def test_page_hides_curves_against_a_cost_until_a_click_if_all_runs_cost_the_same(
    tmp_path: Path,
) -> None:
    runs = [
        make(tmp_path / name, [0.5, score], f"workers: {score}")
        for name, score in (("a", 0.6), ("b", 0.7))
    ]
    shown, _, folded = section(written(runs, tmp_path), "Curves").partition("<details>")
    assert shown.count("<svg") == 4, "three accuracies and a loss, against the rounds"
    assert folded.startswith(
        "<summary>The same against: traffic, down and up · virtual time · wall time</summary>"
    )
    assert folded.count("<svg") == 3 * 4 and "no result" in folded
    dear = replace(
        runs[1], rows=[row | {"floats_up": 9 * (row["floats_up"] or 0)} for row in runs[1].rows]
    )
    shown, _, folded = section(written([runs[0], dear], tmp_path), "Curves").partition("<details>")
    assert shown.count("<svg") == 2 * 4
    assert folded.startswith("<summary>The same against: virtual time · wall time</summary>")


def test_report_writes_a_png_for_each_measured_metric(
    tmp_path: Path,
) -> None:
    written([make(tmp_path / "a", [None])], tmp_path)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "comparison_train_loss.png",
        "report.html",
    ]


def test_page_of_a_run_without_scores_is_written(tmp_path: Path) -> None:
    run = make(tmp_path / "a", [None])
    bare = replace(run, rows=[{"round": 1}], summary={"rounds": 1})
    assert "No run has measured anything yet" in written([bare], tmp_path)


def test_page_is_not_written_if_a_file_is_broken(tmp_path: Path) -> None:
    run = make(tmp_path / "a", [0.5, 0.6], "{method: {}}")
    (tmp_path / "a/split.parquet").write_bytes(b"no table")
    with pytest.raises(ValueError, match=r"split\.parquet"):
        written([run], tmp_path)
    assert not (tmp_path / "out").exists()


def test_page_without_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no run"):
        page.write_report([], tmp_path)


def test_page_has_no_passwords(tmp_path: Path) -> None:
    configs = [
        f"{{method: {{}}, data: {{root: 'http://me:secret{n}@worker/x'}}}}" for n in range(2)
    ]
    runs = [make(tmp_path / f"r{n}", [0.5], config) for n, config in enumerate(configs)]
    text = written(runs, tmp_path)
    assert "worker/x" in text and "secret" not in text


@pytest.mark.parametrize(("count", "lines"), [(8, 0), (10, 10)])
def test_legend_shows_dashes_if_there_are_more_curves_than_colours(
    count: int, lines: int, tmp_path: Path
) -> None:
    runs = [make(tmp_path / f"run{number}", [0.5, 0.6]) for number in range(count)]
    groups = [report.RunGroup(run.name, [run]) for run in runs]
    text = page.write_report(groups, tmp_path / "out").read_text()
    dashes = re.findall(r'stroke-dasharray="([^"]*)"/></svg>', text)
    assert len(dashes) == lines
    assert dashes[:9] == (["", "", "", "", "", "", "", "", "5 3"] if lines else [])


def test_page_has_no_line_break_between_a_deviation_and_its_unit(tmp_path: Path) -> None:
    runs = seeded(tmp_path, "fedprox", [0.5, 0.6])
    runs = [replace(run, summary=run.summary | {"virtual_seconds": 3.0}) for run in runs]
    assert "3.00 ±\u00a00.00\u00a0s" in written(runs, tmp_path)
