"""Read saved weights from a file and put them into the networks of a run."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from raysim.models.lora import ADAPTED, ADAPTER
from raysim.models.split import original_names
from raysim.primitives.errors import first_line, suggest
from raysim.primitives.files import regular_file, user_path
from raysim.training.frozen_weights import BASE, base_sha256

MODEL = "model."
MAX_NAMES = 3  # of tensors in an error


@dataclass(frozen=True)
class Init:
    """The settings `init.*` of the initial weights.

    file: a `.safetensors` file, or a state dict that `torch.save` wrote. None keeps the values with
    which the model is built: random ones, unless the model is pretrained.
    only: networks, modules or tensors that start from the file; None means all.
    redraw: networks, modules or tensors that do not start from the file, such as "head"; None for
    none.
    sha256: the checksum that the file must have; None stores the file's checksum.
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
                    f"init.{key}=[] is empty. List parts of the model, or set init.{key}=null."
                )


@dataclass(frozen=True, eq=False)
class InitialWeights:
    """The tensors of a weights file as arrays, and the settings that select among them.

    tensors: the arrays, by their names in the file.
    base: the checksum of the frozen weights to which the file's adapters belong; "" if the file
    does not say.
    """

    init: Init
    tensors: Mapping[str, np.ndarray]
    base: str = ""

    def load_into(self, networks: Mapping[str, nn.Module], personal: Collection[str] = ()) -> None:
        """Copy the values into the networks.

        networks: the neural networks of the run, by name.
        personal: full names of tensors that stay on the clients. The file need not have these
        tensors.
        Raises ValueError if tensors of the file and of the run do not match.
        """
        targets = _Targets(networks, personal)
        with torch.no_grad():
            for name, array in self._select(targets).items():
                targets.tensors[name].copy_(torch.from_numpy(np.asarray(array)))

    def drawn(self, networks: Mapping[str, nn.Module], personal: Collection[str] = ()) -> list[str]:
        """Return the full names of the tensors whose initial values do not come from the file.

        personal: full names of tensors that stay on the clients; the file may lack them.
        Raises ValueError if tensors of the file and of the run do not match.
        """
        targets = _Targets(networks, personal)
        chosen = self._select(targets)
        return [name for name in targets.tensors if name not in chosen]

    def check_base(self, networks: Mapping[str, nn.Module], personal: Collection[str]) -> None:
        """Raise ValueError if the adapters in the file do not fit the run's frozen weights.

        Adapters fit if they were trained with the same frozen weights. The file's checksum
        (`self.base`) tells which weights these were. Check nothing if the file has no checksum, or
        if the run loads no adapter from the file.

        personal: full names of tensors that stay on the clients; the file may lack them.
        """
        if not self.base:
            return
        drawn = self.drawn(networks, personal)
        names = [name for name, _ in networks["model"].named_parameters() if ADAPTER in name]
        takes_adapters = any(f"{MODEL}{name}" not in drawn for name in names)
        if takes_adapters and base_sha256(networks["model"]) != self.base:
            raise ValueError(
                f"init.file={self.init.file}: its adapters were trained with other frozen "
                "weights than this run has. Set seed, model and data as in the run that wrote "
                "the file. Or give the adapters random values with init.redraw."
            )

    def _select(self, targets: _Targets) -> dict[str, np.ndarray]:
        """Return the arrays of the weights file that the run loads, by the tensors' full names.

        `init.only` and `init.redraw` select the tensors.
        Raises ValueError if no tensor is selected or a named part does not exist. Also raises it if
        the tensors of the file and of the run do not match.
        """
        if not targets.tensors:
            raise ValueError(
                f"init.file={self.init.file} has tensors, but the networks of this run have none. "
                "Set init.file=null."
            )
        in_file = self._rename(targets)
        only = targets.within("only", self.init.only)
        redrawn = targets.within("redraw", self.init.redraw) or set()
        used = {name for name in targets.tensors if only is None or name in only} - redrawn
        if not used:
            raise ValueError(
                f"init.redraw={','.join(self.init.redraw or ())} leaves no tensor that starts from "
                "init.file. Remove parts from init.redraw, or set both settings to null."
            )
        chosen = {
            name: in_file[name] for name in targets.tensors if name in used and name in in_file
        }
        if not chosen:
            raise ValueError(
                f"init.file={self.init.file} has none of the tensors that this run loads: the "
                f"run needs {_format_names(sorted(used))}, but the file has only "
                f"{_format_names(self.tensors)}. Choose another file, or change init.only (parts "
                "that start from the file) and init.redraw (parts that get random values)."
            )
        self._check_complete(targets, used, chosen, only is not None)
        for name, array in chosen.items():
            self._check_fits(name, array, targets.tensors[name])
        return chosen

    def _rename(self, targets: _Targets) -> dict[str, np.ndarray]:
        """Map full names of the run's tensors to the arrays of the weights file.

        The file may use the full names, these names without "model.", or the names from the user's
        own model. Arrays without a tensor of the run are left out.
        Raises ValueError if only some arrays have a tensor, unless `init.only` is set or
        `init.redraw` lists the others.
        """

        def known_names(scheme: dict[str, str]) -> int:
            return sum(name in scheme for name in self.tensors)

        names = max(targets.schemes, key=known_names)
        unknown = [
            name for name in self.tensors if name not in names and not self._is_redrawn(name)
        ]
        if unknown and self.init.only is None and len(unknown) < len(self.tensors):
            raise ValueError(
                f"init.file={self.init.file} has tensors that no network of this run has: "
                f"{_format_names(unknown)}. Set init.only to the parts that start from the file, "
                "such as init.only=extractor. Or set init.redraw to the parts that get random "
                "values, such as init.redraw=head."
            )
        return {names[name]: array for name, array in self.tensors.items() if name in names}

    def _is_redrawn(self, name: str) -> bool:
        """Return True if `init.redraw` lists the tensor `name`, or a module that contains it.

        name: the name of a tensor in the weights file.
        """
        short = name.removeprefix(MODEL)
        parts = self.init.redraw or ()
        return any(_is_in(name, part) or _is_in(short, part) for part in parts)

    def _check_complete(
        self,
        targets: _Targets,
        wanted: set[str],
        available: Mapping[str, np.ndarray],
        is_partial: bool,
    ) -> None:
        """Raise ValueError if the file lacks a tensor that the run needs.

        Personal tensors, frozen weights and unsaved buffers may be missing. Unless `is_partial`,
        these tensors may be missing, too:
        - all tensors of a network other than "model";
        - all adapters, if the file has the frozen weights of the layers with adapters.

        wanted: the names of the tensors that shall start from the file.
        available: the arrays that the file has for the tensors of `wanted`.
        is_partial: True if `init.only` is set.
        """
        present = {name.partition(".")[0] for name in available} | {"model"}
        needed = [name for name in targets.needed if name in wanted]
        if not is_partial:
            needed = [name for name in needed if name.partition(".")[0] in present]
        has_adapters = any(ADAPTER in name for name in available)
        if targets.frozen and not has_adapters and not is_partial:  # of a run without adapters
            needed = [name for name in needed if ADAPTER not in name]
            needed += [name for name in targets.frozen if name in wanted]
        missing = [name for name in needed if name not in available]
        if missing:
            raise ValueError(
                f"init.file={self.init.file} lacks {_format_names(missing)}. Give these tensors "
                "random values with init.redraw, or choose another file."
            )

    def _check_fits(self, name: str, array: np.ndarray, target: Tensor) -> None:
        """Raise ValueError if an array of the file cannot be a tensor's value.

        name: the tensor's full name, for the error.
        array: its value in the file.
        target: the run's tensor.
        """
        where = f"init.file={self.init.file}: {name}"
        if array.shape != tuple(target.shape):
            raise ValueError(
                f"{where} has the shape {list(array.shape)}, but the run needs "
                f"{list(target.shape)}. Give this tensor random values with init.redraw, or choose "
                "another model or file."
            )
        value = torch.from_numpy(np.asarray(array))
        if value.is_floating_point() != target.is_floating_point():
            raise ValueError(
                f"{where} has the type {value.dtype}, but the run needs {target.dtype}. Choose "
                "another file."
            )
        if not bool(value.to(target.dtype).isfinite().all()):
            raise ValueError(
                f"{where} has values that are nan or infinite after the conversion to "
                f"{target.dtype}, the type that the run needs. Choose another file."
            )


class _Targets:
    """The tensors of a run that a file may set, and the names that the file may use for them."""

    def __init__(self, networks: Mapping[str, nn.Module], personal: Collection[str]):
        self.tensors: dict[str, Tensor] = {}
        # The names that a file with their network must have: all but personal tensors, frozen
        # parameters, and buffers that are not saved.
        self.needed: list[str] = []
        # Frozen weights of layers with an adapter, which a file without adapters must have.
        self.frozen: list[str] = []
        for network, module in networks.items():
            stored = module.state_dict().keys()
            tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
            for path, tensor in tensors.items():
                self.tensors[f"{network}.{path}"] = tensor
                is_frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
                if path not in stored or f"{network}.{path}" in personal:
                    continue
                if not is_frozen:
                    self.needed.append(f"{network}.{path}")
                elif ADAPTED in path:
                    self.frozen.append(f"{network}.{path}")
        model = [name for name in self.tensors if name.startswith(MODEL)]
        self.schemes: list[dict[str, str]] = [
            {name: name for name in self.tensors},  # raysim's own names
            {name.removeprefix(MODEL): name for name in model},  # without the network's name
            {
                theirs: f"{MODEL}{ours}"
                for theirs, ours in original_names(networks["model"]).items()
            },  # as its author did
        ]
        self.schemes += [
            _without_adapters(scheme) for scheme in self.schemes if self._has_adapters()
        ]

    def _has_adapters(self) -> bool:
        return any(ADAPTER in name for name in self.tensors)

    def within(self, key: str, parts: Sequence[str] | None) -> set[str] | None:
        """Return the full names of all tensors in these parts; None if `parts` is None.

        key: the setting that names the parts, "only" or "redraw", for the error.
        parts: names of networks, modules or tensors.
        Raises ValueError if the run does not have a part.
        """
        if parts is None:
            return None
        full_names: set[str] = set()
        for part in parts:
            inside: set[str] = set()
            for scheme in self.schemes:
                inside |= {full for name, full in scheme.items() if _is_in(name, part)}
            if not inside:
                raise ValueError(
                    f"init.{key}={part}: this run has no network, module or tensor of this name: "
                    f"{suggest(part, self._parts())}"
                )
            full_names |= inside
        return full_names

    def _parts(self) -> list[str]:
        """Return the names to suggest for `init.only` and `init.redraw`.

        These are the names of the networks, of the modules of the network "model", and of the
        modules directly inside these modules.
        """
        names = {name.partition(".")[0] for name in self.tensors}
        for scheme in self.schemes[1:]:
            for name in scheme:
                modules = name.split(".")[:-1]
                names |= {".".join(modules[:depth]) for depth in (1, 2) if len(modules) >= depth}
        return sorted(names)


def _without_adapters(scheme: Mapping[str, str]) -> dict[str, str]:
    """Map names in a file written without adapters to full names of the run's tensors.

    The run's model has adapters.
    scheme: the same map for a file written with adapters.
    """
    return {
        name.replace(ADAPTED, "."): full for name, full in scheme.items() if ADAPTER not in name
    }


def _is_in(name: str, part: str) -> bool:
    return name == part or name.startswith(f"{part}.")


def _format_names(names: Iterable[str]) -> str:
    """Return a text with at most `MAX_NAMES` of the names, and the number of further names."""
    names = list(names)
    text = ", ".join(names[:MAX_NAMES])
    if len(names) > MAX_NAMES:
        text += f" and {len(names) - MAX_NAMES} more"
    return text


# --- the file ----------------------------------------------------------------------------
def read_initial_weights(init: Init) -> tuple[Init, InitialWeights | None]:
    """Return `init` with the checksum of its file, and the weights of the file.

    Without a file (`init.file` is None), return `init` and None.
    Raises ValueError if the file cannot be read or contains no state dict, or if `init.sha256` is
    set and the file has another checksum.
    """
    if init.file is None:
        return init, None
    path = user_path(init.file).absolute()
    if not path.exists():
        raise ValueError(
            f"init.file={init.file} does not exist. Give a .safetensors file or a saved state dict."
        )
    with regular_file(path).open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if init.sha256 not in (None, digest):
        raise ValueError(
            f"init.file={init.file} has the checksum {digest}, but init.sha256={init.sha256}: the "
            "file has changed. Restore it, or set init.sha256=null for a new run."
        )
    tensors = _read(path, init.file)
    filled = Init(init.file, init.only, init.redraw, digest)
    return filled, InitialWeights(filled, tensors, _read_base(path))


def _read_base(path: Path) -> str:
    """Return the checksum of the frozen weights that a file of adapters belongs to.

    Return "" if the file is not a safetensors file, or if it does not say the checksum.
    """
    if path.suffix != ".safetensors":
        return ""
    with safe_open(path, "pt") as file:
        header: dict[str, str] = file.metadata() or {}
    return header.get(BASE, "")


def _read(path: Path, shown: str) -> dict[str, np.ndarray]:
    try:
        if path.suffix == ".safetensors":
            content: Any = load_file(path)
        else:
            with warnings.catch_warnings():
                # A file that cannot be read raises an error below.
                warnings.simplefilter("ignore", UserWarning)
                content = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, OSError, EOFError) as error:
        raise ValueError(
            f"init.file={shown} cannot be read ({first_line(error)}). Restore this file, or "
            "choose another one."
        ) from error
    except Exception as error:  # the unpickler accepts only plain state dicts
        raise ValueError(
            f"init.file={shown} cannot be read as a state dict ({type(error).__name__}). Save only "
            "tensors, with torch.save(model.state_dict(), FILE)."
        ) from error
    if not isinstance(content, Mapping) or not content:
        raise ValueError(
            f"init.file={shown} contains {_type_name(content)}, not a state dict. Save "
            "model.state_dict()."
        )
    for name, tensor in content.items():
        if not (isinstance(name, str) and isinstance(tensor, Tensor)):
            raise ValueError(
                f"init.file={shown} contains {_type_name(tensor)} under {name!r}, but a state dict "
                "must have only tensors. Save only model.state_dict()."
            )
    return {name: _to_array(tensor) for name, tensor in content.items()}


def _type_name(value: object) -> str:
    is_empty = isinstance(value, Mapping) and not value
    return "nothing" if is_empty else f"a {type(value).__name__}"


def _to_array(tensor: Tensor) -> np.ndarray:
    """Return a tensor as an array; bfloat16, which NumPy does not have, becomes float32."""
    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.float()
    return tensor.contiguous().numpy()
