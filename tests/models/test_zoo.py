"""Test classifiers of Hugging Face, from a configuration or a folder, and a run with adapters."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from raysim.experiment.execute import run
from raysim.experiment.model_warnings import weight_warnings
from raysim.models import HuggingFaceModel, Lora
from raysim.models.lora import find_adapters
from raysim.primitives.kinds import Tokens

TINY = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
pytestmark = pytest.mark.skipif(
    find_spec("transformers") is None, reason="transformers are not installed"
)


def test_hugging_face_model_has_an_embedding_for_each_token_and_ignores_padding() -> None:
    model = HuggingFaceModel("bert", options=TINY).build((5,), 3, 0, Tokens(7))
    assert model.is_split and model.feature_dim == 8
    assert model.get_parameter("extractor.net.bert.embeddings.word_embeddings.weight").shape == (
        7,
        8,
    )
    padded, short = torch.tensor([[3, 4, 0, 0, 0]]), torch.tensor([[3, 4]])
    model.eval()
    assert torch.allclose(model(padded), model(short), atol=1e-6)  # padding is not looked at


def test_hugging_face_weights_are_read_from_folder(tmp_path: Path) -> None:
    first = HuggingFaceModel("bert", options=TINY).build((5,), 3, 0, Tokens(7))
    first.get_submodule("extractor.net").save_pretrained(tmp_path)  # type: ignore[operator]
    again = HuggingFaceModel(str(tmp_path), pretrained=True).build((5,), 2, 1, Tokens(7))
    name = "extractor.net.bert.embeddings.word_embeddings.weight"
    assert (
        torch.equal(again.get_parameter(name), first.get_parameter(name)) and again.num_classes == 2
    )
    with pytest.raises(ValueError, match=r"model\.name=.* 7 tokens.* 9"):
        HuggingFaceModel(str(tmp_path), pretrained=True).build((5,), 2, 1, Tokens(9))
    with pytest.raises(ValueError, match=r"model\.name=/nowhere"):
        HuggingFaceModel("/nowhere", pretrained=True).build((5,), 2, 1, Tokens(7))


def test_hugging_face_image_classifier_trains() -> None:
    options: dict[str, Any] = {**TINY, "image_size": 8, "patch_size": 4, "num_channels": 1}
    model = HuggingFaceModel("vit", options=options).build((1, 8, 8), 3, 0)
    assert model(torch.randn(2, 1, 8, 8)).shape == (2, 3) and model.is_split


def test_run_trains_adapters_of_hugging_face_model(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    overrides = [
        "data=markov",
        "data.users=3",
        "data.samples=12",
        "data.label=chain",
        "partition=natural",
    ]
    overrides += ["partition.clients=3", "schedule.cohort=2"]
    overrides += ["runtime=inprocess", "tracking=none", "rounds=1", "local.lr=0.01"]
    overrides += [
        "model=huggingface",
        "model.name=bert",
        "model.lora.rank=2",
        "model.lora.layers=[query,value]",
    ]
    overrides += [
        f"model.options={{{','.join(f'{key}: {value}' for key, value in TINY.items())}}}",
        f"out={tmp_path}/run",
    ]
    result = run(overrides, quiet=True)
    # four matrices of rank 2 for 8 features, and the head of 4 classes, down to two clients
    assert result.summary["floats_down"] == 2 * (4 * 2 * 8 + 8 * 4 + 4)
    assert result.summary["accuracy_global"] is not None


GPT2 = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16}


def test_hugging_face_causal_model_sees_no_later_token(tmp_path: Path) -> None:
    recipe = HuggingFaceModel("gpt2", options=GPT2, task="causal")
    model = recipe.build((5,), 7, 0, Tokens(7, padding=6)).eval()
    tokens = torch.tensor([[3, 6, 1, 2, 6]])
    outputs = model(tokens)
    assert outputs.shape == (1, 7, 5)
    changed = model(torch.tensor([[3, 6, 1, 4, 4]]))
    assert torch.allclose(changed[:, :, :3], outputs[:, :, :3], atol=1e-6)
    assert not torch.allclose(changed[:, :, 3], outputs[:, :, 3])
    model.get_submodule("net.net").save_pretrained(tmp_path)  # type: ignore[operator]
    again = HuggingFaceModel(str(tmp_path), pretrained=True, task="causal")
    fewer = again.build((5,), 6, 1, Tokens(6)).eval()  # the data has fewer tokens
    assert torch.allclose(fewer(tokens.clamp(max=5)), model(tokens.clamp(max=5))[:, :6], atol=1e-6)


def test_output_layer_of_hugging_face_models_gets_no_adapter() -> None:
    pytest.importorskip("peft")
    recipe = HuggingFaceModel("gpt2", options=GPT2, task="causal", lora=Lora(rank=2))
    layers = [adapter.layer for adapter in find_adapters(recipe.build((5,), 7, 0, Tokens(7)))]
    assert len(layers) == 4 and not any("lm_head" in layer for layer in layers)


def test_hugging_face_causal_model_refuses_unknown_tasks_and_image_data() -> None:
    with pytest.raises(ValueError, match=r"model\.task='write'"):
        HuggingFaceModel("gpt2", task="write")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"model\.task=causal"):
        HuggingFaceModel("gpt2", options=GPT2, task="causal").build((1, 8, 8), 3, 0)


def test_hugging_face_option_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    misspelled = {**GPT2, "n_emb": 8}
    with pytest.raises(ValueError, match=r"model\.options\.n_emb .*n_embd"):
        HuggingFaceModel("gpt2", options=misspelled, task="causal").build((5,), 7, 0, Tokens(7))
    model = HuggingFaceModel("bert", options=TINY).build((5,), 3, 0, Tokens(7))
    model.get_submodule("extractor.net").save_pretrained(tmp_path)  # type: ignore[operator]
    with pytest.raises(ValueError, match=r"model\.options\.hiden_size .*hidden_size"):
        recipe = HuggingFaceModel(str(tmp_path), options={"hiden_size": 8})
        recipe.build((5,), 3, 0, Tokens(7))


def test_pretrained_weights_of_other_shapes_are_refused(tmp_path: Path) -> None:
    model = HuggingFaceModel("gpt2", options=GPT2, task="causal").build((5,), 7, 0, Tokens(7))
    model.get_submodule("net.net").save_pretrained(tmp_path)  # type: ignore[operator]
    wide = HuggingFaceModel(str(tmp_path), True, {"n_embd": 16}, "causal")
    with pytest.raises(
        ValueError, match=r"model\.pretrained=true: .*model\.options .*c_attn\.bias"
    ):
        wide.build((5,), 7, 0, Tokens(7))


class Records(logging.Handler):
    """A handler that stores the log messages of the library transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@pytest.fixture
def messages() -> Iterator[list[str]]:
    """Return the list of the messages that transformers logs."""
    handler = Records()
    logging.getLogger("transformers").addHandler(handler)
    yield handler.messages
    logging.getLogger("transformers").removeHandler(handler)


def test_warning_lists_weights_that_the_pretrained_model_lacks(
    tmp_path: Path, messages: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    model = HuggingFaceModel("gpt2", options=GPT2, task="causal").build((5,), 7, 0, Tokens(7))
    model.get_submodule("net.net").save_pretrained(tmp_path)  # type: ignore[operator]
    messages.clear()
    capfd.readouterr()
    whole = HuggingFaceModel(str(tmp_path), True, {}, "causal").build((5,), 7, 0, Tokens(7))
    assert weight_warnings(whole) == []
    deep = HuggingFaceModel(str(tmp_path), True, {"n_layer": 2}, "causal")
    (warning,) = weight_warnings(deep.build((5,), 7, 0, Tokens(7)))
    assert "model.pretrained=true: 12 weights" in warning and "h.1.attn.c_attn.bias" in warning
    assert messages == [] and capfd.readouterr().err == ""  # transformers reports nothing itself
    classifier = HuggingFaceModel(str(tmp_path), True).build((5,), 3, 0, Tokens(7, padding=6))
    assert weight_warnings(classifier) == []  # only the head is new


def test_input_longer_than_the_position_embeddings_is_refused() -> None:
    with pytest.raises(ValueError, match=r"at most 16 tokens.* 20.*data\.length"):
        HuggingFaceModel("gpt2", options=GPT2, task="causal").build((20,), 7, 0, Tokens(7))


def test_model_with_non_persistent_buffers_trains_and_generates_text(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    options = "hidden_size:8,intermediate_size:16,num_hidden_layers:1,num_attention_heads:2"
    overrides = ["data=markov", "data.users=2", "data.samples=8", "data.kind=causal"]
    overrides += ["partition=natural", "schedule.cohort=2", "runtime=inprocess", "tracking=none"]
    overrides += ["rounds=1", "model=huggingface", "model.name=llama", "model.task=causal"]
    overrides += [f"model.options={{{options},num_key_value_heads:2}}", "model.lora.rank=2"]
    overrides += ["evaluate.generate.tokens=3", f"out={tmp_path}/run"]
    result = run(overrides, quiet=True)
    adapted = 4 * 2 * (8 + 8) + 3 * 2 * (8 + 16)  # attention and the MLP, rank 2
    assert result.summary["floats_up"] == 2 * adapted  # without the angles of positions
    assert (tmp_path / "run" / "samples.txt").read_text()
