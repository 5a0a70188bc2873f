"""The commands of `raysim` other than `run`."""
