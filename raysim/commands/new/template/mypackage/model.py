"""A model: you write the feature extractor, and raysim adds a linear layer as its head."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn

from raysim import ModelRecipe
from raysim.primitives.checks import at_least


@dataclass(frozen=True)
class MyModel(ModelRecipe):
    """A network with two hidden layers of `width` units."""

    width: int = 32

    def __post_init__(self) -> None:
        at_least("model.width", self.width, 1)

    def extractor(self, input_shape: tuple[int, ...]) -> tuple[nn.Module, int]:
        """Return the feature extractor, and the number of features that it computes.

        input_shape: the shape of one input, such as (1, 8, 8) for an image.
        """
        layers = [nn.Flatten(), nn.Linear(math.prod(input_shape), self.width), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(self.width, self.width), nn.ReLU()), self.width
