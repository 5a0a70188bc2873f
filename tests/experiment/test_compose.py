"""Test the files of the configuration, overrides, and errors of wrong files and overrides."""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from raysim.api.declarations import Evaluation, Local
from raysim.experiment.build import build
from raysim.experiment.compose import compose
from raysim.experiment.config_files import drop_set_keys, load_yaml, to_dict, to_yaml
from raysim.experiment.groups import find_groups
from raysim.experiment.instantiate import TARGET, build_object, defaults, resolve
from raysim.experiment.run_overrides import expand_override
from raysim.experiment.settings import ExecutionOptions, RuntimeOptions, Tracking
from raysim.primitives.errors import RefusedError
from raysim.primitives.files import conf_folder
from raysim.training.run_spec import Checkpoint, Faults, RunSettings

QUICK = ["runtime=inprocess", "tracking=none", "data=synthetic", "schedule.cohort=2"]


def node(*overrides: str) -> dict[str, Any]:
    return to_dict(compose(overrides))


def sentence(*overrides: str) -> str:
    with pytest.raises(RefusedError) as refused:
        build([*QUICK, *overrides])
    text = str(refused.value)
    assert "\n" not in text
    assert "Hydra" not in text
    assert "OmegaConf" not in text
    return text


# --- the files ------------------------------------------------------------------------------------
def options(group: str) -> list[str]:
    return list(find_groups().files[group])


@pytest.mark.parametrize(
    ("group", "cls"),
    [
        ("evaluate", Evaluation),
        ("runtime", RuntimeOptions),
        ("tracking", Tracking),
        ("checkpoint", Checkpoint),
    ],
)
def test_option_groups_have_the_defaults_of_their_dataclasses(group: str, cls: type) -> None:
    values = node()[group]
    expected = defaults(cls)
    assert values == {key: expected[key] for key in values}


def test_main_configuration_file_has_the_defaults_of_its_dataclasses() -> None:
    values = node()
    for key, value in (defaults(RunSettings) | defaults(ExecutionOptions)).items():
        assert isinstance(value, dict) or values[key] == value, key
    assert values["faults"] == defaults(Faults)


def test_configuration_group_named_local_has_the_defaults_of_its_dataclass(
    tmp_path: Path,
) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "bare.yaml").write_text("{}\n")
    group = to_dict(compose(["experiment=bare", "rounds=7"], [tmp_path]))["local"]
    assert group == defaults(Local) | {"schedule_rounds": 7}


@pytest.mark.slow  # 18 presets
def test_every_preset_can_be_composed() -> None:
    assert {"default", "fedbr/rotated_mnist", "fedbr/cifar10"} <= set(options("experiment"))
    for name in options("experiment"):
        assert node(f"experiment={name}")["choices"]["experiment"] == name


def test_fedbr_preset_has_the_settings_of_the_fedbr_paper() -> None:
    values = node("experiment=fedbr/rotated_mnist")
    assert list(values["method"]) == ["fedbr"]
    assert values["choices"]["model"] == "mnist_cnn"
    assert (values["rounds"], values["weighting"]) == (1000, "uniform")
    assert (values["local"]["steps"], values["local"]["batch"], values["local"]["lr"]) == (
        50,
        64,
        0.001,
    )
    assert values["local"]["epochs"] is None
    assert (values["partition"]["clients"], values["partition"]["alpha"]) == (10, 0.1)


# --- overrides ------------------------------------------------------------------------------------
def test_composed_methods_are_in_the_order_of_the_override() -> None:
    assert list(node("method=[mixup,fedprox]")["method"]) == ["mixup", "fedprox"]
    assert list(node("method=fedprox")["method"]) == ["fedprox"]
    assert node()["method"] == {}


@pytest.mark.parametrize(
    ("word", "quoted"),
    [
        ("method=fedbr+mixup", "method=[fedbr,mixup]"),
        ("method=fedprox", "method=[fedprox]"),
        ("method=fedavg", "method=[]"),
        ("method=", "method=[]"),
        ("thresholds=0.5+0.9", "thresholds=[0.5,0.9]"),
        ("data.augment=flip", "data.augment=[flip]"),
        ("data.augment=crop+flip", "data.augment=[crop,flip]"),
    ],
)
def test_list_in_an_override_has_the_same_value_without_brackets(word: str, quoted: str) -> None:
    assert node(word) == node(quoted)


def test_path_with_plus_signs_is_not_a_list() -> None:
    assert node("out=a+b/c")["out"] == "a+b/c"
    assert node("data=mnist", "data.root=a+b")["data"]["root"] == "a+b"


@pytest.mark.parametrize(
    ("word", "values"),
    [
        ("seed=0..4", ["0", "1", "2", "3", "4"]),
        ("seed=range(3)", ["0", "1", "2"]),
        ("seed=0..1,7,9..9", ["0", "1", "7", "9"]),
        ("x=-1..1", ["-1", "0", "1"]),
        ("x=3", ["3"]),
        ("x='0..4'", ["'0..4'"]),
        ("x=0...4", ["0...4"]),
        ("x=a0..4", ["a0..4"]),
        ("method=fedavg,fedprox,fedbr+mixup", ["fedavg", "fedprox", "fedbr+mixup"]),
        ("method=[],[fedbr,mixup]", ["[]", "[fedbr,mixup]"]),
    ],
)
def test_study_override_with_several_values_becomes_one_override_per_value(
    word: str, values: list[str]
) -> None:
    key = word.partition("=")[0]
    assert expand_override(word) == (key, [f"{key}={value}" for value in values])


def test_runtime_resources_accept_a_resource_of_any_name() -> None:
    config = to_dict(compose(["runtime.resources.slot=2", "runtime.resources.tape=0.5"]))
    assert config["runtime"]["resources"] == {"slot": 2, "tape": 0.5}
    with pytest.raises(
        RefusedError, match=r"runtime.resorces does not exist: did you mean resources\?"
    ):
        compose(["runtime.resorces.slot=2"])


@pytest.mark.parametrize("word", ["seed=4..0", "seed=0..10000", f"seed=0..{10**17}"])
def test_range_with_too_many_integers_is_refused(word: str) -> None:
    with pytest.raises(RefusedError, match="10,000 values"):
        expand_override(word)


def test_option_file_named_fedavg_is_refused(tmp_path: Path) -> None:
    (tmp_path / "method").mkdir()
    (tmp_path / "method" / "fedavg.yaml").write_text(
        "fedavg:\n  _target_: raysim.methods.fedprox.FedProx\n"
    )
    with pytest.raises(RefusedError, match=r"fedavg\.yaml: .*method=fedavg"):
        compose([], [tmp_path])


def test_empty_list_replaces_methods_of_preset() -> None:
    for words in (
        ["experiment=fedbr/rotated_mnist", "method=fedavg"],
        ["method=[]", "experiment=fedbr/rotated_mnist"],
    ):
        values = node(*words)
        assert values["method"] == {}
        assert values["choices"]["method"] == []


def test_option_chosen_by_override_uses_values_set_by_the_preset() -> None:
    values = node("experiment=fedbr/rotated_mnist", "partition=iid")["partition"]
    assert values["clients"] == 10
    assert "concentration" not in values


@pytest.mark.parametrize(
    "word", ["schedule=buffered", "partition=domain", "partition=dirichlet", "schedule=tiered"]
)
def test_option_chosen_by_override_has_no_keys_of_the_default_option(word: str) -> None:
    group = word.partition("=")[0]
    values = node(word)[group]
    assert set(values) - {TARGET} == set(defaults(resolve(values[TARGET], group)))


def test_override_of_local_steps_unsets_local_epochs_and_vice_versa() -> None:
    assert node("local.steps=7")["local"]["epochs"] is None
    assert node("experiment=fedbr/rotated_mnist", "local.epochs=2")["local"]["steps"] is None
    assert "local.epochs=2 and local.steps=7" in sentence("local.steps=7", "local.epochs=2")


def test_option_file_in_a_folder_of_the_user_can_be_chosen(tmp_path: Path) -> None:
    (tmp_path / "method").mkdir()
    (tmp_path / "method" / "soft.yaml").write_text(
        "soft:\n  _target_: raysim.methods.fedprox.FedProx\n  mu: 0.5\n"
    )
    assert to_dict(compose(["method=[soft]"], [tmp_path]))["method"]["soft"]["mu"] == 0.5


def test_built_experiment_has_the_values_of_the_overrides() -> None:
    experiment = build(
        [*QUICK, "method=[fedprox]", "method.fedprox.mu=0.3", "local.lr=1", "evaluate.clients=3"]
    )
    assert vars(experiment.spec.methods[0]) == {"mu": 0.3}
    assert experiment.spec.settings.local.lr == 1.0
    assert experiment.spec.settings.evaluate.clients == 3


def test_default_weighting_of_updates_depends_on_the_method() -> None:
    assert build(QUICK).spec.settings.weighting == "samples"
    assert build([*QUICK, "method=[scaffold]"]).spec.settings.weighting == "uniform"
    assert (
        build([*QUICK, "method=[scaffold]", "weighting=samples"]).spec.settings.weighting
        == "samples"
    )


# --- refusals -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["datta=mnist"], ["datta", "did you mean data?"]),
        (["data=mnsit"], ["data=mnsit", "did you mean mnist?"]),
        (["model=mpl"], ["model=mpl", "did you mean mlp?"]),
        (["model=resnet34"], ["did you mean model=torchvision model.name=resnet34?"]),
        (["model=alexnet"], ["did you mean model=torchvision model.name=alexnet?"]),
        (["model=zzz"], ["model=zzz", "the valid ones are cct7_3x1, "]),
        (["method=[fedproxx]"], ["method=fedproxx", "did you mean fedprox?"]),
        (["method=fedavgg"], ["method=fedavgg", "did you mean fedavg?"]),
        (["method=zzz"], ["method=zzz", "the valid ones are fedavg, ace, "]),
        (
            ["method=fedbr+fedprox", "mu=1"],
            ["mu does not exist", "did you mean method.fedbr.mu or method.fedprox.mu?"],
        ),
        (["method=[fedprox,fedprox]"], ["fedprox 2 times"]),
        (["method.fedprox.mu=1"], ["fedprox is not in method=fedavg", "write method=fedprox"]),
        (
            ["method=mixup", "method.fedprox.mu=1"],
            ["fedprox is not in method=mixup", "write method=mixup+fedprox"],
        ),
        (["method=fedbr+fedproxx"], ["method=fedproxx", "did you mean fedprox?"]),
        (["method=fedavg+fedprox"], ["method=fedavg+fedprox"]),
        (["seed=0..4"], ["'seed=0..4'", "raysim study seed=0..4"]),
        (["fedprox"], ["'fedprox'", "key=value. Write method=fedprox"]),
        (["mnist_fedprox"], ["Write the name of a setting"]),
        (["method=fedavg,fedprox"], ["raysim study method=fedavg,fedprox", "a+b"]),
        (["evaluate.metrics=f1,auroc"], ["evaluate.metrics=f1+auroc is a list"]),
        (["thresholds=0.5,0.6"], ["thresholds=0.5+0.6 is a list"]),
        (["learning_rate=0.1"], ["did you mean local.lr?"]),
        (["batch_size=32"], ["did you mean local.batch?"]),
        (["thresholds=a+b"], ["thresholds[0]=a", "a number"]),
        (
            ["method.fedavg.mu=1"],
            ["method.fedavg.mu does not exist"],
        ),
        (["hydra/launcher=ray"], ["hydra/launcher does not exist", "--parallel"]),
        (["hydra.sweeper.n_jobs=2"], ["raysim sweep"]),
        (["local.lr=loguniform(1e-4,1)"], ["Ray Tune", "local.lr='tag(log, interval(LOW, HIGH))'"]),
        (["local.lr=tune.grid_search([1,2])"], ["Ray Tune", "sweep.search=grid"]),
        (["method=[fedprox]", "method.fedprox.nu=1"], ["method.fedprox.nu", "did you mean mu?"]),
        (["method=[fedprox]", "method.fedprox.mu=abc"], ["method.fedprox.mu=abc", "a number"]),
        (["method=[fedprox]", "method.fedprox.mu=-1"], ["method.fedprox.mu=-1", "at least 0"]),
        (["method=[fedavgm,fedadam]"], ["'fedavgm'", "'fedadam'", "(step)"]),
        (
            ["method=[fedprox]", "method.fedprox._target_=os.system"],
            ["method.fedprox._target_=os.system", "own package"],
        ),
        (
            ["method=[fedprox]", "method.fedprox._target_=numpy.a"],
            ["numpy.a", "is not part of raysim", "--allow numpy"],
        ),
        (
            ["method=[fedprox]", "method.fedprox._target_=raysim.simulation.fleet.Ideal"],
            ["is not a method"],
        ),
        (
            ["fleet._target_=raysim.simulation.schedule.Buffered"],
            ["fleet._target_", "is not a fleet"],
        ),
        (["+method.fedprox.mu=1"], ["method.fedprox.mu"]),
        (["+seed=1"], ["'+seed=1'", "Write seed=1"]),
        (["++data=mnist"], ["Write data=mnist"]),
        (["+foo=1"], ["foo does not exist"]),
        (["~seed"], ["'~seed'"]),
        (["~data"], ["'~data'"]),
        (["seed=1,2"], ["'seed=1,2'", "one", "raysim study seed=1,2"]),
        (["data@x=mnist"], ["data@x"]),
        (["hydra.run.dir=x"], ["hydra.run.dir does not exist", "out=DIR"]),
        (["nonsense"], ["'nonsense'", "key=value"]),
        (["out=a(b"], ["'out=a(b'", "quotes"]),
        (["seed=${nope}"], ["seed=${nope}", "'nope' not found"]),
        (["seed=${seed}"], ["seed=${seed}", "Recursive"]),
        (["seed=-1"], ["seed=-1", "at least 0"]),
        (["seed=abc"], ["seed=abc", "an integer"]),
        (["rounds=1.5"], ["rounds=1.5", "an integer"]),
        (["rounds=true"], ["rounds=true", "an integer"]),
        (["lr=0.1"], ["local.lr"]),
        (["local.rl=0.1"], ["local.rl", "did you mean lr?"]),
        (["local.lr=0"], ["local.lr=0", "above 0"]),
        (["local.nesterov=1"], ["local.nesterov=1", "true or false"]),
        (["local.optimizer=sdg"], ["local.optimizer=sdg", "did you mean sgd?"]),
        (["local.lr.x=1"], ["local.lr is a single value"]),
        (["data.augment.x=1"], ["data.augment is a list"]),
        (["local={lr: 1}"], ["local=", "default"]),
        (["schedule=null"], ["schedule=null", "synchronous"]),
        (["schedule.cohort=500"], ["schedule.cohort=500", "20"]),
        (["schedule.cohort=0"], ["schedule.cohort=0"]),
        (["partition.clients=5000"], ["partition.clients=5000", "1000 or less"]),
        (["partition.alpha=0"], ["partition.alpha=0"]),
        (["partition=domain_class", "partition.groups=[[0,1],[1]]"], ["partition.groups"]),
        (["data=mnist", "data.root=/nowhere", "data.download=false"], ["data.root=/nowhere"]),
        (["data=parquet"], ["data.root"]),
        (["data.rotation.pre=image"], ["data.rotation.pre", "did you mean per?"]),
        (["data.rotation={pre: image}"], ["data.rotation.pre", "did you mean per?"]),
        (["data.rotation=5"], ["data.rotation=5", "a mapping"]),
        (["data.rotation=[1]"], ["data.rotation=[1]", "data.rotation.KEY=VALUE"]),
        (["evaluate.metrics={a: 1}"], ["evaluate.metrics=", "evaluate.metrics=VALUE+VALUE"]),
        (["data.rotation._target_=os.system"], ["data.rotation._target_"]),
        (["data.augment=[cropp]"], ["data.augment[0]=cropp", "did you mean crop?"]),
        (["model=vgg11"], ["model=vgg11", "32x32"]),
        (["model.norm=bach"], ["model.norm=bach", "did you mean batch?"]),
        (["device=gpu"], ["device=gpu"]),
        (["device=cuda:99"], ["device=cuda:99", "GPU"]),
        (
            ["device=cpu", "runtime.precision=tf32"],
            ["runtime.precision=tf32", "device=cpu", "runtime.precision=float32"],
        ),
        (["evaluate.clients=some"], ["evaluate.clients=some", "all"]),
        (["evaluate.every=0"], ["evaluate.every=0"]),
        (["faults.tolerate=2"], ["faults.tolerate=2"]),
        (
            ["fleet=lognormal", "fleet.sigma=nan"],
            ["fleet.sigma=nan must be a number, not infinite or nan"],
        ),
        (["fleet=lognormal", "fleet.sigma=-1"], ["fleet.sigma=-1", "from 0 to 10"]),
        (["local.lr=inf"], ["local.lr=inf", "not infinite"]),
        (["state.budget=inf"], ["state.budget=inf must be a number or null, not infinite"]),
        (
            ["method=[fedprox]", "method.fedprox.mu=nan"],
            ["method.fedprox.mu=nan", "not infinite or nan"],
        ),
        (["thresholds=[0.5,nan]"], ["thresholds[1]=nan"]),
        (["checkpoint.every=-1"], ["checkpoint.every=-1"]),
        (["summation=5"], ["summation", "no longer needed"]),
        (["thresholds=[a]"], ["thresholds[0]=a", "a number"]),
        (["weighting=mean"], ["weighting=mean", "uniform"]),
        (["runtime.workers=2"], ["runtime.workers", "runtime=inprocess"]),
        (["runtime.threads=0"], ["runtime.threads=0"]),
        (["runtime.lanes=0"], ["runtime.lanes=0"]),
        (["runtime=cluster", "runtime.address=null"], ["runtime.address"]),
        (["seed=18446744073709551616"], ["seed=18446744073709551616", "64 bits"]),
        ([f"rounds=1{'0' * 400}"], ["rounds=1000", "64 bits"]),
        ([f"local.lr=1{'0' * 400}"], ["local.lr=1000", "64 bits"]),
        ([f"thresholds=[1{'0' * 400}]"], ["thresholds[0]=1000", "64 bits"]),
        (
            ["partition=iid", f"partition.clients={10**12}"],
            [f"partition.clients={10**12}", "GiB"],
        ),
        (["data=synthetic", f"data.samples={10**12}"], [f"data.samples={10**12}", "GiB"]),
        (["data=synthetic", f"data.test_samples={10**12}"], [f"data.test_samples={10**12}", "GiB"]),
        (["data=synthetic", f"data.classes={10**12}"], [f"data.classes={10**12}", "GiB"]),
        (["data=synthetic", f"data.domains={10**12}"], [f"data.domains={10**12}", "GiB"]),
        (
            ["data=synthetic", "data.shape=[1,1000000,1000000]"],
            ["data.shape=[1, 1000000, 1000000]", "GiB"],
        ),
        ([f"data.size={10**12}"], [f"data.size={10**12}"]),
        (["data.size=30000"], ["data.size=30000", "GiB"]),
        (["data.only=['1','1']"], ["data.only=['1', '1']", "different"]),
        ([f"data.crop_padding={10**12}", "data.augment=[crop]"], ["data.crop_padding=", "8 x 8"]),
        ([f"runtime.threads={10**12}"], ["runtime.threads=", "from 1 to 1024"]),
        ([f"device=cuda:1{'0' * 5000}"], ["device=cuda:1000"]),
        (["device=cpu:7"], ["device=cpu:7", "device=cpu"]),
        (["model=mlp", f"model.widths=[{10**12}]"], ["memory"]),
        (
            ["partition=shards", f"partition.shards_per_client={10**12}"],
            ["partition.shards_per_client=50 or less"],
        ),
        (["data=parquet", "data.root='~nosuchuser/x'"], ["~nosuchuser/x names a user"]),
        (["data.cache='~nosuchuser/x'"], ["~nosuchuser/x names a user"]),
        (["fleet=trace", "fleet.file='~nosuchuser/x'"], ["~nosuchuser/x names a user"]),
        (["tracking=mlflow", "tracking.uri='~nosuchuser/x'"], ["~nosuchuser/x names a user"]),
        (
            ["tracking=mlflow", "tracking.uri='sqlite:///~nosuchuser/x.db'"],
            ["~nosuchuser/x.db names a user"],
        ),
        (["experiment=fedbr/rotatedmnist"], ["did you mean fedbr/rotated_mnist?"]),
        (["method=fedprox", "method.mu=1"], ["did you mean method.fedprox.mu?"]),
        (["method=nope"], ["method=nope does not exist: the valid ones are"]),
        (["compression=none", "compression.direction=up"], ["compression.direction", "=topk"]),
        (["model=unet", "model.lora.rank=2"], ["model.lora", "model=unet", "model=cnn"]),
        (["rounds=2 seed=1"], ["2 settings"]),
    ],
    ids=lambda value: (
        " ".join(value)[:40] if isinstance(value, list) and "=" in " ".join(value) else ""
    ),
)
def test_wrong_override_is_refused(words: list[str], parts: list[str]) -> None:
    text = sentence(*words)
    for part in parts:
        assert part in text


def test_override_with_a_broken_reference_is_refused() -> None:
    with pytest.raises(RefusedError, match=r"'rounds=\$\{' cannot be applied: its value cannot"):
        compose(settings={"rounds": "${"})


def test_override_replaces_a_reference_to_a_missing_key_in_an_option_of_the_user(
    tmp_path: Path,
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/mine.yaml").write_text(
        "defaults: [digits, _self_]\nkind: ${local.missing}\nsize: ${local.missing}\n"
    )
    chosen = ["data=mine", "data.size=null", "data.kind=classification"]
    assert to_dict(compose(chosen, [tmp_path]))["data"]["kind"] == "classification"
    with pytest.raises(RefusedError, match=r"local\.missing"):
        compose(["data=mine", "data.size=null"], [tmp_path])


def test_folders_that_vanish_during_the_search_for_options_are_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("method/deep/mine.yaml", "method/fleeting/other.yaml", "gone/any.yaml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("mine: {_target_: raysim.methods.fedprox.FedProx}\n")
    scandir = os.scandir

    def vanishing(path: Any) -> Any:
        if Path(path).name in ("fleeting", "gone"):
            raise FileNotFoundError(path)
        return scandir(path)

    with monkeypatch.context() as while_looking:
        while_looking.setattr(os, "scandir", vanishing)
        found = find_groups([tmp_path]).files
    assert found["method"]["deep/mine"] == tmp_path / "method/deep/mine.yaml"
    assert "fleeting/other" not in found["method"] and "gone" not in found


@pytest.mark.parametrize(
    "path", ["~nosuchuser", "~nosuchuser/x", "a\0b", "/dev/full", "loop", "a/b"]
)
def test_wrong_configuration_path_is_refused(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    for given in ({"folders": [path]}, {"stored": path}):
        with pytest.raises(RefusedError):
            compose([], **given)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"3",
        b"[1, 2]",
        b"- fedprox",
        b"1: 2",
        b"\xff\xfe",
        b"a\0b",
        b"a: [",
        b"&a [*a]",
    ],
)
def test_unreadable_option_is_refused(content: bytes, tmp_path: Path) -> None:
    for group in ("method", "data", "schedule"):
        (tmp_path / group).mkdir()
        (tmp_path / group / "mine.yaml").write_bytes(content)
        chosen = "[mine]" if group == "method" else "mine"
        with pytest.raises(RefusedError):
            build(compose([*QUICK, f"{group}={chosen}"], [tmp_path]))


def test_deeply_nested_option_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "deep.yaml"
    path.write_bytes(b"a: " + b"[" * 600)  # 500 reach Python's limit of recursion
    with pytest.raises(RefusedError, match=str(path)):
        load_yaml(path)


def test_option_file_that_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data/mine.yaml").mkdir(parents=True)
    (tmp_path / "method").mkdir()
    os.mkfifo(tmp_path / "method/pipe.yaml")
    (tmp_path / "model").mkdir()
    (tmp_path / "model/loop.yaml").symlink_to("loop.yaml")
    for word in ("data=mine", "method=[pipe]", "model=loop"):
        with pytest.raises(RefusedError):
            compose([word], [tmp_path])


def test_broken_link_as_option_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "method").symlink_to("method")
    with pytest.raises(RefusedError, match=f"{tmp_path}/method"):
        compose([], [tmp_path])


def test_composition_reads_an_option_file_again_after_it_changed(tmp_path: Path) -> None:
    (path := tmp_path / "method/mine.yaml").parent.mkdir()
    for value in (0.5, 0.25):
        path.write_text(f"mine: {{_target_: raysim.methods.fedprox.FedProx, mu: {value}}}\n")
        found = compose(["method=mine"], [tmp_path])
        assert found.method.mine.mu == value
        found.method.mine.mu = 7.0  # does not reach what is kept
        assert compose(["method=mine"], [tmp_path]).method.mine.mu == value


@pytest.mark.parametrize(
    "content",
    [
        "[1]",
        "3",
        "choices: {}",
        "choices: {}\nmethod: 3",
        "choices: {}\nmethod: [1]",
        "choices: []",
        "1: 2\nchoices: {}",
        "choices: {1: 2}",
        "choices: {method: [[1]]}",
        "choices: {method: {a: 1}}",
        "choices: {data: 3}",
    ],
)
def test_wrong_stored_configuration_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(content)
    with pytest.raises(RefusedError):
        build(compose([], stored=tmp_path / "config.yaml"))


def test_reference_to_an_environment_variable_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "hunter2")
    content = to_dict(compose(QUICK)) | {"out": "${oc.env:SECRET}"}
    (tmp_path / "config.yaml").write_text(
        yaml.safe_dump(content | {"device": "${ oc.env : SECRET }"})
    )
    with pytest.raises(RefusedError, match="it reads an environment variable"):
        compose([], stored=tmp_path / "config.yaml")
    (tmp_path / "data").mkdir()
    (tmp_path / "data/mine.yaml").write_text(
        "_target_: raysim.data.sources.Digits\ncache: ${oc.env:SECRET}\n"
    )
    with pytest.raises(RefusedError, match="it reads an environment variable"):
        compose(["data=mine"], [tmp_path])


@pytest.mark.parametrize(
    "choices", [{"schedule": []}, {"model": None}, {"method": "fedprox"}, {"data": ["digits"]}]
)
def test_stored_configuration_is_refused_if_its_entry_named_choices_is_malformed(
    choices: dict[str, Any], tmp_path: Path
) -> None:
    content = to_dict(compose(QUICK))
    content["choices"] = {
        key: value for key, value in (content["choices"] | choices).items() if value is not None
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(RefusedError, match="is not the complete configuration of a run"):
        compose([], stored=tmp_path / "config.yaml")


def test_stored_configuration_is_refused_if_an_option_group_is_a_list(
    tmp_path: Path,
) -> None:
    content = to_dict(compose(QUICK)) | {"local": [1, 2]}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(RefusedError, match=r"^local\.epochs"):
        compose(["local.epochs=1"], stored=tmp_path / "config.yaml")


def test_too_long_path_of_configuration_is_refused(tmp_path: Path) -> None:
    for given in ({"folders": ["x" * 5000]}, {"stored": "x" * 5000}):
        with pytest.raises(RefusedError, match=r"cannot be used as a path \(File name too long"):
            compose([], **given)


STORED_KEYS = ["method", "data", "seed", "choices", "schedule", "model", "local"]
STORED_KEYS += ["partition", "runtime"]
DAMAGED_VALUES = ["null", "[]", "[1, {a: 2}]", "{1: 2}", "{a: {b: [c]}}", "x", "1.5", None]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (key, value)
        for index, key in enumerate(STORED_KEYS)
        for value in DAMAGED_VALUES[index % 3 :: 3]  # a third; the fuzzer tries the others
    ],
)
def test_stored_configuration_with_a_changed_value_is_built_or_refused(
    key: str, value: str | None, tmp_path: Path
) -> None:
    content = to_dict(compose(QUICK))
    if value is None:
        del content[key]
    else:
        content[key] = yaml.safe_load(value)
    # JSON is YAML, written in less time.
    (tmp_path / "config.yaml").write_text(json.dumps(content))
    with contextlib.suppress(RefusedError):
        build(compose([], stored=tmp_path / "config.yaml"))


def test_missing_configuration_folder_of_user_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="does not exist"):
        compose([], [tmp_path / "nowhere"])


def test_class_of_a_custom_python_module_must_be_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "theirs.py").write_text(
        "from raysim.methods.fedprox import FedProx\nclass Mine(FedProx):\n    name = 'fedprox'\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    words = [*QUICK, "method=[fedprox]", "method.fedprox._target_=theirs.Mine"]
    with pytest.raises(RefusedError, match="--allow theirs"):
        build(words)
    assert type(build(words, allow=["theirs"]).spec.methods[0]).__name__ == "Mine"


def test_build_object_refuses_a_value_of_the_wrong_type() -> None:
    assert build_object(Evaluation, {"every": 2, "clients": "all"}, "evaluate") == Evaluation(
        2, "all"
    )
    with pytest.raises(RefusedError, match=r"evaluate\.every=null must be an integer"):
        build_object(Evaluation, {"every": None}, "evaluate")


def test_conf_folder_of_raysim_exists() -> None:
    assert (conf_folder() / "config.yaml").is_file()


def test_resumed_run_uses_the_stored_settings(
    tmp_path: Path,
) -> None:
    stored = compose(
        [
            "method=[fedprox]",
            "method.fedprox.mu=0.3",
            "rounds=7",
            "local.steps=4",
            f"out={tmp_path}",
        ]
    )
    (tmp_path / "config.yaml").write_text(to_yaml(to_dict(stored)))
    again = to_dict(compose([f"out={tmp_path}", "resume=latest", "rounds=9"]))
    assert drop_set_keys(again) == drop_set_keys(to_dict(stored)) | {
        "resume": "latest",
        "rounds": 9,
    }
    other = to_dict(compose([f"out={tmp_path}", "resume=latest", "method=[]"]))
    assert other["method"] == {} and other["local"] == to_dict(stored)["local"]


def test_resumed_run_uses_stored_runtime_settings_unless_overridden(tmp_path: Path) -> None:
    stored = compose(["runtime=cluster", "runtime.workers=7", "runtime.threads=2"])
    (tmp_path / "config.yaml").write_text(to_yaml(to_dict(stored)))
    resumed = [f"out={tmp_path}", "resume=latest"]
    same = compose([*resumed, "runtime=cluster"]).runtime
    assert same == stored.runtime
    changed = compose([*resumed, "runtime=cluster", "runtime.workers=3"]).runtime
    assert changed == {**stored.runtime, "workers": 3}
    other = compose([*resumed, "runtime=local"]).runtime
    assert (other.name, other.threads, other.workers) == ("local", 2, None)
    new = compose(["runtime=cluster", "resume=latest", f"out={tmp_path / 'new'}"]).runtime
    assert (new.name, new.threads) == ("cluster", 1)


@pytest.mark.parametrize("key", ["runtime.hosts"])
def test_error_of_a_renamed_key_mentions_its_new_name(key: str) -> None:
    with pytest.raises(RefusedError, match=key.replace("hosts", "workers")):
        compose([f"{key}=2"])


@pytest.mark.parametrize(
    ("override", "advice"),
    [("method=fedprox fedbn", "method=fedprox+fedbn"), ("local_epochs=5", "local.epochs")],
)
def test_error_of_misspelt_override_suggests_the_key(override: str, advice: str) -> None:
    with pytest.raises(RefusedError, match=re.escape(advice)):
        compose([override])
