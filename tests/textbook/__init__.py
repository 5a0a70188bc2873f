"""A second, simple implementation of each method, from the paper, in PyTorch and NumPy.

A textbook is a function from a `World` (data, batches and random draws) to a `Book` (final models
and states). From raysim, it uses only the random streams. `check.py` compares the `Book` with a run
of raysim in float64.

Symbols of all textbooks: x, the shared parameters. y or y_i, the parameters that client i has
trained. D_i, its update. n_i, its number of training samples. N, the number of clients. eta, a
learning rate. CE, the mean cross-entropy of a batch. Buffers: BatchNorm's statistics.
"""
