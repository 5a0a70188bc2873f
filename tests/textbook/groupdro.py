"""GroupDRO: Sagawa et al. 2020, Algorithm 1, where each client is a group (FedBR, Appendix A).

q_i: the weight of client i; at the beginning, all q_i add up to 1. l_i: the client's loss in this
round. eta: the step size. The server state has log q_i.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from textbook.plain import Loss, RowMean, cross_entropy, row_mean, weights
from textbook.servers import run_server_rule
from textbook.world import Book, Job, Params, World


def groupdro(
    world: World, step_size: float, batches: str = "first", prior: str = "uniform", mu: float = 0.0
) -> Book:
    """Run FedAvg with the weights q_i, which grow faster for clients with larger losses.

    After a job of client i with the loss l_i, q_i is multiplied by exp(step_size l_i). The weight
    of client i in the average is q_i, or n_i q_i if the run weighs by samples.
    batches: "first": l_i is the loss of the first batch, as in FedBR's code. Any other text: l_i is
    the mean over all batches.
    prior: "samples": q_i starts in proportion to n_i. Any other text: all q_i start equal.
    mu: the weight of FedProx's term in the local loss; l_i does not contain it.
    """
    sizes = torch.tensor([float(len(labels)) for _, labels in world.data], dtype=torch.float64)
    q = sizes / sizes.sum() if prior == "samples" else torch.full_like(sizes, 1 / world.clients)
    seen: list[list[float]] = []  # of the jobs of this round: the cross-entropy at each step
    reported: list[RowMean] = []  # of the jobs of this round

    def loss(p: Params, step: int, x: Tensor, y: Tensor) -> Tensor:
        task_loss = cross_entropy(p, step, x, y)
        if step == 0:
            seen.append([])
            reported.append(RowMean())
            start.update({name: t.detach().clone() for name, t in p.items()})
        seen[-1].append(float(task_loss.detach()))
        reported[-1].add(task_loss, x)
        return task_loss + mu / 2 * sum(
            (t - start[n]).square().sum() for n, t in p.items() if t.requires_grad
        )

    start: Params = {}
    means: list[float] = []

    def weigh(world: World, version: int, jobs: list[Job]) -> list[float]:
        for job, losses in zip(jobs, seen, strict=True):
            felt = losses[0] if batches == "first" else sum(losses) / len(losses)
            q[job.client] *= torch.tensor(step_size * felt, dtype=torch.float64).exp()
        means.append(row_mean(reported))
        seen.clear()
        reported.clear()
        return [w * float(q[job.client]) for w, job in zip(weights(world, jobs), jobs, strict=True)]

    used: Loss = loss
    book = run_server_rule(world, lambda at: at.x + at.mean, used, weigh)
    columns = {} if mu else {"train_loss": means}  # the history's loss has all terms
    return replace(book, server={"groupdro.log_weights": q.log()}, columns=columns)
