"""Measure single parts of raysim; each module of this folder is a command."""
