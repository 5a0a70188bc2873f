"""Implement `raysim submit`: start a job on a cluster."""
