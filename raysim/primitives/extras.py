"""Import packages that only some runs need."""

from __future__ import annotations

import importlib
import sys
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

    Raise `ValueError` if the package is missing; the error names the extra that installs it.
    setting: the setting as the error names it, such as "model=timm".
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        extra = EXTRAS[package.partition(".")[0]]
        raise ValueError(
            f"{setting} needs the package {package} ({error}). Install the extra [{extra}] of "
            f"raysim: in a checkout run uv sync --inexact --extra {extra}; elsewhere install "
            f"raysim's wheel or git URL with [{extra}]."
        ) from error


def is_instance_of(value: object, module: str, *names: str) -> bool:
    """Return True if a value is an instance of any of the classes `names` in a module.

    The module is not imported: before its import, no value can be an instance of its classes.
    module, names: for example "pandas" and "DataFrame".
    """
    imported = sys.modules.get(module)
    return imported is not None and isinstance(
        value, tuple(getattr(imported, name) for name in names)
    )
