"""The base classes of neural networks and of recipes.

Most neural networks consist of an extractor and a linear head. A recipe has the settings of a
neural network and can build it.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from raysim.models.lora import Lora, with_adapters
from raysim.primitives.kinds import Tokens

Shape = tuple[int, ...]  # of one input; channels, height and width of an image


class Classifier(nn.Module):
    """A neural network that maps x [B, ...] to features [B, F], and these to logits [B, C].

    `extractor` maps x to features; the head, a `Linear(F, C)`, maps features to logits.
    is_split: False for a model without separate features and head.
    """

    is_split: ClassVar[bool] = True

    def __init__(self, extractor: nn.Module, feature_dim: int, num_classes: int) -> None:
        super().__init__()
        self.feature_dim = feature_dim
        self.num_classes = num_classes
        self.extractor = extractor
        self.head = nn.Linear(feature_dim, num_classes)

    def features(self, x: Tensor) -> Tensor:
        """Return the features of x, [B, F]."""
        z: Tensor = self.extractor(x)
        return z

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(x))
        return logits


class ModelRecipe:
    """A recipe: the settings of a neural network, and the function `build` that makes it.

    A subclass overrides `extractor`, or `network` if there is no extractor with a linear head.
    reads: the inputs of the networks: "images" [channels, height, width], "tokens" (token numbers),
    "numbers" of any shape, or "any" of these.
    """

    lora: Lora = Lora()

    reads: ClassVar[Literal["images", "tokens", "numbers", "any"]] = "any"

    def extractor(self, input_shape: Shape) -> tuple[nn.Module, int]:
        """Return a new feature extractor, and the number of its features.

        Raise ValueError if it cannot take inputs of this shape.
        input_shape: the shape of one sample.
        """
        raise NotImplementedError(
            f"{type(self).__name__} does not define `extractor` or `network`. Define one of them."
        )

    def network(self, input_shape: Shape, num_classes: int, tokens: Tokens | None) -> Classifier:
        """Return a new neural network, initialised from torch's generator, which the caller seeds.

        input_shape: the shape of one sample.
        num_classes: the number of outputs: classes, or numbers of a regression.
        tokens: the vocabulary; None if inputs are not token numbers.
        """
        return Classifier(*self.extractor(input_shape), num_classes)

    def build(
        self, input_shape: Shape, num_classes: int, seed: int, tokens: Tokens | None = None
    ) -> Classifier:
        """Return a new neural network; the seed decides its initial parameters.

        PyTorch's global random generators stay unchanged. Raise ValueError if the network cannot
        take inputs of this shape.
        input_shape: the shape of one sample.
        num_classes: the number of classes, or of values that a regression predicts.
        tokens: the vocabulary's size and padding token; None if inputs are not token numbers.
        """
        self._check_inputs(input_shape, tokens)
        with torch.random.fork_rng(devices=[]):
            # `torch.manual_seed` would also seed every CUDA device
            torch.default_generator.manual_seed(seed)
            network = self.network(input_shape, num_classes, tokens)
            with_adapters(network, self.lora)
            return network

    def _check_inputs(self, input_shape: Shape, tokens: Tokens | None) -> None:
        reads, name = self.reads, type(self).__name__
        if reads in ("images", "numbers") and tokens is not None:
            raise ValueError(
                f"the model {name} reads {reads}, but the inputs of this data are token numbers "
                "(integers). Set model=gru, transformer or gpt. If they are not tokens, store "
                "measurements as floats and images as uint8."
            )
        if reads == "tokens" and tokens is None:
            raise ValueError(
                f"the model {name} reads tokens, but the inputs of this data are numbers of shape "
                f"{list(input_shape)}. Set model=mlp, or model=cnn for images."
            )
        if reads == "images" and len(input_shape) != 3:
            hint = ""
            if len(input_shape) == 2:
                hint = ", or give grey images one channel with inputs[:, None]"
            raise ValueError(
                f"the model {name} reads images [channels, height, width], but the inputs of this "
                f"data have the shape {list(input_shape)}. Set model=mlp, which takes any "
                f"shape{hint}."
            )


def is_split(model: nn.Module) -> bool:
    """Return True if a model computes features [B, F] and has one linear head."""
    has_parts = hasattr(model, "features") and hasattr(model, "head")
    return bool(getattr(model, "is_split", has_parts))


def is_stochastic(*networks: nn.Module) -> bool:
    """Return True if training may draw from torch's generator, which then needs a seed.

    This is assumed if a submodule has an attribute with a number above 0. The attribute is called
    `p`, or has "drop" in its name.
    """
    for network in networks:
        for module in network.modules():
            for name in ("p", "dropout", *vars(module)):
                if name != "p" and "drop" not in name:
                    continue
                rate = getattr(module, name, 0.0)
                if isinstance(rate, int | float) and rate > 0:
                    return True
    return False
