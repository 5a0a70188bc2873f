"""VGG-11 without normalisation and without its hidden fully connected layers, as FedBR trains it on CIFAR-10."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import nn

from raysim.models.classifier import ModelRecipe, Shape

# channels of the eight convolutions; 0 is a max-pool (Simonyan and Zisserman 2015, configuration A)
PLAN = (64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0)


@dataclass(frozen=True)
class Vgg11(ModelRecipe):
    """Eight 3x3 convolutions, five halvings, global average; initialised as torchvision does, no dropout."""

    reads: ClassVar[Literal["images"]] = "images"

    def extractor(self, input_shape: Shape) -> tuple[nn.Module, int]:
        channels, height, width = input_shape
        if min(height, width) < 32:
            raise ValueError(
                f"model=vgg11 needs images of at least 32x32 pixels, not {height}x{width}: use model=cnn"
            )
        layers: list[nn.Module] = []
        for out in PLAN:
            layers += (
                [nn.Conv2d(channels, out, 3, padding=1), nn.ReLU()] if out else [nn.MaxPool2d(2)]
            )
            channels = out or channels
        net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        for layer in net:
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
                if layer.bias is not None:
                    nn.init.zeros_(layer.bias)
        return net, channels
