"""Conformance checks of learners.

A learner must also pass the checks of methods, because it is a method.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from raysim.api.learner import Learner, LearnerNetwork, Parameters
from raysim.conformance.agreement import Make
from raysim.conformance.runs import run
from raysim.conformance.study import Study
from raysim.training.run_spec import declare_run


def checks(learner: Learner, study: Study) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield each check of a learner as a pair: its name, and the function to call.

    study: describes the tiny run for the checks (`raysim.conformance.Study`). Its `methods` do not
    contain the learner: this function adds it.
    """
    study = replace(study, methods=(*study.methods, learner))
    yield (
        "its initial parameters depend on the given generator only",
        partial(check_initial, study.spec),
    )
    if type(learner).evaluate is Learner.evaluate:
        yield (
            "its outputs for a sample do not depend on the other samples",
            partial(check_outputs, study),
        )


def check_initial(make: Make) -> None:
    """Check that `initial` does not use the global random generators of Python and NumPy.

    make: function that returns the description of a run. Each description has a new copy of the
    learner.
    """
    one, other = _initial(make, 0), _initial(make, 1)
    for name, array in one.items():
        assert np.array_equal(array, other[name], equal_nan=True), (
            f"the initial parameters {name!r} differ between two calls of `initial`. Draw random "
            "numbers from the argument `rng`."
        )


def _initial(make: Make, global_seed: int) -> dict[str, np.ndarray]:
    """Return the initial parameters of a new copy of the learner: a dictionary of arrays by name.

    Parameters that are bytes become one array with the name "bytes".
    make: returns the description of a run, with a new copy of the learner at each call.
    global_seed: the seed of the global random generators of Python and NumPy.
    """
    random.seed(global_seed)
    np.random.seed(global_seed)  # noqa: NPY002
    network: LearnerNetwork = declare_run(make()).networks["model"].net  # type: ignore[assignment]
    if network.content is not None:
        return {"bytes": np.frombuffer(network.content, np.uint8)}
    return {name: tensor.numpy() for name, tensor in network.state_dict().items()}


def check_outputs(study: Study) -> None:
    """Check that the outputs of `predict` for a sample do not depend on the other samples."""
    spec = study.spec()
    learner = spec.methods[-1]
    assert isinstance(learner, Learner)
    calls: list[tuple[Parameters, np.ndarray]] = []
    predict = learner.predict

    def watched(parameters: Parameters, inputs: np.ndarray) -> np.ndarray:
        calls.append((parameters, inputs.copy()))
        return predict(parameters, inputs)

    object.__setattr__(learner, "predict", watched)  # the learner may be a frozen dataclass
    run(spec, study.schedules[0], study.fleet, rounds=2)
    parameters, inputs = max(calls, key=lambda call: len(call[1]))
    together = torch.as_tensor(predict(parameters, inputs)).double()
    alone = torch.as_tensor(predict(parameters, inputs[:1])).double()
    assert torch.allclose(alone[0], together[0], rtol=1e-4, atol=1e-6, equal_nan=True), (
        f"predict returns {alone[0].tolist()} for a sample alone, and {together[0].tolist()} for "
        f"it among {len(inputs)}. Compute the outputs of each sample from its inputs only."
    )
