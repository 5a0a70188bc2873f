"""The interface of methods: hooks, declarations, and the objects that hooks receive.

Shapes are in brackets; [] is a scalar tensor. Letters in shapes are these numbers:

    B   samples in a batch
    n   any number of samples
    C   outputs of the model for a sample, such as its classes
    F   features of a sample, the inputs of the model's last layer

The flat vector of a run has `layout.total` floats:

    from 0                to layout.trained   parameters that travel between server and clients
    from layout.trained   to layout.shared    buffers that travel, such as BatchNorm statistics
    from layout.shared    to layout.total     parameters and buffers that stay on a client
"""
