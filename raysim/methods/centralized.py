"""Centralized training: one model on the pooled data of all clients, without federation.

It is the baseline "All" in Table 2 of FRAug (Chen et al., ICCV 2023). The history has no traffic.
The model is scored on each client's test set.

How the run works
- The optimizer starts again in each round.
- If the schedule draws m of N clients, local.epochs=E makes E m / N passes over all samples in a
  round, rounded to whole batches. local.steps=S makes S m batches.
- Methods that change the local loss or gradient can be combined with this one. A server rule gets
  one update in each round.

Departures from FRAug's released code
- The last model is scored. FRAug's code scores the best checkpoint of each domain, by validation
  accuracy.
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
