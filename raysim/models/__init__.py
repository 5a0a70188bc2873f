"""Recipes that build neural networks, whose initial parameters depend on a seed."""

from typing import TYPE_CHECKING

from raysim.models.cct import Cct7
from raysim.models.classifier import Classifier, ModelRecipe, is_split, is_stochastic
from raysim.models.cnn import Cnn, DigitsCnn, Mlp, MnistCnn, SmallCnn
from raysim.models.gpt import Gpt
from raysim.models.lora import Lora
from raysim.models.resnet import ResNet
from raysim.models.sequence import Gru, Transformer
from raysim.models.split import CustomModel, split_network
from raysim.models.unet import UNet
from raysim.models.vgg import Vgg11
from raysim.models.zoo import HuggingFaceModel, Timm, Torchvision

__all__ = [
    "Cct7",
    "Classifier",
    "Cnn",
    "CustomModel",
    "DigitsCnn",
    "Gpt",
    "Gru",
    "HuggingFaceModel",
    "Lora",
    "Mlp",
    "MnistCnn",
    "ModelRecipe",
    "ResNet",
    "SmallCnn",
    "Timm",
    "Torchvision",
    "Transformer",
    "UNet",
    "Vgg11",
    "is_split",
    "is_stochastic",
    "split_network",
]

RENAMED_CLASSES = {"Own": "CustomModel", "HuggingFace": "HuggingFaceModel"}

if not TYPE_CHECKING:  # mypy would take every attribute of this module for one that exists

    def __getattr__(name: str) -> None:
        """Raise AttributeError with the new name of a class that was renamed."""
        if name in RENAMED_CLASSES:
            raise AttributeError(
                f"raysim.models.{name} is now called raysim.models.{RENAMED_CLASSES[name]}."
            )
        raise AttributeError(f"raysim.models has no attribute {name!r}")
