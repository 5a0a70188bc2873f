"""Implement `raysim new`: copy the package in `template` as a start for a user's own package."""
