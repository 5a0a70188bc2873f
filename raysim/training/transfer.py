"""Between a device and ordinary memory, with few waits; on a CPU, where both are the same, nothing is copied."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from raysim.data.dataset import Dataset
from raysim.vectors.optimizer import widest


def apart(device: torch.device) -> bool:
    """Whether what lies on the device has to be copied before Python or NumPy can read it."""
    return device.type != "cpu"


def _say_once() -> None:
    """Have PyTorch warn, unheard, that an array is read-only, as it does once in a process.

    Those out of an object store are; tensors over them are only read.
    """
    array = np.zeros(1)
    array.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.from_numpy(array)


_say_once()


def up(array: np.ndarray, device: torch.device) -> Tensor:
    """A tensor on the device, for which nobody waits; on a CPU a view. It may be trained on, whoever asked for it."""
    with torch.inference_mode(False):  # evaluation asks in that mode for what training uses later
        value = torch.from_numpy(array)
        return (
            value.pin_memory().to(device, non_blocking=True)
            if device.type == "cuda"
            else value.to(device)
        )


_on_device: WeakValueDictionary[tuple[str, torch.device], Tensor] = (
    WeakValueDictionary()
)  # by file and part


def on_device(dataset: Dataset, device: torch.device) -> tuple[Tensor, Tensor]:
    """Inputs and labels of a data set: one copy on a device for all workers of this process; on a CPU views.

    Workers of other processes, as Ray's are, have copies of their own: memory of a GPU that another process lends is
    gone when that process dies, and workers may die. One worker with several lanes fills a GPU with one copy.
    """
    found = []
    for part, array in (("inputs", dataset.inputs), ("labels", dataset.labels)):
        key = f"{dataset.path}, {part}", device
        tensor = _on_device.get(key)
        if tensor is None:
            tensor = _on_device[key] = up(array, device)
        found.append(tensor)
    return found[0], found[1]


def numbers(values: Sequence[Tensor]) -> list[float]:
    """Scalars as Python's numbers, for which the device is waited for once."""
    if not values or not apart(values[0].device):
        return [float(value) for value in values]
    device = values[0].device
    found: list[float] = torch.stack(
        [value.to(device, widest(device)) for value in values]
    ).tolist()
    return found


class Copies:
    """Copies down to ordinary memory, made while the device works on; they are there once `wait` has returned."""

    def __init__(self, device: torch.device):
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def take(self, value: Tensor) -> np.ndarray:
        """What will be a copy of a tensor, which stays as it is from now on; of one that lies there, a view."""
        if not apart(value.device):
            return value.numpy()
        if self._stream is None:
            return value.cpu().numpy()
        place = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            place.copy_(value, non_blocking=True)
        value.record_stream(self._stream)
        return place.numpy()

    def wait(self) -> None:
        """Until all are there."""
        if self._stream is not None:
            self._stream.synchronize()
