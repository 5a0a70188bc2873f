"""The version of raysim, which is known even if the package is not installed."""

__version__ = "0.1.0"
