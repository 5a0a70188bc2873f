"""Packages that only some runs need: imported where they are asked for, and missed in one sentence."""

from __future__ import annotations

import importlib
from types import ModuleType


def import_optional(package: str, what: str) -> ModuleType:
    """The package, which `what` (a setting) needs. Raises ValueError with the extra that installs it."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        extra = EXTRAS[package.partition(".")[0]]
        raise ValueError(
            f"{what} needs the package {package} ({error}), of the extra [{extra}]: run uv sync --inexact --extra "
            f"{extra} in a checkout of raysim; elsewhere install its wheel or its git URL with [{extra}]"
        ) from error


EXTRAS = {  # which extra of pyproject.toml brings which package
    "timm": "timm",
    "transformers": "huggingface",
    "datasets": "huggingface",
    "peft": "lora",
    "tensorboardX": "tensorboard",
    "wandb": "wandb",
    "dp_accounting": "privacy",
}
