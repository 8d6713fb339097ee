"""A batch that is read ahead and given to another step, read twice, or read past the end is caught here alone."""

import time
from typing import Any

import pytest
import torch

from tests.data.samples import make_loader
from trainkit.data.reading.loader import Loader
from trainkit.errors import DataError
from trainkit.numerics.batch import Ticket

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


def reader_of(dataset: Any) -> Loader:
    return make_loader(dataset, shuffle=False, micro_size=4)  # batches of 4, 4 and 2


def numbers(source: Loader, step: int) -> list[float]:
    found: list[float] = source.fetch(Ticket(step, (0,)))[0].flatten().tolist()
    return found


def test_small_batches_are_read_ahead_over_epochs_and_each_sample_once() -> None:
    data = Numbers()
    source = reader_of(data)
    assert [numbers(source, step) for step in range(NUM_STEPS)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]] * 3
    assert data.read == list(range(10)) * 3


def test_a_batch_is_read_before_its_step_but_none_past_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainkit.data.reading.loader._BURST_S", 60.0)  # a busy machine may pause for longer
    data = Numbers()
    numbers(reader_of(data), 7)
    assert data.read == [4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize("data", [Numbers(delay_s=0.003), Numbers(size=1 << 18)], ids=["slow", "large"])
def test_slow_and_large_batches_are_read_one_at_a_time(data: Numbers) -> None:
    numbers(reader_of(data), 0)
    assert data.read == [0, 1, 2, 3]


def test_a_sample_that_fails_is_read_once_and_its_error_is_raised_in_its_own_step() -> None:
    data = Numbers(broken=6)
    source = reader_of(data)
    assert numbers(source, 0) == [0, 1, 2, 3]
    with pytest.raises(DataError, match="sample 6 cannot be read: ValueError: broken"):
        numbers(source, 1)
    assert data.read == [0, 1, 2, 3, 4, 5, 6]
