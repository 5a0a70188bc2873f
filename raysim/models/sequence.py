"""Define recipes for two small token models: a recurrent network and a transformer.

The features of a sequence are the hidden values at the sequence's last token that is not padding.
Padding after this token does not change the features.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from raysim.models.classifier import Classifier, ModelRecipe, Shape
from raysim.models.lora import Lora
from raysim.primitives.checks import at_least, in_range, require
from raysim.primitives.kinds import Tokens


def last_token_values(values: Tensor, tokens: Tensor, padding: int) -> Tensor:
    """Return the value of each row's last token that is not padding, [B, D].

    A row of only padding gets the value of its first token.
    values: [B, T, D].
    tokens: [B, T], the token numbers.
    padding: the number of the padding token.
    """
    places = torch.arange(tokens.shape[1], device=tokens.device)
    last = torch.where(tokens != padding, places, 0).amax(1)
    return values.gather(1, last[:, None, None].expand(-1, 1, values.shape[2])).squeeze(1)


@dataclass(frozen=True)
class Gru(ModelRecipe):
    """A recipe for a small recurrent neural network: an embedding and GRU layers.

    embedding: the number of features of a token's embedding.
    width: the number of features of the recurrent state.
    layers: the number of GRU layers.
    """

    reads: ClassVar[Literal["tokens"]] = "tokens"
    embedding: int = 16
    width: int = 64
    layers: int = 1

    def __post_init__(self) -> None:
        for key in ("embedding", "width", "layers"):
            at_least(f"model.{key}", getattr(self, key), 1)

    def network(self, input_shape: Shape, num_classes: int, tokens: Tokens | None) -> Classifier:
        assert tokens is not None, "checked: the recipe reads tokens"
        extractor = _RecurrentExtractor(tokens, self.embedding, self.width, self.layers)
        return Classifier(extractor, self.width, num_classes)


class _RecurrentExtractor(nn.Module):
    """A network from tokens [B, T] to features [B, width]: the GRU's values at the last token."""

    def __init__(self, tokens: Tokens, embedding: int, width: int, layers: int):
        super().__init__()
        self.padding = tokens.padding
        self.embedding = nn.Embedding(tokens.size, embedding)
        self.gru = nn.GRU(embedding, width, layers, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        values, _ = self.gru(self.embedding(tokens))
        return last_token_values(values, tokens, self.padding)


@dataclass(frozen=True)
class Transformer(ModelRecipe):
    """A recipe for a transformer encoder of pre-norm blocks with learnt positions.

    width: the number of features of a token.
    heads: the number of attention heads of a block.
    blocks: the number of blocks.
    dropout: the dropout rate; above 0, training draws random numbers.
    """

    reads: ClassVar[Literal["tokens"]] = "tokens"
    width: int = 32
    heads: int = 2
    blocks: int = 2
    dropout: float = 0.0
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
        blocks = [_EncoderBlock(self.width, self.heads, self.dropout) for _ in range(self.blocks)]
        encoder = _TransformerExtractor(tokens, input_shape[0], self.width, blocks)
        return Classifier(encoder, self.width, num_classes)


class _TransformerExtractor(nn.Module):
    """A network from tokens [B, T] to features [B, width]."""

    def __init__(self, tokens: Tokens, length: int, width: int, blocks: list[_EncoderBlock]):
        super().__init__()
        self.padding = tokens.padding
        self.embedding = nn.Embedding(tokens.size, width)
        self.position = nn.Parameter(nn.init.normal_(torch.empty(length, width), std=0.02))
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        values = self.embedding(tokens) + self.position
        is_padding = (tokens == self.padding)[:, None, None, :]
        for block in self.blocks:
            values = block(values, is_padding)
        return last_token_values(self.norm(values), tokens, self.padding)


class _EncoderBlock(nn.Module):
    """A block: x = x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, is_padding: Tensor) -> Tensor:
        x = x + self.drop(self._attention(self.before(x), is_padding))
        z: Tensor = x + self.drop(self.mlp(self.between(x)))
        return z

    def _attention(self, x: Tensor, is_padding: Tensor) -> Tensor:
        # computed step by step, because fused kernels have no repeatable backward pass on a GPU
        heads = self.qkv(x).unflatten(2, (3, self.heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        scores = (query @ key.transpose(2, 3)) * query.shape[-1] ** -0.5
        # a large number; minus infinity would turn a row of nothing but padding into nan
        mixed = scores.masked_fill(is_padding, -1e9).softmax(-1) @ value
        outputs: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return outputs
