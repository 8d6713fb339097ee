"""A step that reads the samples of another step, epoch or rank, or a draw of the training's, is caught here alone.

An item of a stream at another position after a resume or a step back, or a file that two ranks or none read too.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.data.samples import CPU, PATHS, InMemorySquares, Noisy, Numbered, Squares, all_batches, make_loader
from trainkit.config.sections import LoaderConfig as LoaderSettings
from trainkit.data.hooks import DataHooks, Reading, UserCollate
from trainkit.data.reading.iterable import DealtOrder, Stream
from trainkit.data.reading.loader import EvalBatches, Loader, Source
from trainkit.data.sets.json_lines import JsonLines
from trainkit.errors import ConfigError, DataError, MissingExtraError
from trainkit.numerics.batch import BatchPlan, SampleOrder, Ticket, shards_of_rank
from trainkit.numerics.randomness import sample_key


@pytest.mark.parametrize(("dataset", "settings"), PATHS)
def test_every_path_gives_the_samples_of_the_order_from_any_step(
    dataset: type[InMemorySquares | Squares], settings: dict[str, Any]
) -> None:
    order = SampleOrder(num_samples=9, seed=7)
    expected = [order.indices(e, k * 4, min(k * 4 + 4, 9)).tolist() for e in range(3) for k in range(3)]
    assert all_batches(make_loader(dataset(9), **settings), range(9)) == expected
    assert all_batches(make_loader(dataset(9), **settings), range(4, 9)) == expected[4:]


@pytest.mark.parametrize(("dataset", "settings"), PATHS)
def test_ranks_share_an_epoch_without_overlap(
    dataset: type[InMemorySquares | Squares], settings: dict[str, Any]
) -> None:
    loaders = [make_loader(dataset(9), rank=rank, num_ranks=2, **settings) for rank in (0, 1)]
    samples = [all_batches(loader, range(3), (rank,)) for rank, loader in enumerate(loaders)]
    assert sorted(sample for rank in samples for step in rank for sample in step) == list(range(9))


@pytest.mark.parametrize(("dataset", "settings"), PATHS)
def test_each_shard_is_a_batch_of_its_own_also_retried_out_of_plan_and_out_of_turn(
    dataset: type[InMemorySquares | Squares], settings: dict[str, Any]
) -> None:
    loader = make_loader(dataset(9), shuffle=False, **settings)
    steps = ((0, (0, 1)), (1, (1,)), (1, (0, 1)), (1, (0, 1)), (0, (1, 0)), (2, ()))
    batches = [loader.fetch(Ticket(step, shards)) for step, shards in steps]
    loader.close()
    per_step = [[targets.tolist() for _, targets in step] for step in batches]
    assert per_step == [[[0, 1], [4, 9]], [[36, 49]], *[[[16, 25], [36, 49]]] * 2, [[4, 9], [0, 1]], []]
    for inputs, targets in (batch for step in batches for batch in step):
        assert targets.dtype == torch.int64
        assert (inputs.flatten() ** 2).tolist() == targets.tolist()


@pytest.mark.parametrize("rank", [0, 1])
def test_batches_that_are_cut_from_a_block_are_those_of_the_order_and_aligned(rank: int) -> None:
    loader = make_loader(InMemorySquares(75), rank=rank, num_ranks=2, global_size=32, micro_size=16)
    order = SampleOrder(num_samples=75, seed=7)
    for step in (0, 1, 3, 4, 4, 3):  # the last two were taken before
        (batch,) = loader.fetch(Ticket(step, (rank,)))
        start = step % 3 * 32 + rank * 16
        assert batch[0].flatten().tolist() == order.indices(step // 3, start, start + 16).tolist()
        assert [part.data_ptr() % 64 for part in batch] == [0, 0]


def test_what_user_code_does_to_a_batch_changes_no_other_batch() -> None:
    loader = make_loader(InMemorySquares(64), shuffle=False, global_size=32, micro_size=32)
    (first,), (second,) = (loader.fetch(Ticket(step, (0,))) for step in (0, 1))
    changes = second[0]._version

    first[0].requires_grad_().data.zero_()
    first[1].zero_()
    (again,) = loader.fetch(Ticket(0, (0,)))

    assert again[0].flatten().tolist() == list(range(32))
    assert again[1].tolist() == [number**2 for number in range(32)]
    assert (second[0]._version, second[1]._version, again[0].requires_grad) == (changes, changes, False)


@pytest.mark.parametrize("settings", [{}, {"num_workers": 2}], ids=["direct", "workers"])
def test_augmentation_depends_on_seed_epoch_and_sample_only(settings: dict[str, Any]) -> None:
    draws: dict[tuple[int, int], set[tuple[float, float]]] = {}
    for start in (0, 4):
        loader = make_loader(Noisy(9), **settings)
        for step in range(start, 6):
            shards = (0, 1) if step % 3 != 2 else (0,)
            for batch in loader.fetch(Ticket(step, shards)):
                for value, target in zip(batch[0].flatten().tolist(), batch[1].tolist(), strict=True):
                    draws.setdefault((step // 3, int(value)), set()).add((value, target))
        loader.close()

    assert len(draws) == 18
    assert all(len(pairs) == 1 for pairs in draws.values())
    assert draws[0, 3] != draws[1, 3]


def test_random_samples_cannot_be_cached() -> None:
    with pytest.raises(ConfigError, match=r"loader.cache=true: the samples of Noisy are random"):
        make_loader(Noisy(9), cache=True)


def test_pinning_without_cuda_and_an_empty_dataset_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"loader.pin_memory=true: pinned memory is for copies to a CUDA device"):
        make_loader(Squares(9), pin_memory=True)
    plan, reading = (
        BatchPlan(num_samples=1, global_size=1, micro_size=1),
        Reading(device=CPU, settings=LoaderSettings()),
    )
    with pytest.raises(DataError, match=r"^Squares is empty: it has no samples to train on\.$"):
        Loader(Squares(0), plan=plan, shards_at=lambda _: (0,), num_steps=1, reading=reading)


class Broken(Squares):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, float]:
        if index == 5:
            raise OSError("disk gone")
        return super().__getitem__(index)


@pytest.mark.parametrize("settings", [{}, {"num_workers": 1}], ids=["direct", "workers"])
def test_a_sample_that_cannot_be_read_is_named(settings: dict[str, Any]) -> None:
    loader = make_loader(Broken(9), shuffle=False, **settings)
    loader.fetch(Ticket(0, (0, 1)))

    with pytest.raises(DataError, match=r"^sample 5 cannot be read: OSError: disk gone$"):
        loader.fetch(Ticket(1, (0, 1)))
    loader.close()


@pytest.mark.parametrize(
    ("name", "result", "text"),
    [
        ("__getitems__", [(torch.zeros(1), 0)], "a list of 1 for 4 indices"),
        ("__getitems__", {"x": [0] * 4}, "a dict of 1 for 4 indices"),
        ("gather", (torch.zeros(3, 1), torch.zeros(3)), r"float32 \(3, 1\) for 4 samples"),
        ("tensors", (np.zeros((9, 1)), np.zeros(9)), "float64 .* torch.from_numpy"),
    ],
)
def test_a_method_that_gives_other_samples_than_asked_for_is_named(name: str, result: Any, text: str) -> None:
    dataset = Squares(9)
    setattr(dataset, name, lambda *_: result)
    if name == "__getitems__":
        dataset.__class__ = type("Many", (Squares,), {name: lambda *_: result})
    with pytest.raises(DataError, match=rf"{name}\b.* gives {text}"):
        make_loader(dataset).fetch(Ticket(0, (0, 1)))


class Unsendable:
    """A sample that fails when it is pickled."""

    def __reduce__(self) -> Any:
        raise RuntimeError("unable to allocate shared memory(shm) for file </torch_1_2_3>: No space left on device")


class Ending:
    """A dataset of which the second batch cannot be sent by its worker, or ends the worker."""

    def __init__(self, act: Callable[[], Any]) -> None:
        self.act = act

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return torch.ones(1) if index < 4 else self.act(), index


def leave() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("act", "kind", "text"),
    [
        (lambda: torch.ones(1, requires_grad=True) * 2, DataError, "cannot send its batch.* detach"),
        (Lock, DataError, "cannot send its batch: TypeError: cannot pickle '_thread.lock' object"),
        (Unsendable, RuntimeError, "unable to allocate shared memory"),
        (leave, RuntimeError, r"has ended: pid \d+ by SIGKILL, .* a lower loader.num_workers needs less"),
    ],
)
def test_a_worker_that_ends_or_cannot_send_is_an_error_instead_of_a_wait(
    act: Callable[[], Any], kind: type[Exception], text: str
) -> None:
    hooks = DataHooks(collate=UserCollate(function=lambda samples: [x for x, _ in samples], name="keep"))
    reading = Reading(device=CPU, settings=LoaderSettings(num_workers=1, cache=False), hooks=hooks, seed=0)
    source = Source(Ending(act), reading, trains=False)
    with pytest.raises(kind, match=text):
        list(source.ahead(iter([(0, np.arange(4), [4], None), (0, np.arange(4, 6), [2], None)])))


@pytest.mark.slow
def test_a_worker_that_is_stopped_by_a_signal_ends_with_the_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.2)
    loader = make_loader(Squares(9), num_workers=1)
    loader.fetch(Ticket(0, (0, 1)))
    (worker,) = multiprocessing.active_children()
    os.kill(worker.pid or 0, signal.SIGSTOP)
    loader.close()
    assert worker.exitcode == -signal.SIGKILL


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
    values: list[float] = source.fetch(Ticket(step, (0,)))[0].flatten().tolist()
    return values


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


class NoisyStream:
    """Items with noise of all three generators."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, float]]:
        for index in range(10):
            yield torch.rand(1) + index, random.random() + np.random.random()  # noqa: NPY002


class Gathered:
    """Gives many samples at once, and draws while it does."""

    def __len__(self) -> int:
        return 10

    def gather(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.rand(len(indices)), indices


def states() -> tuple[Any, ...]:
    numpys: Any = np.random.get_state()  # noqa: NPY002
    return torch.default_generator.get_state().tolist(), random.getstate(), numpys[1].tolist()


class OneNoisy(Squares):
    """Only sample 8 draws."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, float]:
        return torch.zeros(1), torch.rand(1).item() if index == 8 else float(index)


def test_a_draw_in_the_last_of_some_batches_that_are_read_together_is_that_of_its_sample() -> None:
    loader = make_loader(OneNoisy(9), shuffle=False, micro_size=4)
    *exact, (drawn,) = [loader.fetch(Ticket(step, (0,)))[0][1].tolist() for step in range(3)]
    assert exact == [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]]
    assert drawn == torch.rand(1, generator=torch.Generator().manual_seed(sample_key(7, 0, 8))).item()


def read(dataset: Any, *, steps: range = range(3), **settings: Any) -> list[Any]:
    loader = make_loader(dataset, **settings)
    fetched = [loader.fetch(Ticket(step, (0,))) for step in steps]
    loader.close()
    return [part.tolist() for batches in fetched for batch in batches for part in batch]


@pytest.mark.parametrize("dataset", [Noisy(), Stream(source=NoisyStream(), num_samples=10)], ids=["map", "stream"])
def test_reading_leaves_the_generators_of_the_training_alone(dataset: Any) -> None:
    before = states()
    read(dataset)
    list(EvalBatches(dataset, Reading(device=CPU, settings=LoaderSettings()), batch_size=4, rank=0, num_ranks=1))
    assert states() == before


def test_a_stream_draws_by_position_whatever_was_drawn_before() -> None:
    stream = Stream(source=NoisyStream(), num_samples=10)
    once = read(stream)
    torch.rand(3)
    assert read(stream) == once
    assert read(stream, steps=range(1, 3)) == once[2:]


def test_a_dataset_that_draws_while_it_gathers_is_refused() -> None:
    with pytest.raises(DataError, match=r"draws random numbers in gather, .* Use loader\.cache=false"):
        read(Gathered())


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
        self.position = 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        while self.position < self.count:
            self.position += 1
            self.reads += 1
            yield self.epoch * 100 + self.position - 1, 0
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def items(loader: Loader, step: int, shards: tuple[int, ...] = (0, 1)) -> list[list[int]]:
    return [batch[0].tolist() for batch in loader.fetch(Ticket(step, shards))]


def test_a_source_that_goes_on_where_it_stands_is_read_from_its_begin_where_an_epoch_or_an_evaluation_begins() -> None:
    stream = Stream(source=SavedLines(12), num_samples=10)
    stream[3]  # to look at one sample
    batches = EvalBatches(stream, READING, batch_size=5, rank=0, num_ranks=1)
    for _ in range(2):
        assert [batch[0].tolist() for batch in batches] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    values = [int(number) for batches in all_batches(make_loader(stream), range(6)) for number in batches]
    assert [number for number in values if number] == [*range(1, 10), *range(100, 110)]  # a label is 0


def test_each_shard_is_read_by_position_and_going_back_starts_the_epoch_again() -> None:
    loader = make_loader(Stream(source=Lines(), num_samples=10))
    assert items(loader, 0) == [[0, 1], [2, 3]]
    assert items(loader, 1, (1,)) == [[6, 7]]
    assert items(loader, 0) == [[0, 1], [2, 3]]
    assert items(loader, 2, (0,)) == [[8, 9]]
    assert items(loader, 3, (1, 0)) == [[102, 103], [100, 101]]


@pytest.mark.parametrize(
    ("source", "reads", "way"),
    [(SavedLines, 4, "from its own state, at sample 4 of epoch 0"), (Lines, 8, "found by skipping from the start of")],
)
def test_a_source_resumes_from_its_state_or_by_skipping_and_says_so(source: type[Lines], reads: int, way: str) -> None:
    first = make_loader(Stream(source=source(), num_samples=10))
    items(first, 0)
    second = make_loader(Stream(source=(resumed := source()), num_samples=10))
    assert way in str(second.load_state(first.state()))
    assert items(second, 1) == [[4, 5], [6, 7]]
    assert resumed.reads == reads


def test_a_source_that_ends_early_and_worker_processes_are_refused() -> None:
    with pytest.raises(DataError, match=r"^Lines ended after 3 samples, but num_samples=10\.$"):
        items(make_loader(Stream(source=Lines(3), num_samples=10)), 0)
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


def loader_of(
    source: Any, *, rank: int = 0, num_ranks: int = 1, micro_size: int = 2, count: int | None = None, **settings: Any
) -> Loader:
    """A loader of steps of 4 samples."""
    stream = Stream(source=source, num_samples=count or sum(source.sizes), **{"distribute": "files", **settings})
    plan = BatchPlan(num_samples=len(stream), global_size=4, micro_size=micro_size)
    return Loader(
        stream, plan=plan, shards_at=lambda step: shards_for(plan, step, rank, num_ranks),
        num_steps=3 * plan.steps_per_epoch, reading=Reading(device=CPU, settings=LoaderSettings(), seed=7),
    )  # fmt: skip


def shards_for(plan: BatchPlan, step: int, rank: int, num_ranks: int) -> tuple[int, ...]:
    return shards_of_rank(plan.num_shards(step), rank=rank, num_ranks=num_ranks, lanes=None)


def dealt(loader: Loader, step: int, shards: tuple[int, ...]) -> list[int]:
    return [number for batch in loader.fetch(Ticket(step, shards)) for number in batch[0].tolist()]


@pytest.mark.parametrize("sizes", [(6, 4), (1, 2, 3, 4), (13,), (5, 0, 6), (2, 2, 2, 2, 2, 2, 2, 3)])
@pytest.mark.parametrize(("num_ranks", "micro_size"), [(1, 4), (2, 2), (3, 1), (4, 1)])
def test_each_sample_is_read_once_an_epoch(sizes: tuple[int, ...], num_ranks: int, micro_size: int) -> None:
    plan = BatchPlan(num_samples=sum(sizes), global_size=4, micro_size=micro_size)
    samples = []
    for rank in range(num_ranks):
        loader = loader_of(Numbered(*sizes), rank=rank, num_ranks=num_ranks, micro_size=micro_size)
        for step in range(plan.steps_per_epoch, 2 * plan.steps_per_epoch):
            samples += dealt(loader, step, shards_for(plan, step, rank, num_ranks))
    assert sorted(samples) == list(range(sum(sizes)))


def test_a_rank_opens_the_files_of_its_shards_alone_and_each_once_an_epoch() -> None:
    opened = []
    for rank in (0, 1):
        source = Numbered(4, 4, 4, 4)
        loader = loader_of(source, rank=rank, num_ranks=2)
        for step in range(4):
            dealt(loader, step, (rank,))
        opened.append(source.opened)
    assert opened == [["part-0", "part-1"], ["part-2", "part-3"]]


def test_a_shard_holds_the_same_samples_on_any_number_of_ranks() -> None:
    alone = loader_of(Numbered(5, 3, 9), micro_size=1)
    apart = [loader_of(Numbered(5, 3, 9), rank=rank, num_ranks=4, micro_size=1) for rank in range(4)]
    for step in range(4):
        shards = (0, 1, 2, 3)
        expected = dealt(alone, step, shards)
        assert [number for rank in shards for number in dealt(apart[rank], step, (rank,))] == expected


def test_a_run_resumes_in_the_middle_on_another_number_of_ranks() -> None:
    samples = []
    for step in range(2):
        for rank in (0, 1):
            samples += dealt(loader_of(Numbered(7, 9), rank=rank, num_ranks=2, micro_size=1), step, (rank, rank + 2))
    first = loader_of(Numbered(7, 9), micro_size=1)
    dealt(first, 1, (0,))
    for rank in range(4):
        loader = loader_of(Numbered(7, 9), rank=rank, num_ranks=4, micro_size=1)
        assert loader.load_state(first.state()) == (
            "each shard reads the same files of the stream as before; each part continues inside its file"
        )
        for step in (2, 3):
            samples += dealt(loader, step, (rank,))
    assert sorted(samples) == list(range(16))


@pytest.mark.parametrize("distribute", ["files", "auto"])  # auto: two files for four shards are read as samples
def test_another_cut_inside_an_epoch_is_refused_and_at_its_end_accepted(distribute: str) -> None:
    first = loader_of(Numbered(8, 8), micro_size=2)
    dealt(first, 1, (0, 1))
    inside = first.state()
    with pytest.raises(ConfigError, match=r"into 4 shards, .* began with 2\. .* Give batch\.micro_size=2"):
        loader_of(Numbered(8, 8), micro_size=1, distribute=distribute).load_state(inside)
    other = loader_of(Numbered(8, 8), micro_size=1, distribute="auto")
    dealt(other, 1, (0, 1, 2, 3))
    with pytest.raises(ConfigError, match=r"another number of\. .* Give batch\.micro_size as before"):
        loader_of(Numbered(8, 8), micro_size=2).load_state(other.state())
    dealt(first, 3, (0, 1))
    loader_of(Numbered(8, 8), micro_size=1).load_state(first.state())


@pytest.mark.parametrize(("surplus", "text"), [(-1, "ended after 3 samples, but .* 4"), (1, "more than the 4 samples")])
def test_a_file_of_another_size_is_an_error(surplus: int, text: str) -> None:
    with pytest.raises(DataError, match=f"part-0 .*{text}"):
        loader_of(Numbered(4, 4, surplus=surplus), micro_size=4).fetch(Ticket(0, (0,)))


def test_more_samples_than_the_files_have_and_a_source_without_files_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.num_samples=9: is more than the 8 samples"):
        loader_of(Numbered(4, 4), count=9)
    with pytest.raises(ConfigError, match=r"data\.distribute=files: needs a source with files"):
        Stream(source=[1, 2], num_samples=2, distribute="files")


@pytest.mark.parametrize(
    ("distribute", "sizes", "kind"),
    [
        ("samples", (4, 4, 4, 4), SampleOrder),
        ("files", (16,), DealtOrder),
        ("auto", (8, 8), DealtOrder),
        ("auto", (16,), SampleOrder),
    ],
)
def test_auto_deals_files_where_each_shard_can_have_one(distribute: Any, sizes: tuple[int, ...], kind: type) -> None:
    stream = Stream(source=Numbered(*sizes), num_samples=16, distribute=distribute)
    plan = BatchPlan(num_samples=16, global_size=4, micro_size=2)
    assert type(stream.order(plan)) is kind


def test_looking_for_files_counts_no_lines(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"broken")
    stream = Stream(source=JsonLines(path=str(tmp_path / "a.jsonl")), num_samples=1, distribute="auto")
    assert stream.files_for(1) is stream.source
    assert "sizes" not in vars(stream.source)


def lines(*rows: object) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def source(path: Path, *lines: str) -> JsonLines:
    path.write_text("\n".join(lines), encoding="utf-8")
    return JsonLines(path=str(path))


def test_a_field_has_the_dtype_of_its_first_line(tmp_path: Path) -> None:
    lines = ('\ufeff{"x": [1.5], "y": 1, "z": [[1]], "w": 2.0}', "", '{"x": [1, 2], "y": 2, "z": [], "w": 3}')
    first, second = source(tmp_path / "a.jsonl", *lines)
    assert [sample["x"].dtype for sample in (first, second)] == [np.float32, np.float32]
    assert [sample["z"].dtype for sample in (first, second)] == [np.int64, np.int64]
    assert [sample["w"] for sample in (first, second)] == [2.0, 3.0]
    assert isinstance(second["w"], float)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"x": [1.5]}', "line 3 of FILE: x holds decimal places, and the first line of all files has whole numbers"),
        ('{"x": [[1], [1, 2]]}', "line 3 of FILE: x holds lists of several lengths."),
        ("[1]", "line 3 of FILE is not a JSON object."),
        ("{", "line 3 of FILE is not JSON: "),
    ],
)
def test_a_line_that_differs_is_refused_by_its_number_in_the_file(line: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        list(source(tmp_path / "a.jsonl", '{"x": [1]}', "", line))
    assert message.replace("FILE", str(tmp_path / "a.jsonl")) in str(caught.value)


def test_json_lines_reads_local_files_by_pattern(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_bytes(lines({"x": [3, 4], "y": 1}) + b"\n")
    (tmp_path / "a.jsonl").write_bytes(lines({"x": [0.5, 2], "y": 0}, {"x": [1.0, 2], "y": 1}).rstrip())
    source = JsonLines(path=str(tmp_path / "*.jsonl"))
    assert [Path(file).name for file in source.files] == ["a.jsonl", "b.jsonl"]
    assert source.sizes == (2, 1)
    samples = list(source)
    assert [sample["y"] for sample in samples] == [0, 1, 1]
    assert [sample["x"].dtype.name for sample in samples] == ["float32", "float32", "float32"]


def test_json_lines_reads_the_memory_of_fsspec() -> None:
    fsspec = pytest.importorskip("fsspec", reason="the extra remote is not installed")
    with fsspec.open("memory://dealt/a.jsonl", "wb") as file:
        file.write(lines({"y": 1}, {"y": 2}))
    source = JsonLines(path="memory://dealt/*.jsonl", num_samples=[2])
    assert [sample["y"] for file in source.files for sample in source.read(file)] == [1, 2]


def test_without_fsspec_the_install_line_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(MissingExtraError, match=r"data\.source\.path: needs the package fsspec\. Install it:"):
        next(iter(JsonLines(path="s3://bucket/a.jsonl")))
