"""A second pass over a batch that gets what the model of the first wrote into it is caught here alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from trainkit.data.reading.as_read import BatchesAsRead


@dataclass
class Pair:
    x: torch.Tensor
    y: int


def test_a_later_pass_gets_the_fields_that_an_earlier_one_took_out_or_replaced() -> None:
    batches = BatchesAsRead([{"x": torch.zeros(2), "pair": Pair(torch.ones(1), 3)}])
    first = batches[0]
    first["pair"].x, first["pair"].y = torch.zeros(7), 4
    first["x"].requires_grad_().sum().backward()
    del first["x"]
    again = batches[0]
    assert (again["x"].tolist(), again["x"].requires_grad) == ([0.0, 0.0], False)
    assert (again["pair"].x.tolist(), again["pair"].y) == ([1.0], 3)


@pytest.mark.parametrize("keeps", [False, True])
def test_every_pass_gets_what_was_read_however_often_it_writes(keeps: bool) -> None:
    def read() -> list[Any]:
        return [(torch.zeros(2), pack_sequence([torch.ones(2)])), torch.ones(1)]

    batches = BatchesAsRead(read(), read_again=read, keeps=keeps)
    for _ in range(3):
        x, packed = batches[0]
        assert isinstance(packed, PackedSequence)
        assert (x.tolist(), packed.data.tolist(), batches[1].tolist()) == ([0.0, 0.0], [1.0, 1.0], [1.0])
        x.view(1, 2)[0].add_(1.0)
        packed.data.mul_(2.0)
        batches[1].zero_()
