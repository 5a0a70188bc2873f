"""Ready learners, models that are not PyTorch networks, for `raysim.run(methods=[...])`."""

from raysim.learners.sklearn_linear import SklearnLinear

__all__ = ["SklearnLinear"]
