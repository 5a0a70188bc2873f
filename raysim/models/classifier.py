"""What every network is (features and one linear head) and how a recipe builds it from a seed."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

Shape = tuple[int, int, int]  # channels, height, width


class Classifier(nn.Module):
    """x [B, channels, H, W] to features [B, F], then to logits [B, C] with one `Linear(F, C)`."""

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


class ModelRecipe(ABC):
    """The options of a network, checked when the recipe is made; `build` makes the network."""

    @abstractmethod
    def extractor(self, input_shape: Shape) -> tuple[nn.Module, int]:
        """A fresh feature extractor for such inputs and its F; ValueError when the inputs do not fit."""

    def build(self, input_shape: Shape, num_classes: int, seed: int) -> Classifier:
        """The same seed gives the same parameters; the global generators stay as they were."""
        with torch.random.fork_rng(devices=[]):
            # the generator itself, for the usual call would also reseed every CUDA device
            torch.default_generator.manual_seed(seed)
            return Classifier(*self.extractor(input_shape), num_classes)


def is_stochastic(module: nn.Module) -> bool:
    """Whether training may draw from torch's generator (dropout, stochastic depth), which then has to be seeded.

    Looks for a positive rate `p` or `dropout` in any submodule. A false alarm costs a seed, a miss the repeatability.
    """
    rates = [getattr(m, name, 0.0) for m in module.modules() for name in ("p", "dropout")]
    return any(isinstance(rate, int | float) and rate > 0 for rate in rates)
