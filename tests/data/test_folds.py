from typing import Any

import numpy as np
import pytest
import torch

from tests.support.present import present
from trainkit.config.sections import CvConfig
from trainkit.data.reading.iterable import Stream
from trainkit.data.sets.digits import Digits
from trainkit.data.sets.synthetic import Synthetic, SyntheticTokens
from trainkit.data.splits import fold_of_each, folded, labels_of, part_of
from trainkit.errors import ConfigError


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
        return indices.float() ** 2, indices % 2


def test_every_sample_is_held_out_once_and_trained_on_in_the_other_folds() -> None:
    found = [folded({"train": Read(11)}, CvConfig(folds=3, fold=fold)) for fold in range(3)]
    held = [[int(inputs**0.5) for inputs, _ in parts["val"]] for parts in found]
    assert sorted(index for fold in held for index in fold) == list(range(11))
    for parts, out in zip(found, held, strict=True):
        assert sorted(int(inputs**0.5) for inputs, _ in parts["train"]) == sorted(set(range(11)) - set(out))
    assert sorted(map(len, held)) == [3, 4, 4]


def test_classes_are_spread_evenly() -> None:
    digits = Digits(split="train")
    counts = [
        np.bincount(folded({"train": digits}, CvConfig(folds=5, fold=fold))["val"].tensors()[1], minlength=10)
        for fold in range(5)
    ]
    assert np.ptp(np.stack(counts), axis=0).max() == 1
    assert np.ptp(np.stack(counts).sum(1)) == 1


def test_folds_are_the_same_for_every_run_and_others_with_another_seed() -> None:
    first, again, other = (fold_of_each(50, 5, seed=seed).tolist() for seed in (0, 0, 1))
    assert first == again != other
    assert first[:10] == [3, 2, 3, 2, 4, 0, 2, 2, 0, 3]


@pytest.mark.parametrize(
    "dataset",
    [Read(7), Gathered(7), Synthetic(split="train", num_samples=7, num_classes=3), SyntheticTokens(split="train")],
)
def test_a_part_gives_the_samples_of_the_whole_however_it_is_read(
    dataset: Read | Gathered | Synthetic | SyntheticTokens,
) -> None:
    places = np.array([5, 1, 2])
    part = part_of(dataset, places)
    assert len(part) == 3
    for place, index in enumerate(places):
        for got, wanted in zip(part[place], dataset[int(index)], strict=True):
            assert torch.equal(torch.as_tensor(got), torch.as_tensor(wanted))
    for read in ("tensors", "gather"):
        assert hasattr(part, read) == hasattr(dataset, read)


def test_a_part_is_gathered_and_held_in_memory_as_the_whole_is() -> None:
    places = np.array([5, 1, 2])
    assert part_of(Gathered(7), places).gather(torch.tensor([2, 0]))[0].tolist() == [4.0, 25.0]
    digits = Digits(split="val")
    assert torch.equal(part_of(digits, places).tensors()[1], digits.tensors()[1][places])
    assert part_of(Read(7), places).classes == ("even", "odd")


def test_classes_are_known_where_the_dataset_tells_them_without_being_read() -> None:
    assert present(labels_of(Read(4))).tolist() == [0, 1, 0, 1]
    assert present(labels_of(Synthetic(split="train", num_samples=4, num_classes=3))).tolist() == [0, 1, 2, 0]
    assert labels_of(SyntheticTokens(split="train")) is None


def test_the_validation_split_is_set_aside_and_the_test_split_stays() -> None:
    splits = {"train": Read(6), "val": Read(2), "test": Read(3)}
    parts = folded(splits, CvConfig(folds=2, fold=1))
    assert {name: len(part) for name, part in parts.items()} == {"train": 3, "val": 3, "test": 3}
    assert folded(splits, CvConfig()) is splits


def refused(train: Any, cv: CvConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        folded({"train": train}, cv)
    return str(caught.value).splitlines()[1].strip()


def test_what_has_no_folds_is_refused() -> None:
    assert (
        refused(Read(4), CvConfig(folds=5, fold=0)) == "cv.folds=5: more than the 4 samples of train. Use 4 or fewer."
    )
    assert refused(Stream(source=[1, 2], num_samples=2), CvConfig(folds=2)) == (
        "cv.folds=2: Stream is read sequentially: a fold needs samples by their index. Use a map-style dataset."
    )
