"""Which methods of a list fill which hook, and the check that a list fits together."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from raysim.api.declarations import Task
from raysim.api.method import Method, Need
from raysim.api.private_state import reserved_names
from raysim.vectors.layout import Layout

EXCLUSIVE = (
    *("model", "stages", "select", "logits", "loss", "perturb", "predict", "finetuning"),  # on clients
    *("combine", "apply", "scored"),  # on the server
)


SLOTS = tuple(name for name, value in vars(Method).items() if callable(value) and not name.startswith("_"))


def overrides(method: Method, slot: str) -> bool:
    """Whether the method fills the slot."""
    return _writes(method, slot) and slot not in method.idle


def _writes(method: Method, slot: str) -> bool:
    """Whether its class has a hook of its own there, be it idle with these parameters."""
    return getattr(type(method), slot) is not getattr(Method, slot)


def owners(methods: Sequence[Method], slot: str) -> list[Method]:
    """The methods that fill a slot, in the order of the list."""
    return [method for method in methods if overrides(method, slot)]


def owner(methods: Sequence[Method], slot: str) -> Method | None:
    """The one method that owns an exclusive slot, if any."""
    return next(iter(owners(methods, slot)), None)


def culprit(error: BaseException) -> Method | None:
    """The innermost method whose code was running when the error was raised."""
    found, frame = None, error.__traceback__
    while frame is not None:
        if isinstance(method := frame.tb_frame.f_locals.get("self"), Method):
            found = method
        frame = frame.tb_next
    return found


def blamed(error: BaseException) -> str:
    """The name of the innermost method whose code was running when the error was raised, or ""."""
    return "" if (method := culprit(error)) is None else method.name


_DOES = {
    "model": "replace the model",
    "stages": "decide the stages of an iteration",
    "select": "choose the samples of an epoch",
    "logits": "change the logits of the training loss",
    "loss": "replace the training loss",
    "perturb": "decide at which shifted points the gradient is taken",
    "predict": "turn logits into predictions",
    "finetuning": "decide how models are fine-tuned for evaluation",
    "combine": "combine the updates",
    "apply": "own the server's step",
    "scored": "decide which vector is evaluated",
}


def check_name(method: Method) -> None:
    """Refuse a method without a name, by which messages, options and what it sends are told apart."""
    name = getattr(method, "name", None)
    if not (isinstance(name, str) and name):
        what = "has no name" if name is None else f"has the name {name!r}, which is no text"
        raise ValueError(f'method {type(method).__name__} {what}: give its class one, as in name = "mine"')


def _check_hooks(method: Method) -> None:
    """Refuse a hook that cannot be called as it will be, which otherwise every client would find in the first round."""
    for slot in SLOTS:
        if not _writes(method, slot):
            continue
        if not callable(hook := getattr(method, slot)):
            raise ValueError(f"method '{method.name}' has {slot}={hook!r}, the name of a hook: rename it")
        wanted = [*inspect.signature(getattr(Method, slot)).parameters]
        try:
            given = inspect.signature(hook)
        except ValueError:  # of what is compiled nobody knows
            continue
        try:
            given.bind(*wanted[1:])
        except TypeError:
            raise ValueError(
                f"method '{method.name}' has the hook {slot}({', '.join(given.parameters)}), which is called with "
                f"({', '.join(wanted[1:])}): write def {slot}({', '.join(wanted)})"
            ) from None


def doubts(methods: Sequence[Method]) -> Iterator[str]:
    """Sentences to warn with of methods whose hooks are perhaps misspelt, and so are never called."""
    for method in methods:
        open_ = [slot for slot in SLOTS if not _writes(method, slot)]
        for name in _idle_functions(type(method)):
            if near := next(iter(difflib.get_close_matches(name, open_, 1, 0.75)), ""):
                yield f"method '{method.name}' has a function '{name}' that nothing calls: is the hook '{near}' meant?"
        if len(open_) == len(SLOTS) and all(getattr(method, fact) == getattr(Method, fact) for fact in _SETTLING):
            yield f"method '{method.name}' fills no hook and does nothing: help(raysim.Method) lists the hooks"


_SETTLING = ("weighting", "pools", "needs_single_updates", "keep_optimizer")  # what a method decides without a hook


def _idle_functions(cls: type[Method]) -> list[str]:
    """Public functions of a user's own class that are no hooks, and that no function of the class calls."""
    own = [each for each in cls.__mro__ if issubclass(each, Method) and not each.__module__.startswith("raysim.")]
    functions = {name: value for each in own for name, value in vars(each).items() if inspect.isfunction(value)}
    called = {name for function in functions.values() for name in function.__code__.co_names}
    return [name for name in functions if not (name.startswith("_") or name in SLOTS or name in called)]


def check_composition(methods: Sequence[Method]) -> None:
    """Refuse methods without a name or with hooks of other arguments, and two that own one slot or exclude each other.

    Raises ValueError with a sentence that names them.
    """
    for method in methods:
        check_name(method)
        _check_hooks(method)
    names = [method.name for method in methods]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"method '{name}' appears {names.count(name)} times in method={names}; keep one of them")
    for slot in EXCLUSIVE:
        if len(both := owners(methods, slot)) > 1:
            raise ValueError(
                f"method '{both[0].name}' and method '{both[1].name}' both {_DOES[slot]} (slot '{slot}'); "
                "keep one of them"
            )
    loss, logits = owner(methods, "loss"), owner(methods, "logits")
    if loss and logits and loss is not logits:
        raise ValueError(
            f"method '{loss.name}' replaces the training loss, in which the logits that method '{logits.name}' changes "
            "would have no part; keep one of them"
        )
    soft = next((method.name for method in methods if method.targets == "soft"), None)
    needy = next((method.name for method in methods if method.targets == "integer"), None)
    if soft and needy:
        raise ValueError(
            f"method '{needy}' does not combine with method '{soft}': it needs integer labels, which '{soft}' makes "
            "soft; keep one of them"
        )
    pooling = next((method.name for method in methods if method.pools), None)
    own = next(
        (m.name for m in methods for slot in ("personal", "personalise", "finetuning") if overrides(m, slot)), None
    )
    if pooling and own:
        raise ValueError(
            f"method '{own}' does not combine with method '{pooling}': it gives every client a model of its own, where "
            "pooled data have one for all; keep one of them"
        )
    for method in methods:
        for other, why in method.excludes.items():
            if other in names:
                raise ValueError(
                    f"method '{method.name}' does not combine with method '{other}': {why}; keep one of them"
                )


def check_needs(methods: Sequence[Method], task: Task, splits: bool) -> None:
    """Refuse a method that needs what the data or the model does not have. splits: whether the model has features.

    Raises ValueError with a sentence that names the method.
    """
    tokens = "the inputs of this data are token numbers"
    lacking: dict[Need, str] = {}
    if task.kind != "classification":
        lacking["classes"] = f"needs classes as labels, and this data is for {task.kind}"
    if not splits:
        lacking["features"] = (
            "needs features in front of a linear head, and this model cannot be split into them: name its last linear "
            "layer with model.head"
        )
    if not task.is_images:
        shape = f"the inputs of this data have the shape {list(task.shape)}"
        lacking["images"] = f"needs images [channels, height, width], and {shape if task.tokens is None else tokens}"
    if task.tokens is not None:
        lacking["numbers"] = f"needs inputs that can be added up, and {tokens}"
    for method in methods:
        if need := next((need for need in lacking if need in method.needs), None):
            raise ValueError(
                f"method '{method.name}' {lacking[need]}; leave the method out, or choose other data or models"
            )


def own_names(method: Method) -> set[str]:
    """What the names of its entries may begin with: its name, and those of methods that it is a kind of."""
    return {method.name, *(vars(cls)["name"] for cls in type(method).__mro__ if "name" in vars(cls))}


def check_private_names(methods: Sequence[Method], layout: Layout) -> None:
    """Refuse private state under a name that is taken already, or that does not begin with its method's."""
    taken = dict.fromkeys(reserved_names(layout), "a personal tensor of the run's networks has")
    for method in owners(methods, "state"):
        state: object = method.state(layout, 1)
        if not isinstance(state, Mapping):
            raise ValueError(
                f"method '{method.name}' returns {state!r} from state: return a mapping of names to tensors"
            )
        for name, value in state.items():
            if name in taken:
                raise ValueError(f"method '{method.name}' keeps '{name}', a name that {taken[name]} already: rename it")
            if not (isinstance(name, str) and name.partition(".")[0] in own_names(method)):
                raise ValueError(f"method '{method.name}' keeps {name!r}: let the name begin with '{method.name}.'")
            if not isinstance(value, Tensor):
                raise ValueError(
                    f"method '{method.name}' keeps '{name}', which is no tensor: return tensors from state"
                )
            taken[name] = f"method '{method.name}' has given"
