"""Convert the device data of FedScale (Lai et al., ICML 2022) into a trace.

FedScale has two pickled dictionaries with values for each client:

- `client_device_capacity`: "computation" is the milliseconds of inference for one sample; training
  takes three times as long. "communication" is the bandwidth in both directions, in 1,024 bits per
  second.
- `client_behave_trace`: a client is available from active[i] to inactive[i] (seconds). The times
  repeat after "finish_time" seconds.

The dictionaries describe different clients. The i-th client of `client_behave_trace` gets the i-th
entry of `client_device_capacity`, which repeats if it is too short. Clients that cannot be
converted are left out. The trace numbers its clients from 0.
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

from raysim.primitives.errors import RefusedError, first_line
from raysim.primitives.files import make_folder, regular_file
from raysim.simulation.trace import describe_error, write

TRAINING_PER_INFERENCE = 3.0  # training takes three times as long as inference
BYTES_PER_S = 1024 / 8  # bytes per second of one unit of bandwidth
# Types that a pickle stores by name; it stores Python's built-in types without names.
_ALLOWED_TYPES = {
    ("collections", "OrderedDict"): OrderedDict,
    ("numpy", "dtype"): np.dtype,
    ("numpy.core.multiarray", "scalar"): np.float64(0).__reduce__()[0],
    ("numpy._core.multiarray", "scalar"): np.float64(0).__reduce__()[0],
}


class _DataUnpickler(pickle.Unpickler):
    """An unpickler that restores only containers and numbers, and never executes code."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the type that a pickle file refers to, if this type is allowed.

        module, name: the module and the name of the type.
        Raise `UnpicklingError` for all other types.
        """
        if (module, name) not in _ALLOWED_TYPES:
            raise pickle.UnpicklingError(
                f"the pickle names {module}.{name}, but only containers and numbers are allowed"
            )
        return _ALLOWED_TYPES[module, name]


def convert(capacity: str, behaviour: str, out: Path) -> str:
    """Convert FedScale's two files into a trace; return a sentence with the number of clients.

    capacity, behaviour: the paths of `client_device_capacity` and `client_behave_trace`.
    out: the path of the trace to write.
    Raise `ValueError` if a file does not have FedScale's format, or if no client can be converted.
    """
    devices = _read_clients(capacity, "computation")
    times = _read_clients(behaviour, "finish_time")
    rows: list[dict[str, Any]] = []
    first_error = ""
    for (client, time), device in zip(
        times.items(), itertools.cycle(devices.values()), strict=False
    ):
        row = _row(len(rows), time, device)
        error = describe_error(row)
        if not error:
            rows.append(row)
        elif not first_error:
            first_error = f"client {client}: {error}"
    if not rows:
        raise ValueError(
            f"{behaviour}: none of the clients can be converted. Correct the files; the first "
            f"error is {first_error}"
        )
    make_folder(out.parent)
    write(out, rows)
    text = f"{len(rows):,} clients are in {out}"
    if first_error:
        text += (
            f"; {len(times) - len(rows):,} clients were left out. The first error: {first_error}"
        )
    return text


def _read_clients(file: str, key: str) -> Mapping[Any, Mapping[str, Any]]:
    """Return the contents of a file of FedScale: a dictionary of values for each client.

    Raise `ValueError` if the file has no such dictionary, or if a client lacks the value `key`.
    """
    try:
        path = Path(file)
        with (regular_file(path) if path.exists() else path).open("rb") as content:
            clients = _DataUnpickler(content).load()
    except (OSError, RefusedError):
        raise
    except Exception as error:  # a damaged pickle fails in many ways
        raise ValueError(
            f"{file} is not a pickle of FedScale ({first_line(error)}). Give FedScale's file "
            "client_device_capacity first, and its file client_behave_trace second."
        ) from error
    if not isinstance(clients, dict) or not clients:
        raise ValueError(
            f"{file} is not a pickle of FedScale, because it holds no dictionary of clients. "
            "Give FedScale's file client_device_capacity first, and its file client_behave_trace "
            "second."
        )
    for client, values in clients.items():
        if not isinstance(values, dict) or key not in values:
            raise ValueError(
                f"{file} is another file than expected, because client {client} has no {key!r}. "
                "Give FedScale's file client_device_capacity first, and its file "
                "client_behave_trace second."
            )
    return clients


def _row(client: int, availability: Mapping[str, Any], device: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of the trace; values that are not numbers become nan.

    client: the client's number.
    availability: the client's entry in `client_behave_trace`.
    device: the client's entry in `client_device_capacity`.
    """
    milliseconds = _number(device["computation"])
    bandwidth = _number(device.get("communication")) * BYTES_PER_S
    milliseconds_per_sample = TRAINING_PER_INFERENCE * milliseconds
    return {
        "client": client,
        "start": [_number(value) for value in availability.get("active", ())],
        "end": [_number(value) for value in availability.get("inactive", ())],
        "period": _number(availability["finish_time"]),
        "down": bandwidth,
        "up": bandwidth,
        "speed": 1000 / milliseconds_per_sample if milliseconds else math.nan,
    }


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float, np.number)) else math.nan
