from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from tests.objectives.ranks import Alone
from trainkit.errors import ConfigError, DataError
from trainkit.objectives.classification import Classification

SCORES = torch.tensor([[2.0, 0.0, 1.0], [0.0, 1.0, 3.0], [1.0, 0.5, 0.0], [0.0, 0.0, 1.0]])
LABELS = torch.tensor([0, 1, 2, 2])


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weights", [None, [1.0, 2.0, 0.5]])
def test_sum_over_weight_is_the_mean_of_torch(smoothing: float, weights: list[float] | None) -> None:
    loss = Classification(label_smoothing=smoothing, class_weights=weights).score(SCORES, LABELS)
    as_tensor = None if weights is None else torch.tensor(weights)

    expected = functional.cross_entropy(SCORES, LABELS, weight=as_tensor, label_smoothing=smoothing)

    torch.testing.assert_close(loss.loss_sum / loss.weight, expected)


def test_the_weight_of_a_sample_is_known_if_every_target_counts() -> None:
    mask, soft = (SCORES, torch.zeros(2, 5, dtype=torch.int64)), (SCORES, torch.full((3, 4), 1 / 3))
    assert Classification().weight_per_sample((SCORES, 1)) is None
    every = Classification(ignore_index=None)
    assert [every.weight_per_sample(one) for one in ((SCORES, 1), mask, soft, None)] == [1, 10, 4, None]
    assert Classification(class_weights=[1, 2, 3], ignore_index=None).weight_per_sample((SCORES, 1)) is None
    assert Classification(class_weights=[1, 2, 3]).planned_weight_per_sample(None) == 1


def test_accuracy_and_top_k() -> None:
    objective = Classification(top_k=[2])
    metrics = objective.metrics()
    for part in (slice(0, 3), slice(3, 4)):
        loss = objective.score(SCORES[part], LABELS[part])
        for metric in metrics.values():
            metric.update(loss, None)

    assert {name: metric.compute(Alone()) for name, metric in metrics.items()} == {"accuracy": 0.5, "top2": 0.75}


def test_the_loss_runs_the_model_on_pairs_and_dicts() -> None:
    model = torch.nn.Identity()

    pair = Classification().loss(model, (SCORES, LABELS))
    named = Classification().loss(model, {"input": SCORES, "target": LABELS})

    assert torch.equal(pair.loss_sum, named.loss_sum)


def test_a_batch_without_targets_is_refused() -> None:
    with pytest.raises(DataError, match=r"^a sample has the fields image, class, and none is known as the target\. "):
        Classification().loss(torch.nn.Identity(), {"image": SCORES, "class": LABELS})


def test_narrow_scores_are_widened_and_wide_ones_kept() -> None:
    assert Classification().score(SCORES.bfloat16(), LABELS).loss_sum.dtype == torch.float32
    assert Classification().score(SCORES.double(), LABELS).loss_sum.dtype == torch.float64


def test_all_bad_values_are_reported_together() -> None:
    with pytest.raises(ConfigError) as caught:
        Classification(class_weights=[], top_k=[1])

    assert str(caught.value) == (
        "2 problems in the config\n"
        "  objective.top_k=[1]: every k must be 2 or more (accuracy is k = 1 and always there).\n"
        "  objective.class_weights=[]: needs one weight per class, none negative."
    )
