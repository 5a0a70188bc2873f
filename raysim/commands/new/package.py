"""`raysim new NAME`: a package with one part of each kind, its options and its tests, in the folder NAME.

It is a copy of `template`, in which NAME stands where `mypackage` stood; the template is itself a package that works.
"""

from __future__ import annotations

import importlib.util
import keyword
import sys
from pathlib import Path

from raysim.primitives.errors import Refused
from raysim.primitives.files import user_path

TEMPLATE = Path(__file__).parent / "template"
NAME = "mypackage"


def write(name: str) -> Path:
    """Write the package; the folder. Raises Refused for what cannot be the name of a new package."""
    folder = user_path(name)
    _check(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        folder.mkdir()
    except FileExistsError:
        raise Refused(
            f"new {folder.name}: another process creates {folder} at this moment: choose another name"
        ) from None
    for path in sorted(TEMPLATE.rglob("*")):
        if path.is_file() and path.suffix != ".pyc":
            target = folder / str(path.relative_to(TEMPLATE)).replace(NAME, folder.name)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(path.read_text().replace(NAME, folder.name))
    return folder


def _check(folder: Path) -> None:
    name = folder.name
    if not (name.isidentifier() and name.islower()) or keyword.iskeyword(name):
        raise Refused(
            f"new {name}: a package is called by small letters, digits and _, such as my_methods"
        )
    if folder.exists() or folder.is_symlink():
        raise Refused(f"new {name}: {folder} exists already: choose another name, or remove it")
    if name in sys.stdlib_module_names or importlib.util.find_spec(name) is not None:
        raise Refused(f"new {name}: Python has a package of this name already: choose another name")


def next_steps(folder: Path) -> str:
    """What to do with it, as commands."""
    name = folder.name
    steps = {
        f"cd {folder} && python -m pytest": "their tests, without installing anything",
        f"raysim run --allow {name} method={name} model={name} data={name} rounds=10": "there: their names are words",
        f"raysim submit --with {name} run --allow {name} method={name} out=/shared/runs/{name}": "there, on a cluster",
        "uv pip install -e .": "from then on everywhere, without --allow",
    }
    wide = max(map(len, steps))
    lines = [f"  {command:<{wide}}  {what}" for command, what in steps.items()]
    what = "a method, a model, data, a partition, a schedule, a fleet and an observer of your own"
    return "\n".join([f"{folder} holds {what}:", *lines])
