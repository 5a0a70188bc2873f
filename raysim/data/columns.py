"""From columns of a table, or arrays, to inputs and labels: numbers, vectors, token sequences, text; what is learnt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raysim.data.partition import Ints
from raysim.data.pictures import numbered, spread_test, train_first
from raysim.data.raw import Raw, numbered_domains
from raysim.primitives.extras import optional
from raysim.primitives.kinds import Kind, Tokens
from raysim.primitives.memory import must_fit

BYTES = Tokens(257)  # of text in UTF-8: 0 is padding, byte b is b + 1
Labels = tuple[NDArray[Any], list[str], Kind]


# ---- inputs --------------------------------------------------------------------------------------------------------
def inputs_of(
    table: pa.Table, columns: Sequence[str], length: int, padding: int, tokenizer: str | None, place: str
) -> tuple[NDArray[Any], Tokens | None]:
    """What the columns hold, a row per sample: several columns of numbers side by side, or one column of numbers, of
    vectors of one length, of token numbers (a list of integers) or of text.

    length: tokens kept of a row. padding: the number that fills short rows up. tokenizer: Hugging Face's, for text;
    None: bytes. Raises ValueError with the place and the column.
    """
    for name in columns:
        _known(table, name, "data.columns", place)
        if table[name].null_count:
            raise ValueError(f"{place}: column {name} has empty values: remove or fill these rows.")
    kinds = [table.schema.field(name).type for name in columns]
    if all(map(_is_number, kinds)):
        return np.stack([_floats(table[name]) for name in columns], axis=1), None
    if len(columns) > 1:
        odd = next(name for name, kind in zip(columns, kinds, strict=True) if not _is_number(kind))
        raise ValueError(f"{place}: column {odd} is no number, and only numbers can stand side by side: name it alone.")
    column, kind, name = table[columns[0]].combine_chunks(), kinds[0], columns[0]
    if is_text(kind):
        return _text(column.to_pylist(), length, tokenizer)
    if not _is_list(kind):
        raise ValueError(f"{place}: column {name} holds {kind}: it must hold numbers, lists of numbers or text.")
    if column.flatten().null_count:
        raise ValueError(f"{place}: column {name} has lists with empty values: remove or fill these rows.")
    if pa.types.is_integer(kind.value_type):
        highest = int(column.flatten().to_numpy(zero_copy_only=False).max(initial=0))
        # gru, the smallest network for tokens, learns 16 numbers for each
        must_fit(f"{place}: column {name} has the token {highest}, and the weights of so many", 64 * highest)
        return padded(column.to_pylist(), length, padding)
    if not pa.types.is_floating(kind.value_type):
        raise ValueError(f"{place}: column {name} holds {kind}: its lists must be of integers (tokens) or of numbers.")
    return _vectors(column.to_pylist(), f"{place}: column {name}").astype(np.float32), None


def padded(rows: Sequence[Sequence[int]], length: int, padding: int = 0) -> tuple[Ints, Tokens]:
    """Token numbers in rows of the longest one's length, of at most `length`, filled up with padding at the end."""
    width = max(1, min(length, max(map(len, rows), default=1)))
    whole = np.full((len(rows), width), padding, np.int64)
    for number, row in enumerate(rows):
        kept = row[:width]
        whole[number, : len(kept)] = kept
    return whole, Tokens(max(int(whole.max(initial=0)), padding) + 1, padding)


def _text(rows: Sequence[str], length: int, tokenizer: str | None) -> tuple[Ints, Tokens]:
    if tokenizer is None:
        return padded([[byte + 1 for byte in row.encode()[:length]] for row in rows], length)[0], BYTES
    transformers = optional("transformers", f"data.tokenizer={tokenizer}")
    try:
        made = transformers.AutoTokenizer.from_pretrained(tokenizer)
    except Exception as error:  # the hub, its cache and a file can fail in many ways
        raise ValueError(f"data.tokenizer={tokenizer} cannot be read ({error}): name a folder that has it.") from error
    padding = made.pad_token_id if made.pad_token_id is not None else len(made)
    rows_of_tokens = made(list(rows), truncation=True, max_length=length)["input_ids"]
    return padded(rows_of_tokens, length, padding)[0], Tokens(max(len(made), padding + 1), padding)


def _vectors(rows: Sequence[Sequence[Any]], place: str) -> NDArray[Any]:
    if len({len(row) for row in rows}) > 1:
        raise ValueError(
            f"{place} has lists of {min(map(len, rows))} to {max(map(len, rows))} numbers: make them equal."
        )
    return np.array(rows)


# ---- labels --------------------------------------------------------------------------------------------------------
def column_of(table: pa.Table, name: str, place: str) -> Any:
    """A column of labels or users: an array of numbers or texts, [n, outputs] of lists of one length, or lists."""
    _known(table, name, "data.label_column", place)
    column = table[name].combine_chunks()
    kind = plain_type(column.type)
    if column.null_count:
        raise ValueError(f"{place}: column {name} has empty values: remove these rows.")
    values, inner = (column.flatten(), _of_lists(kind)) if _is_list(kind) else (column, kind)
    if not (_is_number(inner) or is_text(inner) or (inner != kind and pa.types.is_null(inner))):
        raise ValueError(f"{place}: column {name} holds {kind}: it must hold numbers, text, or lists of them.")
    if values.null_count:
        raise ValueError(f"{place}: column {name} has lists with empty values: remove these rows.")
    if pa.types.is_uint64(inner):  # beside signed ones NumPy would make floats of them
        highest = int(values.cast(inner).to_numpy(zero_copy_only=False).max(initial=0))
        if highest >= 2**63:
            raise ValueError(
                f"{place}: column {name} has the label {highest}, and labels are below {2**63}: correct it."
            )
        values, inner = values.cast(pa.int64()), pa.int64()
    if pa.types.is_fixed_size_list(kind):
        return np.array(column.to_pylist()).reshape(len(column), kind.list_size)
    return column.to_pylist() if _is_list(kind) else values.cast(inner).to_numpy(zero_copy_only=False)


def integers_or_text(table: pa.Table, name: str, place: str) -> NDArray[Any]:
    """A column that names groups."""
    kind = plain_type(table[name].type)
    if not (is_text(kind) or pa.types.is_integer(kind)):
        raise ValueError(f"{place}: column {name} holds {kind}: domains and users must be integers or text.")
    values: NDArray[Any] = table[name].cast(kind).to_numpy()
    return values


def go_together(one: pa.DataType, other: pa.DataType, floats: bool) -> bool:
    """Whether two columns of labels are both of lists, or neither, and both of text, or neither.

    floats: whether floats must be no integers.
    """
    if _is_list(one) and _is_list(other):
        one, other = _of_lists(one), _of_lists(other)
        if pa.types.is_null(one) or pa.types.is_null(other):  # all of these lists are empty
            return True
    alike = (_is_list, is_text, pa.types.is_floating) if floats else (_is_list, is_text)
    return all(bool(each(one)) == bool(each(other)) for each in alike)


def plain_type(kind: pa.DataType) -> pa.DataType:
    """The type of a column's values, which a dictionary of them hides."""
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def labels_of(values: Any, kind: Kind | None, names: list[str] | None, place: str) -> Labels:
    """Labels as they are stored, the names of the outputs, and what is learnt.

    kind: None: classes of integers and texts, values of floats, several labels of lists and of integers [n, labels].
    """
    lists = not isinstance(values, np.ndarray)
    if not lists and values.dtype.kind in "bS":
        values = values.astype(np.int64 if values.dtype.kind == "b" else np.str_)
    floats = not lists and values.dtype.kind == "f"
    several = lists or values.ndim > 1
    kind = kind or ("regression" if floats else "multilabel" if several else "classification")
    if kind == "classification":
        if several or floats:
            raise ValueError(
                f"{place} has labels that are no classes: set data.kind=multilabel or data.kind=regression."
            )
        return *numbered(values, names, place), kind
    if lists:
        if kind == "multilabel":
            return *_indicators(values, names, place), kind
        values = _vectors(values, place)
    if values.dtype.kind not in "iufb":
        raise ValueError(f"{place} has labels of type {values.dtype}, and data.kind={kind} needs numbers.")
    values = values[:, None] if values.ndim == 1 else values
    usual = ["value"] if values.shape[1] == 1 else [str(number) for number in range(values.shape[1])]
    return values.astype(np.float32), names or usual, kind


def _indicators(
    sets: Sequence[Sequence[Any]], names: list[str] | None, place: str
) -> tuple[NDArray[np.float32], list[str]]:
    """Whether each label is in each set. Labels are `numbered` as classes are."""
    flat = [label for each in sets for label in each]
    if odd := [label for label in flat if type(label) not in (int, str)]:
        raise ValueError(
            f"{place} has the label {odd[0]} in a list, and lists of labels are of integers or of text: convert them, "
            "or set data.kind=regression."
        )
    values = np.array(flat, np.int64 if all(type(label) is int for label in flat) else object)
    numbers, names = numbered(values, names, place, len(sets))
    names = names or ["0"]
    must_fit(f"{place}: {len(names)} labels of each of {len(sets)} images", 4 * len(names) * len(sets))
    whole = np.zeros((len(sets), len(names)), np.float32)
    whole[np.repeat(np.arange(len(sets)), [len(each) for each in sets]), numbers] = 1
    return whole, names


# ---- both ----------------------------------------------------------------------------------------------------------
def assembled(
    inputs: NDArray[Any],
    labels: Labels,
    users: NDArray[Any] | None,
    test: NDArray[np.bool_],
    tokens: Tokens | None,
    ordered: Sequence[str] | None = None,
) -> Raw:
    """Put training rows first; users (any values) become domains, in the order of `numbered_domains`."""
    values, names, kind = labels
    order, train_rows = train_first(test)
    domains: Ints | None = None
    domain_names: list[str] = []
    if users is not None:
        domains, domain_names = numbered_domains(users, ~test, ordered)
        domains = domains[order]
    return Raw(inputs[order], values[order], train_rows, names, domains, domain_names, kind, tokens)


def spread(labels: Labels, users: NDArray[Any] | None, fraction: float) -> NDArray[np.bool_]:
    """Which rows are for testing where the data do not say so: a share of each class of each user, evenly spread."""
    values, names, kind = labels
    groups = values.astype(np.int64) if kind == "classification" else np.zeros(len(values), np.int64)
    if users is not None:
        groups = np.unique(users.astype(np.str_), return_inverse=True)[1] * len(names) + groups
    return spread_test(groups, fraction)


def _known(table: pa.Table, name: str, key: str, place: str) -> None:
    if name not in table.column_names:
        raise ValueError(f"{place} has no column {name}, it has {', '.join(table.column_names)}: set {key}.")


def _floats(column: pa.ChunkedArray) -> NDArray[np.float32]:
    return np.asarray(column.to_numpy(), np.float32)


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def is_text(kind: pa.DataType) -> bool:
    """Whether a column holds text."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _of_lists(kind: pa.DataType) -> pa.DataType:
    return plain_type(kind.value_type)


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))
