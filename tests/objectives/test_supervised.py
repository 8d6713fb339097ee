"""A weight of samples that is planned otherwise than it is counted is caught here alone: classes and numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.objectives.ranks import Alone
from trainkit.errors import ConfigError, DataError
from trainkit.objectives.classification import Classification
from trainkit.objectives.regression import Regression

SCORES = torch.tensor([[2.0, 0.0, 1.0], [0.0, 1.0, 3.0], [1.0, 0.5, 0.0], [0.0, 0.0, 1.0]])
FOUND, WANTED = torch.tensor([[1.0, 2.0], [3.0, 7.0]]), torch.tensor([[1.5, 2.0], [3.0, 3.0]])


def test_the_weight_of_a_sample_is_known_if_every_target_counts() -> None:
    mask, soft = (SCORES, torch.zeros(2, 5, dtype=torch.int64)), (SCORES, torch.full((3, 4), 1 / 3))
    assert Classification().weight_per_sample((SCORES, 1)) is None
    every = Classification(ignore_index=None)
    assert [every.weight_per_sample(one) for one in ((SCORES, 1), mask, soft, None)] == [1, 10, 4, None]
    weighted = Classification(class_weights=[1, 2, 3], ignore_index=None)
    assert (weighted.weight_per_sample((SCORES, 1)), weighted.planned_weight_per_sample(None)) == (None, 1)
    assert [Regression().weight_per_sample((FOUND[0], one)) for one in (WANTED[0], 0.5)] == [2, 1]


def test_narrow_scores_are_widened_and_wide_ones_kept() -> None:
    labels = torch.tensor([0, 1, 2, 2])
    assert Classification().score(SCORES.bfloat16(), labels).loss_sum.dtype == torch.float32
    assert Classification().score(SCORES.double(), labels).loss_sum.dtype == torch.float64


@pytest.mark.parametrize("error", ["mse", "l1", "huber"])
def test_sum_over_weight_of_a_regression_is_the_mean_of_torch(error: Any) -> None:
    loss = Regression(error=error).score(FOUND, WANTED)
    expected = getattr(functional, f"{error}_loss")(FOUND, WANTED)
    torch.testing.assert_close(loss.loss_sum / loss.weight, expected)
    metric = Regression().metrics()["mae"]
    metric.update(loss, None)
    assert metric.compute(Alone()) == 1.125


def test_what_cannot_be_scored_is_refused_all_together() -> None:
    with pytest.raises(DataError, match=r"predicts \(2, 2\) for targets of \(2,\): the shapes must agree"):
        Regression().score(FOUND, WANTED[:, 0])
    with pytest.raises(ConfigError, match=r"objective.delta=2.0: has no effect with objective.error=mse"):
        Regression(delta=2.0)
    with pytest.raises(ConfigError, match=r"(?s)objective\.top_k=\[1\].*objective\.class_weights=\[\]"):
        Classification(class_weights=[], top_k=[1])
