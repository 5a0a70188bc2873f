"""A second, simple implementation of each method, from the paper, in PyTorch and NumPy.

A textbook is a function. It gets a `World` with data, batches and random draws, and returns a
`Book` with the final models and states. Textbooks import only random streams from raysim.
`plain.py` has common parts, and `check.py` compares raysim with a textbook in float64.

Symbols of all textbooks: x, the shared parameters. y or y_i, the parameters that client i has
trained. D_i, the update of client i. n_i, its number of training samples. N, the number of clients.
eta, a learning rate. CE, the mean cross-entropy of a batch. Buffers: BatchNorm's statistics.
"""
