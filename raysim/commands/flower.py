"""Implement `raysim flower run`: run a Flower app whose messages take virtual time."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from raysim.experiment.compose import compose
from raysim.experiment.config_files import Node, to_dict
from raysim.experiment.overrides import read_override
from raysim.experiment.parts import build_part, build_settings, choose_device
from raysim.experiment.run_overrides import expand_override
from raysim.flower.project import Project, flatten, load_object, read_project
from raysim.primitives.errors import RefusedError, errors_as_refusals, suggest
from raysim.primitives.extras import import_optional
from raysim.primitives.files import user_path
from raysim.primitives.output import terminal_width
from raysim.results.tables import format_table, text_columns

OWN_KEYS = ("clients", "samples")
RUN_KEYS = ("seed", "fleet", "runtime", "device", "out", "resume")
DEFAULT_CLIENTS, DEFAULT_SAMPLES = 10, 100
_SETTING = re.compile(r"""([^\s=]+)\s*=\s*("[^"]*"|'[^']*'|\S+)""")


@dataclass(frozen=True)
class FlowerRequest:
    """The parsed arguments of `raysim flower run`.

    config: raysim's configuration, for example of the fleet.
    seeds: the app is run once for each seed.
    clients: None takes the number in the Flower project, or 10.
    samples: the number of samples of each client, which decides the virtual time of training.
    run_config: values that replace the app's defaults.
    """

    project: Project
    config: Node
    seeds: tuple[int, ...]
    clients: int | None
    samples: int
    run_config: dict[str, Any]


def read_request(words: Sequence[str], run_configs: Sequence[str]) -> FlowerRequest:
    """Parse the command line of `raysim flower run`.

    words: overrides and the folder of the app. Without a folder, the app is in the current folder.
    run_configs: the values of --run-config, such as "lr=0.1" or the path of a TOML file.
    Raise `RefusedError` for wrong keys and values, and for several folders.
    """
    folders = [word for word in words if "=" not in word]
    if len(folders) > 1:
        raise RefusedError(
            f"flower run: it runs the app of one folder, but these are given: "
            f"{', '.join(folders)}. Keep one of them."
        )
    project = read_project(user_path(folders[0]) if folders else ".")
    counts: dict[str, int | None] = {"clients": None, "samples": DEFAULT_SAMPLES}
    seeds = ["seed=0"]
    overrides = []
    for word in words:
        if "=" not in word:
            continue
        key = word.partition("=")[0]
        root = key.partition(".")[0]
        if key in OWN_KEYS:
            counts[key] = _read_count(word, least=1 if key == "clients" else 0)
        elif key == "seed":
            _, seeds = expand_override(word)
        elif root in RUN_KEYS:
            overrides.append(word)
        else:
            valid = suggest(root, (*OWN_KEYS, *RUN_KEYS), "raysim flower run has")
            raise RefusedError(
                f"{key} is not a key of raysim flower run. {valid}. Write settings of the app's "
                f"own run config as --run-config '{word}'."
            )
    configs = [to_dict(compose([*overrides, seed])) for seed in seeds]
    changed: dict[str, Any] = {}
    for text in run_configs:
        changed.update(_read_run_config(text))
    samples = counts["samples"]
    assert samples is not None, "it has a default"
    numbers = tuple(int(config["seed"]) for config in configs)
    return FlowerRequest(project, configs[0], numbers, counts["clients"], samples, changed)


def _read_count(word: str, least: int) -> int:
    override = read_override(word)
    is_number = isinstance(override.value, int) and not isinstance(override.value, bool)
    if not is_number or override.value < least:
        raise RefusedError(
            f"{word} is not a whole number of at least {least}. Write {override.key}=NUMBER."
        )
    return int(override.value)


def _read_run_config(text: str) -> dict[str, Any]:
    """Return the settings in one value of the flag --run-config, by key.

    text: settings such as "key=value model.width='8'", or the path of a TOML file.
    """
    if text.endswith(".toml"):
        file = user_path(text)
        if not file.is_file():
            raise RefusedError(f"--run-config {text}: there is no such file. Correct its path.")
        lines = file.read_text(encoding="utf-8")
    else:
        settings = _SETTING.findall(text)
        rest = _SETTING.sub("", text).strip()
        if rest or not settings:
            raise RefusedError(
                f"--run-config '{text}': cannot be read as key=value. Separate settings by spaces."
            )
        lines = "\n".join(f"{key} = {value}" for key, value in settings)
    try:
        return flatten(tomllib.loads(lines), "--run-config")
    except tomllib.TOMLDecodeError as error:
        raise RefusedError(
            f"--run-config '{text}' is not valid TOML ({error}). Texts need quotes, as in "
            "--run-config \"name='value'\"."
        ) from error


def run_flower(words: Sequence[str], run_configs: Sequence[str]) -> int:
    """Run a Flower app once for each seed, print a table of its metrics, and return 0.

    words: overrides and the folder of the app.
    run_configs: the values of --run-config.
    Raise `RefusedError` for an impossible setting, and for an app without a ClientApp or ServerApp.
    """
    request = read_request(words, run_configs)
    with errors_as_refusals():
        import_optional("flwr", "raysim flower run")
    from raysim.flower.session import AppRun, run_app, warn_on_stderr

    project, config = request.project, request.config
    for name, reference in (("clientapp", project.client_app), ("serverapp", project.server_app)):
        if not reference:
            raise RefusedError(
                f"{project.file} does not name a {name}. Add the key {name} to "
                "[tool.flwr.app.components], or go to the folder of a Flower app."
            )
    with errors_as_refusals():
        _, execution = build_settings(config)
        run = AppRun(
            client_app=project.client_app,
            server_app=_load_server_app(project),
            folder=project.folder,
            clients=request.clients or project.clients or DEFAULT_CLIENTS,
            run_config=project.run_config(request.run_config, "--run-config"),
            seed=request.seeds[0],
            samples=request.samples,
            fleet=build_part(config, "fleet", (), {}),
            runtime=execution.runtime,
            device=choose_device(execution.device, execution.runtime.name == "cluster"),
            out=user_path(execution.out) if execution.out else None,
            resumes=execution.resume is not None,
        )
    results = []
    for seed in request.seeds:
        out = run.out
        if out is not None and len(request.seeds) > 1:
            out = out / f"seed-{seed}"
        with errors_as_refusals():
            results.append(run_app(replace(run, seed=seed, out=out), warn_on_stderr))
    if len(results) == 1:
        print(_rounds_table(results[0].rounds))
        print(_summary_text(results[0].summary, run.out))
        return 0
    print(_seeds_table([result.summary for result in results]))
    if run.out is not None:
        print(f"results are in {run.out}, in a folder for each seed")
    return 0


def _load_server_app(project: Project) -> Any:
    from flwr.serverapp import ServerApp

    server_app = load_object(project.server_app, project.folder, "serverapp")
    if not isinstance(server_app, ServerApp):
        raise RefusedError(
            f"serverapp={project.server_app} is a {type(server_app).__name__}. Give a ServerApp."
        )
    return server_app


def _rounds_table(rounds: Any) -> str:
    """Return the table of an app's rounds as text, or a sentence if no messages were sent.

    rounds: `AppResult.rounds`. It has a row for each group of messages of one type that were sent
    at the same virtual time.
    """
    if not len(rounds):
        return "the ServerApp sent no messages"
    head = [str(name) for name in rounds.columns]
    body = [[_format(value) for value in row] for row in rounds.itertuples(index=False, name=None)]
    return format_table(text_columns(head, body), terminal_width())


def _format(value: Any) -> str:
    if isinstance(value, float):
        return "" if np.isnan(value) else f"{value:.5g}"
    return str(value)


def _summary_text(summary: Mapping[str, Any], out: Path | None) -> str:
    text = (
        f"{summary['messages']} messages, {summary['failed']} failed and {summary['lost']} lost, "
        f"in {summary['virtual_seconds']:.5g} s of virtual time"
    )
    return text if out is None else f"{text}; results are in {out}"


def _seeds_table(summaries: Sequence[Mapping[str, Any]]) -> str:
    """Return a text table: a row of scores per seed, then their means and standard deviations."""
    names = [
        name
        for name, value in summaries[0].items()
        if name.startswith(("train.", "evaluate.", "server.")) and isinstance(value, float)
    ]
    names.append("virtual_seconds")
    values = np.array([[summary.get(name, np.nan) for name in names] for summary in summaries])
    rows = [
        [str(summary["seed"]), *map(_format, row.tolist())]
        for summary, row in zip(summaries, values, strict=True)
    ]
    rows.append(["mean", *map(_format, values.mean(axis=0).tolist())])
    rows.append(["deviation", *map(_format, values.std(axis=0, ddof=1).tolist())])
    return format_table(text_columns(["seed", *names], rows), terminal_width())
