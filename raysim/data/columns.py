"""From the columns of a table to inputs, labels and users: which column is which, and what its values are."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from raysim.data.labels import Labels, of_one_length
from raysim.data.partition import Ints
from raysim.data.pictures import spread_test, train_first
from raysim.data.raw import Origin, Raw, numbered_domains
from raysim.data.values import as_float32
from raysim.primitives.extras import import_optional
from raysim.primitives.kinds import Tokens
from raysim.primitives.memory import check_memory

BYTES = Tokens(257)  # of text in UTF-8: 0 is padding, byte b is b + 1
LABEL_NAMES = (
    "label",
    "labels",
    "y",
    "target",
    "class",
)  # a column so called, in this order, holds the labels
USER_NAMES = ("user", "user_id", "users", "client", "client_id")
INDEX_NAMES = (
    "",
    "id",
    "index",
    "unnamed: 0",
    "__index_level_0__",
)  # numbers of rows: no inputs unless named


# ---- which column is which -----------------------------------------------------------------------------------------
def find_column(names: Sequence[str], usual: Sequence[str]) -> str | None:
    """Return the column with the first of the usual names, in upper or lower case, or None."""
    by_lower_case = {name.lower(): name for name in reversed(names)}
    return next((by_lower_case[name] for name in usual if name in by_lower_case), None)


def find_label(names: Sequence[str], place: str) -> str:
    """Return the column that is called as labels usually are. Raise ValueError where there is none."""
    label = find_column(names, LABEL_NAMES)
    if label is None:
        raise ValueError(
            f"{place} has no column called {', '.join(LABEL_NAMES[:-1])} or {LABEL_NAMES[-1]}, it has "
            f"{', '.join(names)}: set data.label to the column of labels."
        )
    return label


def label_column(names: Sequence[str], label: str | None, usual: str, place: str) -> str:
    """Return the column of labels: `data.label`, else `data.label_column` (usual), else one that is called so."""
    if label is None and usual == "label" and usual not in names:
        return find_label(names, place)
    name = label or usual
    if name not in names:
        key = "data.label" if label else "data.label_column"
        raise ValueError(f"{place} has no column {name}, it has {', '.join(names)}: set {key}.")
    return name


def find_inputs(
    columns: list[str] | None,
    types: Mapping[str, pa.DataType],
    known: Collection[str | None],
    place: str,
) -> tuple[list[str], list[str]]:
    """Return the columns that are the input, and those that are left out.

    columns: `data.columns`; None: all but those that are known (labels, users, domains), number the rows, or are called
    as users are. types: of all columns. Raise ValueError where these cannot stand side by side.
    """
    if columns is not None:
        return columns, []
    others = [name for name in types if name not in known]
    unused = [name for name in others if name.lower() in (*INDEX_NAMES, *USER_NAMES)]
    inputs = [name for name in others if name not in unused]
    if not inputs:
        raise ValueError(
            f"{place} has no column for the input, it has {', '.join(types)}: set data.columns."
        )
    numbers = [name for name in inputs if _is_number(_stored_type(types[name]))]
    if len(inputs) == 1 or len(numbers) == len(inputs):
        return inputs, unused
    odd = next(name for name in inputs if name not in numbers)
    choices = [f"set data.columns={'+'.join(numbers)}"] if numbers else []
    if is_text(_stored_type(types[odd])) or _is_list(types[odd]):
        choices.append(f"set data.columns={odd}")
    raise ValueError(
        f"{place}: column {odd} holds {types[odd]}, and only numbers can stand side by side: "
        f"{', '.join([*choices, 'or encode it as numbers'])}."
    )


def origin_of(
    types: Mapping[str, pa.DataType],
    inputs: Sequence[str],
    label: str,
    user: str | None,
    unused: Sequence[str] = (),
) -> Origin:
    """Return which columns became what, with their types, as the plan of a run says it."""
    shown = [f"{name} ({_stored_type(types[name])})" for name in inputs]
    if len(shown) > 4:
        shown = [*shown[:2], "...", shown[-1]]
        shown[0] = f"{len(inputs)} columns: {shown[0]}"
    return Origin(
        ", ".join(shown), f"{label} ({_stored_type(types[label])})", user or "", ", ".join(unused)
    )


# ---- inputs --------------------------------------------------------------------------------------------------------
def inputs_of(
    table: pa.Table,
    columns: Sequence[str],
    length: int,
    padding: int,
    tokenizer: str | None,
    place: str,
) -> tuple[NDArray[Any], Tokens | None]:
    """Return what the columns hold, a row for each sample, and what its tokens are.

    Several columns of numbers stand side by side; one column holds numbers, vectors of one length, token numbers
    (lists of integers) or text. length: tokens kept of a row. padding: the number that fills short rows up. tokenizer:
    Hugging Face's, for text; None: bytes. Raise ValueError with the place and the column.
    """
    plain = {name: _plain_column(table, name, "data.columns", place) for name in columns}
    for name, values in plain.items():
        if values.null_count:
            raise ValueError(
                f"{place}: column {name} has empty values{_first_empty(values)}: remove or fill these rows."
            )
    odd = next((name for name, values in plain.items() if not _is_number(values.type)), None)
    if odd is None:
        places = {name: f"{place}: the values of column {name}" for name in columns}
        return np.stack(
            [as_float32(plain[name].to_numpy(), places[name]) for name in columns], axis=1
        ), None
    if len(columns) > 1:
        raise ValueError(
            f"{place}: column {odd} is no number, and only numbers can stand side by side: name it alone."
        )
    column, kind = plain[odd].combine_chunks(), plain[odd].type
    if is_text(kind):
        return _text(column.to_pylist(), length, tokenizer)
    if not _is_list(kind):
        raise ValueError(
            f"{place}: column {odd} holds {kind}: it must hold numbers, lists of numbers or text."
        )
    inner = _of_lists(kind)
    if column.flatten().null_count:
        raise ValueError(
            f"{place}: column {odd} has lists with empty values: remove or fill these rows."
        )
    if pa.types.is_integer(inner):
        highest = int(column.flatten().to_numpy(zero_copy_only=False).max(initial=0))
        # gru, the smallest network for tokens, learns 16 numbers for each
        check_memory(
            f"{place}: column {odd} has the token {highest}, and the weights of so many",
            64 * highest,
        )
        return padded(column.to_pylist(), length, padding)
    if not pa.types.is_floating(inner):
        raise ValueError(
            f"{place}: column {odd} holds {kind}: its lists must be of integers (tokens) or of numbers."
        )
    vectors = of_one_length(column.to_pylist(), f"{place}: column {odd}")
    return as_float32(vectors, f"{place}: the values of column {odd}"), None


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
        return padded([[byte + 1 for byte in row.encode()[:length]] for row in rows], length)[
            0
        ], BYTES
    transformers = import_optional("transformers", f"data.tokenizer={tokenizer}")
    try:
        made = transformers.AutoTokenizer.from_pretrained(tokenizer)
    except Exception as error:  # the hub, its cache and a file can fail in many ways
        raise ValueError(
            f"data.tokenizer={tokenizer} cannot be read ({error}): name a folder that has it."
        ) from error
    padding = made.pad_token_id if made.pad_token_id is not None else len(made)
    rows_of_tokens = made(list(rows), truncation=True, max_length=length)["input_ids"]
    return padded(rows_of_tokens, length, padding)[0], Tokens(max(len(made), padding + 1), padding)


# ---- labels and users ----------------------------------------------------------------------------------------------
def column_of(table: pa.Table, name: str, place: str, key: str = "data.label_column") -> Any:
    """Return a column of labels: an array of numbers or text, [n, outputs] of lists of one length, or lists."""
    column = _plain_column(table, name, key, place).combine_chunks()
    kind = column.type
    if column.null_count:
        raise ValueError(
            f"{place}: column {name} has empty values{_first_empty(column)}: remove these rows."
        )
    values, inner = (column.flatten(), _of_lists(kind)) if _is_list(kind) else (column, kind)
    if not (_is_number(inner) or is_text(inner) or (inner != kind and pa.types.is_null(inner))):
        raise ValueError(
            f"{place}: column {name} holds {kind}: it must hold numbers, text, or lists of them."
        )
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
    return column.to_pylist() if _is_list(kind) else values.to_numpy(zero_copy_only=False)


def integers_or_text(
    table: pa.Table, name: str, place: str, key: str = "partition.column"
) -> NDArray[Any]:
    """Return a column that names groups. Raise ValueError where it has empty values or is of another type."""
    column = _plain_column(table, name, key, place)
    if not (is_text(column.type) or pa.types.is_integer(column.type)):
        raise ValueError(
            f"{place}: column {name} holds {column.type}: domains and users must be integers or text."
        )
    if column.null_count:
        raise ValueError(
            f"{place}: column {name} has empty values{_first_empty(column)}: remove or fill these rows."
        )
    values: NDArray[Any] = column.to_numpy()
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


# ---- both ----------------------------------------------------------------------------------------------------------
def assembled(
    inputs: NDArray[Any],
    labels: Labels,
    users: NDArray[Any] | None,
    test: NDArray[np.bool_],
    tokens: Tokens | None,
    origin: Origin | None = None,
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
    origin = origin or Origin()
    return Raw(
        inputs[order], values[order], train_rows, names, domains, domain_names, kind, tokens, origin
    )


def spread(labels: Labels, users: NDArray[Any] | None, fraction: float) -> NDArray[np.bool_]:
    """Which rows are for testing where the data do not say so: a share of each class of each user, evenly spread."""
    values, names, kind = labels
    groups = (
        values.astype(np.int64) if kind == "classification" else np.zeros(len(values), np.int64)
    )
    if users is not None:
        groups = np.unique(users.astype(np.str_), return_inverse=True)[1] * len(names) + groups
    return spread_test(groups, fraction)


def _plain_column(table: pa.Table, name: str, key: str, place: str) -> pa.ChunkedArray:
    """Return a column in the plain type of its values. Raise ValueError where it is missing or cannot be read."""
    if name not in table.column_names:
        raise ValueError(
            f"{place} has no column {name}, it has {', '.join(table.column_names)}: set {key}."
        )
    column = table[name]
    if isinstance(column.type, pa.BaseExtensionType):
        column = pa.chunked_array(
            [chunk.storage for chunk in column.chunks], column.type.storage_type
        )
    try:
        if pa.types.is_run_end_encoded(column.type):
            column = pa.chunked_array(
                [pc.run_end_decode(chunk) for chunk in column.chunks], column.type.value_type
            )
        return column.cast(_stored_type(column.type))
    except (pa.ArrowException, NotImplementedError) as error:
        raise ValueError(
            f"{place}: column {name} holds {table[name].type}, which cannot be read: convert it."
        ) from error


def _stored_type(kind: pa.DataType) -> pa.DataType:
    """Return the type that the values of a column are read in."""
    if isinstance(kind, pa.BaseExtensionType):
        return _stored_type(kind.storage_type)
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return _stored_type(kind.value_type)
    if pa.types.is_decimal(kind):
        return pa.float64()
    return pa.string() if pa.types.is_string_view(kind) else kind


def _first_empty(column: pa.Array | pa.ChunkedArray) -> str:
    """Return where the first empty value is, in words."""
    return f", the first in row {int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])}"


def _is_number(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    )


def is_text(kind: pa.DataType) -> bool:
    """Whether a column holds text."""
    return bool(
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    )


def _of_lists(kind: pa.DataType) -> pa.DataType:
    return plain_type(kind.value_type)


def _is_list(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )
