"""Implement `raysim sweep`: a search for good settings with Ray Tune."""
