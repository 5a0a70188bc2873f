"""Ready learners: models that are not networks of PyTorch, for `raysim.run(methods=[...])`."""

from raysim.learners.sklearn_linear import SklearnLinear

__all__ = ["SklearnLinear"]
