from __future__ import annotations

from collections.abc import Iterator

import pytest

from trainkit.data import splits
from trainkit.data.splits import build_splits, keep_splits, splits_of
from trainkit.errors import DataError

HERE = "tests.data.test_splits"


class Plain:
    def __len__(self) -> int:
        return 3


class Split(Plain):
    def __init__(self, split: str) -> None:
        self.split = split


class Three(Split):
    splits = ("train", "val", "test")


class Empty(Split):
    def __len__(self) -> int:
        return 3 if self.split == "train" else 0


class Endless:
    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(())


@pytest.mark.parametrize(
    ("name", "expected"),
    [("Plain", ("train",)), ("Split", ("train", "val")), ("Three", ("train", "val", "test"))],
)
def test_a_class_says_by_its_signature_or_by_name_which_splits_it_has(name: str, expected: tuple[str, ...]) -> None:
    assert splits_of({"_target_": f"{HERE}.{name}"}) == expected


def test_each_split_is_built_once() -> None:
    parts = build_splits({"_target_": f"{HERE}.Three"})

    assert {name: part.split for name, part in parts.items()} == {"train": "train", "val": "val", "test": "test"}


def test_an_empty_split_is_named() -> None:
    with pytest.raises(
        DataError, match=r"^the val split of tests.data.test_splits.Empty is empty: it has no samples\.$"
    ):
        build_splits({"_target_": f"{HERE}.Empty"})


def test_an_iterable_dataset_is_shown_the_way() -> None:
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
