"""Find the hooks that methods override, and check that the methods of a list fit together."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from types import CodeType

from raysim.api.declarations import Task
from raysim.api.method import Method
from raysim.api.setup import MethodDeclaration, Need
from raysim.primitives.kinds import POSITION_KINDS, PackedShape

HOOKS = tuple(
    name for name, value in vars(Method).items() if callable(value) and not name.startswith("_")
)
# Hooks that run once for each batch.
STEP_HOOKS = ("batch", "loss", "gradient", "perturb")

# Phrases for the actions that only one method of a list may take.
_ALONE = {
    "model": "replace the model",
    "perturb": "compute the gradient at shifted parameters",
    "combine": "combine the updates",
    "personalise": "make the model that a client is scored with",
    "stages": "decide the stages of a step",
    "select": "choose the samples of an epoch",
    "train": "train clients by a function of their own",
    "evaluate": "score sets of samples by a function of their own",
    "finetune": "decide how models are fine-tuned for evaluation",
    "compressor": "compress updates or steps",
    "scored": "decide which vector is evaluated",
    "loss": "replace the training loss",
    "step": "compute the step of the server",
}


def fills(method: Method, hook: str) -> bool:
    """Return True if the method's class overrides the hook."""
    return getattr(type(method), hook) is not getattr(Method, hook)


def filled_hooks(method: Method) -> frozenset[str]:
    """Return the names of the hooks that the method's class overrides."""
    return frozenset(hook for hook in HOOKS if fills(method, hook))


def failing_method(error: BaseException) -> Method | None:
    """Return the method whose code raised the error; None if no method did.

    If the code of several methods is in the traceback, return the innermost one.
    """
    method, frame = None, error.__traceback__
    while frame is not None:
        owner = frame.tb_frame.f_locals.get("self")
        if isinstance(owner, Method):
            method = owner
        frame = frame.tb_next
    return method


def failing_method_name(error: BaseException) -> str:
    """Return the name of the method whose code raised the error; "" if no method did."""
    method = failing_method(error)
    return "" if method is None else method.name


def check_name(method: Method) -> None:
    """Raise ValueError for a method without a name."""
    name = getattr(method, "name", None)
    if isinstance(name, str) and name:
        return
    problem = f"has the name {name!r}, which is not a string of one or more characters"
    if name is None:
        problem = "has no name"
    raise ValueError(
        f'method {type(method).__name__} {problem}. Set it in the class, as in name = "mine".'
    )


# Hooks of version 0.1.0, with the hook that replaces each of them.
_RENAMED = {
    "networks": "setup",
    "personal": "setup",
    "state": "setup",
    "stages": "setup",
    "draws": "setup",
    "select": "setup",
    "planned": "setup",
    "send": "setup",
    "start": "setup",
    "contribute": "setup",
    "assemble": "setup",
    "finetuning": "setup",
    "check": "setup",
    "watch": "setup",
    "scored": "setup",
    "receive": "begin",
    "finish": "end",
    "transform": "batch",
    "rows": "batch",
    "term": "loss",
    "logits": "loss",
    "mix": "step",
    "apply": "step",
}


def _check_renamed(method: Method) -> None:
    for name in _uncalled_functions(type(method)):
        if name in _RENAMED:
            hook = _RENAMED[name]
            raise ValueError(
                f"method '{method.name}': raysim has no hook '{name}' any more. Use the hook "
                f"'{hook}' instead, or rename the function '{name}' if it is not meant as a hook. "
                "See help(raysim.Method)."
            )


def _check_hooks(method: Method) -> None:
    """Raise ValueError if a hook does not accept the arguments that raysim passes to it."""
    for hook in HOOKS:
        if not fills(method, hook):
            continue
        function = getattr(method, hook)
        if not callable(function):
            raise ValueError(
                f"method '{method.name}' sets {hook}={function!r}, but {hook} is the name of a "
                "hook, which must be a function. Rename this attribute."
            )
        wanted = [*inspect.signature(getattr(Method, hook)).parameters]
        try:
            signature = inspect.signature(function)
        except ValueError:  # compiled functions have no signature
            continue
        try:
            signature.bind(*wanted[1:])
        except TypeError:
            raise ValueError(
                f"method '{method.name}' has the hook {hook}({', '.join(signature.parameters)}), "
                f"but raysim calls it with ({', '.join(wanted[1:])}). Write def "
                f"{hook}({', '.join(wanted)})."
            ) from None


def suspicious_methods(methods: Sequence[Method]) -> Iterator[str]:
    """Yield warnings about methods that probably do not do what their author wants.

    There is a warning in two cases:
    - The method overrides no hook, keeps the default weighting and pools no data.
    - The method has a public function that its class never calls. The function's name is almost the
      name of a hook that the method does not override.
    """
    for method in methods:
        empty = [hook for hook in HOOKS if not fills(method, hook)]
        for name in _uncalled_functions(type(method)):
            near = difflib.get_close_matches(name, empty, 1, 0.75)
            if near:
                yield (
                    f"method '{method.name}' has a function '{name}' that nothing calls: "
                    f"is the hook '{near[0]}' meant?"
                )
        changes_nothing = method.weighting == Method.weighting and not method.pools
        if len(empty) == len(HOOKS) and changes_nothing:
            yield (
                f"method '{method.name}' overrides no hook and does nothing. "
                "See help(raysim.Method)."
            )


def _uncalled_functions(cls: type[Method]) -> list[str]:
    """Return the public functions of a user's method that its own functions do not use.

    Such a function is not a hook, and no function of the class uses its name. A misspelt hook is an
    example.
    """
    classes = [
        parent
        for parent in cls.__mro__
        if issubclass(parent, Method) and not parent.__module__.startswith("raysim.")
    ]
    functions = {
        name: value
        for parent in classes
        for name, value in vars(parent).items()
        if inspect.isfunction(value)
    }
    used: set[str] = set()
    for function in functions.values():
        used |= _names_in(function.__code__)
    return [
        name
        for name in functions
        if not name.startswith("_") and name not in HOOKS and name not in used
    ]


def _names_in(code: CodeType) -> set[str]:
    """Return the names that a function uses, also in its lambdas and comprehensions."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names_in(constant)
    return names


def check_names(methods: Sequence[Method]) -> None:
    """Raise ValueError if a method in a list has a wrong name or a wrong hook.

    Every method must have a name, and no two methods the same one. Some hooks of version 0.1.0 have
    been replaced. A method must not define a function with the name of such a hook, unless its
    other functions use this name. Hooks must accept the arguments that raysim passes. At most one
    method may override `model`.
    """
    for method in methods:
        check_name(method)
        _check_renamed(method)
        _check_hooks(method)
    names = [method.name for method in methods]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"method '{name}' appears {names.count(name)} times in method={names}. Keep one "
                "of them."
            )
    _check_alone("model", [method.name for method in methods if fills(method, "model")])


def _check_alone(what: str, names: Sequence[str]) -> None:
    if len(names) > 1:
        raise ValueError(
            f"method '{names[0]}' and method '{names[1]}' both {_ALONE[what]} ({what}). "
            "Keep one of them."
        )


def check_together(all_declared: Sequence[MethodDeclaration]) -> None:
    """Raise ValueError if the methods of a list cannot be combined.

    For example, some declarations and hooks may occur only once in a list, such as stages and
    `combine`.

    all_declared: the declarations of each method of the list.
    """
    _check_single_owners(all_declared)
    _check_targets(all_declared)
    _check_pooling(all_declared)
    _check_own_training(all_declared)
    _check_omissions(all_declared)
    names = [declared.method for declared in all_declared]
    for declared in all_declared:
        for other, why in declared.excludes.items():
            if other in names:
                raise ValueError(
                    f"method '{declared.method}' cannot be combined with method '{other}': {why}. "
                    "Keep one of them."
                )


def _check_single_owners(all_declared: Sequence[MethodDeclaration]) -> None:
    for fact in ("stages", "select", "train", "evaluate", "finetune", "scored", "compressor"):
        owners = [
            declared.method for declared in all_declared if getattr(declared, fact) is not None
        ]
        _check_alone(fact, owners)
    for hook in ("perturb", "combine", "personalise"):
        _check_alone(
            hook, [declared.method for declared in all_declared if declared.has_hook(hook)]
        )
    for hook in ("loss", "step"):
        _check_alone(hook, [declared.method for declared in all_declared if hook in declared.owned])


def _check_targets(all_declared: Sequence[MethodDeclaration]) -> None:
    methods = {declared.targets: declared.method for declared in reversed(all_declared)}
    if "soft" in methods and "integer" in methods:
        soft, integer = methods["soft"], methods["integer"]
        raise ValueError(
            f"method '{integer}' cannot be combined with method '{soft}': '{integer}' needs "
            f"integer labels, but '{soft}' makes labels soft. Keep one of them."
        )


def step_parts(declared: MethodDeclaration) -> list[str]:
    """Return the method's hooks and declarations that change the steps of local training.

    The result has names of hooks, such as "loss", and names of declarations, such as "run.stages".
    """
    parts = [hook for hook in STEP_HOOKS if declared.has_hook(hook)]
    if declared.stages is not None:
        parts.append("run.stages")
    if declared.select is not None:
        parts.append("run.select")
    if declared.draws:
        parts.append("run.draw")
    return parts


# Hooks that read or change the vector or the updates of its parameters.
PARAMETER_HOOKS = ("begin", "prepare", "end", "combine", "step", "absorb", "personalise")


def _check_omissions(all_declared: Sequence[MethodDeclaration]) -> None:
    """Raise ValueError if a compressor is combined with a method that calls `Setup.omit`.

    A method that calls `Setup.omit` sends only a part of the model, but a compressor encodes the
    whole model.
    """
    compressing = next((d.method for d in all_declared if d.compressor is not None), None)
    omitting = next((d.method for d in all_declared if d.omissions), None)
    if compressing and omitting:
        raise ValueError(
            f"method '{omitting}' cannot be combined with method '{compressing}': '{omitting}' "
            f"sends only parts of the model, but '{compressing}' compresses the whole model. "
            "Keep one of them."
        )


def parameter_parts(declared: MethodDeclaration) -> list[str]:
    """Return the method's hooks and declarations that read or change parameters.

    The result has names of hooks, such as "step", and names of declarations, such as "run.upload".
    """
    parts = [hook for hook in PARAMETER_HOOKS if declared.has_hook(hook)]
    if declared.change_updates is not None:
        parts.append("run.change_updates")
    if declared.networks:
        parts.append("run.network")
    if declared.keeps_parameters:
        parts.append("run.private_parameters")
    if declared.uploads:
        parts.append("run.upload")
    if declared.compressor is not None:
        parts.append("run.compress")
    if declared.scored is not None:
        parts.append("run.scores")
    return parts


def _check_own_training(all_declared: Sequence[MethodDeclaration]) -> None:
    """Raise ValueError if a method does not fit the method that declares `run.train`.

    A method does not fit if it changes raysim's training steps, keeps the state of raysim's
    optimizer, or needs gradients or parameters that the model lacks.
    """
    owner = next((declared for declared in all_declared if declared.train is not None), None)
    if owner is None:
        return
    for declared in all_declared:
        unused = step_parts(declared)
        if declared.keeps_optimizer:
            unused.append("run.keep_optimizer")
        if declared is owner and unused:
            raise ValueError(
                f"method '{declared.method}' replaces local training (run.train), so that its "
                f"{unused[0]} would have no effect. Remove either run.train or {unused[0]} from "
                "the method."
            )
        if step_parts(declared):
            raise ValueError(
                f"method '{declared.method}' cannot be combined with method '{owner.method}': "
                f"'{declared.method}' needs raysim's training steps ({step_parts(declared)[0]}), "
                f"but '{owner.method}' trains without them. Keep one of them."
            )
        if not owner.has_gradients and "gradients" in declared.needs:
            raise ValueError(
                f"method '{declared.method}' cannot be combined with method '{owner.method}': "
                f"'{declared.method}' differentiates the model, but the model of "
                f"'{owner.method}' has no gradients. Keep one of them."
            )
        if not owner.has_parameters and declared is not owner and parameter_parts(declared):
            raise ValueError(
                f"method '{declared.method}' cannot be combined with method '{owner.method}': "
                f"'{declared.method}' reads or changes parameters "
                f"({parameter_parts(declared)[0]}), but the model of '{owner.method}' is not "
                "stored in parameters. Keep one of them."
            )
        if declared.keeps_optimizer:
            raise ValueError(
                f"method '{declared.method}' cannot be combined with method '{owner.method}': "
                f"'{declared.method}' keeps the state of raysim's optimizer from one job of a "
                f"client to the next, but '{owner.method}' does not use this optimizer. Keep one "
                "of them."
            )


def _check_pooling(all_declared: Sequence[MethodDeclaration]) -> None:
    pooling = next((declared.method for declared in all_declared if declared.pools), None)
    if pooling is None:
        return
    for declared in all_declared:
        if declared.needs_clients:
            raise ValueError(
                f"method '{declared.method}' cannot be combined with method '{pooling}': "
                f"{declared.needs_clients}, but '{pooling}' pools the data of all clients. Keep "
                "one of them."
            )
        keeps_a_model = declared.keeps_parameters or declared.has_hook("personalise")
        if keeps_a_model or declared.finetune is not None:
            raise ValueError(
                f"method '{declared.method}' cannot be combined with method '{pooling}': "
                f"'{declared.method}' keeps a part of the model on each client or adapts the model "
                f"to each client, but '{pooling}' trains one model on the data of all clients. "
                "Keep one of them."
            )


def check_needs(all_declared: Sequence[MethodDeclaration], task: Task, has_features: bool) -> None:
    """Raise ValueError if the data or the model lack something that a method needs.

    has_features: True if the model has features in front of a linear head.
    """
    missing = _unmet_needs(task, has_features)
    for declared in all_declared:
        has_parts = task.kind in (*POSITION_KINDS, "structure")
        has_whole_labels = not has_parts and not task.has_unlabelled
        if declared.targets == "soft" and not has_whole_labels:
            problem = f"this data is for {task.kind}"
            if task.has_unlabelled:
                problem = "some samples of this data have no class"
            raise ValueError(
                f"method '{declared.method}' makes soft labels from the classes of samples, but "
                f"{problem}. Leave the method out, or choose other data."
            )
        for need in declared.needs:
            if need in missing:
                raise ValueError(
                    f"method '{declared.method}' {missing[need]}. Leave the method out, or choose "
                    "other data or models."
                )


def _unmet_needs(task: Task, has_features: bool) -> Mapping[Need, str]:
    """Return the needs that this task or model does not meet, each with a reason.

    A reason follows a method's name in an error, so it begins with "needs". "gradients" is left
    out, because it depends on the methods.
    has_features: True if the model has features in front of a linear head.
    """
    missing: dict[Need, str] = {}
    tokens = "the inputs of this data are token numbers"
    if task.kind != "classification":
        missing["classes"] = f"needs classes as labels, but this data is for {task.kind}"
    elif task.has_unlabelled:
        missing["classes"] = "needs a class for each sample, but some samples have none"
    if not has_features:
        missing["features"] = (
            "needs features in front of a linear head, but this model cannot be split (for a model "
            "of torchvision, timm or huggingface, or your own one, you can set model.head to the "
            "name of its last linear layer)"
        )
    if not task.is_images:
        shape = f"the inputs of this data have the shape {list(task.shape)}"
        reason = shape if task.tokens is None else tokens
        missing["images"] = f"needs images [channels, height, width], and {reason}"
    if isinstance(task.shape, PackedShape) and any(f.has_tokens for f in task.shape.fields):
        missing["numbers"] = "needs inputs that can be added up, but some are token numbers"
    if task.tokens is not None:
        missing["numbers"] = f"needs inputs that can be added up, but {tokens}"
    return missing
