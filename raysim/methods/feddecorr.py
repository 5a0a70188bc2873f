"""FedDecorr: penalise the correlation between feature coordinates within each batch.

Shi, Liang, Zhang, Tan and Bai, "Towards Understanding and Mitigating Dimensional Collapse in Heterogeneous Federated
Learning" (ICLR 2023): loss = cross-entropy + beta |K|_F^2 / D^2, K the correlation matrix of the D features in front of
the classifier.

Choices where the sources differ or are silent
- The authors' code, the default, leaves out the diagonal and does not divide Z^T Z by the n rows, so that its penalty
  is about n times the printed one ("paper"). FedBR's tables use a third form ("fedbr").
- A smaller last batch counts less under "authors", because of that factor n.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

from torch import Tensor

from raysim.api.method import Method
from raysim.primitives.checks import at_least, one_of

if TYPE_CHECKING:
    from raysim.api.context import Outputs
    from raysim.api.local_job import LocalJob
    from raysim.api.setup import Setup

Variant = Literal["authors", "paper", "fedbr"]


def decorrelation_penalty(features: Tensor, variant: str = "authors") -> Tensor:
    """The penalty of features (n, D), D >= 2; 0 for a single row. ValueError for another variant than the three."""
    one_of("method.feddecorr.variant", variant, get_args(Variant))
    rows, columns = features.shape
    if rows == 1:
        return features.new_zeros(())
    centred = features - features.mean(dim=0)
    variance = centred.square().sum(dim=0) / (rows - 1 if variant != "paper" else rows)
    # The square root of 0 has no gradient, hence a small number inside it; "fedbr" has it outside, and is clamped.
    scale = (
        variance.clamp_min(1e-16).sqrt() + 1e-4 if variant == "fedbr" else (variance + 1e-8).sqrt()
    )
    normal = centred / scale
    gram = normal.T @ normal
    if variant == "authors":
        off_diagonal = gram.square().sum() - gram.diagonal().square().sum()
        return off_diagonal / (rows * columns * (columns - 1))
    return (gram / rows).square().mean()


class FedDecorr(Method):
    """beta weighs the penalty on the features of the batch that is trained on."""

    name = "feddecorr"
    paper = "Shi et al., ICLR 2023"

    def __init__(self, beta: float = 0.1, variant: Variant = "authors"):
        self.beta, self.variant = at_least("method.feddecorr.beta", beta, 0.0), variant

    def setup(self, run: Setup) -> None:
        """Need features."""
        run.needs("features")

    def loss(self, job: LocalJob, out: Outputs, loss: Tensor) -> Tensor:
        """Add beta times the penalty."""
        if not self.beta:
            return loss
        return loss + self.beta * decorrelation_penalty(out.features, self.variant)
