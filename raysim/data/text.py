"""Sequences of tokens: LEAF's files, in which users are clients, and what Markov chains make where there is no file."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from raysim.data.columns import assembled, padded
from raysim.data.labels import labels_of
from raysim.data.partition import Floats, Ints
from raysim.data.pictures import PICTURES, Picture, train_first
from raysim.data.raw import Origin, Raw, Source
from raysim.data.values import as_float32, plain_array, type_name
from raysim.primitives.checks import at_least, between, one_of
from raysim.primitives.files import parse_json, regular_file, user_path
from raysim.primitives.kinds import Tokens
from raysim.primitives.memory import check_memory
from raysim.primitives.streams import stream

# What LEAF knows of Shakespeare, in its order.
LETTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
OTHER = len(LETTERS) + 1  # any other character; 0 is padding


@dataclass(frozen=True)
class Leaf(Source):
    """The files that LEAF (Caldas et al. 2018) writes: root/train/*.json and root/test/*.json; every user is a domain.

    Inputs that are texts become characters, and labels that are single characters the 80 of LEAF's Shakespeare; lists
    of numbers stay numbers, of `shape` where that is given ([1, 28, 28] for FEMNIST). `length`: characters kept.
    images: the folder of the pictures, where inputs are names of files (CelebA). field: which entry is the text, from
    0, where inputs are lists of fields (Sent140).
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
        root = user_path(self.root or "")
        parts = [
            sorted((root / split).glob("*.json")) if self.root else []
            for split in ("train", "test")
        ]
        if not parts[0]:
            raise ValueError(
                f"data.root={self.root} holds no train/*.json: name the folder in which LEAF's preprocess.sh left "
                "train and test."
            )
        return [path for part in parts for path in part]

    def read(self) -> Raw:
        entries = [
            (path, user, data)
            for path in self.files()
            for user, data in sorted(_users(path).items())
        ]
        sizes = [len(data["y"]) for *_, data in entries]
        users = np.repeat([user for _, user, _ in entries], sizes)
        test = np.repeat([path.parent.name == "test" for path, *_ in entries], sizes)
        inputs = [x for *_, data in entries for x in data["x"]]
        place = str(user_path(self.root or ""))
        answers = plain_array(
            [y for *_, data in entries for y in data["y"]], f"{place}: the labels y"
        )
        if self.field is not None:
            inputs = _pick_field(inputs, self.field, place)
        if inputs and all(isinstance(x, str) for x in inputs):
            return self._read_text(inputs, answers, users, test, place)
        return self._read_numbers(inputs, answers, users, test, place)

    def _read_text(
        self,
        texts: list[str],
        answers: NDArray[Any],
        users: NDArray[Any],
        test: NDArray[np.bool_],
        place: str,
    ) -> Raw:
        are_files = all(PurePath(text).suffix.lower() in PICTURES for text in texts)
        if self.images is None and are_files:
            raise ValueError(
                f"{place}: the inputs x are names of picture files such as {texts[0]!r}: set data.images to the folder "
                "that holds them, and data.size to bring them to one size."
            )
        letters = (
            answers.dtype.kind == "U"
            and answers.ndim == 1
            and all(len(answer) == 1 for answer in answers)
        )
        names = list(LETTERS) if letters and not are_files else None
        labels = labels_of(answers, self.kind, names, place)
        origin = Origin("x (text)", f"y ({type_name(answers)})", "users")
        if self.images is not None:
            folder = user_path(self.images)
            paths = [folder / text for text in texts]
            if missing := next((path for path in paths if not path.is_file()), None):
                raise ValueError(
                    f"data.images={self.images} holds no {missing.name}: name the folder that has it."
                )
            raw = assembled(
                np.arange(len(texts)),
                labels,
                users,
                test,
                None,
                origin._replace(inputs="x (files)"),
            )
            order, _ = train_first(test)
            return replace(
                raw, inputs=(Picture(str(paths[row]), paths[row]) for row in order.tolist())
            )
        tokens = [[LETTER.get(letter, OTHER) for letter in text[-self.length :]] for text in texts]
        rows, _ = padded(tokens, self.length)
        return assembled(rows, labels, users, test, Tokens(OTHER + 1), origin)

    def _read_numbers(
        self,
        inputs: list[Any],
        answers: NDArray[Any],
        users: NDArray[Any],
        test: NDArray[np.bool_],
        place: str,
    ) -> Raw:
        if self.images is not None:
            raise ValueError(
                f"data.images={self.images}: the inputs x are no names of picture files: leave it null."
            )
        _refuse_fields(inputs, place)
        values = plain_array(inputs, f"{place}: the inputs x")
        if values.dtype.kind not in "biuf":
            raise ValueError(
                f"{place}: the inputs x are {values.dtype}: they must be text or lists of numbers."
            )
        try:
            values = values.reshape(len(inputs), *(self.shape or [-1]))
        except ValueError as error:
            size = int(np.prod(values.shape[1:]))
            raise ValueError(
                f"data.shape={self.shape} does not hold the {size} numbers of an input in {place}: correct it."
            ) from error
        floats = as_float32(values, f"{place}: the inputs x")
        labels = labels_of(answers, self.kind, None, place)
        origin = Origin("x (lists of numbers)", f"y ({type_name(answers)})", "users")
        return assembled(floats, labels, users, test, None, origin)


def _pick_field(inputs: list[Any], field: int, place: str) -> list[str]:
    """Return one text of each input that is a list of fields. Raise ValueError where an input has none there."""
    for x in inputs:
        if not isinstance(x, list) or field >= len(x) or not isinstance(x[field], str):
            form = f"a list of {len(x)} fields" if isinstance(x, list) else f"a {type(x).__name__}"
            raise ValueError(
                f"data.field={field}: an input x of {place} is {form} without a text there: set another."
            )
    return [x[field] for x in inputs]


def _refuse_fields(inputs: list[Any], place: str) -> None:
    """Raise ValueError if an input is a list that holds text."""
    for x in inputs:
        if not isinstance(x, list):
            continue
        texts = [number for number, value in enumerate(x) if isinstance(value, str)]
        if texts:
            longest = max(texts, key=lambda number: len(x[number]))
            raise ValueError(
                f"{place}: the inputs x are lists of {len(x)} fields: set data.field to the one that is the text, such "
                f"as {longest} with {x[longest][:40]!r} (Sent140: 4)."
            )


LETTER = {letter: number for number, letter in enumerate(LETTERS, 1)}


def _users(path: Path) -> dict[str, dict[str, list[Any]]]:
    """The samples of every user in a file."""
    try:
        users = parse_json(regular_file(path).read_bytes())["user_data"]
        for user, data in users.items():
            if len(data["x"]) != len(data["y"]):
                raise ValueError(f"{user} has {len(data['x'])} inputs and {len(data['y'])} labels")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is no file of LEAF ({error}): it needs user_data with x and y of each user."
        ) from error
    found: dict[str, dict[str, list[Any]]] = users
    return found


@dataclass(frozen=True)
class Markov(Source):
    """Sequences of tokens that Markov chains made; every user is a domain.

    label="next": the token that follows the sequence. All users share a chain, of which `skew` is replaced by one of
    their own. label="chain": which of `chains` made it; `skew` of a user's sequences are of its favourite one. Lengths
    are from `shortest` to `length`, padded at the end. samples and test_samples are of each user.
    """

    users: int = 20
    samples: int = 60
    test_samples: int = 10
    vocabulary: int = 20
    length: int = 16
    shortest: int = 8
    label: Literal["next", "chain"] = "next"
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
        one_of("data.label", self.label, ("next", "chain"))
        tokens = self.users * (self.samples + self.test_samples) * (self.length + 1)
        check_memory(
            f"data.users={self.users} with sequences of data.length={self.length}", 16 * tokens
        )
        check_memory(
            f"data.users={self.users} with data.vocabulary={self.vocabulary}",
            16 * self.users * self.vocabulary**2,
        )

    def read(self) -> Raw:
        rng, each = stream(self.seed, "markov"), self.samples + self.test_samples
        users = np.repeat(np.arange(self.users), each)
        test = np.tile(np.arange(each) >= self.samples, self.users)
        following, chain = self._chains(rng, users)
        sequences = _drawn(following, chain, self.length + 1, rng)
        lengths = rng.integers(self.shortest, self.length + 1, len(users))
        inputs = np.where(
            np.arange(self.length) < lengths[:, None], sequences[:, : self.length] + 1, 0
        )
        answers = sequences[np.arange(len(users)), lengths] if self.label == "next" else chain
        names = [
            str(number)
            for number in range(self.vocabulary if self.label == "next" else self.chains)
        ]
        width = len(str(self.users - 1))
        owners = np.array([f"user {user:0{width}d}" for user in users])
        return assembled(
            inputs, (answers, names, "classification"), owners, test, Tokens(self.vocabulary + 1)
        )

    def _chains(self, rng: np.random.Generator, users: Ints) -> tuple[Floats, Ints]:
        """Chances of the next token, [chains, V, V], and which chain makes each sequence."""
        size = self.vocabulary

        def chains(count: int) -> Floats:
            return rng.dirichlet(np.full(size, 0.1), size=(count, size))

        if self.label == "next":
            common = chains(1)
            return (1 - self.skew) * common + self.skew * chains(self.users), users
        favourite = rng.random(len(users)) < self.skew
        return chains(self.chains), np.where(
            favourite, users % self.chains, rng.integers(self.chains, size=len(users))
        )


def _drawn(following: Floats, chain: Ints, length: int, rng: np.random.Generator) -> Ints:
    """A sequence for each entry of `chain`, [n, length], by inverse CDF."""
    cumulative = np.cumsum(following, axis=2)
    whole = np.empty((len(chain), length), np.int64)
    whole[:, 0] = rng.integers(following.shape[2], size=len(chain))
    for place in range(1, length):
        rows = cumulative[chain, whole[:, place - 1]]
        above = rng.random(len(chain))[:, None] * rows[:, -1:]  # the sum may be 0.99...9
        whole[:, place] = np.minimum((rows <= above).sum(axis=1), following.shape[2] - 1)
    return whole
