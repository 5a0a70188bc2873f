"""Networks: features and one linear head, each built by a recipe from an input shape, a class count and a seed."""

from raysim.models.cct import Cct7
from raysim.models.classifier import Classifier, ModelRecipe, is_stochastic, splits
from raysim.models.cnn import Cnn, DigitsCnn, Mlp, MnistCnn, SmallCnn
from raysim.models.lora import Lora
from raysim.models.resnet import ResNet
from raysim.models.sequence import Gru, Transformer
from raysim.models.split import Own, split
from raysim.models.vgg import Vgg11
from raysim.models.zoo import HuggingFace, Timm, Torchvision

__all__ = [
    "Cct7",
    "Classifier",
    "Cnn",
    "DigitsCnn",
    "Gru",
    "HuggingFace",
    "Lora",
    "Mlp",
    "MnistCnn",
    "ModelRecipe",
    "Own",
    "ResNet",
    "SmallCnn",
    "Timm",
    "Torchvision",
    "Transformer",
    "Vgg11",
    "is_stochastic",
    "split",
    "splits",
]
