"""The version of raysim; it goes with the code, also where that is installed nowhere."""

__version__ = "0.1.0"
