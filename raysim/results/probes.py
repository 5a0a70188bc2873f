"""How biased local training leaves the clients' models: measures of feature and classifier bias.

Guo, Tang and Lin, "FedBR" (ICML 2023): Figure 2 (features), Figure 3 (classifier) and Table 6 (accuracy of local
models). A local model is probed before averaging, beside the model that its client received, on
balanced rows of the central test set. The paper shows pictures; the numbers for features and classifier are ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from raysim.api.messages import Probe
from raysim.primitives.files import replace_file

if TYPE_CHECKING:
    pass


# ---------------------------------------------------------------- measures


# ---------------------------------------------------------------- file

_ARRAYS = ("labels", "seen", "features", "probabilities")


def save_probes(probes: Sequence[Probe], path: Path) -> None:
    """Write one safetensors file, atomically; received features that clients of a version share are kept once."""
    stored: dict[tuple[int, tuple[int, ...], bytes], int] = {}
    arrays: dict[str, NDArray[Any]] = {}
    owners = []
    for index, probe in enumerate(probes):
        arrays.update({f"{name}.{index}": getattr(probe, name) for name in _ARRAYS})
        # By content: where parameters are personal, two clients of a version have received different models.
        content = (probe.version, probe.received.shape, probe.received.tobytes())
        owners.append(stored.setdefault(content, index))
        if owners[-1] == index:
            arrays[f"received.{index}"] = probe.received
    arrays["client"] = np.array([probe.client for probe in probes], np.int64)
    arrays["version"] = np.array([probe.version for probe in probes], np.int64)
    arrays["accuracy"] = np.array([probe.accuracy for probe in probes], np.float64)
    arrays["received"] = np.array(owners, np.int64)
    replace_file(
        Path(path), save({name: np.ascontiguousarray(array) for name, array in arrays.items()})
    )


def load_probes(path: Path) -> list[Probe]:
    """What `save_probes` wrote, bit for bit and in its order. Raises `ValueError` where the file holds no probes."""
    try:
        arrays = load(Path(path).read_bytes())
        return [
            Probe(
                client=int(client),
                version=int(arrays["version"][index]),
                accuracy=float(arrays["accuracy"][index]),
                received=arrays[f"received.{arrays['received'][index]}"],
                **{name: arrays[f"{name}.{index}"] for name in _ARRAYS},
            )
            for index, client in enumerate(arrays["client"])
        ]
    except (SafetensorError, KeyError, IndexError) as problem:
        raise ValueError(
            f"{path} is no readable file of probes; restore it or run the study again."
        ) from problem
