"""Distances between two sets of features, such as the maximum mean discrepancy (MMD).

Source of MMD: Gretton et al., "A Kernel Two-Sample Test" (JMLR 2012), with five Gaussian kernels as
in FRAug (ICCV 2023).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

Metric: TypeAlias = Literal["mmd", "mse", "mmd_moments", "mmd_classes"]


def mmd(
    x: Tensor, y: Tensor, kernel: str = "gaussian", kernel_mul: float = 2.0, kernel_num: int = 5
) -> Tensor:
    """Return the squared maximum mean discrepancy (biased) of x [n, D] and y [k, D], a scalar.

    kernel: "gaussian" sums kernels exp(-|a - b|^2 / w) of different widths w. The middle width is
    the mean squared distance over all pairs of rows of x and y together, without a gradient.
    "moments" adds two mean squared differences: of the mean rows, and of the (unbiased) covariance
    matrices.
    kernel_mul: the ratio of the widths of two successive Gaussian kernels.
    kernel_num: the number of Gaussian kernels.
    """
    if kernel == "moments":
        return F.mse_loss(x.mean(0), y.mean(0)) + F.mse_loss(_covariance(x), _covariance(y))
    n = len(x)
    squares = _squared_distances(torch.cat([x, y]))
    size = len(squares)
    mean = squares.detach().sum() / (size**2 - size)
    kernels = _gaussians(squares, mean, kernel_mul, kernel_num)
    return kernels[:n, :n].mean() + kernels[n:, n:].mean() - 2 * kernels[:n, n:].mean()


def _squared_distances(rows: Tensor) -> Tensor:
    # Subtracting a common part does not change distances, and avoids cancellation of large numbers.
    rows = rows - rows[:1].detach()
    norms = rows.square().sum(1)
    return (norms[:, None] + norms - 2 * rows @ rows.T).clamp(min=0)


def _gaussians(
    squared_distances: Tensor, middle_width: Tensor, kernel_mul: float, kernel_num: int
) -> Tensor:
    """Return the sum of Gaussian kernels of different widths for each pair of n rows, [n, n].

    squared_distances: [n, n].
    middle_width: the width of the middle kernel, a scalar or [n, 1].
    kernel_mul: the ratio of two successive widths.
    """
    scaled = -squared_distances / torch.where(middle_width > 0, middle_width, 1)
    widths = [kernel_mul ** (q - kernel_num // 2) for q in range(kernel_num)]
    return torch.stack([torch.exp(scaled / width) for width in widths]).sum(0)


def _covariance(x: Tensor) -> Tensor:
    centred = x - x.mean(0)
    return centred.T @ centred / (len(x) - 1)


def mmd_of_classes(
    x: Tensor,
    y: Tensor,
    x_labels: Tensor,
    y_labels: Tensor,
    kernel_mul: float = 2.0,
    kernel_num: int = 5,
) -> Tensor:
    """Return the mean over classes of the squared MMD between the class's rows in x and in y.

    Only classes with rows in both x and y count. Without such a class, the result is 0.
    x, y: the features, [n, D] and [k, D].
    x_labels, y_labels: the class of each row, int64 [n] and [k].
    kernel_mul, kernel_num: as in `mmd`. The rows of a class decide the middle width for this class.
    """
    labels = torch.cat([x_labels, y_labels])
    squares = _squared_distances(torch.cat([x, y]))
    is_same = (labels.unsqueeze(1) == labels).to(squares.dtype)
    # For each row: the number of rows of its class in x and in y.
    in_x, in_y = is_same[:, : len(x)].sum(1), is_same[:, len(x) :].sum(1)
    size = in_x + in_y
    sums = is_same @ (squares.detach() * is_same).sum(1)
    mean = sums / (size.square() - size).clamp(min=1)
    kernels = _gaussians(squares, mean.unsqueeze(1), kernel_mul, kernel_num)
    is_shared = ((in_x > 0) & (in_y > 0)).to(squares.dtype)
    shares = torch.cat([1 / in_x[: len(x)], -1 / in_y[len(x) :]]) * is_shared
    num_classes = shares[: len(x)].sum()
    return shares @ (kernels * is_same) @ shares / num_classes.clamp(min=1)


DISTANCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mmd": mmd,
    "mse": F.mse_loss,
    "mmd_moments": partial(mmd, kernel="moments"),
}


def feature_distance(
    metric: str,
    x: Tensor,
    y: Tensor,
    x_labels: Tensor | None,
    y_labels: Tensor | None = None,
) -> Tensor:
    """Return the distance of x [n, D] and y [k, D], a scalar.

    metric: "mmd" has Gaussian kernels, "mmd_moments" compares means and covariances, and
    "mmd_classes" is the mean MMD over classes. "mse", for n = k, is the mean squared difference
    between row j of x and row j of y.
    x_labels: for "mmd_classes", the class of each row of x, int64 [n]; otherwise None.
    y_labels: the class of each row of y, int64 [k]; None means `x_labels`.
    Raises ValueError for "mmd_classes" without x_labels.
    """
    if metric != "mmd_classes":
        return DISTANCES[metric](x, y)
    if x_labels is None:
        raise ValueError("metric=mmd_classes compares classes and needs labels. Pass labels.")
    return mmd_of_classes(x, y, x_labels, x_labels if y_labels is None else y_labels)
