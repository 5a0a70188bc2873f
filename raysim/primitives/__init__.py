"""Errors, files, random streams and checks of values that the whole package uses."""
