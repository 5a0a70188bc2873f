"""Centralized training: one model on the pooled data of all clients, without federation.

It is the upper reference for a single shared model ("All" in Table 2 of FRAug, Chen et al., ICCV
2023). Nothing travels, so the history has no traffic. Each client's test set is scored with the
same model.

How the run works
- All training rows belong to one client, in ascending order, so their split over clients does not
  matter. Batches are drawn from all of them. Client k's share of the gradients is n_k / n, as in
  FedAvg.
- The optimizer, the batch size and the number of rounds are set as in a federated run. The model is
  scored after each round. A round processes as many samples as a cohort of average clients would.
  Let a cohort have m of the N clients. With local.epochs=E, a round makes E m / N passes over all
  samples. If this is no whole number, it is rounded to whole batches. With local.steps=S, a round
  has S m batches.
- The optimizer starts again in each round, as it does in a client.

Departures from the released code
- The code keeps its best checkpoint for each domain by validation accuracy; here the last model
  counts.
- The code's options `balanced` (batches with equal shares of all clients) and `checkpoint` are not
  implemented.
- Methods that change the local loss or the local gradient can be combined with this one. A server
  rule gets one update in each round.
"""

from __future__ import annotations

from raysim.api.method import Method


class Centralized(Method):
    """A method that trains one model on the pooled data of all clients."""

    name = "centralized"
    paper = "no federation"
    pools = True
