"""Samples drawn by weight."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.data.samples import CPU, Noisy, Squares
from trainkit.config.sections import CvConfig, LoaderConfig
from trainkit.data.hooks import DataHooks, Reading, UserSampler, WeightedOrder
from trainkit.data.reading.loader import Loader
from trainkit.data.samplers import BalancedClasses, WeightsOf
from trainkit.data.sets.digits import Digits
from trainkit.data.splits import folded
from trainkit.errors import DataError
from trainkit.numerics.batch import BatchPlan, Ticket


def hooks(function: Any) -> DataHooks:
    return DataHooks(sampler=UserSampler(function=function, name="mine.weights"))


def loader_of(dataset: Any, weights: Any, **settings: Any) -> Loader:
    plan = BatchPlan(num_samples=len(dataset), global_size=4, micro_size=2)
    return Loader(
        dataset, plan=plan, shards_at=lambda step: range(plan.num_shards(step)), num_steps=6,
        reading=Reading(device=CPU, settings=LoaderConfig(**settings), seed=7, hooks=hooks(lambda _: weights)),
    )  # fmt: skip


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
    weights = np.zeros(8)
    weights[3] = 1
    batches = loader_of(Noisy(8), weights).fetch(Ticket(0, (0, 1)))
    noise = torch.cat([batch[0] for batch in batches]).flatten()
    assert (noise.floor() == 3).all()
    assert len(set(noise.tolist())) == 4
    by_workers = loader_of(Noisy(8), weights, num_workers=1)
    assert torch.equal(by_workers.fetch(Ticket(0, (0, 1)))[1][0], batches[1][0])
    by_workers.close()


@pytest.mark.parametrize(
    ("weights", "why"),
    [
        ([1.0] * 9, r"gives weights of the shape \(9,\) for 10 samples"),
        ([1.0] * 9 + [-1.0], "gives sample 9 the weight -1.0"),
        ([float("nan")] + [1.0] * 9, "gives sample 0 the weight nan"),
        ([0.0] * 10, "gives every sample the weight 0"),
        (["many"] * 10, "fails: ValueError"),
    ],
)
def test_weights_that_are_none_are_refused(weights: list[Any], why: str) -> None:
    with pytest.raises(DataError, match=f"^data\\.sampler=mine\\.weights {why}"):
        loader_of(Squares(), weights)


def test_balanced_classes_weigh_alike_in_a_fold_too() -> None:
    train = folded({"train": Digits(split="train")}, CvConfig(folds=5, fold=0))["train"]
    weights = BalancedClasses()(train)
    labels = train.tensors()[1].numpy()
    assert np.allclose(np.bincount(labels, weights=weights), 1)
    with pytest.raises(DataError, match=r"^data\.sampler: BalancedClasses needs the class of each sample, and Squares"):
        BalancedClasses()(Squares())


def test_weights_may_be_an_attribute() -> None:
    dataset = Squares()
    dataset.sample_weights = [2.0] * 10  # type: ignore[attr-defined]
    assert WeightsOf()(dataset) == [2.0] * 10
    with pytest.raises(DataError, match=r"Squares has no attribute shares\. Add it"):
        WeightsOf(attribute="shares")(dataset)
