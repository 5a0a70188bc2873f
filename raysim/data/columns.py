"""Choose the columns of a table that are inputs, labels and users, and read their values."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from raysim.data.csr import Ints
from raysim.data.fields import pack_fields, pack_targets
from raysim.data.labels import LabelSet, read_labels, stack_lists
from raysim.data.raw import BYTES_PER_TOKEN, Origin, Raw
from raysim.data.rows import choose_test_rows, number_domains, train_first
from raysim.data.values import as_float32
from raysim.primitives.extras import import_optional
from raysim.primitives.kinds import IGNORED, InputField, Kind, Tokens
from raysim.primitives.memory import check_memory

MAX_COLUMNS_IN_MESSAGE = 4
MAX_CHOICES = 4  # settings that an error proposes
UTF8_TOKENS = Tokens(257)  # 0 is padding, byte b is b + 1
# Usual names; the first name that a table has counts.
LABEL_NAMES = ("label", "labels", "y", "target", "class")
USER_NAMES = ("user", "user_id", "users", "client", "client_id")
TEXT_NAMES = ("text",)
# Columns that number the rows are inputs only if `data.columns` names them.
INDEX_NAMES = ("", "id", "index", "unnamed: 0", "__index_level_0__")


# ---- which column is which -----------------------------------------------------------------------
def find_column(names: Sequence[str], usual: Sequence[str]) -> str | None:
    """Return the column of a table that has a usual name; None if no column has one.

    Of several such columns, return the one whose name comes first in `usual`. Upper and lower case
    are not distinguished.
    names: the names of the table's columns.
    usual: the usual names, in lower case, such as `LABEL_NAMES`.
    """
    by_lower_case = {name.lower(): name for name in reversed(names)}
    for name in usual:
        if name in by_lower_case:
            return by_lower_case[name]
    return None


def find_label(names: Sequence[str], place: str) -> str:
    """Return the column with a usual name for labels (`LABEL_NAMES`).

    names: the columns of the table.
    place: the name of the table in errors.
    Raise ValueError if there is no such column.
    """
    label = find_column(names, LABEL_NAMES)
    if label is None:
        advice = ""
        if find_column(names, TEXT_NAMES) is not None:
            advice = " A language model needs no labels; set data.kind=causal for it."
        raise ValueError(
            f"{place} has no column called {', '.join(LABEL_NAMES[:-1])} or {LABEL_NAMES[-1]}. Set "
            f"data.label to the column of labels; the columns are {', '.join(names)}.{advice}"
        )
    return label


def label_column(names: Sequence[str], label: str | None, fallback: str, place: str) -> str:
    """Return the name of a table's column of labels.

    label: `data.label`, which names the column; or None.
    fallback: `data.label_column`, the column if `label` is None. If this is "label" and the table
    has no such column, a column with one of the usual names `LABEL_NAMES` is taken.
    place: the table's name in errors.
    Raise ValueError if there is no such column.
    """
    if label is None and fallback == "label" and fallback not in names:
        return find_label(names, place)
    name = label or fallback
    if name not in names:
        key = "data.label" if label else "data.label_column"
        raise ValueError(
            f"{place} has no column {name}. Set {key} to one of its columns: {', '.join(names)}."
        )
    return name


def find_inputs(
    columns: list[str] | None,
    types: Mapping[str, pa.DataType],
    known: Collection[str | None],
    place: str,
    are_separate: bool = False,
) -> tuple[list[str], list[str]]:
    """Return the names of the input columns, and the names of the columns that are left out.

    columns: `data.columns`, the input columns; nothing is then left out. None takes the columns
    that are not in `known`, and leaves out those whose names suggest row numbers or users, such as
    "id" or "client".
    known: the columns of labels, users and domains.
    place: the table's name in errors.
    are_separate: True if each column is a separate input.
    Raise ValueError if no column is left, or if columns without numbers would be joined.
    """
    if columns is not None:
        return columns, []
    candidates = [name for name in types if name not in known]
    unused = [name for name in candidates if name.lower() in (*INDEX_NAMES, *USER_NAMES)]
    inputs = [name for name in candidates if name not in unused]
    if not inputs:
        raise ValueError(
            f"{place} has no column for the input. Set data.columns to one or more of its columns: "
            f"{', '.join(types)}."
        )
    numbers = [name for name in inputs if _is_number(_stored_type(types[name]))]
    if are_separate or len(inputs) == 1 or len(numbers) == len(inputs):
        return inputs, unused
    choices = ["+".join(numbers)] if numbers else []
    for name in inputs:
        kind = _stored_type(types[name])
        if is_text(kind) or _is_list(kind) or _is_picture(kind):
            choices.append(name)
    described = _list_columns(inputs, types)
    action = "Encode them as numbers"
    if choices:
        settings = " or ".join(f"data.columns={choice}" for choice in choices[:MAX_CHOICES])
        action = f"Set {settings}, or encode the others as numbers"
    raise ValueError(
        f"{place}: the input would be {described}, but only columns of numbers can be joined "
        f"into one input. {action}, or set data.separate=true, which passes each column to your "
        "own network as a separate input."
    )


def describe_origin(
    types: Mapping[str, pa.DataType],
    inputs: Sequence[str],
    labels: Sequence[str],
    user: str | None,
    unused: Sequence[str] = (),
) -> Origin:
    """Return the names of the columns that became inputs, labels and users.

    The names of input columns and label columns are followed by the types of these columns.
    types: the types of all columns, by name.
    user: the column of users; None if there is none.
    unused: the columns that were left out.
    """
    return Origin(
        _list_columns(inputs, types), _list_columns(labels, types), user or "", ", ".join(unused)
    )


def _list_columns(names: Sequence[str], types: Mapping[str, pa.DataType]) -> str:
    """Describe columns with their types in one line; if there are more than four, name only three.

    names: the columns to describe.
    types: the types of all columns, by name.
    """
    shown = [f"{name} ({_stored_type(types[name])})" for name in names]
    if len(shown) > MAX_COLUMNS_IN_MESSAGE:
        shown = [f"{len(names)} columns: {shown[0]}", shown[1], "...", shown[-1]]
    return ", ".join(shown)


# ---- inputs --------------------------------------------------------------------------------------
@dataclass(frozen=True)
class TokenSettings:
    """The settings for turning sequences into rows of token numbers.

    length: the number of tokens after which a row is cut.
    padding: the number that fills short lists of integers. Text is filled with the tokenizer's
    padding; without a tokenizer, with 0.
    tokenizer: a folder or name of a Hugging Face tokenizer for text; None turns text into bytes.
    """

    length: int
    padding: int
    tokenizer: str | None


class InputRows(NamedTuple):
    """The inputs of all samples.

    values: a row for each sample.
    tokens: the number of different tokens, and the token that fills short rows; None if
    the inputs are not tokens, and with data.separate=true.
    fields: a description of each input, in the order of a row of `values`; () for a single input.
    """

    values: NDArray[Any]
    tokens: Tokens | None
    fields: tuple[InputField, ...] = ()


def read_input_rows(
    table: pa.Table,
    columns: Sequence[str],
    settings: TokenSettings,
    place: str,
    are_separate: bool,
) -> InputRows:
    """Return the values of the columns as one input, or as one input for each column.

    settings: how text and token numbers become rows.
    place: the name of the table in errors.
    are_separate: True makes each column an input.
    """
    if not are_separate:
        return InputRows(*read_inputs(table, columns, settings, place))
    arrays = {name: read_inputs(table, [name], settings, place)[0] for name in columns}
    values, fields = pack_fields(arrays, place)
    return InputRows(values, None, fields)


def read_inputs(
    table: pa.Table, columns: Sequence[str], settings: TokenSettings, place: str
) -> tuple[NDArray[Any], Tokens | None]:
    """Return the inputs of all samples as one array, and `Tokens` if they are token numbers.

    columns: several columns of numbers, which are joined, or one column. One column may contain
    numbers, vectors of equal length, token numbers (as lists of integers) or text.
    place: the table's name in errors.
    Raise ValueError for other columns and for missing values (null).
    """
    plain = {name: _plain_column(table, name, "data.columns", place) for name in columns}
    for name, values in plain.items():
        if values.null_count:
            raise ValueError(
                f"{place}: column {name} has empty values{_first_empty(values)}. Remove or fill "
                "these rows."
            )
    odd = [name for name, values in plain.items() if not _is_number(values.type)]
    if not odd:
        numbers = []
        for name in columns:
            values = plain[name].to_numpy()
            numbers.append(as_float32(values, f"{place}: the values of column {name}"))
        return np.stack(numbers, axis=1), None
    if len(columns) > 1:
        raise ValueError(
            f"{place}: column {odd[0]} of data.columns={'+'.join(columns)} holds "
            f"{plain[odd[0]].type}, but only columns of numbers can be joined into one input. "
            f"Set data.columns={odd[0]} to use this column alone, or leave it out of data.columns."
        )
    return _read_column(plain[odd[0]].combine_chunks(), odd[0], settings, place)


def _read_column(
    column: pa.Array, name: str, settings: TokenSettings, place: str
) -> tuple[NDArray[Any], Tokens | None]:
    """Convert a column of text or lists to an array of inputs.

    Text and lists of integers become rows of token numbers, with `Tokens`. Lists of floats become
    rows of floats, with None in place of `Tokens`.
    """
    if is_text(column.type):
        return _read_text(column.to_pylist(), settings)
    if not _is_list(column.type):
        raise ValueError(
            f"{place}: column {name} holds {column.type}, which cannot be an input. Choose a "
            "column of numbers, lists of numbers or text."
        )
    if column.flatten().null_count:
        raise ValueError(
            f"{place}: column {name} has lists with empty values. Remove or fill these rows."
        )
    item_type = _item_type(column.type)
    if pa.types.is_integer(item_type):
        highest = int(column.flatten().to_numpy(zero_copy_only=False).max(initial=0))
        check_memory(
            f"{place}: column {name} has the token {highest}, and the weights of so many tokens",
            BYTES_PER_TOKEN * highest,
        )
        return pad_tokens(column.to_pylist(), settings.length, settings.padding)
    if not pa.types.is_floating(item_type):
        raise ValueError(
            f"{place}: column {name} holds {column.type}, which cannot be an input. Convert the "
            "column to lists of integers (token numbers) or lists of floats."
        )
    vectors = stack_lists(column.to_pylist(), f"{place}: column {name}")
    return as_float32(vectors, f"{place}: the values of column {name}"), None


def pad_tokens(rows: Sequence[Sequence[int]], length: int, padding: int = 0) -> tuple[Ints, Tokens]:
    """Make all rows of token numbers equally long; return them as an array, and their `Tokens`.

    The new rows are as long as the longest row, but have at most `length` tokens. Longer rows are
    cut off, and short rows are filled up with `padding`.
    """
    longest = max(map(len, rows), default=1)
    width = max(1, min(length, longest))
    padded = np.full((len(rows), width), padding, np.int64)
    for number, row in enumerate(rows):
        tokens = row[:width]
        padded[number, : len(tokens)] = tokens
    return padded, Tokens(max(int(padded.max(initial=0)), padding) + 1, padding)


def _read_text(rows: Sequence[str], settings: TokenSettings) -> tuple[Ints, Tokens]:
    if settings.tokenizer is None:
        byte_rows = []
        for row in rows:
            byte_rows.append([byte + 1 for byte in row.encode()[: settings.length]])
        padded, _ = pad_tokens(byte_rows, settings.length)
        return padded, UTF8_TOKENS
    tokenizer = load_tokenizer(settings.tokenizer)
    padding = tokenizer.pad_token_id
    if padding is None:
        padding = len(tokenizer)
    encoded = tokenizer(list(rows), truncation=True, max_length=settings.length)
    padded, _ = pad_tokens(encoded["input_ids"], settings.length, padding)
    return padded, Tokens(max(len(tokenizer), padding + 1), padding)


def load_tokenizer(name: str) -> Any:
    """Load a Hugging Face tokenizer.

    name: the folder that contains the tokenizer, or the tokenizer's name on the Hugging Face hub.
    Raise ValueError if it cannot be loaded; the error names the key `data.tokenizer`.
    """
    transformers = import_optional("transformers", f"data.tokenizer={name}")
    try:
        return transformers.AutoTokenizer.from_pretrained(name)
    except Exception as error:  # the hub, its cache and a file can fail in many ways
        raise ValueError(
            f"data.tokenizer={name} cannot be read ({error}). Give a folder with a tokenizer."
        ) from error


def read_sequences(
    table: pa.Table, name: str, key: str, place: str
) -> list[str] | list[NDArray[np.int64]]:
    """Return a column of text, or of lists of token numbers.

    name: the column.
    key: the setting that names the column, for errors.
    place: the name of the table in errors.
    Raise ValueError for other types and for missing values.
    """
    column = _plain_column(table, name, key, place).combine_chunks()
    if column.null_count:
        raise ValueError(
            f"{place}: column {name} has empty values{_first_empty(column)}. Remove or fill these "
            "rows."
        )
    if is_text(column.type):
        texts: list[str] = column.to_pylist()
        return texts
    has_tokens = _is_list(column.type) and pa.types.is_integer(_item_type(column.type))
    if not has_tokens:
        raise ValueError(
            f"{place}: column {name} holds {column.type}, and data.kind=causal reads text or lists "
            f"of integers. Set {key} to another column."
        )
    if column.flatten().null_count:
        raise ValueError(
            f"{place}: column {name} has lists with empty values. Remove or fill these rows."
        )
    return [np.array(row, np.int64) for row in column.to_pylist()]


# ---- labels and users ----------------------------------------------------------------------------
def read_label_column(
    values: Any, kind: Kind | None, names: list[str] | None, place: str, ignore: int | str
) -> LabelSet:
    """Convert the labels in a column to a `LabelSet`, which raysim can store.

    values: the labels of all rows. Dictionaries of arrays have the kind "structure".
    kind: `data.kind`; None infers it.
    names: the names of the classes or outputs, or None.
    place: the table's name in errors.
    ignore: `data.ignore`, the class that means "no label".
    """
    if isinstance(values, list) and values and isinstance(values[0], Mapping):
        if kind not in (None, "structure"):
            raise ValueError(
                f"data.kind={kind}: each label of {place} is a dictionary of several values "
                "(from data.targets or a struct). Set data.kind=null, which recognises such "
                "labels."
            )
        return pack_targets(values, place)
    return read_labels(values, kind, names, place, ignore)


def structure_values(table: pa.Table, columns: Sequence[str], place: str) -> list[dict[str, Any]]:
    """Return a dictionary for each row: the values of some columns, by the column's name.

    place: the name of the table in errors.
    Raise ValueError for columns that do not exist or have empty values.
    """
    values = []
    for name in columns:
        column = _plain_column(table, name, "data.targets", place)
        if column.null_count:
            raise ValueError(
                f"{place}: column {name} has empty values{_first_empty(column)}. Remove or fill "
                "these rows."
            )
        values.append(column.to_pylist())
    return [dict(zip(columns, row, strict=True)) for row in zip(*values, strict=True)]


def label_values(table: pa.Table, name: str, place: str, key: str = "data.label_column") -> Any:
    """Return the labels of all rows, from a column of a table.

    Numbers and text become an array [n], and lists of a fixed size [n, size]. Other lists become a
    list of lists, and structs a list of dictionaries.
    place: the table's name in errors.
    key: the setting that names the column, for errors.
    Raise ValueError for another type and for missing values (null).
    """
    column = _plain_column(table, name, key, place).combine_chunks()
    if column.null_count:
        raise ValueError(
            f"{place}: column {name} has empty values{_first_empty(column)}. Remove these rows."
        )
    if pa.types.is_struct(column.type):
        return column.to_pylist()
    has_lists = _is_list(column.type)
    values = column.flatten() if has_lists else column
    value_type = _item_type(column.type) if has_lists else column.type
    has_only_empty_lists = has_lists and pa.types.is_null(value_type)
    if not (_is_number(value_type) or is_text(value_type) or has_only_empty_lists):
        raise ValueError(
            f"{place}: column {name} holds {column.type}, which cannot be a label. Give numbers, "
            "text, lists of numbers or text, or structs of these."
        )
    if values.null_count:
        raise ValueError(f"{place}: column {name} has lists with empty values. Remove these rows.")
    if pa.types.is_uint64(value_type):  # NumPy would join uint64 and signed integers to floats
        highest = int(values.cast(value_type).to_numpy(zero_copy_only=False).max(initial=0))
        if highest >= 2**63:
            raise ValueError(
                f"{place}: column {name} has the label {highest}, but labels must be below "
                f"{2**63}. Correct it."
            )
        values = values.cast(pa.int64())
    if pa.types.is_fixed_size_list(column.type):
        return np.array(column.to_pylist()).reshape(len(column), column.type.list_size)
    return column.to_pylist() if has_lists else values.to_numpy(zero_copy_only=False)


def group_values(
    table: pa.Table, name: str, place: str, key: str = "partition.column"
) -> NDArray[Any]:
    """Return the domain or the user of each row, as integers or texts.

    name: the column of the domains or users.
    place: the name of the table in errors.
    key: the setting that names the column, for errors.
    Raise ValueError if a value is empty, or neither an integer nor a text.
    """
    column = _plain_column(table, name, key, place)
    if not (is_text(column.type) or pa.types.is_integer(column.type)):
        raise ValueError(
            f"{place}: column {name} holds {column.type}, which cannot name domains or users. Give "
            "integers or text."
        )
    if column.null_count:
        raise ValueError(
            f"{place}: column {name} has empty values{_first_empty(column)}. Remove or fill these "
            "rows."
        )
    values: NDArray[Any] = column.to_numpy()
    return values


def are_compatible(one: pa.DataType, other: pa.DataType, separate_floats: bool) -> bool:
    """Return True if the labels of two files have types that can be concatenated.

    Lists cannot be joined with single values, nor text with numbers.
    one, other: the type of each file's labels.
    separate_floats: True if floats cannot be joined with integers, because integers are classes.
    """
    if _is_list(one) != _is_list(other):
        return False
    if _is_list(one):
        one, other = _item_type(one), _item_type(other)
        # The type of a column of empty lists is unknown.
        if pa.types.is_null(one) or pa.types.is_null(other):
            return True
    if separate_floats and pa.types.is_floating(one) != pa.types.is_floating(other):
        return False
    return _is_list(one) == _is_list(other) and is_text(one) == is_text(other)


# ---- inputs, labels and users together -----------------------------------------------------------
def assemble(
    inputs: NDArray[Any],
    labels: LabelSet,
    users: NDArray[Any] | None,
    is_test: NDArray[np.bool_],
    tokens: Tokens | None,
    origin: Origin | None = None,
    domain_order: Sequence[str] | None = None,
    fields: tuple[InputField, ...] = (),
) -> Raw:
    """Return the samples of a data set; training samples come first.

    inputs, labels: the n samples, in any order.
    users: [n], the user of each sample, as integers or text, or None. Each user becomes a domain.
    is_test: bool [n].
    tokens: None if inputs are not tokens.
    origin: the columns that were read, for the plan of a run.
    domain_order: the names of all domains; None sorts them. Domains get numbers in this order,
    those with training samples first.
    fields: a description of each input, in the order of a row of `inputs`; () for a single input.
    """
    order, train_rows = train_first(is_test)
    domains: Ints | None = None
    domain_names: list[str] = []
    if users is not None:
        numbers, domain_names = number_domains(users, ~is_test, domain_order)
        domains = numbers[order]
    return Raw(
        inputs[order],
        labels.values[order],
        train_rows,
        labels.names,
        domains,
        domain_names,
        labels.kind,
        tokens,
        origin or Origin(),
        fields,
        labels.targets,
    )


def spread_test_rows(
    labels: LabelSet, users: NDArray[Any] | None, fraction: float
) -> NDArray[np.bool_]:
    """Choose samples for testing; return a mask, bool [n], True for the chosen samples.

    The same fraction of each user's samples is chosen, evenly spread over them. If each sample has
    one class, the fraction is the same in each class too. Samples without a label are then never
    chosen.
    users: [n], the user of each sample; None if there are no users.
    """
    groups = np.zeros(len(labels.values), np.int64)
    is_labelled = np.ones(len(groups), np.bool_)
    if labels.kind == "classification":
        is_labelled = labels.values != IGNORED
        groups = np.where(is_labelled, labels.values, len(labels.names))
    if users is not None:
        _, user_numbers = np.unique(users.astype(np.str_), return_inverse=True)
        groups = user_numbers * (len(labels.names) + 1) + groups
    return choose_test_rows(groups, fraction) & is_labelled


# ---- types of Arrow ------------------------------------------------------------------------------
def values_type(column_type: pa.DataType) -> pa.DataType:
    """Return the type of a column's values.

    For a dictionary-encoded column, this is the type of the decoded values.
    """
    return column_type.value_type if pa.types.is_dictionary(column_type) else column_type


def is_text(column_type: pa.DataType) -> bool:
    """Return True if a column of this type contains text."""
    tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    return any(bool(test(column_type)) for test in tests)


def _is_number(column_type: pa.DataType) -> bool:
    tests = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean)
    return any(bool(test(column_type)) for test in tests)


def _is_list(column_type: pa.DataType) -> bool:
    tests = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(bool(test(column_type)) for test in tests)


def _is_picture(column_type: pa.DataType) -> bool:
    """Return True if a column has pictures as Hugging Face stores images: structs with bytes."""
    return bool(pa.types.is_struct(column_type)) and column_type.get_field_index("bytes") >= 0


def _item_type(column_type: pa.DataType) -> pa.DataType:
    """Return the type of the items of a column of lists.

    column_type: the type of the column.
    """
    return values_type(column_type.value_type)


def _stored_type(column_type: pa.DataType) -> pa.DataType:
    """Return the plain type of a column's values, without dictionary encoding and extensions.

    Decimal numbers become float64.
    column_type: the type of the column.
    """
    if isinstance(column_type, pa.BaseExtensionType):
        return _stored_type(column_type.storage_type)
    if pa.types.is_dictionary(column_type) or pa.types.is_run_end_encoded(column_type):
        return _stored_type(column_type.value_type)
    if pa.types.is_decimal(column_type):
        return pa.float64()
    return pa.string() if pa.types.is_string_view(column_type) else column_type


def _plain_column(table: pa.Table, name: str, key: str, place: str) -> pa.ChunkedArray:
    """Return a column of a table, without dictionary encoding and extension types.

    Decimal numbers become float64.
    key: the setting that names the column, for errors.
    place: the name of the table in errors.
    Raise ValueError if the column is missing or unreadable.
    """
    if name not in table.column_names:
        raise ValueError(
            f"{place} has no column {name}. Set {key} to one of its columns: "
            f"{', '.join(table.column_names)}."
        )
    column = table[name]
    if isinstance(column.type, pa.BaseExtensionType):
        chunks = [chunk.storage for chunk in column.chunks]
        column = pa.chunked_array(chunks, column.type.storage_type)
    try:
        if pa.types.is_run_end_encoded(column.type):
            chunks = [pc.run_end_decode(chunk) for chunk in column.chunks]
            column = pa.chunked_array(chunks, column.type.value_type)
        return column.cast(_stored_type(column.type))
    except (pa.ArrowException, NotImplementedError) as error:
        raise ValueError(
            f"{place}: column {name} has the type {table[name].type}, which raysim cannot read. "
            "Convert the column to numbers, text or lists of numbers."
        ) from error


def _first_empty(column: pa.Array | pa.ChunkedArray) -> str:
    """Return the end of an error message: the row of the first empty value.

    For example, ", the first in row 3".
    """
    rows = np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))
    return f", the first in row {rows[0]}"
