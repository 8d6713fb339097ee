"""An evaluation that counts a sample twice or never on some number of ranks is caught here alone."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
import torch

from tests.data.samples import CPU, InMemorySquares, Noisy, Squares
from trainkit.config.sections import LoaderConfig as LoaderSettings
from trainkit.data.hooks import Reading
from trainkit.data.reading.loader import EvalBatches, num_eval_batches
from trainkit.numerics.precision import Precision
from trainkit.objectives.regression import Regression
from trainkit.strategies.base import LocalModel
from trainkit.strategies.collectives import LocalCollective
from trainkit.trainer.evaluate import evaluate


def batches(dataset: Any, rank: int = 0, num_ranks: int = 1, *, together: bool = False, **settings: Any) -> EvalBatches:
    reading = Reading(device=CPU, settings=LoaderSettings(**settings))
    return EvalBatches(dataset, reading, batch_size=4, rank=rank, num_ranks=num_ranks, together=together)


PATHS = [
    pytest.param(InMemorySquares, {}, id="memory"),
    pytest.param(Squares, {}, id="direct"),
    pytest.param(Squares, {"cache": True}, id="cached"),
    pytest.param(Squares, {"num_workers": 1}, id="workers"),
]


@pytest.mark.parametrize(("dataset", "settings"), PATHS)
def test_each_sample_comes_exactly_once_over_all_ranks(
    dataset: type[InMemorySquares | Squares], settings: dict[str, Any]
) -> None:
    seen = [[targets.tolist() for _, targets in batches(dataset(10), rank, 3, **settings)] for rank in range(3)]

    assert seen == [[[0, 1, 4, 9]], [[16, 25, 36, 49]], [[64, 81]]]


def test_it_has_the_same_random_samples_each_time_and_a_length() -> None:
    both = batches(Noisy(10))
    assert [x.tolist() for x, _ in both] == [x.tolist() for x, _ in both]
    assert len(list(both)) == len(both) == num_eval_batches(10, 4) == 3


@pytest.mark.parametrize(("dataset", "settings"), PATHS)
def test_what_a_model_writes_into_its_inputs_is_not_in_the_next_evaluation(
    dataset: type[InMemorySquares | Squares], settings: dict[str, Any]
) -> None:
    found = batches(dataset(9), **settings)
    seen = []
    for _ in range(2):
        for batch in found:
            seen.append(batch[0].flatten().tolist())
            batch[0].zero_()
    assert seen[: len(seen) // 2] == seen[len(seen) // 2 :] == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]


def test_a_rank_without_batches_gets_none() -> None:
    assert list(batches(Squares(3), rank=1, num_ranks=2, num_workers=1)) == []


def test_stopping_early_leaves_no_process() -> None:
    running = iter(batches(Squares(10), num_workers=1))
    next(running)
    assert isinstance(running, Generator)
    running.close()


@pytest.mark.parametrize(("dataset", "settings"), PATHS)
def test_ranks_that_compute_together_get_equally_many_batches_and_count_their_own(
    dataset: type[InMemorySquares | Squares], settings: dict[str, Any]
) -> None:
    ranks = [batches(dataset(6), rank, 3, together=True, **settings) for rank in range(3)]
    assert [one.num_counted for one in ranks] == [1, 1, 0]
    seen = [[targets.tolist() for _, targets in one] for one in ranks]
    assert seen == [[[0, 1, 4, 9]], [[16, 25]], [[0, 1, 4, 9]]]


def test_a_repeated_batch_is_run_and_not_counted() -> None:
    ran = []
    model = torch.nn.Linear(1, 1)
    model.register_forward_hook(lambda *_: ran.append(1))
    local = LocalModel(model=model, device=CPU, data_ranks=LocalCollective(), precision=Precision())
    once = [(torch.ones(2, 1), torch.zeros(2, 1))]
    repeated = [*once, (torch.ones(2, 1), torch.full((2, 1), 1000.0))]
    expected = evaluate(local, Regression(), once, split="val")

    assert evaluate(local, Regression(), repeated, split="val", num_counted=1) == expected
    assert len(ran) == 3
