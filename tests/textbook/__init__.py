"""Every method a second time, as a textbook would have it: plain PyTorch autograd and NumPy, written from the paper.

A textbook (one module a method) gets a `World`, which is data, batches and random draws, and returns a `Book`: what the
shared model, the clients and the server must hold at the end. It imports nothing of `raysim.training.step`,
`raysim.methods` or `raysim.simulation.server`; what several textbooks need is in `plain.py`. `check.py` runs raysim on
the same world, in float64, and compares; the tables that say which settings each textbook is checked at are in the
`test_*.py`.
"""
