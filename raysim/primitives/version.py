"""The version of raysim. It is part of the code, so that it is known without installation."""

__version__ = "0.1.0"
