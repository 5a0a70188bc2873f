"""Federated methods, one file per paper: its formulas as functions, and the hooks."""
