"""Reading that draws from, or reseeds, the generators of the training is caught here alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.data.samples import CPU, Noisy, make_loader
from trainkit.config.sections import LoaderConfig as LoaderSettings
from trainkit.data.hooks import Reading
from trainkit.data.reading.iterable import Stream
from trainkit.data.reading.loader import EvalBatches
from trainkit.errors import DataError
from trainkit.numerics.batch import Ticket


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
