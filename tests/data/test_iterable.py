"""A stream that gives the items of another position after a resume, a step back or an evaluation is caught here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.data.samples import CPU, all_batches, make_loader
from trainkit.config.sections import LoaderConfig as LoaderSettings
from trainkit.data.hooks import Reading
from trainkit.data.reading.iterable import Stream
from trainkit.data.reading.loader import EvalBatches, Loader
from trainkit.errors import ConfigError, DataError
from trainkit.numerics.batch import Ticket

READING = Reading(device=CPU, settings=LoaderSettings())


class Lines:
    """Gives (epoch * 100 + i, 0); counts what is read."""

    def __init__(self, count: int = 10) -> None:
        self.count, self.epoch, self.reads = count, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[int, int]]:
        for index in range(self.count):
            self.reads += 1
            yield self.epoch * 100 + index, 0


class SavedLines(Lines):
    """The same with a place it can return to."""

    def __init__(self, count: int = 10) -> None:
        super().__init__(count)
        self.at = 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        while self.at < self.count:
            self.at += 1
            self.reads += 1
            yield self.epoch * 100 + self.at - 1, 0
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def numbers(loader: Loader, step: int, shards: tuple[int, ...] = (0, 1)) -> list[list[int]]:
    return [batch[0].tolist() for batch in loader.fetch(Ticket(step, shards))]


def test_a_source_that_goes_on_where_it_stands_is_read_from_its_begin_where_an_epoch_or_an_evaluation_begins() -> None:
    stream = Stream(source=SavedLines(12), num_samples=10)
    stream[3]  # to look at one sample
    batches = EvalBatches(stream, READING, batch_size=5, rank=0, num_ranks=1)
    for _ in range(2):
        assert [batch[0].tolist() for batch in batches] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    read = [int(number) for batches in all_batches(make_loader(stream), range(6)) for number in batches]
    assert [number for number in read if number] == [*range(1, 10), *range(100, 110)]  # a label is 0


def test_each_shard_is_read_by_position_and_going_back_starts_the_epoch_again() -> None:
    loader = make_loader(Stream(source=Lines(), num_samples=10))
    assert numbers(loader, 0) == [[0, 1], [2, 3]]
    assert numbers(loader, 1, (1,)) == [[6, 7]]
    assert numbers(loader, 0) == [[0, 1], [2, 3]]
    assert numbers(loader, 2, (0,)) == [[8, 9]]
    assert numbers(loader, 3, (1, 0)) == [[102, 103], [100, 101]]


@pytest.mark.parametrize(
    ("source", "reads", "way"),
    [(SavedLines, 4, "from its own state, at sample 4 of epoch 0"), (Lines, 8, "found by skipping from the start of")],
)
def test_a_source_resumes_from_its_state_or_by_skipping_and_says_so(source: type[Lines], reads: int, way: str) -> None:
    first = make_loader(Stream(source=source(), num_samples=10))
    numbers(first, 0)
    second = make_loader(Stream(source=(resumed := source()), num_samples=10))
    assert way in str(second.load_state(first.state()))
    assert numbers(second, 1) == [[4, 5], [6, 7]]
    assert resumed.reads == reads


def test_a_source_that_ends_early_and_worker_processes_are_refused() -> None:
    with pytest.raises(DataError, match=r"^Lines ended after 3 samples, but num_samples=10\.$"):
        numbers(make_loader(Stream(source=Lines(3), num_samples=10)), 0)
    with pytest.raises(ConfigError, match=r"loader.num_workers=2: an iterable dataset is read by the training process"):
        make_loader(Stream(source=Lines(), num_samples=10), num_workers=2)


def test_validation_has_its_own_source_and_is_shared_by_ranks() -> None:
    stream = Stream(source=Lines(), num_samples=10, val_source=Lines(5), val_num_samples=5, split="val")
    shared = [
        [numbers.tolist() for numbers, _ in EvalBatches(stream, READING, batch_size=2, rank=rank, num_ranks=2)]
        for rank in (0, 1)
    ]

    assert shared == [[[0, 1], [4]], [[2, 3]]]
    assert Stream.splits({"val_source": None}) == ("train",)


class Drawn:
    """Gives random numbers."""

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        for _ in range(5):
            yield torch.rand(2), 0


def test_an_evaluation_draws_the_same_numbers_on_any_number_of_ranks() -> None:
    stream = Stream(source=Drawn(), num_samples=5)

    def drawn(rank: int, num_ranks: int) -> list[list[list[float]]]:
        batches = EvalBatches(stream, READING, batch_size=2, rank=rank, num_ranks=num_ranks)
        return [numbers.tolist() for numbers, _ in batches]

    alone = drawn(0, 1)
    assert [drawn(0, 2), drawn(1, 2)] == [alone[::2], alone[1::2]]
