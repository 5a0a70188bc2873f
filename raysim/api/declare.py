"""Call `setup` of all methods, then make the run's networks and layout."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from raysim.api.client_state import reserved_names
from raysim.api.composition import check_needs, check_together, filled_hooks
from raysim.api.declarations import ExtraNetwork, Labels, Local, Task
from raysim.api.method import Method
from raysim.api.server_view import Weighting
from raysim.api.setup import MethodDeclaration, Setup
from raysim.api.update_code import UpdateCode
from raysim.models.classifier import is_split
from raysim.primitives.streams import torch_seed
from raysim.vectors.layout import Layout, plan_layout


@dataclass(frozen=True)
class RunSettingsForMethods:
    """The settings of a run that methods may read in `setup`, before the run starts.

    They become attributes of `Setup` with the same names. The docstring of `Setup` explains them
    where the name does not.
    """

    local: Local
    rounds: int
    seed: int
    weighting: Weighting | None
    clients_with_samples: int
    max_updates: int = sys.maxsize
    has_stale_updates: bool = False
    devices: Labels | None = None


@dataclass(frozen=True)
class Declarations:
    """The declarations of all methods of a run, with the networks and the layout of the run.

    networks: "model", and each network of a method as "method.name".
    layout: the position of each tensor of the networks in the flat vector.
    methods: the declarations of each method, in list order.
    """

    task: Task
    networks: dict[str, nn.Module]
    layout: Layout
    methods: tuple[MethodDeclaration, ...]

    def hooks_of(self, hook: str) -> list[tuple[MethodDeclaration, Callable[..., Any]]]:
        """Return the methods that override a hook, in list order, each with its function.

        A pair has the method's declarations and its function for the hook. Methods that skip the
        hook (`Setup.skip`) are left out.
        hook: the name of the hook, such as "loss".
        """
        return [
            (declared, declared.hooks[hook]) for declared in self.methods if declared.has_hook(hook)
        ]

    def single_hook(self, hook: str) -> tuple[MethodDeclaration, Callable[..., Any]] | None:
        """Return the first method that overrides and does not skip a hook, with its function.

        Return None without such a method. Use `hooks_of` for hooks that several methods may
        override.
        hook: the name of the hook, such as "loss".
        """
        return next(iter(self.hooks_of(hook)), None)

    def owner(self, hook: str) -> MethodDeclaration | None:
        """Return the declarations of the method that calls `Setup.owns(hook)`; None without one.

        hook: "loss" for the method that replaces the task loss, "step" for the method that replaces
        the server's step.
        """
        return next((declared for declared in self.methods if hook in declared.owned), None)

    def declarer(self, fact: str) -> MethodDeclaration | None:
        """Return the declarations in which an attribute is set; None if no method has set it.

        fact: an attribute of `MethodDeclaration` that at most one method may set, such as "stages"
        or "train". The attribute is None if the method did not set it.
        """
        return next(
            (declared for declared in self.methods if getattr(declared, fact) is not None), None
        )

    @property
    def private_names(self) -> set[str]:
        """The full names of the personal tensors, which stay on the client.

        They are parameters and buffers of the neural networks, such as "model.bn1.weight".
        """
        floating, integer = self.layout.personal_entries
        return {entry.name for entry in (*floating, *integer)}

    @property
    def fixed_parameters(self) -> dict[str, str]:
        """The names of the parameters that methods freeze, each with the name of the method.

        Methods freeze parameters with `Setup.fixed_parameters`.
        """
        return {
            name: declared.method for declared in self.methods for name in declared.fixed_parameters
        }

    @property
    def keeps_client_state(self) -> bool:
        """True if the methods of the run declare state that is kept for each client between jobs.

        This is client state, tensors of networks that stay on the client and are not fixed, or the
        optimizer's state.
        """
        if any(
            declared.keeps_client_state or declared.keeps_optimizer for declared in self.methods
        ):
            return True
        return not self.private_names <= self.fixed_parameters.keys()

    @property
    def reads_updates(self) -> bool:
        """True if a method reads single updates (`Setup.read_updates`)."""
        return any(declared.reads_updates for declared in self.methods)

    @property
    def uses_of_single_updates(self) -> list[str]:
        """Return the reasons why workers must send each update to the coordinator.

        Each reason is a clause about updates, such as "method 'x' weighs them". An empty list means
        that workers may send sums of updates.
        """
        uses = [f"method '{declared.method}' weighs them" for declared, _ in self.hooks_of("weigh")]
        combiner = self.single_hook("combine")
        if combiner is not None:
            uses.append(f"method '{combiner[0].method}' combines them itself")
        for declared in self.methods:
            if declared.reads_updates:
                uses.append(f"method '{declared.method}' reads them")
            if declared.change_updates is not None:
                uses.append(f"method '{declared.method}' changes them")
        return uses

    @property
    def compressor(self) -> tuple[str, UpdateCode] | None:
        """A pair: the name of the method that declared the run's compressor, and the compressor.

        It is None if the run compresses nothing.
        """
        declared = self.declarer("compressor")
        if declared is None or declared.compressor is None:
            return None
        return declared.method, declared.compressor

    @property
    def floats_up(self) -> int:
        """The number of 32-bit words of the model that a client sends, after any compression.

        The uploads of methods are not counted.
        """
        compression, shared = self.compressor, self.layout.shared
        if compression is None or not compression[1].compresses_up:
            return shared
        return shared - self.layout.trained + compression[1].words(self.layout)

    @property
    def step_words(self) -> int | None:
        """The number of 32-bit words in a compressed server step; None without such compression."""
        compression = self.compressor
        if compression is None or not compression[1].compresses_down:
            return None
        return compression[1].words(self.layout)

    @property
    def pools(self) -> bool:
        """True if one model is trained on the pooled data of all clients; then nothing is sent."""
        return any(declared.pools for declared in self.methods)

    @property
    def warnings(self) -> Iterator[str]:
        """The warnings of all methods before the run."""
        for declared in self.methods:
            yield from declared.warnings


def with_required_settings(local: Local, method: Method) -> Local:
    """Return `local` with the values that the method's hook `settings` returns.

    The values of the method replace those of `local`, even if a user set them.
    """
    required = {key.removeprefix("local."): value for key, value in method.settings(local).items()}
    return replace(local, **required)  # type: ignore[arg-type]


def declare(
    methods: Sequence[Method], task: Task, model: nn.Module, settings: RunSettingsForMethods
) -> Declarations:
    """Call `setup` of each method and return the declarations.

    The coordinator and each worker get equal results. A method's networks do not depend on the
    other methods.
    Raise ValueError if the methods do not fit each other, the data or the model.
    """
    has_features = is_split(model)
    model, failure = _replace_model(methods, task, model, settings.seed)
    networks: dict[str, nn.Module] = {"model": model}
    layout_later: list[Layout] = []
    hooks_by_name = {method.name: filled_hooks(method) for method in methods}
    all_declared: list[MethodDeclaration] = []
    private: set[str] = set()
    for method in methods:
        declared = MethodDeclaration(method.name, pools=method.pools)
        setup = Setup(
            method.name,
            task,
            settings.local,
            networks,
            hooks_by_name,
            declared,
            settings.rounds,
            settings.seed,
            settings.weighting,
            settings.clients_with_samples,
            settings.max_updates,
            settings.has_stale_updates,
            settings.devices,
            layout_later,
        )
        declared.hooks = {hook: getattr(method, hook) for hook in filled_hooks(method)}
        # Methods make their networks on the CPU.
        torch.default_generator.manual_seed(torch_seed(settings.seed, f"networks.{method.name}"))
        needs_before = len(declared.needs)
        _call_setup(method, setup, has_features)
        if len(declared.needs) > needs_before or declared.targets != "any":
            check_needs([declared], task, has_features)
        _add_networks(networks, private, declared)
        all_declared.append(declared)
    if failure is not None:
        raise failure
    check_together(all_declared)
    for declared in all_declared:
        private |= set(declared.private_parameters)
        for names in declared.late_private_parameters:
            private |= set(names(networks))
    layout = plan_layout(networks, private)
    layout_later.append(layout)
    declarations = Declarations(task, networks, layout, tuple(all_declared))
    _check_state_names(declarations)
    for declared in all_declared:
        for check in declared.checks:
            declared.warnings += check(declarations)
    return declarations


def _replace_model(
    methods: Sequence[Method], task: Task, model: nn.Module, seed: int
) -> tuple[nn.Module, Exception | None]:
    """Call the hook `model`, if a method overrides it, and return (model to train, error).

    Normally the error is None. If the hook raises an error, return the unchanged model and this
    error.
    """
    for method in methods:
        if "model" in filled_hooks(method):
            torch.default_generator.manual_seed(torch_seed(seed, f"model.{method.name}"))
            try:
                return method.model(task, model), None
            except Exception as error:
                return model, error
    return model, None


def _call_setup(method: Method, setup: Setup, has_features: bool) -> None:
    """Call the method's `setup`.

    If `setup` fails because the data or the model lack something, the error says what is missing.
    has_features: True if the model has features in front of a linear head.
    """
    try:
        method.setup(setup)
    except Exception:
        check_needs([setup.declared], setup.task, has_features)
        raise


def _add_networks(
    networks: dict[str, nn.Module], private: set[str], declared: MethodDeclaration
) -> None:
    for name, network in declared.networks.items():
        if name in networks:
            raise ValueError(
                f"method '{declared.method}' adds the network '{name}', which exists already. "
                "Rename one of them."
            )
        networks[name] = network.module
        if network.personal:
            private |= _tensor_names(name, network)


def _tensor_names(name: str, network: ExtraNetwork) -> set[str]:
    module = network.module
    leaves = [leaf for leaf, _ in (*module.named_parameters(), *module.named_buffers())]
    return {f"{name}.{leaf}" for leaf in leaves}


def _check_state_names(declarations: Declarations) -> None:
    """Raise ValueError if two entries of a client's state have the same name."""
    taken = dict.fromkeys(
        reserved_names(declarations.layout), "a network tensor that stays on the client"
    )
    for declared in declarations.methods:
        if not declared.keeps_client_state:
            continue
        values: object = declared.client_states(1)
        if not isinstance(values, Mapping):
            raise ValueError(
                f"method '{declared.method}': its function 'client_states' returned {values!r}. "
                "Return a dictionary with the initial value of each client state, by name."
            )
        for name in values:
            if name in taken:
                raise ValueError(
                    f"method '{declared.method}' keeps client state under the name '{name}', "
                    f"which is already the name of {taken[name]}. Choose another name."
                )
            taken[name] = f"a client state of method '{declared.method}'"
