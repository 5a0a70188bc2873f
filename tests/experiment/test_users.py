"""Test that clients have the order of the users' names, and keep these names.

Names that are numbers are ordered by value, other names as text.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from torch import Tensor

import raysim
from raysim.api.context import Context
from raysim.api.method import Method
from raysim.data.federated import FederatedData, federate, pool_clients
from raysim.data.listed import Listed
from raysim.data.partition import IID, Natural
from raysim.data.sources import Parquet, Synthetic
from raysim.data.tabular import NumPy
from raysim.experiment.build import build
from raysim.primitives.errors import RefusedError
from raysim.results import page, report
from raysim.results.stored_runs import load_run
from raysim.simulation.events import TooManyFailuresError

RNG = np.random.default_rng(0)
ROWS = 96
INPUTS = RNG.standard_normal((ROWS, 4)).astype(np.float32)
CLASSES = np.arange(ROWS) % 3
NUMBERS = np.arange(ROWS) % 12
SHIFTED = 5 - NUMBERS
TEXTS = np.array([f"user{number}" for number in NUMBERS])
IN_ORDER = [str(number) for number in range(12)]
WORDS = [
    "runtime=inprocess",
    "tracking=none",
    "rounds=1",
    "local.epochs=1",
    "schedule.cohort=2",
    "model=mlp",
]


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def split(users: np.ndarray, **options: Any) -> FederatedData:
    return build(WORDS, data=(INPUTS, CLASSES, users), partition=Natural(**options)).spec.data


def names(data: FederatedData) -> list[str]:
    assert data.users is not None
    return list(data.users.to_pylist())


class TestOrder:
    @pytest.mark.parametrize("kind", [np.int64, np.int8, np.uint16])
    def test_users_with_integer_names_are_ordered_by_value(self, kind: type) -> None:
        data = split(NUMBERS.astype(kind))
        assert names(data) == IN_ORDER
        for client in range(12):
            assert set(NUMBERS[data.partition.train.rows(client)]) == {client}

    def test_users_with_negative_integer_names_are_ordered_by_value(self) -> None:
        assert names(split(SHIFTED)) == [str(number) for number in range(-6, 6)]

    def test_users_with_text_names_are_ordered_as_text(self) -> None:
        data = split(TEXTS)
        assert names(data) == sorted(set(TEXTS))
        assert set(TEXTS[data.partition.train.rows(2)]) == {"user10"}

    def test_user_numbers_in_array_files_are_ordered_by_value(self) -> None:
        np.savez("train.npz", x=INPUTS, y=CLASSES, user=NUMBERS)
        assert names(federate(NumPy(root="."), Natural(), 0)) == IN_ORDER

    @pytest.mark.parametrize("folders", [["."], ["one", "two"]])
    def test_user_numbers_in_a_column_of_a_table_are_ordered_by_value(
        self, folders: list[str]
    ) -> None:
        for folder in folders:
            Path(folder).mkdir(exist_ok=True)
            columns = {"x": list(INPUTS), "label": CLASSES, "who": NUMBERS}
            pq.write_table(pa.table(columns), f"{folder}/train.parquet")
        root = folders[0] if len(folders) == 1 else folders
        source = Parquet(root=root, columns=["x"], test_fraction=0.0)
        data = federate(source, Natural(column="who"), 0)
        prefixes = [""] if len(folders) == 1 else [f"{folder}/" for folder in folders]
        assert names(data) == [f"{prefix}{number}" for prefix in prefixes for number in IN_ORDER]

    def test_randomly_drawn_users_become_clients_in_ascending_order_of_name(self) -> None:
        data = split(NUMBERS, clients=5)
        drawn = [int(name) for name in names(data)]
        assert drawn == sorted(drawn)
        for client, user in enumerate(drawn):
            assert set(NUMBERS[data.partition.train.rows(client)]) == {user}


class TestListedNames:
    def test_client_names_are_the_keys_of_the_partition_mapping_in_order(self) -> None:
        data = build(
            WORDS, data=(INPUTS, CLASSES), partition={"zoe": range(9), "al": range(10, 19)}
        ).spec.data
        assert names(data) == ["zoe", "al"]
        data = build(
            WORDS, data=(INPUTS, CLASSES), partition={7: range(9), 3: range(10, 19)}
        ).spec.data
        assert names(data) == ["7", "3"]

    def test_client_names_are_the_keys_in_the_file_with_the_partition(self) -> None:
        Path("rows.json").write_text('{"zoe": [0, 1, 2, 3, 4, 5], "al": [6, 7, 8, 9, 10, 11]}')
        data = federate(Synthetic(samples=40), Listed(file="rows.json"), 0)
        assert names(data) == ["zoe", "al"]

    def test_clients_from_lists_of_row_numbers_have_no_names(self) -> None:
        assert (
            build(
                WORDS, data=(INPUTS, CLASSES), partition=[range(9), range(10, 19)]
            ).spec.data.users
            is None
        )


def test_clients_of_data_without_users_have_no_names() -> None:
    data = federate(Synthetic(samples=40), IID(4), 0)
    assert data.users is None
    assert data.label(3) == "client 3"


def test_client_with_data_of_all_users_has_no_user_name() -> None:
    assert pool_clients(split(TEXTS)).label(0) == "client 0"


def trained(*words: str, **parts: Any) -> raysim.Result:
    data = (INPUTS, CLASSES, 100 + NUMBERS)
    return raysim.run(
        [*WORDS, "out=run", *words], data=data, partition=Natural(), quiet=True, **parts
    )


class Failing(Method):
    """A method that raises an error in the training of client 3."""

    name = "failing"
    paper = "none"

    def gradient(self, ctx: Context, grad: Tensor, part: slice) -> None:
        if ctx.client == 3:
            raise ValueError("this client fails")


class TestNamesInResults:
    def test_table_of_clients_has_names(self) -> None:
        result = trained()
        assert result.clients["user"].tolist() == [str(100 + number) for number in range(12)]
        assert pq.read_table("run/clients.parquet").column_names[:2] == ["client", "user"]

    def test_summary_has_client_names(self) -> None:
        summary = trained().summary
        assert summary["split"]["users"][10] == "110"
        assert (
            json.loads(Path("run/summary.json").read_text())["split"]["users"]
            == summary["split"]["users"]
        )

    def test_failures_have_client_names(self) -> None:
        trained("schedule.cohort=12", methods=[Failing()])
        line = json.loads(Path("run/failures.jsonl").read_text().splitlines()[0])
        assert (line["client"], line["user"]) == (3, "103")
        assert "client 3 (user 103)" in line["error"]

    def test_errors_have_client_names(self) -> None:
        with pytest.raises(TooManyFailuresError, match=r"client 3 \(user 103\)"):
            trained("schedule.cohort=12", "faults.tolerate=0", methods=[Failing()])

    def test_error_about_client_without_test_samples_has_its_name(self) -> None:
        result = raysim.run(
            [*WORDS, "partition.test_fraction=0", "out=run"],
            data=(INPUTS, CLASSES),
            partition={"zoe": range(9), "al": range(10, 19)},
            quiet=True,
        )
        with pytest.raises(RefusedError, match=r"client 1 \(user al\)"):
            result.predictions(1)

    @pytest.mark.slow
    def test_report_has_client_names(self) -> None:
        result = trained("schedule.cohort=12", methods=[Failing()])
        text = page.write_report(
            report.group_by_setting([load_run(Path("run"))]), Path("page")
        ).read_text()
        assert "client 3 (user 103)" in text  # in the failures
        lowest = int(result.clients["accuracy"].argmin())
        assert f"{lowest} (user {100 + lowest})" in text
