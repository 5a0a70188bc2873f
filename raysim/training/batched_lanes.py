"""Train K clients of a small linear network at once, by batched matrix products.

Row k of a tensor [K, D] has the D parameters of lane k. `step_mode.py` decides which runs do this.
Smaller batches are padded with samples of weight 0, so that all products have the same shape.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from raysim.api.composition import STEP_HOOKS
from raysim.api.context import Batch, Stage
from raysim.api.declare import Declarations
from raysim.models.classifier import Classifier
from raysim.models.split import WholeNetwork
from raysim.primitives.errors import first_line
from raysim.training.lanes import Lane, LaneLoop, LanesError
from raysim.training.trainer import Trainer
from raysim.vectors.optimizer import StackedOptimizer

_POINTWISE = (
    nn.Identity,
    nn.ReLU,
    nn.LeakyReLU,
    nn.ELU,
    nn.SELU,
    nn.GELU,
    nn.SiLU,
    nn.Tanh,
    nn.Sigmoid,
    nn.Softplus,
)
_TASK = Stage()


def step_methods(declarations: Declarations) -> list[str]:
    """Return the names of the methods that take part in a training step.

    These methods have a hook of the step (`STEP_HOOKS`), stages, or a training function.
    """
    methods = []
    for declared in declarations.methods:
        fills_step_hook = any(declared.has_hook(hook) for hook in STEP_HOOKS)
        if fills_step_hook or declared.stages is not None or declared.train is not None:
            methods.append(declared.method)
    return methods


def linear_chain(networks: Mapping[str, nn.Module], input_dims: int) -> list[nn.Module] | None:
    """Return the layers of a chain of linear and elementwise layers; None for other networks.

    The chain may also contain flatten layers. It must meet these conditions:
    - It is the only network of the run.
    - It has linear layers, and the first one gets one vector for each sample.
    - All parameters are trained, and no layers share parameters.
    input_dims: the number of dimensions of a sample's input. With more than one, the first layer
    must flatten the input.
    """
    model = networks["model"]
    if isinstance(model, WholeNetwork):
        layers = _unnest(model.net)
    elif isinstance(model, Classifier) and type(model).forward is Classifier.forward:
        layers = [*_unnest(model.extractor), model.head]
    else:
        return None
    linear = [layer for layer in layers if type(layer) is nn.Linear]
    flatten = [layer for layer in layers if _is_full_flatten(layer)]
    is_known = all(
        type(layer) in (nn.Linear, *_POINTWISE) or _is_full_flatten(layer) for layer in layers
    )
    has_flat_input = input_dims == 1 or layers[:1] == flatten[:1]
    parameters = list(model.parameters())
    is_tied = len(parameters) != sum(len(list(layer.parameters())) for layer in linear)
    is_frozen = not all(parameter.requires_grad for parameter in parameters)
    if not (linear and is_known and has_flat_input) or is_tied or is_frozen or len(networks) > 1:
        return None
    return layers


def _is_full_flatten(layer: nn.Module) -> bool:
    """Return True if a layer flattens each sample completely."""
    return type(layer) is nn.Flatten and (layer.start_dim, layer.end_dim) == (1, -1)


def _unnest(module: nn.Module) -> list[nn.Module]:
    """Return the layers of a module in order, without the `Sequential`s around them."""
    if type(module) is not nn.Sequential:
        return [module]
    layers: list[nn.Module] = []
    for child in module:
        layers += _unnest(child)
    return layers


class _BatchedLinear(torch.autograd.Function):
    """A linear layer for all K lanes at once, x w^T + b, with its own backward.

    `forward` explains x, w and b.
    """

    @staticmethod
    def forward(ctx: Any, grad_w: Tensor, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        """Return the outputs x w^T + b of a linear layer in each of K lanes, [K, B, m].

        grad_w: memory for the gradient of w, [K, m, n]. Only `backward` writes it.
        x: the inputs of B samples in each lane, [K, B, n].
        w: the weights, [K, m, n].
        b: the bias, [K, m].
        """
        ctx.save_for_backward(x, w)
        ctx.grad_w = grad_w
        if b is None:
            return torch.bmm(x, w.transpose(1, 2))
        return torch.baddbmm(b.unsqueeze(1), x, w.transpose(1, 2))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Return the gradients of the arguments of `forward`; None for `grad_w`.

        The gradient of w is written into the tensor `grad_w` that `forward` received.
        grad: the gradient of the outputs, [K, B, m].
        """
        x, w = ctx.saved_tensors
        grad_x = torch.bmm(grad, w) if ctx.needs_input_grad[1] else None
        # Autograd would return the gradient of w in the memory layout of w^T, and adding it to w
        # would take longer than the products. New memory for each step would also take longer than
        # the product, because the system clears its pages.
        torch.bmm(grad.transpose(1, 2), x, out=ctx.grad_w)
        if len(ctx.needs_input_grad) == 3:
            return None, grad_x, ctx.grad_w
        return None, grad_x, ctx.grad_w, grad.sum(1)


class _LinearLanes:
    """A linear layer of all K lanes, each with a batch of B samples.

    A call computes m outputs from n inputs of each sample: [K, B, m] from [K, B, n].
    parts: the weights [K, m, n] and perhaps the bias [K, m].
    precision: the dtype of the products; None takes that of the weights.
    """

    def __init__(self, parts: Sequence[Tensor], precision: torch.dtype | None):
        self.parts, self.precision = parts, precision
        weights = parts[0]
        dtype = precision or weights.dtype
        self.grad_w = torch.empty(weights.shape, dtype=dtype, device=weights.device)

    def __call__(self, inputs: Tensor) -> Tensor:
        parts = self.parts
        if self.precision is not None:
            inputs = inputs.to(self.precision)
            parts = [part.to(self.precision) for part in parts]
        outputs: Tensor = _BatchedLinear.apply(self.grad_w, inputs, *parts)
        return outputs


class BatchedLanes(LaneLoop[Lane]):
    """A loop that trains K clients with one batched computation per step.

    trainer: the trainer of the worker.
    count: the number K of lanes.
    """

    def __init__(self, trainer: Trainer, count: int):
        vector = trainer.vector
        data = vector.data.detach().expand(count, -1).clone()
        counters = vector.counters.detach().expand(count, -1).clone()
        super().__init__(trainer, data, counters, Lane)
        layers = linear_chain(vector.networks, len(trainer.task.shape))
        assert layers is not None, "`check_step_mode` comes first"
        self.group = trainer.step.group(_TASK.trains)
        self.leaves, self.targets = self._leaves()
        self.layers = [self._batched(layer) for layer in layers]
        self.trained = [self.leaves[id(parameter)] for parameter in self.group.params]
        self.optimizer = StackedOptimizer(trainer.step.optimizer, self.targets)
        largest = max(1, int(trainer.partition.counts.max(initial=0)))
        self.batch = min(trainer.local.batch, largest)  # the number of rows of every lane
        self.weights = torch.full(
            (count, self.batch), 1 / self.batch, dtype=data.dtype, device=data.device
        )

    def _leaves(self) -> tuple[dict[int, Tensor], list[Tensor]]:
        """Return the parameters of all K lanes, and the tensors that the optimizer changes.

        The first result has a tensor [K, ...] for each parameter of the model, by the parameter's
        id. The second result has the tensors of the trained parameters. With `local.clip`, these
        are joined: a tensor [K, n] has n values that follow one another in the vector.
        """
        vector = self.trainer.vector
        leaves: dict[int, Tensor] = {}
        for entry in vector.layout.entries:
            if entry.parameter:
                view = self.data[:, entry.start : entry.stop].view(self.count, *entry.shape)
                # Without .data autograd would take an optimizer step for a change of saved tensors.
                leaves[id(vector.parameters[entry.name])] = view.data.requires_grad_()
        if self.trainer.step.clip:
            return leaves, [self.data[:, run] for run in self.group.runs]
        return leaves, [leaves[id(parameter)].detach() for parameter in self.group.params]

    def _batched(self, layer: nn.Module) -> Callable[[Tensor], Tensor]:
        """Return the function that computes a layer for all lanes at once."""
        if isinstance(layer, nn.Linear):
            parts = [self.leaves[id(parameter)] for parameter in layer.parameters()]
            return _LinearLanes(parts, self.trainer.step.precision)
        if isinstance(layer, nn.Flatten):
            return functools.partial(torch.flatten, start_dim=2)
        return layer

    # --- a lane's job ------------------------------------------------------------------------
    def start(self, lane: Lane) -> None:
        """Prepare a lane for its new job."""
        self.optimizer.restart(lane.row, lane.ctx.optimizers.saved_buffers(_TASK.name))

    def finish(self, lane: Lane) -> None:
        """Give the lane's optimizer to its job, if the job has made a step.

        The end of a job needs the optimizer, for example to keep its buffers for the next job.
        """
        if lane.step:
            lane.ctx.optimizers.put(
                _TASK.name, self.optimizer.row(lane.row), self.group.shared, _TASK.rate
            )

    # --- the step ----------------------------------------------------------------------------
    def step_lanes(self, busy: Sequence[Lane]) -> None:
        """Make the next step of these lanes.

        busy: the lanes that have a job.
        Raises LanesError if the step cannot be computed for all lanes at once.
        """
        try:
            losses = self._step(busy)
        except (RuntimeError, IndexError) as error:
            text = first_line(error).rstrip(".")
            raise LanesError(
                f"runtime.lanes={self.count}: several clients cannot be trained at once ({text}). "
                "Set runtime.lanes=1."
            ) from error
        for lane in busy:
            lane.advance(losses[lane.row])

    def _step(self, busy: Sequence[Lane]) -> Sequence[Tensor]:
        """Make one training step; return the losses of all K lanes, a scalar for each.

        Lanes that are not in `busy` are computed, too. Their loss is 0, and their parameters may
        change.
        """
        inputs, targets, weights = self._stack(busy)
        outputs = self._outputs(inputs).to(self.data.dtype).flatten(0, 1)
        rows = self.trainer.task.objective.losses(outputs, targets.flatten(0, 1))
        loss = torch.dot(rows, weights.flatten())
        gradients = list(torch.autograd.grad(loss, self.trained))
        busy_rows = [lane.row for lane in busy]
        rate = busy[0].ctx.rate
        self.optimizer.step_rows(busy_rows, self.targets, self._clip(gradients), rate)
        losses = (rows.detach().view(self.count, self.batch) * weights).sum(1)
        return losses.unbind()

    def _outputs(self, inputs: Tensor) -> Tensor:
        """Return the outputs of the networks of all K lanes, [K, B, outputs].

        inputs: a batch of B samples for each lane, [K, B, ...].
        """
        for layer in self.layers:
            inputs = layer(inputs)
        return inputs

    def _clip(self, gradients: list[Tensor]) -> list[Tensor]:
        """Clip the gradient of each of the K lanes to the norm `local.clip`.

        Return one tensor [K, n] for each range of n parameters that follow one another in the
        vector. If `local.clip` is 0, return `gradients`.
        gradients: one tensor [K, ...] for each trained parameter.
        """
        clip = self.trainer.step.clip
        if not clip:
            return gradients
        flat = torch.cat([gradient.reshape(self.count, -1) for gradient in gradients], dim=1)
        norms = flat.norm(dim=1, keepdim=True)
        flat *= (clip / (norms + 1e-6)).clamp(max=1.0)
        return list(flat.split([run.stop - run.start for run in self.group.runs], dim=1))

    def _stack(self, busy: Sequence[Lane]) -> tuple[Tensor, Tensor, Tensor]:
        """Stack the next batches of K lanes; return inputs, targets and the weights of samples.

        Inputs and targets are [K, B, ...], weights are [K, B], for B rows of each lane. Rows
        without a sample have weight 0, and so have all rows of lanes that are not in `busy`.
        """
        batches = {lane.row: lane.next_batch for lane in busy}
        is_full = all(len(batch.inputs) == self.batch for batch in batches.values())
        if len(busy) == self.count and is_full:
            weights = self.weights
            every = [batches[row] for row in range(self.count)]
        else:
            weights = self._weights(batches)
            batches = {row: _fill_up(batch, self.batch) for row, batch in batches.items()}
            first = next(iter(batches.values()))
            every = [batches.get(row, first) for row in range(self.count)]
        return (
            torch.stack([b.inputs for b in every]),
            torch.stack([b.targets for b in every]),
            weights,
        )

    def _weights(self, batches: Mapping[int, Batch]) -> Tensor:
        """Return the weights of samples in the losses of K lanes, [K, B] for B samples in a lane.

        A sample's weight is 1 / (size of the lane's batch). Samples that only pad a batch have
        weight 0.
        batches: the batch of each lane, by lane number; lanes without a job are left out.
        """
        weights = torch.zeros_like(self.weights)
        for row, batch in batches.items():
            size = len(batch.inputs)
            weights[row, :size] = 1 / size
        return weights


def _fill_up(batch: Batch, size: int) -> Batch:
    """Return a batch that is padded to `size` rows with copies of its first row."""
    missing = size - len(batch.inputs)
    if not missing:
        return batch
    inputs, targets = (
        torch.cat([part, part[:1].expand(missing, *part.shape[1:])])
        for part in (batch.inputs, batch.targets)
    )
    return Batch(inputs, targets, inputs, targets)
