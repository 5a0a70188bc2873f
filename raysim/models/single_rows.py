"""Find layers that cannot train on one row, such as BatchNorm, which needs a variance."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def refusing_layer(model: nn.Module, make_inputs: Callable[[int], Tensor]) -> str:
    """Return the name and type of the first layer that prevents training on one row.

    Such a layer raises an error, or its outputs are not finite. Return "" if there is no such
    layer, or if the model cannot train on two rows either.
    make_inputs: receives a number of rows, and returns inputs with so many rows.
    """
    parameter = next(model.parameters(), torch.empty(0))
    devices = [parameter.device] if parameter.device.type == "cuda" else []
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    modes = [(module, module.training) for module in model.modules()]
    try:
        with torch.no_grad(), torch.random.fork_rng(devices):
            model.train()
            if _first_failure(model, _move_inputs(make_inputs(2), parameter)):
                return ""
            return _first_failure(model, _move_inputs(make_inputs(1), parameter))
    finally:
        for buffer, value in buffers:
            buffer.data.copy_(value)
        for module, training in modes:
            module.training = training


def _move_inputs(inputs: Tensor, parameter: Tensor) -> Tensor:
    """Return the inputs on the parameter's device; floats also get the parameter's dtype."""
    dtype = parameter.dtype if inputs.is_floating_point() else inputs.dtype
    return inputs.to(parameter.device, dtype)


def _first_failure(model: nn.Module, inputs: Tensor) -> str:
    """Return the first layer with an error or outputs that are not finite; "" if there is none.

    The result is the layer's name and type, as text.
    """
    names = {module: name for name, module in model.named_modules()}
    entered: list[nn.Module] = []
    failed: list[nn.Module] = []

    def enter(module: nn.Module, _: object) -> None:
        entered.append(module)

    def leave(module: nn.Module, _: object, outputs: object) -> None:
        entered.remove(module)
        if isinstance(outputs, Tensor) and not bool(torch.isfinite(outputs).all()):
            failed.append(module)

    handles = [module.register_forward_pre_hook(enter) for module in names]
    handles += [module.register_forward_hook(leave) for module in names]
    try:
        model(inputs)
    except Exception:  # a layer of the user may raise any error
        failed = failed or [entered[-1] if entered else model]
    finally:
        for handle in handles:
            handle.remove()
    if not failed:
        return ""
    kind, name = type(failed[0]).__name__, names[failed[0]]
    return f"layer '{name}' ({kind})" if name else kind
