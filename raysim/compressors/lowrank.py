"""PowerSGD: a product of two thin matrices in place of each matrix.

Source: Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for
Distributed Optimization" (NeurIPS 2019), Algorithm 1.

A message has P [n, r] and Q [m, r] for each matrix M [n, m], where r is the rank:

    P <- orthogonalise(M Q)    with the Q of the sender's previous message
    Q <- M' P                  M' is the transpose of M
    C(M) = P Q'                the decoded matrix

The first Q has normal random numbers, the same for all senders. A tensor of more dimensions is read
as a matrix with its first dimension as rows. Vectors, and matrices that P and Q would not make
smaller, are sent unchanged.

Departures from the paper
- Each client sends its own P and Q. In the paper the workers average P, and then Q.
- By default there is no error feedback. For the paper's error feedback, set
  compression.feedback=ef14.
- P is orthogonalised by the QR decomposition, in place of Gram-Schmidt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from raysim.api.compression import Compressor, Direction, Exchange, Feedback
from raysim.primitives.checks import at_least
from raysim.primitives.streams import stream
from raysim.vectors.blocks import compile_function, new_like, split_range
from raysim.vectors.layout import Layout

PART = 1 << 19  # about so many entries of a matrix are computed at once, to stay in the cache


def _project(matrix: np.ndarray, basis: np.ndarray, product: np.ndarray) -> None:
    """Add the product P' M to `product`, [r, m], in one pass over M.

    matrix: the matrix M, [n, m].
    basis: the matrix P, [n, r].
    """
    for row in range(matrix.shape[0]):
        for column in range(basis.shape[1]):
            factor = basis[row, column]
            into = product[column]
            part = matrix[row]
            for index in range(len(part)):
                into[index] += factor * part[index]


def _multiply(basis: np.ndarray, query: np.ndarray, matrix: np.ndarray) -> None:
    """Write the product P Q' into `matrix`, [n, m].

    basis: the matrix P, [n, r].
    query: the matrix Q', [r, m].
    """
    for row in range(matrix.shape[0]):
        into = matrix[row]
        into[:] = 0.0
        for column in range(basis.shape[1]):
            factor = basis[row, column]
            part = query[column]
            for index in range(len(part)):
                into[index] += factor * part[index]


class _Piece(NamedTuple):
    """A range of the vector: a matrix, or entries that are sent unchanged.

    start, stop: the first position, and the position after the last one.
    rows, columns: the size of the matrix.
    rank: the rank of the matrices P and Q; 0 for unchanged entries.
    """

    start: int
    stop: int
    rows: int
    columns: int
    rank: int

    def row_blocks(self) -> list[slice]:
        """Divide the rows of the matrix into blocks that fit into the CPU's cache."""
        return split_range(0, self.rows, max(1, PART // max(1, self.columns)))

    def positions(self, rows: slice) -> slice:
        """Return the range of the vector that contains some rows of this piece's matrix.

        rows: the range of row numbers.
        """
        return slice(self.start + rows.start * self.columns, self.start + rows.stop * self.columns)


class PowerSGD(Compressor):
    """A compressor that sends an approximation of low rank in place of each matrix.

    Each message makes one step of power iteration, which improves on the previous message.
    rank: the rank r of the messages.
    direction: "up" compresses clients' updates, "down" the server's steps, "both" compresses both.
    feedback: the error feedback, "none", "ef21" or "ef14"; `Compressor` explains it.
    """

    name = "powersgd"
    paper = "Vogels et al., NeurIPS 2019"

    def __init__(self, rank: int = 2, direction: Direction = "up", feedback: Feedback = "none"):
        super().__init__(direction, feedback)
        self.rank = int(at_least("compression.rank", rank, 1))

    def _pieces(self, layout: Layout) -> Iterator[_Piece]:
        for entry in layout.entries:
            if entry.stop > layout.trained:
                continue
            size = entry.stop - entry.start
            rows = entry.shape[0] if len(entry.shape) > 1 else 1
            columns = size // max(1, rows)
            rank = min(self.rank, rows, columns)
            if len(entry.shape) < 2 or rank * (rows + columns) >= size:
                rank = 0
            yield _Piece(entry.start, entry.stop, rows, columns, rank)

    def words(self, layout: Layout) -> int:
        """Return the size of a message in words of 32 bits.

        A message has P and Q of all matrices, and all entries that are sent unchanged.
        """
        total = 0
        for piece in self._pieces(layout):
            factors = piece.rank * (piece.rows + piece.columns)
            total += factors if piece.rank else piece.stop - piece.start
        return total

    def initial(self, layout: Layout) -> Tensor:
        """Return the matrices Q from which the first message starts, concatenated to one vector.

        There is a Q for each matrix of the model. The entries are normal random numbers, the same
        for all clients.
        """
        count = sum(piece.rank * piece.columns for piece in self._pieces(layout))
        numbers = stream(0, "powersgd").standard_normal(count, dtype=np.float32)
        return torch.from_numpy(numbers)

    def encode(self, values: Tensor, layout: Layout, key: int, kept: Tensor) -> np.ndarray:
        """Return the message: P and Q of each matrix, and the entries that are sent unchanged.

        All come in the order of the layout.
        values: float32 [layout.trained].
        key: not used.
        kept: the Q of all matrices from the sender's last message, or the result of `initial`.
        """
        return self._encode(values, layout, kept, lambda part: values[part])

    def _encode(
        self, values: Tensor, layout: Layout, kept: Tensor, read: Callable[[slice], Tensor]
    ) -> np.ndarray:
        """Return the message for a vector; the function `read` may compute the vector's entries.

        values: float32 [layout.trained], the vector. Entries that `read` computes have no meaning
        before it computes them.
        kept: the matrices Q of the sender's last message, concatenated.
        read: function that takes a slice of the vector's positions and returns the entries there.
        If it computes them, it also writes them into `values`. Each entry is read only once.
        """
        parts: list[Tensor] = []
        used = 0
        for piece in self._pieces(layout):
            if not piece.rank:
                parts.append(read(slice(piece.start, piece.stop)))
                continue
            size = piece.columns * piece.rank
            query = kept[used : used + size].view(piece.columns, piece.rank)
            used += size
            columns = query.T.contiguous()
            image = torch.empty(piece.rank, piece.rows)
            for rows in piece.row_blocks():
                block = read(piece.positions(rows)).view(-1, piece.columns)
                for index, column in enumerate(columns):
                    torch.mv(block, column, out=image[index, rows])
            basis = torch.linalg.qr(image.T).Q.contiguous()
            matrix = values[piece.start : piece.stop].view(piece.rows, piece.columns)
            product = np.zeros((piece.rank, piece.columns), np.float32)
            compile_function(_project)(matrix.numpy(), basis.numpy(), product)
            parts += [basis.reshape(-1), torch.from_numpy(product).T.reshape(-1)]
        return torch.cat(parts).numpy().view(np.uint32)

    def decode(self, message: np.ndarray, layout: Layout, out: Tensor) -> None:
        """Fill `out` with P Q' of each matrix, and with the entries sent unchanged."""
        for _ in self._decode(message, layout, out):
            pass

    def _decode(self, message: np.ndarray, layout: Layout, out: Tensor) -> Iterator[slice]:
        """Decode the message into `out`; after each part of the vector, yield its positions."""
        for piece, basis, query in self._parts(message, layout):
            if not piece.rank:
                positions = slice(piece.start, piece.stop)
                out[positions] = basis
                yield positions
                continue
            columns = query.T.contiguous().numpy()
            for rows in piece.row_blocks():
                positions = piece.positions(rows)
                matrix = out[positions].view(-1, piece.columns).numpy()
                compile_function(_multiply)(basis[rows].numpy(), columns, matrix)
                yield positions

    def exchange(
        self, values: Tensor, memory: Tensor, layout: Layout, key: int, kept: Tensor
    ) -> Exchange:
        """Encode `values` with error feedback; return all results in an `Exchange`.

        The arguments are those of `Compressor.exchange`. For speed, the vector is processed in
        ranges that fit into the CPU's cache.
        """
        if not (self._is_direct(values) and len(memory)):
            return super().exchange(values, memory, layout, key, kept)
        following = new_like(values)
        is_ef14 = self.feedback == "ef14"
        combine = torch.add if is_ef14 else torch.sub
        received = values if is_ef14 else following

        def add_memory(part: slice) -> Tensor:
            return combine(values[part], memory[part], out=following[part])

        message = self._encode(following, layout, kept, add_memory)
        for part in self._decode(message, layout, received):
            if is_ef14:
                following[part].sub_(received[part])
            else:
                following[part].add_(memory[part])
        return Exchange(message, received, following)

    def keep(self, message: np.ndarray, layout: Layout) -> Tensor:
        """Return the matrices Q of the message, from which the sender computes its next message.

        message: the message that the sender has just sent.
        layout: the position of each tensor in the vector.
        """
        queries = [query for piece, _, query in self._parts(message, layout) if piece.rank]
        return torch.cat([torch.empty(0), *(query.reshape(-1) for query in queries)])

    def _parts(
        self, message: np.ndarray, layout: Layout
    ) -> Iterator[tuple[_Piece, Tensor, Tensor]]:
        """Yield the content of a message for each piece of the vector, in the order of the layout.

        For a matrix, this is (piece, P, Q). For entries that are sent unchanged, it is (piece,
        entries, an empty tensor).
        """
        floats = torch.from_numpy(message.view(np.float32))
        used = 0
        for piece in self._pieces(layout):
            if not piece.rank:
                size = piece.stop - piece.start
                yield piece, floats[used : used + size], floats[:0]
                used += size
                continue
            middle = used + piece.rows * piece.rank
            stop = middle + piece.columns * piece.rank
            basis = floats[used:middle].view(piece.rows, piece.rank)
            yield piece, basis, floats[middle:stop].view(piece.columns, piece.rank)
            used = stop
