"""Benchmarks of single parts of raysim; each module here is a command."""
