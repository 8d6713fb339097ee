from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest
import torch
from torch.nn import functional

from tests.objectives.ranks import Alone
from trainkit.errors import ConfigError, DataError
from trainkit.objectives.regression import Regression

FOUND, WANTED = torch.tensor([[1.0, 2.0], [3.0, 7.0]]), torch.tensor([[1.5, 2.0], [3.0, 3.0]])


@pytest.mark.parametrize(
    ("error", "torch_says"),
    [("mse", functional.mse_loss), ("l1", functional.l1_loss), ("huber", functional.huber_loss)],
)
def test_sum_over_weight_is_the_mean_of_torch(
    error: Literal["mse", "l1", "huber"], torch_says: Callable[..., torch.Tensor]
) -> None:
    loss = Regression(error=error).score(FOUND, WANTED)

    torch.testing.assert_close(loss.loss_sum / loss.weight, torch_says(FOUND, WANTED))


def test_a_sample_weighs_its_numbers() -> None:
    assert Regression().weight_per_sample((FOUND[0], WANTED[0])) == 2
    assert Regression().weight_per_sample((FOUND[0], 0.5)) == 1


def test_mean_absolute_error_is_reported() -> None:
    objective = Regression()
    metric = objective.metrics()["mae"]
    metric.update(objective.score(FOUND, WANTED), None)

    assert metric.compute(Alone()) == 1.125


def test_shapes_that_would_broadcast_are_refused() -> None:
    with pytest.raises(DataError, match=r"^the model predicts \(2, 2\) for targets of \(2,\): the shapes must agree"):
        Regression().score(FOUND, WANTED[:, 0])


def test_a_delta_that_nothing_reads_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"objective.delta=2.0: has no effect with objective.error=mse"):
        Regression(delta=2.0)
