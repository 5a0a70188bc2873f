"""Networks: features and one linear head, each built by a recipe from an input shape, a class count and a seed."""

from raysim.models.cct import Cct7
from raysim.models.classifier import Classifier, ModelRecipe, is_stochastic
from raysim.models.cnn import Cnn, DigitsCnn, Mlp, MnistCnn, SmallCnn
from raysim.models.resnet import ResNet
from raysim.models.vgg import Vgg11

__all__ = [
    "Cct7",
    "Classifier",
    "Cnn",
    "DigitsCnn",
    "Mlp",
    "MnistCnn",
    "ModelRecipe",
    "ResNet",
    "SmallCnn",
    "Vgg11",
    "is_stochastic",
]
