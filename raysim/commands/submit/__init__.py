"""Implement `raysim submit`: start a command of raysim on a cluster, as a job of Ray."""
