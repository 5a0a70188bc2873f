"""Any network as features and one linear head, where it can be split so; and networks of the user's own."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from raysim.models.classifier import Classifier, ModelRecipe, Shape
from raysim.models.lora import Lora, with_adapters
from raysim.primitives.errors import first_line
from raysim.primitives.kinds import Tokens


class SplitNetwork(Classifier):
    """A network whose last linear layer is its head; the rest, with nothing in that place, makes the features."""

    def __init__(self, net: nn.Module, head_name: str):
        nn.Module.__init__(self)
        head = net.get_submodule(head_name)
        assert isinstance(head, nn.Linear), "callers name a linear layer"
        self.feature_dim, self.num_classes = head.in_features, head.out_features
        self.extractor = net
        self.head = head
        self.head_name = head_name
        _replace(net, head_name, nn.Identity())

    def whole(self) -> nn.Module:
        """The network as it was, with the parameters of this one; this one is spent."""
        _replace(self.extractor, self.head_name, self.head)
        return self.extractor


class WholeNetwork(Classifier):
    """A network that is not split: it has outputs, and neither features nor a head."""

    is_split: ClassVar[bool] = False

    def __init__(self, net: nn.Module, num_classes: int):
        nn.Module.__init__(self)
        self.net, self.num_classes = net, num_classes

    def features(self, x: Tensor) -> Tensor:
        raise ValueError(
            "this model cannot be split into features and a head: name its last linear layer in model.head"
        )

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x)
        return logits


def original_network(model: nn.Module) -> nn.Module:
    """A network as its author has it, with the values of this model, which is spent; one of ours as it is."""
    if isinstance(model, SplitNetwork):
        return model.whole()
    return model.net if isinstance(model, WholeNetwork) else model


def original_names(model: nn.Module) -> dict[str, str]:
    """Map the names of parameters and buffers in the network of the author to those in this model."""
    names = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    if isinstance(model, WholeNetwork):
        return {name.removeprefix("net."): name for name in names}
    if not isinstance(model, SplitNetwork):
        return {name: name for name in names}
    found = {}
    for name in names:
        part, _, rest = name.partition(".")
        found[f"{model.head_name}.{rest}" if part == "head" else rest] = name
    return found


def _replace(net: nn.Module, name: str, module: nn.Module) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(net.get_submodule(owner), leaf, module)


def split_network(
    net: nn.Module, num_classes: int, inputs: Tensor, head: str | None = None
) -> Classifier:
    """The network as a classifier: split at `head` (None: at its last linear layer), or whole where that cannot be.

    inputs: examples [B, ...], on which both forms must give the same. Raises ValueError where the network cannot take
    them or has another number of outputs, or where the layer that was named is no linear head.
    """
    if isinstance(net, Classifier):
        return net
    training = net.training
    net.eval()  # BatchNorm keeps its statistics, dropout draws nothing
    outputs = _outputs(net, inputs)
    if outputs.shape != (len(inputs), num_classes):
        flat = num_classes == 1 and outputs.shape == (len(inputs),)
        given = f"functools.partial(f, num_classes={num_classes}) does for a function f"
        do = (
            "leave out what squeezes them"
            if flat
            else f"set its number of outputs to {num_classes}, as {given}"
        )
        raise ValueError(
            f"the model {type(net).__name__} makes outputs of shape {list(outputs.shape)} of {len(inputs)} inputs; "
            f"they must be [{len(inputs)}, {num_classes}]: {do}"
        )
    linear = [
        name for name, module in net.named_modules() if isinstance(module, nn.Linear) and name
    ]
    if head is not None and head not in linear:
        raise ValueError(
            f"model.head={head} is no linear layer of {type(net).__name__}; it has {_last(linear)}"
        )
    name = head or next(reversed(linear), None)
    ends = name is not None and _ends_with(net, name, inputs)
    model: Classifier | None = SplitNetwork(net, name) if name is not None and ends else None
    if isinstance(model, SplitNetwork) and not _same(model, inputs, outputs):
        net, model = model.whole(), None
    if head is not None and model is None:
        raise ValueError(
            f"model.head={head} is not the last step of {type(net).__name__}, so that its inputs are no features: name "
            "another layer, or set model.head=null"
        )
    return (model or WholeNetwork(net, num_classes)).train(training)


def _outputs(net: nn.Module, inputs: Tensor) -> Tensor:
    try:
        with torch.no_grad():
            outputs = net(inputs)
    except Exception as error:  # whatever a foreign network makes of inputs that it cannot take
        double = any(parameter.dtype == torch.float64 for parameter in net.parameters())
        do = (
            "give it in float32, by model.float()"
            if double
            else "choose another model, or bring the data to its shape"
        )
        raise ValueError(
            f"the model {type(net).__name__} cannot take inputs of shape {list(inputs.shape[1:])} and type "
            f"{inputs.dtype} ({first_line(error).rstrip('.')}): {do}"
        ) from error
    if not isinstance(outputs, Tensor):
        raise ValueError(
            f"the model {type(net).__name__} makes a {type(outputs).__name__} and no tensor of outputs: wrap it so "
            "that it returns one"
        )
    return outputs


def _ends_with(net: nn.Module, name: str, inputs: Tensor) -> bool:
    """Whether the very tensor that this layer makes, once, is what comes out, in training as in evaluation.

    Equal numbers would not do: a scale that starts at 1, or dropout, would act on features once the layer is away.
    """
    made: list[object] = []
    hook = net.get_submodule(name).register_forward_hook(lambda layer, args, out: made.append(out))
    before = [(buffer, buffer.clone()) for buffer in net.buffers()]  # BatchNorm's statistics
    try:
        for training in (True, False):
            made.clear()
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                outputs = net.train(training)(inputs)
            if len(made) != 1 or made[0] is not outputs:
                return False
        return True
    except Exception:  # a foreign network may not take two rows in training: it will say so there
        return False
    finally:
        hook.remove()
        net.eval()
        for buffer, value in before:
            buffer.copy_(value)


def _same(model: SplitNetwork, inputs: Tensor, outputs: Tensor) -> bool:
    """Whether features are rows of the head's inputs, and the head makes the outputs of them."""
    with torch.no_grad():
        features = model.extractor(inputs)
        right = isinstance(features, Tensor) and features.shape == (len(inputs), model.feature_dim)
        return right and torch.equal(model.head(features), outputs)


def _last(names: list[str]) -> str:
    return ", ".join(names[-5:]) if names else "none"


def example_inputs(input_shape: Shape, tokens: Tokens | None, rows: int = 2) -> Tensor:
    """Inputs [rows, ...] for trying a network out, always the same."""
    generator = torch.Generator().manual_seed(0)
    if tokens is not None:
        return torch.randint(tokens.size, (rows, *input_shape), generator=generator)
    return torch.randn(rows, *input_shape, generator=generator)


@dataclass(frozen=True, kw_only=True)
class ExternalModel(ModelRecipe):
    """A network that others wrote. head: the name of its last linear layer; None: found. lora: adapters for it."""

    head: str | None = None
    lora: Lora = field(default_factory=Lora)

    def make(self, input_shape: Shape, num_classes: int, tokens: Tokens | None) -> nn.Module:
        """The network as it comes."""
        raise NotImplementedError

    def network(self, input_shape: Shape, num_classes: int, tokens: Tokens | None) -> Classifier:
        """See `ModelRecipe`."""
        net = self.make(input_shape, num_classes, tokens)
        with torch.random.fork_rng(
            devices=[]
        ):  # trying it out must not change what adapters start from
            model = split_network(net, num_classes, example_inputs(input_shape, tokens), self.head)
        return with_adapters(model, self.lora)


DATA_ARGUMENTS = (
    "input_shape",
    "num_classes",
    "tokens",
)  # arguments that a network of the user's own may have


@dataclass(frozen=True)
class CustomModel(ExternalModel):
    """A module (its values are where training starts), or a function or class that makes one of `options`.

    What the data say is filled in where it has such arguments: `DATA_ARGUMENTS`, which `options` may name themselves.
    """

    source: nn.Module | Callable[..., nn.Module]
    options: Mapping[str, Any] = field(default_factory=dict)

    def make(self, input_shape: Shape, num_classes: int, tokens: Tokens | None) -> nn.Module:
        """See `ExternalModel`."""
        if isinstance(self.source, nn.Module):
            return copy.deepcopy(self.source)
        known = dict(zip(DATA_ARGUMENTS, (input_shape, num_classes, tokens), strict=True))
        signature = inspect.signature(self.source)
        given = {
            **{key: value for key, value in known.items() if key in signature.parameters},
            **self.options,
        }
        try:
            signature.bind(**given)
        except TypeError as error:
            raise ValueError(
                f"the model {self.source.__name__} cannot be called ({error}): the data give "
                f"{', '.join(DATA_ARGUMENTS)} where it has such arguments, functools.partial gives the others"
            ) from error
        net = self.source(**given)
        if not isinstance(net, nn.Module):
            raise ValueError(
                f"the model {self.source.__name__} makes a {type(net).__name__}, and no torch.nn.Module"
            )
        return net
