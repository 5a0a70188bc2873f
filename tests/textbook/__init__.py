"""Each method a second time, as a textbook would have it: plain PyTorch and NumPy, from the paper.

A textbook (one module for each method) gets a `World`, which is data, batches and random draws, and
returns a `Book`: the shared model, the clients' and the server's state at the end. It imports
nothing of raysim but random streams; parts that several textbooks need are in `plain.py`.
`check.py` runs raysim on the same world, in float64, and compares. The tables of settings are in
the files `test_*.py`.
"""
