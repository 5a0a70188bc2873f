"""Read the files of the benchmark LEAF, or generate token sequences with Markov chains."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from raysim.data.causal import Document, character_vocabulary, number_vocabulary, pack
from raysim.data.columns import assemble, pad_tokens
from raysim.data.csr import Floats, Ints
from raysim.data.labels import LabelSet, read_labels
from raysim.data.pictures import PICTURE_SUFFIXES, Picture
from raysim.data.raw import Origin, Raw, Source, require_root
from raysim.data.rows import train_first
from raysim.data.values import as_float32, plain_array, type_name
from raysim.primitives.checks import at_least, between, one_of
from raysim.primitives.files import parse_json, regular_file, user_path
from raysim.primitives.kinds import Tokens
from raysim.primitives.memory import check_memory
from raysim.primitives.streams import stream

SequenceLabel: TypeAlias = Literal["next", "chain"]

# The characters of LEAF's Shakespeare, in LEAF's order.
LETTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
TOKEN_OF_LETTER = {letter: token for token, letter in enumerate(LETTERS, 1)}  # 0 is padding
OTHER_TOKEN = len(LETTERS) + 1  # any other character


@dataclass(frozen=True)
class Leaf(Source):
    """A source that reads LEAF's root/train/*.json and root/test/*.json (Caldas et al. 2018).

    Every user is a domain. An input is a text, a list of numbers, the name of a picture file
    (CelebA), or a list of fields with a text (Sent140). Each character is a token. If all labels
    are single characters (Shakespeare), there are 80 classes.
    With data.kind=causal, the texts are documents for a language model. Shakespeare's overlapping
    texts are first joined (`join_windows`).
    length: the largest number of characters of an input. Longer texts lose their start; with
    data.kind=causal, they are cut into several samples.
    shape: the shape of inputs that are numbers, such as [1, 28, 28] for FEMNIST; None for flat
    arrays.
    images: the folder of the pictures, if any.
    field: the number of the field with the text, from 0; None if inputs are not lists of fields.
    """

    root: str | None = None
    length: int = 80
    shape: list[int] | None = None
    images: str | None = None
    field: int | None = None

    def check(self) -> None:
        at_least("data.length", self.length, 1)
        if self.field is not None:
            at_least("data.field", self.field, 0)

    def files(self) -> list[Path]:
        content = "the folder in which LEAF's preprocess.sh left train/*.json and test/*.json"
        root = require_root(self.root, "LEAF's data", content)
        train, test = (
            sorted((root / "train").glob("*.json")),
            sorted((root / "test").glob("*.json")),
        )
        if not train:
            raise ValueError(
                f"data.root={self.root} has no files train/*.json. Set data.root to {content}."
            )
        return [*train, *test]

    def read(self) -> Raw:
        inputs: list[Any] = []
        answers: list[Any] = []
        users: list[str] = []
        is_test: list[bool] = []
        for path in self.files():
            for user, samples in sorted(_read_users(path).items()):
                count = len(samples["y"])
                inputs += samples["x"]
                answers += samples["y"]
                users += [user] * count
                is_test += [path.parent.name == "test"] * count
        place = str(user_path(self.root or ""))
        if self.field is not None:
            inputs = _pick_field(inputs, self.field, place)
        if self.kind == "causal":
            return self._read_documents(inputs, answers, users, is_test, place)
        labels = plain_array(answers, f"{place}: the labels y")
        rows = _LeafRows(labels, np.array(users), np.array(is_test, np.bool_), place)
        if inputs and all(isinstance(x, str) for x in inputs):
            return self._read_text(inputs, rows)
        return self._read_numbers(inputs, rows)

    def _read_documents(
        self,
        texts: list[Any],
        answers: list[Any],
        users: list[str],
        is_test: list[bool],
        place: str,
    ) -> Raw:
        """Return the texts of each user as documents.

        If the answers are single characters (Shakespeare) and `data.field` is None, a user's texts
        overlap and are joined to longer documents.
        texts, answers, users: the text, label and user of each sample.
        is_test: True for samples of the central test set.
        place: the name of the data in errors.
        """
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(
                f"data.kind=causal: the inputs x of {place} are not text. Choose other data, or "
                "set data.field to the field with the text."
            )
        are_next = all(isinstance(answer, str) and len(answer) == 1 for answer in answers)
        are_windows = are_next and self.field is None
        groups: dict[tuple[str, bool], list[str]] = {}
        for text, answer, user, test in zip(texts, answers, users, is_test, strict=True):
            groups.setdefault((user, test), []).append(text + answer if are_windows else text)
        vocabulary = character_vocabulary(LETTERS, has_other=True)
        documents = []
        for (user, test), windows in groups.items():
            for text in join_windows(windows) if are_windows else windows:
                documents.append(Document(vocabulary.encode(text), user, test))
        origin = Origin("x (text)", users="users")
        return pack(documents, vocabulary, self.length, True, place, origin)

    def _read_text(self, texts: list[str], rows: _LeafRows) -> Raw:
        are_files = all(PurePath(text).suffix.lower() in PICTURE_SUFFIXES for text in texts)
        if self.images is None and are_files:
            raise ValueError(
                f"{rows.place}: the inputs x are names of picture files such as {texts[0]!r}. Set "
                "data.images to the folder with these files, and data.size to resize them to one "
                "size."
            )
        are_letters = rows.labels.dtype.kind == "U" and rows.labels.ndim == 1
        are_letters = are_letters and all(len(label) == 1 for label in rows.labels)
        names = list(LETTERS) if are_letters and not are_files else None
        labels = read_labels(rows.labels, self.kind, names, rows.place, self.ignore)
        if self.images is not None:
            return self._read_pictures(self.images, texts, labels, rows)
        token_rows = []
        for text in texts:
            letters = text[-self.length :]
            token_rows.append([TOKEN_OF_LETTER.get(letter, OTHER_TOKEN) for letter in letters])
        inputs, _ = pad_tokens(token_rows, self.length)
        tokens = Tokens(OTHER_TOKEN + 1)
        return assemble(inputs, labels, rows.users, rows.is_test, tokens, rows.origin("text"))

    def _read_pictures(
        self, images: str, names: list[str], labels: LabelSet, rows: _LeafRows
    ) -> Raw:
        folder = user_path(images)
        paths = [folder / name for name in names]
        for path in paths:
            if not path.is_file():
                raise ValueError(
                    f"data.images={images} does not contain {path.name}. Give the folder that has "
                    "it."
                )
        numbers = np.arange(len(names))
        raw = assemble(numbers, labels, rows.users, rows.is_test, None, rows.origin("files"))
        order, _ = train_first(rows.is_test)
        pictures = (Picture(str(paths[row]), paths[row]) for row in order.tolist())
        return replace(raw, inputs=pictures)

    def _read_numbers(self, inputs: list[Any], rows: _LeafRows) -> Raw:
        if self.images is not None:
            raise ValueError(
                f"data.images={self.images} is for inputs x that are names of picture files, but "
                "these inputs are not. Set data.images=null."
            )
        _refuse_fields(inputs, rows.place)
        place = f"{rows.place}: the inputs x"
        values = plain_array(inputs, place)
        if values.dtype.kind not in "biuf":
            raise ValueError(
                f"{place} have values of type {values.dtype}. Give text or lists of numbers."
            )
        try:
            values = values.reshape(len(inputs), *(self.shape or [-1]))
        except ValueError as error:
            size = int(np.prod(values.shape[1:]))
            raise ValueError(
                f"data.shape={self.shape} does not fit the {size} numbers of an input in "
                f"{rows.place}. Set a shape of {size} numbers, or data.shape=null."
            ) from error
        floats = as_float32(values, place)
        labels = read_labels(rows.labels, self.kind, None, rows.place, self.ignore)
        origin = rows.origin("lists of numbers")
        return assemble(floats, labels, rows.users, rows.is_test, None, origin)


def join_windows(windows: Sequence[str]) -> Iterator[str]:
    """Restore the long texts from which short, overlapping windows were cut.

    windows: all windows, which have equal lengths, in the order of the texts.
    A window continues a text if it starts one character later; any other window starts a new text.
    For example, "abcd", "bcde" and "xyzw" become "abcde" and "xyzw".
    """
    text = ""
    for window in windows:
        overlap = window[:-1]
        if overlap and text.endswith(overlap):
            text += window[-1]
            continue
        if text:
            yield text
        text = window
    if text:
        yield text


@dataclass(frozen=True, eq=False)
class _LeafRows:
    """The labels and users of all samples, and which samples are for testing.

    labels: [n, ...].
    users: [n], names of users.
    is_test: bool [n].
    place: the name of the data in errors.
    """

    labels: NDArray[Any]
    users: NDArray[Any]
    is_test: NDArray[np.bool_]
    place: str

    def origin(self, form: str) -> Origin:
        """Return the fields of LEAF's JSON files from which inputs, labels and users were read.

        form: what an input is: "text", "lists of numbers", or "files" for names of picture files.
        """
        return Origin(f"x ({form})", f"y ({type_name(self.labels)})", "users")


def _pick_field(inputs: list[Any], field: int, place: str) -> list[str]:
    """Return the text in one field of each input; an input is a list of fields.

    field: `data.field`, counted from 0.
    place: the name of the data in errors.
    Raise ValueError if an input has no text in this field.
    """
    texts = []
    for x in inputs:
        if not isinstance(x, list) or field >= len(x) or not isinstance(x[field], str):
            form = f"a list of {len(x)} fields" if isinstance(x, list) else f"a {type(x).__name__}"
            raise ValueError(
                f"data.field={field}: {place} has an input without text in field {field}; this "
                f"input is {form}. Set data.field to the number of a field with text. The first "
                "field has the number 0."
            )
        texts.append(x[field])
    return texts


def _refuse_fields(inputs: list[Any], place: str) -> None:
    """Raise ValueError if an input is a list that contains text.

    The error says that `data.field` must name the field with the text.
    inputs: the inputs x of all samples.
    place: the name of the data in errors.
    """
    for x in inputs:
        if not isinstance(x, list):
            continue
        text_fields = [field for field, value in enumerate(x) if isinstance(value, str)]
        if text_fields:
            longest = max(text_fields, key=lambda field: len(x[field]))
            raise ValueError(
                f"{place}: an input x is a list of {len(x)} fields. Set data.field to the number "
                "of the field with the text; the first field has the number 0. For example, "
                f"data.field={longest} chooses the text that begins with {x[longest][:40]!r}. "
                "Sent140 needs data.field=4."
            )


def _read_users(path: Path) -> dict[str, dict[str, list[Any]]]:
    """Return the samples of each user in a file: a list of inputs "x" and a list of labels "y"."""
    try:
        users: dict[str, dict[str, list[Any]]] = parse_json(regular_file(path).read_bytes())[
            "user_data"
        ]
        for user, samples in users.items():
            if len(samples["x"]) != len(samples["y"]):
                raise ValueError(
                    f"{user} has {len(samples['x'])} inputs and {len(samples['y'])} labels"
                )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is not a file of LEAF ({error}). Give a file with user_data, which has x and "
            "y of each user."
        ) from error
    return users


@dataclass(frozen=True)
class Markov(Source):
    """A source that generates token sequences with Markov chains; every user is a domain.

    With data.kind=causal, each sequence is a document for a language model.
    samples: the number of training sequences of each user.
    test_samples: the number of sequences in the central test set for each user.
    vocabulary: the number of different tokens, without the padding.
    length: the number of tokens of a sequence, including its padding.
    shortest: the smallest number of tokens of a sequence, without its padding.
    label: what to predict: "next" is the token after the sequence, "chain" is the Markov chain that
    generated the sequence.
    chains: with label="chain", the number of Markov chains.
    skew: how much users differ, from 0 (equal) to 1. With label="next", user u has the transition
    probabilities (1 - skew) P + skew Q_u; all users share P. With label="chain", a share `skew` of
    a user's sequences comes from the user's favourite chain, and the rest from random chains.
    seed: the seed of the data, which the run's seed does not change.
    """

    users: int = 20
    samples: int = 60
    test_samples: int = 10
    vocabulary: int = 20
    length: int = 16
    shortest: int = 8
    label: SequenceLabel = "next"
    chains: int = 4
    skew: float = 0.3
    seed: int = 0

    def check(self) -> None:
        for key in ("users", "samples", "length", "shortest", "chains"):
            at_least(f"data.{key}", getattr(self, key), 1)
        for key in ("test_samples", "seed"):
            at_least(f"data.{key}", getattr(self, key), 0)
        at_least("data.vocabulary", self.vocabulary, 2)
        between("data.shortest", self.shortest, 1, self.length)
        between("data.skew", self.skew, 0, 1)
        one_of("data.label", self.label, get_args(SequenceLabel))
        tokens = self.users * (self.samples + self.test_samples) * (self.length + 1)
        check_memory(
            f"data.users={self.users} with sequences of data.length={self.length}", 16 * tokens
        )
        check_memory(
            f"data.users={self.users} with data.vocabulary={self.vocabulary}",
            16 * self.users * self.vocabulary**2,
        )

    def read(self) -> Raw:
        if self.kind == "causal" and self.label != "next":
            raise ValueError(
                f"data.label={self.label}: data.kind=causal learns the next token of each "
                "position. Set data.label=next."
            )
        rng = stream(self.seed, "markov")
        rows_of_user = self.samples + self.test_samples
        users = np.repeat(np.arange(self.users), rows_of_user)
        is_test = np.tile(np.arange(rows_of_user) >= self.samples, self.users)
        transitions, chains = self._draw_chains(rng, users)
        sequences = _draw_sequences(transitions, chains, self.length + 1, rng)
        lengths = rng.integers(self.shortest, self.length + 1, len(users))
        width = len(str(self.users - 1))
        names = np.array([f"user {user:0{width}d}" for user in users])
        if self.kind == "causal":
            return self._pack(sequences, lengths, names, is_test)
        is_inside = np.arange(self.length) < lengths[:, None]
        inputs = np.where(is_inside, sequences[:, : self.length] + 1, 0)
        if self.label == "next":
            answers, outputs = sequences[np.arange(len(users)), lengths], self.vocabulary
        else:
            answers, outputs = chains, self.chains
        labels = LabelSet(answers, [str(number) for number in range(outputs)], "classification")
        return assemble(inputs, labels, names, is_test, Tokens(self.vocabulary + 1))

    def _pack(
        self, sequences: Ints, lengths: Ints, names: NDArray[Any], is_test: NDArray[np.bool_]
    ) -> Raw:
        """Return sequences as documents for a language model.

        Tokens are stored as their numbers plus 1, because 0 marks the end of a document.
        sequences: int64 [n, T], the tokens.
        lengths: [n], the number of tokens of each sequence to use.
        names: [n], the user of each document.
        is_test: [n], True for documents of the central test set.
        """
        documents = []
        for sequence, length, name, test in zip(sequences, lengths, names, is_test, strict=True):
            documents.append(Document(sequence[:length] + 1, str(name), bool(test)))
        vocabulary = number_vocabulary(self.vocabulary + 1)
        return pack(documents, vocabulary, self.length + 1, False, "data=markov", Origin())

    def _draw_chains(self, rng: np.random.Generator, users: Ints) -> tuple[Floats, Ints]:
        """Draw the transition probabilities of all chains, and the chain of each sequence.

        Return float [chains, V, V] for V = `vocabulary` tokens, and the index of each sequence's
        chain, [n].
        users: [n], the number of each sequence's user.
        """
        size = self.vocabulary

        def draw(count: int) -> Floats:
            return rng.dirichlet(np.full(size, 0.1), size=(count, size))

        if self.label == "next":
            shared_chain = draw(1)
            return (1 - self.skew) * shared_chain + self.skew * draw(self.users), users
        is_favourite = rng.random(len(users)) < self.skew
        transitions = draw(self.chains)
        other_chains = rng.integers(self.chains, size=len(users))
        return transitions, np.where(is_favourite, users % self.chains, other_chains)


def _draw_sequences(
    transitions: Floats, chains: Ints, length: int, rng: np.random.Generator
) -> Ints:
    """Generate n sequences of tokens with Markov chains: [n, length].

    The first token of a sequence is drawn uniformly.
    transitions: [chains, V, V] for V tokens. Entry [c, s, t] is the probability that token t
    follows token s in chain c.
    chains: [n], the chain of each sequence.
    """
    cumulative = np.cumsum(transitions, axis=2)
    sequences = np.empty((len(chains), length), np.int64)
    sequences[:, 0] = rng.integers(transitions.shape[2], size=len(chains))
    for place in range(1, length):
        rows = cumulative[chains, sequences[:, place - 1]]
        uniforms = rng.random(len(chains))[:, None] * rows[:, -1:]  # the sum may be 0.99...9
        next_tokens = (rows <= uniforms).sum(axis=1)
        sequences[:, place] = np.minimum(next_tokens, transitions.shape[2] - 1)
    return sequences
