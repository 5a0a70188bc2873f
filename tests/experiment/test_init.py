"""Test runs that start from saved weights of all or some tensors.

Also test the errors for weights that do not fit the model.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import raysim
from raysim.experiment.build import build
from raysim.experiment.compose import compose
from raysim.experiment.config_files import load_yaml
from raysim.experiment.groups import find_groups
from raysim.experiment.settings import Experiment
from raysim.methods.lora_factors import LORA_METHODS
from raysim.models.stored_weights import FourBitWeight, HalfWeight
from raysim.primitives.errors import RefusedError
from raysim.training.initial_weights import Init, read_initial_weights
from raysim.training.run_spec import build_networks

WORDS = [
    "data=synthetic",
    "partition=iid",
    "partition.clients=4",
    "schedule.cohort=2",
    "runtime=inprocess",
]
WORDS += ["tracking=none", "rounds=2"]
MLP = [*WORDS, "model=mlp"]
NORMED = [*WORDS, "model=small_cnn", "model.norm=batch", "data.samples=200"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a finished run."""
    folder = tmp_path_factory.mktemp("runs") / "mine"
    raysim.run([*MLP, f"out={folder}", "checkpoint.every=1"], quiet=True)
    return folder


def start(experiment: Experiment) -> dict[str, Tensor]:
    """Return all initial tensors of a run, by full name."""
    networks, _ = build_networks(experiment.spec)
    return {
        f"{name}.{path}": t
        for name, net in networks.items()
        for path, t in net.state_dict().items()
    }


def assert_starts(experiment: Experiment, expected: Mapping[str, Tensor]) -> None:
    tensors = start(experiment)
    for name, tensor in expected.items():
        assert torch.equal(tensors[name], tensor), name


class Net(nn.Module):
    """A network of a user, whose modules have other names than raysim's `extractor` and `head`."""

    def __init__(self, outputs: int = 10) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.LazyLinear(8), nn.BatchNorm1d(8), nn.ReLU())
        self.classify = nn.Linear(8, outputs)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.classify(self.body(x))
        return out


# --- whole ----------------------------------------------------------------------------------------
def test_run_starts_from_model_of_another_run(trained: Path) -> None:
    stored = load_file(trained / "model.safetensors")
    experiment = build([*MLP, "seed=5", f"init={trained / 'model.safetensors'}"])
    assert_starts(experiment, stored)
    assert start(experiment).keys() == stored.keys()


def test_adapters_start_from_weights_of_run_without_adapters(trained: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    weights = load_file(trained / "model.safetensors")
    words = [*MLP, "model.lora.rank=2"]
    experiment = build(compose([*words, f"init.file={trained / 'model.safetensors'}"]))
    tensors, drawn = start(experiment), start(build(compose(words)))
    adapted = [name for name in tensors if ".base_layer." in name]
    assert adapted
    for name, tensor in tensors.items():
        plain = name.replace(".base_layer.", ".")
        assert torch.equal(tensor, weights[plain] if plain in weights else drawn[name]), name
    for full in ("model.head.weight", adapted[0]):  # a file that lacks one of them
        name = full.replace(".base_layer.", ".")
        save_file({k: v for k, v in weights.items() if k != name}, tmp_path / "less.safetensors")
        with pytest.raises(ValueError, match=r"init\.file"):
            start(build(compose([*words, f"init.file={tmp_path / 'less.safetensors'}"])))


def test_adapters_are_refused_without_their_frozen_weights(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    words = [*MLP, "model.lora.rank=2"]
    raysim.run([*words, f"out={tmp_path / 'run'}"], quiet=True)
    init = f"init.file={tmp_path / 'run' / 'model.safetensors'}"
    start(build([*words, init]))
    start(build([*words, init, "model.lora.base=bfloat16"]))  # the same weights, rounded
    with pytest.raises(RefusedError, match=r"init\.file"):
        build([*words, init, "seed=5"])
    build([*words, init, "seed=5", "init.only=head"])


@pytest.mark.parametrize(("base", "kind"), [("bfloat16", HalfWeight), ("nf4", FourBitWeight)])
def test_lora_run_on_low_precision_weights_equals_a_run_on_rounded_weights(
    base: str, kind: type[HalfWeight | FourBitWeight], trained: Path, tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    weights = load_file(trained / "model.safetensors")
    frozen = {name for name in weights if "extractor" in name and name.endswith("weight")}
    round_ = {name: kind(weights[name]).decode(torch.float32) for name in frozen}
    assert any(not torch.equal(round_[name], weights[name]) for name in frozen)
    save_file({**weights, **round_}, tmp_path / "rounded.safetensors")
    checksums = []
    for name, stored_as, file in (
        ("stored", base, trained / "model.safetensors"),
        ("rounded", "float32", tmp_path / "rounded.safetensors"),
    ):
        words = [*MLP, "model.lora.rank=2", f"model.lora.base={stored_as}", f"init={file}"]
        result = raysim.run([*words, f"out={tmp_path / name}"], quiet=True)
        checksums.append(result.summary["model_sha256"])
    assert checksums[0] == checksums[1]


def test_run_with_init_file_trains_clients_from_its_weights(trained: Path, tmp_path: Path) -> None:
    """With a learning rate of 1e-30 the model stays at its initial weights."""
    file = trained / "model.safetensors"
    result = raysim.run(
        [*MLP, "local.lr=1e-30", f"init={file}", f"out={tmp_path / 'run'}"], quiet=True
    )
    for name, tensor in load_file(tmp_path / "run" / "model.safetensors").items():
        torch.testing.assert_close(tensor, load_file(file)[name])
    assert (
        result.summary["identity"]["init_sha256"]
        == load_yaml(tmp_path / "run" / "config.yaml")["init"]["sha256"]
    )


@pytest.mark.parametrize(
    "write",
    [lambda d, p: torch.save(d, p), lambda d, p: save_file(d, p.with_suffix(".safetensors"))],
)
@pytest.mark.parametrize("prefix", ["model.", ""])
def test_tensor_names_of_a_state_dict_may_lack_the_prefix_model_dot(
    write: Callable[..., None], prefix: str, trained: Path, tmp_path: Path
) -> None:
    stored = load_file(trained / "model.safetensors")
    write(
        {prefix + name.removeprefix("model."): tensor for name, tensor in stored.items()},
        tmp_path / "weights.pt",
    )
    (file,) = tmp_path.iterdir()
    assert_starts(build([*MLP, f"init={file}"]), stored)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_initial_weights_of_other_float_types_are_converted(
    dtype: torch.dtype, trained: Path, tmp_path: Path
) -> None:
    stored = {
        name: tensor.to(dtype) for name, tensor in load_file(trained / "model.safetensors").items()
    }
    torch.save(stored, tmp_path / "weights.pt")
    expected = {name: tensor.float() for name, tensor in stored.items()}
    assert_starts(build([*MLP, f"init={tmp_path / 'weights.pt'}"]), expected)


def test_init_file_may_use_the_users_tensor_names_instead_of_raysims_names(tmp_path: Path) -> None:
    net = Net()
    net(torch.zeros(2, 1, 8, 8))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(0.5)
    shape = build(WORDS).spec.task.shape
    own = Net()
    own(torch.zeros(2, *shape))
    with torch.no_grad():
        for parameter in own.parameters():
            parameter.normal_()
    torch.save(own.state_dict(), tmp_path / "weights.pt")
    fresh = Net()
    fresh(torch.zeros(2, *shape))
    experiment = build(WORDS, model=fresh, init=str(tmp_path / "weights.pt"))
    tensors = start(experiment)
    assert torch.equal(tensors["model.head.weight"], own.classify.weight)
    assert torch.equal(tensors["model.extractor.body.1.weight"], own.body[1].weight)  # type: ignore[arg-type]
    redrawn = start(
        build(
            WORDS, model=fresh, init={"file": str(tmp_path / "weights.pt"), "redraw": ["classify"]}
        )
    )
    assert torch.equal(redrawn["model.head.weight"], fresh.classify.weight)
    assert torch.equal(redrawn["model.extractor.body.1.weight"], own.body[1].weight)  # type: ignore[arg-type]


# Methods with more networks, with a personal network, or with both.
@pytest.mark.parametrize("method", ["fedbr", "fedrep", "fraug"])
def test_run_starts_from_the_weights_of_another_run_with_the_same_method(
    method: str, tmp_path: Path
) -> None:
    words = [*NORMED, f"method={method}", "rounds=1"]
    if method == "fedrep":
        words.append("method.fedrep.mode=joint")
    first = raysim.run([*words, f"out={tmp_path / 'one'}"], quiet=True)
    file = first.folder / "model.safetensors"
    experiment = build([*words, "seed=1", f"init={file}"])
    stored, tensors = load_file(file), start(experiment)
    assert_starts(experiment, stored)
    drawn = start(build([*words, "seed=1"]))
    assert_starts(experiment, {name: drawn[name] for name in tensors if name not in stored})


def test_method_with_extra_networks_reads_only_the_model_from_a_fedavg_file(trained: Path) -> None:
    stored = load_file(trained / "model.safetensors")
    experiment = build([*MLP, "method=dann", f"init={trained / 'model.safetensors'}"])
    assert_starts(experiment, stored)
    drawn = start(build([*MLP, "method=dann"]))
    others = {name: tensor for name, tensor in drawn.items() if not name.startswith("model.")}
    assert others
    assert_starts(experiment, others)


# --- by part --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "words", [["init.redraw=head"], ["init.only=extractor"], ["init.redraw=model.head"]]
)
def test_weights_not_taken_from_the_init_file_equal_those_of_a_run_without_it(
    words: list[str], trained: Path
) -> None:
    experiment = build([*MLP, "seed=5", f"init={trained / 'model.safetensors'}", *words])
    stored, drawn = load_file(trained / "model.safetensors"), start(build([*MLP, "seed=5"]))
    assert_starts(experiment, {k: t for k, t in stored.items() if k.startswith("model.extractor.")})
    assert_starts(experiment, {k: t for k, t in drawn.items() if k.startswith("model.head.")})


def test_stored_head_for_other_classes_can_be_replaced_by_random_weights(
    trained: Path, tmp_path: Path
) -> None:
    stored = load_file(trained / "model.safetensors")
    stored["model.head.weight"] = torch.zeros(77, stored["model.head.weight"].shape[1])
    stored["model.head.extra"] = torch.zeros(3)
    save_file(stored, tmp_path / "other.safetensors")
    words = [*MLP, f"init={tmp_path / 'other.safetensors'}"]
    with pytest.raises(RefusedError, match=r"^init\.file=.*model\.head\.extra"):
        build(words)
    assert_starts(
        build([*words, "init.redraw=head"]), {k: t for k, t in stored.items() if "extractor" in k}
    )
    del stored["model.head.extra"]
    save_file(stored, tmp_path / "other.safetensors")
    with pytest.raises(RefusedError, match=r"^init\.file=.*model\.head\.weight.*\[77, "):
        build(words)


# --- refused --------------------------------------------------------------------------------------
def written(tmp_path: Path, change: Callable[[dict[str, Tensor]], object], trained: Path) -> Path:
    stored = load_file(trained / "model.safetensors")
    change(stored)
    save_file(stored, tmp_path / "changed.safetensors")
    return tmp_path / "changed.safetensors"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda d: d.pop("model.head.bias"), "model.head.bias"),
        (lambda d: d.update({"model.other": torch.zeros(2)}), "model.other"),
        (lambda d: d["model.head.bias"].fill_(float("nan")), "model.head.bias"),
        (
            lambda d: d.update({"model.head.bias": torch.full((10,), 1e300, dtype=torch.float64)}),
            "model.head.bias",
        ),
        (
            lambda d: d.update({"model.head.bias": torch.zeros(10, dtype=torch.int64)}),
            "model.head.bias",
        ),
        (
            lambda d: d.update({k: d.pop(k)[:1].clone() for k in ["model.head.bias"]}),
            "model.head.bias",
        ),
        (lambda d: d.update({f"{k}.x": d.pop(k) for k in [*d]}), "the file has only"),
    ],
)
def test_error_mentions_the_initial_tensors_that_do_not_fit(
    change: Callable[[dict[str, Tensor]], object], named: str, trained: Path, tmp_path: Path
) -> None:
    file = written(tmp_path, change, trained)
    with pytest.raises(RefusedError, match=r"^init\.file=") as refused:
        build([*MLP, f"init={file}"])
    assert named in str(refused.value)


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("init.only", ["init.only=nose"]),
        ("init.redraw", ["init.redraw=haed"]),
        ("init.sha256", ["init.sha256=abc"]),
        ("init.only", ["init.only=[]"]),
    ],
)
def test_wrong_values_of_init_settings_are_refused(
    key: str, words: list[str], trained: Path
) -> None:
    with pytest.raises(RefusedError, match=key.replace(".", r"\.")):
        build([*MLP, f"init={trained / 'model.safetensors'}", *words])


def test_init_redraw_of_all_tensors_is_refused(trained: Path) -> None:
    with pytest.raises(RefusedError, match=r"^init\.redraw=model leaves no tensor"):
        build([*MLP, f"init={trained / 'model.safetensors'}", "init.redraw=model"])


def test_init_file_for_a_model_without_tensors_is_refused(trained: Path) -> None:
    path = trained / "model.safetensors"
    model = nn.Sequential(nn.Flatten(), nn.AdaptiveAvgPool1d(10))
    with pytest.raises(RefusedError, match=r"^init\.file=.* have none\. Set init\.file=null"):
        build(WORDS, model=model, init=str(path))


@pytest.mark.parametrize("word", ["init.only=head", "init.redraw=head", "init.sha256=abc"])
def test_init_settings_without_an_init_file_are_refused(word: str) -> None:
    with pytest.raises(RefusedError, match=r"^init\."):
        build([*MLP, word])


def test_unreadable_initial_weights_are_refused(tmp_path: Path) -> None:
    (tmp_path / "broken.safetensors").write_bytes(b"no weights")
    (tmp_path / "broken.pt").write_bytes(b"no weights")
    (tmp_path / "objects.pt").write_bytes(pickle.dumps(Path("x")))
    torch.save(Net(), tmp_path / "module.pt")
    torch.save({"epoch": 3, "state_dict": {}}, tmp_path / "nested.pt")
    torch.save([torch.zeros(2)], tmp_path / "list.pt")
    torch.save({}, tmp_path / "empty.pt")
    for name in (
        "broken.safetensors",
        "broken.pt",
        "objects.pt",
        "module.pt",
        "nested.pt",
        "list.pt",
        "empty.pt",
        "no",
    ):
        with pytest.raises(RefusedError, match=r"^init\.file="):
            build([*MLP, f"init={tmp_path / name}"])
    with pytest.raises(RefusedError):
        build([*MLP, f"init={tmp_path}"])


def test_pickle_of_initial_weights_runs_no_code(tmp_path: Path) -> None:
    class Harmful:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "harm",)

    (tmp_path / "harmful.pt").write_bytes(pickle.dumps({"x": Harmful()}))
    torch.save({"x": Harmful()}, tmp_path / "harmful.pth")
    for name in ("harmful.pt", "harmful.pth"):
        with pytest.raises(RefusedError, match=r"^init\.file="):
            build([*MLP, f"init={tmp_path / name}"])
    assert not (tmp_path / "harm").exists()


# --- identity -------------------------------------------------------------------------------------
def test_interrupted_run_from_initial_weights_resumes_to_the_same_bits(
    trained: Path, tmp_path: Path
) -> None:
    words = [*MLP, "method=fedbn", "checkpoint.every=1", f"init={trained / 'model.safetensors'}"]
    straight = raysim.run([*words, "rounds=4", f"out={tmp_path / 'straight'}"], quiet=True)
    raysim.run([*words, f"out={tmp_path / 'run'}"], quiet=True)
    resumed = raysim.run(["resume=latest", "rounds=4", f"out={tmp_path / 'run'}"], quiet=True)
    assert resumed.summary["model_sha256"] == straight.summary["model_sha256"]


def test_resume_refuses_changed_file_of_initial_weights(trained: Path, tmp_path: Path) -> None:
    file = tmp_path / "start.safetensors"
    file.write_bytes((trained / "model.safetensors").read_bytes())
    again = [f"out={tmp_path / 'run'}", "resume=latest", "rounds=3"]
    raysim.run([*MLP, f"init={file}", f"out={tmp_path / 'run'}", "checkpoint.every=1"], quiet=True)
    moved = tmp_path / "moved.safetensors"
    file.rename(moved)
    with pytest.raises(RefusedError, match=r"^init\.file="):
        raysim.run(again, quiet=True)
    raysim.run([*again, f"init={moved}"], quiet=True)  # the same content in another place
    save_file({k: t + 1 for k, t in load_file(moved).items()}, file)
    with pytest.raises(RefusedError, match=r"init\.sha256"):
        raysim.run(
            [f"out={tmp_path / 'run'}", "resume=latest", "rounds=4", f"init={file}"], quiet=True
        )


def test_resume_is_refused_if_the_setting_init_redraw_has_changed(
    trained: Path, tmp_path: Path
) -> None:
    words = [
        *MLP,
        f"init={trained / 'model.safetensors'}",
        f"out={tmp_path / 'run'}",
        "checkpoint.every=1",
    ]
    raysim.run(words, quiet=True)
    with pytest.raises(RefusedError, match=r"^init\.redraw"):
        raysim.run([*words, "init.redraw=head", "resume=latest", "rounds=3"], quiet=True)


def test_run_folders_of_earlier_raysim_versions_can_be_resumed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    raysim.run([*MLP, f"out={folder}", "checkpoint.every=1"], quiet=True)
    config = load_yaml(folder / "config.yaml")
    del config["init"], config["evaluate"]["unseen"]
    (folder / "config.yaml").write_text(json.dumps(config))
    assert len(raysim.run([f"out={folder}", "resume=latest", "rounds=3"], quiet=True).rows) == 3


def test_path_in_an_init_override_becomes_the_value_of_init_file(tmp_path: Path) -> None:
    for words in (["init=a/b.pt"], ["init.file=a/b.pt"]):
        assert compose(words).init.file == "a/b.pt"
    assert compose([], settings={"init": Path("a/b.pt")}).init.file == "a/b.pt"
    assert compose([], settings={"init": {"file": "x.pt", "redraw": ["head"]}}).init.redraw == [
        "head"
    ]
    assert compose(["init=null"]).init.file is None


def test_run_can_start_from_the_best_model_of_another_run(trained: Path) -> None:
    stored = load_file(trained / "best.safetensors")
    assert all(np.isfinite(tensor.numpy()).all() for tensor in stored.values())
    assert_starts(build([*MLP, f"init={trained / 'best.safetensors'}"]), stored)


# --- every method ---------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("method", find_groups().files["method"])
def test_run_of_each_method_can_start_with_a_stored_model_or_with_its_extractor_alone(
    method: str, tmp_path: Path
) -> None:
    words = [*WORDS, "model=small_cnn", f"method={method}"]
    if method in LORA_METHODS:
        words.append("model.lora.rank=2")
    experiment = build(words)
    drawn = start(experiment)
    stored = {
        name: torch.full_like(tensor, 0.25) if tensor.is_floating_point() else tensor
        for name, tensor in drawn.items()
        if name.startswith("model.")
    }
    file = tmp_path / "model.safetensors"
    save_file(stored, file)
    others = {name: tensor for name, tensor in drawn.items() if name not in stored}
    head = {name: tensor for name, tensor in drawn.items() if name.startswith("model.head.")}
    assert head

    def assert_starts_with(expected: Mapping[str, Tensor], **settings: list[str]) -> None:
        _, weights = read_initial_weights(Init(str(file), **settings))
        assert_starts(replace(experiment, spec=replace(experiment.spec, weights=weights)), expected)

    assert_starts_with(stored | others)
    assert_starts_with(stored | others | head, redraw=["head"])
    assert_starts_with(stored | others | head, only=["extractor"])
