"""From words to a run: configuration, objects, the run's folder."""
