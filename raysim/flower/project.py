"""Read a Flower project: its pyproject.toml, and the objects of its app."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

from raysim.primitives.errors import RefusedError, suggest
from raysim.primitives.extras import import_optional
from raysim.primitives.users_lines import users_line

if TYPE_CHECKING:
    from flwr.clientapp import ClientApp

PROJECT_FILE = "pyproject.toml"
UserConfig: TypeAlias = dict[str, Any]  # values are bool, int, float or str
_SCALARS = (bool, int, float, str)


@dataclass(frozen=True)
class Project:
    """The settings in a Flower project's pyproject.toml that decide a run.

    client_app, server_app: "module:object", or "" if the file names none.
    config: the run config; dots join names of nested values.
    clients: the number of simulated clients; None if the file does not give it.
    """

    folder: Path
    client_app: str = ""
    server_app: str = ""
    config: UserConfig = field(default_factory=dict)
    clients: int | None = None

    def run_config(self, overrides: Mapping[str, Any], key: str) -> UserConfig:
        """Return the run config with changed values.

        overrides: the new values.
        key: the setting that contains the overrides, for errors.
        Raises `RefusedError` for a name that is not in the project's run config, unless this config
        is empty.
        """
        changed = flatten(overrides, key)
        for name in changed:
            if self.config and name not in self.config:
                valid = suggest(name, self.config, "the app's run config has")
                raise RefusedError(f"{key}.{name} does not exist in {self.file}. {valid}")
        return {**self.config, **changed}

    @property
    def file(self) -> Path:
        """The project's pyproject.toml."""
        return self.folder / PROJECT_FILE


def read_project(folder: str | Path) -> Project:
    """Read the project in a folder; without a pyproject.toml all settings are empty.

    Raises `RefusedError` if there is no such folder, if the file is no valid TOML, or if a value of
    its run config cannot be used.
    """
    root = Path(folder).expanduser().resolve()
    if not root.is_dir():
        raise RefusedError(f"{folder}: there is no such folder. Give the folder of a Flower app.")
    file = root / PROJECT_FILE
    if not file.is_file():
        return Project(root)
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RefusedError(f"{file} is not valid TOML ({error}). Correct the file.") from error
    flower = values.get("tool", {}).get("flwr", {})
    app = flower.get("app", {})
    components = app.get("components", {})
    return Project(
        root,
        str(components.get("clientapp", "")),
        str(components.get("serverapp", "")),
        flatten(app.get("config", {}), str(file)),
        _number_of_clients(flower.get("federations", {})),
    )


def _number_of_clients(federations: Mapping[str, Any]) -> int | None:
    """Return the number of clients in an older project's pyproject.toml; None without one.

    The number is in the default federation.
    federations: the federations in the file, by name.
    """
    federation = federations.get(federations.get("default", ""), {})
    clients = federation.get("options", {}).get("num-supernodes")
    return None if clients is None else int(clients)


def flatten(values: Mapping[str, Any], key: str, prefix: str = "") -> UserConfig:
    """Return nested values as one dictionary: {"a": {"b": 1}} becomes {"a.b": 1}.

    key: the setting that contains the values, for errors.
    prefix: the text before all names, without the dot.
    Raises `RefusedError` for a value that Flower's run config cannot hold.
    """
    flat: UserConfig = {}
    for name, value in values.items():
        path = f"{prefix}.{name}" if prefix else str(name)
        if isinstance(value, Mapping):
            flat.update(flatten(value, key, path))
        elif isinstance(value, _SCALARS):
            flat[path] = value
        else:
            raise RefusedError(
                f"{key}.{path}={value!r} is a {type(value).__name__}. Use a number, a text, true "
                "or false."
            )
    return flat


# --- objects --------------------------------------------------------------------------------------
def load_object(reference: str, folder: Path, key: str) -> Any:
    """Import an object of the app.

    reference: "module:object".
    folder: the folder that contains the module; it is added to `sys.path`.
    key: the setting that contains the reference, for errors.
    Raises `RefusedError` if the object cannot be imported.
    """
    module_name, _, path = reference.partition(":")
    if not module_name or not path:
        raise RefusedError(
            f"{key}={reference} is not a reference to an object. Write module:object, such as "
            "mypackage.client_app:app."
        )
    target: Any = import_module(module_name, folder, f"{key}={reference}")
    for name in path.split("."):
        if not hasattr(target, name):
            public = [known for known in vars(target) if not known.startswith("_")]
            valid = suggest(name, public, f"{module_name} has")
            raise RefusedError(f"{key}={reference}: there is no {name} in {module_name}. {valid}")
        target = getattr(target, name)
    return target


def import_module(name: str, folder: Path, setting: str) -> ModuleType:
    """Import a module of the user's app.

    name: the full name, such as "mypackage.client_app".
    folder: the folder of the module; it is added to `sys.path`.
    setting: "key=value", for errors.
    Raises `RefusedError` if the import fails; the error names the failed line.
    """
    import_optional("flwr", setting)
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        place = users_line(error, folder)
        advice = "Correct the app."
        if isinstance(error, ModuleNotFoundError):
            advice = "Install the missing package, or give the folder that contains the module."
        raise RefusedError(
            f"{setting} cannot be imported ({type(error).__name__}: {error}{place}). {advice}"
        ) from error


@dataclass(frozen=True)
class LoadedClientApp:
    """A ClientApp, and what it can do.

    app: the ClientApp, a function of a message and a context.
    uses_client_fn: True if the app passes messages to a `Client` or `NumPyClient`, False if it has
    functions for messages.
    """

    app: Callable[[Any, Any], Any]
    uses_client_fn: bool
    can_train: bool
    can_evaluate: bool


@functools.lru_cache
def load_client_app(reference: str, folder: Path, key: str) -> LoadedClientApp:
    """Import a ClientApp, a client_fn or a class of clients, once in each process.

    reference: "module:object".
    folder: the folder of the module; it is added to `sys.path`.
    key: the setting that contains the reference, for errors.
    Raises `RefusedError` if the import fails or the object has another type.
    """
    return inspect_client_app(load_object(reference, folder, key), f"{key}={reference}")


def inspect_client_app(target: Any, setting: str) -> LoadedClientApp:
    """Return a user's app as a `LoadedClientApp`, which says if the app can train and evaluate.

    target: a ClientApp, a client_fn, or a class of clients.
    setting: the start of error messages.
    Raises `RefusedError` if `target` is any other object.
    """
    from flwr.client import Client, NumPyClient
    from flwr.clientapp import ClientApp

    if isinstance(target, type) and issubclass(target, Client | NumPyClient):
        target = _client_fn_of(target, setting)
    if inspect.isroutine(target) or isinstance(target, functools.partial):
        target = ClientApp(client_fn=with_one_argument(target, setting))
    if not isinstance(target, ClientApp):
        raise RefusedError(
            f"{setting} is a {type(target).__name__}. Give a ClientApp, a client_fn, or a class "
            "of clients."
        )
    return _inspect_once(target)


@functools.lru_cache
def _inspect_once(app: ClientApp) -> LoadedClientApp:
    """Return a ClientApp and what it can do; each app is inspected only once.

    A second inspection would be wrong, because `_is_registered` adds functions to the app.
    """
    try:
        app.train("raysim_probe")  # registers nothing until its result is called
    except ValueError:  # Flower's answer for an app that was made from a client_fn
        return LoadedClientApp(app, True, True, True)
    can_train, can_evaluate = _is_registered(app.train), _is_registered(app.evaluate)
    return LoadedClientApp(app, False, can_train, can_evaluate)


def with_one_argument(client_fn: Callable[..., Any], setting: str) -> Callable[[Any], Any]:
    """Return a function of one argument that makes a client by calling `client_fn`.

    Flower refuses a client_fn with several arguments, even if only the first one is required.
    setting: the text with which error messages begin: "key=value", or an argument's name.
    Raises `RefusedError` if `client_fn` requires more than one argument.
    """
    parameters = list(inspect.signature(client_fn).parameters.values())
    if len(parameters) < 2:
        return client_fn
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [
        other
        for other in parameters[1:]
        if other.default is other.empty and other.kind not in optional
    ]
    if required:
        raise RefusedError(
            f"{setting}: raysim calls the client_fn with one argument only, but its argument "
            f"'{required[0].name}' also needs a value. Give '{required[0].name}' a default, or set "
            "it with functools.partial."
        )
    if parameters[0].name == "cid" or parameters[0].annotation in (str, "str"):
        return lambda cid: client_fn(cid)  # Flower knows an older client_fn by this name
    return lambda context: client_fn(context)


def _client_fn_of(client_class: type, setting: str) -> Callable[[Any], Any]:
    """Return a `client_fn` that creates a client as an object of the user's class.

    The class gets the context if it needs one argument.
    client_class: a subclass of Flower's Client or NumPyClient.
    Raises `RefusedError` if the class needs two or more arguments.
    """
    from flwr.client import NumPyClient

    parameters = inspect.signature(client_class).parameters.values()
    required = [
        parameter
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    if len(required) > 1:
        raise RefusedError(
            f"{setting}: the constructor of this class needs {len(required)} arguments, but raysim "
            "passes at most one, the context. Give a function client_fn(context) that makes the "
            "client."
        )

    def client_fn(context: Any) -> Any:
        client = client_class(context) if required else client_class()
        return client.to_client() if issubclass(client_class, NumPyClient) else client

    return client_fn


def _is_registered(register: Callable[[], Callable[[Any], Any]]) -> bool:
    """Return True if a ClientApp has a handler for messages of one type.

    Otherwise register `_missing`, which raises an error for each such message.
    register: the app's method that returns the decorator for handlers, `app.train` or
    `app.evaluate`.
    """
    # Flower raises an error if an app has a function of this type already.
    try:
        register()(_missing)
    except ValueError:
        return True
    return False


def _missing(message: Any, context: Any) -> Any:
    kind = message.metadata.message_type
    raise ValueError(
        f"the ClientApp has no function for messages of the type '{kind}'. Register one with "
        "@app.train() or @app.evaluate()"
    )
