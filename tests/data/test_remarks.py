from __future__ import annotations

import random
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Subset

from trainkit.data.hooks import DataHooks, UserCollate
from trainkit.data.reading.iterable import Stream
from trainkit.data.remarks import own_generators, remarks

_GLOBAL, _OLD = np.random.default_rng(0), np.random.RandomState(0)


class Noisy(Dataset[int]):
    notes = ("3 rows are left out",)

    def __init__(self, **parts: Any) -> None:
        self.parts = parts

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        return index


class WithGlobal(Noisy):
    def __getitem__(self, index: int) -> int:
        return index + int(_GLOBAL.integers(3))


def test_a_generator_that_a_dataset_holds_at_any_depth_is_named() -> None:
    transforms = [partial(max, key=random.Random(0)), lambda x, r=_OLD: x]
    found = own_generators(Subset(Noisy(rng=torch.Generator(), others=transforms), [0]))
    assert list(found) == [
        "Subset.dataset.parts['rng']",
        "Subset.dataset.parts['others'][0]['key']",
        "Subset.dataset.parts['others'][1][0]",
    ]
    assert list(own_generators(WithGlobal())) == [f"{__name__}._GLOBAL"]


def test_the_generators_of_the_process_are_keyed_and_not_named() -> None:
    assert not [*own_generators(Noisy(torch=torch.default_generator, numpy=np.random.mtrand._rand))]
    assert not [*own_generators(Noisy(python=random.random))]


def test_remarks_are_the_notes_of_the_data_and_its_generators_once_each() -> None:
    noisy = Noisy(rng=torch.Generator())
    hooks = DataHooks(collate=UserCollate(function=partial(sorted, key=random.Random(0)), name="x"))
    found = remarks([noisy, noisy, Stream(source=[1], num_samples=1)], hooks)
    assert found[0] == "3 rows are left out"
    assert [text.partition(" is a generator")[0] for text in found[1:]] == [
        "Noisy.parts['rng']",
        "partial['key']",
    ]
