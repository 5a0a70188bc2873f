"""Test traces: reading, the row of each client, refused files, and conversion from FedScale."""

from __future__ import annotations

import itertools
import math
import os
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings, strategies as st
from tiny_runs import run_to_end, untrained_run

import raysim
from raysim import cli
from raysim.primitives.errors import RefusedError
from raysim.simulation import trace
from raysim.simulation.availability import Availability
from raysim.simulation.fleet import Devices
from raysim.simulation.schedule import Buffered, Deadline
from raysim.simulation.trace import Trace, read, rows_of, write

Row = dict[str, Any]
PERIOD = 1000.0
QUICK = [
    *(
        "runtime=inprocess",
        "tracking=none",
        "data=synthetic",
        "partition=iid",
        "partition.clients=10",
    ),
    *("schedule.cohort=2", "rounds=2", "local.epochs=1"),
]


def row(client: int = 0, **others: Any) -> Row:
    return {
        "client": client,
        "start": [10.0, 300.0],
        "end": [200.0, 900.0],
        "period": PERIOD,
        "down": 4e3,
        "up": 2e3,
        "speed": 50.0,
    } | others


def sample(clients: int, seed: int = 0) -> list[Row]:
    """Return a random trace: for each client its speeds and up to four intervals of availability.

    The intervals start and end at whole seconds.
    """
    generator, rows = np.random.default_rng(seed), []
    for client in range(clients):
        bounds = np.sort(
            generator.choice(1001, size=2 * generator.integers(0, 5), replace=False)
        ).astype(float)
        speed, down, up = generator.lognormal(4, 1, size=3).tolist()
        times = {"start": bounds[::2].tolist(), "end": bounds[1::2].tolist()}
        rows.append(row(client, **times, speed=speed, down=1e4 * down, up=1e4 * up))
    return rows


def write_unchecked(folder: Path, rows: list[Row], **columns: pa.DataType) -> str:
    """Write rows of a trace to a file without checking them, and return its path.

    columns: Arrow types of columns that get another type than the schema of traces says.
    """
    table = pa.Table.from_pylist(rows)
    for name, kind in columns.items():
        table = table.set_column(table.schema.names.index(name), name, table[name].cast(kind))
    pq.write_table(table, path := folder / "trace.parquet", row_group_size=3)
    return str(path)


def presence_of(devices: Devices) -> Availability:
    assert devices.presence is not None
    return devices.presence


# --- what is read ---------------------------------------------------------------------------------
def test_client_has_speed_and_availability_of_its_trace_row(tmp_path: Path) -> None:
    write(tmp_path / "trace.parquet", [row()])
    devices = Trace(file=str(tmp_path / "trace.parquet")).devices(0, 1, lambda: 1.0)
    # 1,000 floats: 1 s down and 2 s up; 100 samples at 50 a second: 2 s
    assert devices.trip(0, 0, 10.0, 100.0, 1000, 1000) == (15.0, True)
    assert devices.trip(0, 0, 196.0, 100.0, 1000, 1000) == (200.0, False)
    assert [presence_of(devices).available(0, now) for now in (0.0, 10.0, 250.0, 1010.0)] == [
        False,
        True,
        False,
        True,
    ]
    assert presence_of(devices).next_change(0, 900.0, 2000.0) == 1010.0


def test_trace_can_have_device_speeds_in_flops(tmp_path: Path) -> None:
    mine = row()
    mine["flops"] = 1e9 * mine.pop("speed")
    write(tmp_path / "trace.parquet", [mine])
    devices = Trace(file=str(tmp_path / "trace.parquet")).devices(0, 1, lambda: 2e9)
    assert devices.seconds(np.array([100.0]), 0, 0) == 4.0  # 200 GFLOP at 50 GFLOP a second


def test_trace_file_can_have_client_names_and_columns_of_32_bits(tmp_path: Path) -> None:
    rows = [row(f"phone {each}", start=[10, 300], end=[200, 900], period=1000) for each in range(2)]  # type: ignore[arg-type]
    result = read(
        write_unchecked(tmp_path, rows, speed=pa.float32(), start=pa.large_list(pa.int32()))
    )
    assert result.bounds.tolist() == [10.0, 200.0, 300.0, 900.0] * 2
    assert result.first.tolist() == [0, 4, 8]


def test_trace_file_is_read_in_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_unchecked(tmp_path, sample(20))
    whole = read(file)
    monkeypatch.setattr(trace, "_ROWS", 3)
    for one, other in zip(whole, read(file), strict=True):
        assert np.array_equal(one, other)


def test_large_row_group_of_a_trace_is_read_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = np.sort(np.random.default_rng(0).random((30_000, 8)), axis=1)
    table = {"client": np.arange(30_000), "start": list(times[:, ::2]), "end": list(times[:, 1::2])}
    rates = np.random.default_rng(1).random((4, 30_000)) + 1
    table |= dict(zip(("period", "down", "up", "speed"), rates, strict=True))
    pq.write_table(pa.table(table), tmp_path / "t", use_dictionary=False, data_page_size=1 << 12)
    held: list[int] = []
    part = trace._read_batch
    monkeypatch.setattr(trace, "_ROWS", 500)
    monkeypatch.setattr(trace, "_BUFFER_BYTES", 1 << 12)
    monkeypatch.setattr(
        trace, "_read_batch", lambda *args: held.append(pa.total_allocated_bytes()) or part(*args)
    )
    before = pa.total_allocated_bytes()
    read(str(tmp_path / "t"))
    assert len(held) == 60 and held[0] - before < (tmp_path / "t").stat().st_size / 4, (
        "bytes as the first rows are there"
    )


def test_touching_intervals_of_a_trace_are_joined(tmp_path: Path) -> None:
    rows = [row(0, start=[0.0, 5.0, 9.0], end=[5.0, 9.0, 12.0]), row(1, start=[12.0], end=[20.0])]
    result = read(write_unchecked(tmp_path, rows))
    assert result.bounds.tolist() == [0.0, 12.0, 12.0, 20.0]
    assert result.first.tolist() == [0, 2, 4]


@given(
    seed=st.integers(0, 10_000),
    client=st.integers(0, 7),
    times=st.lists(st.integers(0, 3000), max_size=30),
)
@settings(max_examples=60, deadline=None)
def test_clients_are_available_in_their_intervals_only(
    tmp_path_factory: pytest.TempPathFactory, seed: int, client: int, times: list[int]
) -> None:
    rows = sample(8, seed)
    write(path := tmp_path_factory.mktemp("trace") / "trace.parquet", rows)
    for wrap in (True, False):
        devices = Trace(file=str(path), wrap=wrap).devices(0, 8, lambda: 1.0)
        for now in times:
            at = now % PERIOD if wrap else now
            there = any(
                s <= at < e for s, e in zip(rows[client]["start"], rows[client]["end"], strict=True)
            )
            assert presence_of(devices).available(client, now) == there


def test_availability_setting_replaces_availability_of_a_trace(tmp_path: Path) -> None:
    write(tmp_path / "trace.parquet", [row()])
    devices = Trace(file=str(tmp_path / "trace.parquet"), availability="always").devices(
        0, 1, lambda: 1.0
    )
    assert devices.presence is None
    assert devices.trip(0, 0, 950.0, 100.0, 1000, 1000) == (955.0, True)


# --- who is which row -----------------------------------------------------------------------------
def test_client_n_gets_trace_row_n_if_there_are_as_many_rows_as_clients() -> None:
    assert rows_of(5, 4, 4).tolist() == [0, 1, 2, 3]


@given(seed=st.integers(0, 100), clients=st.integers(1, 60), rows=st.integers(1, 60))
@settings(max_examples=100, deadline=None)
def test_trace_rows_are_used_equally_often(seed: int, clients: int, rows: int) -> None:
    result = rows_of(seed, clients, rows)
    uses = np.bincount(result, minlength=rows)
    assert len(result) == clients
    assert uses.max() - uses.min() <= 1
    assert np.array_equal(result, rows_of(seed, clients, rows))


def test_drawn_trace_rows_depend_on_the_seed() -> None:
    assert rows_of(1, 10, 1000).tolist() != rows_of(2, 10, 1000).tolist()
    assert rows_of(1, 30, 10).tolist() != rows_of(2, 30, 10).tolist()


# --- what is refused ------------------------------------------------------------------------------
# Changes to a row, and the part of the row that the error names.
BAD: list[tuple[Mapping[str, Any], str]] = [
    ({"start": [10.0, 150.0]}, "interval 2, from 150.0 to 900.0, overlaps"),
    (
        {"start": [300.0, 10.0], "end": [900.0, 200.0]},
        "interval 2, from 10.0 to 200.0, is not sorted",
    ),
    ({"start": [-1.0, 300.0]}, "interval 1, from -1.0 to 200.0"),
    ({"start": [10.0, math.nan]}, "interval 2, from nan to 900.0"),
    ({"end": [200.0, math.inf]}, "interval 2, from 300.0 to inf"),
    ({"end": [200.0, None]}, "interval 2, from 300.0 to None"),
    ({"end": [10.0, 900.0]}, "interval 1, from 10.0 to 10.0"),
    ({"end": [200.0, 1000.5]}, "interval 2, from 300.0 to 1000.5"),
    ({"end": [200.0]}, "2 starts and 1 ends"),
    ({"start": None}, "start is missing"),
    ({"period": math.inf}, "period is inf"),
    ({"period": 0.0}, "period is 0.0"),
    ({"down": math.nan}, "down is nan"),
    ({"up": -1.0}, "up is -1.0"),
    ({"speed": None}, "speed is None"),
]


@pytest.mark.parametrize(("wrong", "text"), BAD, ids=[text for _, text in BAD])
@pytest.mark.parametrize("at", [0, 4])
def test_error_of_a_wrong_trace_row_contains_client_and_row_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: Mapping[str, Any], text: str, at: int
) -> None:
    monkeypatch.setattr(trace, "_ROWS", 3)
    rows = [row(100 + each) for each in range(6)]
    rows[at] |= wrong
    with pytest.raises(ValueError) as caught:
        read(file := write_unchecked(tmp_path, rows))
    assert str(caught.value).startswith(f"{file}: client {100 + at} (row {at}): {text}")
    assert "\n" not in str(caught.value)


def without(name: str) -> list[Row]:
    return [{key: value for key, value in row().items() if key != name}]


@pytest.mark.parametrize(
    ("rows", "columns", "text"),
    [
        (without("client"), {}, "0 columns called client"),
        (without("end"), {}, "0 columns called end"),
        (without("up"), {}, "0 columns called up"),
        (without("speed"), {}, "neither speed nor flops"),
        ([row(flops=1.0)], {}, "speed and flops"),
        ([row()], {"period": pa.string()}, "column period has the type string"),
        ([row()], {"start": pa.list_(pa.string())}, "column start has the type list<"),
        ([row(start=1.0)], {}, "column start has the type double"),
        ([row(1.5)], {}, "column client has the type double"),  # type: ignore[arg-type]
        ([row(7), row(8), row(7)], {}, "client 7 is in rows 0 and 2"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_trace_without_the_expected_columns_is_refused(
    tmp_path: Path, rows: list[Row], columns: Any, text: str
) -> None:
    with pytest.raises(ValueError) as caught:
        read(file := write_unchecked(tmp_path, rows, **columns))
    assert str(caught.value).startswith(file)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_wrong_trace_is_refused_when_a_run_is_built(
    tmp_path: Path,
) -> None:
    file = write_unchecked(tmp_path, [row(), row(1, up=0.0)])
    with pytest.raises(RefusedError, match=r"client 1 \(row 1\): up is 0\.0"):
        raysim.build([*QUICK, "runtime=local", "fleet=trace", f"fleet.file={file}"])


def test_unreadable_or_empty_trace_file_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    (tmp_path / "text.parquet").write_text("client,start")
    pq.write_table(pa.Table.from_pylist([row()]).slice(0, 0), tmp_path / "empty.parquet")
    write(tmp_path / "late.parquet", [row(start=[1e6], end=[2e6], period=3e6)])
    expected = {
        "text.parquet": "cannot be read as a Parquet file",
        "missing.parquet": "cannot be read as a Parquet file",
        "empty.parquet": "has no rows",
        "late.parquet": r"fleet: .* 1,000,000 s",
    }
    for name, text in expected.items():
        with pytest.raises(RefusedError, match=text) as caught:
            raysim.run(
                [*QUICK, "fleet=trace", f"fleet.file={tmp_path / name}", f"out={tmp_path / 'out'}"],
                quiet=True,
            )
        assert "\n" not in str(caught.value)
    with pytest.raises(RefusedError, match=r"fleet\.file=null"):
        raysim.run([*QUICK, "fleet=trace", f"out={tmp_path / 'out'}"], quiet=True)
    assert not (tmp_path / "out").exists()


# --- runs -----------------------------------------------------------------------------------------
def test_virtual_times_of_a_run_follow_its_trace(tmp_path: Path) -> None:
    write(
        path := tmp_path / "trace.parquet",
        [row(start=[100.0], end=[600.0], down=math.pi * 1e9, up=1e12, speed=0.1)],
    )
    coordinator, _, _ = untrained_run([10], Buffered(1, 1), Trace(file=str(path)), rounds=6)
    # 10 samples take 100 s: five of them fit into an interval, and the network takes a moment: the
    # last is lost
    seconds = [row["virtual_seconds"] for row in run_to_end(coordinator).rows]
    assert seconds == pytest.approx([200.0, 300.0, 400.0, 500.0, 1200.0, 1300.0], abs=1e-3)


def test_deadline_of_a_round_begins_when_its_first_client_is_dispatched(tmp_path: Path) -> None:
    always_later: dict[str, Any] = {"start": [100.0], "end": [600.0], "down": 1e12, "up": 1e12}
    write(
        path := tmp_path / "trace.parquet",
        [row(0, speed=1.0, **always_later), row(1, speed=0.1, **always_later)],
    )
    fleet = Trace(file=str(path))
    coordinator, ledger, _ = untrained_run([10, 10], Deadline(2, 50.0), fleet, rounds=1)
    # Both clients come after 100 s. Client 0 needs 10 s, and client 1 needs 100 s.
    (only,) = run_to_end(coordinator).rows
    assert only["virtual_seconds"] == pytest.approx(150.0, abs=1e-3)
    assert ledger.cohorts == [[0]]


def test_equal_runs_on_a_trace_are_bit_identical(tmp_path: Path) -> None:
    write(path := tmp_path / "trace.parquet", sample(30))
    words = [
        *QUICK,
        "fleet=trace",
        f"fleet.file={path}",
        "fleet.dropout=0.1",
        "schedule=buffered",
        "rounds=3",
    ]
    words = [word for word in words if not word.startswith("schedule.cohort")]
    words += ["schedule.concurrency=4", "schedule.size=2"]
    one, other = (raysim.run([*words, f"out={tmp_path / name}"], quiet=True) for name in "ab")
    assert one.summary["model_sha256"] == other.summary["model_sha256"]
    assert one.rows[-1]["virtual_seconds"] == other.rows[-1]["virtual_seconds"]


# --- FedScale -------------------------------------------------------------------------------------
# The entry that its users quote, and others like it.
BEHAVIOUR: dict[int, dict[str, Any]] = {
    3834: {
        "duration": 211625,
        "inactive": [65881, 133574, 208292, 276575, 295006, 356236, 400906, 475099],
        "finish_time": 518400,
        "active": [12788, 100044, 188992, 271372, 276663, 352625, 356267, 441193],
        "model": "CPH1801",
    },
    7: {"duration": 100, "inactive": [100], "finish_time": 518400, "active": [0], "model": "X"},
}
CAPACITY = {432802: {"computation": 162.0, "communication": 5648.0}}


def pickled(folder: Path, name: str, value: object) -> str:
    (path := folder / name).write_bytes(pickle.dumps(value))
    return str(path)


def convert(folder: Path, capacity: object, behaviour: object, status: int = 0) -> str:
    files = pickled(folder, "capacity", capacity), pickled(folder, "behaviour", behaviour)
    out = str(folder / "new" / "trace.parquet")
    assert cli.call(["fleet", "convert", *files, "--out", out]) == status
    return out


def test_fedscale_files_are_converted_to_a_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = convert(tmp_path, CAPACITY, BEHAVIOUR)
    assert capsys.readouterr().out == f"2 clients are in {out}\n"
    result, first = read(out), BEHAVIOUR[3834]
    assert result.first.tolist() == [0, 16, 18]
    assert result.bounds.tolist()[:16] == list(
        itertools.chain(*zip(first["active"], first["inactive"], strict=True))
    )
    assert result.period.tolist() == [518400.0] * 2
    # 162 ms for inference, three times as long for training; 5,648 x 1,024 bits a second
    assert result.rate == pytest.approx([1 / 0.486] * 2)
    assert result.down.tolist() == result.up.tolist() == [5648 * 128.0] * 2
    assert cli.call(["fleet", "check", out]) == 0
    assert capsys.readouterr().out.startswith(f"{out}: 2 clients in 9 intervals, ")


def test_fedscale_conversion_prints_the_number_of_clients_with_faulty_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = {"inactive": [5, 9], "finish_time": 10, "active": [0, 4]}
    out = convert(
        tmp_path,
        CAPACITY,
        {1: broken, **BEHAVIOUR, 2: {"finish_time": 10, "active": ["x"], "inactive": [3]}},
    )
    said = capsys.readouterr().out
    assert (
        f"2 clients are in {out}; 2 clients were left out. The first error: client 1: interval 2"
        in said
    )
    assert len(read(out).rate) == 2


def test_fedscale_pickles_of_numbers_are_read(tmp_path: Path) -> None:
    numbers = {key: np.float64(value) for key, value in CAPACITY[432802].items()}
    out = convert(tmp_path, OrderedDict({1: numbers}), BEHAVIOUR)
    assert read(out).rate == pytest.approx([1 / 0.486] * 2)


class Evil:
    def __init__(self, target: Path):
        self.target = target

    def __reduce__(self) -> Any:
        return Path.touch, (self.target,)


@pytest.mark.parametrize("place", ["capacity", "behaviour"])
def test_fedscale_pickle_that_runs_code_is_refused(
    tmp_path: Path, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    evil = {1: {"computation": Evil(tmp_path / "touched"), "finish_time": 1}}
    files = {"capacity": CAPACITY, "behaviour": BEHAVIOUR, place: evil}
    convert(tmp_path, files["capacity"], files["behaviour"], status=2)
    said = capsys.readouterr().err
    assert "names pathlib.Path.touch" in said
    assert said.count("\n") == 1
    assert not (tmp_path / "touched").exists()
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("capacity", "behaviour", "text"),
    [
        ([1, 2], BEHAVIOUR, "capacity is not a pickle of FedScale"),
        ({}, BEHAVIOUR, "it holds no dictionary of clients"),
        (BEHAVIOUR, CAPACITY, "client 3834 has no 'computation'"),
        (
            CAPACITY,
            {1: {"finish_time": 0}},
            "client 1: period is 0.0",
        ),
    ],
)
def test_fedscale_pickle_of_other_content_is_refused(
    tmp_path: Path,
    capacity: object,
    behaviour: object,
    text: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    convert(tmp_path, capacity, behaviour, status=2)
    said = capsys.readouterr().err
    assert text in said
    assert said.count("\n") == 1


def test_fedscale_file_that_is_no_pickle_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_text("hello")
    assert cli.call(["fleet", "convert", str(tmp_path / "text"), str(tmp_path / "text")]) == 2
    assert "is not a pickle of FedScale" in capsys.readouterr().err
    assert cli.call(["fleet", "convert", "no-such-file", str(tmp_path / "text")]) == 2
    assert "no-such-file" in capsys.readouterr().err


def test_fedscale_refuses_wrong_number_of_files(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.call(["fleet", "convert", "one"]) == 2
    assert "fleet convert: " in capsys.readouterr().err
    assert cli.call(["fleet", "check", "one", "two"]) == 2
    assert "fleet check: " in capsys.readouterr().err


def test_named_pipe_in_place_of_a_fedscale_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "capacity")
    assert (
        cli.call(["fleet", "convert", str(tmp_path / "capacity"), str(tmp_path / "capacity")]) == 2
    )
    assert "capacity is not a regular file" in capsys.readouterr().err


def test_named_pipe_in_place_of_a_trace_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "trace.parquet")
    assert cli.call(["fleet", "check", str(tmp_path / "trace.parquet")]) == 2
    assert "trace.parquet is not a regular file" in capsys.readouterr().err
