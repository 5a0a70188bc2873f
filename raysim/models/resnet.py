"""Recipes for ResNet-18 and ResNet-50 of torchvision, with batch or group normalisation."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias, get_args

from torch import nn

from raysim.models.classifier import ModelRecipe, Shape
from raysim.models.lora import Lora
from raysim.primitives.checks import one_of

if TYPE_CHECKING:
    from torchvision.models import ResNet as Network

ResNetDepth: TypeAlias = Literal[18, 50]
ResNetNorm: TypeAlias = Literal["batch", "group"]
ResNetStem: TypeAlias = Literal["small", "imagenet"]


@dataclass(frozen=True)
class ResNet(ModelRecipe):
    """A recipe for a residual network (He et al. 2016).

    depth: the number of layers.
    norm: the normalisation layers, "batch" or "group".
    groups: the number of groups of group normalisation.
    stem: the first layers; "small" (3x3 convolution, stride 1, no pool) is for 32x32 images,
    "imagenet" for large images.
    pretrained: True loads or downloads torchvision's IMAGENET1K_V1 weights, except for the head.
    """

    reads: ClassVar[Literal["images"]] = "images"

    depth: ResNetDepth
    norm: ResNetNorm = "batch"
    groups: int = 2
    stem: ResNetStem = "small"
    pretrained: bool = False
    lora: Lora = field(default_factory=Lora)

    def __post_init__(self) -> None:
        one_of("model.depth", self.depth, get_args(ResNetDepth))
        one_of("model.norm", self.norm, get_args(ResNetNorm))
        # the number must divide the 64 channels of the first layer
        one_of("model.groups", self.groups, (1, 2, 4, 8, 16, 32, 64))
        one_of("model.stem", self.stem, get_args(ResNetStem))
        if self.pretrained and (self.norm, self.stem) != ("batch", "imagenet"):
            raise ValueError(
                "model.pretrained=true: there are no pretrained weights for "
                f"model.norm={self.norm} with model.stem={self.stem}. Set model.norm=batch and "
                "model.stem=imagenet, or model.pretrained=false."
            )

    def extractor(self, input_shape: Shape) -> tuple[nn.Module, int]:
        from torchvision.models import resnet18, resnet50

        channels = input_shape[0]
        if self.pretrained and channels != 3:
            raise ValueError(
                f"model.pretrained=true needs images of 3 channels, but the data has {channels}. "
                "Set model.pretrained=false."
            )
        norm = nn.BatchNorm2d if self.norm == "batch" else partial(nn.GroupNorm, self.groups)
        make_network = resnet18 if self.depth == 18 else resnet50
        net: Network = make_network(norm_layer=norm)
        feature_dim: int = net.fc.in_features
        net.fc = nn.Identity()
        if self.stem == "small" or channels != 3:
            _replace_stem(net, channels, is_small=self.stem == "small")
        if self.pretrained:
            _load_imagenet(net, self.depth)
        return net, feature_dim


def _replace_stem(net: Network, channels: int, is_small: bool) -> None:
    """Replace the first convolution to fit inputs with this number of channels.

    is_small: True makes it a 3x3 convolution without a max-pool after it, for small images.
    """
    size, stride, padding = (3, 1, 1) if is_small else (7, 2, 3)
    net.conv1 = nn.Conv2d(channels, 64, size, stride, padding, bias=False)
    nn.init.kaiming_normal_(net.conv1.weight, mode="fan_out", nonlinearity="relu")
    if is_small:
        net.maxpool = nn.Identity()


def _load_imagenet(net: Network, depth: int) -> None:
    """Load the weights trained on ImageNet; raise ValueError if this fails."""
    from torchvision.models import ResNet18_Weights, ResNet50_Weights

    weights = ResNet18_Weights.IMAGENET1K_V1 if depth == 18 else ResNet50_Weights.IMAGENET1K_V1
    try:
        values = weights.get_state_dict(progress=False, check_hash=True, weights_only=True)
        without_head = {name: v for name, v in values.items() if not name.startswith("fc.")}
        net.load_state_dict(without_head)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(
            f"model.pretrained=true cannot load {weights.url} ({type(error).__name__}). Put that "
            "file into the folder checkpoints of torch.hub.get_dir(), or set "
            "model.pretrained=false."
        ) from error
