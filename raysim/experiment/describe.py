"""What a run says of itself: the overview before it starts, and what its bits depend on."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from raysim.api.composition import HOOKS
from raysim.api.declarations import Local
from raysim.api.declare import Declarations
from raysim.api.method import Method
from raysim.data.federated import FederatedData
from raysim.data.heterogeneity import format_heterogeneity
from raysim.data.split_statistics import statistics
from raysim.experiment.settings import Experiment
from raysim.primitives.version import __version__
from raysim.simulation.best_model import best_criterion
from raysim.simulation.forecast import CLIENTS_PER_BUSY_WORKER, forecast
from raysim.simulation.load import make_planner
from raysim.training.run_spec import declare_run, evaluation_of
from raysim.vectors.layout import Layout

LISTED_USERS = 1000  # more of them are in clients.parquet alone
LIBRARIES = ("torch", "numpy", "ray", "pyarrow", "mlflow")


def overview(experiment: Experiment, folder: Path) -> str:
    """A few lines: methods, model, data, clients, schedule, workers, BatchNorm's policy, device, folder.

    Raises ValueError where the fleet lets no run begin.
    """
    spec, settings, choices = (
        experiment.spec,
        experiment.spec.settings,
        experiment.config["choices"],
    )
    declarations = declare_run(spec)
    networks, layout = declarations.networks, declarations.layout
    numbers: Any = statistics(spec.data)
    sizes = numbers["sizes"]
    tests = spec.data.partition.test.counts
    runtime = experiment.execution.runtime
    workers = (
        "in this process"
        if runtime.name == "inprocess"
        else f"{runtime.workers or 'as many workers as fit'} ({runtime.name})"
    )
    stays = f", {layout.personal:,} of them personal" if layout.personal else ""
    tokens = "" if spec.task.tokens is None else ", token numbers"
    lines = {
        "methods": ", ".join(f"{m!r} [{', '.join(hook_names(type(m)))}]" for m in spec.methods)
        or "fedavg",
        "model": f"{choices['model']}: {_parameters(networks)}; {layout.total:,} floats{stays}",
        "data": f"{spec.data.title}; inputs of shape {list(spec.task.shape)}{tokens}",
        "columns": spec.data.open().columns,
        "clients": f"{numbers['clients']} with {_span(sizes['min'], sizes['max'], 'training samples')}, "
        f"{numbers['empty_clients']} without; {_span(tests.min(), tests.max(), 'test samples of their own')}; "
        f"{numbers['central_test']} central test samples",
        "split": format_heterogeneity(numbers["heterogeneity"])
        if numbers["counts"].shape[1] > 1
        else "",  # only classes differ
        "unseen": _unseen(numbers),
        "attackers": _attackers(experiment),
        "rounds": f"{_several(settings.rounds, 'round')} of {experiment.schedule!r}, {settings.weighting} weights; "
        f"{_local(settings.local)}",
        "settings": "; ".join(experiment.changes),
        "schedule": _schedule(experiment, declarations),
        "init": _init(experiment, networks, layout),
        "best": _best(experiment),
        "BatchNorm": _batchnorm(
            networks, {entry.name for entry in layout.entries if entry.personal}
        ),
        "extra": "; ".join(_extra(experiment, declarations)),
        "workers": f"{workers}, {_several(spec.threads, 'thread')} each, device {spec.device}, "
        + (
            "one client at a time"
            if spec.lanes == 1
            else f"{spec.lanes} clients at once (runtime.lanes)"
        )
        + (", steps recorded and replayed (runtime.graph)" if spec.graph else "")
        + (
            f", products in {spec.precision} (runtime.precision)"
            if spec.precision != "float32"
            else ""
        ),
        "folder": str(folder),
    }
    return "\n".join(f"{key:<10}{text}" for key, text in lines.items() if text)


def split_facts(data: FederatedData) -> dict[str, object]:
    """What summary.json says of the split."""
    numbers: Any = statistics(data)
    sizes = {
        key: numbers[key]
        for key in ("clients", "empty_clients", "samples", "sizes", "pooled_entropy")
    }
    users = {}
    if data.users is not None and len(data.users) <= LISTED_USERS:
        users = {"users": data.users.to_pylist()}  # by the number of the client
    unseen = {"unseen_clients": numbers["unseen_clients"]} if numbers["unseen_clients"] else {}
    return {**sizes, **unseen, **numbers["heterogeneity"], **users}


def _schedule(experiment: Experiment, declarations: Declarations) -> str:
    """What schedule and fleet make of the run, by its first steps; "" where one client has everything."""
    schedule, spec, runtime = experiment.schedule, experiment.spec, experiment.execution.runtime
    most = schedule.concurrency
    if most < 2:
        return ""
    workers = runtime.workers or 1
    seen = forecast(
        make_planner(spec, declarations, schedule, experiment.fleet), spec.settings.rounds, workers
    )
    texts = [
        f"about {seen.at_work:.1f} of {most} clients at work, an aggregation every {seen.seconds:.3g} s of virtual time"
    ]
    if seen.staleness:
        texts.append(f"staleness {seen.staleness:.1f} in the mean")
    texts += [
        f"{share:.0%} of the jobs {fate}"
        for share, fate in ((seen.lost, "lost"), (seen.discarded, "discarded"))
        if share
    ]
    if runtime.name != "inprocess":
        expected = f"{_several(workers, 'worker')} busy for {seen.workers_busy:.0%} of the time"
        texts.append(
            expected
            if runtime.workers
            else f"enough for {_several(max(1, most // CLIENTS_PER_BUSY_WORKER), 'busy worker')}"
        )
    return "; ".join(texts)


def _init(experiment: Experiment, networks: Mapping[str, nn.Module], layout: Layout) -> str:
    """Which weights the run starts from; "" where all are drawn."""
    init, weights = experiment.spec.settings.init, experiment.spec.weights
    if weights is None:
        return ""
    personal = {entry.name for entry in (*layout.entries, *layout.counters) if entry.personal}
    drawn = weights.drawn(networks, personal)
    rest = "all tensors"
    if drawn:
        rest = f"all tensors but {', '.join(drawn[:3])}{f' and {len(drawn) - 3} more' if len(drawn) > 3 else ''}"
    return f"{rest} from {init.file} (sha256 {init.sha256:.12})"


def _best(experiment: Experiment) -> str:
    """What the model of the best round is chosen by."""
    column = best_criterion(experiment.spec).column
    why = (
        ", as the split has no validation samples (partition.validation_fraction)"
        if column == "train_loss"
        else ""
    )
    return f"best.safetensors keeps the model of the round with the best {column}{why}"


def _unseen(numbers: Mapping[str, Any]) -> str:
    """How many clients are never trained; "" where all may be."""
    count = numbers["unseen_clients"]
    return (
        f"{count} of {numbers['clients']} clients are never trained, and scored (evaluate.unseen)"
        if count
        else ""
    )


def _attackers(experiment: Experiment) -> str:
    """How many clients attack, and how; "" where none does."""
    attackers, counts = experiment.spec.attackers, experiment.spec.data.partition.train.counts
    how = attackers.attack.kind
    return (
        ""
        if how == "none"
        else f"{len(attackers.clients)} of {_several(len(counts), 'client')}: {how}"
    )


def _extra(experiment: Experiment, declarations: Declarations) -> list[str]:
    """Evaluation that costs more than scoring, and how much."""
    evaluation, texts = evaluation_of(experiment.spec, declarations), []
    if epochs := evaluation.finetune.epochs:
        when = (
            "after the last round"
            if evaluation.finetune.last
            else f"every {evaluation.every} rounds"
        )
        texts.append(f"fine-tuning of {evaluation.clients} clients for {epochs} epochs {when}")
    if evaluation.decompose:
        m, counts = experiment.schedule.concurrency, experiment.spec.data.partition.train.counts
        each = np.minimum(counts[counts > 0], evaluation.decompose_rows).mean()
        texts.append(
            f"loss decomposition every {evaluation.decompose} rounds: {m} x {m} + {m} evaluations, "
            f"{(m + 1) * m * each:,.0f} forward passes"
        )
    return texts


def hook_names(cls: type[Method]) -> list[str]:
    """The slots that a method fills; its checks of the settings are none."""
    return [
        hook
        for hook in HOOKS
        if hook != "settings" and getattr(cls, hook) is not getattr(Method, hook)
    ]


def _parameters(networks: Mapping[str, nn.Module]) -> str:
    counts = {
        name: sum(p.numel() for p in network.parameters()) for name, network in networks.items()
    }
    more = "".join(f", {count:,} in {name}" for name, count in counts.items() if name != "model")
    return f"{counts['model']:,} parameters{more}"


def _local(local: Local) -> str:
    amount = _several(local.epochs, "epoch") if local.epochs else _several(local.steps or 0, "step")
    return f"{amount} of batch {local.batch}, {local.optimizer} lr {local.lr:g}"


def _several(count: int, thing: str) -> str:
    return f"{count} {thing}{'s' if count != 1 else ''}"


def _span(low: int, high: int, things: str) -> str:
    """What each of some clients has, between the least and the most."""
    return f"{low} {things} each" if low == high else f"{low} to {high} {things}"


def _batchnorm(networks: Mapping[str, nn.Module], personal: set[str]) -> str:
    """What happens to the running statistics and the weights of BatchNorm; "" without such layers."""
    networks_by_text: dict[str, list[str]] = {}  # networks by what happens there
    for network, module in networks.items():
        kinds: dict[str, list[str]] = {"parameters": [], "statistics": []}
        for path, layer in module.named_modules():
            if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                kinds["parameters"] += [
                    f"{network}.{path}.{name}" for name, _ in layer.named_parameters()
                ]
                kinds["statistics"] += [
                    f"{network}.{path}.{name}"
                    for name, b in layer.named_buffers()
                    if b.is_floating_point()
                ]
        text = ", ".join(
            f"{kind} {'personal' if set(names) <= personal else 'shared'}"
            for kind, names in kinds.items()
            if names
        )
        if text:
            networks_by_text.setdefault(text, []).append(network)
    if len(networks_by_text) == 1:
        return next(iter(networks_by_text))
    return "; ".join(f"{', '.join(names)}: {text}" for text, names in networks_by_text.items())


def identity(experiment: Experiment) -> dict[str, object]:
    """What the bits of a run depend on besides its methods and data."""
    spec = experiment.spec
    device = spec.device
    return {
        "device": torch.cuda.get_device_name(device)
        if device.startswith("cuda") and torch.cuda.is_available()
        else device,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
        "threads": spec.threads,
        "lanes": spec.lanes,
        "graph": spec.graph,
        "precision": spec.precision,
        "seed": spec.settings.seed,
        "summation": spec.settings.summation,
        **({"init_sha256": spec.settings.init.sha256} if spec.settings.init.file else {}),
        "python": platform.python_version(),
        # A folder that was sent to a cluster is installed nowhere: raysim's own version is in its code.
        "libraries": {"raysim": __version__}
        | {name: found for name in LIBRARIES if (found := _version(name))},
    }


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
