"""A made sample that differs by the way it is read, or a label without a pattern to learn, is caught here alone."""

from __future__ import annotations

import pytest
import torch

from trainkit.data.reading.loader import collated
from trainkit.data.sets.synthetic import Synthetic, SyntheticTokens
from trainkit.errors import ConfigError


@pytest.mark.parametrize("shape", [[6], [2, 8, 8], [3, 20, 20]])
def test_samples_are_the_same_whole_or_one_by_one(shape: list[int]) -> None:
    data = Synthetic(split="train", shape=shape, num_samples=12)
    samples, labels = map(torch.as_tensor, collated(data))
    assert samples.shape == (12, *shape)
    assert torch.equal(samples[7], data[7][0])
    assert labels.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]


def test_samples_lie_nearest_to_the_prototype_of_their_class() -> None:
    data = Synthetic(split="val", shape=[64], val_samples=200, noise=0.5)
    samples, labels = map(torch.as_tensor, collated(data))
    assert torch.equal(torch.cdist(samples, data._prototypes).argmin(1), labels)
    assert not torch.equal(Synthetic(split="train", shape=[64])[0][0], samples[0])


def test_a_sample_of_millions_is_made_alone() -> None:
    data = Synthetic(split="train", shape=[3, 224, 224], num_classes=1000, num_samples=1_281_167)
    assert (data[1_281_166][0].shape, data[1_281_166][1]) == ((3, 224, 224), 166)


def test_the_next_token_follows_its_rule_and_rows_of_unequal_length_are_padded() -> None:
    inputs, targets = SyntheticTokens(split="train", noise=0.1).tensors()
    assert float((targets == (5 * inputs + 3) % 64).double().mean()) == pytest.approx(0.9, abs=0.02)
    inputs, targets = SyntheticTokens(split="train", context=8, min_context=3, num_samples=50).tensors()
    assert set((targets >= 0).sum(1).tolist()) == {3, 4, 5, 6, 7, 8}
    assert not inputs[targets < 0].any()


def test_a_bad_size_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.shape=\[2, 2\]"):
        Synthetic(split="train", shape=[2, 2])
    with pytest.raises(ConfigError, match=r"data\.min_context=40: larger than data\.context=32"):
        SyntheticTokens(split="train", min_context=40)
