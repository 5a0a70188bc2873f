"""Choose how training steps are computed: for one client, or for several at once in lanes.

Steps can also be recorded once, on a GPU as a CUDA graph, and then be replayed (`runtime.graph`).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import nn

from raysim.api.declarations import Local
from raysim.api.declare import Declarations
from raysim.models.classifier import is_stochastic
from raysim.models.lora import find_adapters
from raysim.models.split import ExternalModel
from raysim.primitives.kinds import PackedShape
from raysim.training.batched_lanes import linear_chain, step_methods
from raysim.training.lanes import LanesError
from raysim.training.run_spec import RunSpec

# The number of lanes by clients in flight, so that the lanes of a few workers are busy. Measured on
# the workload W2 of `raysim bench` with two workers: 25 lanes take a sixth longer than 10, because
# less stays in the cache.
_LANES_BY_CONCURRENCY = ((40, 10), (20, 5))
_MAX_BATCHED_PARAMETERS = 1_000_000  # in larger models the products take all the time
# The number of lanes on a GPU with recorded steps: 10 lanes took 0.61 to 0.79 times as long as one
# lane for models of 0.4 to 11 M parameters (H100, `bench gpu`).
_GPU_LANES, _MAX_GPU_PARAMETERS = 10, 20_000_000
_METHODS = "raysim.methods."


def check_step_mode(spec: RunSpec, declarations: Declarations) -> None:
    """Raise LanesError if `runtime.lanes` or `runtime.graph` does not fit the run."""
    reason = _unbatched_steps(spec.settings.local)
    if reason and (spec.graph or spec.lanes > 1):
        key = "runtime.graph=true" if spec.graph else f"runtime.lanes={spec.lanes}"
        raise LanesError(
            f"{key}: training steps {reason} can be neither recorded nor computed for several "
            "clients at once. Set runtime.graph=false and runtime.lanes=1."
        )
    trainer = declarations.declarer("train")
    if trainer is not None and (spec.graph or spec.lanes > 1):
        key, action = f"runtime.lanes={spec.lanes}", "computed for several clients at once"
        if spec.graph:
            key, action = "runtime.graph=true", "recorded"
        raise LanesError(
            f"{key}: method '{trainer.method}' trains clients without raysim's own training steps, "
            f"but only these steps can be {action}. Set runtime.graph=false and runtime.lanes=1."
        )
    if spec.graph:
        if is_stochastic(*declarations.networks.values()):
            raise LanesError(
                "runtime.graph=true: the model draws random numbers in its steps (dropout or "
                "noise), but a recorded step would use the same numbers each time. Set "
                "runtime.graph=false."
            )
    elif spec.lanes > 1:
        obstacle = _obstacle(spec, declarations)
        if not obstacle:
            return
        advice = "Set runtime.lanes=1"
        if spec.device.startswith("cuda"):
            advice += ", or runtime.graph=true to record steps"
        raise LanesError(f"runtime.lanes={spec.lanes}: {obstacle}. {advice}.")


def _unbatched_steps(local: Local) -> str:
    """Return the property of steps that forbids lanes and recordings; "" if there is none."""
    if local.optimizer == "muon":
        return "with local.optimizer=muon"
    if local.rates:
        return "with local.rates"
    if local.schedule_over == "steps" or local.warmup_steps:
        return (
            "whose learning rate changes from step to step (local.schedule_over, "
            "local.warmup_steps)"
        )
    return ""


def _obstacle(spec: RunSpec, declarations: Declarations) -> str:
    """Return why lanes cannot be computed by batched products; "" if they can."""
    if spec.device != "cpu":
        return (
            "several clients can be trained at once only on a CPU or with recorded steps, but "
            f"this run has device={spec.device}"
        )
    methods = step_methods(declarations)
    if methods:
        return (
            f"method '{methods[0]}' changes the training step, which is possible only if clients "
            "are trained one at a time"
        )
    if spec.task.objective.has_ignored:
        return "the loss of a batch is a mean over labels, not over samples"
    if isinstance(spec.task.shape, PackedShape):
        return "samples have several inputs"
    added = [name for name in declarations.networks if name != "model"]
    if added:
        method = added[0].partition(".")[0]
        return f"method '{method}' adds a network, but the model must be the only network"
    if linear_chain(declarations.networks, len(spec.task.shape)) is None:
        if find_adapters(declarations.networks["model"]):
            return "layers have adapters (model.lora.rank)"
        return (
            "the model is not a chain of linear and pointwise layers with trained weights that no "
            "layers share, such as model=mlp"
        )
    return ""


def default_lanes(spec: RunSpec, declarations: Declarations, concurrency: int) -> int:
    """Return the number of lanes of a worker if `runtime.lanes` is not set.

    Some settings of local training allow only one lane (`_unbatched_steps`). Recorded steps on a
    GPU have several lanes, except for large models. Unrecorded steps have several lanes if:
    - Batched products can compute the steps on a CPU (`_obstacle`).
    - Model and loss are part of raysim, and the model is small.
    - `concurrency` is not small, and the median client has at least four batches.

    concurrency: the number of clients in flight.
    """
    if _unbatched_steps(spec.settings.local):
        return 1
    networks = declarations.networks.values()
    size = sum(parameter.numel() for network in networks for parameter in network.parameters())
    if spec.graph and spec.device.startswith("cuda"):
        return max(1, min(_GPU_LANES, concurrency)) if size <= _MAX_GPU_PARAMETERS else 1
    if (
        spec.graph
        or size > _MAX_BATCHED_PARAMETERS
        or not is_built_in(spec)
        or _obstacle(spec, declarations)
    ):
        return 1
    counts = spec.data.partition.train.counts
    if not counts.any() or np.median(counts[counts > 0]) < 4 * spec.settings.local.batch:
        return 1
    return next((lanes for least, lanes in _LANES_BY_CONCURRENCY if concurrency >= least), 1)


def uses_graph(spec: RunSpec, networks: Mapping[str, nn.Module], setting: bool | None) -> bool:
    """Return True if steps are recorded.

    setting: `runtime.graph`. With None, steps are recorded on a GPU if model, loss and methods are
    part of raysim, layers draw no random numbers, and no setting of local training forbids
    recordings.
    """
    # Recorded steps were 1.5 to 2 times as fast.
    if setting is not None:
        return setting
    if _unbatched_steps(spec.settings.local):
        return False
    are_methods_built_in = all(
        type(method).__module__.startswith(_METHODS) for method in spec.methods
    )
    records = are_methods_built_in and is_built_in(spec) and not is_stochastic(*networks.values())
    return records and spec.device.startswith("cuda")


def is_built_in(spec: RunSpec) -> bool:
    """Return True if model and loss are part of raysim."""
    return not isinstance(spec.model, ExternalModel) and spec.loss is None
