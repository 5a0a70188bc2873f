"""The work of a worker: the training loop, the step, client states, scores."""
