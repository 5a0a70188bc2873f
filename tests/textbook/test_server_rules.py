"""Compare methods that change the server's rule with their textbooks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from tiny_runs import BLOCKS, NORMED_MLP

from raysim.api.declarations import Local
from raysim.data.federated import federate
from raysim.data.partition import Dirichlet
from raysim.data.sources import Synthetic
from raysim.methods.delayed_nesterov import DelayedNesterov
from raysim.methods.fedbuff import FedBuff
from raysim.methods.fedcda import FedCDA
from raysim.methods.fedexp import FedExP
from raysim.methods.fedgh import FedGH, HierarchicalFedGH
from raysim.methods.fedld import MarginControl, PrincipalGradient
from raysim.methods.fedopt import FedAdagrad, FedAdam, FedAvgM, FedYogi
from raysim.methods.fedprox import FedProx
from raysim.methods.groupdro import GroupDRO
from raysim.methods.inco import InCo
from raysim.methods.streaming_diloco import StreamingDiLoCo
from raysim.simulation.schedule import Buffered, Immediate, Synchronous
from textbook.check import LOCAL, Row, check
from textbook.diloco import delayed, diloco, streaming
from textbook.fedbuff import fedbuff, fedbuff_fedadam, fedbuff_fedexp
from textbook.fedcda import fedcda
from textbook.fedexp import fedexp
from textbook.fedgh import fedgh, hierarchical
from textbook.fedld_principal import fedld, principal
from textbook.fedopt import adaptive, fedavgm
from textbook.groupdro import groupdro
from textbook.inco import inco

NORMED = {"model": NORMED_MLP}
BY_SAMPLES, UNIFORM = {"weighting": "samples"}, {"weighting": "uniform"}
BUFFER = Buffered(concurrency=3, size=2)
LONG = {"rounds": 6}
WILD = {"local": replace(LOCAL, lr=0.5, lr_decay=1.0)}  # losses go up and down

# Of few labels each: their updates oppose each other.
SKEWED = {
    "data": federate(
        Synthetic(samples=70, test_samples=20, classes=5, mean=[0.5], std=[0.3]),
        Dirichlet(clients=4, alpha=0.1, minimum=5),
        1,
    )
}
PAIRED = {"model": BLOCKS}
MANY = {
    "data": federate(
        Synthetic(samples=90, test_samples=20, classes=5),
        Dirichlet(clients=8, alpha=0.1, minimum=5),
        1,
    )
}

FIRST, HEAD = (
    [f"model.{layer}.weight", f"model.{layer}.bias"] for layer in ("extractor.1", "head")
)

# DiLoCo's local training: AdamW that a client keeps.
INNER = Local(optimizer="adamw", lr=0.01, weight_decay=0.1, batch=8, epochs=2, keep_optimizer=True)

OPTIMISERS = {
    "fedavgm": Row(partial(fedavgm, lr=0.7, momentum=0.6), lambda: [FedAvgM(0.7, 0.6)]),
    "fedavgm with Nesterov": Row(
        partial(fedavgm, lr=0.7, momentum=0.6, nesterov=True), lambda: [FedAvgM(0.7, 0.6, True)]
    ),
    "fedadagrad": Row(
        partial(adaptive, name="fedadagrad", lr=0.1, beta1=0.0, tau=0.01),
        lambda: [FedAdagrad(0.1, tau=0.01)],
    ),
    "fedadagrad with momentum": Row(
        partial(adaptive, name="fedadagrad", lr=0.1, beta1=0.4, tau=0.01),
        lambda: [FedAdagrad(0.1, 0.4, 0.01)],
    ),
    "fedadam": Row(
        partial(adaptive, name="fedadam", lr=0.05, beta1=0.6, beta2=0.8, tau=0.01),
        lambda: [FedAdam(0.05, 0.6, 0.8, 0.01)],
    ),
    "fedadam with bias correction": Row(
        partial(
            adaptive, name="fedadam", lr=0.05, beta1=0.6, beta2=0.8, tau=0.01, bias_correction=True
        ),
        lambda: [FedAdam(0.05, 0.6, 0.8, 0.01, True)],
    ),
    "fedyogi": Row(
        partial(adaptive, name="fedyogi", lr=0.05, beta1=0.6, beta2=0.8, tau=0.01),
        lambda: [FedYogi(0.05, 0.6, 0.8, 0.01)],
    ),
    "fedyogi with bias correction": Row(
        partial(
            adaptive, name="fedyogi", lr=0.05, beta1=0.6, beta2=0.8, tau=0.01, bias_correction=True
        ),
        lambda: [FedYogi(0.05, 0.6, 0.8, 0.01, True)],
    ),
}

ROWS = (
    OPTIMISERS
    | {
        f"{name} with BatchNorm": replace(OPTIMISERS[name], study=NORMED)
        for name in ("fedavgm", "fedadagrad", "fedadam", "fedyogi")
    }
    | {
        "fedexp": Row(partial(fedexp, epsilon=1e-3), lambda: [FedExP()], SKEWED),
        "fedexp, all weights equal": Row(
            partial(fedexp, epsilon=1e-3), lambda: [FedExP()], SKEWED, UNIFORM
        ),
        "fedexp without a least factor": Row(
            partial(fedexp, epsilon=0.01, minimum=0.0), lambda: [FedExP(0.01, minimum=0.0)]
        ),
        "fedexp with the released epsilon": Row(
            partial(fedexp, epsilon=0.01, count=True, decay=0.7, minimum=0.5),
            lambda: [FedExP(0.01, "count", 0.7, 0.5)],
            SKEWED,
        ),
        "fedexp with BatchNorm": Row(
            partial(fedexp, epsilon=1e-3), lambda: [FedExP()], SKEWED | NORMED
        ),
        "diloco": Row(
            partial(diloco, lr=0.7, momentum=0.9),
            lambda: [FedAvgM(0.7, 0.9, True)],
            {"local": INNER},
            LONG,
        ),
        "asynchronous diloco": Row(
            partial(delayed, lr=0.7, momentum=0.6, every=3, c=0.0),
            lambda: [DelayedNesterov(0.7, 0.6, 3)],
            {"local": INNER},
            LONG,
            Immediate(concurrency=3),
        ),
        "asynchronous diloco with active momentum": Row(
            partial(delayed, lr=0.7, momentum=0.6, every=2, c=0.3),
            lambda: [DelayedNesterov(0.7, 0.6, 2, 0.3)],
            {"local": INNER},
            LONG,
            Immediate(concurrency=3),
        ),
        "streaming diloco, all clients in each round": Row(
            partial(streaming, lr=0.7, momentum=0.6, fragments=[FIRST, HEAD]),
            lambda: [StreamingDiLoCo(2, 0.7, 0.6)],
            {"local": INNER},
            LONG,
            Synchronous(4),
        ),
        "streaming diloco, some clients in each round": Row(
            partial(streaming, lr=0.7, momentum=0.6, fragments=[FIRST, HEAD]),
            lambda: [StreamingDiLoCo(2, 0.7, 0.6)],
            {"local": INNER},
            LONG | BY_SAMPLES,
            Synchronous(2),
        ),
        "streaming diloco, stale updates": Row(
            partial(streaming, lr=0.7, momentum=0.6, fragments=[FIRST, HEAD]),
            lambda: [StreamingDiLoCo(2, 0.7, 0.6)],
            {"local": INNER},
            LONG,
            BUFFER,
        ),
        "groupdro": Row(partial(groupdro, step_size=0.5), lambda: [GroupDRO(0.5)]),
        "groupdro with BatchNorm": Row(
            partial(groupdro, step_size=0.5), lambda: [GroupDRO(0.5)], NORMED
        ),
        "groupdro of all batches": Row(
            partial(groupdro, step_size=0.5, batches="all"), lambda: [GroupDRO(0.5, "all")]
        ),
        "groupdro from a prior by samples": Row(
            partial(groupdro, step_size=0.5, prior="samples"),
            lambda: [GroupDRO(0.5, prior="samples")],
        ),
        "groupdro besides weights by samples": Row(
            partial(groupdro, step_size=0.5), lambda: [GroupDRO(0.5)], run=BY_SAMPLES
        ),
        "groupdro with fedprox": Row(
            partial(groupdro, step_size=0.5, batches="all", mu=0.3),
            lambda: [GroupDRO(0.5, "all"), FedProx(0.3)],
        ),
        "fedbuff": Row(fedbuff, lambda: [FedBuff()], run=LONG, schedule=BUFFER),
        "fedbuff in rounds": Row(fedbuff, lambda: [FedBuff()]),
        "fedbuff with another exponent": Row(
            partial(fedbuff, exponent=1.3), lambda: [FedBuff(1.3)], run=LONG, schedule=BUFFER
        ),
        "fedbuff with BatchNorm": Row(fedbuff, lambda: [FedBuff()], NORMED, LONG, BUFFER),
        "fedbuff over the weights": Row(
            partial(fedbuff, normalization="weights"),
            lambda: [FedBuff(normalization="weights")],
            NORMED,
            LONG,
            BUFFER,
        ),
        "fedbuff over the weights by samples": Row(
            partial(fedbuff, normalization="weights"),
            lambda: [FedBuff(normalization="weights")],
            NORMED,
            LONG | BY_SAMPLES,
            BUFFER,
        ),
        "fedbuff as a sum": Row(
            partial(fedbuff, normalization="none"),
            lambda: [FedBuff(normalization="none")],
            NORMED,
            LONG,
            BUFFER,
        ),
        "fedbuff with fedadam": Row(
            partial(
                fedbuff_fedadam,
                exponent=0.5,
                lr=0.05,
                beta1=0.6,
                beta2=0.8,
                tau=0.01,
                bias_correction=True,
            ),
            lambda: [FedBuff(), FedAdam(0.05, 0.6, 0.8, 0.01, True)],
            run=LONG,
            schedule=BUFFER,
        ),
        "fedbuff with fedexp": Row(
            partial(fedbuff_fedexp, exponent=0.5, epsilon=1e-3, minimum=0.0),
            lambda: [FedBuff(), FedExP(minimum=0.0)],
            run=LONG,
            schedule=BUFFER,
        ),
    }
)

ROWS |= {
    "fedcda": Row(
        partial(fedcda, memory=3, batches=3, smoothness=1.0, warmup_rounds=1),
        lambda: [FedCDA(warmup_rounds=1)],
        run=LONG,
    ),
    "fedcda in two batches, in memory": Row(
        partial(fedcda, memory=2, batches=2, smoothness=0.1, warmup_rounds=2),
        lambda: [FedCDA(2, 2, 0.1, 2, cache="memory")],
        SKEWED,
        LONG,
    ),
    "fedcda in one batch": Row(
        partial(fedcda, memory=3, batches=1, smoothness=0.3, warmup_rounds=0),
        lambda: [FedCDA(3, 1, 0.3, 0)],
        SKEWED | WILD,
        LONG,
    ),
    "fedcda without smoothness": Row(
        partial(fedcda, memory=3, batches=2, smoothness=0.0, warmup_rounds=1),
        lambda: [FedCDA(3, 2, 0.0, 1)],
        SKEWED | WILD,
        LONG,
    ),
    "fedcda with a warm-up of everybody": Row(
        partial(fedcda, memory=3, batches=2, smoothness=1.0, warmup_rounds=3, everybody=True),
        lambda: [FedCDA(3, 2, 1.0, 3, "selected")],
        run=LONG,
    ),
    "fedcda with BatchNorm": Row(
        partial(fedcda, memory=3, batches=2, smoothness=1.0, warmup_rounds=1),
        lambda: [FedCDA(3, 2, 1.0, 1)],
        NORMED,
        LONG,
    ),
    "fedcda with a budget of steps": Row(
        partial(fedcda, memory=3, batches=2, smoothness=0.1, warmup_rounds=1),
        lambda: [FedCDA(3, 2, 0.1, 1)],
        {"local": replace(LOCAL, epochs=None, steps=23)},
        LONG,
    ),
    "fedcda with stale models": Row(
        partial(fedcda, memory=2, batches=2, smoothness=0.5, warmup_rounds=2),
        lambda: [FedCDA(2, 2, 0.5, 2)],
        NORMED | WILD,
        LONG,
        Buffered(concurrency=4, size=4),
    ),
    "inco": Row(inco, lambda: [InCo()], PAIRED),
    "inco of whole tensors": Row(partial(inco, kernels=False), lambda: [InCo("tensor")], PAIRED),
    "inco where updates conflict": Row(
        partial(inco, always=False), lambda: [InCo(align="conflict")], PAIRED
    ),
    "inco with a small clamp and no clip": Row(
        partial(inco, most=0.2, clip=float("inf")),
        lambda: [InCo(clamp_max=0.2, value_clip=None)],
        PAIRED,
    ),
    "inco with a small clip": Row(
        partial(inco, clip=0.003, eps=0.01), lambda: [InCo(value_clip=0.003, eps=0.01)], PAIRED
    ),
    "fedgh": Row(fedgh, lambda: [FedGH()], SKEWED),
    "fedgh of running updates": Row(
        partial(fedgh, conflict_test="current"),
        lambda: [FedGH(conflict_test="current")],
        SKEWED,
        schedule=Synchronous(4),
    ),
    "fedgh in a random order": Row(
        partial(fedgh, order="random"), lambda: [FedGH("random")], SKEWED, schedule=Synchronous(4)
    ),
    "fedgh of running updates by tensor": Row(
        partial(fedgh, conflict_test="current", tensor=True),
        lambda: [FedGH(conflict_test="current", granularity="tensor")],
        schedule=Synchronous(4),
    ),
    "fedgh by tensor": Row(
        partial(fedgh, tensor=True), lambda: [FedGH(granularity="tensor")], SKEWED | NORMED
    ),
    "fedgh_hierarchical": Row(hierarchical, lambda: [HierarchicalFedGH()], SKEWED),
    "fedgh_hierarchical of seven": Row(
        partial(hierarchical, eps=0.01),
        lambda: [HierarchicalFedGH(0.01)],
        MANY | NORMED,
        schedule=Synchronous(7),
    ),
    "fedgh_hierarchical of two": Row(
        hierarchical, lambda: [HierarchicalFedGH()], SKEWED, schedule=Synchronous(2)
    ),
    "fedld_principal": Row(principal, lambda: [PrincipalGradient()]),
    "fedld_principal of all components, over all eigenvalues": Row(
        partial(principal, fraction=1.0, scale="sum"),
        lambda: [PrincipalGradient(1.0, "sum")],
        NORMED,
    ),
    "fedld_principal that lengthens": Row(
        partial(principal, fraction=0.5, scale="none"),
        lambda: [PrincipalGradient(0.5, "none")],
        schedule=Synchronous(4),
    ),
    "fedld_principal by tensor": Row(
        partial(principal, tensor=True), lambda: [PrincipalGradient(granularity="tensor")], NORMED
    ),
    "fedld_principal with a large tolerance": Row(
        partial(principal, fraction=1.0, tol=0.3),
        lambda: [PrincipalGradient(1.0, tol=0.3)],
        schedule=Synchronous(4),
    ),
    "fedld": Row(partial(fedld, lam=0.2), lambda: [MarginControl(0.2), PrincipalGradient()]),
}


@pytest.mark.parametrize("name", ROWS)
def test_server_rule_equals_its_textbook_computation(name: str) -> None:
    check(ROWS[name])
