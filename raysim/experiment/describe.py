"""Describe a run: overview texts, the partition's statistics, and what the run's bits depend on.

The hardware, the library versions and some settings decide the bits of a run's results.
"""

from __future__ import annotations

import functools
import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from raysim.api.composition import HOOKS, fills
from raysim.api.declarations import Local
from raysim.api.declare import Declarations
from raysim.api.method import Method
from raysim.api.selection import Random, Selection
from raysim.api.setup import MethodDeclaration, always, number_of_floats
from raysim.data.federated import FederatedData
from raysim.data.heterogeneity import format_heterogeneity
from raysim.data.split_statistics import statistics
from raysim.experiment.settings import Experiment
from raysim.primitives.version import __version__
from raysim.results.number_format import format_amount
from raysim.simulation.best_model import best_criterion
from raysim.simulation.forecast import CLIENTS_PER_BUSY_WORKER, forecast
from raysim.simulation.load import make_planner
from raysim.simulation.network import describe_network
from raysim.training.run_spec import RunSpec, declare_as_drawn, evaluation_of
from raysim.vectors.layout import Layout

# More users than these are listed only in clients.parquet.
MAX_LISTED_USERS = 1000
# Libraries whose versions a run stores.
LIBRARIES = ("torch", "numpy", "ray", "pyarrow", "mlflow")


# --- the overview ---------------------------------------------------------------------------------
def overview(experiment: Experiment, folder: Path) -> str:
    """Describe a run in a few lines: methods, model, data, clients, schedule, workers, folder.

    Raise `ValueError` if the schedule cannot run with the fleet, and `RunStoppedError` if no
    aggregation can be planned.
    """
    spec, settings = experiment.spec, experiment.spec.settings
    declarations = declare_as_drawn(spec)
    networks, layout = declarations.networks, declarations.layout
    numbers: Any = statistics(spec.data)
    personal = {entry.name for entry in layout.entries if entry.personal}
    lines = {
        "methods": _methods(spec.methods),
        "model": _model(experiment, declarations),
        "data": _data(spec),
        "columns": spec.data.open().columns,
        "clients": _clients(spec.data, numbers),
        "split": _split(numbers),
        "unseen": _unseen(numbers),
        "attackers": _attackers(experiment),
        "rounds": f"{format_amount(settings.rounds, 'round')} of {experiment.schedule!r}, "
        f"weighting={settings.weighting}; {_local(settings.local, declarations)}",
        "settings": "; ".join(experiment.changes),
        "schedule": _schedule(experiment, declarations),
        "selection": _selection(spec.selection),
        "topology": describe_network(experiment.network),
        "init": _init(experiment, networks, layout),
        "best": _best(experiment, declarations),
        "BatchNorm": _batchnorm(networks, personal),
        "extra": "; ".join(_extra_evaluation(experiment, declarations)),
        "workers": _workers(experiment),
        "sums": _sums(experiment, declarations),
        "folder": str(folder),
    }
    return "\n".join(f"{key:<10}{text}" for key, text in lines.items() if text)


def _methods(methods: Sequence[Method]) -> str:
    texts = []
    for method in methods:
        hooks = [name for name in hook_names(type(method)) if name != "setup"]
        texts.append(f"{method!r} (hooks: {', '.join(hooks)})" if hooks else repr(method))
    return ", ".join(texts) or "fedavg"


def hook_names(cls: type[Method]) -> list[str]:
    """Return the names of the hooks that a method's class overrides.

    The hook `settings` is left out.
    """
    names = [hook for hook in HOOKS if hook != "settings"]
    return [hook for hook in names if getattr(cls, hook) is not getattr(Method, hook)]


def _model(experiment: Experiment, declarations: Declarations) -> str:
    networks, layout = declarations.networks, declarations.layout
    option = experiment.config["choices"]["model"]
    for method in experiment.spec.methods:
        if fills(method, "model"):  # the run's own model is not used
            option = method.name
    for declared in declarations.methods:
        if not declared.has_parameters:
            sent = sum(number_of_floats(send.floats, layout) for send in declared.sends)
            planned = sum(number_of_floats(size, layout) for size in declared.uploads.values())
            return (
                f"{option}: bytes; at first, a client receives {sent:,} floats and is expected to "
                f"send {planned:,}"
            )
    travels = f"{layout.shared:,} floats travel in each direction"
    if declarations.compressor is not None:
        travels = f"a client sends {declarations.floats_up:,} of {layout.shared:,} floats"
        if declarations.step_words is not None:
            travels += f", a version is a message of {declarations.step_words:,}"
    if any(declared.omissions for declared in declarations.methods):
        travels = f"a version has {layout.shared:,} floats, of which clients exchange a part"
    personal = f", {layout.personal:,} stay with the client" if layout.personal else ""
    texts = [f"{option}: {_parameters(networks)}", f"{travels}{personal}"]
    texts += [_extra_traffic(declared, layout) for declared in declarations.methods]
    return "; ".join(text for text in texts if text)


def _extra_traffic(declared: MethodDeclaration, layout: Layout) -> str:
    """Describe the floats that a method sends in addition to the model; "" if there are none.

    declared: what the method declared in `setup`.
    layout: the positions of all tensors, on which the number of floats may depend.
    """
    down = sum(number_of_floats(send.floats, layout) for send in declared.sends)
    up = sum(number_of_floats(floats, layout) for floats in declared.uploads.values())
    if not down and not up:
        return ""
    sizes_vary = bool(declared.planned_uploads) or any(send.varies for send in declared.sends)
    is_in_all_jobs = all(send.when is always and send.to != "once" for send in declared.sends)
    limit = ""
    if sizes_vary:
        limit = "at first "
    elif not is_in_all_jobs:
        limit = "at most "
    return f"'{declared.method}' adds {limit}{down:,} floats to clients and {up:,} to the server"


def _parameters(networks: Mapping[str, nn.Module]) -> str:
    counts = {
        name: sum(parameter.numel() for parameter in network.parameters())
        for name, network in networks.items()
    }
    texts = [f"{count:,} in {name}" for name, count in counts.items() if name != "model"]
    return ", ".join([f"{counts['model']:,} parameters", *texts])


def _data(spec: RunSpec) -> str:
    tokens = "" if spec.task.tokens is None else ", token numbers"
    return f"{spec.data.title}; inputs of shape {list(spec.task.shape)}{tokens}"


def _clients(data: FederatedData, numbers: Mapping[str, Any]) -> str:
    sizes, tests = numbers["sizes"], data.partition.test.counts
    training_samples = _span(sizes["min"], sizes["max"], "training samples")
    test_samples = _span(tests.min(), tests.max(), "test samples of their own")
    return (
        f"{numbers['clients']} with {training_samples}, {numbers['empty_clients']} without; "
        f"{test_samples}; {numbers['central_test']} central test samples"
    )


def _split(numbers: Mapping[str, Any]) -> str:
    has_classes = numbers["counts"].shape[1] > 1
    return format_heterogeneity(numbers["heterogeneity"]) if has_classes else ""


def _unseen(numbers: Mapping[str, Any]) -> str:
    count, clients = numbers["unseen_clients"], numbers["clients"]
    if not count:
        return ""
    return f"{count} of {clients} clients are never trained, and scored (evaluate.unseen)"


def _attackers(experiment: Experiment) -> str:
    attackers, counts = experiment.spec.attackers, experiment.spec.data.partition.train.counts
    kind = attackers.attack.kind
    if kind == "none":
        return ""
    return f"{len(attackers.clients)} of {format_amount(len(counts), 'client')}: {kind}"


def _local(local: Local, declarations: Declarations) -> str:
    amount = (
        format_amount(local.epochs, "epoch")
        if local.epochs
        else format_amount(local.steps or 0, "step")
    )
    owner = declarations.declarer("train")
    if owner is not None and not owner.has_gradients:
        return f"training by '{owner.method}', which takes {amount} on virtual time"
    rate = f"lr {local.lr:g}"
    if local.warmup_rounds:
        rate += f" after a warm-up of {format_amount(local.warmup_rounds, 'round')}"
    if local.warmup_steps:
        rate += f" after {format_amount(local.warmup_steps, 'step')} of warm-up in each job"
    unit, end = "round", f"in round {local.schedule_rounds}"
    if local.schedule_over == "steps":
        unit, end = "step", "at the end of each job"
    if local.schedule in ("cosine", "linear"):
        rate += f", {local.schedule} to {local.final_lr:g} {end}"
    if local.schedule == "step":
        rate += f", times {local.drop_factor:g} every {format_amount(local.drop_every or 0, unit)}"
    rates = [f"{name} times {factor:g}" for name, factor in local.rates.items()]
    if rates:
        rate += f"; {', '.join(rates)}"
    return f"{amount} of batch {local.batch}, {local.optimizer} {rate}"


def _schedule(experiment: Experiment, declarations: Declarations) -> str:
    """Describe a forecast of the run on the virtual clock, such as its expected staleness.

    Return "" if at most one client trains at the same time.
    """
    schedule, spec, runtime = experiment.schedule, experiment.spec, experiment.execution.runtime
    concurrency = schedule.concurrency
    if concurrency < 2:
        return ""
    workers = runtime.workers or 1
    network = experiment.network
    planner = make_planner(spec, declarations, schedule, experiment.fleet, network)
    if network.own_schedules:
        concurrency *= network.replicas
    expected = forecast(planner, spec.settings.rounds, workers)
    texts = [
        f"about {expected.in_flight:.1f} of {concurrency} clients train at a time, "
        f"an aggregation every {expected.seconds:.3g} s of virtual time"
    ]
    if expected.staleness:
        texts.append(f"mean staleness {expected.staleness:.1f} aggregations")
    for share, fate in ((expected.lost, "lost"), (expected.discarded, "discarded")):
        if share:
            texts.append(f"{share:.0%} of the jobs {fate}")
    if runtime.name == "inprocess":
        return "; ".join(texts)
    if runtime.workers:
        busy = f"{expected.workers_busy:.0%}"
        texts.append(f"{format_amount(workers, 'worker')} busy for {busy} of the time")
        if experiment.late_planning:
            condition = "the selection needed no reports"
            if spec.selection.plans_ahead:
                condition = "messages did not change in size"
            texts[-1] += f", and for {expected.workers_busy_ahead:.0%} if {condition}"
    else:
        busy_workers = max(1, concurrency // CLIENTS_PER_BUSY_WORKER)
        texts.append(f"enough to keep {format_amount(busy_workers, 'worker')} busy")
    return "; ".join(texts)


def _selection(selection: Selection) -> str:
    """Name the selection, and say whether aggregations are planned ahead of the training.

    Return "" for a random selection.
    """
    if type(selection) is Random:
        return ""
    ahead = "planned ahead of the training"
    if not selection.plans_ahead:
        needs = "needs what clients report" if selection.reports else "measures losses"
        ahead = f"{needs}, so one aggregation is planned at a time"
    return f"{selection!r}; {ahead}"


def _init(experiment: Experiment, networks: Mapping[str, nn.Module], layout: Layout) -> str:
    """Describe the file of initial weights; name the tensors that are not in it.

    Return "" if the run does not use such a file.

    networks: the run's networks, by name.
    layout: the tensors of the networks.
    """
    init, weights = experiment.spec.settings.init, experiment.spec.weights
    if weights is None:
        return ""
    personal = {entry.name for entry in (*layout.entries, *layout.counters) if entry.personal}
    drawn = weights.drawn(networks, personal)
    tensors = "all tensors"
    if drawn:
        tensors += f" but {', '.join(drawn[:3])}"
    if len(drawn) > 3:
        tensors += f" and {len(drawn) - 3} more"
    return f"{tensors} from {init.file} (sha256 {init.sha256:.12})"


def _best(experiment: Experiment, declarations: Declarations) -> str:
    column = best_criterion(experiment.spec).column
    text = f"best.safetensors keeps the model of the round with the best {column}"
    if column == "train_loss":
        text += ", as the split has no validation samples (partition.validation_fraction)"
        owner = declarations.declarer("train")
        if owner is not None:
            text += f"; there is no such file if '{owner.method}' reports no loss"
    return text


def _batchnorm(networks: Mapping[str, nn.Module], personal: set[str]) -> str:
    """Describe which parts of BatchNorm are personal; "" if the run has no BatchNorm.

    networks: the run's networks, by name.
    personal: names of the personal tensors.
    """
    networks_by_text: dict[str, list[str]] = {}
    for network, module in networks.items():
        parameters, statistics = _batchnorm_names(network, module)
        texts = []
        for kind, names in (("parameters", parameters), ("statistics", statistics)):
            if names:
                texts.append(f"{kind} {'personal' if set(names) <= personal else 'shared'}")
        if texts:
            networks_by_text.setdefault(", ".join(texts), []).append(network)
    if len(networks_by_text) == 1:
        return next(iter(networks_by_text))
    return "; ".join(f"{', '.join(names)}: {text}" for text, names in networks_by_text.items())


def _batchnorm_names(network: str, module: nn.Module) -> tuple[list[str], list[str]]:
    """Return the names of the parameters in BatchNorm layers, and of their running statistics.

    network: the name of the network, which becomes the first part of all returned names.
    module: the network.
    """
    parameters, statistics = [], []
    for path, layer in module.named_modules():
        if not isinstance(layer, nn.modules.batchnorm._BatchNorm):
            continue
        parameters += [f"{network}.{path}.{name}" for name, _ in layer.named_parameters()]
        for name, buffer in layer.named_buffers():
            if buffer.is_floating_point():
                statistics.append(f"{network}.{path}.{name}")
    return parameters, statistics


def _extra_evaluation(experiment: Experiment, declarations: Declarations) -> list[str]:
    """Describe the cost of each extra evaluation that is switched on, one text for each.

    Such an evaluation is the fine-tuning before scores, or the loss decomposition.
    """
    evaluation = evaluation_of(experiment.spec, declarations)
    texts = []
    finetune = evaluation.finetune
    if finetune.epochs:
        when = "after the last round" if finetune.last else f"every {evaluation.every} rounds"
        texts.append(
            f"fine-tuning of {evaluation.clients} clients for {finetune.epochs} epochs {when}"
        )
    if evaluation.decompose:
        m, counts = experiment.schedule.size, experiment.spec.data.partition.train.counts
        rows = np.minimum(counts[counts > 0], evaluation.decompose_rows).mean()
        texts.append(
            f"loss decomposition every {evaluation.decompose} rounds: {m} x {m} + {m} evaluations, "
            f"{(m + 1) * m * rows:,.0f} forward passes"
        )
    return texts


def _workers(experiment: Experiment) -> str:
    spec, runtime = experiment.spec, experiment.execution.runtime
    workers = f"{runtime.workers or 'as many workers as fit'} ({runtime.name})"
    if runtime.name == "inprocess":
        workers = "in this process"
    lanes = "one client at a time"
    if spec.lanes > 1:
        lanes = f"{spec.lanes} clients at once (runtime.lanes)"
    texts = [
        f"{workers}, {format_amount(spec.threads, 'thread')} each",
        f"device {spec.device}",
        lanes,
    ]
    if spec.graph:
        texts.append("steps recorded and replayed (runtime.graph)")
    if spec.precision != "float32":
        texts.append(f"products in {spec.precision} (runtime.precision)")
    return ", ".join(texts)


def _sums(experiment: Experiment, declarations: Declarations) -> str:
    """Return the reason for sending every update separately; "" if workers send sums of updates.

    With `runtime=inprocess` nothing is sent, so the result is "".
    """
    uses = declarations.uses_of_single_updates
    if experiment.network.moves_clients:
        uses.append("the topology moves clients by them")
    if experiment.execution.runtime.name == "inprocess" or not uses:
        return ""
    return f"every update is sent by itself, because {', and '.join(uses)}"


def _span(low: int, high: int, things: str) -> str:
    return f"{low} {things} each" if low == high else f"{low} to {high} {things}"


# --- facts for files ------------------------------------------------------------------------------
def split_facts(data: FederatedData) -> dict[str, object]:
    """Return the facts about the clients' data that summary.json stores, by name."""
    numbers: Any = statistics(data)
    keys = ["clients", "empty_clients", "samples", "sizes", "pooled_entropy"]
    facts = {key: numbers[key] for key in keys}
    if numbers["unseen_clients"]:
        facts["unseen_clients"] = numbers["unseen_clients"]
    facts |= numbers["heterogeneity"]
    if data.users is not None and len(data.users) <= MAX_LISTED_USERS:
        facts["users"] = data.users.to_pylist()  # by the number of the client
    return facts


def identity(experiment: Experiment) -> dict[str, object]:
    """Return the facts on which the bits of a run depend, by name; leave out methods and data.

    These are the hardware, the versions of libraries, the seed and the settings of a training step.
    """
    spec = experiment.spec
    device = spec.device
    if device.startswith("cuda") and torch.cuda.is_available():
        device = torch.cuda.get_device_name(device)
    facts: dict[str, object] = {
        "device": device,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
        "processor": _processor_name(),
        "threads": spec.threads,
        "lanes": spec.lanes,
        "graph": spec.graph,
        "precision": spec.precision,
        "seed": spec.settings.seed,
    }
    if spec.settings.init.file:
        facts["init_sha256"] = spec.settings.init.sha256
    facts["python"] = platform.python_version()
    facts["libraries"] = dict(_library_versions(LIBRARIES))
    return facts


@functools.cache  # a large machine lists hundreds of processors
def _processor_name() -> str:
    """Return the processor of this machine, such as "AMD EPYC 9B14"."""
    cpus = Path("/proc/cpuinfo")
    if cpus.is_file():
        for line in cpus.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


@functools.cache  # reading the metadata of installed packages takes 20 ms
def _library_versions(libraries: tuple[str, ...]) -> dict[str, str]:
    # On a cluster, raysim may be a folder that is not installed, so its version is in its code.
    versions = {"raysim": __version__}
    for name in libraries:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
