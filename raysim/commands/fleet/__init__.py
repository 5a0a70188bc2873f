"""Implement `raysim fleet convert`: convert traces of devices from FedScale."""
