"""A recipe for VGG-11 without normalisation layers, with one fully connected layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from torch import nn

from raysim.models.classifier import ModelRecipe, Shape
from raysim.models.lora import Lora
from raysim.models.pooling import MaxPool2d

# channels of the eight convolutions, 0 for a max-pool (Simonyan and Zisserman 2015, table 1, A)
CHANNELS = (64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0)


@dataclass(frozen=True)
class Vgg11(ModelRecipe):
    """A recipe for VGG-11: eight 3x3 convolutions, five max-pools and a global average.

    FedBR trains it on CIFAR-10. The convolutions have torchvision's initial weights.
    """

    reads: ClassVar[Literal["images"]] = "images"

    lora: Lora = field(default_factory=Lora)

    def extractor(self, input_shape: Shape) -> tuple[nn.Module, int]:
        channels, height, width = input_shape
        if min(height, width) < 32:
            raise ValueError(
                "model=vgg11 needs images of at least 32x32 pixels, but the data has images of "
                f"{height}x{width}. Set model=cnn."
            )
        layers: list[nn.Module] = []
        for width in CHANNELS:
            if width == 0:
                layers.append(MaxPool2d(2))
                continue
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
        net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        for layer in net:
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
                if layer.bias is not None:
                    nn.init.zeros_(layer.bias)
        return net, channels
