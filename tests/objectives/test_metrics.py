from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.objectives.ranks import Alone, on_ranks
from trainkit.errors import ConfigError
from trainkit.objectives.base import Collective, Loss
from trainkit.objectives.classification import Classification
from trainkit.objectives.metrics import TopK, gather_ragged

torchmetrics = pytest.importorskip("torchmetrics")

GENERATOR = torch.Generator().manual_seed(0)
SCORES = torch.randn(50, 4, generator=GENERATOR)
LABELS = torch.randint(4, (50,), generator=GENERATOR)
PARTS = [slice(0, 33), slice(33, 50)]


def evaluate(prototype: Any, parts: list[slice]) -> Callable[[Collective], float]:
    def work(collective: Collective) -> float:
        metric = Classification(extra_metrics={"it": prototype}).metrics()["it"]
        part = parts[collective.rank]
        if len(LABELS[part]):
            metric.update(Loss(torch.tensor(0.0), 1.0, None, SCORES[part], LABELS[part]), None)
        return metric.compute(collective)

    return work


def prototypes() -> list[Any]:
    multi = {"task": "multiclass", "num_classes": 4}
    return [
        pytest.param(torchmetrics.F1Score(**multi, average="macro"), id="counted"),
        pytest.param(torchmetrics.AUROC(**multi), id="every score kept"),
        pytest.param(torchmetrics.CalibrationError(**multi), id="mean"),
    ]


@pytest.mark.parametrize("prototype", prototypes())
@pytest.mark.parametrize("parts", [PARTS, [slice(0, 50), slice(50, 50)]], ids=["uneven", "one rank empty"])
def test_a_torchmetrics_class_gives_the_same_on_two_ranks_as_on_one(prototype: Any, parts: list[slice]) -> None:
    expected = evaluate(prototype, [slice(0, 50)])(Alone())

    assert on_ranks(2, evaluate(prototype, parts)) == [pytest.approx(expected, abs=1e-7)] * 2


def test_an_evaluation_starts_empty() -> None:
    prototype = torchmetrics.F1Score(task="multiclass", num_classes=4)
    first = evaluate(prototype, PARTS[:1])(Alone())

    assert evaluate(prototype, PARTS[:1])(Alone()) == first
    assert not prototype.update_called


def test_a_metric_with_many_numbers_is_refused() -> None:
    prototype = torchmetrics.F1Score(task="multiclass", num_classes=4, average="none")
    with pytest.raises(ConfigError, match=r"objective.extra_metrics: MulticlassF1Score gives more than one number"):
        evaluate(prototype, [slice(0, 50)])(Alone())


def test_accuracy_is_exact_over_unequal_ranks() -> None:
    def work(collective: Collective) -> float:
        metric = TopK(1)
        part = PARTS[collective.rank]
        metric.update(Loss(torch.tensor(0.0), 1.0, None, SCORES[part], LABELS[part]), None)
        return metric.compute(collective)

    assert on_ranks(2, work) == [int((SCORES.argmax(1) == LABELS).sum()) / 50] * 2


def test_ragged_tensors_are_gathered_whole() -> None:
    tensors = [torch.arange(6).reshape(3, 2), torch.empty(0), torch.arange(2).reshape(1, 2)]

    found = on_ranks(3, lambda collective: [t.tolist() for t in gather_ragged(tensors[collective.rank], collective)])

    assert found == [[[[0, 1], [2, 3], [4, 5]], [], [[0, 1]]]] * 3
