"""Train and score clients on a worker: the training loop, the step, client states, scores."""
