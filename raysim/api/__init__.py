"""The interface of methods: hooks, declarations, and the objects that hooks receive.

Shapes are written in brackets. B: rows of a batch. n: samples. C: outputs of the model (classes).
F: features of a sample. `layout.shared`, `layout.trained` and `layout.total` are lengths of the
flat vector of parameters, see `raysim.vectors.layout`. [] is a scalar tensor.
"""
