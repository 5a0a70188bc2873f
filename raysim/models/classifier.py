"""What every network is (features and one linear head) and how a recipe builds it from a seed."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from raysim.primitives.kinds import Tokens

Shape = tuple[int, ...]  # of one input; channels, height, width of an image


class Classifier(nn.Module):
    """x [B, ...] to features [B, F], then to logits [B, C] with one `Linear(F, C)`."""

    is_split: ClassVar[bool] = True  # whether it has features and a head

    def __init__(self, extractor: nn.Module, feature_dim: int, num_classes: int) -> None:
        super().__init__()
        self.feature_dim = feature_dim
        self.num_classes = num_classes
        self.extractor = extractor
        self.head = nn.Linear(feature_dim, num_classes)

    def features(self, x: Tensor) -> Tensor:
        z: Tensor = self.extractor(x)
        return z

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(x))
        return logits


class ModelRecipe:
    """The options of a network, checked when the recipe is made; `build` makes the network.

    A subclass has `extractor`, or `network` where there is more to say.
    """

    # What inputs its networks take: images [channels, height, width], token numbers, numbers of any shape, or any.
    reads: ClassVar[Literal["images", "tokens", "numbers", "any"]] = "any"

    def extractor(self, input_shape: Shape) -> tuple[nn.Module, int]:
        """A fresh feature extractor for such inputs and its F; ValueError when the inputs do not fit."""
        raise NotImplementedError(
            f"{type(self).__name__} makes no extractor: give it `extractor` or `network`"
        )

    def network(self, input_shape: Shape, num_classes: int, tokens: Tokens | None) -> Classifier:
        """A fresh network. torch's generator is seeded for it."""
        return Classifier(*self.extractor(input_shape), num_classes)

    def build(
        self, input_shape: Shape, num_classes: int, seed: int, tokens: Tokens | None = None
    ) -> Classifier:
        """The same seed gives the same parameters; the global generators stay as they were."""
        self._check(input_shape, tokens)
        with torch.random.fork_rng(devices=[]):
            # the generator itself, for the usual call would also reseed every CUDA device
            torch.default_generator.manual_seed(seed)
            return self.network(input_shape, num_classes, tokens)

    def _check(self, input_shape: Shape, tokens: Tokens | None) -> None:
        reads, name = self.reads, type(self).__name__
        if reads != "any" and (reads == "tokens") != (tokens is not None):
            has = "token numbers" if tokens is not None else f"numbers of shape {list(input_shape)}"
            better = (
                "gru or transformer, or give floats where they are measurements, uint8 where they are images"
                if tokens is not None
                else "mlp, or cnn for images"
            )
            raise ValueError(
                f"the model {name} reads {reads}, and the data has {has}: set model={better}"
            )
        if reads == "images" and len(input_shape) != 3:
            grey = (
                "; or give grey images one channel, inputs[:, None]"
                if len(input_shape) == 2
                else ""
            )
            raise ValueError(
                f"the model {name} reads images [channels, height, width], and the data has inputs of shape "
                f"{list(input_shape)}: set model=mlp, which takes any shape{grey}"
            )


def is_split(model: nn.Module) -> bool:
    """Whether a model has features and a head."""
    return bool(getattr(model, "is_split", hasattr(model, "features") and hasattr(model, "head")))


def is_stochastic(*networks: nn.Module) -> bool:
    """Whether training may draw from torch's generator (dropout, stochastic depth), which then has to be seeded.

    Looks for a positive rate in any submodule, `p` or a name with "drop" in it. A false alarm costs a seed, a miss the
    repeatability.
    """
    names = (
        (m, name)
        for network in networks
        for m in network.modules()
        for name in ("p", "dropout", *vars(m))
    )
    rates = (getattr(m, name, 0.0) for m, name in names if name == "p" or "drop" in name)
    return any(isinstance(rate, int | float) and rate > 0 for rate in rates)
