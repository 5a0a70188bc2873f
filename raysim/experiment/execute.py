"""Execute a run from its start to its last round, store it in a folder, and load such folders."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raysim.api.compression import Compressor
from raysim.api.losses import RowLoss
from raysim.api.method import Method
from raysim.api.selection import Selection
from raysim.api.topology import Topology
from raysim.data.partition import Partitioner
from raysim.experiment.build import Config, Values, build
from raysim.experiment.config_files import load_yaml
from raysim.experiment.describe import overview
from raysim.experiment.failures import explain_errors
from raysim.experiment.many_runs import new_folder
from raysim.experiment.recorder import OnRound, load_finished, record, say, warn, wrap_observers
from raysim.experiment.remote_folder import checkpoints_at, local_copy
from raysim.experiment.result import Result
from raysim.experiment.run_folder import (
    CONFIG,
    Place,
    begin_folder,
    choose_place,
    last_checkpoint,
    restart_place,
    separate_checkpoint_folders,
)
from raysim.experiment.runtime_events import runtime_events
from raysim.experiment.settings import Experiment
from raysim.primitives.errors import RefusedError, errors_as_refusals
from raysim.primitives.files import (
    abandoned_drafts,
    lock_folder,
    make_folder,
    user_path,
    without_password,
)
from raysim.primitives.output import lossy_output
from raysim.primitives.stacks import stacks_on_signal
from raysim.primitives.stores import is_url, temporary_copy
from raysim.results.observers import Observer
from raysim.results.progress import waiting_line
from raysim.results.stored_runs import is_result_file, load_run
from raysim.simulation.events import ProcessLostError, RunStoppedError
from raysim.simulation.fleet import Fleet
from raysim.simulation.schedule import Schedule

if TYPE_CHECKING:
    from rich.console import Console

# A run fails if it loses a process so many times in a row without a new checkpoint.
MAX_LOSSES = 3


def run(
    config: Config | Experiment = (),
    *,
    methods: Sequence[Method | str] | None = None,
    model: object = None,
    data: object = None,
    partition: Partitioner | Values | Sequence[object] | str | None = None,
    schedule: Schedule | Values | str | None = None,
    selection: Selection | Values | str | None = None,
    fleet: Fleet | Values | str | None = None,
    topology: Topology | Values | str | None = None,
    loss: RowLoss | Values | str | None = None,
    learner: Method | Values | str | None = None,
    compression: Compressor | Values | str | None = None,
    metrics: Sequence[object] | None = None,
    on_round: OnRound | None = None,
    observers: Sequence[Observer] = (),
    quiet: bool = False,
    allow: Sequence[str] = (),
    console: Console | None = None,
    **settings: object,
) -> Result:
    """Execute a run until its last round and return the result.

        raysim.run("method=fedprox", rounds=20, runtime="inprocess")
        raysim.run(
            methods=[FedProx(mu=0.1)],
            data=((x, y), (x_test, y_test)),
            rounds=20,
            local={"lr": 0.05},
        )

    config: overrides as on the command line, in one text or a list; or the result of `compose` or
    `build`.
    settings: overrides by key (`rounds=20`). A configuration group takes the name of an option
    (`runtime="inprocess"`) or a dictionary of values (`local={"lr": 0.05}`).

    methods: a list of methods, each as an object or as the name of an option.
    model, data, partition, schedule, selection, fleet, topology, loss, learner, compression: an
    object, the name of an option or, except for `data`, a dictionary of values by key.
    `data` may also be a torch Dataset, a table of pandas, polars, Arrow or Hugging Face, or arrays
    or tensors (inputs, labels) or (inputs, labels, users). For a central test set, give a
    dictionary with "train" and "test", both in the same form. Except for tables, a pair (training
    samples, central test samples) is enough.
    `partition` may also be the rows of each client, in a list of lists or a dictionary.
    `loss` may also be a function of outputs and labels that returns a loss for each sample.
    metrics: names, functions of outputs and labels, and objects `raysim.Metric`. The first metric
    chooses the best round on validation samples and the best trial of a sweep, unless
    `evaluate.metric` names another metric.

    config.yaml stores an object if its class can be imported and its arguments are plain values. To
    continue or repeat the run, pass all other objects again.

    on_round: function that gets the row of each finished round (a dictionary: `row["round"]`, ...).
    observers: your own objects, which are called at the events of a run. The configuration's
    observers, and the observers that write the run's files, are called first.
    quiet: True prints only warnings, to standard error. A `console` that you pass still gets the
    plan of the run, the warnings and the last lines, unless the console itself is quiet.
    allow: packages besides raysim whose classes and options the configuration may use.

    `on_round` and `observers` are not stored. They are not called if the run had finished before
    this call.

    Raise `RefusedError` if the run cannot start; no result is written then.
    Raise `TooManyFailuresError` if too many jobs of an aggregation fail; a checkpoint is written
    then.
    Raise `ObserverError` if one of your observers fails.
    Raise `RunStoppedError` if a method fails, a file cannot be written, or too many processes are
    lost.
    Raise `Interrupted` if the user stops the run.
    """
    from rich.console import Console

    console = console or Console(quiet=quiet)
    parts = {
        "methods": methods,
        "model": model,
        "data": data,
        "partition": partition,
        "schedule": schedule,
        "selection": selection,
        "fleet": fleet,
        "topology": topology,
        "loss": loss,
        "learner": learner,
        "compression": compression,
        "metrics": metrics,
    }
    given_parts = {key: part for key, part in parts.items() if part is not None}
    experiment = _build_once(config, given_parts | settings, allow)
    with ExitStack() as stack:
        stack.enter_context(lossy_output(sys.stdout, sys.stderr, console.file))
        experiment, senders = stack.enter_context(local_copy(experiment, console))
        all_observers = [*experiment.observers, *observers, *senders]
        user_observers = wrap_observers(on_round, all_observers)
        with errors_as_refusals():
            place = choose_place(experiment)
            if not place.exists:
                is_dated = not experiment.execution.out
                folder = stack.enter_context(new_folder(place.folder, dated=is_dated))
                place = replace(place, folder=folder)
            elif not place.is_finished:
                stack.enter_context(lock_folder(place.folder))
        return _run_with_restarts(experiment, place, console, quiet, user_observers)


def load(folder: str | Path, *, allow: Sequence[str] = (), **parts: Any) -> Result:
    """Return the result of the run in a folder; the run need not have finished.

    folder: the run's folder or its URL. Files at a URL, except checkpoints, are copied to a
    temporary folder, which is removed when this process ends.
    allow: packages besides raysim whose classes and options the configuration may use.
    parts: objects that config.yaml could not store, as passed to `raysim.run`, such as `model=...`.
    Raise `RefusedError` if there is no run in the folder.
    """
    with errors_as_refusals():
        url = str(folder) if is_url(folder) else ""
        path = temporary_copy(url, is_result_file) if url else user_path(folder)
        stored = load_run(path, url)
        config = load_yaml(stored.folder / CONFIG)
        config |= {"device": "cpu", "out": str(folder), "resume": None}
        if url and not config["checkpoint"]["folder"]:
            config["checkpoint"]["folder"] = checkpoints_at(url)
        build_again = functools.partial(build, config, allow, **parts)
        return Result(stored.folder, stored.summary, stored.rows, build_again, url)


def _build_once(
    config: Config | Experiment, parts: Mapping[str, Any], allow: Sequence[str]
) -> Experiment:
    if not isinstance(config, Experiment):
        return build(config, allow, **parts)
    if parts:
        raise RefusedError(
            f"{next(iter(parts))}=... has no effect here, because raysim.build already made this "
            "run. Pass it to raysim.build."
        )
    return config


def _run_with_restarts(
    experiment: Experiment,
    place: Place,
    console: Console,
    quiet: bool,
    user_observers: Sequence[Observer],
) -> Result:
    """Execute a run; if a process is lost, restart from the last checkpoint.

    Without a checkpoint, the run restarts where it began. Raise `ProcessLostError` after
    `MAX_LOSSES` losses in a row without a new checkpoint.
    place: the run's folder, and the checkpoint at which the run began, if any.
    quiet: True prints only warnings and errors.
    """
    options = experiment.spec.settings.checkpoint
    first_place = place
    losses_left = MAX_LOSSES
    address = without_password(experiment.url) or str(place.folder)
    while True:
        checkpoint = last_checkpoint(place.folder, options)
        try:
            return _run_once(experiment, place, console, quiet, user_observers)
        except ProcessLostError as error:
            new_checkpoint = last_checkpoint(place.folder, options)
            losses_left = MAX_LOSSES if new_checkpoint != checkpoint else losses_left - 1
            has_begun = (place.folder / CONFIG).is_file()
            if losses_left == 0 or not has_begun:
                raise ProcessLostError(_with_advice(error, address)) from error
            reason = str(error).rstrip(".")
            start = "round 0: it has no checkpoint"
            if new_checkpoint:
                start = "its last checkpoint"
            elif first_place.resume:
                start = without_password(first_place.resume)
            say(console, f"{reason}. The run restarts from {start}")
        except RefusedError as error:
            if not place.is_restart:
                raise
            raise RunStoppedError(_with_advice(error, address)) from error
        with errors_as_refusals():
            place = restart_place(experiment, first_place)


def _with_advice(error: Exception, address: str) -> str:
    """Return the text of an error, with the advice to continue the run.

    address: the run's folder or URL.
    """
    return (
        f"{str(error).rstrip('.')}. Continue the run with the same settings, out={address} and "
        "resume=latest."
    )


def _run_once(
    experiment: Experiment,
    place: Place,
    console: Console,
    quiet: bool,
    user_observers: Sequence[Observer],
) -> Result:
    """Execute a run. Raise ProcessLostError if a process is lost.

    place: the run's folder, and the checkpoint from which the run continues, if it has one.
    quiet: True prints only warnings and errors.
    user_observers: the user's observers.
    """
    if place.is_finished:
        say(console, place.note)
        return load_finished(experiment, place.folder, console)
    with ExitStack() as stack:
        stack.enter_context(explain_errors(place.folder))
        with errors_as_refusals():
            description = overview(experiment, place.folder)
        say(console, description)
        say(console, place.note)
        for warning in experiment.warnings:
            warn(console, warning)
        for draft in abandoned_drafts(place.folder):
            draft.unlink()
        with waiting_line(console) as show_wait, errors_as_refusals():
            events = runtime_events(experiment, place, console, show_wait)
            stack.enter_context(closing(events))
            first_event = next(events)  # this shows that the workers fit on the machine
            checkpoint = experiment.spec.settings.checkpoint
            for folder in separate_checkpoint_folders(checkpoint, place.folder):
                stack.enter_context(lock_folder(make_folder(folder)))
            begin_folder(experiment, place)
        stack.enter_context(stacks_on_signal(place.folder, "driver"))
        all_events = chain([first_event], events)
        return record(experiment, place.folder, all_events, console, quiet, user_observers)
