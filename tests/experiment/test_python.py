"""Test runs from Python: objects as parts of a run, how they are stored, and the result."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tiny_runs import NormedMlp
from torch import nn

import raysim
from raysim.api.method import Method
from raysim.data.arrays import Arrays
from raysim.data.partition import IID, Dirichlet
from raysim.data.sources import Synthetic
from raysim.experiment.config_files import load_yaml
from raysim.experiment.objects import OBJECT, object_node
from raysim.experiment.result import Predictions
from raysim.methods.fedbn import FedBN
from raysim.methods.fedexp import FedExP
from raysim.methods.fedprox import FedProx
from raysim.models import Mlp
from raysim.primitives.errors import RefusedError
from raysim.simulation.fleet import Lognormal
from raysim.simulation.schedule import Buffered

SMALL: dict[str, Any] = {
    "runtime": "inprocess",
    "tracking": "none",
    "local": {"epochs": 1},
    "rounds": 2,
    "quiet": True,
}
RNG = np.random.default_rng(0)
IMAGES, LABELS = RNG.integers(0, 256, (60, 8, 8), dtype=np.uint8), np.arange(60) % 3
TESTS = IMAGES[:12], LABELS[:12]
DATA = ((IMAGES, LABELS), TESTS)
PARTS: dict[str, Any] = {
    "data": DATA,
    "partition": IID(clients=4),
    "schedule": {"cohort": 2},
    "model": Mlp((8,)),
}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def ran(out: str = "a", **given: Any) -> raysim.Result:
    return raysim.run(**(SMALL | PARTS | {"out": out} | given))


class Twice(FedProx):
    """FedProx with an attribute `mu` that is twice the argument `mu` of the constructor."""

    def __init__(self, mu: float = 0.1):
        super().__init__(2 * mu)


class Nameless(Method):
    """A method without a name."""


class Numbered(Method):
    """A method with a number as its name."""

    name = 7  # type: ignore[assignment]


# --- objects and the stored configuration ---------------------------------------------------------
def test_run_from_python_objects_equals_the_run_from_option_names() -> None:
    parts: dict[str, Any] = {
        "data": Synthetic(samples=60, test_samples=12, classes=3),
        "partition": IID(clients=4),
        "model": Mlp((8,)),
        "schedule": Buffered(concurrency=2, size=1),
        "fleet": Lognormal(),
    }
    objects = ran("objects", methods=[FedProx(np.float64(0.25))], **parts)
    words = raysim.run(
        "method=fedprox method.fedprox.mu=0.25 data=synthetic data.samples=60 "
        "data.test_samples=12 data.classes=3 "
        "partition=iid partition.clients=4 partition.test_fraction=0.2 model=mlp "
        "model.widths=[8] fleet=lognormal",
        **(
            SMALL
            | {
                "schedule": "buffered",
                "schedule.concurrency": 2,
                "schedule.size": 1,
                "out": "words",
            }
        ),
    )
    assert objects.summary["model_sha256"] == words.summary["model_sha256"]
    stored, said = (load_yaml(Path(out, "config.yaml")) for out in ("objects", "words"))
    for group in ("method", "partition", "model", "schedule", "fleet"):
        assert {k: v for k, v in said[group].items() if v is not None} == {
            k: v for k, v in stored[group].items() if v is not None
        }
    assert stored["choices"]["method"] == ["fedprox"] and stored["choices"]["model"] == "mlp"
    again = raysim.run(["out=objects", "resume=latest", "rounds=3"], quiet=True)
    assert (
        again.summary["model_sha256"]
        == raysim.run(["out=words", "resume=latest", "rounds=3"], quiet=True).summary[
            "model_sha256"
        ]
    )


def test_run_accepts_option_names_next_to_objects() -> None:
    result = ran(methods=["fedbn", FedProx(0.1)], model=NormedMlp(), fleet="lognormal")
    assert result.summary["methods"] == ["fedbn", "fedprox"]
    assert result.experiment.config["choices"]["fleet"] == "lognormal"
    assert result.experiment.spec.settings.local.epochs == 1


def test_partition_passed_as_lists_is_stored_and_used_on_resume() -> None:
    lists, by_client = [[0, 1, 9], range(2, 6)], {7: np.array([0, 1, 9]), 8: [2, 3, 4, 5]}
    result = ran(partition=lists)
    assert result.experiment.spec.data.partition.train.counts.tolist() == [3, 4]
    ran("b", partition=by_client, rounds=1)
    again = raysim.run("out=b resume=latest rounds=2", quiet=True)
    stored = Path(load_yaml(Path("b/config.yaml"))["partition"]["file"])
    assert again.summary["model_sha256"] == result.summary["model_sha256"]
    assert json.loads(stored.read_text()) == {"7": [0, 1, 9], "8": [2, 3, 4, 5]}


def test_keys_of_a_partition_passed_as_a_dictionary_are_client_names() -> None:
    result = ran(partition={"alice": [0, 1, 9], "bob": (2, 3, 4, 5)})
    assert (
        result.summary["model_sha256"]
        == ran("b", partition=[[0, 1, 9], [2, 3, 4, 5]]).summary["model_sha256"]
    )
    stored = Path(load_yaml(Path("a/config.yaml"))["partition"]["file"])
    assert json.loads(stored.read_text()) == {"alice": [0, 1, 9], "bob": [2, 3, 4, 5]}


@pytest.mark.parametrize(
    "part", [FedProx(0.3), Mlp([3, 4]), IID(clients=3), Lognormal(sigma=0.5), Buffered(4, 2)]
)
def test_object_is_stored_as_a_class_path_if_its_arguments_can_be_stored(part: object) -> None:
    node = object_node(part)
    assert OBJECT not in node
    assert node["_target_"] == f"{type(part).__module__}.{type(part).__name__}"


@dataclass(frozen=True)
class Holding(NormedMlp):
    """A model whose argument cannot be stored in a file."""

    what: object = None


def test_object_that_cannot_be_stored_is_marked_in_the_configuration() -> None:
    class Local(FedProx):
        pass

    changed = FedProx(0.1)
    changed.more = 1  # type: ignore[attr-defined]
    unfound = type(
        "Unfound", (FedProx,), {"__module__": "nowhere"}
    )  # as a notebook's magic may make it
    for part in (
        Local(0.1),
        Holding(what=lambda: 0),
        Holding(what=torch.ones(2)),
        Twice(0.1),
        changed,
        unfound(0.1),
    ):
        assert OBJECT in object_node(part), part


def test_object_that_cannot_be_stored_must_be_passed_again_to_resume(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = Holding(what=lambda: 0)
    raysim.run(**(SMALL | PARTS | {"model": model, "out": "a", "quiet": False, "rounds": 1}))
    assert "model: config.yaml cannot store this object" in capsys.readouterr().out
    with pytest.raises(
        RefusedError,
        match=r"^model: .*an object from Python \(.*Holding\).*model=\.\.\.",
    ):
        raysim.run(["out=a", "resume=latest", "rounds=2"], quiet=True)
    again = raysim.run(["out=a", "resume=latest", "rounds=2"], model=model, quiet=True)
    assert again.summary["model_sha256"] == ran("b", model=model).summary["model_sha256"]
    with pytest.raises(RefusedError, match=r"model: .*give it again"):
        raysim.load("a").model()
    assert raysim.load("a", model=model).predictions().classes.shape == (12,)


def test_methods_that_could_not_be_stored_must_be_passed_to_load() -> None:
    result = ran(methods=[FedBN(), Twice(0.1)], model=NormedMlp())
    with pytest.raises(
        RefusedError, match=r"method\.fedprox: .*an object from Python \(.*Twice\).*methods=\.\.\."
    ):
        raysim.load("a").client_model(0)
    loaded = raysim.load("a", methods=[FedBN(), Twice(0.1)])
    assert (loaded.predictions(0).scores == result.predictions(0).scores).all()


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"methods": FedProx()}, "methods=.* is not a list"),
        (
            {"methods": [FedProx]},
            r"^methods=FedProx is a class",
        ),
        ({"methods": [FedProx(), "fedprox"]}, "methods holds fedprox twice"),
        ({"methods": [FedProx(), FedProx()]}, "methods holds fedprox twice"),
        ({"methods": [IID(clients=2)]}, "it is not a raysim.Method"),
        ({"methods": [Nameless()]}, r"method Nameless has no name"),
        ({"methods": Nameless()}, r"methods=Nameless\(\) is not a list"),
        ({"methods": [Numbered()]}, "method Numbered has the name 7"),
        ({"methods": [], "method": "fedprox"}, "method is given twice"),
        ({"schedule": IID(clients=2)}, "^schedule=.*decide"),
        ({"partition": [[0], [0]]}, "partition gives row 0 to client 0 and to client 1"),
        ({"partition": "idd"}, "partition=idd does not exist: did you mean iid"),
        ({"roundz": 3}, "roundz does not exist: did you mean rounds"),
        ({"rounds": "many"}, "rounds=many must be an integer"),
        ({"data": 3}, "^data=int "),
        ({"data": (IMAGES, LABELS, LABELS, LABELS)}, "^data=tuple of 4 "),
        (
            {"data": (IMAGES, LABELS, LABELS[:3])},
            r"users of shape \(3,\) .* 60 samples",
        ),
        (
            {"data": (IMAGES, LABELS, LABELS / 2)},
            "users of .*float64",
        ),
        (
            {"data": ((IMAGES, LABELS, LABELS), (IMAGES, LABELS))},
            "^data: .* users",
        ),
        (
            {"data": (IMAGES, LABELS), "partition": "natural"},
            r"^partition=natural .*partition\.column",
        ),
        ({"data": (IMAGES, LABELS[:3])}, r"labels of shape \(3,\)"),
        ({"data": (IMAGES, LABELS - 5)}, "data has the label -5"),
        (
            {"data": (IMAGES[:0], LABELS[:0])},
            "train has no samples",
        ),
        ({"data": ([], [])}, "train has no samples"),
        (
            {"data": torch.utils.data.Subset(torch.utils.data.TensorDataset(torch.zeros(1)), [])},
            "train has no samples",
        ),
        (
            {"data": ([[1.0, 2.0], [3.0]], [0, 1])},
            "data: the inputs for train have different shapes",
        ),
        (
            {"data": ([torch.ones(2), torch.ones(3)], [0, 1])},
            "the inputs for train have different shapes",
        ),
        (
            {"data": torch.utils.data.DataLoader([(0.0, 1)])},
            "^data=DataLoader .*loader.dataset",
        ),  # type: ignore[arg-type]
        (
            {"data": {"x": IMAGES}},
            r'^data=dict .*\{"train": ..., "test": ...\}',
        ),
        (
            {"data": (IMAGES, LABELS + 1000.0), "partition": Dirichlet(4, 1.0)},
            r"data\.kind=classification",
        ),  # type: ignore[misc]
        (
            {"data": (IMAGES.astype(int), LABELS)},
            "are token numbers.* model=gru",
        ),
        (
            {"data": (IMAGES / 255, LABELS), "model": "cnn"},
            r"shape \[8, 8\].*, or give grey images one channel",
        ),
        (
            {"partition": {"a": [0, 1, 2], "b": [3, 1000]}},
            "^partition gives row 1000 to client b, but the training",
        ),
        (
            {"partition": {"a": [0, 1], "b": [1, 2]}},
            "^partition gives row 1 to client a and to client b",
        ),
        (
            {"partition": {"a": [0, 1], "b": [0.5]}},
            "^partition, client b has no list of row numbers",
        ),
        ({"seed": None}, "seed=null must be an integer"),
        (
            {"model": lambda depth: flat(3, depth)},
            r"<lambda> cannot be called \(missing a required argument: 'depth'\)",
        ),
        (
            {"model": functools.partial(nn.Linear, width=3)},
            r"Linear cannot be called \(missing .*'in_features'\)",
        ),
        ({"model": lambda: flat(7)}, "Set its number of outputs to 3, as functools.partial"),
        (
            {"model": 3},
            "^model=3 .*torch.nn.Module",
        ),
        ({"model": Mlp}, r"^model=Mlp is a class"),
        ({"model": nn.Linear(3, 3)}, "the model Linear cannot take inputs of shape"),
        (
            {"data": ((IMAGES, LABELS), (IMAGES[:, :4], LABELS))},
            r"inputs .*\(1, 8, 8\) and \(1, 4, 8\)",
        ),
    ],
)
def test_object_of_wrong_type_is_refused(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RefusedError, match=sentence) as refused:
        ran(**given)
    assert "\n" not in str(refused.value) and not Path("a").exists()


def test_same_key_in_an_override_and_in_an_argument_is_refused() -> None:
    with pytest.raises(RefusedError, match="rounds=2"):
        raysim.run("rounds=3", **(SMALL | PARTS))
    with pytest.raises(RefusedError, match=r"model=\.\.\. has no effect here"):
        raysim.run(raysim.build(**(_without(SMALL, "quiet") | PARTS)), model=Mlp())


def _without(mapping: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in mapping.items() if name != key}


def test_repr_of_an_experiment_has_one_line() -> None:
    built = raysim.build(**(_without(SMALL, "quiet") | PARTS))
    assert repr(built) == "Experiment(fedavg-arrays: 4 clients, rounds=2, Synchronous(cohort=2))"


# --- data -----------------------------------------------------------------------------------------
def test_data_digest_is_equal_for_arrays_and_tensors_and_data_sets() -> None:
    tensors = torch.from_numpy(IMAGES), torch.from_numpy(LABELS)
    halves = (
        torch.utils.data.TensorDataset(*tensors),
        torch.utils.data.TensorDataset(tensors[0][:12], tensors[1][:12]),
    )
    rows = [*zip(IMAGES, LABELS, strict=True)]

    class Rows(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return len(rows)

        def __getitem__(self, row: int) -> Any:
            return rows[row]

    given = [
        DATA,
        {"train": tensors, "test": TESTS},
        halves,
        (Rows(), TESTS),
        ((IMAGES[:, None], LABELS), TESTS),
    ]
    digests = {
        raysim.build(**(_without(SMALL, "quiet") | PARTS | {"data": data})).config["data"]["digest"]
        for data in given
    }
    assert len(digests) == 1


@pytest.mark.parametrize("kind", [str, int])
def test_each_user_in_a_users_array_becomes_a_client(kind: type) -> None:
    users = np.array([kind(f"{100 + 7 * row % 5}") for row in range(60)])
    data = {"train": (IMAGES, LABELS, users), "test": (*TESTS, users[:12])}
    built = raysim.build(
        **(_without(SMALL, "quiet") | PARTS | {"data": data, "partition": "natural"})
    )
    split = built.spec.data.partition
    for client, user in enumerate(sorted({*users.tolist()})):
        rows = np.concatenate([split.train.rows(client), split.test.rows(client)])
        assert sorted(rows) == np.flatnonzero(users == user).tolist()
    assert split.train.counts.sum() + split.test.counts.sum() == 60


def test_run_on_arrays_resumes_only_with_arrays_of_the_same_content() -> None:
    ran(rounds=1)
    again = raysim.run(["out=a", "resume=latest", "rounds=2"], quiet=True)
    assert again.summary["model_sha256"] == ran("b").summary["model_sha256"]
    with pytest.raises(RefusedError, match=r"data\.digest=.* differs from data\.digest="):
        ran(resume="latest", data=((IMAGES[::-1].copy(), LABELS), TESTS), rounds=3)
    again.experiment.spec.data.dataset_path.unlink()
    with pytest.raises(RefusedError, match=r"^data\.digest="):
        raysim.run(["out=a", "resume=latest", "rounds=3"], quiet=True)
    assert ran(resume="latest", rounds=3).summary["rounds"] == 3


def test_image_arrays_may_have_text_labels_and_channels_in_the_last_axis() -> None:
    colours = RNG.integers(0, 256, (30, 8, 8, 3), dtype=np.uint8)
    data = raysim.build(
        **(_without(SMALL, "quiet") | PARTS | {"data": (colours, np.array(["b", "a", "c"] * 10))})
    ).spec.data
    assert data.open().shape == (3, 8, 8) and data.open().class_names == ["a", "b", "c"]
    assert len(data.central) == 0
    assert Arrays(digest="x").digest == "x"


def test_kind_of_task_is_inferred_from_inputs_and_labels() -> None:
    def task(inputs: np.ndarray, labels: np.ndarray) -> Any:
        given = (
            _without(SMALL, "quiet")
            | PARTS
            | {"data": (inputs, labels), "model": lambda num_classes: Flat(num_classes)}
        )
        return raysim.build(**given).spec.task

    numbers, tokens = RNG.standard_normal((40, 6)), RNG.integers(0, 5000, (40, 6))
    assert (found := task(numbers, np.arange(40) % 4)).kind == "classification" and found.shape == (
        6,
    )
    assert task(numbers, RNG.standard_normal(40)).kind == "regression"
    assert task(numbers, RNG.integers(0, 2, (40, 3))).kind == "multilabel"
    assert task(tokens, np.arange(40) % 4).tokens.size == tokens.max() + 1


# --- networks of the user's own -------------------------------------------------------------------
class Flat(nn.Module):
    """A network that knows nothing of raysim."""

    def __init__(self, num_classes: int, width: int = 5):
        super().__init__()
        self.hidden, self.out = nn.LazyLinear(width), nn.Linear(width, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(self.hidden(x.flatten(1).float()).relu())
        return out


def flat(num_classes: int, width: int = 7) -> nn.Module:
    """Return a small network. A run can store this function by its import path."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, num_classes)
    )


def passing(num_classes: int, **more: int) -> nn.Module:
    """Return the network that `flat` builds with the same arguments."""
    return flat(num_classes, **more)


def test_function_that_returns_a_network_is_stored_by_its_name() -> None:
    result = ran(model=flat)
    stored = load_yaml(Path("a/config.yaml"))
    assert (
        stored["model"] == {"_target_": f"{__name__}.flat"} and stored["choices"]["model"] == "flat"
    )
    assert list(result.model().state_dict()) == list(flat(3).state_dict())
    again = raysim.run(["out=a", "resume=latest", "rounds=3"], quiet=True, allow=[__name__])
    assert again.summary["model_sha256"] == ran("b", model=flat, rounds=3).summary["model_sha256"]
    assert torch.equal(
        again.model()[1].weight, raysim.load("a", allow=[__name__]).client_model(0)[1].weight
    )


def test_functools_partial_as_model_is_stored_with_arguments() -> None:
    result = ran(model=functools.partial(flat, width=5))
    assert load_yaml(Path("a/config.yaml"))["model"] == {"_target_": f"{__name__}.flat", "width": 5}
    assert result.model()[1].out_features == 5
    again = raysim.run(["out=a", "resume=latest", "rounds=3"], quiet=True, allow=[__name__])
    assert again.model()[1].out_features == 5


def test_model_function_with_keyword_arguments_resumes_with_them() -> None:
    ran(model=functools.partial(passing, width=5), rounds=1)
    again = raysim.run(["out=a", "resume=latest", "rounds=2"], quiet=True, allow=[__name__])
    assert again.model()[1].out_features == 5


def test_run_with_custom_nn_module_leaves_it_unchanged_and_resumes_with_it() -> None:
    torch.manual_seed(1)
    module = flat(3)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    result = ran(model=module, rounds=1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    moved = result.model().state_dict()
    assert 0 < (moved["1.weight"] - before["1.weight"]).abs().max() < 1
    with pytest.raises(RefusedError, match=r"^model: .*an object from Python \(.*Sequential\)"):
        raysim.run(["out=a", "resume=latest", "rounds=2"], quiet=True)
    again = raysim.run(["out=a", "resume=latest", "rounds=2"], model=module, quiet=True)
    assert again.summary["model_sha256"] == ran("b", model=module).summary["model_sha256"]


# --- a result -------------------------------------------------------------------------------------
def test_tables_of_a_result_are_data_frames() -> None:
    result = ran()
    assert list(result.history["round"]) == [1, 2]
    assert result.history["train_loss"].tolist() == [row["train_loss"] for row in result.rows]
    assert repr(result).startswith("Result(a: 2 rounds, accuracy 0.")


def test_client_table_of_a_result_is_read_from_its_parquet_file() -> None:
    result = ran()
    (path := Path("a/clients.parquet")).unlink(missing_ok=True)
    with pytest.raises(RefusedError, match=r"a has no clients\.parquet"):
        _ = result.clients
    pq.write_table(
        pa.table({"client": [0, 1], "samples": [3, 4], "tests": [1, 0], "accuracy": [1.0, None]}),
        path,
    )
    assert result.clients.index.name == "client" and result.clients.loc[1, "samples"] == 4
    assert raysim.load("a").clients["accuracy"].isna().tolist() == [False, True]


@pytest.mark.parametrize("methods", [[], [FedExP(1e-6)]], ids=["fedavg", "fedexp"])
def test_accuracy_of_predictions_equals_the_accuracy_in_the_history(methods: list[Any]) -> None:
    result = ran(methods=methods)
    predictions = result.predictions()
    assert (predictions.classes == predictions.labels).mean() == result.rows[-1]["accuracy_global"]
    assert predictions.scores.shape == (12, 3) and (predictions.labels == LABELS[:12]).all()
    each = [result.predictions(client) for client in range(4)]
    means = [(own.classes == own.labels).mean() for own in each if len(own.labels)]
    assert np.mean(means) == pytest.approx(result.rows[-1]["accuracy"], abs=1e-12)


def test_repr_of_predictions_shows_their_shapes_and_their_accuracy() -> None:
    scores = np.array([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4]])
    shown = repr(Predictions(np.array([0, 1, 1]), scores, np.arange(3)))
    assert shown == "Predictions(3 rows, scores [3, 2], 0.6667 of them right)"
    assert (
        repr(Predictions(np.zeros((3, 1)), scores, np.arange(3)))
        == "Predictions(3 rows, scores [3, 2])"
    )


def test_model_of_a_result_reproduces_the_predictions_of_the_run() -> None:
    result = ran()
    model = result.model()
    assert isinstance(model, nn.Module) and not model.training
    inputs = torch.from_numpy(TESTS[0]).float()[:, None] / 255
    assert torch.equal(model(inputs), torch.from_numpy(result.predictions().scores))
    loaded = raysim.load("a")
    assert repr(loaded) == repr(result)
    for name, tensor in loaded.model().state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name])
    assert torch.equal(
        result.client_model(2).state_dict()["head.weight"], model.state_dict()["head.weight"]
    )


def test_client_model_contains_the_personal_batchnorm_layers_of_the_client() -> None:
    result = ran(methods=[FedBN()], model=NormedMlp(), rounds=3)
    with pytest.raises(RefusedError, match="every client of this run has a model of its own"):
        result.model()
    with pytest.raises(RefusedError, match="every client of this run"):
        result.predictions()
    own = [result.client_model(client) for client in range(4)]
    layers = [next(m for m in model.modules() if isinstance(m, nn.BatchNorm1d)) for model in own]
    assert (
        len({float(layer.running_mean.sum()) for layer in layers if layer.running_mean is not None})
        > 1
    )
    hits = [result.predictions(client) for client in range(4)]
    accuracy = np.mean([(own.classes == own.labels).mean() for own in hits])
    assert accuracy == pytest.approx(result.rows[-1]["accuracy"], abs=1e-12)
    with pytest.raises(RefusedError, match=r"client 9 does not exist\."):
        result.client_model(9)


def test_result_refuses_to_return_a_client_model_without_a_checkpoint() -> None:
    plain = ran("plain", checkpoint={"every": 0})
    assert (plain.predictions().classes == plain.predictions().labels).mean() == plain.rows[-1][
        "accuracy_global"
    ]
    result = ran("own", methods=[FedBN()], model=NormedMlp(), checkpoint={"every": 0})
    with pytest.raises(RefusedError, match=r"^checkpoint\.every"):
        result.client_model(0)


def test_load_refuses_missing_folder() -> None:
    with pytest.raises(RefusedError, match="nowhere"):
        raysim.load("nowhere")


def test_predictions_of_a_result_do_not_change_torch_settings() -> None:
    result = ran()
    torch.set_num_threads(2)
    torch.use_deterministic_algorithms(False)
    result.predictions()
    assert torch.get_num_threads() == 2 and not torch.are_deterministic_algorithms_enabled()


# --- the package ----------------------------------------------------------------------------------
def test_public_names_have_docstrings() -> None:
    code = "import raysim; print(*sorted({*raysim.__all__} - {*dir(raysim)}))"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "\n"
    )
    assert {"TooManyFailuresError", "ObserverError", "Interrupted"} <= {*raysim.__all__}, (
        "what `run` says that it raises"
    )
    for name in set(raysim.__all__) - {"__version__"}:
        found = getattr(raysim, name)
        assert found.__doc__, name
    assert dir(raysim) == sorted(raysim.__all__)
    assert raysim.__version__.count(".") == 2
    assert (Path(raysim.__file__).parent / "py.typed").is_file()
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        raysim.nothing  # noqa: B018
