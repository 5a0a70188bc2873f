"""raysim: asynchronous, cluster-scale federated-learning simulation."""
