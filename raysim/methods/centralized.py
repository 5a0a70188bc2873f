"""Centralized training: one model on the pooled data of all clients, without federation.

Federated methods with one shared model are compared with it ("All" in Table 2 of FRAug, Chen et
al., ICCV 2023). Nothing travels, so the history has no traffic. Each client's test set is scored
with the same model.

How the run works
- Batches are drawn from the training samples of all clients together.
- The optimizer, the batch size and the number of rounds are set as in a federated run. The
  optimizer starts again in each round, and the model is scored as often as in a federated run.
- A round processes as many samples as a federated round with m of N clients does on average. With
  local.epochs=E it makes E m / N passes over all samples, rounded to whole batches. With
  local.steps=S it has S m batches.
- Methods that change the local loss or gradient can be combined with this one. A server rule gets
  one update in each round.

Departures from FRAug's released code
- For each domain, FRAug's code scores the checkpoint with the best validation accuracy. Here the
  last model is scored.
- The option `balanced` of FRAug's code (batches with equal shares of all clients) is not
  implemented.
"""

from __future__ import annotations

from raysim.api.method import Method


class Centralized(Method):
    """A method that trains one model on the pooled data of all clients."""

    name = "centralized"
    paper = "no federation"
    pools = True
