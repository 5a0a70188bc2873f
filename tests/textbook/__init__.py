"""A second, simple implementation of each method, which follows the paper in PyTorch and NumPy.

Each method has one such textbook, a function in a module of its own. A textbook gets a `World`:
data, batches and random draws. It returns a `Book`: the shared model, the client states and the
server state at the end. It imports nothing of raysim but random streams. `plain.py` has the parts
that several textbooks need. `check.py` runs raysim in float64 on the same world, and compares the
results. The tables of settings are in the files `test_*.py`.

Symbols of all textbooks: x, the shared parameters. y or y_i, the parameters that client i has
trained. D_i, the update of client i: y_i minus the parameters that it received. n_i, the number of
training samples of client i. eta, a learning rate. CE, the mean cross-entropy of a batch. N, the
number of clients. Buffers: the tensors of a network that have no gradient, which are BatchNorm's
statistics.
"""
