"""The two networks of FRAug that make features for given labels: the generator and RTNet.

Source: Chen et al., "FRAug" (ICCV 2023). In shapes, B is the number of rows, C of classes, D of
features.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from raysim.methods.mixup import soft_targets


class Conditional(nn.Module):
    """A network whose input is rows [B, n] joined with their one-hot labels [B, C].

    num_classes: the number C of classes.
    layers: the layers, of which the first one has n + C inputs.
    """

    def __init__(self, num_classes: int, *layers: nn.Module):
        super().__init__()
        self.num_classes = num_classes
        self.layers = nn.Sequential(*layers)

    def forward(self, rows: Tensor, labels: Tensor) -> Tensor:
        one_hot = soft_targets(labels, self.num_classes, rows.dtype)
        return cast(Tensor, self.layers(torch.cat([rows, one_hot], dim=1)))


def make_generator(features: int, noise: int, num_classes: int) -> Conditional:
    """Return FRAug's generator, a network that makes features [B, D] from noise [B, Z] and labels.

    The features are not negative. The labels enter the first layer as one-hot rows.
    features: D.
    noise: Z.
    """
    first, second = nn.Linear(noise + num_classes, features), nn.Linear(features, features)
    layers = first, nn.BatchNorm1d(features), nn.ReLU(), second, nn.BatchNorm1d(features), nn.ReLU()
    return Conditional(num_classes, *layers)


def make_rtnet(
    source: int, features: int, hidden: int, num_classes: int, norm: bool
) -> Conditional:
    """Return RTNet, a network that makes residuals [B, D] from generated features and labels.

    source: G, the number of generated features; the generated features are [B, G].
    features: D, the number of the model's features.
    hidden: the width of the hidden layer.
    norm: True adds a BatchNorm at the end.
    """
    first, second = nn.Linear(source + num_classes, hidden), nn.Linear(hidden, features)
    last = (nn.BatchNorm1d(features),) if norm else ()
    return Conditional(num_classes, first, nn.BatchNorm1d(hidden), nn.ReLU(), second, *last)
