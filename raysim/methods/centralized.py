"""Centralized training: one model on the clients' pooled data; the upper reference of a single shared model.

"All" in FRAug's Table 2. An oracle, which federated learning rules out: nothing travels, so the history has no traffic.
Each client's test set is scored with the same model.

How a federated run becomes one on pooled data
- The training rows of all clients are one client's, in ascending order, so it does not matter how they were split; its
  batches are drawn from all of them, and client k's share of the gradients is n_k / n, as in FedAvg.
- Optimiser, batch size and number of rounds are the federated run's, and a round is one evaluation. It processes as
  many samples as a cohort of average clients: local.epochs times the share of clients in a cohort, in passes over all
  samples; where that is no whole number, the equivalent number of batches; local.steps times the cohort.
- The optimiser starts anew every round, as it does in a client.

Choices where the source is silent or ours differ
- The released script keeps its best checkpoint for each domain by validation accuracy; here the last model counts.
- Neither batches of equal shares of all clients (`balanced`) nor a `checkpoint` rule is built.
- Losses and client-side corrections combine with it; the server's rules see a cohort of one.
"""

from __future__ import annotations

from raysim.api.method import Method


class Centralized(Method):
    """Says that the data is to be pooled; nothing else."""

    name = "centralized"
    paper = "no federation"
    pools = True
