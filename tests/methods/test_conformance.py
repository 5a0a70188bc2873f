"""Test the rules that hold for every method, with one table of all methods with small settings."""

from __future__ import annotations

import functools
import importlib
import math
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cluster import Workers
from tiny_runs import (
    BLOCKS,
    BUFFER,
    LOCAL,
    MLP,
    NORMED,
    NORMED_MLP,
    ROUNDS,
    BiasFreeMlp,
    FinishedRun,
    NormedMlp,
    Spy,
    coordinate,
    pairs,
    run,
    run_spec,
    run_to_end,
    same_arrays,
    tiny_data,
)
from torch import Tensor

import raysim.methods
from raysim.api.client_state import to_flat_arrays
from raysim.api.composition import check_names, check_together
from raysim.api.declarations import Local
from raysim.api.local_job import LocalJob
from raysim.api.method import Method
from raysim.api.setup import MethodDeclaration
from raysim.conformance import agreement
from raysim.conformance.methods import WatchedRun, check_arguments, check_messages
from raysim.methods.ace import ACE
from raysim.methods.afl import AFL
from raysim.methods.apfl import APFL
from raysim.methods.ca2fl import CA2FL
from raysim.methods.centralized import Centralized
from raysim.methods.coordinate_median import CoordinateMedian
from raysim.methods.dann import Dann
from raysim.methods.delayed_nesterov import DelayedNesterov
from raysim.methods.ditto import Ditto
from raysim.methods.dp_fedavg import DPFedAvg
from raysim.methods.fadas import FADAS
from raysim.methods.fedala import FedALA
from raysim.methods.fedasync import FedAsync
from raysim.methods.fedbabu import FedBABU
from raysim.methods.fedbn import FedBN
from raysim.methods.fedbr import FedBR
from raysim.methods.fedbss import FedBSS
from raysim.methods.fedbuff import FedBuff
from raysim.methods.fedcda import FedCDA
from raysim.methods.fedcm import FedCM
from raysim.methods.feddecorr import FedDecorr
from raysim.methods.feddyn import FedDyn
from raysim.methods.fedexp import FedExP
from raysim.methods.fedgh import FedGH, HierarchicalFedGH
from raysim.methods.fedlc import FedLC
from raysim.methods.fedld import DampedMargin, MarginControl, PrincipalGradient
from raysim.methods.fedmix import FedMix
from raysim.methods.fednova import FedNova
from raysim.methods.fedntd import FedNTD
from raysim.methods.fedopt import FedAdagrad, FedAdam, FedAvgM, FedYogi
from raysim.methods.fedpac import FedPAC
from raysim.methods.fedproto import FedProto
from raysim.methods.fedprox import FedProx
from raysim.methods.fedrep import FedRep
from raysim.methods.fedrs import FedRS
from raysim.methods.fedsa_lora import FedSALoRA
from raysim.methods.fedsam import FedSAM
from raysim.methods.fedspeed import FedSpeed
from raysim.methods.fedsr import FedSR
from raysim.methods.ffa_lora import FFALoRA
from raysim.methods.flexlora import FlexLoRA
from raysim.methods.flora import FLoRA
from raysim.methods.fraug import FRAug
from raysim.methods.geometric_median import GeometricMedian
from raysim.methods.groupdro import GroupDRO
from raysim.methods.hetlora import HetLoRA
from raysim.methods.inco import InCo
from raysim.methods.krum import Krum
from raysim.methods.local import LocalTraining
from raysim.methods.lora_factors import KEEPERS, LORA_METHODS
from raysim.methods.mixup import Mixup
from raysim.methods.moon import Moon
from raysim.methods.norm_clipping import NormClipping
from raysim.methods.partialfed import PartialFed
from raysim.methods.pfedavg import PFedAvg
from raysim.methods.pfedme import PFedMe
from raysim.methods.qfedavg import QFedAvg
from raysim.methods.scaffold import Scaffold
from raysim.methods.streaming_diloco import WHOLE_MODEL_METHODS, StreamingDiLoCo
from raysim.methods.trimmed_mean import TrimmedMean
from raysim.methods.vhl import Vhl
from raysim.models import Lora, Mlp, ModelRecipe
from raysim.simulation.fleet import Ideal, Lognormal
from raysim.simulation.schedule import Buffered, Synchronous
from raysim.training.run_spec import declare_run

# With adapters and BatchNorm.
ADAPTED_MLP = NormedMlp(lora=Lora(rank=3))
EPOCHS = Local(lr=0.05, momentum=0.9, batch=12, epochs=2)
STEPS = Local(lr=0.05, momentum=0.9, batch=12, epochs=None, steps=3)


class Frozen(Scaffold):
    """SCAFFOLD whose control variates stay at zero."""

    def end(self, job: LocalJob) -> None:
        job.upload["control"] = torch.zeros_like(job.state["control"])


class Alone(Mixup):
    """Mixup with the mixing weight 1, which changes no sample."""

    def draw_weights(self, job: LocalJob, generator: np.random.Generator) -> Sequence[Tensor]:
        return torch.ones_like(torch.stack(list(super().draw_weights(job, generator)))).unbind()


@dataclass(frozen=True)
class Plain:
    """Settings with which a run of a method equals a run of FedAvg.

    make: function that returns the method.
    study: arguments of `run_spec` for both runs, by name.
    run: arguments of `run` for both runs, by name.
    """

    make: Callable[[], Method]
    study: Mapping[str, Any] = field(default_factory=dict)
    run: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """A method with small settings, and what the tests expect of it.

    make: returns the method.
    plain: variants of the method that equal FedAvg, by a text about the variant.
    uploads: the tensors that clients upload in addition to the update.
    personal: True if parameters stay on the clients.
    private: True if the method has client state that no message may contain.
    contributes: True if clients send tensors before round 0.
    as_fedavg: True if the shared model always equals that of FedAvg.
    """

    make: Callable[[], Method]
    plain: Mapping[str, Plain] = field(default_factory=dict)
    uploads: frozenset[str] = frozenset()
    personal: bool = False
    private: bool = False
    contributes: bool = False
    model: ModelRecipe = NORMED_MLP
    as_fedavg: bool = False


UNIFORM = {"weighting": "uniform"}


def small_fedbr(**settings: Any) -> FedBR:
    return FedBR(projection="code", pseudo_batch=4, samples_per_mean=3, **settings)


TABLE: dict[str, Row] = {
    "fedprox": Row(lambda: FedProx(0.1), {"mu=0": Plain(lambda: FedProx(0.0))}),
    "scaffold": Row(
        Scaffold,
        {
            "in the first round": Plain(Scaffold, run=UNIFORM | {"rounds": 1}),
            "with control variates frozen at zero": Plain(Frozen, run=UNIFORM),
        },
        frozenset({"scaffold.control"}),
    ),
    "fedbn": Row(
        FedBN,
        {
            "scope=none": Plain(lambda: FedBN("none")),
            "without BatchNorm": Plain(FedBN, study={"model": MLP}),
        },
        personal=True,
        private=True,
    ),
    "mixup": Row(Mixup, {"weight 1": Plain(Alone)}),
    "partialfed": Row(
        lambda: PartialFed("adaptive", policy_steps=2, policy_batch=8),
        {
            "loading everything": Plain(lambda: PartialFed("all")),
            "with a client's first participation": Plain(
                lambda: PartialFed("none"), run={"rounds": 1}
            ),
        },
        private=True,
    ),
    "pfedavg": Row(
        PFedAvg,
        {
            "after_local": Plain(PFedAvg),
            "finetune": Plain(lambda: PFedAvg("finetune")),
            "finetune_last": Plain(lambda: PFedAvg("finetune_last")),
        },
        private=True,
        as_fedavg=True,
    ),
    "centralized": Row(
        Centralized, {"on data that is not pooled": Plain(Centralized)}, as_fedavg=True
    ),
    "fedbss": Row(
        lambda: FedBSS(warmup_rounds=1),
        {
            "with a warm-up as long as the run": Plain(
                lambda: FedBSS(3), study={"local": EPOCHS}, run=UNIFORM
            ),
            "kind=all": Plain(lambda: FedBSS(0, kind="all"), study={"local": EPOCHS}, run=UNIFORM),
        },
        private=True,
    ),
    "fedbr": Row(
        small_fedbr, {"lam=mu=0": Plain(lambda: small_fedbr(lam=0.0, mu=0.0))}, contributes=True
    ),
    "moon": Row(
        lambda: Moon(out=8),
        {
            "mu=0": Plain(lambda: Moon(0.0, head="none")),
            "before a client has a previous model": Plain(
                lambda: Moon(head="none"), run={"rounds": 1}
            ),
        },
        private=True,
    ),
    "dann": Row(lambda: Dann(0.5, width=8)),
    "groupdro": Row(
        lambda: GroupDRO(0.5),
        {"step_size=0": Plain(lambda: GroupDRO(0.0), run=UNIFORM)},
        frozenset({"groupdro.loss"}),
    ),
    "fedcm": Row(
        FedCM,
        {
            "alpha=1": Plain(lambda: FedCM(1.0), run=UNIFORM),
            "in the first round with a warm start": Plain(
                lambda: FedCM(warm_start=True), run=UNIFORM | {"rounds": 1}
            ),
        },
    ),
    "feddecorr": Row(FedDecorr, {"beta=0": Plain(lambda: FedDecorr(0.0))}),
    "fedntd": Row(FedNTD, {"beta=0": Plain(lambda: FedNTD(0.0))}),
    "fedmix": Row(
        lambda: FedMix(means=4, samples_per_mean=3),
        {
            "lam=0": Plain(lambda: FedMix(0.0)),
            "lam=0, naive": Plain(lambda: FedMix(0.0, naive=True)),
        },
        contributes=True,
    ),
    "vhl": Row(
        lambda: Vhl(virtual_batch=6, virtual=20),
        {
            "alpha=gamma=kappa=0, shared labels": Plain(
                lambda: Vhl(0.0, 0.0, 0.0, label_mode="shared")
            )
        },
    ),
    "fedlc": Row(FedLC, {"tau=0 without exclusion": Plain(lambda: FedLC(0.0, count_floor=1.0))}),
    "fedrs": Row(
        lambda: FedRS(0.1), {"alpha=1": Plain(lambda: FedRS(1.0), study={"model": BiasFreeMlp()})}
    ),
    "fedexp": Row(
        lambda: FedExP(1e-6),
        {
            "with one client": Plain(FedExP, run={"schedule": Synchronous(1)}),
            "with a large epsilon": Plain(lambda: FedExP(1e9)),
        },
        frozenset({"fedexp.square"}),
    ),
    "fedcda": Row(
        lambda: FedCDA(warmup_rounds=1),
        {"with a warm-up as long as the run": Plain(FedCDA, run=UNIFORM)},
        frozenset({"fedcda.loss"}),
    ),
    "inco": Row(InCo, {"without a pair": Plain(InCo, run=UNIFORM)}, model=BLOCKS),
    "fedld_margin": Row(MarginControl, {"lam=0": Plain(lambda: MarginControl(0.0))}),
    "fedld_damped": Row(DampedMargin),
    "fedld_principal": Row(
        PrincipalGradient,
        {"with one client": Plain(PrincipalGradient, run={"schedule": Synchronous(1)})},
    ),
    "fedgh": Row(
        lambda: FedGH(granularity="tensor"),
        {"with one client": Plain(FedGH, run={"schedule": Synchronous(1)})},
    ),
    "fedgh_hierarchical": Row(
        HierarchicalFedGH,
        {
            "with one client": Plain(HierarchicalFedGH, run=UNIFORM | {"schedule": Synchronous(1)}),
            "in the first round": Plain(HierarchicalFedGH, run=UNIFORM | {"rounds": 1}),
        },
    ),
    "fedsr": Row(FedSR, personal=True, private=True),
    "fraug": Row(
        lambda: FRAug(4, noise_dim=6),
        {
            "weight=0 without generator, on a model without BatchNorm": Plain(
                lambda: FRAug(
                    4, noise_dim=6, weight=0.0, use_generator=False, keep_optimizer=False
                ),
                study={"model": MLP},
            )
        },
        personal=True,
        private=True,
    ),
    "fedpac": Row(
        FedPAC,
        uploads=frozenset(
            f"fedpac.{name}"
            for name in ("head", "class_means", "weighted_means", "class_counts", "variance")
        ),
        personal=True,
    ),
    "local": Row(lambda: LocalTraining(keep_optimizer=True), personal=True, private=True),
    "fedbuff": Row(FedBuff, {"in rounds": Plain(FedBuff, run=UNIFORM)}),
    "fedasync": Row(
        FedAsync,
        {
            "with one client, alpha=1": Plain(
                lambda: FedAsync(1.0, "constant"), run=UNIFORM | {"schedule": Synchronous(1)}
            )
        },
    ),
    "ca2fl": Row(CA2FL),
    "ace": Row(lambda: ACE(0.5, max_staleness=3)),
    "fadas": Row(lambda: FADAS(0.05, eps=1e-6, bias_correction=True)),
    "coordinate_median": Row(
        CoordinateMedian,
        {"with one client": Plain(CoordinateMedian, run=UNIFORM | {"schedule": Synchronous(1)})},
    ),
    "trimmed_mean": Row(
        lambda: TrimmedMean(0.3), {"share=0": Plain(lambda: TrimmedMean(0.0), run=UNIFORM)}
    ),
    "krum": Row(
        lambda: Krum(1, 2),
        {
            "selecting all": Plain(lambda: Krum(0, 9), run=UNIFORM),
            "f=0": Plain(lambda: Krum(0, None), run=UNIFORM),
        },
    ),
    "geometric_median": Row(GeometricMedian, {"steps=0": Plain(lambda: GeometricMedian(0))}),
    "norm_clipping": Row(
        lambda: NormClipping(0.1), {"a large bound": Plain(lambda: NormClipping(1e9))}
    ),
    "dp_fedavg": Row(
        lambda: DPFedAvg(noise=0.3, clip=0.2),
        {
            "no noise, a large bound that stays": Plain(
                lambda: DPFedAvg(0.0, 1e9, None), {"model": MLP}, UNIFORM
            )
        },
        model=MLP,  # it refuses shared statistics
    ),
    "fedavgm": Row(
        lambda: FedAvgM(server_lr=0.9),
        {
            "momentum=0, server_lr=1": Plain(lambda: FedAvgM(1.0, 0.0)),
            "momentum=0, server_lr=1, nesterov": Plain(lambda: FedAvgM(1.0, 0.0, nesterov=True)),
        },
    ),
    "delayed_nesterov": Row(
        lambda: DelayedNesterov(every=2),
        {
            "momentum=0, server_lr=1, every=1": Plain(
                lambda: DelayedNesterov(1.0, 0.0, 1), run=UNIFORM
            )
        },
    ),
    "streaming_diloco": Row(
        lambda: StreamingDiLoCo(2, momentum=0.5),
        {
            "one fragment, momentum=0, server_lr=1": Plain(
                lambda: StreamingDiLoCo(1, 1.0, 0.0), run=UNIFORM
            )
        },
        private=True,
    ),
    "fedadagrad": Row(FedAdagrad),
    "fedadam": Row(lambda: FedAdam(bias_correction=True)),
    "fedyogi": Row(FedYogi),
    "feddyn": Row(FedDyn, {"alpha=0": Plain(lambda: FedDyn(0.0), run=UNIFORM)}, private=True),
    "fedsam": Row(lambda: FedSAM(0.1), {"rho=0": Plain(lambda: FedSAM(0.0))}),
    "fedspeed": Row(FedSpeed, private=True),
    "ditto": Row(
        Ditto, {"any lam": Plain(lambda: Ditto(0.3))}, personal=True, private=True, as_fedavg=True
    ),
    "fedrep": Row(lambda: FedRep(head_epochs=1), personal=True, private=True),
    "fednova": Row(
        FedNova,
        {"with equal steps": Plain(FedNova, study={"local": STEPS})},
        frozenset({"fednova.steps"}),
    ),
    "qfedavg": Row(
        QFedAvg,
        {"q=0": Plain(lambda: QFedAvg(0.0), run=UNIFORM)},
        frozenset({"qfedavg.loss", "qfedavg.curvature"}),
    ),
    "afl": Row(
        AFL,
        {
            "step_size=0": Plain(lambda: AFL(0.0), run=UNIFORM),
            "in the first round": Plain(AFL, run=UNIFORM | {"rounds": 1}),
        },
        frozenset({"afl.loss"}),
    ),
    "fedbabu": Row(lambda: FedBABU(1), personal=True),
    "apfl": Row(
        APFL, {"any alpha": Plain(lambda: APFL(0.3))}, personal=True, private=True, as_fedavg=True
    ),
    "fedproto": Row(
        lambda: FedProto(predict="prototype"),
        uploads=frozenset({"fedproto.class_means", "fedproto.class_counts"}),
        personal=True,
        private=True,
    ),
    "fedala": Row(
        FedALA,
        {"in a client's first participation": Plain(FedALA, run={"rounds": 1})},
        private=True,
    ),
    "pfedme": Row(lambda: PFedMe(2, beta=0.9), private=True),
    "ffa_lora": Row(FFALoRA, model=ADAPTED_MLP),
    "fedsa_lora": Row(FedSALoRA, model=ADAPTED_MLP, personal=True, private=True),
    "flexlora": Row(lambda: FlexLoRA([1, 3]), model=ADAPTED_MLP),
    "hetlora": Row(lambda: HetLoRA([2, 3], gamma=0.9), model=ADAPTED_MLP),
    "flora": Row(lambda: FLoRA([1, 3]), model=ADAPTED_MLP),
}


def every_method() -> Iterator[type[Method]]:
    """Yield all classes of the package that a configuration can name."""
    for module in pkgutil.iter_modules(raysim.methods.__path__):
        for found in vars(importlib.import_module(f"raysim.methods.{module.name}")).values():
            if isinstance(found, type) and issubclass(found, Method) and "name" in vars(found):
                yield found


def study(*methods: Method, **others: Any) -> Any:
    names = {method.name for method in methods}
    # DP-FedAvg refuses BatchNorm whose statistics are shared.
    model = MLP if "dp_fedavg" in names and "fedbn" not in names else NORMED_MLP
    if names & {*LORA_METHODS}:
        model = Mlp((12,), Lora(rank=3)) if model is MLP else ADAPTED_MLP
    settings = {"model": model, "local": EPOCHS, "data": tiny_data(samples=92)}
    return run_spec(*methods, **(settings | others))


def made(*names: str) -> list[Method]:
    """Return a new object for each given method name; skip names that are not in `TABLE`.

    "fedavg" is such a name.
    """
    return [TABLE[name].make() for name in names if name in TABLE]


def fresh(*names: str) -> Callable[[], Any]:
    """Return a function that returns a `RunSpec` with new objects of these methods."""
    return lambda: study(*made(*names))


FREIGHT: dict[str, Callable[[], Method]] = {
    **{name: row.make for name, row in TABLE.items()},
    "fedbr once": lambda: small_fedbr(pseudo_refresh="once"),
    "fedbr without a projector": lambda: small_fedbr(mu=0.0),
    "partialfed by hand": PartialFed,
    # A prototype that a client keeps may be, byte for byte, what the one holder of its class
    # uploaded.
    "fedproto": FedProto,
}
SCHEDULES = {"rounds": ROUNDS, "buffer": BUFFER}
# With the two updates of a buffer, these combine updates as FedAvg does.
NEEDS_COHORT = ("fedexp", "trimmed_mean", "krum")
# What a client gets once, whatever the number of its jobs.
SENT_ONCE = {
    "fedbr once": {"fedbr.pseudo"},
    "fedmix": {"fedmix.inputs", "fedmix.targets"},
    "vhl": {"vhl.inputs", "vhl.labels"},
}
# One method for each place where a method keeps or sends something. The messages of all methods in
# rounds are those of `test_messages_with_fedbn_contain_no_client_state`.
IN_ROUNDS = ("fedavg", "scaffold", "fedbr once", "fedpac", "fraug", "fedproto", "dp_fedavg", "ace")
WATCHED = [
    *((name, "buffer") for name in ("fedavg", *FREIGHT) if name not in NEEDS_COHORT),
    *((name, "rounds") for name in (*IN_ROUNDS, *NEEDS_COHORT)),
]


@dataclass(frozen=True)
class Watched:
    """A run of five rounds whose messages were checked.

    name: a method or a variant from `FREIGHT`, or "fedavg".
    make: returns the run's `RunSpec` with new methods.
    seen: the run and the contents of its messages.
    folder: has the checkpoint after round 3.
    """

    name: str
    schedule: Any
    make: Callable[[], Any]
    seen: WatchedRun
    folder: Path


def settings_of(name: str) -> dict[str, Any]:
    """Return {"model": ...} with the model on which a method is tested; {} for "fedavg".

    name: the name of a method, or of a variant such as "fedbr once".
    """
    row = TABLE.get(name.partition(" ")[0])
    return {} if row is None else {"model": row.model}


@pytest.fixture(
    scope="module",
    params=WATCHED,
    ids=lambda param: "-".join(param),
)
def watched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Watched:
    """Make one run of a method with a schedule; all tests of this pair check the same run."""
    name, schedule = request.param
    folder = tmp_path_factory.mktemp("watched")

    def make() -> Any:
        methods = [] if name == "fedavg" else [FREIGHT[name]()]
        return study(*methods, **settings_of(name))

    saved = {"checkpoint_every": 3, "folder": str(folder)}
    seen = check_messages(make, SCHEDULES[schedule], Ideal(), **saved)
    return Watched(name, SCHEDULES[schedule], make, seen, folder)


def test_conformance_table_has_every_method() -> None:
    assert {method.name for method in every_method()} == set(TABLE)
    assert all(row.make().name == name for name, row in TABLE.items())


@pytest.mark.parametrize("name", TABLE)
def test_each_method_has_a_paper_and_no_argument_with_the_name_of_a_hook(name: str) -> None:
    method = TABLE[name].make()
    check_arguments(method)
    assert method.paper


# --- the reference --------------------------------------------------------------------------------


def references() -> Iterable[Any]:
    return [
        pytest.param(plain, id=f"{name} {at}")
        for name, row in TABLE.items()
        for at, plain in row.plain.items()
    ]


@functools.cache
def fedavg_run(
    study_settings: frozenset[tuple[str, Any]], run_settings: frozenset[tuple[str, Any]]
) -> FinishedRun:
    """Run FedAvg. Tests that pass the same arguments get the result of the same run.

    study_settings: the arguments of the function `study`.
    run_settings: the arguments of the function `run`.
    """
    return run(study(**dict(study_settings)), **dict(run_settings))


@pytest.mark.parametrize("plain", references())
def test_method_is_bit_identical_to_fedavg_at_settings_that_disable_it(plain: Plain) -> None:
    study_settings = {"local": LOCAL, "model": NORMED} | plain.study
    # On ideal devices: elsewhere what a method sends changes when its clients arrive, and with it
    # the order of the sum.
    run_settings = {"fleet": Ideal()} | plain.run
    finished = run(study(plain.make(), **study_settings), **run_settings)
    fedavg = fedavg_run(frozenset(study_settings.items()), frozenset(run_settings.items()))
    assert finished.finished.model_sha256 == fedavg.finished.model_sha256
    assert same_arrays(finished.tensors, fedavg.tensors)


def test_method_at_its_usual_settings_differs_from_fedavg(watched: Watched) -> None:
    study_settings = frozenset(settings_of(watched.name).items())
    for weighting in ("samples", "uniform"):
        settings = {"schedule": watched.schedule, "fleet": Ideal(), "rounds": 5}
        run_settings = frozenset((settings | {"weighting": weighting}).items())
        fedavg = fedavg_run(study_settings, run_settings)
        is_fedavg = watched.seen.run.finished.model_sha256 == fedavg.finished.model_sha256
        assert not is_fedavg or watched.name == "fedavg" or TABLE[watched.name].as_fedavg


# --- interruptions --------------------------------------------------------------------------------


# That checkpoints do not change a run is the next test.
def test_resumed_run_equals_an_uninterrupted_run(watched: Watched) -> None:
    checkpoint = str(watched.folder / "checkpoints" / "round-000003")
    resumed = run(watched.make(), watched.schedule, Ideal(), rounds=5, resume=checkpoint)
    agreement.check_same(watched.seen.run, resumed, "straight and resumed after round 3")


# FedProto's prototypes need a check of their own: see `FREIGHT`.
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("name", ["scaffold", "fedproto"])
def test_checkpoints_and_resuming_change_no_bit_of_a_run(name: str, schedule: Any) -> None:
    agreement.check_resumed(fresh(name), schedule)


# --- staleness ------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", [name for name, row in TABLE.items() if row.private])
def test_client_state_changes_only_if_a_job_of_the_client_is_aggregated(
    name: str,
) -> None:
    spec = study(TABLE[name].make(), model=TABLE[name].model)
    spy = Spy(spec)
    leaving = Lognormal(dropout=0.2, availability="markov", on=3.0, off=0.5)
    result = run_to_end(coordinate(spec, Buffered(5, 2), leaving, runtime=spy, rounds=7))
    jobs = {job.number: job for each in result.aggregations for job in each.dispatched}
    assert any(any(each.staleness) for each in result.aggregations) and any(
        each.lost for each in result.aggregations
    )
    left = {
        job.number: to_flat_arrays(state)
        for (job, _), state in zip(spy.sent, spy.states, strict=True)
    }
    aggregated = [job.number for each in result.aggregations for job in each.aggregated]
    assert left.keys() == set(aggregated), "nobody else trains"
    last = {jobs[number].client: number for number in aggregated}
    for client, number in last.items():
        assert same_arrays(to_flat_arrays(result.state(client)), left[number])
    latest: dict[int, int] = {}
    for job, _ in sorted(spy.sent, key=lambda each: each[0].number):
        assert job.state == latest.get(job.client, -1), (
            "a client that is sent off again starts from its own latest"
        )
        latest[job.client] = job.number


class Failing(Method):
    """A method that fails for one client from its second job on."""

    name = "failing"
    paper = "a test"

    def begin(self, job: LocalJob) -> None:
        if job.client == 1 and job.participation:
            raise RuntimeError("on purpose")


@pytest.mark.parametrize(
    "name", ["fedavg", "scaffold", "fedbr", "fedbss", "fraug", "fedpac", "fedcm", "fedcda", "moon"]
)
def test_virtual_time_does_not_depend_on_training(name: str) -> None:
    whole, failing = (
        run(study(*made(name), *more), BUFFER, rounds=6, tolerate=1.0) for more in ([], [Failing()])
    )
    assert failing.failures and not whole.failures
    for row, other in zip(whole.rows, failing.rows, strict=True):
        assert all(
            row[key] == other[key] for key in ("virtual_seconds", "floats_down", "floats_up")
        )


# --- what travels -------------------------------------------------------------------------------


def test_messages_contain_only_declared_values(watched: Watched) -> None:
    name, seen = watched.name, watched.seen
    row = TABLE.get(name.partition(" ")[0], Row(FedProx))  # FedAvg keeps and uploads nothing
    assert seen.uploads == {*row.uploads}
    assert bool(seen.personal) == row.personal
    assert bool(seen.secrets) == row.private, "otherwise this test sees nothing"
    assert {*seen.spy.constants} == SENT_ONCE.get(name, set())
    assert any(seen.spy.contributed) == row.contributes


def test_constant_pseudo_data_of_fedbr_are_sent_only_once_to_each_client() -> None:
    spied = study(small_fedbr(pseudo_refresh="once"))
    spy = Spy(spied)
    result = run_to_end(coordinate(spied, runtime=spy, rounds=5))
    size = int(np.prod(spied.task.shape)) * 4
    clients, jobs = {job.client for job, _ in spy.sent}, len(spy.sent)
    assert len(clients) < jobs
    assert (
        result.rows[-1]["floats_down"]
        == jobs * result.coordinator.layout.shared + len(clients) * size
    )
    assert spy.constants["fedbr.pseudo"].size == size
    assert not any("fedbr.pseudo" in published.extras for _, published in spy.sent)


# --- composition ----------------------------------------------------------------------------------


@functools.cache
def declared(name: str) -> MethodDeclaration:
    """Return what a method declares in a run; `name` is its name in `TABLE`."""
    return declare_run(study(TABLE[name].make(), model=TABLE[name].model)).methods[0]


def check_list(names: Sequence[str]) -> None:
    """Raise ValueError for methods that do not fit together."""
    methods = [TABLE[name].make() for name in names]
    check_names(methods)
    check_together([declared(name) for name in names])
    if "dp_fedavg" in names:  # it looks at what the others declare
        declare_run(study(*methods))


@functools.cache
def clash(first: str, second: str) -> bool:
    """Return True if a run cannot have both methods; the arguments are names in `TABLE`."""
    try:
        check_list([first, second])
    except ValueError:
        return True
    return False


@pytest.mark.parametrize("first", list(TABLE)[:-1])
def test_error_of_excluded_pair_mentions_both_methods(first: str) -> None:
    names = list(TABLE)
    for second in names[names.index(first) + 1 :]:
        if clash(first, second):
            both = f"method '{first}' .*method '{second}'|method '{second}' .*method '{first}'"
            with pytest.raises(ValueError, match=both):
                check_list([first, second])


# Methods of which a list may hold one.
ALTERNATIVES = [
    [
        "fedavgm",
        "fedadagrad",
        "fedadam",
        "fedyogi",
        "fedexp",
        "fadas",
        "feddyn",
        "flexlora",
        "flora",
        "delayed_nesterov",
        "streaming_diloco",
    ],  # the server's step
    # FedCDA sets the model itself.
    *(
        ["fedcda", name]
        for name in (
            *("fedavgm", "fedadagrad", "fedadam", "fedyogi", "fedexp", "fadas"),
            *("delayed_nesterov", "streaming_diloco"),
        )
    ),
    *(["fedcda", name] for name in ("fedbuff", "groupdro", "inco")),
    *(
        ["feddyn", name] for name in ("fedcda", "fedasync", "ca2fl", "ace")
    ),  # the mean of one round's updates
    [
        "fedbr",
        "dann",
        "fedpac",
        "fraug",
        "fedsr",
        "fedrep",
        "fedbabu",
        "apfl",
    ],  # the stages of a step
    ["fedsam", "fedspeed", "pfedme"],  # the points at which gradients are taken
    # One extractor, or one model to be drawn to, for all.
    *([first, second] for first in ("local", "fedproto") for second in ("fedpac", "ditto")),
    ["local", "apfl"],
    *(
        ["mixup", name] for name in ("fedmix", "fraug", "fedproto")
    ),  # soft labels and a need for integer ones
    [
        *("apfl", "ditto", "fedala", "fedpac", "fedproto", "partialfed", "pfedavg"),
        "pfedme",
    ],  # the model that a client is scored with
    ["moon", "vhl", "fedrs", "fedsr"],  # the model
    ["fedproto", "fedrs"],  # a head with a bias and one without
    LORA_METHODS,  # the factors of adapters
    # New factors in each step, and frozen weights that change.
    *([first, second] for first in ("flexlora", "flora") for second in KEEPERS),
    *(
        pair
        for name in ("flexlora", "hetlora", "flora")
        for pair in ([name, "local"], [name, "fedproto"])
    ),
    ["flora", "partialfed"],  # models on clients
    ["hetlora", "fedcm"],  # a direction of ranks that a client does not have
    # A job sends a part of the parameters, and these use all of them.
    *(["streaming_diloco", name] for name in WHOLE_MODEL_METHODS),
    # The combination of updates.
    [
        *("fedcda", "fedld_principal", "fedgh", "fedgh_hierarchical", "fedasync", "ca2fl", "ace"),
        *(
            "coordinate_median",
            "trimmed_mean",
            "krum",
            "geometric_median",
            "norm_clipping",
            "dp_fedavg",
        ),
        *("fednova", "flexlora", "flora"),
    ],
    # FedAsync mixes single models; CA2FL and ACE count all clients alike, and most of a step is not
    # of its arrivals.
    *(
        ["fedasync", name]
        for name in (
            *("fedavgm", "fedadagrad", "fedadam", "fedyogi", "fadas", "inco"),
            *("delayed_nesterov", "streaming_diloco"),
        )
    ),
    *(
        [first, second]
        for first in ("fedasync", "ca2fl", "ace")
        for second in ("fedexp", "fedbuff", "groupdro")
    ),
    *(
        ["qfedavg", name] for name in ("fedbuff", "fedasync", "fedcda", "ca2fl", "ace")
    ),  # the divisor
    *(["afl", name] for name in ("fedasync", "fedcda", "ca2fl", "ace")),  # weights of clients
    *(
        ["dp_fedavg", name] for name in ("fedexp", "centralized")
    ),  # single updates, and nobody to hide among
    # They send or read more than clipped updates; FRAug's generator shares statistics of BatchNorm.
    *(
        ["dp_fedavg", name]
        for name in ("scaffold", "fedcm", "groupdro", "inco", "fedbuff", "hetlora")
    ),
    *(["dp_fedavg", name] for name in ("fedbr", "fedmix", "fedpac", "fraug")),
    *(["dp_fedavg", name] for name in ("qfedavg", "afl", "fedproto", "pfedme")),
    ["fedlc", "fedrs", "fedmix", "fraug", "fedld_damped"],  # the logits of the loss, or all of it
    # One model for all.
    *(
        ["centralized", name]
        for name in (
            *(
                "fedbn",
                "local",
                "partialfed",
                "pfedavg",
                "fedpac",
                "fraug",
                "fedsr",
                "ditto",
                "fedrep",
            ),
            *("fedproto", "pfedme", "fedala", "fedbabu", "apfl", "fedsa_lora"),
        )
    ),
]
EXCLUDED = {frozenset(pair) for group in ALTERNATIVES for pair in pairs(group)}
# `test_only_listed_pairs_of_methods_exclude_each_other` checks this list. Asking raysim for each
# pair here would take seconds in every process that collects tests.
COMPATIBLE = {frozenset(pair) for pair in pairs(list(TABLE))} - EXCLUDED


def covering(
    names: Sequence[str], allowed: set[frozenset[str]], least: int = 3, most: int = 8
) -> list[list[str]]:
    """Return lists of `least` to `most` names, in which each allowed pair occurs at least once.

    The same arguments always give the same lists.
    names: all names.
    allowed: the pairs of names that may be in one list.
    """
    missing, found = set(allowed), list[list[str]]()
    while missing:
        # A list begins with a missing pair, and gets the names with the most missing pairs.
        chosen = list(next(pair for pair in pairs(names) if frozenset(pair) in missing))
        while len(chosen) < most:
            fits = [new for new in names if all(frozenset((old, new)) in allowed for old in chosen)]
            gains = {new: sum(frozenset((old, new)) in missing for old in chosen) for new in fits}
            best = max(fits, key=gains.__getitem__, default=None)
            if best is None or (gains[best] == 0 and len(chosen) >= least):
                break
            chosen.append(best)
        missing -= {frozenset(pair) for pair in pairs(chosen)}
        found.append(sorted(chosen, key=names.index))
    return found


COVERING = covering(list(TABLE), COMPATIBLE)


def lists_with_each_method(most: int = 8) -> list[list[str]]:
    """Return the names of all methods of `TABLE`, divided into lists of compatible methods.

    All methods of a list have the same value of `Row.private`.
    most: the largest number of methods in a list.
    """
    lists: list[list[str]] = []
    for name, row in TABLE.items():
        for chosen in lists:
            is_similar = TABLE[chosen[0]].private == row.private
            pairs_with_name = {frozenset((old, name)) for old in chosen}
            if is_similar and len(chosen) < most and pairs_with_name <= COMPATIBLE:
                chosen.append(name)
                break
        else:
            lists.append([name])
    return lists


@pytest.mark.parametrize("names", lists_with_each_method(), ids="-".join)
def test_two_ray_workers_are_bit_identical_to_one_process(
    names: list[str], workers: Workers
) -> None:
    # A buffer moves states and stale updates between workers; without states, rounds also have
    # workers add up updates.
    schedule = BUFFER if TABLE[names[0]].private else ROUNDS
    agreement.check_workers(fresh(*names), schedule, runtime=workers.runtime(fresh(*names)(), 2))


def test_each_compatible_pair_of_methods_trains() -> None:
    assert {frozenset(pair) for names in COVERING for pair in pairs(names)} == COMPATIBLE
    assert all(3 <= len(names) <= 8 for names in COVERING)


@pytest.mark.parametrize(
    "names", [names for names in COVERING if "fedbn" not in names], ids="-".join
)
def test_compatible_methods_of_a_list_train_together(names: list[str]) -> None:
    methods = made(*names)
    finished = run(study(*methods, data=tiny_data(samples=60)), rounds=2)
    assert not finished.failures
    losses = [row["train_loss"] for row in finished.rows]
    assert all(loss is not None and math.isfinite(loss) for loss in losses)


@pytest.mark.parametrize("names", [names for names in COVERING if "fedbn" in names], ids="-".join)
def test_messages_with_fedbn_contain_no_client_state(names: list[str]) -> None:
    seen, rows = check_messages(fresh(*names), ROUNDS), [TABLE[name] for name in names]
    assert seen.uploads == {upload for row in rows for upload in row.uploads}
    assert bool(seen.personal)
    assert bool(seen.secrets)
    losses = [row["train_loss"] for row in seen.run.rows]
    assert all(loss is not None and math.isfinite(loss) for loss in losses)


def test_only_listed_pairs_of_methods_exclude_each_other() -> None:
    refused = {frozenset(each) for each in pairs(list(TABLE)) if clash(*each)}
    assert refused == EXCLUDED


def test_three_compatible_methods_train_together() -> None:
    result = run(study(FedBN(), FedProx(0.1), FedAdam()), rounds=2)
    assert not result.failures
    assert result.rows[-1]["accuracy_global"] is None, (
        "with personal parameters there is no model to score centrally"
    )


def test_same_method_twice_in_a_list_is_refused() -> None:
    with pytest.raises(ValueError, match="method 'fedprox' appears 2 times"):
        check_names([FedProx(), FedProx(0.5)])
