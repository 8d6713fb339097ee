"""A sampler that draws samples in other shares than they weigh, or in another order by rank, is caught here alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.data.samples import Noisy, Squares, make_loader
from trainkit.config.sections import CvConfig
from trainkit.data.hooks import DataHooks, UserSampler, WeightedOrder
from trainkit.data.samplers import BalancedClasses, WeightsOf
from trainkit.data.sets.images import Digits
from trainkit.data.splits import folded
from trainkit.errors import DataError
from trainkit.numerics.batch import Ticket


def drawn_by(weights: Any) -> DataHooks:
    return DataHooks(sampler=UserSampler(function=lambda _: weights, name="mine.weights"))


def test_any_stretch_of_the_order_is_that_of_the_whole_and_epochs_differ() -> None:
    order = WeightedOrder(cumulative=np.cumsum(np.arange(50.0)), seed=3)
    whole = order.indices(1, 0, 200)
    assert np.array_equal(whole[37:90], order.indices(1, 37, 90))
    assert not np.array_equal(whole, order.indices(2, 0, 200))
    assert whole.min() > 0  # the first sample has no weight


def test_samples_come_as_often_as_they_weigh() -> None:
    order = WeightedOrder(cumulative=np.cumsum([1.0, 0.0, 2.0, 1.0]), seed=0)
    shares = np.bincount(order.indices(0, 0, 40_000)) / 40_000
    assert np.allclose(shares, [0.25, 0, 0.5, 0.25], atol=0.01)  # five standard deviations


def test_a_sample_that_is_drawn_twice_in_an_epoch_is_augmented_twice() -> None:
    hooks = drawn_by(np.arange(8) == 3)
    batches = make_loader(Noisy(8), hooks=hooks).fetch(Ticket(0, (0, 1)))
    noise = torch.cat([batch[0] for batch in batches]).flatten()
    assert (noise.floor() == 3).all()
    assert len(set(noise.tolist())) == 4
    by_workers = make_loader(Noisy(8), hooks=hooks, num_workers=1)
    assert torch.equal(by_workers.fetch(Ticket(0, (0, 1)))[1][0], batches[1][0])
    by_workers.close()


@pytest.mark.parametrize(
    ("weights", "why"),
    [
        ([1.0] * 9, r"gives weights of the shape \(9,\) for 10 samples"),
        ([1.0] * 9 + [-1.0], "gives sample 9 the weight -1.0"),
        ([0.0] * 10, "gives every sample the weight 0"),
        (["many"] * 10, "fails: ValueError"),
    ],
)
def test_weights_that_are_none_are_refused(weights: list[Any], why: str) -> None:
    with pytest.raises(DataError, match=f"^data\\.sampler=mine\\.weights {why}"):
        make_loader(Squares(), hooks=drawn_by(weights))


def test_balanced_classes_weigh_alike_in_a_fold_too() -> None:
    train = folded({"train": Digits(split="train")}, CvConfig(folds=5, fold=0))["train"]
    assert np.allclose(np.bincount(train.tensors()[1].numpy(), weights=BalancedClasses()(train)), 1)
    with pytest.raises(DataError, match="BalancedClasses needs the class of each sample, and Squares"):
        BalancedClasses()(Squares())


def test_weights_may_be_an_attribute() -> None:
    dataset = Squares()
    dataset.sample_weights = [2.0] * 10  # type: ignore[attr-defined]
    assert WeightsOf()(dataset) == [2.0] * 10
    with pytest.raises(DataError, match="Squares has no attribute shares"):
        WeightsOf(attribute="shares")(dataset)
