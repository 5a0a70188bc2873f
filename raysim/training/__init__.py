"""A client's work on its host: the loop, the step, the host that keeps private states."""
