"""FedAvg: McMahan et al. 2017, Algorithm 1."""

from __future__ import annotations

from textbook.plain import run_rounds, train
from textbook.world import Book, World


def fedavg(world: World) -> Book:
    """Replace the model x in each round by sum_i n_i y_i / sum_i n_i.

    y_i: the model that client i has trained; n_i: the number of its training samples.
    """
    return run_rounds(world, lambda job, x: train(world, job, x))
