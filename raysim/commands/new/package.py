"""Implement `raysim new NAME`: write a package with one example of each part of a run.

Parts are a method, a learner, a model, data, a schedule and others, each with an option and a test.
The package is a copy of `template`, with NAME in place of `mypackage`.
"""

from __future__ import annotations

import importlib.util
import keyword
import sys
from pathlib import Path

from raysim.primitives.errors import RefusedError
from raysim.primitives.files import user_path

TEMPLATE = Path(__file__).parent / "template"
NAME = "mypackage"


def write(name: str) -> Path:
    """Create a folder with a new package, a copy of the template; return the folder.

    name: the path of the folder; its last part is the package's name.
    Raise `RefusedError` for a name that a new package cannot have.
    """
    folder = user_path(name)
    _check_name(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        folder.mkdir()
    except FileExistsError:
        raise RefusedError(
            f"new {folder.name}: another process is creating {folder}. Choose another name."
        ) from None
    for path in sorted(TEMPLATE.rglob("*")):
        if path.is_file() and path.suffix != ".pyc":
            target = folder / str(path.relative_to(TEMPLATE)).replace(NAME, folder.name)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(path.read_text().replace(NAME, folder.name))
    return folder


def _check_name(folder: Path) -> None:
    name = folder.name
    if not (name.isidentifier() and name.islower()) or keyword.iskeyword(name):
        raise RefusedError(
            f"new {name}: this is not the name of a package. "
            "Use small letters, digits and _, such as my_methods."
        )
    if folder.exists() or folder.is_symlink():
        raise RefusedError(
            f"new {name}: {folder} exists already. Choose another name, or remove {folder}"
        )
    if name in sys.stdlib_module_names or importlib.util.find_spec(name) is not None:
        raise RefusedError(
            f"new {name}: Python has a package of this name already. Choose another name."
        )


def next_steps(folder: Path) -> str:
    """Return the commands that a user can try with the new package."""
    name = folder.name
    parts = f"method={name} model={name} data={name}"
    steps = {
        f"cd {folder} && python -m pytest": "run its tests, without installing anything",
        f"raysim run --allow {name} {parts} rounds=10": "train with its parts, in that folder",
        f"raysim run --allow {name} learner={name} data={name} rounds=10": (
            "train with its learner instead of method and model, in that folder"
        ),
        f"raysim submit --with {name} run --allow {name} method={name} out=/shared/runs/{name}": (
            "train on a cluster, in that folder"
        ),
        "uv pip install -e .": "from then on everywhere, without --allow",
    }
    width = max(len(command) for command in steps)
    lines = [f"  {command:<{width}}  {text}" for command, text in steps.items()]
    kinds = (
        "a method, a model, a learner, data, a partition, a schedule, a selection, a topology, a "
        "fleet, a compressor and an observer of your own"
    )
    return "\n".join([f"{folder} holds {kinds}:", *lines])
