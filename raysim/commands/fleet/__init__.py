"""Implement `raysim fleet`: convert traces of devices from FedScale, and check traces."""
