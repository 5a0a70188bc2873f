"""A recipe for a U-Net, which predicts a class for each pixel of an image."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn

from raysim.models.classifier import Classifier, ModelRecipe, Shape
from raysim.models.pooling import MaxPool2d
from raysim.models.split import WholeNetwork
from raysim.primitives.checks import at_least, one_of
from raysim.primitives.kinds import Tokens

UNetNorm: TypeAlias = Literal["none", "batch", "group"]


@dataclass(frozen=True)
class UNet(ModelRecipe):
    """A recipe for the network of Ronneberger et al. 2015, with padded convolutions.

    Labels are classes per pixel. The paper has width 64, 4 levels and no norm.

    width: the channels of the first level; each level below has twice as many.
    levels: how often the image is halved; height and width must be divisible by 2 ** levels.
    norm: the normalisation after each 3x3 convolution; "group" has up to 8 groups.
    """

    reads: ClassVar[Literal["images"]] = "images"

    width: int = 16
    levels: int = 2
    norm: UNetNorm = "group"

    def __post_init__(self) -> None:
        at_least("model.width", self.width, 1)
        at_least("model.levels", self.levels, 1)
        one_of("model.norm", self.norm, get_args(UNetNorm))

    def network(self, input_shape: Shape, num_classes: int, tokens: Tokens | None) -> Classifier:
        factor = 2**self.levels
        height, width = input_shape[1:]
        if height % factor or width % factor:
            raise ValueError(
                f"model.levels={self.levels} needs images whose height and width are divisible by "
                f"{factor}, but this data has {height} x {width} pixels. Set fewer levels, or "
                "another data.size."
            )
        net = UNetNetwork(input_shape[0], num_classes, self.width, self.levels, self.norm)
        return WholeNetwork(net, num_classes)


class UNetNetwork(nn.Module):
    """A network from images [B, channels, H, W] to outputs [B, num_classes, H, W]."""

    def __init__(self, channels: int, num_classes: int, width: int, levels: int, norm: str):
        super().__init__()
        widths = [width * 2**level for level in range(levels + 1)]
        inputs = [channels, *widths]
        self.down = nn.ModuleList(
            _block(before, after, norm) for before, after in zip(inputs, widths, strict=False)
        )
        self.pool = MaxPool2d(2)
        coarse_to_fine = range(levels, 0, -1)
        self.enlarge = nn.ModuleList(
            nn.ConvTranspose2d(widths[level], widths[level - 1], 2, stride=2)
            for level in coarse_to_fine
        )
        self.up = nn.ModuleList(
            _block(2 * widths[level - 1], widths[level - 1], norm) for level in coarse_to_fine
        )
        self.outputs = nn.Conv2d(width, num_classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        maps: list[Tensor] = []
        current = images
        for block in self.down:
            if maps:
                current = self.pool(current)
            current = block(current)
            maps.append(current)
        maps.pop()  # the coarsest maps are the input of the way up; nothing is joined with them
        for enlarge, block in zip(self.enlarge, self.up, strict=True):
            current = block(torch.cat([maps.pop(), enlarge(current)], dim=1))
        result: Tensor = self.outputs(current)
        return result


def _block(before: int, after: int, norm: str) -> nn.Sequential:
    """Return two 3x3 convolutions, each followed by a normalisation layer and ReLU.

    before, after: the numbers of channels of the input and of the output.
    norm: "batch", "group" with up to 8 groups of equal size, or "none".
    """
    layers: list[nn.Module] = []
    for channels in (before, after):
        layers.append(nn.Conv2d(channels, after, 3, padding=1))
        if norm == "batch":
            layers.append(nn.BatchNorm2d(after))
        elif norm == "group":
            groups = next(count for count in range(min(8, after), 0, -1) if after % count == 0)
            layers.append(nn.GroupNorm(groups, after))
        layers.append(nn.ReLU())
    return nn.Sequential(*layers)
