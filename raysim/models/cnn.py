"""Recipes for small networks: a multilayer perceptron, and CNNs of several papers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal, TypeAlias, get_args

from torch import nn

from raysim.models.classifier import ModelRecipe, Shape
from raysim.models.lora import Lora
from raysim.models.pooling import MaxPool2d
from raysim.primitives.checks import one_of

PoolSize: TypeAlias = Literal[2, 3]
ConvolutionPadding: TypeAlias = Literal[0, 2]
PoolStride: TypeAlias = Literal[2, 3]
DigitsVariant: TypeAlias = Literal["fraug", "fedbn"]
SmallCnnNorm: TypeAlias = Literal["none", "batch", "group"]


@dataclass(frozen=True)
class Mlp(ModelRecipe):
    """A recipe for a multilayer perceptron: Linear and ReLU for each hidden layer.

    widths: the number of units of each hidden layer.
    """

    reads: ClassVar[Literal["numbers"]] = "numbers"

    widths: list[int] | tuple[int, ...] = (64,)
    lora: Lora = field(default_factory=Lora)

    def __post_init__(self) -> None:
        if not self.widths or min(self.widths) < 1:
            raise ValueError(
                f"model.widths={list(self.widths)} needs at least one width, each 1 or more. Set "
                "it to [64], for example."
            )

    def extractor(self, input_shape: Shape) -> tuple[nn.Module, int]:
        layers: list[nn.Module] = [nn.Flatten()]
        size = math.prod(input_shape)
        for width in self.widths:
            layers += [nn.Linear(size, width), nn.ReLU()]
            size = width
        return nn.Sequential(*layers), size


@dataclass(frozen=True)
class Cnn(ModelRecipe):
    """A recipe for the CNN of McMahan et al. 2017: two 5x5 convolutions and 512 units.

    pool: the height and width of the windows of the max-pools, in pixels.
    padding: the padding of the convolutions, in pixels at each side.
    stride: the stride of the max-pools, in pixels.

    With the default settings, max-pools have a padding of 1 and halve height and width. Otherwise
    they have no padding.
    """

    reads: ClassVar[Literal["images"]] = "images"

    pool: PoolSize = 3
    padding: ConvolutionPadding = 2
    stride: PoolStride = 2
    lora: Lora = field(default_factory=Lora)

    def __post_init__(self) -> None:
        one_of("model.pool", self.pool, get_args(PoolSize))
        one_of("model.padding", self.padding, get_args(ConvolutionPadding))
        one_of("model.stride", self.stride, get_args(PoolStride))

    def extractor(self, input_shape: Shape) -> tuple[nn.Module, int]:
        pool_padding = int((self.pool, self.padding, self.stride) == (3, 2, 2))
        windows = [(5, 1, self.padding), (self.pool, self.stride, pool_padding)]
        size = flat_size("cnn", input_shape, 64, 2 * windows)
        layers = [
            nn.Conv2d(input_shape[0], 32, 5, padding=self.padding),
            nn.ReLU(),
            MaxPool2d(self.pool, self.stride, pool_padding),
            nn.Conv2d(32, 64, 5, padding=self.padding),
            nn.ReLU(),
            MaxPool2d(self.pool, self.stride, pool_padding),
            nn.Flatten(),
            nn.Linear(size, 512),
            nn.ReLU(),
        ]
        return nn.Sequential(*layers), 512


@dataclass(frozen=True)
class MnistCnn(ModelRecipe):
    """A recipe for FedBR's network for RotatedMNIST: four convolutions and a global average.

    Its normalisation layers come after the ReLU.
    """

    reads: ClassVar[Literal["images"]] = "images"

    lora: Lora = field(default_factory=Lora)

    def extractor(self, input_shape: Shape) -> tuple[nn.Module, int]:
        layers: list[nn.Module] = []
        channels = input_shape[0]
        for width, stride in ((64, 1), (128, 2), (128, 1), (128, 1)):
            layers += [
                nn.Conv2d(channels, width, 3, stride, padding=1),
                nn.ReLU(),
                nn.GroupNorm(8, width),
            ]
            channels = width
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()), channels


@dataclass(frozen=True)
class DigitsCnn(ModelRecipe):
    """A recipe for the CNN that FRAug and FedBN train on domains of digits.

    In training, a batch needs at least two samples.

    variant: the paper; "fraug" has max-pools that overlap, "fedbn" has pools that do not.
    """

    reads: ClassVar[Literal["images"]] = "images"

    variant: DigitsVariant = "fraug"
    lora: Lora = field(default_factory=Lora)

    def __post_init__(self) -> None:
        one_of("model.variant", self.variant, get_args(DigitsVariant))

    def extractor(self, input_shape: Shape) -> tuple[nn.Module, int]:
        pool = (3, 2, 1) if self.variant == "fraug" else (2, 2, 0)
        size = flat_size(
            "digits_cnn", input_shape, 128, [(5, 1, 2), pool, (5, 1, 2), pool, (5, 1, 2)]
        )
        layers: list[nn.Module] = [
            nn.Conv2d(input_shape[0], 64, 5, padding=2),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            MaxPool2d(*pool),
            nn.Conv2d(64, 64, 5, padding=2),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            MaxPool2d(*pool),
            nn.Conv2d(64, 128, 5, padding=2),
            nn.BatchNorm2d(128),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(size, 2048),
            nn.BatchNorm1d(2048),
            nn.ReLU(),
            nn.Linear(2048, 512),
            nn.BatchNorm1d(512),
            nn.ReLU(),
        ]
        return nn.Sequential(*layers), 512


@dataclass(frozen=True)
class SmallCnn(ModelRecipe):
    """A recipe for a small network for 8x8 digits: two 3x3 convolutions and 64 units.

    norm: the normalisation layers, "none", "batch", or "group" with 8 groups of 2 or 4 channels.
    """

    reads: ClassVar[Literal["images"]] = "images"

    norm: SmallCnnNorm = "none"
    lora: Lora = field(default_factory=Lora)

    def __post_init__(self) -> None:
        one_of("model.norm", self.norm, get_args(SmallCnnNorm))

    def extractor(self, input_shape: Shape) -> tuple[nn.Module, int]:
        size = flat_size("small_cnn", input_shape, 32, 2 * [(3, 1, 1), (2, 2, 0)])
        layers = [
            nn.Conv2d(input_shape[0], 16, 3, padding=1),
            *self._norm_layers(16),
            nn.ReLU(),
            MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            *self._norm_layers(32),
            nn.ReLU(),
            MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(size, 64),
            nn.ReLU(),
        ]
        return nn.Sequential(*layers), 64

    def _norm_layers(self, channels: int) -> list[nn.Module]:
        if self.norm == "none":
            return []
        return [nn.BatchNorm2d(channels) if self.norm == "batch" else nn.GroupNorm(8, channels)]


def flat_size(
    name: str, input_shape: Shape, channels: int, windows: list[tuple[int, int, int]]
) -> int:
    """Return the number of values per image after a sequence of convolutions and pools.

    name: the option of the group `model`, for the error.
    channels: the number of maps after the last convolution.
    windows: the (size, stride, padding) of each convolution and pool.
    Raise ValueError if images of the shape `input_shape` (channels, height, width) are too small.
    """
    height, width = input_shape[1:]
    for window, stride, padding in windows:
        height, width = ((side + 2 * padding - window) // stride + 1 for side in (height, width))
        if min(height, width) < 1:
            raise ValueError(
                f"model={name} is too deep for images of {input_shape[1]}x{input_shape[2]} "
                "pixels. Use larger images, or model=mlp, which takes any size."
            )
    return channels * height * width
