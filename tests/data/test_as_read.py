"""A second pass over a batch that gets what the model of the first wrote into it is caught here alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from tests.data.samples import InMemorySquares, Numbered, Squares, make_loader
from trainkit.data.reading.as_read import BatchesAsRead
from trainkit.data.reading.iterable import Stream
from trainkit.numerics.batch import Ticket


@dataclass
class Pair:
    x: torch.Tensor
    y: int


def test_tensors_that_no_pass_changes_are_not_copied() -> None:
    batch = {"x": torch.zeros(2), "y": [torch.ones(1)]}
    batches = BatchesAsRead([batch], keeps=True)
    assert batches[0] is batch
    again = batches[0]
    assert again["x"] is batch["x"]
    assert not batches.were_changed


def test_a_later_pass_gets_the_fields_that_an_earlier_one_took_out_or_replaced() -> None:
    batches = BatchesAsRead([{"x": torch.zeros(2), "pair": Pair(torch.ones(1), 3)}])
    first = batches[0]
    first["pair"].x, first["pair"].y = torch.zeros(7), 4
    del first["x"]
    again = batches[0]
    assert again["x"].tolist() == [0.0, 0.0]
    assert (again["pair"].x.tolist(), again["pair"].y) == ([1.0], 3)


def test_a_later_pass_gets_inputs_without_the_gradient_that_an_earlier_one_asked_for() -> None:
    batches = BatchesAsRead([torch.ones(2)])
    batches[0].requires_grad_().sum().backward()
    assert (batches[0].requires_grad, batches[0].grad) == (False, None)


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


SOURCES = [
    pytest.param(lambda: InMemorySquares(8), {}, id="memory"),
    pytest.param(lambda: Squares(8), {}, id="direct"),
    pytest.param(lambda: Squares(8), {"num_workers": 1}, id="workers"),
    pytest.param(lambda: Stream(source=Numbered(8), num_samples=8), {}, id="stream"),
]


@pytest.mark.parametrize(("dataset", "settings"), SOURCES)
def test_a_repeated_ticket_gives_what_was_read_also_where_the_model_begins_to_write_late(
    dataset: Any, settings: dict[str, Any]
) -> None:
    loader = make_loader(dataset(), shuffle=False, **settings)
    for step in range(2):
        for write in (0, step, 1):
            for shard, first in zip(loader.fetch(Ticket(step, (0, 1))), (0, 2), strict=True):
                assert shard[0].flatten().tolist() == [4 * step + first, 4 * step + first + 1]
                shard[0].add_(write)
    assert loader.fetch(Ticket(0, (0, 1)))[0][0].flatten().tolist() == [0, 1]
    loader.close()
