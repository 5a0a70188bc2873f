"""A second, simple implementation of each method, from the paper, in PyTorch and NumPy.

A textbook is a function from a `World` (data, batches and random draws) to a `Book` (final models
and states). It uses only the random streams of raysim. `check.py` compares the `Book` with a run of
raysim in float64.

All textbooks use these symbols:
- x: the shared parameters
- y or y_i: the parameters that client i has trained
- D_i: the update of client i
- n_i: the number of training samples of client i
- N: the number of clients
- eta: a learning rate
- CE: the mean cross-entropy of a batch
- buffers: BatchNorm's statistics
"""
