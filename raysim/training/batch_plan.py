"""Decide the batches of a job before its first step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from raysim.api.context import Context, Plan
from raysim.api.declarations import Local
from raysim.api.declare import Declarations
from raysim.api.setup import MethodDeclaration
from raysim.models.single_rows import refusing_layer
from raysim.primitives.streams import stream


def cut_batches(order: np.ndarray, batch: int, drop_single: bool) -> list[np.ndarray]:
    """Cut a sequence of samples into consecutive batches.

    order: the positions of the samples, in the order of training.
    batch: the size of a batch; the last batch may be smaller.
    drop_single: drop a last batch of one sample, unless it is the only batch.
    """
    batches = [order[start : start + batch] for start in range(0, len(order), batch)]
    if drop_single and len(batches) > 1 and len(batches[-1]) == 1:
        batches.pop()
    return batches


def make_plan(
    local: Local,
    samples: int,
    selected: Sequence[np.ndarray],
    generator: np.random.Generator,
    drop_single: bool,
) -> Plan:
    """Return the batches of a job, which are made of the selected samples.

    The selected samples are shuffled and cut into batches, or drawn with replacement
    (`local.sampling`).

    samples: the number of the client's training samples.
    selected: for each epoch, the ascending positions of the selected samples. With `local.steps`,
    intervals of about equally many steps take the place of epochs.
    drop_single: True drops a last batch of one sample, unless it is the only batch.
    """
    batches: list[np.ndarray] = []
    for part, positions in enumerate(selected):
        count = _batches_in_part(local, part, len(selected), len(positions))
        if local.sampling == "replacement":
            size = min(local.batch, len(positions))
            for _ in range(count):
                batches.append(positions[generator.integers(len(positions), size=size)])
            continue
        part_batches: list[np.ndarray] = []
        while len(part_batches) < count:
            order = generator.permutation(positions)
            part_batches += cut_batches(order, local.batch, drop_single)
            if local.epochs is not None:
                break  # a dropped batch of one sample is not replaced
        batches += part_batches[:count]
    return Plan(np.concatenate(batches), tuple(map(len, batches)), samples)


def _batches_in_part(local: Local, part: int, parts: int, positions: int) -> int:
    """Return the number of batches in one epoch of a job, or in one interval of its steps.

    With `local.steps`, a job's steps are divided into `parts` intervals, as equal as possible.
    part: the number of the epoch or interval, from 0.
    positions: the number of samples that are selected for it.
    """
    if local.epochs is not None:
        return -(-positions // local.batch)
    assert local.steps is not None, "a run has epochs or steps"
    return local.steps * (part + 1) // parts - local.steps * part // parts


def layer_needing_two_rows(declarations: Declarations) -> str:
    """Return the name of a layer that cannot train on a batch of one sample; "" if none.

    Also return "" if a method adds rows to each batch, so that no batch has a single row.
    """
    if any(declared.adds_rows for declared in declarations.methods):
        return ""
    return refusing_layer(declarations.networks["model"], declarations.task.example)


def usual_batch_sizes(counts: np.ndarray, batch: int) -> frozenset[int]:
    """Return the batch sizes for which steps are recorded if a worker has several lanes.

    One of them is `batch`. If the last batch has the same size for more than half of the clients,
    this size is another one.
    counts: the number of samples of each client.
    batch: the usual size of a batch.
    """
    rests = np.bincount(counts[counts > 0] % batch, minlength=1)
    most_frequent = int(rests.argmax())
    if most_frequent and 2 * rests[most_frequent] > rests.sum():
        return frozenset({batch, most_frequent})
    return frozenset({batch})


class BatchPlanner:
    """An object that decides the batches of jobs before training.

    selector: the method that selects samples; None takes all samples.
    drop_single: True drops a last batch of one sample if the epoch has further batches.
    needs_two_rows: True leaves out epochs of fewer than two selected samples.
    """

    def __init__(
        self,
        local: Local,
        seed: int,
        selector: MethodDeclaration | None,
        drop_single: bool,
        needs_two_rows: bool,
    ):
        self.local, self.seed, self.selector = local, seed, selector
        self.drop_single, self.needs_two_rows = drop_single, needs_two_rows

    def plan(self, ctx: Context) -> Plan:
        """Return the batches of a job; if no method selects samples, the job uses all of them.

        ctx: the context of the job.
        """
        if self.selector is not None:
            selected = self._select(self.selector, ctx)
            if selected:
                generator = stream(self.seed, "batches", ctx.client, ctx.participation)
                return make_plan(self.local, ctx.samples, selected, generator, self.drop_single)
        return self.plan_all(ctx.samples, ctx.client, ctx.participation)

    def plan_all(self, samples: int, client: int, participation: int) -> Plan:
        """Return the batches of a job that takes all samples in every epoch.

        samples: the number of the client's training samples.
        client, participation: decide the shuffled order; `participation` counts the client's
        earlier jobs.
        """
        selected = [np.arange(samples)] * (self.local.epochs or 1)
        generator = stream(self.seed, "batches", client, participation)
        return make_plan(self.local, samples, selected, generator, self.drop_single)

    def plan_finetuning(self, samples: int, epochs: int, client: int, version: int) -> Plan:
        """Return the batches with which a model is fine-tuned before it is scored.

        samples: the number of samples to train on.
        client, version: decide the shuffled order of the samples; `version` is the scored one.
        """
        local = replace(self.local, epochs=epochs, steps=None)
        selected = [np.arange(samples)] * epochs
        generator = stream(self.seed, "finetune", client, version)
        return make_plan(local, samples, selected, generator, self.drop_single)

    def _select(self, selector: MethodDeclaration, ctx: Context) -> list[np.ndarray]:
        """Return the samples that a method selects for each epoch of a job; [] means all samples.

        An entry has the ascending positions of an epoch's samples. With `local.steps`,
        `local.phases` intervals of steps take the place of epochs, but at most one for each step.
        With `needs_two_rows`, epochs of fewer than two samples are left out.

        Raises ValueError if all epochs are left out. Also raises it if the method selects samples
        for the first epoch, but returns None for a later one.
        """
        assert selector.select is not None, "only methods that select are asked"
        parts = self.local.epochs or min(self.local.phases, self.local.steps or 1)
        selected: list[np.ndarray] = []
        for part in range(1, parts + 1):
            positions = selector.select(ctx.view(selector.method), part, parts)
            if positions is None:
                break
            # Sorted, so that the shuffle does not depend on the order of the method's selection.
            selected.append(np.sort(positions))
        if 0 < len(selected) < parts:
            raise ValueError(
                f"method '{selector.method}' selects samples for {len(selected)} of {parts} "
                "epochs. Let `select` return positions in every epoch of a job, or None in every "
                "epoch."
            )
        if not self.needs_two_rows:
            return selected
        fitting = [positions for positions in selected if len(positions) > 1]
        if selected and not fitting:
            raise ValueError(
                f"method '{selector.method}' selects fewer than two samples for every epoch, but "
                "the model cannot train on one sample. Let `select` return at least two positions, "
                "or set model.norm=group."
            )
        return fitting
