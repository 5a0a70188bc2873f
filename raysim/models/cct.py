"""CCT-7/3x1, the compact convolutional transformer (Hassani et al. 2021) that FedBR trains on CIFAR-100.

As in the authors' code, the residual of a block's second branch carries the normalised input of that branch, so a
block is neither plain pre-norm nor post-norm. Their unused output layer is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raysim.models.classifier import ModelRecipe, Shape
from raysim.primitives.checks import in_range

WIDTH, HEADS, BLOCKS = 256, 4, 7


@dataclass(frozen=True)
class Cct7(ModelRecipe):
    """Seven blocks on the tokens of one 3x3 convolution. Draws from torch's generator in train mode.

    `attention_dropout` acts on the attention probabilities; `drop_path` is the rate of the last block, the blocks
    before it have evenly smaller ones, from 0.
    """

    reads: ClassVar[Literal["images"]] = "images"

    attention_dropout: float = 0.1
    drop_path: float = 0.1

    def __post_init__(self) -> None:
        for key in ("attention_dropout", "drop_path"):
            in_range(f"model.{key}", getattr(self, key), least=0, below=1)

    def extractor(self, input_shape: Shape) -> tuple[nn.Module, int]:
        channels, height, width = input_shape
        tokens = -(-height // 2) * -(-width // 2)
        net = nn.Sequential(
            nn.Conv2d(channels, WIDTH, 3, padding=1, bias=False),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
            Tokens(),
            Position(tokens),
            *(
                Block(self.attention_dropout, self.drop_path * i / (BLOCKS - 1))
                for i in range(BLOCKS)
            ),
            nn.LayerNorm(WIDTH),
            SequencePool(),
        )
        net.apply(_initialise)
        return net, WIDTH


class Tokens(nn.Module):
    """[B, D, H, W] to [B, H * W, D]."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(2).transpose(1, 2)


class Position(nn.Module):
    """A learnt vector per token, added once."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, tokens, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight


class Attention(nn.Module):
    """Multi-head self-attention, [B, N, D] to [B, N, D]; queries, keys and values from one projection."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.drop = nn.Dropout(dropout)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        # written out: the fused kernels have no repeatable backward pass on a GPU
        query, key, value = (
            self.qkv(x).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        )  # each [B, heads, N, D/heads]
        scores = (query @ key.transpose(2, 3)) * (WIDTH // HEADS) ** -0.5
        mixed = self.drop(scores.softmax(-1)) @ value
        z: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return z


class DropPath(nn.Dropout):
    """Stochastic depth (Huang et al. 2016): drop a whole branch per sample, scale up the survivors."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        return x * F.dropout(x.new_ones(len(x), 1, 1), self.p)


class Block(nn.Module):
    """v = norm(u + attention(norm(u))), then v + mlp(v); both branches may be dropped."""

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
    """Tokens [B, N, D] to their learnt weighted mean [B, D]."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        weights: Tensor = self.score(x).softmax(1)  # [B, N, 1]
        return (weights.transpose(1, 2) @ x).squeeze(1)


def _initialise(module: nn.Module) -> None:
    """The authors' start, one layer at a time; LayerNorm keeps its 1 and 0."""
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight)
    elif isinstance(module, Position):
        nn.init.normal_(module.weight, std=0.2)
