"""Test language data: packing, vocabularies, scores of tokens, and runs with a small GPT."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import quick_runs
import tiny_runs
import torch
from torch.nn.functional import cross_entropy

import raysim
from raysim.api.declarations import Generation, Local
from raysim.api.objectives import OBJECTIVES, mean_loss
from raysim.data.causal import (
    Document,
    Vocabulary,
    byte_vocabulary,
    character_vocabulary,
    cut_document,
    number_vocabulary,
    pack,
    stored_vocabulary,
)
from raysim.data.columns import read_sequences
from raysim.data.corpus import PythonTopics, Text
from raysim.data.federated import federate
from raysim.data.frames import store_table
from raysim.data.huggingface import HuggingFace
from raysim.data.parquet import Parquet
from raysim.data.partition import Natural
from raysim.data.raw import NO_ORIGIN, Raw
from raysim.data.tables import JsonLines
from raysim.data.text import Leaf, Markov
from raysim.methods.delayed_nesterov import DelayedNesterov
from raysim.methods.fedopt import FedAvgM
from raysim.models import Gpt
from raysim.primitives.errors import RefusedError
from raysim.primitives.kinds import IGNORED, Tokens
from raysim.results.page import write_report
from raysim.results.report import RunGroup
from raysim.results.stored_runs import load_run
from raysim.results.text_samples import continue_text
from raysim.simulation.schedule import Immediate, Synchronous

FAST = quick_runs.FAST | {"quiet": True, "partition": "natural"}
del FAST["partition.clients"]
TINY_GPT = {"model": "gpt", "model.width": 8, "model.heads": 2, "model.blocks": 1}
MARKOV = {"data": "markov", "data.kind": "causal", "data.users": 4, "data.samples": 10}


def packed(documents: list[Document], length: int, is_packed: bool = True) -> Raw:
    return pack(documents, number_vocabulary(100), length, is_packed, "test", NO_ORIGIN)


# --- packing ------------------------------------------------------------------------------
def test_packed_rows_contain_each_token_exactly_once_as_a_label() -> None:
    documents = [Document(np.array([1, 2, 3]), "a"), Document(np.array([4, 5]), "a")]
    raw = packed(documents, 4)
    assert np.asarray(raw.inputs).tolist() == [[0, 1, 2, 3], [0, 4, 5, 0]]
    assert raw.labels.tolist() == [[1, 2, 3, 0], [4, 5, 0, IGNORED]]
    assert raw.kind == "causal" and raw.tokens == Tokens(100, 0)


def test_packed_row_has_text_of_one_user_and_of_either_the_training_or_the_test_set() -> None:
    documents = [
        Document(np.array([1, 2]), "b", is_test=True),
        Document(np.array([3]), "b"),
        Document(np.array([4]), "a"),
        Document(np.array([5]), "b"),
    ]
    raw = packed(documents, 9)
    assert raw.domain_names == ["a", "b"] and np.asarray(raw.domains).tolist() == [1, 0, 1]
    assert raw.train_rows == 2
    assert np.asarray(raw.inputs).tolist() == [[0, 3, 0, 5], [0, 4, 0, 0], [0, 1, 2, 0]]


def test_each_document_starts_a_new_row_if_documents_are_not_packed() -> None:
    documents = [Document(np.array([1, 2, 3]), "a"), Document(np.array([4]), "a")]
    raw = packed(documents, 3, is_packed=False)
    assert np.asarray(raw.inputs).tolist() == [[0, 1, 2], [3, 0, 0], [0, 4, 0]]
    assert raw.labels.tolist() == [[1, 2, 3], [0, IGNORED, IGNORED], [4, 0, IGNORED]]


def test_labels_omit_prompt_tokens_and_inputs_omit_rows_with_only_a_prompt() -> None:
    raw = packed([Document(np.array([1, 2, 3, 4, 5]), "a", prompt=4)], 2, is_packed=False)
    assert np.asarray(raw.inputs).tolist() == [[4, 5]]  # rows of only the prompt teach nothing
    assert raw.labels.tolist() == [[5, 0]]


def test_last_tokens_of_a_document_become_a_test_document() -> None:
    train, test = cut_document(Document(np.arange(10), "a"), 0.2)
    assert train.tokens.tolist() == list(range(8)) and not train.is_test
    assert test.tokens.tolist() == [8, 9] and test.is_test
    assert len(cut_document(Document(np.arange(10), "a"), 0.0)) == 1


def test_packing_of_texts_into_rows_refuses_data_without_training_text() -> None:
    with pytest.raises(ValueError, match=r"nowhere has no text"):
        pack([], number_vocabulary(3), 4, True, "nowhere", NO_ORIGIN)


# --- vocabularies -------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("vocabulary", "text"),
    [
        (byte_vocabulary(), "a\nÄ"),
        (character_vocabulary("\nabÄ"), "abÄ\n"),
        (number_vocabulary(9), "3 4 8"),
    ],
    ids=lambda value: getattr(value, "tokenizer", ""),
)
def test_vocabulary_decodes_encoded_text(vocabulary: Vocabulary, text: str) -> None:
    tokens = vocabulary.encode(text)
    assert vocabulary.decode(tokens.tolist()) == text
    again = stored_vocabulary(vocabulary.tokenizer, vocabulary.names)
    assert again.names == vocabulary.names and again.tokens == vocabulary.tokens
    assert again.encode(text).tolist() == tokens.tolist()
    assert len(vocabulary.names) == vocabulary.tokens.size


def test_unknown_character_is_refused_without_a_token_for_unknown_characters() -> None:
    vocabulary = character_vocabulary("ab", has_other=True)
    assert vocabulary.encode("axb").tolist() == [1, 3, 2]
    again = stored_vocabulary("characters", vocabulary.names)
    assert again.encode("x").tolist() == [3]
    with pytest.raises(ValueError, match="'x'"):
        character_vocabulary("ab").encode("ax")


# --- loss and scores ----------------------------------------------------------------------
def test_perplexity_and_accuracy_are_per_token() -> None:
    outputs = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([[1, 2, IGNORED, IGNORED], [4, 4, 4, 4], [IGNORED] * 4])
    objective = OBJECTIVES["causal"]
    mean = cross_entropy(outputs, labels, ignore_index=IGNORED)
    values = {
        metric.name: metric.summarise(metric.rows(outputs, labels).numpy())
        for metric in objective.metrics
        if metric.rows is not None
    }
    is_counted = labels != IGNORED
    right = (outputs.argmax(1) == labels)[is_counted]
    assert values["perplexity"] == pytest.approx(math.exp(mean), rel=1e-6)
    assert values["accuracy"] == pytest.approx(right.double().mean())
    assert objective.loss(outputs, labels) == pytest.approx(mean)
    assert objective.parts is not None
    assert mean_loss(objective.parts(outputs, labels).numpy()) == pytest.approx(mean)
    smoothed = objective.with_loss(lambda x, y: cross_entropy(x, y, reduction="none") * 2)
    assert smoothed.parts is not None
    assert mean_loss(smoothed.parts(outputs, labels).numpy()) == pytest.approx(2 * mean)


def test_markov_labels_are_the_next_tokens() -> None:
    source = Markov(kind="causal", users=2, samples=3, test_samples=1, length=6, shortest=3)
    raw = source.read()
    assert isinstance(raw.inputs, np.ndarray) and len(raw.inputs) == 8
    is_counted = raw.labels != IGNORED
    assert (raw.inputs[:, 1:] == raw.labels[:, :-1])[is_counted[:, 1:]].all()
    assert (is_counted.sum(axis=1) >= 4).all()  # the sequence and its end
    assert raw.domain_names == ["user 0", "user 1"] and raw.train_rows == 6


# --- text ---------------------------------------------------------------------------------
def test_text_source_reads_a_file_per_user_from_folders_train_and_test(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "test").mkdir()
    (tmp_path / "train" / "anna.txt").write_text("abab")
    (tmp_path / "train" / "ben.txt").write_text("ba")
    (tmp_path / "test" / "ben.txt").write_text("bb")
    raw = Text(root=str(tmp_path), length=8).read()
    assert raw.domain_names == ["anna", "ben"] and np.asarray(raw.domains).tolist() == [0, 1, 1]
    assert raw.train_rows == 2 and raw.class_names == ["<end>", "a", "b"]
    assert np.asarray(raw.inputs).tolist()[2][:3] == [0, 2, 2] and raw.tokenizer == "characters"


def test_text_file_is_cut_into_documents(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("one\n\ntwo\n\n\n\nthree")
    source = Text(root=str(path), separator="\\n\\n", user="document", test_fraction=0.0)
    assert source.read().domain_names == ["mine 1", "mine 2", "mine 3"]
    whole = Text(root=str(path), test_fraction=0.25, tokenizer="bytes").read()
    assert whole.domain_names == ["mine"] and whole.tokens == Tokens(257)
    assert (whole.labels != IGNORED).sum(axis=1).tolist() == [14, 5]  # 13 + 4 letters, two ends


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({}, r"data\.root"),
        ({"root": "/nowhere"}, r"data\.root=/nowhere"),
        ({"root": ".", "separator": ""}, r"data\.separator"),
        ({"root": ".", "user": "line"}, r"data\.user"),
        ({"root": ".", "kind": "classification"}, r"data\.kind"),
        ({"root": ".", "length": 0}, r"data\.length"),
    ],
)
def test_text_source_refuses_bad_settings(settings: dict[str, Any], key: str) -> None:
    with pytest.raises(ValueError, match=key):
        Text(**settings).read()


def test_text_files_without_text_are_listed_as_unused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text that is long enough for rows")
    (tmp_path / "blank.txt").write_text(" \n")
    assert "blank.txt" in Text(root=str(tmp_path), length=8).read().origin.unused


def test_text_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"a\.txt"):
        Text(root=str(tmp_path)).read()


def test_source_named_python_topics_reads_documents_without_a_data_folder() -> None:
    raw = PythonTopics(length=64).read()
    assert len(raw.domain_names) > 50 and "assert" in raw.domain_names
    assert 0 < raw.train_rows < len(raw.labels)


# --- tables and LEAF ----------------------------------------------------------------------
QUESTIONS = [
    {"user": "a", "question": "1+1", "answer": "2"},
    {"user": "a", "question": "2+2", "answer": "4"},
    {"user": "b", "question": "3+3", "answer": "6"},
]


def json_lines(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_text_column_of_a_table_becomes_the_documents_of_its_users(tmp_path: Path) -> None:
    root = json_lines(
        tmp_path / "t.jsonl", [{"user": "a", "text": "xy"}, {"user": "a", "text": "z"}]
    )
    raw = JsonLines(root=root, kind="causal", test_fraction=0.0, tokenizer="characters").read()
    assert np.asarray(raw.inputs).tolist() == [[0, 1, 2, 0, 3]] and raw.labels.tolist() == [
        [1, 2, 0, 3, 0]
    ]
    assert raw.domain_names == ["a"] and raw.class_names == ["<end>", "x", "y", "z"]


def test_instructions_have_labels_for_the_answer_only(tmp_path: Path) -> None:
    root = json_lines(tmp_path / "t.jsonl", QUESTIONS)
    source = JsonLines(
        root=root, kind="causal", prompt="question", columns=["answer"], test_fraction=0.5
    )
    raw = source.read()
    assert raw.train_rows == 2 and raw.domain_names == ["a", "b"]
    texts = [bytes(t - 1 for t in row if t > 0).decode() for row in raw.labels]
    assert texts == ["2", "6", "4"]
    assert (raw.labels == 0).sum() == 3  # the end of an answer is learnt, too
    prompts = [bytes(t - 1 for t in row if t > 0).decode() for row in np.asarray(raw.inputs)]
    assert prompts == ["1+1\n2", "3+3\n6", "2+2\n4"]
    packed_rows = replace(source, packing=True).read()
    assert len(packed_rows.labels) == 3 and packed_rows.labels.shape == (3, 6)


def test_vocabulary_has_only_characters_of_the_prompts_and_answers(tmp_path: Path) -> None:
    root = json_lines(tmp_path / "t.jsonl", QUESTIONS)
    source = JsonLines(
        root=root, kind="causal", prompt="question", columns=["answer"], tokenizer="characters"
    )
    assert source.read().class_names == ["<end>", *"\n+12346"]


def test_parquet_folders_and_arrow_tables_become_documents_of_users(tmp_path: Path) -> None:
    for hospital, texts in (("a", ["xx", "x"]), ("b", ["yy", "y"])):
        (tmp_path / hospital).mkdir()
        table = pa.table({"text": texts})
        pq.write_table(table, tmp_path / hospital / "train.parquet")
    pq.write_table(pa.table({"text": ["z"]}), tmp_path / "b" / "test.parquet")
    raw = Parquet(root=str(tmp_path), kind="causal", test_fraction=0.5).read()
    assert raw.domain_names == ["a", "b"] and np.asarray(raw.domains).tolist() == [0, 1, 0, 1]
    texts = [byte_vocabulary().decode(row) for row in np.asarray(raw.inputs).tolist()]
    assert texts == ["xx", "yyy", "x", "z"]
    source = store_table(pa.table({"text": ["ab"], "user": [3]}), {"kind": "causal"})
    assert source.read().domain_names == ["3"]


def test_each_list_of_tokens_becomes_one_document(tmp_path: Path) -> None:
    root = json_lines(tmp_path / "t.jsonl", [{"t": [3, 4], "p": [5]}, {"t": [6], "p": [5, 5]}])
    raw = JsonLines(root=root, kind="causal", columns=["t"], prompt="p", test_fraction=0.0).read()
    assert np.asarray(raw.inputs).tolist() == [[0, 5, 3, 4], [0, 5, 5, 6]]
    ignored = IGNORED
    assert raw.labels.tolist() == [[ignored, 3, 4, 0], [ignored, ignored, 6, 0]]
    assert raw.tokenizer == "numbers" and raw.tokens == Tokens(7) and raw.domains is None


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"columns": ["nope"]}, r"data\.columns"),
        ({"columns": ["question", "answer"]}, r"data\.columns=question\+answer"),
        ({"prompt": "nope", "columns": ["answer"]}, r"data\.prompt"),
        ({}, r"data\.columns=question"),
        ({"kind": None, "label": "answer", "prompt": "question"}, r"data\.prompt"),
        ({"kind": None, "label": "answer", "packing": True}, r"data\.packing"),
    ],
)
def test_wrong_settings_of_language_data_are_refused(
    tmp_path: Path, settings: dict[str, Any], key: str
) -> None:
    root = json_lines(tmp_path / "t.jsonl", QUESTIONS)
    with pytest.raises(ValueError, match=key):
        JsonLines(**{"root": root, "kind": "causal", **settings}).read()


def test_hugging_face_folder_becomes_documents(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    train = datasets.Dataset.from_dict({"text": ["ab", "c"], "user": ["x", "y"]})
    test = datasets.Dataset.from_dict({"text": ["d"], "user": ["x"]})
    datasets.DatasetDict({"train": train, "test": test}).save_to_disk(str(tmp_path / "set"))
    raw = HuggingFace(root=str(tmp_path / "set"), kind="causal").read()
    assert raw.train_rows == 2 and raw.domain_names == ["x", "y"]
    assert [byte_vocabulary().decode(row) for row in np.asarray(raw.inputs).tolist()] == [
        "ab",
        "c",
        "d",
    ]


def test_error_of_a_misspelt_tokenizer_suggests_the_nearest_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str) -> None:
        raise ValueError(f"data.tokenizer={name} cannot be read.")

    monkeypatch.setattr("raysim.data.causal.load_tokenizer", refuse)
    (tmp_path / "a.txt").write_text("the cat")
    with pytest.raises(ValueError, match=r"data\.tokenizer=charcters .*tokenizer=characters"):
        Text(root=str(tmp_path), tokenizer="charcters").read()
    with pytest.raises(ValueError, match=r"data\.tokenizer=gpt2 cannot be read\.$"):
        Text(root=str(tmp_path), tokenizer="gpt2").read()


def test_hugging_face_tokenizer_encodes_text_and_decodes_tokens(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    save_tokenizer(tmp_path / "words")
    (tmp_path / "a.txt").write_text("the cat saw the dog")
    raw = Text(
        root=str(tmp_path), tokenizer=str(tmp_path / "words"), test_fraction=0.0, length=9
    ).read()
    names = [raw.class_names[token] for token in raw.labels[0]]
    assert names == ["the", "cat", "saw", "the", "dog", "<eos>"]
    vocabulary = stored_vocabulary(raw.tokenizer, raw.class_names)
    assert vocabulary.decode(raw.labels[0, :-1].tolist()) == "the cat saw the dog"
    assert np.asarray(raw.inputs)[0, 0] == vocabulary.end == raw.class_names.index("<eos>")


def save_tokenizer(folder: Path) -> None:
    """Save a tokenizer of words as Hugging Face does."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "the", "cat", "saw", "dog", "<eos>"]
    model = models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>"
    )
    wrapped.save_pretrained(str(folder))


def test_leaf_source_joins_overlapping_windows_to_whole_texts(tmp_path: Path) -> None:
    text = "To be, or not to be"
    windows = [{"x": text[i : i + 5], "y": text[i + 5]} for i in range(len(text) - 5)]
    users = {
        "HAMLET": {key: [w[key] for w in windows] for key in "xy"},
        "GHOST": {"x": ["Mark ", "Adieu"], "y": ["m", "!"]},
    }
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        content = {"user_data": users if split == "train" else {"GHOST": users["GHOST"]}}
        (tmp_path / split / "all.json").write_text(json.dumps(content))
    raw = Leaf(root=str(tmp_path), kind="causal", length=40).read()
    vocabulary = stored_vocabulary(raw.tokenizer, raw.class_names)
    texts = [vocabulary.decode(row[row != IGNORED].tolist()) for row in raw.labels]
    assert sorted(texts[: raw.train_rows]) == ["Mark mAdieu!", text]
    assert raw.domain_names == ["GHOST", "HAMLET"] and texts[raw.train_rows :] == ["Mark mAdieu!"]


def test_leaf_file_without_text_is_refused_for_a_language_model(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    content = {"user_data": {"a": {"x": [[1.0, 2.0]], "y": [0]}}}
    (tmp_path / "train" / "all.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"data\.kind=causal"):
        Leaf(root=str(tmp_path), kind="causal").read()


# --- the model ----------------------------------------------------------------------------
@pytest.mark.parametrize("tied", [True, False])
def test_gpt_output_does_not_depend_on_later_tokens(tied: bool) -> None:
    recipe = Gpt(width=8, heads=2, blocks=2, tied=tied)
    model = recipe.build((6,), 9, 0, Tokens(9)).eval()
    tokens = torch.randint(9, (2, 6), generator=torch.Generator().manual_seed(0))
    outputs = model(tokens)
    assert outputs.shape == (2, 9, 6)
    changed = tokens.clone()
    changed[:, 4:] = (changed[:, 4:] + 1) % 9
    assert torch.allclose(model(changed)[:, :, :4], outputs[:, :, :4], atol=1e-6)
    assert not torch.allclose(model(changed)[:, :, 4:], outputs[:, :, 4:])
    assert torch.allclose(model(tokens[:, :3]), outputs[:, :, :3], atol=1e-6)


def test_gpt_with_tied_weights_has_no_parameters_of_an_output_layer() -> None:
    tied = Gpt(width=8, heads=2, blocks=1).build((6,), 9, 0, Tokens(9))
    free = Gpt(width=8, heads=2, blocks=1, tied=False).build((6,), 9, 0, Tokens(9))
    counts = [sum(p.numel() for p in model.parameters()) for model in (tied, free)]
    assert counts[1] - counts[0] == 9 * 8


# --- runs ---------------------------------------------------------------------------------
def run(folder: Path, **settings: Any) -> raysim.Result:
    return raysim.run(out=folder, **FAST, **MARKOV, **TINY_GPT, **settings)


def test_run_on_text_is_scored_by_perplexity_and_accuracy(tmp_path: Path) -> None:
    result = run(tmp_path / "run", **{"local.optimizer": "adam", "local.lr": 0.01})
    last = result.rows[-1]
    assert last["perplexity_global"] == pytest.approx(math.exp(last["loss_global"]))
    assert last["perplexity_global"] < 21 and 0 < last["accuracy_global"] < 1
    assert last["perplexity_worst"] >= last["perplexity"]
    assert result.summary["metric"] == "perplexity"
    labels = result.predictions().labels
    assert labels.shape[1] == 17 and (labels == IGNORED).any()


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"data": "digits"}, r"data\.kind=causal"),
        ({"data.label": "chain"}, r"data\.label=chain"),
        ({"model": "transformer"}, "Transformer"),
        ({"data.kind": None}, r"data\.kind=causal"),
        ({"partition": "dirichlet"}, "Dirichlet"),
        ({"method": "moon"}, "moon"),
    ],
)
def test_settings_that_language_models_cannot_use_are_refused(
    tmp_path: Path, settings: dict[str, Any], key: str
) -> None:
    changed = FAST | MARKOV | TINY_GPT | settings
    if settings.get("data") == "digits":
        changed = {k: v for k, v in changed.items() if k not in ("data.users", "data.samples")}
    if settings.get("model") == "transformer":
        changed.pop("model.width")
    with pytest.raises(RefusedError, match=key):
        raysim.run(out=tmp_path / "run", **changed)


def test_error_of_a_missing_token_in_a_list_names_the_column() -> None:
    table = pa.table({"chain": [[1, 2], [3, None]]})
    with pytest.raises(ValueError, match="column chain has lists with empty values"):
        read_sequences(table, "chain", "data.columns", "here")


@pytest.mark.parametrize(("temperature", "expected"), [(0.0, "1 2 3 4"), (1.0, "1 2 3 4")])
def test_text_generation_stops_at_the_end_token(temperature: float, expected: str) -> None:
    class Counts(torch.nn.Module):
        """A network that predicts the last token plus 1. After 4 it predicts 0, the end token."""

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            following = torch.where(tokens < 4, tokens + 1, 0)
            return 100.0 * torch.nn.functional.one_hot(following, 9).float().transpose(1, 2)

    generate = Generation(10, temperature=temperature)
    rng = np.random.default_rng(0)
    text = continue_text(Counts(), number_vocabulary(9), 3, "", generate, rng)
    assert text == expected
    short = continue_text(Counts(), number_vocabulary(9), 3, "2 ", replace(generate, tokens=1), rng)
    assert short == "2 3"


def test_two_equal_runs_generate_the_same_text(tmp_path: Path) -> None:
    settings = {"evaluate.generate.tokens": 5, "evaluate.generate.prompts": ["1 2 ", "3 "]}
    first, second = run(tmp_path / "a", **settings), run(tmp_path / "b", **settings)
    text = (first.folder / "samples.txt").read_text()
    assert text == (second.folder / "samples.txt").read_text()
    one, other = first.text("1 2 ", "3 ", tokens=5)
    assert text.startswith(one) and text.endswith(other) and one.startswith("1 2 ")
    page = write_report([RunGroup("mine", [load_run(first.folder)])], tmp_path / "report")
    assert one in page.read_text()


def test_backslash_n_in_a_prompt_is_a_new_line(tmp_path: Path) -> None:
    data = {
        "data": "jsonl",
        "data.root": json_lines(tmp_path / "t.jsonl", QUESTIONS * 4),
        "data.kind": "causal",
        "data.prompt": "question",
        "data.columns": ["answer"],
        "data.tokenizer": "characters",
    }
    others = {"schedule.cohort": 2, "evaluate.generate.prompts": ["3+3\\n"]}
    raysim.run(out=tmp_path / "run", **{**FAST, **TINY_GPT, **data, **others})
    assert (tmp_path / "run" / "samples.txt").read_text().startswith("3+3\n")


def test_run_with_zero_generated_tokens_writes_no_text(tmp_path: Path) -> None:
    result = run(tmp_path / "run", **{"evaluate.generate.tokens": 0})
    assert not (result.folder / "samples.txt").exists()


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"evaluate.generate.tokens": -1}, r"evaluate\.generate\.tokens"),
        ({"evaluate.generate.temperature": -0.1}, r"evaluate\.generate\.temperature"),
        ({"evaluate.generate.prompts": ["100"]}, r"evaluate\.generate\.prompts='100'"),
        ({"evaluate.generate.prompts": ["a"]}, r"evaluate\.generate\.prompts='a'"),
    ],
)
def test_text_generation_refuses_wrong_settings(
    tmp_path: Path, settings: dict[str, Any], key: str
) -> None:
    with pytest.raises(RefusedError, match=key):
        run(tmp_path / "run", **settings)


def test_generation_prompts_are_refused_if_the_model_is_no_language_model(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=r"evaluate\.generate\.prompts"):
        raysim.run(
            out=tmp_path / "run",
            **FAST,
            data="markov",
            model="gru",
            **{"evaluate.generate.prompts": ["1"]},
        )


@pytest.mark.parametrize("is_asynchronous", [False, True])
def test_language_run_is_bit_identical_on_three_workers_and_after_resume(
    is_asynchronous: bool, tmp_path: Path
) -> None:
    """Compare a run on one worker with a run on three workers and with a resumed run.

    is_asynchronous: True trains with an asynchronous variant of DiLoCo, False with DiLoCo in
    rounds.
    """
    markov = Markov(kind="causal", users=4, samples=8, test_samples=2, length=6, shortest=3)
    local = Local(optimizer="adamw", lr=0.01, batch=4, keep_optimizer=True)
    method = DelayedNesterov(every=2) if is_asynchronous else FedAvgM(0.7, nesterov=True)
    schedule = Immediate(concurrency=3) if is_asynchronous else Synchronous(3)
    model = Gpt(width=8, heads=2, blocks=1)
    data = federate(markov, Natural(), 0)
    spec = tiny_runs.run_spec(method, model=model, data=data, local=local)
    settings = {"rounds": 4, "schedule": schedule}
    one = tiny_runs.run(spec, **settings)
    workers = tiny_runs.several_workers(spec, 3)
    three = tiny_runs.run_to_end(tiny_runs.coordinate(spec, **settings, runtime=workers))
    assert one.history == three.history and one.bits == three.bits
    tiny_runs.run(spec, **settings, checkpoint_every=2, folder=str(tmp_path))
    checkpoint = str(tmp_path / "checkpoints" / "round-000002")
    resumed = tiny_runs.run(spec, **settings, resume=checkpoint)
    assert resumed.history == one.history and resumed.bits == one.bits
