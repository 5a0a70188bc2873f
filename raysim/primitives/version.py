"""The version of raysim, in the code so that it is known without an installation."""

__version__ = "0.1.0"
