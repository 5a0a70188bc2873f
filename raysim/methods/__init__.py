"""Federated methods. A file has the formulas of one paper as functions, and the method's hooks."""
