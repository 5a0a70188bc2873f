"""Test the functions of mixup on labels of sequences."""

from __future__ import annotations

import torch

from raysim.methods.mixup import soft_targets


def test_soft_targets_have_a_one_hot_row_for_each_label_of_a_sequence() -> None:
    labels = torch.tensor([[0, 2, 1], [2, 2, 0]])
    rows = soft_targets(labels, 3, torch.float32)
    assert rows.shape == (2, 3, 3) and rows.dtype == torch.float32
    assert torch.equal(rows.argmax(-1), labels) and torch.equal(rows.sum(-1), torch.ones(2, 3))
