"""The interface of methods: hooks, declarations, and the objects that hooks receive.

Shapes are written in brackets; [] is a scalar tensor. B is the number of samples in a batch, n a
number of samples, C the number of the model's outputs (classes), and F the number of features of a
sample. The flat vector of a run has `layout.total` floats. The first `layout.shared` of them travel
between server and clients, and the first `layout.trained` are parameters that optimizers train.
"""
