"""Each method a second time, as a textbook would have it: plain PyTorch and NumPy, from the paper.

A textbook (one module for each method) gets a `World`, which is data, batches and random draws. It
returns a `Book`: the shared model, the clients' and the server's state at the end. It imports
nothing of raysim but random streams; parts that several textbooks need are in `plain.py`.
`check.py` runs raysim on the same world, in float64, and compares. The tables of settings are in
the files `test_*.py`.

Symbols of all textbooks: x, the shared parameters. y or y_i, the parameters that a client has
trained. D_i, a client's change: y_i minus the parameters that it received. n_i, the client's
training samples. eta, a learning rate. CE, the mean cross-entropy of a batch. N, the number of
clients. Buffers are a network's tensors that no gradient trains: BatchNorm's statistics.
"""
