"""Implement `raysim study`: many runs and one comparison."""
