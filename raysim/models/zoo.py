"""Networks by the names that torchvision, timm and Hugging Face give them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from raysim.models.classifier import Shape
from raysim.models.split import ExternalModel
from raysim.primitives.errors import Refused, first_line, nearest
from raysim.primitives.extras import import_optional
from raysim.primitives.kinds import Tokens


def is_torchvision_model(name: str) -> bool:
    """Whether torchvision has a classifier of this name."""
    from torchvision import models

    return name in models.list_models(models)


@dataclass(frozen=True)
class Torchvision(ExternalModel):
    """A classifier of torchvision.models with `options` for its constructor.

    pretrained: its default weights (torch.hub's cache, else a download); layers of another shape, as the head, stay
    fresh.
    """

    name: str
    pretrained: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def make(self, input_shape: Shape, num_classes: int, tokens: Tokens | None) -> nn.Module:
        """See `ExternalModel`."""
        from torchvision import models

        if self.name not in (names := models.list_models(models)):
            raise ValueError(
                f"model.name={self.name} is no classifier of torchvision: {_near(self.name, names)}"
            )
        try:
            net: nn.Module = models.get_model(
                self.name, weights=None, num_classes=num_classes, **self.options
            )
        except TypeError as error:
            raise _unloaded(self.name, error) from error
        if self.pretrained:
            weights = models.get_model_weights(self.name).DEFAULT
            try:
                values = weights.get_state_dict(progress=False, check_hash=True, weights_only=True)
            except Exception as error:  # a network, a cache and a file can fail in many ways
                raise _unloaded(self.name, error) from error
            _load_fitting(net, values)
        return net


@dataclass(frozen=True)
class Timm(ExternalModel):
    """A model of timm with `options` for `timm.create_model`; pretrained: its weights, from the cache or the hub."""

    name: str
    pretrained: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def make(self, input_shape: Shape, num_classes: int, tokens: Tokens | None) -> nn.Module:
        """See `ExternalModel`."""
        timm = import_optional("timm", f"model.name={self.name}")
        if not timm.is_model(self.name):
            raise ValueError(
                f"model.name={self.name} is no model of timm: {_near(self.name, timm.list_models())}"
            )
        options: dict[str, Any] = {"in_chans": input_shape[0], **self.options}
        try:
            net: nn.Module = timm.create_model(
                self.name, pretrained=self.pretrained, num_classes=num_classes, **options
            )
        except Exception as error:
            raise _unloaded(self.name, error) from error
        return net


@dataclass(frozen=True)
class HuggingFaceModel(ExternalModel):
    """A classifier of transformers, for token sequences or for images.

    name: a folder or a name on the hub, whose configuration (and with `pretrained` whose weights) are taken; or a type
    of model, such as bert, with `options` for its configuration.
    """

    name: str
    pretrained: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def make(self, input_shape: Shape, num_classes: int, tokens: Tokens | None) -> nn.Module:
        """See `ExternalModel`."""
        transformers = import_optional("transformers", f"model.name={self.name}")
        kind = (
            "AutoModelForImageClassification"
            if tokens is None
            else "AutoModelForSequenceClassification"
        )
        classes = getattr(transformers, kind)
        options = {**self.options, "num_labels": num_classes}
        if tokens is not None:
            options["pad_token_id"] = tokens.padding
        try:
            if self.pretrained:
                net = classes.from_pretrained(
                    self.name, attn_implementation="eager", ignore_mismatched_sizes=True, **options
                )
            else:
                net = classes.from_config(
                    self._config(transformers, options, tokens), attn_implementation="eager"
                )
        except (
            Exception
        ) as error:  # the hub, its cache, a file, or options that the model does not have
            raise _unloaded(self.name, error) from error
        size = getattr(net.config, "vocab_size", None)
        if tokens is not None and size is not None and size < tokens.size:
            raise ValueError(
                f"model.name={self.name} knows {size} tokens, the data has {tokens.size}: use its tokenizer"
            )
        return _ForImages(net) if tokens is None else _ForTokens(net, tokens.padding)

    def _config(self, transformers: Any, options: Mapping[str, Any], tokens: Tokens | None) -> Any:
        if self.name not in transformers.CONFIG_MAPPING:
            return transformers.AutoConfig.from_pretrained(self.name, **options)
        size = {} if tokens is None else {"vocab_size": tokens.size}
        return transformers.AutoConfig.for_model(self.name, **size, **options)


class _ForTokens(nn.Module):
    """Token numbers [B, T] to logits, padding hidden."""

    def __init__(self, net: nn.Module, padding: int):
        super().__init__()
        self.net, self.padding = net, padding

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = (tokens != self.padding).long()
        logits: Tensor = self.net(input_ids=tokens, attention_mask=hidden).logits
        return logits


class _ForImages(nn.Module):
    """Images [B, c, h, w] to logits."""

    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.net(pixel_values=images).logits
        return logits


def _load_fitting(net: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Put in all values that have a place of their shape."""
    own = net.state_dict()
    fitting = {
        key: value for key, value in values.items() if key in own and own[key].shape == value.shape
    }
    net.load_state_dict(fitting, strict=False)


def _near(name: str, names: list[str]) -> str:
    """Of very many names the nearest one."""
    near = nearest(name, names)
    return (
        f"did you mean {near}?" if near else f"it has {len(names)}, such as {', '.join(names[:5])}"
    )


def _unloaded(name: str, error: BaseException) -> ValueError:
    return ValueError(
        f"model.name={name} cannot be made ({type(error).__name__}: {first_line(error).rstrip('.')}): name one that is "
        "on this machine or can be downloaded, and options that it has"
    )


if not TYPE_CHECKING:  # mypy would take every attribute of this module for one that exists

    def __getattr__(name: str) -> None:
        """Raise `Refused` with the new name of a class that stored configurations may name."""
        if name == "HuggingFace":
            raise Refused(
                "model._target_: raysim.models.zoo.HuggingFace is now called "
                "raysim.models.zoo.HuggingFaceModel. Write that name."
            )
        raise AttributeError(f"raysim.models.zoo has no attribute {name!r}")
