"""A weight that is planned otherwise than it is counted, and padding that counts as a token, are caught here alone.

The losses: classes, numbers, tokens, and those that a model computes itself.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.objectives.ranks import Alone, on_ranks
from trainkit.errors import ConfigError, DataError, TrainingError
from trainkit.objectives import fields, language_modelling
from trainkit.objectives.base import Collective
from trainkit.objectives.classification import Classification
from trainkit.objectives.fields import exact
from trainkit.objectives.language_modelling import LanguageModelling
from trainkit.objectives.metrics import Perplexity
from trainkit.objectives.own_loss import ModelComputesLoss
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
    assert LanguageModelling(padding=False).weight_per_sample((FULL[0], FULL[0])) == 3
    assert LanguageModelling().planned_weight_per_sample((FULL[0], PADDED[0])) == 3


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


TOKEN_SCORES = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
PADDED = torch.tensor([[1, 2, -100], [4, -100, -100]])
FULL = torch.tensor([[1, 2, 3], [4, 0, 1]])


@pytest.mark.parametrize(("targets", "weight"), [(PADDED, 3), (FULL, 6)], ids=["padded", "full"])
def test_sum_over_weight_is_the_mean_over_tokens_that_are_not_padding(targets: torch.Tensor, weight: int) -> None:
    loss = LanguageModelling().score(TOKEN_SCORES, targets)
    expected = functional.cross_entropy(TOKEN_SCORES.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(loss.loss_sum / loss.weight, expected)
    assert loss.weight == weight


def test_perplexity_is_that_of_all_tokens_not_a_mean_of_ranks() -> None:
    objective = LanguageModelling()

    def evaluate(collective: Collective) -> float:
        metric = Perplexity()
        part = slice(collective.rank, collective.rank + 1)
        metric.update(objective.score(TOKEN_SCORES[part], PADDED[part]), None)
        return metric.compute(collective)

    expected = math.exp(functional.cross_entropy(TOKEN_SCORES.flatten(0, 1).double(), PADDED.flatten()))

    assert on_ranks(2, evaluate) == [pytest.approx(expected, rel=1e-6)] * 2
    assert math.isnan(Perplexity().compute(Alone()))


def test_an_evaluation_copies_some_scores_at_once_to_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    scores, targets = torch.randn(2, 6, 8).bfloat16(), torch.arange(12).view(2, 6) % 8
    targets[1, 3:] = -100
    whole, copied = LanguageModelling().score(scores, targets).loss_sum, list[int]()

    def counted(some: torch.Tensor) -> torch.Tensor:
        copied.append(some.numel())
        return exact(some)

    monkeypatch.setattr(language_modelling, "exact", counted)
    monkeypatch.setattr(fields, "MOST_SCORES", 40)
    with torch.no_grad():
        found = LanguageModelling().score(scores, targets).loss_sum
    assert copied == [40, 40, 16]
    torch.testing.assert_close(found, whole, rtol=1e-6, atol=0.0)  # some roundings of a float32 sum


def test_the_worst_windows_are_the_same_from_parts_of_the_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    loss = LanguageModelling().score(torch.randn(5, 6, 8).bfloat16(), torch.randint(8, (5, 6)))

    def worst() -> object:
        metric = LanguageModelling().details(None, batch_size=5).metrics["worst"]
        metric.update(loss, None)
        return metric.compute(Alone())

    whole = worst()
    monkeypatch.setattr(fields, "MOST_SCORES", 100)
    assert worst() == whole


OWN_SCORES = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(0))
OWN_LABELS = torch.tensor([[0, 1, 2, -100], [3, 4, -100, -100]])


def causal(scores: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
    """As a Hugging Face causal model: predicts each next label, mean over the labels that are not ignored."""
    loss = functional.cross_entropy(scores[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    return SimpleNamespace(loss=loss, logits=scores)


def test_the_mean_of_a_causal_model_counts_as_mean_times_its_targets_and_unequal_shards_sum_to_the_whole() -> None:
    objective = ModelComputesLoss(shifted=True)
    whole = objective.loss(causal, {"scores": OWN_SCORES, "labels": OWN_LABELS})
    parts = [objective.loss(causal, {"scores": OWN_SCORES[i : i + 1], "labels": OWN_LABELS[i : i + 1]}) for i in (0, 1)]
    expected = functional.cross_entropy(OWN_SCORES[:, :-1].flatten(0, 1), OWN_LABELS[:, 1:].flatten(), reduction="sum")
    torch.testing.assert_close(whole.loss_sum, expected)
    assert (whole.outputs.shape, whole.targets.tolist()) == ((2, 3, 5), OWN_LABELS[:, 1:].tolist())
    assert whole.counted is not None
    assert whole.counted.tolist() == [[True, True, False], [True, False, False]]
    torch.testing.assert_close(sum(part.loss_sum for part in parts), expected)
    assert (whole.weight, sum(part.weight for part in parts)) == (3, 3)


def test_a_tuple_is_passed_in_order_and_the_loss_may_be_the_output() -> None:
    loss = ModelComputesLoss().loss(
        lambda x, y: (x - y).square().mean(), (torch.tensor([1.0, 3.0]), torch.tensor([0, 0]))
    )

    assert (float(loss.loss_sum), int(loss.weight)) == (10, 2)


def test_a_model_without_a_loss_and_a_batch_without_labels_are_named() -> None:
    with pytest.raises(TrainingError, match=r"^the model reports no loss: objective=own_loss needs"):
        ModelComputesLoss().loss(lambda **_: {"logits": OWN_SCORES}, {"labels": OWN_LABELS})
    with pytest.raises(DataError, match=r"holds target, and no labels\. Name its targets by objective.labels"):
        ModelComputesLoss().loss(lambda **_: {"loss": torch.tensor(1.0)}, {"target": OWN_LABELS})


class Reporting(nn.Module):
    """Takes tokens, a mask and labels, as models of transformers do; predicts each next label."""

    loss_type = "ForCausalLM"

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> object:
        raise NotImplementedError


SAMPLE = {"input_ids": torch.zeros(3), "attention_mask": torch.ones(3), "labels": torch.zeros(3)}


def test_a_shard_without_a_label_adds_nothing() -> None:
    scores = OWN_SCORES.clone().requires_grad_()
    loss = ModelComputesLoss(shifted=True).loss(causal, {"scores": scores, "labels": torch.full((2, 4), -100)})
    loss.loss_sum.backward()  # type: ignore[no-untyped-call]
    assert (float(loss.loss_sum.detach()), int(loss.weight)) == (0, 0)
    assert scores.grad is not None
    assert not scores.grad.any()


def test_a_model_with_a_loss_of_its_own_is_recognised() -> None:
    (said,) = Classification().notes(Reporting(), SAMPLE)
    assert "Reporting computes its own loss, and this objective ignores attention_mask" in said
    (said,) = ModelComputesLoss().notes(Reporting(), SAMPLE)
    assert "objective.shifted=true counts the targets exactly" in said
    assert ModelComputesLoss(shifted=True).notes(Reporting(), SAMPLE) == []


def test_a_field_that_the_model_does_not_take_is_refused() -> None:
    (problem,) = ModelComputesLoss().validate_model(Reporting(), {**SAMPLE, "text": "a"})
    assert "takes no text. It takes input_ids, attention_mask, labels." in str(problem)
    assert ModelComputesLoss().validate_model(Reporting(), SAMPLE) == []
