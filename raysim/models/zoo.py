"""Recipes for networks of torchvision, timm and Hugging Face, chosen by the libraries' names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn

from raysim.models.classifier import Shape
from raysim.models.split import ExternalModel
from raysim.primitives.checks import one_of
from raysim.primitives.errors import RefusedError, first_line, nearest
from raysim.primitives.extras import import_optional
from raysim.primitives.kinds import Tokens

NAMES_IN_MESSAGE = 5


def is_torchvision_model(name: str) -> bool:
    """Return True if torchvision has a classifier of this name."""
    from torchvision import models

    return name in models.list_models(models)


@dataclass(frozen=True)
class Torchvision(ExternalModel):
    """A recipe for a classifier of torchvision.models.

    name: torchvision's name of the classifier, such as "resnet18".
    pretrained: True loads the model's default weights, from torch.hub's cache or by download;
    layers of another shape, such as the head, get random weights.
    options: arguments of the function that makes the model.
    """

    name: str
    pretrained: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def make(self, input_shape: Shape, num_classes: int, tokens: Tokens | None) -> nn.Module:
        from torchvision import models

        names = models.list_models(models)
        if self.name not in names:
            raise ValueError(
                f"model.name={self.name} is not a classifier of torchvision: "
                f"{_suggest_name(self.name, names)}"
            )
        try:
            net: nn.Module = models.get_model(
                self.name, weights=None, num_classes=num_classes, **self.options
            )
        except TypeError as error:
            raise _cannot_be_made(self.name, error) from error
        if self.pretrained:
            weights = models.get_model_weights(self.name).DEFAULT
            try:
                values = weights.get_state_dict(progress=False, check_hash=True, weights_only=True)
            except Exception as error:  # a network, a cache and a file can fail in many ways
                raise _cannot_be_made(self.name, error) from error
            _load_fitting_values(net, values)
        return net


@dataclass(frozen=True)
class Timm(ExternalModel):
    """A recipe for a model of timm.

    name: timm's name of the model, such as "resnet10t".
    pretrained: True loads the model's weights, from the local cache or from the Hugging Face hub.
    options: further arguments of `timm.create_model`.
    """

    name: str
    pretrained: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def make(self, input_shape: Shape, num_classes: int, tokens: Tokens | None) -> nn.Module:
        timm = import_optional("timm", f"model.name={self.name}")
        if not timm.is_model(self.name):
            raise ValueError(
                f"model.name={self.name} is not a model of timm: "
                f"{_suggest_name(self.name, timm.list_models())}"
            )
        options: dict[str, Any] = {"in_chans": input_shape[0], **self.options}
        try:
            net: nn.Module = timm.create_model(
                self.name, pretrained=self.pretrained, num_classes=num_classes, **options
            )
        except Exception as error:  # errors of the options or of the download
            raise _cannot_be_made(self.name, error) from error
        return net


@dataclass(frozen=True)
class HuggingFaceModel(ExternalModel):
    """A recipe for a classifier or a causal language model of the package transformers.

    name: a folder or a name on the hub, whose configuration is used; or a type of model, such as
    bert.
    pretrained: True loads the weights of that folder or name.
    options: values that replace those of the model's configuration.
    task: "classify" makes a network that returns a logit for each class of a sequence or an image,
    [B, C]. "causal" makes a language model: for each of T positions, it returns a logit for each of
    the C tokens that may be the next token, [B, C, T].
    """

    name: str
    pretrained: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    task: Literal["classify", "causal"] = "classify"

    def __post_init__(self) -> None:
        one_of("model.task", self.task, ("classify", "causal"))

    def make(self, input_shape: Shape, num_classes: int, tokens: Tokens | None) -> nn.Module:
        transformers = import_optional("transformers", f"model.name={self.name}")
        options: dict[str, Any] = {**self.options, "num_labels": num_classes}
        classes = transformers.AutoModelForImageClassification
        if tokens is not None:
            classes = transformers.AutoModelForSequenceClassification
            options["pad_token_id"] = tokens.padding
        if self.task == "causal":
            if tokens is None:
                raise ValueError(
                    "model.task=causal reads token numbers, but this data has none. Choose data of "
                    "tokens with data.kind=causal, or set model.task=classify."
                )
            classes = transformers.AutoModelForCausalLM
            options = dict(self.options)
        try:
            if self.pretrained:
                net = classes.from_pretrained(
                    self.name, attn_implementation="eager", ignore_mismatched_sizes=True, **options
                )
            else:
                config = self._configuration(transformers, options, tokens)
                net = classes.from_config(config, attn_implementation="eager")
        except Exception as error:  # errors of the hub, the cache, a file or the options
            raise _cannot_be_made(self.name, error) from error
        if tokens is None:
            return _ImageLogits(net)
        vocabulary_size = getattr(net.config, "vocab_size", None)
        if vocabulary_size is not None and vocabulary_size < tokens.size:
            raise ValueError(
                f"model.name={self.name} has {vocabulary_size} tokens, the data has {tokens.size}. "
                "Set data.tokenizer to the model's tokenizer."
            )
        if self.task == "causal":
            return _NextTokenLogits(net, num_classes)
        return _TokenLogits(net, tokens.padding)

    def _configuration(
        self, transformers: Any, options: Mapping[str, Any], tokens: Tokens | None
    ) -> Any:
        if self.name not in transformers.CONFIG_MAPPING:
            return transformers.AutoConfig.from_pretrained(self.name, **options)
        size: dict[str, int | None] = {} if tokens is None else {"vocab_size": tokens.size}
        if self.task == "causal":  # the data decides the number of tokens
            size |= {"bos_token_id": None, "eos_token_id": None}
        return transformers.AutoConfig.for_model(self.name, **size, **options)


class _TokenLogits(nn.Module):
    """A network of `transformers` that returns logits for tokens [B, T]; padding is masked."""

    def __init__(self, net: nn.Module, padding: int):
        super().__init__()
        self.net, self.padding = net, padding

    def forward(self, tokens: Tensor) -> Tensor:
        attention_mask = (tokens != self.padding).long()
        logits: Tensor = self.net(input_ids=tokens, attention_mask=attention_mask).logits
        return logits


class _NextTokenLogits(nn.Module):
    """A causal network of `transformers` that returns logits [B, C, T] for tokens [B, T].

    No mask is needed: padding is at the end of a sequence, where no earlier position can see it.
    Outputs for tokens that the data do not have are left out.
    """

    def __init__(self, net: nn.Module, num_classes: int):
        super().__init__()
        self.net, self.num_classes = net, num_classes

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.net(input_ids=tokens, use_cache=False).logits
        return logits[:, :, : self.num_classes].transpose(1, 2)


class _ImageLogits(nn.Module):
    """A network of `transformers` that returns logits for images [B, c, h, w]."""

    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.net(pixel_values=images).logits
        return logits


def _load_fitting_values(net: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Load only those values for which the network has a tensor of the same name and shape."""
    state = net.state_dict()
    fitting = {}
    for key, value in values.items():
        if key in state and state[key].shape == value.shape:
            fitting[key] = value
    net.load_state_dict(fitting, strict=False)


def _suggest_name(name: str, names: list[str]) -> str:
    """Return advice for a wrong name: the nearest valid name, or some valid names."""
    near = nearest(name, names)
    if near:
        return f"did you mean {near}?"
    return f"it has {len(names)}, such as {', '.join(names[:NAMES_IN_MESSAGE])}"


def _cannot_be_made(name: str, error: BaseException) -> ValueError:
    reason = f"{type(error).__name__}: {first_line(error).rstrip('.')}"
    return ValueError(
        f"model.name={name} cannot be made ({reason}). Give a model that is on this machine or can "
        "be downloaded, and set only options that it has."
    )


if not TYPE_CHECKING:  # mypy would take every attribute of this module for one that exists

    def __getattr__(name: str) -> None:
        """Raise `RefusedError` with the new name of a renamed class that old configurations use."""
        if name == "HuggingFace":
            raise RefusedError(
                "model._target_: raysim.models.zoo.HuggingFace is now called "
                "raysim.models.zoo.HuggingFaceModel. Write that name."
            )
        raise AttributeError(f"raysim.models.zoo has no attribute {name!r}")
