"""The device data of FedScale (Lai et al., ICML 2022) as a trace of ours.

Two pickled dictionaries, by client:
- `client_device_capacity`: {"computation": ms for one sample's inference, "communication": bandwidth}. Training takes
  three times as long as inference, and the bandwidth, which is that of both directions, is in units of 1,024 bits a
  second: so FedScale's `ClientMetadata.get_completion_time` and its `model_update_size` have it.
- `client_behave_trace`: {"active": [seconds], "inactive": [seconds], "finish_time": seconds, ...}: a client is there
  from active[i] to inactive[i], and begins again after `finish_time`.

As in FedScale, who acts like whom has no meaning: the clients of one file meet those of the other one by one, and start
again where they are fewer.
"""

from __future__ import annotations

import itertools
import math
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from raysim.primitives.errors import Refused, first_line
from raysim.primitives.files import make_folder, regular_file
from raysim.simulation.trace import describe_error, write

TRAINING = 3.0  # times inference
BANDWIDTH = 1024 / 8  # bytes a second
# Containers and numbers that a pickle names; Python's own need no name.
_ALLOWED = {
    ("collections", "OrderedDict"): OrderedDict,
    ("numpy", "dtype"): np.dtype,
    ("numpy.core.multiarray", "scalar"): np.float64(0).__reduce__()[0],
    ("numpy._core.multiarray", "scalar"): np.float64(0).__reduce__()[0],
}


class _Plain(pickle.Unpickler):
    """Reads containers and numbers, and runs nothing that the file names."""

    def find_class(self, module: str, name: str) -> Any:
        """Refuses all else."""
        if (found := _ALLOWED.get((module, name))) is None:
            raise pickle.UnpicklingError(
                f"it asks for {module}.{name}, and may hold nothing but containers and numbers"
            )
        return found


def convert(capacity: str, behaviour: str, out: Path) -> str:
    """Write the trace; what was done, in a sentence. Raises ValueError or OSError."""
    devices, times = _dictionary(capacity, "computation"), _dictionary(behaviour, "finish_time")
    rows: list[dict[str, Any]] = []
    wrong = ""
    for (client, when), what in zip(times.items(), itertools.cycle(devices.values()), strict=False):
        row = _row(len(rows), when, what)
        if reason := describe_error(row):
            wrong = wrong or f"client {client}: {reason}"
        else:
            rows.append(row)
    if not rows:
        raise ValueError(f"{behaviour} has no client that a trace could hold; the first: {wrong}")
    make_folder(out.parent)
    write(out, rows)
    left = f"; {len(times) - len(rows):,} were left out, the first of them {wrong}" if wrong else ""
    return f"{len(rows):,} clients in {out}{left}"


def _dictionary(file: str, needs: str) -> Mapping[Any, Mapping[str, Any]]:
    """A pickled dictionary of dictionaries that have the key `needs`."""
    try:
        path = Path(file)
        with (regular_file(path) if path.exists() else path).open("rb") as content:
            found = _Plain(content).load()
    except (OSError, Refused):
        raise
    except Exception as error:  # a damaged pickle fails in many ways
        raise ValueError(f"{file} is no pickle of FedScale ({first_line(error)})") from error
    if not isinstance(found, dict) or not found:
        raise ValueError(f"{file} is no pickle of FedScale: it holds no dictionary of clients")
    for client, facts in found.items():
        if not isinstance(facts, dict) or needs not in facts:
            raise ValueError(
                f"{file} is no pickle of FedScale: client {client} has no {needs!r}; check the files' order"
            )
    return found


def _row(client: int, when: Mapping[str, Any], what: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the trace; nan for what is no number."""
    milliseconds, bandwidth = (
        _number(what["computation"]),
        _number(what.get("communication")) * BANDWIDTH,
    )
    return {
        "client": client,
        "start": [_number(each) for each in when.get("active", ())],
        "end": [_number(each) for each in when.get("inactive", ())],
        "period": _number(when["finish_time"]),
        "down": bandwidth,
        "up": bandwidth,
        "speed": 1000 / (TRAINING * milliseconds) if milliseconds else math.nan,
    }


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float, np.number)) else math.nan
