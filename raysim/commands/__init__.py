"""Implement the commands of `raysim` other than `run`."""
