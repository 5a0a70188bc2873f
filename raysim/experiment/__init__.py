"""Overrides become a configuration, a configuration becomes objects, objects become a run."""
