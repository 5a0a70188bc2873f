"""Errors, files, random streams and checks of numbers that all rooms use."""
