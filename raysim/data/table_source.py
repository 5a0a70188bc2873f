"""Define the settings that all sources of tables have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raysim.data.causal import DocumentSettings, check_documents
from raysim.data.columns import USER_NAMES, TokenSettings, find_column
from raysim.data.raw import Source
from raysim.primitives.checks import at_least, require


@dataclass(frozen=True, kw_only=True)
class TableSource(Source):
    """A source that reads a table whose columns are inputs, labels and users.

    columns: one column of text, token numbers or vectors, or several columns of numbers. None takes
    all except labels, users, and row numbers such as "id".
    separate: True passes each input column to the model as a separate argument, which has the
    column's name. False joins several columns to one vector.
    length: the largest number of tokens of a row; further tokens are left out.
    padding: the token number that fills up short lists of tokens; text has a padding of its own.
    tokenizer: a folder or name of a Hugging Face tokenizer for text; None turns text into bytes.

    With data.kind=causal, each row is a document for a language model, which may fill several
    samples of `length` tokens. `tokenizer` may then also be "bytes" or "characters". Without a
    tokenizer, `padding` also ends documents of token numbers. Two settings are only for documents:

    prompt: the column of prompts, or None. The model reads a prompt before the text, and does not
    learn it.
    packing: True joins the documents of a user before they are cut into samples. None means True
    without prompts, and False with prompts.
    """

    columns: list[str] | None = None
    separate: bool = False
    length: int = 128
    padding: int = 0
    tokenizer: str | None = None
    prompt: str | None = None
    packing: bool | None = None

    def check(self) -> None:
        at_least("data.length", self.length, 1)
        require(
            "data.columns",
            self.columns,
            self.columns != [],
            "a list of at least one column, or null",
        )
        check_documents(self.kind, self.prompt, self.packing)

    def find_users(self, names: Sequence[str]) -> str | None:
        """Return the column whose name is usual for users, such as "user"; None without one.

        names: the columns of the table. Input columns are not considered.
        """
        return find_column([name for name in names if name not in (self.columns or ())], USER_NAMES)

    @property
    def token_settings(self) -> TokenSettings:
        """Return the settings that turn text and lists of tokens into rows of tokens."""
        return TokenSettings(self.length, self.padding, self.tokenizer)

    @property
    def document_settings(self) -> DocumentSettings:
        """Return the settings that turn documents into rows of tokens, for `data.kind=causal`."""
        return DocumentSettings(
            self.columns, self.prompt, self.tokenizer, self.padding, self.length, self.packing
        )
