"""A tape plays what was recorded on other tensors, to the same bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import vmap

from raysim.training.tape import Tape


def weights(seed: int, lanes: int = 3) -> list[Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    return [torch.randn(lanes, *shape, generator=drawn).requires_grad_() for shape in ((6, 4), (6,), (2, 6))]


def data(seed: int, lanes: int = 3) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    return torch.randn(lanes, 5, 4, generator=drawn), torch.randint(2, (lanes, 5), generator=drawn)


def gradients(params: Sequence[Tensor], x: Tensor, y: Tensor) -> list[Tensor]:
    """The losses and gradients of several small networks at once."""

    def loss(params: Sequence[Tensor], x: Tensor, y: Tensor) -> Tensor:
        first, bias, last = params
        return nn.functional.cross_entropy(torch.cat([(x @ first.T + bias).relu()] * 1) @ last.T, y)

    losses = vmap(loss)(list(params), x, y)
    return [losses.detach(), *torch.autograd.grad(losses.sum(), list(params))]


def test_a_forward_and_backward_pass_is_played_to_the_bits_that_are_computed() -> None:
    params, (x, y) = weights(0), data(0)
    tape = Tape(lambda: gradients(params, x, y), [*params, x, y])
    assert all(map(torch.equal, tape.first, gradients(params, x, y)))
    for seed in (1, 2):
        others, (x, y) = weights(seed), data(seed)
        expected = gradients(others, x, y)
        assert all(map(torch.equal, tape.play([*others, x, y]), expected))
        assert not torch.equal(expected[0], tape.first[0])


def test_what_is_changed_in_place_is_changed_again() -> None:
    def count(total: Tensor, by: Tensor) -> list[Tensor]:
        total.add_(by)
        return [total * 2]

    total, by = torch.zeros(3), torch.ones(3)
    tape = Tape(lambda: count(total, by), [total, by])
    other = torch.full((3,), 5.0)
    (twice,) = tape.play([other, torch.full((3,), 2.0)])
    assert other.tolist() == [7.0] * 3 and twice.tolist() == [14.0] * 3
    assert total.tolist() == [1.0] * 3, "the first one is left alone"


def test_what_follows_from_shapes_alone_is_computed_once_and_nobody_can_change_it() -> None:
    def compute(x: Tensor) -> list[Tensor]:
        zeros = torch.zeros_like(x)
        return [x + (torch.ones_like(x) / 2).expand(2, 3), zeros, zeros.t(), torch.rand_like(x) * 0 + x]

    first = torch.ones(2, 3)
    tape = Tape(lambda: compute(first), [first])
    played = " ".join(str(call.run) for call in tape._calls)
    assert "rand_like" in played and "add" in played and "ones_like" not in played and "expand" not in played
    for value in (2.0, 3.0):
        found = tape.play([torch.full((2, 3), value)])
        assert found[0].eq(value + 0.5).all() and not found[1].any() and not found[2].any() and found[3].eq(value).all()
        found[1].add_(7.0)
        found[2].add_(7.0)


def test_a_tensor_that_is_no_input_stays_what_it_was() -> None:
    scale, x = torch.full((2,), 3.0), torch.ones(2)
    tape = Tape(lambda: [x * scale], [x])
    assert tape.play([torch.full((2,), 2.0)])[0].tolist() == [6.0, 6.0]


def test_tensors_among_other_things_and_tensors_by_name_come_from_the_inputs() -> None:
    x, places, into = torch.arange(6.0).view(2, 3), torch.tensor([1]), torch.empty(2)

    def compute() -> list[Tensor]:
        torch.sum(x, 1, out=into)
        return [x[:, places], into]

    tape = Tape(compute, [x, places, into])
    assert [found.tolist() for found in tape.first] == [[[1.0], [4.0]], [3.0, 12.0]]
    other = torch.zeros(2)
    found = tape.play([10 * x, torch.tensor([2]), other])
    assert [each.tolist() for each in found] == [[[20.0], [50.0]], [30.0, 120.0]] and found[1] is other
