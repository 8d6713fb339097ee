"""A random generator inside a dataset, which breaks repeatable samples unseen, is caught here alone."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Subset

from trainkit.data.hooks import DataHooks, UserCollate
from trainkit.data.reading.iterable import Stream
from trainkit.data.splits import own_generators, remarks

_GLOBAL, _OLD = np.random.default_rng(0), np.random.RandomState(0)


class Noisy(Dataset[int]):
    notes = ("3 rows are left out",)

    def __init__(self, **parts: Any) -> None:
        self.parts = parts

    def __getitem__(self, index: int) -> int:
        return index + int(_GLOBAL.integers(3))


def test_a_generator_that_a_dataset_holds_at_any_depth_is_named() -> None:
    transforms = [partial(max, key=random.Random(0)), lambda x, r=_OLD: x]
    found = own_generators(Subset(Noisy(rng=torch.Generator(), others=transforms), [0]))
    assert {text.removeprefix("Subset.dataset.parts") for text in found} == {
        "['rng']", "['others'][0]['key']", "['others'][1][0]", f"{__name__}._GLOBAL",
    }  # fmt: skip


def test_the_generators_of_the_process_are_keyed_and_not_named() -> None:
    keyed = Noisy(torch=torch.default_generator, numpy=np.random.mtrand._rand, python=random.random)
    assert [*own_generators(keyed)] == [f"{__name__}._GLOBAL"]


def test_remarks_are_the_notes_of_the_data_and_its_generators_once_each() -> None:
    noisy = Noisy()
    hooks = DataHooks(collate=UserCollate(function=partial(sorted, key=random.Random(0)), name="x"))
    found = remarks([noisy, noisy, Stream(source=[1], num_samples=1)], hooks)
    named = [text.partition(" is a generator")[0] for text in found]
    assert named == ["3 rows are left out", f"{__name__}._GLOBAL", "partial['key']"]
