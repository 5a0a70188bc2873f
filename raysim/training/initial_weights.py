"""Saved weights to start from: read from a file, checked against the networks of a run, and put into them."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from raysim.models.split import original_names
from raysim.primitives.errors import first_line, suggest
from raysim.primitives.files import regular_file, user_path

MODEL = "model."
NAMED = 3  # names of tensors in a sentence


@dataclass(frozen=True)
class Init:
    """Where the initial weights come from.

    file: a `.safetensors` file, or what `torch.save` wrote of a state dict; None: all weights are drawn.
    only: networks, modules or tensors that start from the file, such as "model" or "extractor"; None: all.
    redraw: those that are drawn all the same, such as "head"; None: none.
    sha256: the checksum of the file, which must have it; None: it is filled in.
    """

    file: str | None = None
    only: list[str] | None = None
    redraw: list[str] | None = None
    sha256: str | None = None

    def __post_init__(self) -> None:
        for key in ("only", "redraw", "sha256"):
            if self.file is None and getattr(self, key):
                raise ValueError(
                    f"init.{key} has no effect without a file. Set init=FILE, or init.{key}=null."
                )
        for key in ("only", "redraw"):
            if getattr(self, key) == []:
                raise ValueError(
                    f"init.{key}=[] names nothing. Name a part of the model, or set init.{key}=null."
                )


@dataclass(frozen=True, eq=False)
class InitialWeights:
    """The tensors of a file, as arrays that travel to other processes, and which of them are used."""

    init: Init
    tensors: Mapping[str, np.ndarray]

    def load_into(self, networks: Mapping[str, nn.Module], personal: Collection[str] = ()) -> None:
        """Give the networks these values. Raises ValueError that names the tensors that do not fit.

        personal: tensors that clients keep to themselves. The file of a run has none of these, so it may lack them.
        """
        targets = _Targets(networks, personal)
        with torch.no_grad():
            for name, array in self._chosen(targets).items():
                targets.tensors[name].copy_(torch.from_numpy(np.asarray(array)))

    def drawn(self, networks: Mapping[str, nn.Module], personal: Collection[str] = ()) -> list[str]:
        """Return the full names of the tensors that do not start from the file."""
        targets = _Targets(networks, personal)
        chosen = self._chosen(targets)
        return [name for name in targets.tensors if name not in chosen]

    def _chosen(self, targets: _Targets) -> dict[str, np.ndarray]:
        """Return the arrays that are used, by the full names that their tensors have in the run."""
        in_file = self._translated(targets)
        only = targets.within("only", self.init.only)
        redrawn = targets.within("redraw", self.init.redraw) or set()
        used = {name for name in targets.tensors if only is None or name in only} - redrawn
        chosen = {
            name: in_file[name] for name in targets.tensors if name in used and name in in_file
        }
        if not chosen:
            names = _listed(self.tensors)
            raise ValueError(
                f"init.file={self.init.file}: none of its tensors ({names}) is one of those that this run takes from "
                f"it ({_listed(sorted(used))}). Choose another file, or other parts with init.only and init.redraw."
            )
        self._check_complete(targets, used, chosen, only is not None)
        for name, array in chosen.items():
            self._check_fits(name, array, targets.tensors[name])
        return chosen

    def _translated(self, targets: _Targets) -> dict[str, np.ndarray]:
        """Return the arrays by the full names of the run. Raises ValueError for names that it does not have."""
        names = max(
            targets.schemes, key=lambda scheme: sum(name in scheme for name in self.tensors)
        )
        unknown = [
            name for name in self.tensors if name not in names and not self._is_redrawn(name)
        ]
        if unknown and self.init.only is None and len(unknown) < len(self.tensors):
            raise ValueError(
                f"init.file={self.init.file}: no network of this run has {_listed(unknown)}. Name the parts to load "
                "with init.only, such as init.only=model, or leave parts out with init.redraw."
            )
        return {names[name]: array for name, array in self.tensors.items() if name in names}

    def _is_redrawn(self, name: str) -> bool:
        """Whether a name of the file belongs to a part that is drawn, which may look different there."""
        spellings = (name, name.removeprefix(MODEL))
        return any(
            _is_in(spelling, part) for part in self.init.redraw or () for spelling in spellings
        )

    def _check_complete(
        self, targets: _Targets, used: set[str], chosen: Mapping[str, np.ndarray], is_partial: bool
    ) -> None:
        """Raise ValueError where the file lacks tensors of a network, of which it has some, or which is asked for."""
        present = {name.partition(".")[0] for name in chosen} | {"model"}
        needed = [name for name in targets.needed if name in used]
        if not is_partial:
            needed = [name for name in needed if name.partition(".")[0] in present]
        if missing := [name for name in needed if name not in chosen]:
            raise ValueError(
                f"init.file={self.init.file} lacks {_listed(missing)}. Draw what it lacks with init.redraw, or choose "
                "another file."
            )

    def _check_fits(self, name: str, array: np.ndarray, target: Tensor) -> None:
        """Raise ValueError where an array cannot become the value of a tensor."""
        where = f"init.file={self.init.file}: {name}"
        if array.shape != tuple(target.shape):
            raise ValueError(
                f"{where} has the shape {list(array.shape)}, and the run needs {list(target.shape)}. Draw it with "
                "init.redraw, or choose another model or file."
            )
        value = torch.from_numpy(np.asarray(array))
        if value.is_floating_point() != target.is_floating_point():
            raise ValueError(
                f"{where} holds {value.dtype}, and the run needs {target.dtype}. Choose another file."
            )
        if not bool(value.to(target.dtype).isfinite().all()):
            raise ValueError(
                f"{where} has values that are not finite in {target.dtype}. Choose another file."
            )


class _Targets:
    """The tensors of a run's networks that a file can fill, and the names that they may have there."""

    def __init__(self, networks: Mapping[str, nn.Module], personal: Collection[str]):
        self.tensors: dict[str, Tensor] = {}
        # In a file that has their network: all but personal tensors, frozen parameters, and buffers that are not saved.
        self.needed: list[str] = []
        for network, module in networks.items():
            stored = module.state_dict().keys()
            tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
            for path, tensor in tensors.items():
                self.tensors[f"{network}.{path}"] = tensor
                is_frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
                if path in stored and not is_frozen and f"{network}.{path}" not in personal:
                    self.needed.append(f"{network}.{path}")
        model = [name for name in self.tensors if name.startswith(MODEL)]
        self.schemes: list[dict[str, str]] = [
            {name: name for name in self.tensors},  # as raysim writes them
            {name.removeprefix(MODEL): name for name in model},  # without the network
            {
                theirs: f"{MODEL}{ours}"
                for theirs, ours in original_names(networks["model"]).items()
            },  # as its author did
        ]

    def within(self, key: str, parts: Sequence[str] | None) -> set[str] | None:
        """Return the full names of the tensors in these parts; None where none are named."""
        if parts is None:
            return None
        found: set[str] = set()
        for part in parts:
            inside = {
                full
                for scheme in self.schemes
                for name, full in scheme.items()
                if _is_in(name, part)
            }
            if not inside:
                raise ValueError(
                    f"init.{key}={part} names no part of this run: {suggest(part, self._parts())}"
                )
            found |= inside
        return found

    def _parts(self) -> list[str]:
        """Return the names of networks, and of the modules in the model down to the second level."""
        names = {name.partition(".")[0] for name in self.tensors}
        for scheme in self.schemes[1:]:
            paths = [name.split(".")[:-1] for name in scheme]
            names |= {
                ".".join(path[:depth]) for path in paths for depth in (1, 2) if len(path) >= depth
            }
        return sorted(names)


def _is_in(name: str, part: str) -> bool:
    return name == part or name.startswith(f"{part}.")


def _listed(names: Iterable[str]) -> str:
    """Return the first names of a list, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


# --- the file ---------------------------------------------------------------------------------------------------------
def read_initial_weights(init: Init) -> tuple[Init, InitialWeights | None]:
    """Read the file of the initial weights; also return the settings with the file's checksum filled in.

    Raises ValueError where the file cannot be read, holds no state dict, or has another checksum.
    """
    if init.file is None:
        return init, None
    path = user_path(init.file).absolute()
    if not path.exists():
        raise ValueError(
            f"init.file={init.file} does not exist. Name a .safetensors file or a saved state dict."
        )
    with regular_file(path).open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if init.sha256 not in (None, digest):
        raise ValueError(
            f"init.file={init.file} has the checksum {digest}, and init.sha256={init.sha256}: the file has changed. "
            "Restore it, or set init.sha256=null for a new run."
        )
    tensors = _read(path, init.file)
    filled = Init(init.file, init.only, init.redraw, digest)
    return filled, InitialWeights(filled, tensors)


def _read(path: Path, shown: str) -> dict[str, np.ndarray]:
    try:
        if path.suffix == ".safetensors":
            content: Any = load_file(path)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore", UserWarning
                )  # a file that cannot be read is refused below
                content = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, OSError, EOFError) as error:
        raise ValueError(
            f"init.file={shown} cannot be read ({first_line(error)}). Restore it."
        ) from error
    except Exception as error:  # of the unpickler, which refuses whatever is no plain state dict
        raise ValueError(
            f"init.file={shown} cannot be read as a state dict ({type(error).__name__}). Save tensors alone, with "
            "torch.save(model.state_dict(), FILE)."
        ) from error
    if not isinstance(content, Mapping) or not content:
        raise ValueError(
            f"init.file={shown} holds {_kind(content)} and no state dict. Save model.state_dict()."
        )
    for name, tensor in content.items():
        if not (isinstance(name, str) and isinstance(tensor, Tensor)):
            raise ValueError(
                f"init.file={shown} holds {_kind(tensor)} under {name!r}, where a state dict has tensors. Save "
                "model.state_dict() alone."
            )
    return {name: _array(tensor) for name, tensor in content.items()}


def _kind(value: object) -> str:
    return "nothing" if isinstance(value, Mapping) and not value else f"a {type(value).__name__}"


def _array(tensor: Tensor) -> np.ndarray:
    """Return a tensor as an array; NumPy has no bfloat16, whose values float32 holds exactly."""
    tensor = tensor.detach()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).contiguous().numpy()
