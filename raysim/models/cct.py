"""CCT-7/3x1, the compact convolutional transformer that FedBR trains on CIFAR-100.

The network follows the code of Hassani et al. (2021), without an output layer that their code never
uses. `Block` says how the blocks differ from usual transformer blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raysim.models.classifier import ModelRecipe, Shape
from raysim.models.lora import Lora
from raysim.models.pooling import MaxPool2d
from raysim.primitives.checks import in_range

WIDTH, HEADS, BLOCKS = 256, 4, 7


@dataclass(frozen=True)
class Cct7(ModelRecipe):
    """A recipe for CCT-7/3x1: seven transformer blocks on the tokens of one 3x3 convolution.

    Without adapters, training draws random numbers unless both rates are 0.
    attention_dropout: the dropout rate of attention probabilities.
    drop_path: the rate of stochastic depth in the last block. It grows linearly from 0 in the first
    block.
    """

    reads: ClassVar[Literal["images"]] = "images"

    attention_dropout: float = 0.1
    drop_path: float = 0.1
    lora: Lora = field(default_factory=Lora)

    def __post_init__(self) -> None:
        for key in ("attention_dropout", "drop_path"):
            in_range(f"model.{key}", getattr(self, key), least=0, below=1)

    def extractor(self, input_shape: Shape) -> tuple[nn.Module, int]:
        channels, height, width = input_shape
        tokens = -(-height // 2) * -(-width // 2)
        rates = [self.drop_path * block / (BLOCKS - 1) for block in range(BLOCKS)]
        net = nn.Sequential(
            nn.Conv2d(channels, WIDTH, 3, padding=1, bias=False),
            nn.ReLU(),
            MaxPool2d(3, 2, 1),
            MapsToTokens(),
            Position(tokens),
            *(Block(self.attention_dropout, rate) for rate in rates),
            nn.LayerNorm(WIDTH),
            SequencePool(),
        )
        net.apply(_initialise_layer)
        return net, WIDTH


class MapsToTokens(nn.Module):
    """A layer that converts feature maps [B, D, H, W] to tokens [B, H * W, D]."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(2).transpose(1, 2)


class Position(nn.Module):
    """A layer that adds a learnt vector to each token."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, tokens, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight


class Attention(nn.Module):
    """Multi-head self-attention from [B, N, D] to [B, N, D]."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.drop = nn.Dropout(dropout)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        # computed step by step, because fused kernels have no repeatable backward pass on a GPU
        heads = self.qkv(x).unflatten(2, (3, HEADS, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each [B, heads, N, D/heads]
        scores = (query @ key.transpose(2, 3)) * (WIDTH // HEADS) ** -0.5
        mixed = self.drop(scores.softmax(-1)) @ value
        z: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return z


class DropPath(nn.Dropout):
    """Stochastic depth (Huang et al. 2016): in training, skip a branch for random samples."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        return x * F.dropout(x.new_ones(len(x), 1, 1), self.p)


class Block(nn.Module):
    """A block that returns v + mlp(v) for its input u, with v = norm(u + attention(norm(u)))."""

    def __init__(self, attention_dropout: float, drop_path: float) -> None:
        super().__init__()
        self.before = nn.LayerNorm(WIDTH)
        self.attention = Attention(attention_dropout)
        self.between = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )
        self.path = DropPath(drop_path)

    def forward(self, u: Tensor) -> Tensor:
        v: Tensor = self.between(u + self.path(self.attention(self.before(u))))
        z: Tensor = v + self.path(self.mlp(v))
        return z


class SequencePool(nn.Module):
    """A layer that takes a weighted mean of N tokens with learnt weights, [B, N, D] to [B, D]."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        weights: Tensor = self.score(x).softmax(1)  # [B, N, 1]
        return (weights.transpose(1, 2) @ x).squeeze(1)


def _initialise_layer(module: nn.Module) -> None:
    """Initialise one layer as the authors do; LayerNorm keeps weight 1 and bias 0."""
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight)
    elif isinstance(module, Position):
        nn.init.normal_(module.weight, std=0.2)
