"""Recipes for networks of torchvision, timm and Hugging Face.

A network is chosen by the name that its library uses, such as "resnet18" in torchvision.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from torch import Tensor, nn

from raysim.models.classifier import Shape
from raysim.models.split import ExternalModel
from raysim.primitives.checks import one_of
from raysim.primitives.errors import RefusedError, first_line, nearest, suggest
from raysim.primitives.extras import import_optional
from raysim.primitives.kinds import Tokens

NetworkTask: TypeAlias = Literal["classify", "causal"]

NAMES_IN_MESSAGE = 5
NOISY_MODULES = ("modeling_utils", "configuration_utils")  # of transformers; see `_quiet`


def is_torchvision_model(name: str) -> bool:
    """Return True if torchvision has a classifier of this name."""
    from torchvision import models

    return name in models.list_models(models)


@dataclass(frozen=True)
class Torchvision(ExternalModel):
    """A recipe for a classifier of torchvision.models.

    name: torchvision's name of the classifier, such as "resnet18".
    pretrained: True loads or downloads the default weights. If these are for another number of
    classes, the head gets random weights.
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
            _load_fitting_values(net, values, self.name, num_classes)
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

    name: a local folder with the model's configuration, or the model's name on the hub. A type of
    model, such as "bert", means the default configuration of this type.
    pretrained: True loads the weights from this folder or from the hub. If the weights are for
    another number of classes, the head gets random weights.
    options: values that replace those in the model's configuration.
    task: "classify" returns logits [B, C] of a sequence or an image. "causal" returns logits [B, C,
    T] of the next token at T positions.
    """

    name: str
    pretrained: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    task: NetworkTask = "classify"

    def __post_init__(self) -> None:
        one_of("model.task", self.task, get_args(NetworkTask))

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
        report: dict[str, Any] = {}
        try:
            with _quiet(transformers, is_local=Path(self.name).is_dir()):
                if self.pretrained:
                    net, report = classes.from_pretrained(
                        self.name,
                        attn_implementation="eager",
                        ignore_mismatched_sizes=True,  # checked below
                        output_loading_info=True,
                        **options,
                    )
                else:
                    config = self._configuration(transformers, options, tokens)
                    net = classes.from_config(config, attn_implementation="eager")
        except RefusedError:
            raise
        except Exception as error:  # errors of the hub, the cache, a file or the options
            raise _cannot_be_made(self.name, error) from error
        head_size = num_classes if self.task == "classify" else None
        _check_shapes(self.name, report.get("mismatched_keys", ()), head_size)
        random = _random_weights(net, report.get("missing_keys", ()), head_size)
        if tokens is None:
            return _ImageLogits(net, random)
        _check_length(self.name, net.config, input_shape[0])
        vocabulary_size = getattr(net.config, "vocab_size", None)
        if vocabulary_size is not None and vocabulary_size < tokens.size:
            raise ValueError(
                f"model.name={self.name}: the model's vocabulary has {vocabulary_size} "
                f"tokens, but the vocabulary of the data's tokenizer has {tokens.size}. Set "
                "data.tokenizer to the model's tokenizer."
            )
        if self.task == "causal":
            return _NextTokenLogits(net, random, num_classes)
        return _TokenLogits(net, random, tokens.padding)

    def _configuration(
        self, transformers: Any, options: Mapping[str, Any], tokens: Tokens | None
    ) -> Any:
        if self.name not in transformers.CONFIG_MAPPING:
            config, unknown = transformers.AutoConfig.from_pretrained(
                self.name, return_unused_kwargs=True, **options
            )
            _refuse_options(config, unknown)
            return config
        usual = transformers.AutoConfig.for_model(self.name)
        _refuse_options(usual, [name for name in options if not hasattr(usual, name)])
        size: dict[str, int | None] = {} if tokens is None else {"vocab_size": tokens.size}
        if self.task == "causal":  # the data decides the number of tokens
            size |= {"bos_token_id": None, "eos_token_id": None}
        return transformers.AutoConfig.for_model(self.name, **size, **options)


class _Logits(nn.Module):
    """A wrapper of a network of `transformers` that returns only the logits.

    random_weights: the names of weights that have random values, because no file of the pretrained
    model contains them. Weights of a classifier's head are not listed.
    """

    def __init__(self, net: nn.Module, random_weights: Sequence[str]):
        super().__init__()
        self.net, self.random_weights = net, tuple(random_weights)


def find_random_weights(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the weights that are in no file of the pretrained model.

    Their values are random. The weights of a classifier's head are left out, because the data
    decides its size.
    """
    names: list[str] = []
    for module in model.modules():
        if isinstance(module, _Logits):
            names += module.random_weights
    return tuple(names)


class _TokenLogits(_Logits):
    """A network of `transformers` that returns logits [B, C] for tokens [B, T].

    padding: the number of the padding token, which the network must ignore.
    """

    def __init__(self, net: nn.Module, random_weights: Sequence[str], padding: int):
        super().__init__(net, random_weights)
        self.padding = padding

    def forward(self, tokens: Tensor) -> Tensor:
        attention_mask = (tokens != self.padding).long()
        logits: Tensor = self.net(input_ids=tokens, attention_mask=attention_mask).logits
        return logits


class _NextTokenLogits(_Logits):
    """A causal network of `transformers` that returns logits [B, C, T] for tokens [B, T].

    C is the number of tokens in the data's vocabulary; logits of further tokens are left out.
    Padding at the end needs no mask, because no position sees later positions.
    """

    def __init__(self, net: nn.Module, random_weights: Sequence[str], num_classes: int):
        super().__init__(net, random_weights)
        self.num_classes = num_classes

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.net(input_ids=tokens, use_cache=False).logits
        return logits[:, :, : self.num_classes].transpose(1, 2)


class _ImageLogits(_Logits):
    """A network of `transformers` that returns logits [B, C] for images [B, c, h, w]."""

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.net(pixel_values=images).logits
        return logits


def _load_fitting_values(
    net: nn.Module, values: Mapping[str, Tensor], name: str, num_classes: int
) -> None:
    """Load the pretrained values for which the network has a tensor of equal name and shape.

    name: `model.name`, for the error.
    num_classes: the number of outputs of the network's head.
    Raise ValueError if two tensors of the same name have different shapes, except in the head.
    """
    state = net.state_dict()
    fitting, mismatched = {}, []
    for key, value in values.items():
        if key in state and state[key].shape == value.shape:
            fitting[key] = value
        elif key in state:
            mismatched.append((key, value.shape, state[key].shape))
    _check_shapes(name, mismatched, num_classes)
    net.load_state_dict(fitting, strict=False)


@contextmanager
def _quiet(transformers: Any, is_local: bool) -> Iterator[None]:
    """Inside `with`, keep `transformers` from printing a report when it loads weights.

    raysim itself reports once which weights are missing.
    is_local: True, for a model in a local folder, also hides the progress bar.
    """
    loggers = [logging.getLogger(f"transformers.{name}") for name in NOISY_MODULES]
    messages = transformers.utils.logging
    hides_progress = is_local and messages.is_progress_bar_enabled()
    try:
        for logger in loggers:  # with another level, it would report more
            logger.addFilter(_is_error)
        if hides_progress:
            messages.disable_progress_bar()
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(_is_error)
        if hides_progress:
            messages.enable_progress_bar()


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def _refuse_options(config: Any, unknown: Collection[str]) -> None:
    """Raise `RefusedError` if `model.options` has names that a configuration does not have.

    config: the configuration of a model of `transformers`.
    unknown: the names in `model.options` that the configuration does not have. If there are none,
    do nothing.
    """
    if unknown:
        name = sorted(unknown)[0]
        valid = sorted({*config.to_dict(), *type(config).attribute_map})
        advice = suggest(name, valid, f"{type(config).__name__} has")
        raise RefusedError(f"model.options.{name} does not exist: {advice}")


def _check_shapes(
    name: str, mismatched: Iterable[tuple[str, Shape, Shape]], head_size: int | None
) -> None:
    """Raise ValueError if pretrained weights have other shapes than the weights of the model.

    mismatched: the weights with different shapes: the name, the shape in the file, and the shape in
    the model.
    head_size: the number of outputs of the head. A weight whose first dimension in the model is
    this number may have another first dimension in the file. None allows no difference.
    """
    wrong = []
    for weight, stored, shape in sorted(mismatched):
        is_head = shape[:1] == (head_size,) and stored[1:] == shape[1:]
        if not is_head:
            wrong.append(f"{weight} has {list(stored)} and needs {list(shape)}")
    if wrong:
        raise ValueError(
            f"model.pretrained=true: {len(wrong)} weights of model.name={name} do not have the "
            f"shape that model.options asks for: {'; '.join(wrong[:NAMES_IN_MESSAGE])}. Leave "
            "these options out, or set model.pretrained=false."
        )


def _random_weights(net: nn.Module, missing: Iterable[str], head_size: int | None) -> list[str]:
    """Return the names of the network's weights that stay random, except those of the head.

    missing: the names of the weights that no pretrained file has.
    head_size: the number of outputs of the head. Weights with this number of rows count as the
    head's, and are not returned. None returns all weights.
    """
    state = net.state_dict()
    return [
        name for name in sorted(missing) if name in state and state[name].shape[:1] != (head_size,)
    ]


def _check_length(name: str, config: Any, length: int) -> None:
    """Raise ValueError if rows of tokens are longer than the model can read.

    A model with rotary positions can read rows of any length.
    name: `model.name`, for the error.
    length: the number of tokens in a row.
    """
    has_rotary_positions = any(key.startswith("rope") for key in config.to_dict())
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and longest < length and not has_rotary_positions:
        raise ValueError(
            f"model.name={name} reads at most {longest} tokens, and rows have {length}. Set "
            f"data.length to at most {longest}."
        )


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
