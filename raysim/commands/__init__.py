"""Implement commands of `raysim`, such as study, sweep and submit."""
