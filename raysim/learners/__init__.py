"""Ready learners, models that are not PyTorch networks, the options of the group `learner`."""

from raysim.learners.sklearn_linear import SklearnLinear

__all__ = ["SklearnLinear"]
