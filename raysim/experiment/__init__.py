"""From overrides to a configuration, from a configuration to objects, from objects to a run."""
