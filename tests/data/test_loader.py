"""A step that reads the samples of another step, epoch or rank, or a draw of the training's, is caught here alone."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from threading import Lock
from typing import Any

import numpy as np
import pytest
import torch

from tests.data.samples import CPU, InMemorySquares, Noisy, Squares, all_batches, make_loader
from trainkit.config.sections import LoaderConfig as LoaderSettings
from trainkit.data.hooks import DataHooks, Reading, UserCollate
from trainkit.data.reading.iterable import Stream
from trainkit.data.reading.loader import EvalBatches, Loader, Source
from trainkit.errors import ConfigError, DataError
from trainkit.numerics.batch import BatchPlan, SampleOrder, Ticket

PATHS = [
    pytest.param(InMemorySquares, {}, id="memory"),
    pytest.param(Squares, {"cache": True}, id="cached"),
    pytest.param(Squares, {}, id="direct"),
    pytest.param(InMemorySquares, {"cache": False}, id="uncached"),
    pytest.param(Squares, {"num_workers": 1}, id="workers"),
]


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
    own = [all_batches(loader, range(3), (rank,)) for rank, loader in enumerate(loaders)]
    assert sorted(sample for rank in own for step in rank for sample in step) == list(range(9))


@pytest.mark.parametrize(("dataset", "settings"), PATHS)
def test_each_shard_is_a_batch_of_its_own_also_retried_out_of_plan_and_out_of_turn(
    dataset: type[InMemorySquares | Squares], settings: dict[str, Any]
) -> None:
    loader = make_loader(dataset(9), shuffle=False, **settings)
    steps = ((0, (0, 1)), (1, (1,)), (1, (0, 1)), (1, (0, 1)), (0, (1, 0)), (2, ()))
    batches = [loader.fetch(Ticket(step, shards)) for step, shards in steps]
    loader.close()
    found = [[targets.tolist() for _, targets in step] for step in batches]
    assert found == [[[0, 1], [4, 9]], [[36, 49]], *[[[16, 25], [36, 49]]] * 2, [[4, 9], [0, 1]], []]
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
    whole: dict[tuple[int, int], set[tuple[float, float]]] = {}
    for start in (0, 4):
        loader = make_loader(Noisy(9), **settings)
        for step in range(start, 6):
            shards = (0, 1) if step % 3 != 2 else (0,)
            for batch in loader.fetch(Ticket(step, shards)):
                for value, target in zip(batch[0].flatten().tolist(), batch[1].tolist(), strict=True):
                    whole.setdefault((step // 3, int(value)), set()).add((value, target))
        loader.close()

    assert len(whole) == 18
    assert all(len(seen) == 1 for seen in whole.values())
    assert whole[0, 3] != whole[1, 3]


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
    ("name", "result", "said"),
    [
        ("__getitems__", [(torch.zeros(1), 0)], "a list of 1 for 4 indices"),
        ("__getitems__", {"x": [0] * 4}, "a dict of 1 for 4 indices"),
        ("gather", (torch.zeros(3, 1), torch.zeros(3)), r"float32 \(3, 1\) for 4 samples"),
        ("tensors", (np.zeros((9, 1)), np.zeros(9)), "float64 .* torch.from_numpy"),
    ],
)
def test_a_method_that_gives_other_samples_than_asked_for_is_named(name: str, result: Any, said: str) -> None:
    dataset = Squares(9)
    setattr(dataset, name, lambda *_: result)
    if name == "__getitems__":
        dataset.__class__ = type("Many", (Squares,), {name: lambda *_: result})
    with pytest.raises(DataError, match=rf"{name}\b.* gives {said}"):
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
    ("act", "kind", "said"),
    [
        (lambda: torch.ones(1, requires_grad=True) * 2, DataError, "cannot send its batch.* detach"),
        (Lock, DataError, "cannot send its batch: TypeError: cannot pickle '_thread.lock' object"),
        (Unsendable, RuntimeError, "unable to allocate shared memory"),
        (leave, RuntimeError, r"has ended: pid \d+ by SIGKILL, .* a lower loader.num_workers needs less"),
    ],
)
def test_a_worker_that_ends_or_cannot_send_is_an_error_instead_of_a_wait(
    act: Callable[[], Any], kind: type[Exception], said: str
) -> None:
    hooks = DataHooks(collate=UserCollate(function=lambda samples: [x for x, _ in samples], name="keep"))
    reading = Reading(device=CPU, settings=LoaderSettings(num_workers=1, cache=False), hooks=hooks, seed=0)
    source = Source(Ending(act), reading, trains=False)
    with pytest.raises(kind, match=said):
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


def read(dataset: Any, *, steps: range = range(3), **settings: Any) -> list[Any]:
    loader = make_loader(dataset, **settings)
    found = [loader.fetch(Ticket(step, (0,))) for step in steps]
    loader.close()
    return [part.tolist() for batches in found for batch in batches for part in batch]


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
