"""Read text for language models: the user's files, or topics of Python's documentation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias, get_args

from raysim.data.causal import CHARACTERS, Document, cut_document, pack, text_vocabulary
from raysim.data.raw import Origin, Raw, Source, require_root
from raysim.primitives.checks import at_least, in_range, one_of, require
from raysim.primitives.files import regular_file

CorpusUser: TypeAlias = Literal["file", "document"]

MAX_NAMED_FILES = 5  # files without text that are named


class _NamedText(NamedTuple):
    """A text with its user.

    is_test: True for text of a test file.
    user: the name of the client that has the text, with partition=natural.
    """

    user: str
    text: str
    is_test: bool = False


@dataclass(frozen=True)
class _Corpus(Source):
    """The settings of sources that read text; each sample is a sequence of tokens.

    length: the largest number of tokens in a sample; longer documents fill several samples.
    tokenizer: "characters", "bytes", or a folder or name of a Hugging Face tokenizer.
    packing: True joins all documents of a user before it cuts them into samples. False begins a new
    sample with each document.
    test_fraction: the share of each document, at its end, that is for testing if there are no test
    files.
    """

    length: int = 128
    tokenizer: str = CHARACTERS
    packing: bool = True
    test_fraction: float = 0.1

    def check(self) -> None:
        at_least("data.length", self.length, 1)
        in_range("data.test_fraction", self.test_fraction, least=0, below=1)
        require("data.kind", self.kind, self.kind in (None, "causal"), "causal or null")

    def _pack(self, texts: Sequence[_NamedText], place: str, unused: str = "") -> Raw:
        vocabulary = text_vocabulary(self.tokenizer, (text.text for text in texts))
        has_test_files = any(text.is_test for text in texts)
        documents: list[Document] = []
        for text in texts:
            document = Document(vocabulary.encode(text.text), text.user, text.is_test)
            share = 0.0 if has_test_files else self.test_fraction
            documents += cut_document(document, share)
        origin = Origin("text", unused=unused)
        return pack(documents, vocabulary, self.length, self.packing, place, origin)


def _describe_empty(names: Sequence[str]) -> str:
    """Describe the files that have no text, for a warning; "" if there are none.

    names: the names of these files; only the first ones are described.
    """
    if not names:
        return ""
    shown = ", ".join(names[:MAX_NAMED_FILES])
    more = f" and {len(names) - MAX_NAMED_FILES} more" if len(names) > MAX_NAMED_FILES else ""
    return f"{shown}{more} (without text)"


@dataclass(frozen=True)
class Text(_Corpus):
    """A source that reads files of text: one file, or all *.txt in a folder and below it.

    In a folder, files called test.txt and files in a folder called test are the central test set.
    Without such files, the central test set is the share `test_fraction` at the end of each
    document.

    separator: the text between two documents of a file, where \\n stands for a new line. None means
    that a file is one document.
    user: what partition=natural makes a client, "file" or "document".
    """

    root: str | None = None
    separator: str | None = None
    user: CorpusUser = "file"

    def check(self) -> None:
        super().check()
        one_of("data.user", self.user, get_args(CorpusUser))
        require("data.separator", self.separator, self.separator != "", "some text, or null")

    def files(self) -> list[Path]:
        root = require_root(self.root, "data=text", "a file of text, or a folder with *.txt")
        if root.is_file():
            return [root]
        paths = [path for path in sorted(root.rglob("*.txt")) if path.is_file()]
        if not paths:
            problem = "has no files *.txt" if root.is_dir() else "does not exist"
            raise ValueError(
                f"data.root={self.root} {problem}. Set data.root to a text file, or "
                "to a folder with files *.txt."
            )
        return paths

    def read(self) -> Raw:
        texts: list[_NamedText] = []
        empty: list[str] = []
        for path in self.files():
            documents = [*self._documents(path)]
            if not documents:
                empty.append(path.name)
            texts += documents
        return self._pack(texts, f"data.root={self.root}", _describe_empty(empty))

    def _documents(self, path: Path) -> Iterator[_NamedText]:
        """Yield the documents of a file; empty documents are left out."""
        try:
            content = regular_file(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"{path} cannot be read as UTF-8 ({error}). Convert it, or remove it from "
                "data.root."
            ) from error
        name, is_test = self._user_of(path)
        parts = [content]
        if self.separator is not None:
            parts = content.split(self.separator.replace("\\n", "\n"))
        parts = [part for part in parts if part.strip()]
        width = len(str(len(parts)))
        for number, part in enumerate(parts, 1):
            user = name
            if self.user == "document" and len(parts) > 1:
                user = f"{name} {number:0{width}d}"
            yield _NamedText(user, part, is_test)

    def _user_of(self, path: Path) -> tuple[str, bool]:
        """Return the name of the user that a file belongs to, and True if it is a test file."""
        root = require_root(self.root, "data=text", "a file of text")
        if root.is_file():
            return path.stem, False
        parts = list(path.relative_to(root).with_suffix("").parts)
        is_test = "test" in parts
        if len(parts) > 1 and parts[0] in ("train", "test"):
            parts = parts[1:]
        return "/".join(parts), is_test


@dataclass(frozen=True)
class PythonTopics(_Corpus):
    """A source of text that needs no file: Python's help topics, which `help()` shows.

    These are about 80 documents with 500,000 characters of English and code (`pydoc_data.topics`,
    PSF license), which differ between versions of Python. With partition=natural, each topic is a
    client.
    """

    def read(self) -> Raw:
        try:
            from pydoc_data.topics import topics
        except ImportError as error:
            raise ValueError(
                f"data=python_topics: this Python has no pydoc_data ({error}). Install Python with "
                "its whole standard library, or set data=text."
            ) from error
        texts = [_NamedText(name, topics[name]) for name in sorted(topics)]
        return self._pack(texts, "data=python_topics")
