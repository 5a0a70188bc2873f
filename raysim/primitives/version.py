"""The version of raysim, which is part of the code, also where that is not installed."""

__version__ = "0.1.0"
