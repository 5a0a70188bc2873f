"""Train clients with a method's own function (`run.train`) instead of raysim's steps."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import numpy as np
import torch

from raysim.api.context import Context
from raysim.api.hook_checks import HookError
from raysim.api.local_job import LocalJob
from raysim.api.local_training import LocalResult
from raysim.primitives.streams import torch_seed
from raysim.vectors.layout import Vector


@contextmanager
def preserved_generators(device: torch.device) -> Iterator[None]:
    """Restore the global generators of `random`, NumPy and PyTorch at the end of `with`.

    device: if this is a CUDA device, PyTorch's generator of this device is restored, too. PyTorch's
    generator of the CPU is always restored.
    """
    python_state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)  # noqa: NPY002


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed the global random generators of `random`, NumPy and torch.

    seed: the seed of all these generators.
    device: the device on which torch computes. Torch's generators for the CPU and for this device
    are seeded.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    seed_torch(seed, device)


def seed_torch(seed: int, device: torch.device) -> None:
    """Seed torch's global random generators for the CPU and for the device.

    seed: the seed of both generators.
    """
    if device.type == "cpu":
        # `torch.manual_seed` can take a thousand times as long: it formats the stack of calls for
        # each GPU library that is installed but not in use.
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


@contextmanager
def seeded_generators(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the global generators of `random`, NumPy and torch; restore them afterwards.

    A user's training function may draw random numbers from them. These numbers must not depend on
    the worker.
    """
    with preserved_generators(device):
        seed_generators(seed, device)
        yield


class LocalTrainingError(HookError):
    """The error of a method whose own training function returned an unusable result.

    method: the name of the method.
    """

    def __init__(self, text: str, method: str):
        super().__init__(text)
        self.method = method


class OwnTraining:
    """The function that a method declared with `run.train`, and the networks that it trains."""

    def __init__(
        self, method: str, function: Callable[[LocalJob], LocalResult | None], vector: Vector
    ):
        self.method, self.function, self.vector = method, function, vector

    def train(self, ctx: Context) -> LocalResult:
        """Run the user's training function for one client.

        `self.vector` has the received model before the call, and the trained model afterwards.

        Raises LocalTrainingError if the function returns neither a `LocalResult` nor None, or
        changes the shape of a tensor.
        """
        seed = torch_seed(ctx.seed, "own_training", ctx.client, ctx.participation)
        try:
            with seeded_generators(seed, self.vector.data.device), torch.enable_grad():
                result = self.function(ctx.view(self.method))
        except BaseException:
            with suppress(ValueError):  # the error of the function is raised, not this one
                self.vector.collect()
            raise
        try:
            self.vector.collect()
        except ValueError as error:
            raise LocalTrainingError(str(error), self.method) from None
        if result is None:
            result = LocalResult()
        if not isinstance(result, LocalResult):
            raise LocalTrainingError(
                f"method '{self.method}': the function of run.train(...) returned "
                f"{type(result).__name__}. Return raysim.LocalResult(...) or None.",
                self.method,
            )
        report = {f"{self.method}.{name}": float(value) for name, value in result.metrics.items()}
        ctx.report.update(report)
        return result
