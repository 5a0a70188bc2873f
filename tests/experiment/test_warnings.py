"""Test the warnings of methods about the schedule and about each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

import raysim
from raysim.api.method import Method
from raysim.experiment.build import build
from raysim.primitives.errors import RefusedError

DATA = [
    "runtime=inprocess",
    "tracking=none",
    "data=synthetic",
    "partition=iid",
    "partition.clients=6",
    "model=mlp",
]
ROUNDS = ["schedule=synchronous", "schedule.cohort=3"]
BUFFER = ["schedule=buffered", "schedule.size=3", "schedule.concurrency=4"]
ONE_BY_ONE = ["schedule=buffered", "schedule.size=1", "schedule.concurrency=3"]
ONE_CLIENT = ["schedule=synchronous", "schedule.cohort=1"]


def warnings(*overrides: str) -> tuple[str, ...]:
    return build([*DATA, *overrides]).warnings


@pytest.mark.parametrize("schedule", [ROUNDS, BUFFER, ONE_BY_ONE, ONE_CLIENT])
def test_fedasync_in_synchronous_rounds_gets_a_warning(
    schedule: Sequence[str],
) -> None:
    found = warnings("method=[fedasync]", *schedule)
    assert [text for text in found if "'fedasync'" in text] == list(found)
    assert len(found) == (schedule is ROUNDS)


@pytest.mark.parametrize("name", ["ca2fl", "ace"])
def test_scaffold_with_ca2fl_or_ace_gets_a_warning(name: str) -> None:
    (sentence,) = warnings(f"method=[{name},scaffold]", *BUFFER)
    assert "'scaffold'" in sentence and f"'{name}'" in sentence and "twice" in sentence
    assert warnings(f"method=[{name}]", *BUFFER) == ()


@pytest.mark.parametrize(
    ("name", "local"),
    [
        ("afl", ()),
        ("fedexp", ()),
        ("fedgh", ()),
        ("fedgh_hierarchical", ()),
        ("fedld_principal", ()),
        ("fednova", ()),
        ("geometric_median", ()),
        ("groupdro", ()),
        ("fedpac", ("local.epochs=2",)),
    ],
)
def test_methods_that_compare_updates_warn_if_each_aggregation_has_one_update(
    name: str, local: Sequence[str]
) -> None:
    for schedule in (ONE_BY_ONE, ONE_CLIENT):
        (sentence,) = warnings(f"method=[{name}]", *local, *schedule)
        assert sentence.startswith(f"method '{name}' compares the updates of an aggregation")
    assert warnings(f"method=[{name}]", *local, *BUFFER) == ()


@pytest.mark.parametrize(("normalization", "count"), [("count", 1), ("none", 1), ("weights", 0)])
def test_groupdro_gets_a_warning_if_fedbuff_does_not_normalize_by_weights(
    normalization: str, count: int
) -> None:
    for methods in ("[fedbuff,groupdro]", "[groupdro,fedbuff]"):
        found = warnings(
            f"method={methods}", f"method.fedbuff.normalization={normalization}", *BUFFER
        )
        assert len(found) == count
        assert all(
            "'groupdro'" in text and "method.fedbuff.normalization=weights" in text
            for text in found
        )
    assert warnings("method=[fedbuff]", *BUFFER) == ()


def test_setup_hook_receives_the_names_of_all_methods_and_how_updates_arrive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from raysim.methods.fedprox import FedProx

    seen: list[Any] = []
    monkeypatch.setattr(FedProx, "setup", lambda self, run: seen.append(run))
    for schedule in (ROUNDS, BUFFER, ONE_BY_ONE, ONE_CLIENT):
        warnings("method=[fedprox,mixup]", *schedule)
    settings = {(run.max_updates, run.has_stale_updates): [*run.methods] for run in seen}
    assert settings == {
        key: ["fedprox", "mixup"] for key in [(3, False), (3, True), (1, True), (1, False)]
    }


def test_client_state_with_the_name_of_a_model_tensor_is_refused() -> None:
    private = own("first", setup=lambda self, run: run.private_parameters(["model.head.bias"]))
    clash = own("model", setup=lambda self, run: run.client_state("head.bias", run.zeros))
    with pytest.raises(RefusedError, match=r"method 'model' keeps .* 'model\.head\.bias'"):
        build([*DATA, *ROUNDS], methods=[private, clash])


def test_median_of_two_updates_gets_a_warning() -> None:
    def of(cohort: int) -> tuple[str, ...]:
        return warnings(
            "method=[coordinate_median]", "schedule=synchronous", f"schedule.cohort={cohort}"
        )

    (sentence,) = of(2)
    assert "'coordinate_median'" in sentence
    assert of(3) == ()


def test_trimmed_mean_that_trims_nothing_gets_a_warning() -> None:
    trimmed = ["method=[trimmed_mean]", *ROUNDS]
    (sentence,) = warnings(*trimmed, "method.trimmed_mean.share=0.3")
    assert "method.trimmed_mean.share=0.3" in sentence
    assert warnings(*trimmed, "method.trimmed_mean.share=0.4") == ()


def test_krum_with_few_updates_gets_a_warning() -> None:
    def of(cohort: int) -> tuple[str, ...]:
        words = (
            "method=[krum]",
            "method.krum.byzantine=1",
            "schedule=synchronous",
            f"schedule.cohort={cohort}",
        )
        return warnings(*words)

    (sentence,) = of(4)
    assert "method.krum.byzantine=1" in sentence
    assert of(5) == ()


# --- hooks of a user's own methods ----------------------------------------------------------------
def own(name: str = "mine", **attributes: Any) -> Method:
    """Return an object of a new method class, as a user would write it.

    name: the name of the method.
    attributes: the class's hooks and other attributes, by name.
    """
    return cast(
        Method, type("Mine", (Method,), {"__module__": __name__, "name": name, **attributes})()
    )


@pytest.mark.parametrize(
    ("method", "sentence"),
    [
        (
            own(gradient=lambda self, job, grad: None),
            r"^method 'mine' has the hook gradient\(job, grad\), .* \(job, grad, at\)\. "
            r"Write def gradient\(self, job, grad, at\)\.$",
        ),
        (
            own(end=lambda self, job, more: None),
            r"'mine' has the hook end\(job, more\), .* \(job\)\. Write",
        ),
        (
            own(begin=lambda self, *, job: None),
            r"'mine' has the hook begin\(job\), .* Write def begin\(self, job\)",
        ),
        (own(loss=0.5), "method 'mine' sets loss=0.5"),
        (
            own(finish=lambda self, ctx: None),
            "method 'mine': .* no hook 'finish' .* 'end'",
        ),
    ],
)
def test_hook_with_wrong_arguments_is_refused(method: Method, sentence: str) -> None:
    with pytest.raises(RefusedError, match=sentence):
        build([*DATA, *ROUNDS], methods=[method])


def test_hook_may_have_optional_arguments() -> None:
    fine = own(gradient=lambda self, job, grad, at, scale=2.0: None, end=lambda *given: None)
    assert not [
        text for text in build([*DATA, *ROUNDS], methods=[fine]).warnings if "'mine'" in text
    ]


@pytest.mark.parametrize(("step", "sentences"), [(1, 0), (2, 0), (10, 1)])
def test_classes_without_samples_get_a_warning(step: int, sentences: int) -> None:
    data = (np.zeros((80, 3), np.float32), np.arange(80) % 4 * step)
    found = [
        text
        for text in build([*DATA[:2], *DATA[3:], *ROUNDS], data=data).warnings
        if "have no sample" in text
    ]
    assert len(found) == sentences
    assert not found or found[0].startswith(
        "27 of 31 classes have no sample, and each is an output of the model"
    )


@pytest.mark.parametrize(
    ("shape", "dtype", "sentences"),
    [
        ((16, 8, 3), np.float32, 1),
        ((16, 8, 4), np.uint8, 1),
        ((16, 8, 3), np.uint8, 0),  # is turned
        ((3, 8, 3), np.float32, 0),
        ((16, 8, 8), np.float32, 0),
        ((16, 3), np.float32, 0),
        ((16, 8, 3), np.int64, 0),  # tokens
    ],
)
def test_images_with_channels_last_get_a_warning(
    shape: Sequence[int], dtype: type, sentences: int
) -> None:
    data = (np.ones((80, *shape), dtype), np.arange(80) % 4)
    model = type(
        "Flat", (torch.nn.Flatten,), {"forward": lambda self, x: x.flatten(1)[:, :4] * 1.0}
    )()
    found = [
        text
        for text in build([*DATA[:2], *DATA[3:-1], *ROUNDS], data=data, model=model).warnings
        if "are read" in text
    ]
    assert len(found) == sentences
    assert not found or found[0].startswith(
        f"inputs of shape {list(shape)} are read as 16 channels of 8 x {shape[2]}"
    )


def test_run_without_scores_gets_a_warning() -> None:
    def of(*words: str, test: bool = False) -> list[str]:
        half = (np.zeros((40, 3), np.float32), np.arange(40) % 4)
        words = (*DATA[:2], "partition=iid", "model=mlp", *ROUNDS, *words)
        found = build(words, data=(half, half) if test else half).warnings
        return [text for text in found if "will be scored" in text]

    (sentence,) = of("partition.clients=10")
    assert "nothing will be scored: none of 10 clients (of at most 4 training" in sentence
    assert "partition.test_fraction" in sentence
    assert (
        of("partition.clients=8") == of("partition.clients=10", "partition.test_fraction=0.3") == []
    )
    assert of("partition.clients=10", test=True) == []
    (sentence,) = of("partition.clients=10", "partition.validation_fraction=0.3")
    assert sentence.startswith("only validation samples will be scored: none of 10 clients")


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["rounds=3", "local.warmup_rounds=3"], "local.warmup_rounds=3"),
        (["local.steps=2", "local.warmup_steps=4"], "local.warmup_steps=4"),
    ],
    ids=["rounds", "steps"],
)
def test_warmup_longer_than_the_run_gets_a_warning(words: list[str], key: str) -> None:
    warnings = build([*DATA, *ROUNDS, *words]).warnings
    assert [text for text in warnings if text.startswith(f"{key}:")]
    shorter = [word.replace("warmup_rounds=3", "warmup_rounds=2") for word in words]
    shorter = [word.replace("warmup_steps=4", "warmup_steps=1") for word in shorter]
    assert not [text for text in build([*DATA, *ROUNDS, *shorter]).warnings if "warmup" in text]


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        (["local.drop_every=2", "local.final_lr=0.01"], ["local.drop_every=2", "local.final_lr="]),
        (["local.drop_every=2", "local.schedule=step"], []),
        (["local.final_lr=0.01", "local.schedule=cosine"], []),
    ],
    ids=["constant", "step", "cosine"],
)
def test_settings_of_another_learning_rate_schedule_get_a_warning(
    words: list[str], keys: list[str]
) -> None:
    warnings = build([*DATA, *ROUNDS, *words]).warnings
    found = [text for text in warnings if "has no effect with local.schedule=constant" in text]
    assert len(found) == len(keys)
    assert all(text.startswith(key) for text, key in zip(found, keys, strict=True))


def test_misspelt_hook_gets_a_warning() -> None:
    def end(self: Any, job: Any) -> None:
        self.gradients(job)

    def prepare(self: Any, job: Any) -> None:
        job.once("losses", lambda: [self.losses(job) for _ in range(2)])

    helped = own("helped", end=end, gradients=lambda self, job: None, _losses=lambda self: None)
    nested = own("nested", prepare=prepare, losses=lambda self, job: None)
    misspelt = own("misspelt", gradiant=lambda self, job, grad, at: None, norm=lambda self: 0.0)
    found = [
        text
        for text in build(
            [*DATA, *ROUNDS], methods=[helped, nested, misspelt, own("empty")]
        ).warnings
        if "method '" in text
    ]
    assert found == [
        "method 'misspelt' has a function 'gradiant' that nothing calls: "
        "is the hook 'gradient' meant?",
        "method 'misspelt' overrides no hook and does nothing. See help(raysim.Method).",
        "method 'empty' overrides no hook and does nothing. See help(raysim.Method).",
    ]
    assert not [
        text
        for text in build([*DATA, *ROUNDS], methods=[own(weighting="uniform")]).warnings
        if "does nothing" in text
    ]


@pytest.mark.parametrize("ends_in_softmax", [True, False])
def test_network_that_ends_in_a_softmax_gets_a_warning(ends_in_softmax: bool) -> None:
    layers: list[nn.Module] = [nn.Flatten(), nn.Linear(64, 10)]
    if ends_in_softmax:
        layers.append(nn.Softmax(dim=1))
    experiment = raysim.build(
        "data=digits rounds=1 runtime=inprocess", model=nn.Sequential(*layers)
    )
    assert any("softmax" in warning for warning in experiment.warnings) == ends_in_softmax
