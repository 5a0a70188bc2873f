"""A topology: neighbouring clients share a server, and the servers mix models on a ring."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from raysim import Federation, Network, Topology
from raysim.api.topology import mixing_matrix
from raysim.primitives.checks import at_least, between


@dataclass(frozen=True)
class MyTopology(Topology):
    """Several servers, each with one model and about equally many clients.

    servers: the number of servers.
    every: the number of aggregations between two exchanges.
    kept: the weight of a server's own model in an exchange, from 0 to 1. The next server's model
    has the weight 1 - kept.
    """

    servers: int = 2
    every: int = 2
    kept: float = 0.5

    def __post_init__(self) -> None:
        at_least("topology.servers", self.servers, 2)
        at_least("topology.every", self.every, 1)
        between("topology.kept", self.kept, 0, 1)

    def connect(self, federation: Federation) -> Network:
        """Return the server of each client, and the weights by which servers mix their models.

        federation: facts about the clients, such as their number `federation.clients`.
        """
        replica_of = np.arange(federation.clients) * self.servers // federation.clients
        weights = [
            {server: self.kept, (server + 1) % self.servers: 1 - self.kept}
            for server in range(self.servers)
        ]
        mixing = mixing_matrix(weights, "topology")
        return Network(replica_of, mixing, every=self.every, name="server")
