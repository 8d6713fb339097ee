"""Reading in this process: small batches are read several at a time, with the same results."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from trainkit.data.reading.in_process import InProcessReader
from trainkit.data.reading.reader import Reader
from trainkit.errors import DataError
from trainkit.numerics.batch import BatchPlan, Positions, SampleOrder, Ticket

NUM_STEPS = 9


class Numbers:
    """Sample i is i; which were read, in order."""

    def __init__(self, *, broken: int = -1, delay_s: float = 0.0, size: int = 1) -> None:
        self.broken, self.delay_s, self.size = broken, delay_s, size
        self.read: list[int] = []

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> torch.Tensor:
        self.read.append(index)
        time.sleep(self.delay_s)
        if index == self.broken:
            raise ValueError("broken")
        return torch.full((self.size,), float(index))


@pytest.fixture
def direct() -> Callable[[Any], InProcessReader]:
    def make(dataset: Any) -> InProcessReader:
        plan = BatchPlan(num_samples=10, global_size=4, micro_size=4)  # batches of 4, 4 and 2
        positions = Positions(plan, SampleOrder(num_samples=10, seed=0, shuffle=False))
        return InProcessReader(
            Reader(dataset, seed=0),
            positions,
            shards_at=lambda _: (0,),
            num_steps=NUM_STEPS,
            move=lambda batch: batch,
        )

    return make


def test_small_batches_are_read_ahead_over_epochs_and_each_sample_once(
    direct: Callable[[Any], InProcessReader],
) -> None:
    data = Numbers()
    source = direct(data)
    given = [source.read(Ticket(step, (0,)))[0].flatten().tolist() for step in range(NUM_STEPS)]
    assert given == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]] * 3
    assert data.read == list(range(10)) * 3


def test_a_batch_is_read_before_its_step_but_none_past_the_end(
    direct: Callable[[Any], InProcessReader], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "trainkit.data.reading.in_process._BURST_S", 60.0
    )  # a busy machine may pause for longer than a burst takes
    data = Numbers()
    source = direct(data)
    source.read(Ticket(7, (0,)))
    assert data.read == [4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize("data", [Numbers(delay_s=0.003), Numbers(size=1 << 18)], ids=["slow", "large"])
def test_slow_and_large_batches_are_read_one_at_a_time(data: Numbers, direct: Callable[[Any], InProcessReader]) -> None:
    direct(data).read(Ticket(0, (0,)))
    assert data.read == [0, 1, 2, 3]


def test_a_sample_that_fails_is_read_once_and_its_error_is_raised_in_its_own_step(
    direct: Callable[[Any], InProcessReader],
) -> None:
    data = Numbers(broken=6)
    source = direct(data)
    source.read(Ticket(0, (0,)))
    with pytest.raises(DataError, match="sample 6 cannot be read: ValueError: broken"):
        source.read(Ticket(1, (0,)))
    assert data.read == [0, 1, 2, 3, 4, 5, 6]


def test_a_ticket_that_is_out_of_order_is_read_again(direct: Callable[[Any], InProcessReader]) -> None:
    source = direct(Numbers())
    source.read(Ticket(0, (0,)))
    assert source.read(Ticket(5, (0,)))[0].flatten().tolist() == [8, 9]
    assert source.read(Ticket(6, (0,)))[0].flatten().tolist() == [0, 1, 2, 3]


def test_sparse_batches_are_read(direct: Callable[[Any], InProcessReader]) -> None:
    data = Numbers()
    data.__class__ = type("Sparse", (Numbers,), {"__getitem__": lambda _, index: torch.eye(9)[index].to_sparse()})
    (batch,) = direct(data).read(Ticket(0, (0,)))
    assert batch.is_sparse
    assert batch.shape == (4, 9)
