"""Test that every printed number of a paper has a command with the paper's settings."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny_runs import check_composition

from jobs.papers.presets import PAPER_RUNS, Command
from jobs.papers.tables import Cell, Table, tables
from raysim.data.federated import FederatedData
from raysim.experiment.build import build, partition
from raysim.experiment.compose import compose
from raysim.experiment.config_files import to_dict
from raysim.experiment.groups import find_groups
from raysim.experiment.instantiate import TARGET, build_object, resolve
from raysim.primitives.errors import RefusedError
from raysim.primitives.files import conf_folder

pytestmark = pytest.mark.slow

FEDBR = tables("fedbr")
MODELS = {
    "four-layer CNN": "mnist_cnn",
    "VGG11": "vgg11",
    "CCT (cct_7_3x1_32_c100)": "cct7_3x1",
    "ResNet18 with group normalisation": "resnet18",
}
# The part of a partition's description that names a rotation, and the kind that the preset has.
ROTATIONS = {"client k rotated": "client", "each image rotated": "image", "no rotation": "none"}


@functools.cache
def composed(*words: str) -> dict[str, Any]:
    return to_dict(compose(words))


def command(table: Table, cell: Cell) -> Command:
    return PAPER_RUNS["fedbr"].command(table, cell)


@functools.cache
def all_methods(experiment: str) -> tuple[str, ...]:
    """Return the methods of all commands with a preset."""
    names = {
        name
        for paper, runs in PAPER_RUNS.items()
        for table in tables(paper).values()
        for command in (runs.command(table, cell) for cell in table.cells)
        if command.experiment == experiment
        for name in command.methods
    }
    return tuple(sorted(names))


def with_all_methods(experiment: str, *overrides: str) -> dict[str, Any]:
    """Return the configuration of a preset with the methods of all its commands."""
    methods = ",".join(all_methods(experiment))
    return composed(f"experiment={experiment}", f"method=[{methods}]", *overrides)


def configuration(command: Command) -> dict[str, Any]:
    """Return the configuration of a command, except for the entry of `choices` with the methods.

    All commands with the same preset share one composition with all methods, because the settings
    of a method do not depend on the other methods.
    """
    experiment, method, *overrides = command.arguments()
    assert experiment == f"experiment={command.experiment}"
    assert method == f"method={'+'.join(command.methods) or 'fedavg'}"
    node = with_all_methods(command.experiment, *overrides)
    return node | {"method": {name: node["method"][name] for name in command.methods}}


def covering(table: Table, own: str) -> list[Cell]:
    """Return the first cell of each row of a table, and all cells with the paper's own method.

    A test that composes the configurations of all cells would take too long.
    own: the name of the paper's method.
    """
    cells: list[Cell] = []
    rows: set[str] = set()
    for cell in table.cells:
        row = repr((cell.methods, sorted(cell.variant.items())))
        if own in cell.methods or row not in rows:
            cells.append(cell)
        rows.add(row)
    return cells


def setting(name: str) -> dict[str, Any]:
    """Return the settings of a table as the JSON file of the paper has them.

    name: the name of the table, such as "fedbr/table1".
    """
    paper, key = name.split("/")
    path = conf_folder().parent / "jobs" / "papers" / f"{paper}.json"
    found: dict[str, Any] = json.loads(path.read_text())["tables"][key]["setting"]
    return found


def of(value: Any, dataset: str) -> Any:
    return value[dataset] if isinstance(value, dict) else value


# --- every cell -----------------------------------------------------------------------------------
@pytest.mark.parametrize("paper", PAPER_RUNS)
def test_settings_of_a_method_do_not_depend_on_the_other_methods(paper: str) -> None:
    runs = PAPER_RUNS[paper]
    commands = [
        runs.command(table, cell) for table in tables(paper).values() for cell in table.cells
    ]
    longest = max(commands, key=lambda command: (len(command.methods), len(command.overrides)))
    node = to_dict(compose(longest.arguments()))
    assert node["choices"].pop("method") == list(longest.methods)
    shared = configuration(longest)
    without_methods = {k: v for k, v in shared["choices"].items() if k != "method"}
    assert node == shared | {"choices": without_methods}
    assert list(node["method"]) == list(longest.methods)


@pytest.mark.parametrize("name", FEDBR)
def test_commands_of_fedbr_tables_have_the_settings_of_the_paper(name: str) -> None:
    asked = setting(name)
    for cell in covering(FEDBR[name], "fedbr"):
        node = configuration(command(FEDBR[name], cell))
        local = node["local"]
        assert list(node["method"]) == list(cell.methods)
        assert node["choices"]["model"] == MODELS[of(asked["model"], cell.dataset)]
        assert node["rounds"] == of(asked["rounds"], cell.dataset)
        assert (local["steps"], local["epochs"], local["sampling"]) == (
            asked["local_steps"],
            None,
            "replacement",
        )
        assert local["batch"] == of(asked["batch"], cell.dataset)
        assert local["lr"] == of(asked["learning_rate"], cell.dataset)
        assert local["momentum"] == (
            0 if "fedcm" in cell.methods else of(asked["momentum"], cell.dataset)
        )
        assert node["weighting"] == "uniform"
        clients = of(asked["clients"], cell.dataset)
        assert node["schedule"]["cohort"] == round(clients * (asked["participation"] or 1))
        assert (
            node["partition"].get("clients", 4 * len(node["partition"].get("groups", ())))
            == clients
        )
        said = of(asked["partition"], cell.dataset)
        rotation = next((kind for words, kind in ROTATIONS.items() if words in said), "none")
        assert node["data"]["rotation"]["per"] == rotation
        assert "Dirichlet 0.1" not in said or node["partition"]["alpha"] == 0.1
        assert {float(key) for key in cell.rounds_to if key[0].isdigit()} <= set(node["thresholds"])


@pytest.mark.parametrize("name", FEDBR)
def test_commands_of_fedbr_tables_have_the_settings_stated_in_each_row(name: str) -> None:
    for cell in covering(FEDBR[name], "fedbr"):
        said = cell.variant
        parts = configuration(command(FEDBR[name], cell))["method"]
        if "virtual_data" in said:
            assert parts["vhl"]["virtual"] == said["virtual_data"]
        if "fedbr" not in cell.methods:
            continue
        part = parts["fedbr"]
        components = said.get("components", [1, 2])
        half = "added" in said or "removed" in said  # Component 2 without its max step
        assert (part["lam"] > 0) == (1 in components)
        assert (part["mu"] > 0) == (2 in components or half)
        assert part["max_step"] is not half
        assert part["pseudo_refresh"] == said.get("pseudo_refresh", "round")
        assert part["pseudo"] == said.get("pseudo_kind", "rsm")
        assert part["pseudo_batch"] == said.get(
            "pseudo_data", 64 if cell.dataset == "rotated_mnist" else 32
        )
        assert part["tau1"] == float(str(said.get("tau1", 2)))
        assert part["tau2"] == float(str(said.get("tau2", 2)))
        assert "lambda" not in said or part["lam"] == float(str(said["lambda"]))
        if part["pseudo"] == "mixture":
            other = {"cifar10": "Cifar100", "cifar100": "Cifar10"}[cell.dataset]
            assert part["proxy"][TARGET] == f"raysim.data.sources.{other}"


FEDBSS = tables("fedbss")


@pytest.mark.parametrize("name", FEDBSS)
def test_commands_of_fedbss_tables_have_the_settings_of_the_paper(
    name: str,
) -> None:
    asked = setting(name)
    for cell in covering(FEDBSS[name], "fedbss"):
        node = configuration(PAPER_RUNS["fedbss"].command(FEDBSS[name], cell))
        local, partition = node["local"], node["partition"]
        assert list(node["method"]) == list(cell.methods)
        assert node["choices"]["data"] == cell.dataset
        assert node["choices"]["model"] == (
            "cnn" if cell.dataset == "fashion_mnist" else "resnet50"
        )
        assert (node["rounds"], local["epochs"], local["steps"]) == (
            asked["rounds"],
            asked["local_epochs"],
            None,
        )
        assert (local["batch"], local["lr"]) == (asked["batch"], asked["learning_rate"])
        assert (local["momentum"], local["weight_decay"]) == (
            asked["momentum"],
            asked["weight_decay"],
        )
        assert (partition["clients"], node["schedule"]["cohort"]) == (asked["clients"], 10)
        assert partition["test_fraction"] == 0
        kind, value = cell.column.split()
        named = {"shards": partition.get("shards_per_client"), "dirichlet": partition.get("alpha")}
        assert {**named, "label_noise": node["data"]["label_noise"]}[kind] == float(value)
        for method, part in node["method"].items():
            assert part.get("warmup_rounds", asked["warmup_rounds"]) == asked["warmup_rounds"], (
                method
            )


def test_fedbss_has_presets_for_its_ablations_and_for_domains() -> None:
    ablation, domains = (
        composed(f"experiment=fedbss/{name}") for name in ("cifar10_ablation", "domainnet")
    )
    assert (ablation["choices"]["model"], ablation["model"]["depth"]) == ("resnet18", 18)
    assert (
        composed("experiment=fedbss/cifar10_ablation", "method.fedbss.kind=linear")["method"][
            "fedbss"
        ]["kind"]
        == "linear"
    )
    assert (domains["schedule"]["cohort"], domains["model"]["stem"]) == (6, "imagenet")
    named = [
        "airplane",
        "clock",
        "axe",
        "ball",
        "bicycle",
        "bird",
        "strawberry",
        "flower",
        "pizza",
        "bracelet",
    ]
    assert [name.removeprefix("basket") for name in domains["data"]["only"]] == named


LISTS = sorted({cell.methods for table in FEDBR.values() for cell in table.cells})


@pytest.mark.parametrize("methods", LISTS, ids="+".join)
def test_every_method_combination_in_tables_of_the_fedbr_paper_is_valid(
    methods: tuple[str, ...],
) -> None:
    nodes = with_all_methods("fedbr/cifar10")["method"]
    parts = [
        build_object(resolve(nodes[name][TARGET], name), nodes[name], f"method.{name}")
        for name in methods
    ]
    check_composition(parts)
    assert [part.name for part in parts] == list(methods)


# --- values of methods ----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("methods", "values"),
    [
        (
            "fedbr",
            {
                "mu": 0.5,
                "tau1": 2.0,
                "tau2": 2.0,
                "temperature_mode": "multiply",
                "projection": "paper",
            },
        ),
        ("fedprox", {"mu": 0.1}),
        (
            "moon",
            {
                "mu": 0.01,
                "temperature": 0.5,
                "head": "mlp",
                "width": 256,
                "out": 128,
                "previous": 1,
            },
        ),
        ("dann", {"lam": 0.01, "width": 256, "discriminator_steps": 1, "mode": "alternate"}),
        ("groupdro", {"step_size": 0.01, "batches": "first", "prior": "uniform"}),
        ("mixup", {"alpha": 0.2}),
        ("fedmix", {"lam": 0.1, "samples_per_mean": 10, "pairs": "each", "taylor_scale": "paper"}),
        (
            "vhl",
            {
                "alpha": 1.0,
                "gamma": 1.0,
                "kappa": 0.1,
                "temperature": 0.07,
                "virtual_batch": 32,
                "virtual": 2000,
            },
        ),
        ("fedcm", {"alpha": 0.1}),
        ("feddecorr", {"beta": 0.1, "variant": "fedbr"}),
        ("fedntd", {"beta": 1.0, "temperature": 1.0}),
        ("local", {"keep_optimizer": False}),
    ],
)
def test_methods_of_a_preset_have_the_values_of_its_paper(
    methods: str, values: dict[str, object]
) -> None:
    part = with_all_methods("fedbr/cifar10")["method"][methods]
    assert values.items() <= part.items()


@pytest.mark.parametrize(
    ("name", "lam", "means"),
    [("rotated_mnist", 1.0, 64), ("cifar10", 0.1, 32), ("cifar100", 1.0, 32), ("pacs", 0.1, 32)],
)
def test_methods_of_a_preset_have_values_chosen_for_the_data_set(
    name: str, lam: float, means: int
) -> None:
    methods = composed(f"experiment=fedbr/{name}", "method=[fedbr,fedmix,vhl]")["method"]
    assert (methods["fedbr"]["lam"], methods["fedmix"]["means"]) == (lam, means)


def test_preset_sets_only_existing_methods_and_keys() -> None:
    methods = composed(f"method=[{','.join(find_groups().files['method'])}]")["method"]
    for path in (conf_folder() / "experiment").rglob("*.yaml"):
        for name, values in (yaml.safe_load(path.read_text()).get("method") or {}).items():
            assert set(values) <= set(methods[name]), path.name


def test_fedbr_presets_give_vhl_the_number_of_virtual_images_in_the_paper() -> None:
    for name, images in (("cifar10", 2_000), ("cifar100", 20_000)):
        methods = composed(f"experiment=fedbr/{name}", "method=[fedbr,fedmix,vhl]")["method"]
        assert methods["vhl"]["virtual"] == images


# --- what is trained on, and what is scored -------------------------------------------------------
def split_of(*words: str) -> FederatedData:
    images = [
        "data=synthetic",
        "data.shape=[3,8,8]",
        "data.domains=4",
        "data.samples=2800",
        "data.test_samples=700",
    ]
    return partition([*words, *images, "data.classes=7"])


def test_fedbr_on_pacs_uses_the_split_of_the_paper() -> None:
    parts = split_of("experiment=fedbr/pacs")
    assert len(parts.partition.train.indices) == 2800 and len(parts.partition) == 8
    assert sorted(parts.partition.test.indices.tolist()) == parts.central.tolist()
    assert composed("experiment=fedbr/pacs")["data"]["test_fraction"] == 0.2


@pytest.mark.parametrize("name", ["pacs", "office_home"])
def test_fraug_preset_has_the_sample_counts_of_the_released_code(name: str) -> None:
    parts = split_of(f"experiment=fraug/{name}").partition
    left = 700 - 700 // 10
    assert parts.validation is not None
    assert (
        parts.validation.counts.tolist() == [70] * 4
        and parts.train.counts.tolist() == [left // 10] * 4
    )
    assert parts.test.counts.tolist() == [175] * 4


def test_fedld_preset_for_retina_images_gives_each_client_at_least_ten_samples() -> None:
    assert composed("experiment=fedld/retina")["partition"]["minimum"] == 10


# --- which of a preset's methods a run takes ------------------------------------------------------
def test_run_takes_methods_of_preset_unless_others_are_chosen() -> None:
    node = composed("experiment=fedbr/rotated_mnist")
    assert list(node["method"]) == node["choices"]["method"] == ["fedbr"]
    node = composed("experiment=fedbr/rotated_mnist", "method=[fedprox]")
    assert list(node["method"]) == ["fedprox"]
    assert node["method"]["fedprox"]["mu"] == 0.1
    with pytest.raises(RefusedError, match="fedprox is not in method"):
        compose(["experiment=fedbr/rotated_mnist", "method.fedprox.mu=1"])


def test_run_of_a_preset_can_use_a_method_that_has_only_a_yaml_file(
    tmp_path: Path,
) -> None:
    (tmp_path / "method").mkdir()
    (tmp_path / "method" / "mine.yaml").write_text("mine:\n  mu: 1\n")
    node = to_dict(compose(["experiment=fedbr/rotated_mnist", "method=[mine]"], [tmp_path]))
    assert list(node["method"]) == ["mine"]


def test_preset_with_unknown_method_is_refused(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "own.yaml").write_text(
        "# @package _global_\nmethod:\n  fedprx:\n    mu: 2.0\n"
    )
    with pytest.raises(
        RefusedError, match=r"experiment=own .*method\.fedprx.*did you mean fedprox\?"
    ):
        compose(["experiment=own"], [tmp_path])


def test_preset_file_of_a_user_sets_the_order_of_methods(
    tmp_path: Path,
) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "own.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /method: [mixup, fedprox]\n"
        "method:\n  fedbr:\n    lam: 2.0\n  fedprox:\n    mu: 0.3\n"
    )
    node = to_dict(compose(["experiment=own"], [tmp_path]))
    assert list(node["method"]) == node["choices"]["method"] == ["mixup", "fedprox"]
    assert node["method"]["fedprox"]["mu"] == 0.3


# --- on made-up images ----------------------------------------------------------------------------
@pytest.mark.parametrize(
    "name",
    sorted({command(table, cell).experiment for table in FEDBR.values() for cell in table.cells}),
)
def test_preset_builds_a_model_for_its_image_size(name: str) -> None:
    images = {
        "fedbr/rotated_mnist": ["data.shape=[1,28,28]"],
        "fedbr/cifar100": ["data.shape=[3,32,32]", "data.classes=100"],
        "fedbr/pacs": [
            "data.shape=[3,64,64]",
            "data.classes=7",
            "data.domains=4",
            "data.samples=280",
        ],
    }.get(name, ["data.shape=[3,32,32]"])
    experiment = build(
        [
            f"experiment={name}",
            "data=synthetic",
            "data.test_samples=40",
            "runtime=inprocess",
            *images,
        ]
    )
    assert experiment.spec.settings.rounds >= 400
    assert experiment.spec.task.num_classes in (7, 10, 100)


# --- FRAug ----------------------------------------------------------------------------------------
FRAUG = tables("fraug")
# Steps and batch of a round, share of the data, and the three learning rates, from the released
# code.
FRAUG_CODE = {
    "office_home": (10, 16, 0.1, (0.01, 0.05, 0.025)),
    "pacs": (5, 32, 0.1, (0.01, 0.05, 0.05)),
    "digits": (20, 64, 0.01, (0.01, 0.05, 0.025)),
}


@pytest.mark.parametrize("name", FRAUG)
def test_each_number_of_the_fraug_paper_has_a_command_and_a_history_column(name: str) -> None:
    composed_cells = covering(FRAUG[name], "fraug")
    for cell in FRAUG[name].cells:
        score = PAPER_RUNS["fraug"].score(FRAUG[name], cell)
        rows = [
            {
                "accuracy_best": 0.5,
                "accuracy_finetuned": 0.6,
                "accuracy_best.Real World": 0.1,
                "accuracy": 0.9,
            }
        ]
        rows[0] |= {
            "accuracy_best.mnist": 0.2,
            "accuracy_best.mnist_m": 0.3,
            "accuracy_finetuned.art_painting": 0.4,
        }
        finetuned = bool(cell.variant.get("head_finetune"))
        assert score.column.startswith("accuracy_finetuned" if finetuned else "accuracy_best")
        assert score.additional_columns["last round"].startswith("accuracy")
        if cell.column in ("Avg", "avg"):
            assert score.summary(rows, score.column) == (0.6 if finetuned else 0.5)
        elif not finetuned and cell.column in ("R", "MT", "MM"):
            assert (
                score.summary(rows, score.column) == {"R": 0.1, "MT": 0.2, "MM": 0.3}[cell.column]
            )
        if cell not in composed_cells:
            continue
        node = configuration(PAPER_RUNS["fraug"].command(FRAUG[name], cell))
        steps, batch, share, rates = FRAUG_CODE[cell.dataset]
        assert list(node["method"]) == list(cell.methods)
        assert node["choices"]["model"] == (
            "digits_cnn" if cell.dataset == "digits" else "resnet18"
        )
        assert node["model"].get("pretrained", cell.dataset != "digits") == (
            cell.dataset != "digits"
        )
        assert (node["rounds"], node["schedule"]["cohort"], node["choices"]["partition"]) == (
            300,
            4,
            "domain",
        )
        assert (node["local"]["steps"], node["local"]["batch"], node["partition"]["fraction"]) == (
            steps,
            batch,
            share,
        )
        assert (node["local"]["lr"], node["local"]["momentum"]) == (0.01, 0.5)
        assert node["local"]["keep_optimizer"] is True, "the code keeps it for every method"
        assert (node["partition"]["test_fraction"], node["partition"]["validation_fraction"]) == (
            None,
            0.1,
        )
        assert cell.dataset == "digits" or node["data"]["test_fraction"] == 0.1
        if "fraug" in node["method"]:
            part = node["method"]["fraug"]
            assert (
                tuple(0.01 * f for f in (1, part["generator_lr_factor"], part["rtnet_lr_factor"]))
                == rates
            )
            assert part["rounds"] == node["rounds"]
            assert part["generator_norm"] == (
                "local" if cell.dataset == "office_home" else "shared"
            )


def test_only_the_last_row_of_the_fraug_ablation_has_the_full_method() -> None:
    fraug = PAPER_RUNS["fraug"]
    found = {
        cell.variant["row"]: configuration(fraug.command(FRAUG["fraug/table3"], cell))["method"][
            "fraug"
        ]
        for cell in FRAUG["fraug/table3"].cells
    }
    whole = composed("experiment=fraug/office_home")["method"]["fraug"]
    assert found[7] == whole and len({json.dumps(part) for part in found.values()}) == 7


def test_fraug_presets_from_code_and_from_paper_text_differ_in_five_keys() -> None:
    code, text = (
        composed(f"experiment=fraug/{name}")["method"]["fraug"]
        for name in ("digits", "digits_text")
    )
    different = {key: (code[key], text[key]) for key in code if code[key] != text[key]}
    assert different == {
        "generator_metric": ("mse", "mmd_classes"),
        "rtnet_metric": ("mmd", "mse"),
        "gamma": (0.002, 0.01),
        "residual": (1.0, None),
        "prototype_ramp": (False, True),
    }


def test_fedbss_preset_accepts_a_pooling_stride_of_three() -> None:
    model = composed("experiment=fedbss/fashion_mnist", "model.stride=3")["model"]
    assert (model["pool"], model["stride"]) == (3, 3)


# --- FedLD ----------------------------------------------------------------------------------------
FEDLD = tables("fedld")


@pytest.mark.parametrize("name", FEDLD)
def test_commands_of_fedld_tables_have_the_settings_of_the_paper(
    name: str,
) -> None:
    asked = setting(name)
    for cell in covering(FEDLD[name], "fedld"):
        node = configuration(PAPER_RUNS["fedld"].command(FEDLD[name], cell))
        local = node["local"]
        assert (node["rounds"], local["batch"]) == (asked["rounds"], asked["batch"])
        assert local["epochs"] == asked["local_epochs"] + (
            "fedpac" in node["method"]
        )  # one of the head beside
        assert local["lr"] == asked["learning_rate"][cell.dataset]
        assert node["choices"]["model"] == "resnet50" and node["model"]["pretrained"]
        clients = asked["clients"][cell.dataset]
        assert node["partition"].get("clients", 12) == clients
        assert node["schedule"]["cohort"] == round(clients * asked["participation"])
        if cell.dataset == "retina":
            said = asked["partition"]["retina"]
            alpha = (
                said.rpartition("alpha ")[2]
                if name.endswith("3")
                else said.split(f"{cell.column} alpha ")[-1]
            )
            assert node["partition"]["alpha"] == float(alpha.split(",")[0])
        margin = node["method"].get("fedld_margin")
        if margin and asked["margin_weight"]:
            assert (
                margin["lam"]
                == asked["margin_weight"][cell.column if cell.dataset == "retina" else "covid_fl"]
            )
        assert bool(margin) == ("fedld" in cell.methods and cell.variant.get("margin", True))
        principal = node["method"].get("fedld_principal")
        assert bool(principal) == ("fedld" in cell.methods and cell.variant.get("principal", True))
        assert not principal or principal["fraction"] == asked["principal_share"]
        own = bool({"fedbn", "fedpac"} & set(node["method"]))
        assert node["evaluate"]["common"] == own
        assert PAPER_RUNS["fedld"].score(FEDLD[name], cell).column == (
            "accuracy_common" if own else "accuracy_global"
        )
