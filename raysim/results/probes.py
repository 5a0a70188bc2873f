"""Store probes of local models: one safetensors file for each probed round.

A probe measures a client's trained model, and the model that the client received, on the same
samples of the central test set. These have equally many samples of each class; a class with too few
samples gives all that it has.

Source: Guo, Tang and Lin, "FedBR" (ICML 2023), Figures 2 and 3, and Table 6.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from raysim.api.messages import Probe
from raysim.primitives.files import replace_file

_ARRAYS = ("labels", "seen", "features", "probabilities")


def save_probes(probes: Sequence[Probe], path: Path) -> None:
    """Write the probes of a round; the file appears complete or not at all."""
    first_with: dict[tuple[int, tuple[int, ...], bytes], int] = {}
    arrays: dict[str, NDArray[Any]] = {}
    owners = []
    for index, probe in enumerate(probes):
        for name in _ARRAYS:
            arrays[f"{name}.{index}"] = getattr(probe, name)
        # Compared by content: with personal parameters, clients of one version receive
        # different models.
        content = (probe.version, probe.received.shape, probe.received.tobytes())
        owner = first_with.setdefault(content, index)
        owners.append(owner)
        if owner == index:
            arrays[f"received.{index}"] = probe.received
    arrays["client"] = np.array([probe.client for probe in probes], np.int64)
    arrays["version"] = np.array([probe.version for probe in probes], np.int64)
    arrays["accuracy"] = np.array([probe.accuracy for probe in probes], np.float64)
    arrays["received"] = np.array(owners, np.int64)
    contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    replace_file(Path(path), save(contiguous))


def load_probes(path: Path) -> list[Probe]:
    """Read the probes that `save_probes` wrote, bit-identical and in the same order.

    Raises `ValueError` if the file is not a file of probes.
    """
    try:
        arrays = load(Path(path).read_bytes())
        probes = []
        for index, client in enumerate(arrays["client"]):
            probe = Probe(
                client=int(client),
                version=int(arrays["version"][index]),
                accuracy=float(arrays["accuracy"][index]),
                received=arrays[f"received.{arrays['received'][index]}"],
                **{name: arrays[f"{name}.{index}"] for name in _ARRAYS},
            )
            probes.append(probe)
    except (SafetensorError, KeyError, IndexError) as error:
        raise ValueError(
            f"{path} is not a readable file of probes; restore the file or start the run again."
        ) from error
    return probes
