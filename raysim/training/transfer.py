"""Copy tensors between a device and CPU memory, with few waits for the device.

If the device is a CPU, nothing is copied.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from raysim.data.dataset import Dataset
from raysim.vectors.optimizer import widest_float


def has_own_memory(device: torch.device) -> bool:
    """Return True if a device has its own memory, which Python and NumPy cannot read directly."""
    return device.type != "cpu"


def _silence_read_only_warning() -> None:
    """Suppress PyTorch's warning about read-only arrays, which appears once in a process.

    Arrays from an object store are read-only, and raysim only reads the tensors that share their
    memory.
    """
    array = np.zeros(1)
    array.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.from_numpy(array)


_silence_read_only_warning()


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Return the array as a tensor on the device.

    On a CPU, array and tensor share memory. The copy to a CUDA device may still be running.
    Training can use the tensor even if this function is called in inference mode.
    """
    with torch.inference_mode(False):
        tensor = torch.from_numpy(array)
        if device.type == "cuda":
            return tensor.pin_memory().to(device, non_blocking=True)
        return tensor.to(device)


# The tensors of data sets, by file, part and device.
_dataset_tensors: WeakValueDictionary[tuple[str, torch.device], Tensor] = WeakValueDictionary()


def dataset_on_device(dataset: Dataset, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the inputs and labels of a data set as tensors on the device.

    On a CPU, both are views of the data set's arrays. On other devices, both are copies, which all
    calls in a process share.
    """
    # Other processes have their own copies, because shared GPU memory is lost when the process that
    # allocated it dies.
    tensors = []
    for part, array in (("inputs", dataset.inputs), ("labels", dataset.labels)):
        key = f"{dataset.path}, {part}", device
        tensor = _dataset_tensors.get(key)
        if tensor is None:
            tensor = _dataset_tensors[key] = to_device(array, device)
        tensors.append(tensor)
    return tensors[0], tensors[1]


def read_scalars(values: Sequence[Tensor]) -> list[float]:
    """Return scalar tensors as Python numbers; wait for the device once."""
    if not values or not has_own_memory(values[0].device):
        return [float(value) for value in values]
    device = values[0].device
    stacked = torch.stack([value.to(device, widest_float(device)) for value in values])
    scalars: list[float] = stacked.tolist()
    return scalars


class MemoryCopies:
    """Copies of tensors from a device to CPU memory.

    A CUDA device can compute while it copies. All copies are complete after `wait`.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, tensor: Tensor) -> np.ndarray:
        """Start to copy a tensor to CPU memory, and return the array with the copy.

        Until `wait`, values may be missing, and nobody may change the tensor. For a CPU tensor,
        return a view; the tensor must then never change.
        """
        if not has_own_memory(tensor.device):
            return tensor.numpy()
        if self._stream is None:
            return tensor.cpu().numpy()
        target = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            target.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)
        return target.numpy()

    def wait(self) -> None:
        """Wait until all copies are complete."""
        if self._stream is not None:
            self._stream.synchronize()
