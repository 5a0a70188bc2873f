"""Import packages that only some runs need."""

from __future__ import annotations

import importlib
from types import ModuleType

# The extra of pyproject.toml that installs each package.
EXTRAS = {
    "timm": "timm",
    "transformers": "huggingface",
    "datasets": "huggingface",
    "peft": "lora",
    "tensorboardX": "tensorboard",
    "wandb": "wandb",
    "dp_accounting": "privacy",
    "flwr": "flower",
    "torchmetrics": "metrics",
    "xgboost": "boosting",
    "lightning": "lightning",
    "accelerate": "huggingface",
}


def import_optional(package: str, setting: str) -> ModuleType:
    """Import the package that a setting needs.

    Raise `ValueError` with the extra that installs it if it is missing.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        extra = EXTRAS[package.partition(".")[0]]
        raise ValueError(
            f"{setting} needs the package {package} ({error}), of the extra [{extra}]: run uv sync "
            f"--inexact --extra {extra} in a checkout of raysim; elsewhere install its wheel or "
            f"its git URL with [{extra}]"
        ) from error
