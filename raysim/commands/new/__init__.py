"""Implement `raysim new`: write a package for a user's own parts, a copy of `template`."""
