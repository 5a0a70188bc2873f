"""Test a user's networks, chosen by the name of a class or function, or passed as objects."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import raysim
from raysim.primitives.errors import RefusedError

CODE = """
from torch import nn

class Net(nn.Module):
    def __init__(self, num_classes, width: int = 8):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU())
        self.fc = nn.Linear(width, num_classes)

    def forward(self, x):
        return self.fc(self.body(x))

def make(width, num_classes, input_shape):
    assert input_shape == (1, 8, 8)
    return Net(num_classes, width).fc if width == 0 else Net(num_classes, width)

NAMES = [1, 2]
"""
SMALL = [
    *(
        "data=synthetic",
        "data.samples=80",
        "data.test_samples=20",
        "data.classes=3",
        "partition.clients=4",
    ),
    *("schedule.cohort=2", "rounds=2", "runtime=inprocess", "tracking=none"),
]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "nets_of_mine.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    sys.modules.pop("nets_of_mine", None)
    return "nets_of_mine"


def option(name: str, text: str) -> list[str]:
    folder = Path("conf/model")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.yaml").write_text(text)
    return [*SMALL, f"model={name}"]


def composed(words: list[str]) -> Any:
    from raysim.experiment.compose import compose

    return compose(words, folders=["conf"])


def test_classes_and_functions_are_accepted_as_models(package: str) -> None:
    found = []
    for name in ("Net", "make"):
        words = option(name.lower(), f"_target_: {package}.{name}\nwidth: 6\nhead: fc\n")
        result = raysim.run(composed([*words, f"out={name}"]), allow=[package], quiet=True)
        assert set(result.model().state_dict()) == {
            "body.1.weight",
            "body.1.bias",
            "fc.weight",
            "fc.bias",
        }
        found.append(result.summary["model_sha256"])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("_target_: nets_of_mine.Net\nwide: 6\n", r"model\.wide does not exist"),
        ("_target_: nets_of_mine.make\n", r"model\.width has no default"),
        ("_target_: nets_of_mine.NAMES\n", r"model\._target_=nets_of_mine\.NAMES is not a class"),
        (
            "_target_: nets_of_mine.Net\nhead: body\n",
            r"model\.head=body .*body\.1, fc",
        ),
    ],
)
def test_object_that_is_no_model_is_refused(package: str, text: str, sentence: str) -> None:
    with pytest.raises(RefusedError, match=sentence):
        raysim.build(composed(option("mine", text)), allow=[package])


def test_run_trains_a_copy_of_a_custom_nn_module_and_returns_the_copy(
    package: str,
) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.ReLU(), nn.Linear(5, 3))
    before = {key: value.clone() for key, value in net.state_dict().items()}
    result = raysim.run([*SMALL, "out=module"], model=net, quiet=True)
    after = result.model().state_dict()
    assert after.keys() == before.keys() and any(
        not torch.equal(after[key], before[key]) for key in after
    )
    assert all(
        torch.equal(net.state_dict()[key], before[key]) for key in before
    )  # the user's own stays as it was
    predicted = result.predictions()
    assert (predicted.classes == predicted.labels).mean() == pytest.approx(
        result.summary["accuracy_global"]
    )


def test_regression_model_learns_values(package: str) -> None:
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(60, 4, generator=rng)
    words = [
        *SMALL[5:],
        "partition=iid",
        "partition.clients=3",
        "model=mlp",
        "local.lr=0.05",
        "rounds=4",
        "out=values",
    ]
    words.remove("rounds=2")
    result = raysim.run(words, data=((x, x.sum(1)), (x[:20], x[:20].sum(1))), quiet=True)
    errors = [row["mae_global"] for row in result.rows]
    assert (
        errors[-1] < errors[0]
        and "mae_global" in repr(result)
        and result.summary["metric"] == "mae"
    )
