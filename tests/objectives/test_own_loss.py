"""The mean loss of a model of one's own that is summed over the wrong number of labels is caught here alone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

from trainkit.errors import DataError, TrainingError
from trainkit.objectives.classification import Classification
from trainkit.objectives.own_loss import ModelComputesLoss

SCORES = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([[0, 1, 2, -100], [3, 4, -100, -100]])


def causal(scores: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
    """As a Hugging Face causal model: predicts each next label, mean over the labels that are not ignored."""
    loss = functional.cross_entropy(scores[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    return SimpleNamespace(loss=loss, logits=scores)


def test_the_mean_of_a_causal_model_counts_as_mean_times_its_targets_and_unequal_shards_sum_to_the_whole() -> None:
    objective = ModelComputesLoss(shifted=True)
    whole = objective.loss(causal, {"scores": SCORES, "labels": LABELS})
    parts = [objective.loss(causal, {"scores": SCORES[i : i + 1], "labels": LABELS[i : i + 1]}) for i in (0, 1)]
    expected = functional.cross_entropy(SCORES[:, :-1].flatten(0, 1), LABELS[:, 1:].flatten(), reduction="sum")
    torch.testing.assert_close(whole.loss_sum, expected)
    torch.testing.assert_close(sum(part.loss_sum for part in parts), expected)
    assert (whole.weight, sum(part.weight for part in parts)) == (3, 3)


def test_a_tuple_is_passed_in_order_and_the_loss_may_be_the_output() -> None:
    loss = ModelComputesLoss().loss(
        lambda x, y: (x - y).square().mean(), (torch.tensor([1.0, 3.0]), torch.tensor([0, 0]))
    )

    assert (float(loss.loss_sum), int(loss.weight)) == (10, 2)


def test_a_model_without_a_loss_and_a_batch_without_labels_are_named() -> None:
    with pytest.raises(TrainingError, match=r"^the model reports no loss: objective=own_loss needs"):
        ModelComputesLoss().loss(lambda **_: {"logits": SCORES}, {"labels": LABELS})
    with pytest.raises(DataError, match=r"holds target, and no labels\. Name its targets by objective.labels"):
        ModelComputesLoss().loss(lambda **_: {"loss": torch.tensor(1.0)}, {"target": LABELS})


class Reporting(nn.Module):
    """Takes tokens, a mask and labels, as models of transformers do; predicts each next label."""

    loss_type = "ForCausalLM"

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> object:
        raise NotImplementedError


SAMPLE = {"input_ids": torch.zeros(3), "attention_mask": torch.ones(3), "labels": torch.zeros(3)}


def test_a_shard_without_a_label_adds_nothing() -> None:
    scores = SCORES.clone().requires_grad_()
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
