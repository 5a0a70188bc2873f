"""Compose configurations, build objects from them, and execute runs."""
