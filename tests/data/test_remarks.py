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
from trainkit.data.splits import remarks

_GLOBAL, _OLD = np.random.default_rng(0), np.random.RandomState(0)


class Noisy(Dataset[int]):
    notes = ("3 rows are left out",)

    def __init__(self, **parts: Any) -> None:
        self.parts = parts

    def __getitem__(self, index: int) -> int:
        return index + int(_GLOBAL.integers(3))


def test_generators_that_a_dataset_and_its_functions_hold_at_any_depth_are_named() -> None:
    transforms = [partial(max, key=random.Random(0)), lambda x, r=_OLD: x]
    noisy = Subset(Noisy(rng=torch.Generator(), others=transforms), [0])
    hooks = DataHooks(collate=UserCollate(function=partial(sorted, key=random.Random(0)), name="x"))
    found = [text.partition(" that no key")[0] for text in remarks([noisy, Stream(source=[1], num_samples=1)], hooks)]
    kinds = (
        "torch._C.Generator",
        "random.Random",
        "numpy.random.mtrand.RandomState",
        "numpy.random._generator.Generator",
    )
    assert {*found} == {*(f"Subset holds a {kind}" for kind in kinds), "partial holds a random.Random"}


def test_the_generators_of_the_process_are_keyed_and_not_named() -> None:
    keyed = Noisy(torch=torch.default_generator, numpy=np.random.mtrand._rand, python=random.random)
    found = remarks([keyed, keyed])
    assert [text.partition(" that no key")[0] for text in found] == [
        "3 rows are left out", "Noisy holds a numpy.random._generator.Generator",
    ]  # fmt: skip
