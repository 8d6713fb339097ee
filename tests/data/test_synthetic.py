from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from trainkit.data.reading.loader import collated
from trainkit.data.sets.synthetic import Synthetic, SyntheticTokens
from trainkit.errors import ConfigError


def tensors(data: Synthetic) -> tuple[torch.Tensor, torch.Tensor]:
    samples, labels = collated(data)
    assert isinstance(samples, torch.Tensor)
    assert isinstance(labels, torch.Tensor)
    return samples, labels


@pytest.mark.parametrize("shape", [[6], [2, 8, 8], [3, 20, 20]])
def test_samples_are_the_same_whole_or_one_by_one(shape: list[int]) -> None:
    data = Synthetic(split="train", shape=shape, num_samples=12)
    samples, labels = tensors(data)

    assert samples.shape == (12, *shape)
    assert torch.equal(samples[7], data[7][0])
    assert labels.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]


def test_samples_lie_nearest_to_the_prototype_of_their_class() -> None:
    data = Synthetic(split="val", shape=[64], val_samples=200, noise=0.5)
    samples, labels = tensors(data)

    nearest = torch.cdist(samples, data._prototypes).argmin(1)

    assert torch.equal(nearest, labels)


def test_a_sample_of_millions_is_made_alone() -> None:
    data = Synthetic(split="train", shape=[3, 224, 224], num_classes=1000, num_samples=1_281_167)

    assert (data[1_281_166][0].shape, data[1_281_166][1]) == ((3, 224, 224), 166)


def test_splits_differ() -> None:
    assert not torch.equal(Synthetic(split="train")[0][0], Synthetic(split="val")[0][0])


def test_the_next_token_follows_its_rule() -> None:
    inputs, targets = SyntheticTokens(split="train", noise=0.1).tensors()

    assert float((targets == (5 * inputs + 3) % 64).double().mean()) == pytest.approx(0.9, abs=0.02)


def test_rows_of_unequal_length_are_padded() -> None:
    inputs, targets = SyntheticTokens(split="train", context=8, min_context=3, num_samples=50).tensors()
    lengths = (targets >= 0).sum(1)

    assert set(lengths.tolist()) == {3, 4, 5, 6, 7, 8}
    assert not inputs[targets < 0].any()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: Synthetic(split="train", shape=[2, 2]),
            "data.shape=[2, 2]: must be [features] or [channels, height, width], each 1 or more.",
        ),
        (
            lambda: SyntheticTokens(split="train", min_context=40),
            "data.min_context=40: larger than data.context=32.",
        ),
    ],
)
def test_a_bad_size_is_refused(build: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build()

    assert str(caught.value) == f"1 problem in the config\n  {message}"
