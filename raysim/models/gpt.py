"""A small transformer for language data: GPT-2 (Radford et al. 2019)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from raysim.models.classifier import Classifier, ModelRecipe, Shape
from raysim.models.lora import Lora
from raysim.models.split import WholeNetwork
from raysim.primitives.checks import at_least, in_range, require
from raysim.primitives.kinds import Tokens

INIT_STD = 0.02  # standard deviation of initial weights, as in GPT-2


@dataclass(frozen=True)
class Gpt(ModelRecipe):
    """A recipe for a decoder-only transformer (GPT-2) with learnt position embeddings.

    Its outputs are logits [B, C, T] of the next token at T positions. Padding at the end has no
    influence.

    width: the number of features of a token.
    heads: the attention heads of a block.
    blocks: the transformer blocks.
    dropout: the dropout rate.
    tied: True uses the tokens' embedding also in the output layer.
    """

    reads: ClassVar[Literal["tokens"]] = "tokens"
    width: int = 128
    heads: int = 4
    blocks: int = 4
    dropout: float = 0.0
    tied: bool = True
    lora: Lora = field(default_factory=Lora)

    def __post_init__(self) -> None:
        for key in ("width", "heads", "blocks"):
            at_least(f"model.{key}", getattr(self, key), 1)
        require(
            "model.heads",
            self.heads,
            self.width % self.heads == 0,
            f"a divisor of model.width={self.width}",
        )
        in_range("model.dropout", self.dropout, least=0, below=1)

    def network(self, input_shape: Shape, num_classes: int, tokens: Tokens | None) -> Classifier:
        assert tokens is not None, "checked: the recipe reads tokens"
        net = GptNetwork(tokens.size, num_classes, input_shape[0], self)
        return WholeNetwork(net, num_classes)


class GptNetwork(nn.Module):
    """A network from tokens [B, T] to logits [B, C, T]."""

    def __init__(self, tokens: int, outputs: int, length: int, recipe: Gpt):
        super().__init__()
        width = recipe.width
        self.embedding = nn.Embedding(tokens, width)
        self.position = nn.Parameter(torch.empty(length, width))
        self.drop = nn.Dropout(recipe.dropout)
        blocks = [_GptBlock(width, recipe.heads, recipe.dropout) for _ in range(recipe.blocks)]
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, outputs, bias=False)
        self.apply(_initialise)
        nn.init.normal_(self.position, std=INIT_STD)
        for block in blocks:
            for layer in (block.out, block.down):
                nn.init.normal_(layer.weight, std=INIT_STD / (2 * recipe.blocks) ** 0.5)
        if recipe.tied:
            self.head.weight = self.embedding.weight

    def get_output_embeddings(self) -> nn.Linear:
        """Return the output layer; models of the package `transformers` have the same method."""
        return self.head

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        values = self.drop(self.embedding(tokens) + self.position[:length])
        # not a buffer, because integer buffers travel between server and clients
        is_later = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1)
        for block in self.blocks:
            values = block(values, is_later)
        logits: Tensor = self.head(self.norm(values))
        return logits.transpose(1, 2)


class _GptBlock(nn.Module):
    """A block: x = x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.act, self.drop = nn.GELU(), nn.Dropout(dropout)

    def forward(self, x: Tensor, is_later: Tensor) -> Tensor:
        x = x + self.drop(self._attention(self.before(x), is_later))
        z: Tensor = x + self.drop(self.down(self.act(self.up(self.between(x)))))
        return z

    def _attention(self, x: Tensor, is_later: Tensor) -> Tensor:
        # computed step by step, because fused kernels have no repeatable backward pass on a GPU
        heads = self.qkv(x).unflatten(2, (3, self.heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        scores = (query @ key.transpose(2, 3)) * query.shape[-1] ** -0.5
        weights = self.drop(scores.masked_fill(is_later, float("-inf")).softmax(-1))
        outputs: Tensor = self.out((weights @ value).transpose(1, 2).flatten(2))
        return outputs


def _initialise(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=INIT_STD)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
