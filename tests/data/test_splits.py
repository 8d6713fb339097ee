"""A fold that trains on what it is validated on, or a part with other samples than the whole, is caught here alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.present import present
from trainkit.config.sections import CvConfig
from trainkit.data import splits
from trainkit.data.reading.iterable import Stream
from trainkit.data.sets.images import Digits
from trainkit.data.sets.synthetic import Synthetic, SyntheticTokens
from trainkit.data.splits import Subset, build_splits, fold_of_each, folded, keep_splits, labels_of, splits_of
from trainkit.errors import ConfigError, DataError

HERE = "tests.data.test_splits"


class Read:
    """Squares that are read one by one."""

    classes = ("even", "odd")

    def __init__(self, count: int) -> None:
        self.targets = [number % 2 for number in range(count)]

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.tensor([float(index**2)]), self.targets[index]


class Gathered(Read):
    def gather(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return indices.float().unsqueeze(1) ** 2, indices % 2


def test_every_sample_is_held_out_once_and_trained_on_in_the_other_folds() -> None:
    found = [folded({"train": Read(11)}, CvConfig(folds=3, fold=fold)) for fold in range(3)]
    held = [[int(inputs**0.5) for inputs, _ in parts["val"]] for parts in found]
    assert sorted(index for fold in held for index in fold) == list(range(11))
    for parts, out in zip(found, held, strict=True):
        assert sorted(int(inputs**0.5) for inputs, _ in parts["train"]) == sorted(set(range(11)) - set(out))
    assert sorted(map(len, held)) == [3, 4, 4]


def test_classes_are_spread_evenly_over_the_folds_of_any_run() -> None:
    labels = Digits(split="train").tensors()[1].numpy()
    folds = fold_of_each(len(labels), 5, seed=0, labels=labels)
    counts = np.stack([np.bincount(labels[folds == fold], minlength=10) for fold in range(5)])
    assert np.ptp(counts, axis=0).max() == np.ptp(counts.sum(1)) == 1
    assert fold_of_each(50, 5, seed=0).tolist()[:10] == [3, 2, 3, 2, 4, 0, 2, 2, 0, 3]
    assert fold_of_each(50, 5, seed=0).tolist() != fold_of_each(50, 5, seed=1).tolist()


@pytest.mark.parametrize(
    "dataset",
    [Read(7), Gathered(7), Synthetic(split="train", num_samples=7, num_classes=3), SyntheticTokens(split="train")],
)
def test_a_part_gives_the_samples_of_the_whole_however_it_is_read(dataset: Any) -> None:
    places = np.array([5, 1, 2])
    part: Any = Subset(dataset, places)
    assert len(part) == 3
    expected = [dataset[int(place)] for place in places]
    for read, at in (("tensors", slice(None)), ("gather", torch.arange(3))):
        assert hasattr(part, read) == hasattr(dataset, read)
        if hasattr(part, read):
            whole = part.tensors() if read == "tensors" else part.gather(at)
            for row, wanted in enumerate(expected):
                assert all(torch.equal(one[row], torch.as_tensor(two)) for one, two in zip(whole, wanted, strict=True))
    for row, wanted in enumerate(expected):
        assert all(torch.equal(*map(torch.as_tensor, pair)) for pair in zip(part[row], wanted, strict=True))


def test_classes_are_known_where_the_dataset_tells_them_without_being_read() -> None:
    assert present(labels_of(Read(4))).tolist() == [0, 1, 0, 1]
    assert present(labels_of(Synthetic(split="train", num_samples=4, num_classes=3))).tolist() == [0, 1, 2, 0]
    assert labels_of(SyntheticTokens(split="train")) is None
    assert Subset(Read(7), np.array([5])).classes == ("even", "odd")


def test_the_validation_split_is_set_aside_and_the_test_split_stays() -> None:
    own = {"train": Read(6), "val": Read(2), "test": Read(3)}
    parts = folded(own, CvConfig(folds=2, fold=1))
    assert {name: len(part) for name, part in parts.items()} == {"train": 3, "val": 3, "test": 3}
    assert folded(own, CvConfig()) is own


@pytest.mark.parametrize(
    ("train", "said"),
    [(Read(4), "more than the 4"), (Stream(source=[1], num_samples=1), "Stream is read")],
)
def test_what_has_no_folds_is_refused(train: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=f"cv.folds=5: {said}"):
        folded({"train": train}, CvConfig(folds=5))


class Split(Read):
    def __init__(self, split: str) -> None:
        super().__init__(3)
        self.split = split


class Three(Split):
    splits = ("train", "val", "test")


class Empty(Split):
    def __len__(self) -> int:
        return 3 if self.split == "train" else 0


class Endless:
    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(())


def test_a_class_says_by_its_signature_or_by_name_which_splits_it_has() -> None:
    assert splits_of({"_target_": f"{HERE}.Endless"}) == ("train",)
    assert splits_of({"_target_": f"{HERE}.Split"}) == ("train", "val")
    parts = build_splits({"_target_": f"{HERE}.Three"})
    assert {name: part.split for name, part in parts.items()} == {"train": "train", "val": "val", "test": "test"}


def test_an_empty_split_is_named_and_an_iterable_dataset_shown_the_way() -> None:
    with pytest.raises(DataError, match=r"^the val split of tests\.data\.test_splits\.Empty is empty"):
        build_splits({"_target_": f"{HERE}.Empty"})
    with pytest.raises(DataError, match=r"^Endless has no length, .* data=stream data\.source\._target_="):
        build_splits({"_target_": f"{HERE}.Endless"})


def test_jobs_share_the_tensors_of_a_dataset_that_is_kept_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splits, "_KEPT", {})
    digits = {"_target_": "trainkit.data.Digits", "scaling": "unit"}
    assert keep_splits(digits)
    assert build_splits(digits)["val"].tensors()[0] is build_splits(dict(reversed(digits.items())))["val"].tensors()[0]
    other = {**digits, "scaling": "standard"}
    assert build_splits(other)["val"].tensors()[0] is not build_splits(other)["val"].tensors()[0]
    assert not keep_splits({"_target_": f"{HERE}.Three"})
