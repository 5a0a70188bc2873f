"""The interface of methods: hooks, declarations, and the objects that hooks receive.

Shapes are written in brackets; [] is a scalar tensor. Letters in shapes mean the following:

    B   the samples in a batch
    n   any number of samples
    C   the outputs of the model (classes)
    F   the features of a sample in front of the model's last layer

The flat vector of a run has `layout.total` floats. The first `layout.shared` of them travel between
server and clients, and the first `layout.trained` are parameters that optimizers train.
"""
