"""Describe the facts on which the bits of a process's results depend; compare processes."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from raysim.primitives.version import __version__
from raysim.training.determinism import openblas_threads

PACKAGE = "raysim"
INSTRUCTIONS = "CPU instructions"
INSTRUCTION_SETS = (
    "amx",
    "avx",
    "f16c",
    "fma",
    "sve",
)  # for which libraries have kernels of their own
MISSING = "missing"
UNSET = "unset"
VARIABLES = (  # environment variables that make a library use other kernels
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "DNNL_DEFAULT_FPMATH_MODE",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)
MAX_DIFFERENCES = 4  # so many differences an error names at most


class UnequalWorkersError(ValueError):
    """The error of a run with `runtime.mixed=false` whose processes compute different bits."""


@dataclass(frozen=True)
class Identity:
    """The identity of a process of a run.

    name: the name of the process, such as "worker-3".
    node: the name of its machine.
    facts: by name, all facts on which the bits of the process's results depend.
    """

    name: str
    node: str
    facts: Mapping[str, str]

    def __str__(self) -> str:
        return f"{self.name} on {self.node}"


def identify(name: str, packages: Sequence[str] = (), device: str = "", node: str = "") -> Identity:
    """Return the identity of this process.

    name: the name of the process, for errors.
    packages: packages besides raysim whose code the run uses.
    device: the device for training; "" for a process that trains nothing.
    node: the name of this machine; "" means the host name.
    """
    facts = {**_device(device), **_cpu(), **_variables(), **_versions()}
    facts |= {
        f"code of {package}": code_checksum(package)
        for package in dict.fromkeys((PACKAGE, *packages))
    }
    return Identity(name, node or platform.node(), facts)


def _device(device: str) -> dict[str, str]:
    """Return facts about the hardware of a worker's device; {} if `device` is ""."""
    if not device.startswith("cuda"):
        return {"device": device} if device else {}
    major, minor = torch.cuda.get_device_capability(device)
    model = f"{torch.cuda.get_device_name(device)} (compute capability {major}.{minor})"
    return {
        "device": model,
        "CUDA": str(torch.version.cuda),
        "cuDNN": str(torch.backends.cudnn.version()),
    }


@functools.cache
def _cpu() -> dict[str, str]:
    """Return facts about the CPU kernels that torch, its libraries and NumPy use here."""
    # Older versions of torch have no such function.
    capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    has = sorted(
        key
        for key, value in capabilities.items()
        if value is True and key.startswith(INSTRUCTION_SETS)
    )
    blas = {str(library["architecture"]) for library in openblas_threads().info()}
    return {
        "CPU capability": torch.backends.cpu.get_cpu_capability(),
        "CPU maker": str(capabilities.get("cpu_name", "")).partition(" ")[0],
        INSTRUCTIONS: " ".join(has),
        "machine": platform.machine(),
        "OpenBLAS kernels": " ".join(sorted(blas)),
    }


def _variables() -> dict[str, str]:
    return {name: os.environ.get(name) or UNSET for name in VARIABLES}


def _versions() -> dict[str, str]:
    return {
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "NumPy": np.__version__,
        PACKAGE: __version__,
    }


@functools.cache
def code_checksum(package: str) -> str:
    """Return a checksum of the Python files of a package, or `MISSING` if it cannot be found."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        return MISSING
    digest = hashlib.sha256()
    for name, path in sorted(_python_files(spec.submodule_search_locations, spec.origin)):
        content = path.read_bytes()
        digest.update(f"{name} {len(content)} ".encode("utf-8", "surrogateescape"))
        digest.update(content)
    return digest.hexdigest()[:16]


def _python_files(folders: Iterable[str] | None, origin: str | None) -> Iterable[tuple[str, Path]]:
    """Yield the path inside the package and the full path of each Python file of a package.

    folders: the package's folders; None for a module, which is a single file.
    origin: the file of a module; None if it is unknown. Then nothing is yielded.
    """
    if folders is None:
        if origin and Path(origin).is_file():
            yield Path(origin).name, Path(origin)
        return
    for folder in map(Path, folders):
        for path in folder.rglob("*.py"):
            yield path.relative_to(folder).as_posix(), path


@dataclass
class Participants:
    """The processes that took part in a run.

    driver: the process that the user has started.
    mixed: True if processes may differ (`runtime.mixed`).
    joined: the other processes, in the order in which they joined.
    """

    driver: Identity
    mixed: bool = False
    joined: list[Identity] = field(default_factory=list)

    def add(self, *identities: Identity) -> None:
        """Add processes to the run.

        Raises UnequalWorkersError if `mixed` is False, and `facts` of a new process and `facts` of
        an earlier process have different values for the same key.
        """
        new = [identity for identity in identities if identity not in self.all]
        reference = self._reference(new)
        if not self.mixed:
            _check_equal(reference, new)
        self.joined += new

    @property
    def all(self) -> list[Identity]:
        """Return the driver and all other processes, including workers that were replaced."""
        return [self.driver, *self.joined]

    def _reference(self, new: Sequence[Identity]) -> Mapping[str, tuple[str, Identity]]:
        """Return for each fact its expected value, and the process from which the value comes.

        A fact is an entry of `Identity.facts`. The value comes from the first process that has the
        fact, in the order of joining; processes in `new` join last.
        """
        first: dict[str, tuple[str, Identity]] = {}
        for identity in [*self.all, *new]:
            for fact, value in identity.facts.items():
                first.setdefault(fact, (value, identity))
        return first


def _check_equal(
    reference: Mapping[str, tuple[str, Identity]], identities: Sequence[Identity]
) -> None:
    """Raise UnequalWorkersError if an entry of a process's `facts` differs from the expected value.

    reference: for each name of a fact, its expected value and a process with this value.
    identities: the processes to check.
    """
    unequal: dict[str, list[Identity]] = {}  # by the text of their differences
    for identity in identities:
        text = _describe_differences(reference, identity)
        if text:
            unequal.setdefault(text, []).append(identity)
    if not unequal:
        return
    phrases = [f"{', '.join(map(str, group))}: {text}" for text, group in unequal.items()]
    raise UnequalWorkersError(
        "runtime.mixed=false: processes of this run would compute different bits. "
        f"{'; '.join(phrases)}. Use equal nodes with equal installations, or set "
        "runtime.mixed=true to run without the promise of the same bits."
    )


def _describe_differences(reference: Mapping[str, tuple[str, Identity]], identity: Identity) -> str:
    """Describe the facts of a process that differ from the expected values; "" if none differs.

    After `MAX_DIFFERENCES` facts, the text has only the number of the others.
    reference: for each fact, the expected value and the identity of a process that has it.
    """
    texts = []
    for fact, value in identity.facts.items():
        expected, other = reference[fact]
        if value == expected:
            continue
        if fact == INSTRUCTIONS:
            changes = _describe_instructions(expected, value)
            texts.append(f"{fact} {changes} (compared with {other})")
        else:
            texts.append(f"{fact} {value} ({expected} in {other})")
    if len(texts) > MAX_DIFFERENCES:
        texts = [*texts[:MAX_DIFFERENCES], f"{len(texts) - MAX_DIFFERENCES} more"]
    return ", ".join(texts)


def _describe_instructions(expected: str, value: str) -> str:
    """Describe how two lists of a CPU's instruction sets differ."""
    missing = set(expected.split()) - set(value.split())
    added = set(value.split()) - set(expected.split())
    changes = []
    if missing:
        changes.append(f"without {' '.join(sorted(missing))}")
    if added:
        changes.append(f"with {' '.join(sorted(added))}")
    return " and ".join(changes)


def are_equal(identities: Sequence[Identity]) -> bool:
    """Return True if every fact has the same value in all processes."""
    values: dict[str, str] = {}
    for identity in identities:
        for fact, value in identity.facts.items():
            if values.setdefault(fact, value) != value:
                return False
    return True


def describe_processes(identities: Sequence[Identity]) -> list[dict[str, object]]:
    """Return a description of the processes for the summary; equal processes share an entry."""
    groups: dict[tuple[tuple[str, str], ...], list[Identity]] = {}
    for identity in identities:
        groups.setdefault(tuple(identity.facts.items()), []).append(identity)
    return [
        {
            "names": [identity.name for identity in group],
            "nodes": list(dict.fromkeys(identity.node for identity in group)),
            **dict(facts),
        }
        for facts, group in groups.items()
    ]
