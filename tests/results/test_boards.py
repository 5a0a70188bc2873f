"""Test that TensorBoard and Weights & Biases receive the values of the history.

Also test that an error names the package if it is not installed.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

from raysim.experiment.config_files import load_yaml
from raysim.experiment.instantiate import build_object, resolve
from raysim.primitives.files import conf_folder
from raysim.results.boards import TensorBoard, WeightsAndBiases
from raysim.results.observers import CurrentRun, Observer
from raysim.simulation.events import Finished, Round

ROWS = [
    {
        "round": n,
        "accuracy": n / 10,
        "fedbss.biased_share": None if n == 1 else 0.5,
        "train_loss": math.nan,
    }
    for n in (1, 2, 3)
]
END = Finished("abc", "def", 1)


def follow(
    observer: TensorBoard | WeightsAndBiases, folder: Path, first: int, last: int
) -> CurrentRun:
    """Pass the rounds `first` to `last`, both included, to an observer; return the run.

    The history of the run begins with the rounds before `first`, as in a resumed run.
    """
    folder.mkdir(exist_ok=True)
    earlier = [dict(row) for row in ROWS[: first - 1]]
    facts = {"identity": {"threads": 7}}
    run = CurrentRun(
        folder,
        len(ROWS),
        facts=facts,
        thresholds=[0.2],
        rows=earlier,
        config={"local": {"lr": 0.1}},
    )
    observer.on_start(run)
    for row in ROWS[first - 1 : last]:
        run.rows.append(dict(row))
        observer.on_round(run, Round(dict(row), ()))
    return run


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Read TensorBoard's event files: map each name to its (step, value) pairs.

    If a name has several values for one step, the last value is used.
    """
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import masked_crc32c

    found: dict[str, dict[int, float]] = {}
    for path in sorted(folder.glob("events.*"), key=lambda each: each.stat().st_mtime_ns):
        data = path.read_bytes()
        while data:
            length = int.from_bytes(data[:8], "little")
            assert int.from_bytes(data[8:12], "little") == masked_crc32c(data[:8])
            event = Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]
            if event.HasField("session_log"):  # a purge: steps from here on are made again
                for values in found.values():
                    for step in [step for step in values if step >= event.step]:
                        del values[step]
            for value in event.summary.value:
                found.setdefault(value.tag, {})[event.step] = value.simple_value
    return {tag: sorted(values.items()) for tag, values in found.items()}


def test_tensorboard_stores_only_finite_numbers_of_each_round(tmp_path: Path) -> None:
    observer = TensorBoard()
    observer.on_finish(follow(observer, tmp_path / "run", 1, 3), END)
    found = scalars(tmp_path / "run/tensorboard")
    assert found["accuracy"] == [(n, pytest.approx(n / 10)) for n in (1, 2, 3)]
    assert found["fedbss/biased_share"] == [(2, 0.5), (3, 0.5)]
    assert "train_loss" not in found and "round" not in found
    assert found["summary/best5_mean"] == [(3, pytest.approx(0.2))]
    assert found["summary/rounds_to.0.20"] == [(3, 2.0)]
    assert not [name for name in found if "identity" in name or name == "summary/accuracy"]


def test_resumed_run_continues_its_tensorboard_log(tmp_path: Path) -> None:
    killed, resumed = TensorBoard(), TensorBoard()
    killed.on_stop(follow(killed, tmp_path / "run", 1, 3), KeyboardInterrupt())
    resumed.on_finish(follow(resumed, tmp_path / "run", 2, 2), END)
    assert [step for step, _ in scalars(tmp_path / "run/tensorboard")["accuracy"]] == [1, 2]


def test_run_that_starts_again_replaces_its_tensorboard_log(tmp_path: Path) -> None:
    killed, restarted = TensorBoard(), TensorBoard()
    killed.on_stop(follow(killed, tmp_path / "run", 1, 3), KeyboardInterrupt())
    for path in (
        tmp_path / "run/tensorboard"
    ).iterdir():  # names differ from one second to the next
        path.rename(path.with_name(f"{path.name}.killed"))
    restarted.on_finish(follow(restarted, tmp_path / "run", 1, 2), END)
    assert [step for step, _ in scalars(tmp_path / "run/tensorboard")["accuracy"]] == [1, 2]


def test_tensorboard_can_write_outside_the_run_folder(tmp_path: Path) -> None:
    observer = TensorBoard(str(tmp_path / "all"))
    observer.on_stop(follow(observer, tmp_path / "run", 1, 1), ValueError("x"))
    assert (tmp_path / "all/run").is_dir() and not (tmp_path / "run/tensorboard").exists()


def test_resumed_offline_run_of_wandb_has_the_same_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for first, last in ((1, 2), (3, 3)):
        observer = WeightsAndBiases(mode="offline")
        run = follow(observer, tmp_path / "run", first, last)
        observer.on_finish(run, END)
    identity = (tmp_path / "run/wandb_id").read_text()
    stored = sorted(path.name for path in (tmp_path / "run/wandb").glob("offline-run-*"))
    assert len(stored) == 2 and all(name.endswith(identity) for name in stored)


class Standing:
    """A stand-in for the package wandb. It stores the arguments of all calls."""

    def __init__(self) -> None:
        self.begun: list[dict[str, object]] = []
        self.logged: list[tuple[dict[str, object], int]] = []
        self.summary: dict[str, object] = {}
        self.ended: list[int] = []

    def init(self, **settings: object) -> Standing:
        self.begun.append(settings)
        return self

    def log(self, values: dict[str, object], step: int) -> None:
        self.logged.append((values, step))

    def finish(self, exit_code: int = 0) -> None:
        self.ended.append(exit_code)

    def Image(self, path: str) -> str:
        return path


def test_wandb_receives_settings_rows_scores_and_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    standing = Standing()
    monkeypatch.setitem(sys.modules, "wandb", standing)  # type: ignore[arg-type]
    observer = WeightsAndBiases(project="mine", entity="us", mode="offline")
    run = follow(observer, tmp_path / "run", 1, 3)
    run.pictures.append(tmp_path / "accuracy.png")
    observer.on_finish(run, END)
    (begun,) = standing.begun
    assert (begun["project"], begun["entity"], begun["config"]) == ("mine", "us", {"local.lr": 0.1})
    assert standing.logged[:2] == [
        ({"accuracy": 0.1}, 1),
        ({"accuracy": 0.2, "fedbss.biased_share": 0.5}, 2),
    ]
    assert standing.logged[-1] == ({"accuracy": str(tmp_path / "accuracy.png")}, 3)
    assert standing.summary["summary/rounds_to.0.20"] == 2 and standing.ended == [0]
    again = WeightsAndBiases(mode="offline")
    again.on_stop(follow(again, tmp_path / "run", 3, 3), ValueError("x"))
    assert standing.begun[1]["id"] == begun["id"] and standing.ended == [0, 1]


@pytest.mark.parametrize(
    ("package", "observer"), [("tensorboardX", TensorBoard), ("wandb", WeightsAndBiases)]
)
def test_error_contains_the_command_that_installs_the_missing_package(
    package: str, observer: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    extra = {"tensorboardX": "tensorboard", "wandb": "wandb"}[package]
    said = rf"needs the package {package} .*\[{extra}\].* uv sync --inexact --extra {extra};"
    with pytest.raises(ValueError, match=said):
        observer()


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_options_tensorboard_and_wandb_build_an_observer(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", Standing())  # type: ignore[arg-type]
    node = load_yaml(conf_folder() / f"observer/{name}.yaml")[name]
    observer = build_object(
        resolve(node["_target_"], f"observer.{name}", ()), node, f"observer.{name}"
    )
    assert isinstance(observer, Observer)


def test_wandb_refuses_unknown_mode() -> None:
    with pytest.raises(ValueError, match=r"observer\.wandb\.mode='ofline'.*did you mean 'offline'"):
        WeightsAndBiases(mode="ofline")
