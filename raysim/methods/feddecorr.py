"""FedDecorr: penalise the correlation between features within each batch.

Source: Shi et al., "Towards Understanding and Mitigating Dimensional Collapse in Heterogeneous
Federated Learning" (ICLR 2023). A batch has n rows of D features, the inputs of the classifier. Z
[n, D] are these features minus their means, divided by their standard deviations. With K = Z^T Z /
n,

    loss = cross-entropy + beta |K|_F^2 / D^2

Only variant="paper" is this equation, with population standard deviations.

Departures from the paper
- The default, variant="authors", is the penalty in the authors' code: n times the mean square of
  the entries of K outside its diagonal, with sample standard deviations. It is about n times as
  large as the equation's penalty.
- variant="fedbr" is the penalty in FedBR's tables: the equation with sample standard deviations
  plus 1e-4.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from torch import Tensor

from raysim.api.method import Method
from raysim.primitives.checks import at_least, one_of

if TYPE_CHECKING:
    from raysim.api.context import Outputs
    from raysim.api.local_job import LocalJob
    from raysim.api.setup import Setup

Variant: TypeAlias = Literal["authors", "paper", "fedbr"]


def decorrelation_penalty(features: Tensor, variant: str = "authors") -> Tensor:
    """Return the penalty on features [n, D], D >= 2; 0 for a single row.

    variant: K is the correlation matrix [D, D] of the features. "paper" is sum_jk K_jk^2 / D^2,
    with population standard deviations. "authors" is n sum_{j != k} K_jk^2 / (D (D - 1)), with
    sample standard deviations. "fedbr" is sum_jk K_jk^2 / D^2, with sample standard deviations plus
    1e-4.
    Raises ValueError for an unknown variant.
    """
    one_of("method.feddecorr.variant", variant, get_args(Variant))
    rows, columns = features.shape
    if rows == 1:
        return features.new_zeros(())
    centred = features - features.mean(dim=0)
    degrees_of_freedom = rows if variant == "paper" else rows - 1
    variance = centred.square().sum(dim=0) / degrees_of_freedom
    # The square root of 0 has no gradient: a small number is added inside, or it is clamped.
    deviation = (variance + 1e-8).sqrt()
    if variant == "fedbr":
        deviation = variance.clamp_min(1e-16).sqrt() + 1e-4
    normalised = centred / deviation
    gram = normalised.T @ normalised
    if variant == "authors":
        off_diagonal = gram.square().sum() - gram.diagonal().square().sum()
        return off_diagonal / (rows * columns * (columns - 1))
    return (gram / rows).square().mean()


class FedDecorr(Method):
    """A method that adds a penalty on the correlation between features.

    beta: the weight of the penalty.
    variant: the formula, from the paper's equation ("paper"), the authors' code ("authors"), or the
    tables of the FedBR paper ("fedbr"). For n samples in a batch, "authors" is about n times as
    large as "paper" and "fedbr".
    """

    name = "feddecorr"
    paper = "Shi et al., ICLR 2023"

    def __init__(self, beta: float = 0.1, variant: Variant = "authors"):
        self.beta = at_least("method.feddecorr.beta", beta, 0.0)
        self.variant = one_of("method.feddecorr.variant", variant, get_args(Variant))

    def setup(self, run: Setup) -> None:
        """Require a model with features in front of a linear head."""
        run.needs("features")

    def loss(self, job: LocalJob, out: Outputs, loss: Tensor) -> Tensor:
        """Add beta times the penalty."""
        if not self.beta:
            return loss
        return loss + self.beta * decorrelation_penalty(out.features, self.variant)
