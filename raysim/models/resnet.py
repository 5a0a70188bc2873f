"""torchvision's ResNet-18 and ResNet-50 as feature extractors, with batch or group normalisation and two stems."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

from torch import nn

from raysim.models.classifier import ModelRecipe, Shape
from raysim.primitives.checks import one_of

if TYPE_CHECKING:
    from torchvision.models import ResNet as Network


@dataclass(frozen=True)
class ResNet(ModelRecipe):
    """He et al. 2016. `stem="small"` (3x3, stride 1, no pool) is for 32x32 images, `"imagenet"` for large ones.

    `pretrained` loads torchvision's IMAGENET1K_V1 weights (torch.hub's cache, else a download); the head stays fresh.
    """

    reads: ClassVar[Literal["images"]] = "images"

    depth: Literal[18, 50]
    norm: Literal["batch", "group"] = "batch"
    groups: int = 2
    stem: Literal["small", "imagenet"] = "small"
    pretrained: bool = False

    def __post_init__(self) -> None:
        one_of("model.depth", self.depth, (18, 50))
        one_of("model.norm", self.norm, ("batch", "group"))
        one_of(
            "model.groups", self.groups, (1, 2, 4, 8, 16, 32, 64)
        )  # they have to divide the first 64 channels
        one_of("model.stem", self.stem, ("small", "imagenet"))
        if self.pretrained and (self.norm, self.stem) != ("batch", "imagenet"):
            raise ValueError(
                f"model.pretrained=true has no weights for model.norm={self.norm} with model.stem={self.stem}: "
                "use model.norm=batch and model.stem=imagenet"
            )

    def extractor(self, input_shape: Shape) -> tuple[nn.Module, int]:
        from torchvision.models import resnet18, resnet50

        channels = input_shape[0]
        if self.pretrained and channels != 3:
            raise ValueError(
                f"model.pretrained=true needs 3 channels, the data has {channels}: set it to false"
            )
        norm = nn.BatchNorm2d if self.norm == "batch" else partial(nn.GroupNorm, self.groups)
        net: Network = (resnet18 if self.depth == 18 else resnet50)(norm_layer=norm)
        feature_dim: int = net.fc.in_features
        net.fc = nn.Identity()
        if self.stem == "small" or channels != 3:
            _replace_stem(net, channels, self.stem == "small")
        if self.pretrained:
            _load_imagenet(net, self.depth)
        return net, feature_dim


def _replace_stem(net: Network, channels: int, small: bool) -> None:
    """Another first convolution, initialised as torchvision initialises its own; the small stem has no pool."""
    size, stride, padding = (3, 1, 1) if small else (7, 2, 3)
    net.conv1 = nn.Conv2d(channels, 64, size, stride, padding, bias=False)
    nn.init.kaiming_normal_(net.conv1.weight, mode="fan_out", nonlinearity="relu")
    if small:
        net.maxpool = nn.Identity()


def _load_imagenet(net: Network, depth: int) -> None:
    """Put the ImageNet weights in; ValueError when they cannot be had, for a random start would go unnoticed."""
    from torchvision.models import ResNet18_Weights, ResNet50_Weights

    weights = ResNet18_Weights.IMAGENET1K_V1 if depth == 18 else ResNet50_Weights.IMAGENET1K_V1
    try:
        values = weights.get_state_dict(progress=False, check_hash=True, weights_only=True)
        net.load_state_dict(
            {name: value for name, value in values.items() if not name.startswith("fc.")}
        )
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(
            f"model.pretrained=true cannot load {weights.url} ({type(error).__name__}): put that file into the folder "
            "checkpoints of torch.hub.get_dir(), or set model.pretrained=false"
        ) from error
