"""Turn documents into rows of tokens; the label of each token is the next token.

A user's documents are joined into a stream, with the token `end` before and after each document.
Without packing, each document is a stream of its own. A stream is cut into rows. Labels in a
document's prompt, and those that fill up the last row, are `IGNORED`: they have no loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raysim.data.columns import (
    LABEL_NAMES,
    UTF8_TOKENS,
    assemble,
    find_column,
    find_inputs,
    load_tokenizer,
    read_sequences,
)
from raysim.data.csr import Ints
from raysim.data.labels import LabelSet
from raysim.data.raw import BYTES_PER_TOKEN, Origin, Raw
from raysim.data.rows import choose_test_rows
from raysim.primitives.errors import nearest
from raysim.primitives.kinds import IGNORED, Kind, Tokens
from raysim.primitives.memory import check_memory

# raysim's own tokenizers; every other name is a tokenizer of Hugging Face.
BYTES, CHARACTERS, NUMBERS = "bytes", "characters", "numbers"
END_NAME, OTHER_NAME = "<end>", "<other>"
PROMPT_END = "\n"  # stands between a prompt and its answer, as the end of the prompt


# ---- text and tokens -----------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The tokens of a data set, and how text becomes tokens.

    tokenizer: `BYTES`, `CHARACTERS`, `NUMBERS`, or a folder or name of a Hugging Face tokenizer.
    names: the text of each token.
    end: the token before and after each document.
    encode: function from a text to its tokens, int64 [tokens].
    decode: function from tokens to their text.
    """

    tokenizer: str
    tokens: Tokens
    names: list[str]
    end: int
    encode: Callable[[str], Ints]
    decode: Callable[[Sequence[int]], str]


def byte_vocabulary() -> Vocabulary:
    """Return the vocabulary of bytes: byte b is token b + 1, and 0 ends a document."""
    names = [END_NAME]
    for byte in range(256):
        is_plain = 32 <= byte < 127
        names.append(chr(byte) if is_plain else f"<{byte:02x}>")

    def encode(text: str) -> Ints:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int64) + 1

    def decode(tokens: Sequence[int]) -> str:
        return bytes(token - 1 for token in tokens if token > 0).decode(errors="replace")

    return Vocabulary(BYTES, UTF8_TOKENS, names, 0, encode, decode)


def character_vocabulary(letters: Iterable[str], has_other: bool = False) -> Vocabulary:
    """Return a vocabulary of characters; token 0 ends a document.

    letters: the characters of tokens 1, 2, 3 and so on.
    has_other: True adds a last token for all other characters; with False, `encode` raises
    ValueError for other characters.
    """
    names = [END_NAME, *letters]
    token_of = {letter: token for token, letter in enumerate(names)}
    if has_other:
        names.append(OTHER_NAME)
    other = len(names) - 1

    def encode(text: str) -> Ints:
        unknown = sorted(set(text) - token_of.keys())
        if unknown and not has_other:
            raise ValueError(
                f"the vocabulary has only the characters of the data, and {unknown[0]!r} is not "
                "one of them. Remove this character from the text to encode, such as a prompt."
            )
        return np.array([token_of.get(letter, other) for letter in text], np.int64)

    def decode(tokens: Sequence[int]) -> str:
        return "".join(names[token] for token in tokens if token > 0)

    return Vocabulary(CHARACTERS, Tokens(len(names)), names, 0, encode, decode)


def number_vocabulary(size: int, end: int = 0) -> Vocabulary:
    """Return a vocabulary of the tokens 0 to size - 1; the text of a token is its number.

    end: the token that ends a document; its text is "<end>".
    """
    names = [str(number) for number in range(size)]
    names[end] = END_NAME

    def encode(text: str) -> Ints:
        numbers = np.array(text.split(), np.int64)
        if len(numbers) and not 0 <= numbers.min() <= numbers.max() < size:
            wrong = numbers.min() if numbers.min() < 0 else numbers.max()
            raise ValueError(
                f"the tokens of the data are 0 to {size - 1}, and {wrong} is not one of them. "
                "Remove this token from the text to encode, such as a prompt."
            )
        return numbers

    def decode(tokens: Sequence[int]) -> str:
        return " ".join(str(token) for token in tokens)

    return Vocabulary(NUMBERS, Tokens(size, end), names, end, encode, decode)


def hugging_face_vocabulary(name: str) -> Vocabulary:
    """Return the vocabulary of a Hugging Face tokenizer.

    name: the tokenizer's folder, or its name on the hub.
    A document ends with the tokenizer's end-of-text token, else its separator token, else a new
    token.
    Raise ValueError if there is no such tokenizer.
    """
    tokenizer = load_tokenizer(name)
    size = len(tokenizer)
    names = [str(token) for token in tokenizer.convert_ids_to_tokens(list(range(size)))]
    end = tokenizer.eos_token_id
    if end is None:
        end = tokenizer.sep_token_id
    if end is None:
        end = size
        names.append(END_NAME)

    def encode(text: str) -> Ints:
        return np.array(tokenizer(text, add_special_tokens=False)["input_ids"], np.int64)

    def decode(tokens: Sequence[int]) -> str:
        return str(tokenizer.decode([token for token in tokens if token < size]))

    return Vocabulary(name, Tokens(len(names), end), names, end, encode, decode)


def text_vocabulary(tokenizer: str | None, texts: Iterable[str]) -> Vocabulary:
    """Return the vocabulary that `data.tokenizer` names.

    tokenizer: `BYTES`, `CHARACTERS`, or a folder or name of a Hugging Face tokenizer; None means
    bytes.
    texts: all texts of the data; with `CHARACTERS`, each character in them is a token.
    """
    if tokenizer in (None, BYTES):
        return byte_vocabulary()
    if tokenizer == CHARACTERS:
        letters: set[str] = set()
        for text in texts:
            letters.update(text)
        return character_vocabulary(sorted(letters))
    assert tokenizer is not None, "tested above"
    try:
        return hugging_face_vocabulary(tokenizer)
    except ValueError as error:
        near = nearest(tokenizer, (BYTES, CHARACTERS))
        if not near:
            raise
        raise ValueError(f"{error} Did you mean data.tokenizer={near}?") from error


def stored_vocabulary(tokenizer: str, names: Sequence[str]) -> Vocabulary:
    """Return the vocabulary of a stored data set.

    tokenizer: the stored name of the tokenizer: `BYTES`, `CHARACTERS`, `NUMBERS`, or the folder or
    name of a Hugging Face tokenizer.
    names: the text of each token.
    """
    if tokenizer == BYTES:
        return byte_vocabulary()
    if tokenizer == CHARACTERS:
        has_other = names[-1] == OTHER_NAME
        return character_vocabulary(names[1 : len(names) - has_other], has_other)
    if tokenizer == NUMBERS:
        return number_vocabulary(len(names), names.index(END_NAME))
    return hugging_face_vocabulary(tokenizer)


# ---- documents and rows --------------------------------------------------------------------------
class Document(NamedTuple):
    """A text as a sequence of tokens.

    tokens: int64 [tokens].
    user: the person or device that has the document; "" if there are no users.
    is_test: True if the document is for testing.
    prompt: the number of tokens at the beginning for which no loss is computed.
    """

    tokens: Ints
    user: str
    is_test: bool = False
    prompt: int = 0


def cut_document(document: Document, test_fraction: float) -> list[Document]:
    """Cut a document in two: its beginning is for training, its end for testing.

    Return only the whole document, for training, if no token would be for testing.
    test_fraction: the share of the tokens that is for testing.
    """
    count = round(test_fraction * len(document.tokens))
    if not count:
        return [document]
    return [
        document._replace(tokens=document.tokens[:-count]),
        document._replace(tokens=document.tokens[-count:], is_test=True),
    ]


def pack(
    documents: Iterable[Document],
    vocabulary: Vocabulary,
    length: int,
    is_packed: bool,
    place: str,
    origin: Origin,
) -> Raw:
    """Cut documents into rows of tokens; return the rows as samples of a language model.

    The docstring of this module explains rows and labels. Rows in which all labels are `IGNORED`
    are left out. A row never has both training and test documents.
    length: the largest number of tokens in a row.
    is_packed: True joins all documents of a user before it cuts them into rows.
    place: the name of the data in errors.
    origin: the columns that were read.
    Raise ValueError if no document is for training.
    """
    streams: dict[tuple[str, bool, int], list[Document]] = {}
    for number, document in enumerate(documents):
        key = (document.user, document.is_test, 0 if is_packed else number)
        streams.setdefault(key, []).append(document)
    if all(is_test for _, is_test, _ in streams):
        raise ValueError(f"{place} has no text for training. Give a file with text.")
    parts = [_join_documents(stream, vocabulary.end) for stream in streams.values()]
    width = min(length, max(len(labels) for _, labels in parts))
    counts = [-(-len(labels) // width) for _, labels in parts]
    check_memory(f"{place}: {sum(counts)} rows of {width} tokens", 16 * sum(counts) * width)

    inputs = np.full((sum(counts), width), vocabulary.tokens.padding, np.int64)
    labels = np.full((sum(counts), width), IGNORED, np.int64)
    first = 0
    for (stream_inputs, stream_labels), count in zip(parts, counts, strict=True):
        rows = slice(first, first + count)
        inputs[rows].reshape(-1)[: len(stream_inputs)] = stream_inputs
        labels[rows].reshape(-1)[: len(stream_labels)] = stream_labels
        first += count
    users = np.repeat([user for user, _, _ in streams], counts)
    is_test = np.repeat([is_test for _, is_test, _ in streams], counts)

    has_labels = (labels != IGNORED).any(axis=1)
    label_set = LabelSet(labels[has_labels], vocabulary.names, "causal")
    raw = assemble(
        inputs[has_labels],
        label_set,
        users[has_labels],
        is_test[has_labels],
        vocabulary.tokens,
        origin,
    )
    return replace(raw, tokenizer=vocabulary.tokenizer)


def _join_documents(documents: Sequence[Document], end: int) -> tuple[Ints, Ints]:
    """Join documents to a stream; return its tokens without the last token, and their labels.

    A token's label is the next token, or `IGNORED` if the next token is part of a prompt.
    end: the token in front of each document and after the last one.
    """
    tokens, labels = [np.array([end])], []
    for document in documents:
        tokens += [document.tokens, np.array([end])]
        ignored = np.full(document.prompt, IGNORED)
        labels += [ignored, document.tokens[document.prompt :], np.array([end])]
    return np.concatenate(tokens)[:-1], np.concatenate(labels)


# ---- documents of a table ------------------------------------------------------------------------
@dataclass(frozen=True)
class DocumentSettings:
    """The settings by which the documents of a table become samples for a language model.

    columns: the column of text or of token numbers, in a list. None takes the only column besides
    users, prompts, labels and row numbers.
    prompt: the column of prompts, which stand before the text and have no loss; or None.
    tokenizer: "bytes", "characters", or a folder or name of a Hugging Face tokenizer. None turns
    text into bytes and keeps token numbers.
    padding: for token numbers without a tokenizer, the token that ends documents and fills up short
    samples.
    length: the largest number of tokens in a sample.
    packing: True joins all documents of a user before it cuts them. None means True without
    prompts, False with prompts.
    """

    columns: list[str] | None
    prompt: str | None
    tokenizer: str | None
    padding: int
    length: int
    packing: bool | None


def read_documents(
    table: pa.Table,
    user: str | None,
    users: NDArray[Any] | None,
    is_test: NDArray[np.bool_],
    settings: DocumentSettings,
    place: str,
) -> Raw:
    """Turn a table with a document in each row into samples for a language model.

    user: the column of users, or None.
    users: [rows], the user of each document, or None.
    is_test: bool [rows].
    place: the table's name in errors.
    Raise ValueError if the documents are not in one column of text or of token numbers.
    """
    types = dict(zip(table.schema.names, table.schema.types, strict=True))
    known = (user, settings.prompt, find_column(list(types), LABEL_NAMES))
    columns, unused = find_inputs(settings.columns, types, known, place)
    if len(columns) != 1:
        raise ValueError(
            f"data.columns={'+'.join(columns)}: data.kind=causal reads one column of text or token "
            f"numbers from {place}. Name one column."
        )
    answers: Sequence[str | Ints] = read_sequences(table, columns[0], "data.columns", place)
    prompts: Sequence[str | Ints] | None = None
    if settings.prompt is not None:
        prompts = read_sequences(table, settings.prompt, "data.prompt", place)
        if isinstance(prompts[0], str) != isinstance(answers[0], str):
            raise ValueError(
                f"data.prompt={settings.prompt} and data.columns={columns[0]}: one of these "
                "columns holds text, and the other column holds token numbers. Use text in both "
                "columns, or token numbers in both."
            )
    vocabulary = _table_vocabulary([*answers, *(prompts or ())], settings, place)
    documents = []
    for row, answer in enumerate(answers):
        prompt = np.empty(0, np.int64)
        if prompts is not None:
            prompt = _encode(prompts[row], vocabulary, PROMPT_END)
        tokens = np.concatenate([prompt, _encode(answer, vocabulary)])
        name = "" if users is None else str(users[row])
        documents.append(Document(tokens, name, bool(is_test[row]), len(prompt)))
    is_packed = settings.prompt is None if settings.packing is None else settings.packing
    labels = "" if prompts is None else f"{columns[0]} after {settings.prompt}"
    origin = Origin(f"{columns[0]} ({types[columns[0]]})", labels, user or "", ", ".join(unused))
    raw = pack(documents, vocabulary, settings.length, is_packed, place, origin)
    return raw if users is not None else replace(raw, domains=None, domain_names=[])


def check_documents(kind: Kind | None, prompt: str | None, packing: bool | None) -> None:
    """Raise ValueError if a setting of documents is given for data that are not documents.

    kind: `data.kind`; only data.kind=causal has documents.
    prompt, packing: `data.prompt` and `data.packing`; None if the user did not set them.
    """
    for key, value in (("prompt", prompt), ("packing", packing)):
        if value is not None and kind != "causal":
            raise ValueError(
                f"data.{key}={value} is for language data. Set data.kind=causal, or set "
                f"data.{key}=null."
            )


def choose_test_documents(users: NDArray[Any] | None, count: int, fraction: float) -> Any:
    """Return which documents are for testing, as bool [count].

    The same share of each user's documents is chosen, evenly spread over them.
    users: the user of each document; None if there are no users.
    fraction: the share of each user's documents that is for testing.
    """
    groups = np.zeros(count, np.int64)
    if users is not None:
        _, groups = np.unique(users.astype(np.str_), return_inverse=True)
    return choose_test_rows(groups, fraction)


def _encode(value: str | Ints, vocabulary: Vocabulary, suffix: str = "") -> Ints:
    return vocabulary.encode(value + suffix) if isinstance(value, str) else value


def _table_vocabulary(
    values: Sequence[str | Ints], settings: DocumentSettings, place: str
) -> Vocabulary:
    """Return the vocabulary of the documents and prompts in a table.

    values: all documents and prompts, each a text or an array of token numbers.
    settings: the settings of the documents, with the tokenizer.
    place: the name of the table in errors.
    """
    texts = [value for value in values if isinstance(value, str)]
    if texts:
        if settings.prompt is not None:
            texts.append(PROMPT_END)
        return text_vocabulary(settings.tokenizer, texts)
    rows = [value for value in values if not isinstance(value, str)]
    return _number_rows_vocabulary(rows, settings, place)


def _number_rows_vocabulary(
    rows: Sequence[Ints], settings: DocumentSettings, place: str
) -> Vocabulary:
    if settings.tokenizer is not None:
        vocabulary = text_vocabulary(settings.tokenizer, ())
    else:
        highest = max((int(row.max(initial=0)) for row in rows), default=0)
        size = max(highest, settings.padding) + 1
        weights = f"{place}: the weights of the tokens 0 to {size - 1} (with data.padding)"
        check_memory(weights, BYTES_PER_TOKEN * size)
        vocabulary = number_vocabulary(size, settings.padding)
    for row in rows:
        lowest, highest = int(row.min(initial=0)), int(row.max(initial=0))
        if lowest < 0 or highest >= vocabulary.tokens.size:
            wrong = lowest if lowest < 0 else highest
            raise ValueError(
                f"{place} has the token {wrong}, and tokens are from 0 to "
                f"{vocabulary.tokens.size - 1}. Correct it, or set data.tokenizer to the tokenizer "
                "that made the tokens."
            )
    return vocabulary
