"""Learners that raysim provides: the options of the group `learner`."""

from raysim.learners.hf_trainer import HFTrainer
from raysim.learners.lightning_trainer import LightningTrainer
from raysim.learners.sklearn_kmeans import SklearnKMeans
from raysim.learners.sklearn_linear import SklearnLinear
from raysim.learners.xgboost_bagging import XGBoostBagging

__all__ = [
    "HFTrainer",
    "LightningTrainer",
    "SklearnKMeans",
    "SklearnLinear",
    "XGBoostBagging",
]
