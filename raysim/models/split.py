"""Split a user's or a library's neural network into features and one linear head."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from raysim.models.classifier import Classifier, ModelRecipe, Shape
from raysim.models.lora import Lora
from raysim.models.packed import UnpackFields, example_rows
from raysim.primitives.errors import first_line
from raysim.primitives.kinds import PackedShape, Tokens

# Arguments that a user's network may have; raysim fills them in from the data.
DATA_ARGUMENTS = ("input_shape", "num_classes", "tokens")
MAX_LAYERS_IN_MESSAGE = 5


class SplitNetwork(Classifier):
    """A network that is split into features and the linear layer of its outputs, the head.

    net: the original network, which computes the features. It is changed in place: an identity
    replaces the head.
    head_name: the name of the head in the original network.
    """

    def __init__(self, net: nn.Module, head_name: str):
        nn.Module.__init__(self)
        head = net.get_submodule(head_name)
        assert isinstance(head, nn.Linear), "callers name a linear layer"
        self.feature_dim, self.num_classes = head.in_features, head.out_features
        self.extractor = net
        self.head = head
        self.head_name = head_name
        _replace_module(net, head_name, nn.Identity())

    def whole(self) -> nn.Module:
        """Put the head back into the original network, and return this network.

        The network has the current parameters. The split model cannot be used afterwards.
        """
        _replace_module(self.extractor, self.head_name, self.head)
        return self.extractor


class WholeNetwork(Classifier):
    """A network that is not split. It has outputs, but no separate features and head."""

    is_split: ClassVar[bool] = False

    def __init__(self, net: nn.Module, num_classes: int):
        nn.Module.__init__(self)
        self.net, self.num_classes = net, num_classes

    def features(self, x: Tensor) -> Tensor:
        raise ValueError(
            "this model has no separate features and head. If a linear layer computes its "
            "outputs, set model.head to the name of this layer."
        )

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x)
        return logits


def original_network(model: nn.Module) -> nn.Module:
    """Undo `split_network`: return the original network, with the model's present parameters.

    model: a `SplitNetwork`, which cannot be used afterwards, or a `WholeNetwork`. Any other module
    is returned unchanged.
    """
    if isinstance(model, SplitNetwork):
        return model.whole()
    return model.net if isinstance(model, WholeNetwork) else model


def original_names(model: nn.Module) -> dict[str, str]:
    """Map original names of parameters and buffers to their names in `model`.

    The original name of a tensor is the name before `split_network`. Original names are the keys of
    the result.
    """
    names = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    if isinstance(model, WholeNetwork):
        return {name.removeprefix("net."): name for name in names}
    if not isinstance(model, SplitNetwork):
        return {name: name for name in names}
    originals = {}
    for name in names:
        part, _, rest = name.partition(".")
        original = f"{model.head_name}.{rest}" if part == "head" else rest
        originals[original] = name
    return originals


def _replace_module(net: nn.Module, name: str, module: nn.Module) -> None:
    owner, _, attribute = name.rpartition(".")
    net.get_submodule(owner).register_module(attribute, module)


# ---- splitting -----------------------------------------------------------------------------------
def split_network(
    net: nn.Module, num_classes: int, inputs: Tensor, head: str | None = None
) -> Classifier:
    """Return the network, split into an extractor and a linear head.

    A `Classifier` is returned unchanged. With head=None, the network is not split in three cases,
    and the result is a `WholeNetwork`:

    - The last linear layer does not compute the outputs.
    - The outputs have more than 2 dimensions.
    - num_classes is 0.

    inputs: examples [B, ...], for which the split network must compute the same outputs.
    head: the name of the linear layer that computes the outputs; None means the last linear layer.
    Raise ValueError if the network refuses these examples, does not have `num_classes` outputs, or
    has no such head.
    """
    if isinstance(net, Classifier):
        return net
    training = net.training
    net.eval()  # so that BatchNorm does not change its statistics and dropout draws nothing
    outputs = _compute_outputs(net, inputs)
    # The network has outputs for each position, or its targets are structures.
    if head is None and (outputs.ndim > 2 or not num_classes):
        return WholeNetwork(net, num_classes).train(training)
    if outputs.shape != (len(inputs), num_classes):
        raise _wrong_outputs(type(net).__name__, (num_classes,), inputs, outputs)
    linear_layers = [
        name for name, module in net.named_modules() if isinstance(module, nn.Linear) and name
    ]
    if head is not None and head not in linear_layers:
        last_layers = ", ".join(linear_layers[-MAX_LAYERS_IN_MESSAGE:])
        advice = "Set model.head=null"
        if linear_layers:
            advice = f"Set it to one of its linear layers ({last_layers}), or to null"
        raise ValueError(
            f"model.head={head} is not a linear layer of {type(net).__name__}. {advice}."
        )
    name = head or next(reversed(linear_layers), None)
    if name is not None and _makes_the_outputs(net, name, inputs):
        model = SplitNetwork(net, name)
        if _computes_outputs(model, inputs, outputs):
            return model.train(training)
        net = model.whole()
    if head is not None:
        raise ValueError(
            f"model.head={head} names a layer that does not compute the outputs of "
            f"{type(net).__name__}. Name the linear layer that computes them, or set "
            "model.head=null: raysim then searches for this layer, and uses the model without a "
            "head if there is none."
        )
    return WholeNetwork(net, num_classes).train(training)


def check_outputs(name: str, model: nn.Module, inputs: Tensor, output_shape: Sequence[int]) -> None:
    """Raise ValueError unless a model's outputs have the shape that the labels need.

    name: the name of the model in the error.
    inputs: example inputs.
    output_shape: the shape of the outputs of one sample.
    """
    is_training = model.training
    outputs = _compute_outputs(model.eval(), inputs)
    model.train(is_training)
    if outputs.shape != (len(inputs), *output_shape):
        raise _wrong_outputs(name, output_shape, inputs, outputs)


def _wrong_outputs(
    name: str, output_shape: Sequence[int], inputs: Tensor, outputs: Tensor
) -> ValueError:
    num_classes = output_shape[0]
    action = (
        f"Set its number of outputs to {num_classes}, as functools.partial(f, "
        f"num_classes={num_classes}) does for a function f"
    )
    if num_classes == 1 and outputs.shape == (len(inputs),):
        action = "Do not squeeze the outputs"
    if len(output_shape) == 1 and outputs.ndim > 2:
        action = (
            "The data has one label per sample, but the model makes outputs for each position. "
            "Choose another model, or data with labels per position"
        )
    if outputs.ndim == 3 and len(output_shape) == 1 and not inputs.is_floating_point():
        action = (
            "The model makes an output at each position. Set data.kind=causal to learn the next "
            "tokens, or choose a model of sequences, such as transformer"
        )
    if len(output_shape) > 1:
        action = (
            "The data has labels per position, so the model must make an output for each class at "
            "each position. Choose such a model (model=unet for images; model=gpt, or "
            "model.task=causal with model=huggingface, for next tokens; or your own network), and "
            "labels with as many positions as the inputs"
        )
        if outputs.shape == (len(inputs), *output_shape[1:], num_classes):
            action = "Move the classes to the second axis, as outputs.movedim(-1, 1) does"
    return ValueError(
        f"the model {name} makes outputs of shape {list(outputs.shape)} for {len(inputs)} inputs, "
        f"but this data needs the shape {[len(inputs), *output_shape]}. {action}."
    )


def _compute_outputs(net: nn.Module, inputs: Tensor) -> Tensor:
    name = type(net).__name__
    try:
        with torch.no_grad():
            outputs = net(inputs)
    except Exception as error:  # a network of the user may raise any error
        action = "Choose another model, or change the shape of the data"
        if any(parameter.dtype == torch.float64 for parameter in net.parameters()):
            action = "Convert the model to float32 with model.float()"
        raise ValueError(
            f"the model {name} cannot take inputs of shape {list(inputs.shape[1:])} and type "
            f"{inputs.dtype} ({first_line(error).rstrip('.')}). {action}."
        ) from error
    if not isinstance(outputs, Tensor):
        raise ValueError(
            f"the model {name} returns a {type(outputs).__name__}, not a tensor of outputs. Wrap "
            "it in a module that returns a tensor."
        )
    return outputs


def _makes_the_outputs(net: nn.Module, name: str, inputs: Tensor) -> bool:
    """Return True if a network returns the outputs of its layer `name` unchanged.

    In training mode and in evaluation mode, the layer must run once, and the network must return
    the layer's tensor object. Equal numbers are not enough, because of dropout.
    """
    layer_outputs: list[object] = []

    def record(layer: nn.Module, args: object, output: object) -> None:
        layer_outputs.append(output)

    hook = net.get_submodule(name).register_forward_hook(record)
    buffers = [(buffer, buffer.clone()) for buffer in net.buffers()]  # BatchNorm's statistics
    try:
        for training in (True, False):
            layer_outputs.clear()
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                outputs = net.train(training)(inputs)
            if len(layer_outputs) != 1 or layer_outputs[0] is not outputs:
                return False
        return True
    except Exception:  # the network may not train on two rows; training reports that error later
        return False
    finally:
        hook.remove()
        net.eval()
        for buffer, value in buffers:
            buffer.copy_(value)


def _computes_outputs(model: SplitNetwork, inputs: Tensor, outputs: Tensor) -> bool:
    """Return True if features are [B, F] and the head turns them into the given outputs.

    model: the split network.
    inputs: examples [B, ...].
    outputs: [B, C], the outputs of the whole network for these examples.
    """
    with torch.no_grad():
        features = model.extractor(inputs)
        if not isinstance(features, Tensor):
            return False
        if features.shape != (len(inputs), model.feature_dim):
            return False
        return torch.equal(model.head(features), outputs)


def example_inputs(input_shape: Shape, tokens: Tokens | None, rows: int = 2) -> Tensor:
    """Return example inputs [rows, ...] for trying out a network; every call returns equal ones.

    input_shape: the shape of one sample.
    tokens: the size of the vocabulary; None if inputs are not token numbers.
    """
    generator = torch.Generator().manual_seed(0)
    if isinstance(input_shape, PackedShape):
        return example_rows(input_shape.fields, rows)
    if tokens is not None:
        return torch.randint(tokens.size, (rows, *input_shape), generator=generator)
    return torch.randn(rows, *input_shape, generator=generator)


# ---- networks from outside raysim ----------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class ExternalModel(ModelRecipe):
    """A recipe for a network that is defined outside raysim.

    head: the name of the linear layer that computes the network's outputs; None lets raysim search
    for this layer.
    lora: the settings of low-rank adapters.
    """

    head: str | None = None
    lora: Lora = field(default_factory=Lora)

    def make(self, input_shape: Shape, num_classes: int, tokens: Tokens | None) -> nn.Module:
        """Return the network as the user or the library defines it, before raysim splits it.

        A subclass must override this function.
        input_shape: the shape of one sample.
        num_classes: the number of outputs: classes, or numbers of a regression.
        tokens: the vocabulary; None if inputs are not token numbers.
        """
        raise NotImplementedError

    def network(self, input_shape: Shape, num_classes: int, tokens: Tokens | None) -> Classifier:
        net = self.make(input_shape, num_classes, tokens)
        if isinstance(input_shape, PackedShape):
            net.register_forward_pre_hook(UnpackFields(input_shape.fields), with_kwargs=True)
        # keep torch's random state: adapters draw their initial values afterwards
        with torch.random.fork_rng(devices=[]):
            inputs = example_inputs(input_shape, tokens)
            return split_network(net, num_classes, inputs, self.head)


@dataclass(frozen=True)
class CustomModel(ExternalModel):
    """A recipe for a user's network.

    source: a module with its initial parameters, or a callable that makes a module.
    options: arguments of the callable. raysim adds input_shape, num_classes and tokens if the
    callable has these arguments and `options` does not set them.
    """

    source: nn.Module | Callable[..., nn.Module]
    options: Mapping[str, Any] = field(default_factory=dict)

    def make(self, input_shape: Shape, num_classes: int, tokens: Tokens | None) -> nn.Module:
        if isinstance(self.source, nn.Module):
            return copy.deepcopy(self.source)
        signature = inspect.signature(self.source)
        # an object of functools.partial has no name
        source_name = getattr(self.source, "__name__", repr(self.source))
        arguments: dict[str, Any] = {}
        shape = input_shape.arguments if isinstance(input_shape, PackedShape) else input_shape
        values = (shape, num_classes, tokens)
        for name, value in zip(DATA_ARGUMENTS, values, strict=True):
            if name in signature.parameters:
                arguments[name] = value
        arguments |= self.options
        try:
            signature.bind(**arguments)
        except TypeError as error:
            raise ValueError(
                f"the model {source_name} cannot be called ({error}). raysim fills in "
                f"only the arguments {', '.join(DATA_ARGUMENTS)}; set other arguments with "
                "functools.partial."
            ) from error
        net = self.source(**arguments)
        if not isinstance(net, nn.Module):
            raise ValueError(
                f"the model {source_name} returns a {type(net).__name__}, not a "
                "torch.nn.Module. Return a module."
            )
        return net
