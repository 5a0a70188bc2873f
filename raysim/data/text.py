"""Sequences of tokens: LEAF's files, in which users are clients, and what Markov chains make where there is no file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from raysim.data.columns import assembled, labels_of, padded
from raysim.data.partition import Floats, Ints
from raysim.data.raw import Raw, Source
from raysim.primitives.checks import at_least, between, one_of
from raysim.primitives.files import from_json, regular, user_path
from raysim.primitives.kinds import Tokens
from raysim.primitives.memory import must_fit
from raysim.primitives.streams import stream

# What LEAF knows of Shakespeare, in its order.
LETTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
OTHER = len(LETTERS) + 1  # any other character; 0 is padding


@dataclass(frozen=True)
class Leaf(Source):
    """The files that LEAF (Caldas et al. 2018) writes: root/train/*.json and root/test/*.json; every user is a domain.

    Inputs that are texts become characters, and labels that are single characters the 80 of LEAF's Shakespeare; lists
    of numbers stay numbers, of `shape` where that is given ([1, 28, 28] for FEMNIST). `length`: characters kept.
    """

    root: str | None = None
    length: int = 80
    shape: list[int] | None = None

    def check(self) -> None:
        at_least("data.length", self.length, 1)

    def files(self) -> list[Path]:
        root = user_path(self.root or "")
        parts = [sorted((root / split).glob("*.json")) if self.root else [] for split in ("train", "test")]
        if not parts[0]:
            raise ValueError(
                f"data.root={self.root} holds no train/*.json: name the folder in which LEAF's preprocess.sh left "
                "train and test."
            )
        return [path for part in parts for path in part]

    def read(self) -> Raw:
        found = [(path, user, data) for path in self.files() for user, data in sorted(_users(path).items())]
        sizes = [len(data["y"]) for *_, data in found]
        users = np.repeat([user for _, user, _ in found], sizes)
        test = np.repeat([path.parent.name == "test" for path, *_ in found], sizes)
        inputs = [x for *_, data in found for x in data["x"]]
        answers = [y for *_, data in found for y in data["y"]]
        place = str(user_path(self.root or ""))
        if inputs and isinstance(inputs[0], str):
            rows, _ = padded(
                [[LETTER.get(letter, OTHER) for letter in text[-self.length :]] for text in inputs], self.length
            )
            letters = all(isinstance(y, str) and len(y) == 1 for y in answers)
            labels = labels_of(np.array(answers), None, list(LETTERS) if letters else None, place)
            return assembled(rows, labels, users, test, Tokens(OTHER + 1))
        try:
            values = np.array(inputs, np.float32).reshape(len(inputs), *(self.shape or [-1]))
        except ValueError as error:
            raise ValueError(f"{place} has inputs that are no lists of numbers of one length ({error}).") from error
        return assembled(values, labels_of(np.array(answers), None, None, place), users, test, None)


LETTER = {letter: number for number, letter in enumerate(LETTERS, 1)}


def _users(path: Path) -> dict[str, dict[str, list[Any]]]:
    """The samples of every user in a file."""
    try:
        users = from_json(regular(path).read_bytes())["user_data"]
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
        must_fit(f"data.users={self.users} with sequences of data.length={self.length}", 16 * tokens)
        must_fit(
            f"data.users={self.users} with data.vocabulary={self.vocabulary}", 16 * self.users * self.vocabulary**2
        )

    def read(self) -> Raw:
        rng, each = stream(self.seed, "markov"), self.samples + self.test_samples
        users = np.repeat(np.arange(self.users), each)
        test = np.tile(np.arange(each) >= self.samples, self.users)
        following, chain = self._chains(rng, users)
        sequences = _drawn(following, chain, self.length + 1, rng)
        lengths = rng.integers(self.shortest, self.length + 1, len(users))
        inputs = np.where(np.arange(self.length) < lengths[:, None], sequences[:, : self.length] + 1, 0)
        answers = sequences[np.arange(len(users)), lengths] if self.label == "next" else chain
        names = [str(number) for number in range(self.vocabulary if self.label == "next" else self.chains)]
        width = len(str(self.users - 1))
        owners = np.array([f"user {user:0{width}d}" for user in users])
        return assembled(inputs, (answers, names, "classification"), owners, test, Tokens(self.vocabulary + 1))

    def _chains(self, rng: np.random.Generator, users: Ints) -> tuple[Floats, Ints]:
        """Chances of the next token, [chains, V, V], and which chain makes each sequence."""
        size = self.vocabulary

        def chains(count: int) -> Floats:
            return rng.dirichlet(np.full(size, 0.1), size=(count, size))

        if self.label == "next":
            common = chains(1)
            return (1 - self.skew) * common + self.skew * chains(self.users), users
        favourite = rng.random(len(users)) < self.skew
        return chains(self.chains), np.where(favourite, users % self.chains, rng.integers(self.chains, size=len(users)))


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
