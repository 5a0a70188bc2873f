"""InCo: Chan et al. 2024, as in their code or as in the paper's optimisation problem.

The network has two residual blocks, whose tensors are named as in torchvision. BatchNorm's
statistics become the mean of the clients' statistics. InCo's rule does not change them, so no
variance is negative.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from textbook.plain import head, trainable
from textbook.servers import Cohort, run_server_rule, unflatten
from textbook.world import Book, Params, World

STAGE = "model.extractor.layer1"
# Every convolution of the second block has the shape of the first block's conv2, which then is its
# source.
PAIRS = {f"{STAGE}.1.conv{j}.weight": f"{STAGE}.0.conv2.weight" for j in (1, 2)}


def network(p: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Return the logits: convolution, two residual blocks, pooling to 2 x 2, linear."""

    def conv(name: str, x: Tensor, stride: int = 1) -> Tensor:
        return F.conv2d(x, p[f"{name}.weight"], p[f"{name}.bias"], stride, padding=1)

    x = conv("model.extractor.conv1", x, 2)
    for block in (f"{STAGE}.0", f"{STAGE}.1"):
        p[f"{block}.bn1.num_batches_tracked"].add_(1)
        statistics = p[f"{block}.bn1.running_mean"], p[f"{block}.bn1.running_var"]
        hidden = conv(f"{block}.conv1", x)
        hidden = F.batch_norm(
            hidden, *statistics, p[f"{block}.bn1.weight"], p[f"{block}.bn1.bias"], True
        )
        x = (x + conv(f"{block}.conv2", hidden.relu())).relu()
    return head(p, F.adaptive_avg_pool2d(x, 2).flatten(1))


def inco(
    world: World,
    kernels: bool = True,
    always: bool = True,
    most: float = 5.0,
    clip: float = 0.1,
    eps: float = 1e-7,
) -> Book:
    """Compute a run of InCo, which mixes the update of an early layer into later layers' updates.

    The early layer is the second convolution of the first residual block. The later layers are both
    convolutions of the second block. Before the update of a later layer is mixed with the update of
    the early layer, both updates are divided by their norms. The mixture is multiplied by the mean
    of the norms.
    kernels: True mixes each kernel, a slice [o, i], and not the whole convolution.
    always: True mixes always, as in the authors' code. False mixes only if the dot product of the
    two updates is negative, as in the paper.
    most: the largest weight of the early layer's update.
    clip: the largest absolute value of an entry of a later layer's update.
    """
    names = trainable(world.start)

    def mixed(g: Tensor, g0: Tensor) -> Tensor:
        product, length, length0 = (g0 * g).sum(), g.norm(), g0.norm()
        theta = (product.abs() / ((g0 * g0).sum() + eps)).clamp(0, most)
        mixed = (g / (length + eps) + theta * g0 / (length0 + eps)) * (length + length0) / 2
        return (mixed if always or product < 0 else g).clamp(-clip, clip)

    def rule(at: Cohort) -> Tensor:
        plain = unflatten(at.mean, world.start, names)
        new = dict(plain)
        for target, source in PAIRS.items():
            g, g0 = plain[target], plain[source]
            if kernels:
                rows = [
                    mixed(g[o, i], g0[o, i]) for o in range(g.shape[0]) for i in range(g.shape[1])
                ]
                new[target] = torch.stack(rows).view(g.shape)
            else:
                new[target] = mixed(g, g0)
        return at.x + torch.cat([new[name].flatten() for name in names])

    def loss(p: Params, step: int, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(network(p, x), y)

    return run_server_rule(world, rule, loss)
