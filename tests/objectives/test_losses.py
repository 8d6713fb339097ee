"""A weight that is planned otherwise than it is counted, and padding that counts as a token, are caught here alone.

The losses: classes, numbers, tokens, and those that a model computes itself.
An input and a target that change places, or a guess between two inputs, is caught here alone.
A target that is ignored by the loss and counted by its weight or a metric is caught here alone.
So is a metric that is a mean of the means of ranks, or loses an empty rank.
A teacher that trains along, drops out, or is copied into a checkpoint is caught here alone.

A chunk of scores that is lost, counted twice or rounded too early is caught here alone.

A loss that is computed in an output layer although a hook or the model changes its scores is caught here alone.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import trainkit
from tests.contract.running import run, weights
from tests.objectives.ranks import on_ranks
from tests.support import zoo
from tests.support.counted import ScoreBytes
from tests.support.present import present
from trainkit import api
from trainkit.config.targets.allowed import allow_packages
from trainkit.data.collates import PadImages
from trainkit.errors import ConfigError, DataError, TrainingError, ZeroWeightError
from trainkit.models.ensemble import Ensemble
from trainkit.models.gpt import Gpt
from trainkit.numerics.precision import Precision
from trainkit.objectives import fields, language_modelling
from trainkit.objectives import linear_cross_entropy as chunked
from trainkit.objectives.base import Collective, Loss, Metric, Objective, add_terms
from trainkit.objectives.classification import Classification
from trainkit.objectives.distillation import Distillation, FrozenModel
from trainkit.objectives.fields import exact, scores_of, split_batch, unused_fields
from trainkit.objectives.language_modelling import LanguageModelling
from trainkit.objectives.linear_cross_entropy import score_rows
from trainkit.objectives.metrics import ConfusionMatrix, PerClass, Worst, gather_ragged, perplexity
from trainkit.objectives.own_loss import ModelComputesLoss
from trainkit.objectives.regression import Regression
from trainkit.objectives.tables import Table, results_of
from trainkit.run.estimates.memory import device_memory
from trainkit.run.planning.memory import memory_of
from trainkit.run.planning.plan import make_plan
from trainkit.strategies.collectives import LocalCollective
from trainkit.strategies.model_transforms import ModelTransforms, apply_transforms
from trainkit.trained.build import meta_model
from trainkit.trained.predict import Outputs
from trainkit.trainer.checkpoint.tensors import load

SCORES = torch.tensor([[2.0, 0.0, 1.0], [0.0, 1.0, 3.0], [1.0, 0.5, 0.0], [0.0, 0.0, 1.0]])
OUTPUTS, TARGETS = torch.tensor([[1.0, 2.0], [3.0, 7.0]]), torch.tensor([[1.5, 2.0], [3.0, 3.0]])


def test_the_weight_of_a_sample_is_known_if_every_target_counts() -> None:
    mask, soft = (SCORES, torch.zeros(2, 5, dtype=torch.int64)), (SCORES, torch.full((3, 4), 1 / 3))
    assert Classification().weight_per_sample((SCORES, 1)) is None
    every = Classification(ignore_index=None)
    assert [every.weight_per_sample(sample) for sample in ((SCORES, 1), mask, soft, None)] == [1, 10, 4, None]
    weighted = Classification(class_weights=[1, 2, 3], ignore_index=None)
    assert (weighted.weight_per_sample((SCORES, 1)), weighted.planned_weight_per_sample(None)) == (None, 1)
    assert [Regression().weight_per_sample((OUTPUTS[0], target)) for target in (TARGETS[0], 0.5)] == [2, 1]
    assert LanguageModelling(padding=False).weight_per_sample((FULL[0], FULL[0])) == 3
    assert LanguageModelling().planned_weight_per_sample((FULL[0], PADDED[0])) == 3


def test_narrow_scores_are_widened_and_wide_ones_kept() -> None:
    labels = torch.tensor([0, 1, 2, 2])
    assert Classification().score(SCORES.bfloat16(), labels).loss_sum.dtype == torch.float32
    assert Classification().score(SCORES.double(), labels).loss_sum.dtype == torch.float64


@pytest.mark.parametrize("error", ["mse", "l1", "huber"])
def test_sum_over_weight_of_a_regression_is_the_mean_of_torch(error: Any) -> None:
    loss = Regression(error=error).score(OUTPUTS, TARGETS)
    expected = getattr(functional, f"{error}_loss")(OUTPUTS, TARGETS)
    torch.testing.assert_close(loss.loss_sum / loss.weight, expected)
    metric = Regression().metrics()["mae"]
    metric.update(loss, None)
    assert metric.compute(LocalCollective()) == 1.125


def test_what_cannot_be_scored_is_refused_all_together() -> None:
    with pytest.raises(DataError, match=r"predicts \(2, 2\) for targets of \(2,\): the shapes must agree"):
        Regression().score(OUTPUTS, TARGETS[:, 0])
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
        metric = perplexity()
        part = slice(collective.rank, collective.rank + 1)
        metric.update(objective.score(TOKEN_SCORES[part], PADDED[part]), None)
        return metric.compute(collective)

    expected = math.exp(functional.cross_entropy(TOKEN_SCORES.flatten(0, 1).double(), PADDED.flatten()))

    assert on_ranks(2, evaluate) == [pytest.approx(expected, rel=1e-6)] * 2
    assert math.isnan(perplexity().compute(LocalCollective()))


def test_an_evaluation_copies_some_scores_at_once_to_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    scores, targets = torch.randn(2, 6, 8).bfloat16(), torch.arange(12).view(2, 6) % 8
    targets[1, 3:] = -100
    expected, copied = LanguageModelling().score(scores, targets).loss_sum, list[int]()

    def counted(part: torch.Tensor) -> torch.Tensor:
        copied.append(part.numel())
        return exact(part)

    monkeypatch.setattr(language_modelling, "exact", counted)
    monkeypatch.setattr(fields, "MOST_SCORES", 40)
    with torch.no_grad():
        loss_sum = LanguageModelling().score(scores, targets).loss_sum
    assert copied == [40, 40, 16]
    torch.testing.assert_close(loss_sum, expected, rtol=1e-6, atol=0.0)  # some roundings of a float32 sum


def test_the_worst_windows_are_the_same_from_parts_of_the_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    loss = LanguageModelling().score(torch.randn(5, 6, 8).bfloat16(), torch.randint(8, (5, 6)))

    def worst() -> object:
        metric = LanguageModelling().details(None, batch_size=5).metrics["worst"]
        metric.update(loss, None)
        return metric.compute(LocalCollective())

    expected = worst()
    monkeypatch.setattr(fields, "MOST_SCORES", 100)
    assert worst() == expected


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
    (note,) = Classification().notes(Reporting(), SAMPLE)
    assert "Reporting computes its own loss, and this objective ignores attention_mask" in note
    (note,) = ModelComputesLoss().notes(Reporting(), SAMPLE)
    assert "objective.shifted=true counts the targets exactly" in note
    assert ModelComputesLoss(shifted=True).notes(Reporting(), SAMPLE) == []


def test_a_field_that_the_model_does_not_take_is_refused() -> None:
    (problem,) = ModelComputesLoss().validate_model(Reporting(), {**SAMPLE, "text": "a"})
    assert "takes no text. It takes input_ids, attention_mask, labels." in str(problem)
    assert ModelComputesLoss().validate_model(Reporting(), SAMPLE) == []


@dataclass
class Scan:
    voxels: int
    diagnosis: int


class Pair(NamedTuple):
    left: int
    right: int


@pytest.mark.parametrize(("batch", "fields"), [
    ((1, 2), (None, None)), (Pair(1, 2), (None, None)), (Pair(2, 1), (1, 0)), ((0, 1, 2), (1, 2)),
    ({"input": 1, "target": 2, "label": 3}, (None, None)), ({"image": 1, "label": 2, "path": "a.png"}, (None, None)),
    ({"input_ids": 1, "labels": 2}, (None, None)), ({"x": 1, "z": 2}, (None, "z")),
    (Scan(1, 2), ("voxels", "diagnosis")),
])  # fmt: skip
def test_fields_are_found_by_name_by_place_or_by_common_names(batch: Any, fields: tuple[Any, Any]) -> None:
    assert split_batch(batch, *fields) == (1, 2)


def test_several_inputs_reach_the_model_by_position() -> None:
    def model(image: Tensor, scale: Tensor) -> Tensor:
        return image * scale

    batch = {"image": torch.tensor([[1.0, 0.0]]), "scale": torch.tensor([[2.0]]), "y": torch.tensor([0])}
    loss = Classification(input=["image", "scale"]).loss(model, batch)
    assert torch.equal(loss.outputs, torch.tensor([[2.0, 0.0]]))


@pytest.mark.parametrize(("batch", "why"), [
    ({"x": 1, "image": 1, "y": 2}, "has the fields x, image, y, and x and image may both be the input"),
    ({"voxels": 1, "y": 2}, "has the fields voxels, y, and none is known as the input"),
    ((1, 2, 3), "has the fields 0, 1, 2"), (3, "is one int"),
])  # fmt: skip
def test_a_structure_that_leaves_the_fields_open_is_refused_with_the_keys_that_name_them(batch: Any, why: str) -> None:
    with pytest.raises(DataError, match=r"objective\.input=NAME objective\.target=NAME") as caught:
        split_batch(batch)
    assert f"a sample {why}" in str(caught.value)
    with pytest.raises(ConfigError, match=r"objective\.input=picture: .*: a sample has image, label\."):
        split_batch({"image": 1, "label": 2}, "picture", None)


def test_an_output_is_named_by_key_or_place() -> None:
    first, second = torch.zeros(1), torch.ones(1)
    assert scores_of({"a": first, "b": second}, "b") is scores_of((first, second), 1) is second
    with pytest.raises(ConfigError, match=r"objective\.output=c: there is no such output: the model returns"):
        scores_of({"a": first, "b": second}, "c")
    with pytest.raises(TrainingError, match=r"Name the output: objective\.output=NAME"):
        scores_of((first, second))


def test_fields_that_nothing_reads_are_listed() -> None:
    sample = {"input_ids": [1], "attention_mask": [1], "labels": 0}
    assert unused_fields(sample, None, None) == ["attention_mask"]
    assert unused_fields(sample, ["input_ids", "attention_mask"], None) == []


needs_torchmetrics = pytest.mark.skipif(find_spec("torchmetrics") is None, reason="torchmetrics is not installed")

GENERATOR = torch.Generator().manual_seed(3)
MANY_SCORES: dict[tuple[int, ...], Tensor] = {
    shape: torch.randn(4, 3, *shape, generator=GENERATOR, dtype=torch.float64) for shape in ((), (3,), (3, 4))
}
WEIGHTS = [1.0, 2.0, 0.5]


def targets_of(shape: tuple[int, ...], kind: str) -> Tensor:
    """Classes, of which the first sample has none and another place is ignored; or probabilities."""
    if kind == "soft":
        return torch.rand(4, 3, *shape, generator=GENERATOR, dtype=torch.float64).softmax(1)
    targets = torch.randint(3, (4, *shape), generator=GENERATOR)
    targets[0], targets.flatten()[-1] = -100, -100
    return targets


def value(metric: Metric, loss: Loss) -> Any:
    metric.update(loss, None)
    return metric.compute(LocalCollective())


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kind", ["hard", "soft"])
@pytest.mark.parametrize("shape", list(MANY_SCORES))
@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_shards_add_up_to_the_mean_of_torch_over_the_batch(
    shape: tuple[int, ...], kind: str, weights: list[float] | None, deterministic: bool
) -> None:
    scores, targets = MANY_SCORES[shape], targets_of(shape, kind)
    as_tensor = None if weights is None else torch.tensor(weights, dtype=torch.float64)
    expected = functional.cross_entropy(scores, targets, weight=as_tensor, label_smoothing=0.1)

    torch.use_deterministic_algorithms(deterministic)
    objective = Classification(class_weights=weights, label_smoothing=0.1)
    parts = [objective.score(scores[part], targets[part]) for part in (slice(0, 1), slice(1, 4))]
    torch.use_deterministic_algorithms(mode=False)

    mean = sum(loss.loss_sum for loss in parts) / sum(loss.weight for loss in parts)
    torch.testing.assert_close(mean, expected, rtol=1e-14, atol=0)


def test_another_class_may_be_ignored_or_none() -> None:
    scores, targets = MANY_SCORES[()], torch.tensor([0, 1, 2, 0], dtype=torch.uint8)
    without = Classification(ignore_index=0).score(scores, targets)
    assert (float(without.weight), Classification(ignore_index=None).score(scores, targets).weight) == (2, 4)
    torch.testing.assert_close(without.loss_sum, functional.cross_entropy(scores[1:3], targets[1:3], reduction="sum"))
    with pytest.raises(IndexError, match="Target -100 is out of bounds"):
        Classification(ignore_index=None).score(scores, torch.tensor([0, 1, 2, -100]))
    with pytest.raises(DataError, match=r"the targets are probabilities, .* objective\.ignore_index=null\."):
        Classification(ignore_index=0).score(scores, scores.softmax(1))


@pytest.mark.parametrize(("scores", "targets", "message"), [
    ((4, 3), torch.zeros(4, 1, dtype=torch.int64), r"\(4, 3\) for targets \(4, 1\).*of \(4, 3\) are \(4,\)\.$"),
    ((4, 5, 3), torch.zeros(4, 5, dtype=torch.int64), r"the classes of \(4, 5, 3\) are \(4, 3\)\.$"),
    ((4,), torch.zeros(4, dtype=torch.int64), r"there is no dim of classes\.$"),
    ((4, 3), torch.zeros(4), "the targets are float32, and classes are whole numbers"),
    ((4, 3, 2), torch.zeros(4, 2, 3), "probabilities of the shape of the scores"),
])  # fmt: skip
def test_targets_that_are_not_those_of_the_scores_are_refused(
    scores: tuple[int, ...], targets: Tensor, message: str
) -> None:
    with pytest.raises((DataError, TrainingError), match=message):
        Classification().score(torch.zeros(scores), targets)


def test_tokens_in_another_order_than_the_scores_are_refused() -> None:
    with pytest.raises(TrainingError, match=r"the model gives \(2, 3, 5\).*targets are \(3, 2\).*place, \(2, 3\)\.$"):
        LanguageModelling().score(torch.zeros(2, 3, 5), torch.zeros(3, 2, dtype=torch.int64))


@pytest.mark.parametrize("shape", list(MANY_SCORES))
def test_hits_are_counted_over_the_targets_that_count(shape: tuple[int, ...]) -> None:
    scores, targets = MANY_SCORES[shape], targets_of(shape, "hard")
    loss = Classification().score(scores, targets)
    counted = targets != -100
    hits, two = scores.argmax(1) == targets, (scores.topk(2, dim=1).indices == targets.unsqueeze(1)).any(1)

    metrics = {name: value(metric, loss) for name, metric in Classification(top_k=[2]).metrics().items()}
    assert metrics == {"accuracy": hits[counted].double().mean(), "top2": two[counted].double().mean()}

    details = Classification().details(None, batch_size=4).metrics
    confusion, classes, worst = (value(details[name], loss) for name in ("confusion", "classes", "worst"))
    assert sum(sum(row[1:]) for row in confusion.rows) == sum(row[-1] for row in classes.rows) == counted.sum()
    means = [functional.cross_entropy(score[None], target[None]) for score, target in zip(scores, targets, strict=True)]
    assert {row[0]: row[1] for row in worst.rows} == pytest.approx(
        {index: float(mean) for index, mean in enumerate(means) if counted[index].any()}
    )


def test_the_class_of_probabilities_is_the_most_likely_one() -> None:
    scores = torch.eye(3)  # as many samples as classes
    soft = torch.tensor([[0.6, 0.4, 0.0], [0.9, 0.1, 0.0], [0.0, 0.0, 1.0]])
    loss = Classification().score(scores, soft)
    assert value(Classification().metrics()["accuracy"], loss) == 2 / 3
    details = Classification().details(None, batch_size=3).metrics
    assert value(details["confusion"], loss).rows[0] == ("0", 1.0, 1.0, 0.0)
    losses = functional.cross_entropy(scores, soft, reduction="none").tolist()
    assert [row[:2] for row in value(details["worst"], loss).rows] == [
        (index, pytest.approx(losses[index])) for index in (1, 0, 2)
    ]


def test_the_worst_samples_are_those_of_the_split_over_ranks_and_batches() -> None:
    scores, labels = MANY_SCORES[()].repeat(3, 1), torch.tensor([0, 1, 2] * 4)

    def worst(collective: Collective) -> list[Any]:
        metric = Worst(batch_size=3)
        for batch in range(collective.rank, 4, collective.num_ranks):  # the batches of the split in turn
            part = slice(3 * batch, 3 * batch + 3)
            metric.update(Classification().score(scores[part], labels[part]), None)
        return [row[0] for row in metric.compute(collective).rows]

    expected = functional.cross_entropy(scores, labels, reduction="none").argsort(descending=True).tolist()
    assert on_ranks(2, worst) == [expected] * 2


@needs_torchmetrics
@pytest.mark.parametrize("ignore_index", [None, -100])
@pytest.mark.parametrize("shape", list(MANY_SCORES))
def test_a_torchmetrics_class_gets_the_targets_that_count(shape: tuple[int, ...], ignore_index: int | None) -> None:
    from torchmetrics.classification import MulticlassAccuracy

    scores, targets = MANY_SCORES[shape], targets_of(shape, "hard")
    metric = MulticlassAccuracy(3, average="micro", ignore_index=ignore_index)
    objective = Classification(extra_metrics={"it": metric})
    loss = objective.score(scores, targets)
    assert value(objective.metrics()["it"], loss) == pytest.approx(value(objective.metrics()["accuracy"], loss))
    nothing = objective.metrics()["it"]
    nothing.update(objective.score(scores[:1], targets[:1]), None)  # a shard without a target
    assert value(nothing, loss) == value(objective.metrics()["it"], loss)


@pytest.mark.slow
@pytest.mark.parametrize("shape", list(MANY_SCORES))
@pytest.mark.parametrize("squared", [True, False])
def test_a_teacher_teaches_where_a_target_counts_as_hinton_says(shape: tuple[int, ...], squared: bool) -> None:
    scores, targets = MANY_SCORES[shape], targets_of(shape, "hard")
    objective = Distillation(teacher=nn.Tanh(), temperature=3.0, share=0.7, temperature_squared=squared)
    loss = objective.loss(nn.Identity(), (scores, targets))

    rows, labels = scores.movedim(1, -1).reshape(-1, 3), targets.flatten()
    rows, labels = rows[labels != -100], labels[labels != -100]
    probabilities = (torch.tanh(rows) / 3).softmax(1)
    teacher = functional.kl_div((rows / 3).log_softmax(1), probabilities, reduction="batchmean")
    expected = 0.3 * functional.cross_entropy(rows, labels) + 0.7 * (9 if squared else 1) * teacher
    torch.testing.assert_close(loss.loss_sum / loss.weight, expected, rtol=1e-13, atol=0)
    torch.testing.assert_close((loss.terms or {})["teacher"], teacher * len(rows))
    assert value(objective.metrics()["accuracy"], loss) == (rows.argmax(1) == labels).double().mean()


def test_a_teacher_of_other_classes_is_refused() -> None:
    with pytest.raises(TrainingError, match=r"scores \(4, 3\), and its teacher \(4, 2\): both need the same classes"):
        Distillation(teacher=nn.Linear(3, 2).double()).loss(nn.Identity(), (MANY_SCORES[()], torch.zeros(4).long()))


def test_an_ensemble_of_masks_averages_the_probabilities_of_each_pixel() -> None:
    members = [nn.Identity(), nn.Tanh()]
    log_probs = Ensemble(members=members, class_dim=1)(MANY_SCORES[3, 4])
    expected = (MANY_SCORES[3, 4].softmax(1) + torch.tanh(MANY_SCORES[3, 4]).softmax(1)) / 2
    torch.testing.assert_close(log_probs.exp(), expected)


@pytest.mark.parametrize("shape", list(MANY_SCORES))
def test_a_prediction_takes_the_classes_from_the_dim_of_the_objective(shape: tuple[int, ...]) -> None:
    scores, predictions = MANY_SCORES[shape], {}
    for kind in ("classes", "probabilities"):
        with Outputs(kind=kind).of(nn.Identity(), Classification()) as function:
            predictions[kind] = function((scores,), num_rows=4)
    assert torch.equal(predictions["classes"], scores.argmax(1))
    torch.testing.assert_close(predictions["probabilities"], scores.softmax(1))


UNLABELLED = ("model=net", "data._target_=tests.support.zoo.PartlyLabelled", "optimizer=sgd", "batch.global_size=16")


def evaluated(model: nn.Module, result: Any, inputs: Tensor, targets: Tensor) -> dict[str, float]:
    """Loss and accuracy of the weights of a run."""
    model = model.double().requires_grad_(requires_grad=False)
    model.load_state_dict(weights(result))
    scores, counted = model(inputs.double()), targets != -100
    loss, hits = functional.cross_entropy(scores, targets), (scores.argmax(1) == targets)[counted]
    return {"val/loss": float(loss), "val/accuracy": float(hits.double().mean())}


def test_a_step_without_a_target_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(ZeroWeightError, match=r"^step 0: no sample of the global batch has a target"):
        run(tmp_path / "run", *UNLABELLED, "data.every=1", "steps=1")


def test_padded_masks_are_evaluated_pixel_by_pixel(tmp_path: Path) -> None:
    result = run(
        tmp_path / "run", "model._target_=tests.support.zoo.pixels", "data._target_=tests.support.zoo.SeveralSizes",
        "data.collate=trainkit.data.PadImages", "optimizer=sgd", "batch.global_size=4", "steps=6",
        "eval.batch_size=3", "batch.micro_size=2",
    )  # fmt: skip
    images, masks = PadImages()([zoo.SeveralSizes("val")[index] for index in range(10)])
    assert result["metrics"] == pytest.approx(evaluated(zoo.pixels(), result, images, masks), rel=1e-12)


FOUR_GENERATOR = torch.Generator().manual_seed(0)
FOUR_SCORES = torch.randn(50, 4, generator=FOUR_GENERATOR)
FOUR_LABELS = torch.randint(4, (50,), generator=FOUR_GENERATOR)
PARTS = [slice(0, 33), slice(33, 50)]


def evaluate(prototype: Any, parts: list[slice]) -> Callable[[Collective], Any]:
    def work(collective: Collective) -> Any:
        metric = Classification(extra_metrics={"it": prototype}).metrics()["it"]
        part = parts[collective.rank]
        if len(FOUR_LABELS[part]):
            metric.update(Loss(torch.tensor(0.0), 1.0, None, FOUR_SCORES[part], FOUR_LABELS[part]), None)
        return metric.compute(collective)

    return work


def torch_metric(name: str, **settings: Any) -> Any:
    """A metric of torchmetrics for the four classes."""
    import torchmetrics

    return getattr(torchmetrics, name)(task="multiclass", num_classes=4, **settings)


@needs_torchmetrics
@pytest.mark.parametrize("name", ["F1Score", "AUROC", "CalibrationError"])  # counted; every score kept; a mean
@pytest.mark.parametrize("parts", [PARTS, [slice(0, 50), slice(50, 50)]], ids=["uneven", "one rank empty"])
def test_a_torchmetrics_class_gives_the_same_on_two_ranks_as_on_one(name: str, parts: list[slice]) -> None:
    prototype = torch_metric(name, **({"average": "macro"} if name == "F1Score" else {}))
    expected = evaluate(prototype, [slice(0, 50)])(LocalCollective())

    assert on_ranks(2, evaluate(prototype, parts)) == [pytest.approx(expected, abs=1e-7)] * 2


@needs_torchmetrics
def test_an_evaluation_starts_empty() -> None:
    prototype = torch_metric("F1Score")
    first, again = (evaluate(prototype, PARTS[:1])(LocalCollective()) for _ in range(2))
    assert (first, prototype.update_called) == (again, False)


@needs_torchmetrics
@pytest.mark.parametrize("parts", [PARTS, [slice(0, 50), slice(50, 50)]], ids=["uneven", "one rank empty"])
def test_a_confusion_matrix_counts_the_same_on_two_ranks_as_on_one(parts: list[slice]) -> None:
    expected = torch_metric("ConfusionMatrix")(FOUR_SCORES, FOUR_LABELS)

    for num_classes in (4, None):
        tables = on_ranks(2, evaluate(ConfusionMatrix(num_classes, names=["a", "b", "c", "d"]), parts))
        assert tables == [Table.of(expected, ["a", "b", "c", "d"])] * 2


@needs_torchmetrics
def test_each_class_has_its_precision_recall_and_f1() -> None:
    (table,) = on_ranks(1, evaluate(PerClass(4), [slice(0, 50)]))

    for column, name in enumerate(("Precision", "Recall", "F1Score"), start=1):
        expected = torch_metric(name, average="none")(FOUR_SCORES, FOUR_LABELS)
        assert [row[column] for row in table.rows] == pytest.approx(expected.tolist(), abs=1e-6)
    assert [row[-1] for row in table.rows] == torch.bincount(FOUR_LABELS).tolist()


def test_padded_places_do_not_count() -> None:
    labels = torch.tensor([[0, 1, -100], [1, -100, -100]])
    loss = Loss(torch.tensor(0.0), 3, outputs=torch.zeros(2, 3, 2), targets=labels)
    assert value(ConfusionMatrix(2), loss).rows == (("0", 1.0, 0.0), ("1", 2.0, 0.0))


def test_what_a_metric_gives_is_a_number_or_a_table() -> None:
    value = {"mean": torch.tensor([0.5]), "each": torch.tensor([0.25, float("nan")]), "cube": torch.zeros(1, 1, 2)}

    figures, tables = results_of("val/f1", value)

    assert figures == {"val/f1/mean": 0.5}
    assert tables["val/f1/each"].to_json() == {"columns": ["index", "value"], "rows": [["0", 0.25], ["1", None]]}
    assert tables["val/f1/cube"].rows == (("(0, 0, 0)", 0.0), ("(0, 0, 1)", 0.0))
    with pytest.raises(TrainingError, match=r"^the metric val/f1 returns a list, and must return a number, a t"):
        results_of("val/f1", [1.0])


def test_ragged_tensors_are_gathered_whole() -> None:
    tensors = [torch.arange(6).reshape(3, 2), torch.empty(0), torch.arange(2).reshape(1, 2)]

    gathered = on_ranks(3, lambda collective: [t.tolist() for t in gather_ragged(tensors[collective.rank], collective)])

    assert gathered == [[[[0, 1], [2, 3], [4, 5]], [], [[0, 1]]]] * 3


INPUTS = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
SAME = ("model=net", "data=points", "optimizer=sgd", "batch.global_size=16", "batch.micro_size=4", "epochs=1")


def test_a_frozen_model_is_evaluated_without_gradients_and_one_copy_a_device() -> None:
    norm = nn.BatchNorm1d(3)
    model = nn.Sequential(nn.Linear(4, 3), norm, nn.Dropout(0.5)).train()
    frozen = FrozenModel(model)
    frozen.bind(dtype=torch.float64, load=lambda _folder, _which: nn.Identity())

    first, second = frozen(INPUTS), frozen(INPUTS)

    assert torch.equal(first, second)
    assert first.dtype == torch.float64
    assert not first.requires_grad
    assert not any(param.requires_grad for param in model.parameters())
    assert norm.num_batches_tracked == 0


@pytest.mark.slow
def test_a_teacher_from_a_run_is_kept_whole_and_out_of_checkpoints_where_the_model_is_cut(tmp_path: Path) -> None:
    teacher = run(tmp_path / "teacher", *SAME, "objective=classification", "model.width=5")
    taught = ("objective=distillation", f"objective.teacher={tmp_path / 'teacher'}", "objective.share=0.8")
    alone = weights(run(tmp_path / "alone", *SAME, *taught))
    cut = run(tmp_path / "cut", *SAME, *taught, "strategy=fsdp", "strategy.replicas=2")
    torch.testing.assert_close(weights(cut), alone, rtol=1e-12, atol=1e-13)
    row = json.loads((tmp_path / "cut" / "metrics.jsonl").read_text().splitlines()[-1])
    assert {"val/loss", "val/labels", "val/teacher", "val/accuracy"} <= row.keys()
    # It is in no checkpoint, and it has the weights at the end of its own run.
    assert {key.rpartition("/")[2] for key in load(Path(cut["last"])).tensors} == {*alone}
    assert weights(teacher)["0.weight"].shape == (5, 6)


@pytest.mark.slow
def test_the_planned_memory_holds_the_teacher(tmp_path: Path) -> None:
    run(tmp_path / "teacher", "model=net", "data=points", "objective=classification", "epochs=1")
    bare, taught = (
        make_plan(trainkit.compose(["recipe=null", *keys]).cfg)
        for keys in ((), ("objective=distillation", f"objective.teacher={tmp_path / 'teacher'}"))
    )
    with allow_packages(["tests"]):
        sizes = [memory_of(plan, meta_model(plan.cfg)) for plan in (bare, taught)]
    count = sum(param.numel() for param in zoo.Net().parameters())
    assert [size.frozen_bytes for size in sizes] == [0, 4 * count]
    assert sizes[1].total_bytes - sizes[0].total_bytes == 4 * count


def test_a_teacher_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"objective\.teacher=\S+nowhere: is not a run folder"):
        run(tmp_path / "run", *SAME, "objective=distillation", f"objective.teacher={tmp_path / 'nowhere'}")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("terms", "message"), [
    (None, "gives the terms none, and its term_names are kl"),
    ({"kl": torch.tensor(1.0), "x": torch.tensor(1.0)}, "gives the terms kl, x, and its term_names are kl"),
    ({"kl": torch.ones(3)}, "must be a tensor of one number"), ({"kl": 1.0}, "must be a tensor of one number"),
])  # fmt: skip
def test_terms_that_are_not_those_named_are_refused(terms: Any, message: str) -> None:
    class Named(Objective):
        term_names = ("kl",)

        def loss(self, model: Any, batch: Any) -> Loss:
            raise NotImplementedError

    with pytest.raises(TrainingError, match=message):
        add_terms({}, Named(), Loss(torch.tensor(1.0), 1.0, terms=terms))


ROWS, FEATURES, WORDS = 37, 6, 29

linear_cross_entropy = partial(chunked.linear_cross_entropy, few=0)


def layer_and_targets(dtype: torch.dtype = torch.float64, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight, bias and targets, of which every fifth does not count."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        (scale * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(dtype).requires_grad_()
        for shape in ((ROWS, FEATURES), (WORDS, FEATURES), (WORDS,))
    )
    targets = torch.randint(WORDS, (ROWS,), generator=generator)
    targets[::5] = -100
    return hidden, weight, bias, targets


def plain_loss(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
    scores = functional.linear(hidden, weight, bias)
    scores = scores if scores.dtype is torch.float64 else scores.float()
    return functional.cross_entropy(scores, targets, reduction="sum")


def grads(loss: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss * 0.37, tensors)


@pytest.mark.parametrize("scale", [1.0, 9.0], ids=["even", "peaked"])
@pytest.mark.parametrize("size", [1, 8 * WORDS * 10], ids=["least", "ten rows"])
def test_the_loss_and_its_gradients_are_those_of_all_scores(
    size: int, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked, "CHUNK_BYTES", size)
    hidden, weight, bias, targets = layer_and_targets(scale=scale)

    loss = linear_cross_entropy(hidden, weight, targets, bias=bias)
    expected = plain_loss(hidden, weight, bias, targets)

    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    for grad, true in zip(grads(loss, hidden, weight, bias), grads(expected, hidden, weight, bias), strict=True):
        torch.testing.assert_close(grad, true, rtol=1e-12, atol=1e-12 * float(true.abs().max()))


@pytest.mark.parametrize("scale", [1.0, 9.0], ids=["even", "peaked"])
def test_in_bfloat16_gradients_are_as_exact_as_those_of_all_scores(scale: float) -> None:
    hidden, weight, bias, targets = layer_and_targets(torch.bfloat16, scale=scale)
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight, bias)]
    exact_grads = grads(plain_loss(exact[0], exact[1], exact[2], targets), *exact)

    chunk_grads = grads(linear_cross_entropy(hidden, weight, targets, bias=bias), hidden, weight, bias)
    plain_grads = grads(plain_loss(hidden, weight, bias, targets), hidden, weight, bias)

    for ours, theirs, true in zip(chunk_grads, plain_grads, exact_grads, strict=True):
        assert (ours - true).norm() <= 1.2 * (theirs - true).norm()


def test_a_nearly_certain_target_keeps_its_small_gradient_in_bfloat16() -> None:
    # 1 - 2**-9 is 1 in bfloat16: what remains is counted from the others
    scores = torch.tensor([[9.0, 0.0, 0.0, 0.0]], dtype=torch.bfloat16)
    losses, gradient = score_rows(scores, torch.tensor([0]))

    expected = functional.cross_entropy(scores.double(), torch.tensor([0]))
    assert float(losses) == pytest.approx(float(expected), rel=4e-3)
    assert float(-gradient[0, 0]) == pytest.approx(float(1 - scores.double().softmax(1)[0, 0]), rel=1e-2)


def test_a_target_whose_probability_underflows_has_a_finite_loss() -> None:
    scores = torch.tensor([[0.0, 200.0, 199.0]])
    losses, gradient = score_rows(scores, torch.tensor([0]))

    torch.testing.assert_close(losses, functional.cross_entropy(scores, torch.tensor([0]), reduction="none"))
    assert float(gradient[0, 0]) == -1


def test_a_frozen_layer_costs_no_gradient_and_targets_alone_that_do_not_count_give_zero() -> None:
    hidden, weight, _, targets = layer_and_targets()
    frozen = weight.detach()

    loss = linear_cross_entropy(hidden, frozen, targets)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(
        hidden.grad, *torch.autograd.grad(plain_loss(hidden, frozen, None, targets), hidden), rtol=1e-12, atol=1e-12
    )
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()  # type: ignore[no-untyped-call]

    nothing = linear_cross_entropy(hidden, weight, torch.full((ROWS,), -100))
    assert float(nothing.detach()) == float(grads(nothing, weight)[0].abs().max()) == 0


def bytes_a_score(compute: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[float, float]:
    """(bytes moved, most bytes alive) of tensors as large as the scores of a chunk, by the number of scores."""
    rows, words, features = 256, 1024, 16
    monkeypatch.setattr(chunked, "CHUNK_BYTES", 2 * words * 64)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, features, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(words, features, generator=generator).bfloat16().requires_grad_()
    targets = torch.randint(words, (rows,), generator=generator)
    with ScoreBytes(at_least=64 * words) as counted:
        compute(hidden, weight, targets).backward()
    return counted.moved / (rows * words), counted.peak / (rows * words)


def test_in_bfloat16_fourteen_bytes_a_score_are_moved_and_one_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    moved, alive = bytes_a_score(linear_cross_entropy, monkeypatch)

    assert moved <= 14  # written, read thrice; its gradient written, read for the target, and by two products
    assert alive <= 1  # two tensors of a chunk, a quarter of the rows

    moved, alive = bytes_a_score(lambda hidden, weight, targets: plain_loss(hidden, weight, None, targets), monkeypatch)
    assert moved > 40
    assert alive >= 10


CHUNKED_TOKENS = torch.randint(32, (3, 9), generator=torch.Generator().manual_seed(0))
BATCH = (CHUNKED_TOKENS[:, :-1], CHUNKED_TOKENS[:, 1:])
INSIDE, PLAIN = LanguageModelling(), LanguageModelling(cross_entropy="plain")


def gpt(**settings: Any) -> Gpt:
    torch.manual_seed(0)
    return Gpt(**{"vocab_size": 32, "context": 8, "num_layers": 1, "num_heads": 2, "width": 8, **settings})


def grads_of(objective: Any, model: nn.Module, batch: Any) -> tuple[Tensor, list[Tensor]]:
    model.zero_grad()
    loss = objective.loss(model, batch).loss_sum
    loss.backward()
    return loss.detach(), [param.grad.clone() for param in model.parameters() if param.grad is not None]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_mixed"])
def test_few_scores_give_the_bits_of_the_plain_loss(precision: Any) -> None:
    numbers = Precision(value=precision)
    model = numbers.adapt(gpt(bias=True))
    with numbers.autocast(["cpu"]):
        assert INSIDE.loss(model, BATCH).outputs is None
        torch.testing.assert_close(grads_of(INSIDE, model, BATCH), grads_of(PLAIN, model, BATCH), rtol=0, atol=0)


class Adapter(nn.Module):
    """A small change of a frozen layer."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner, self.change = inner, nn.Linear(inner.in_features, inner.out_features)

    def forward(self, hidden: Tensor) -> Tensor:
        """The sum of both."""
        scores: Tensor = self.inner(hidden) + self.change(hidden)
        return scores


def adapted(model: Gpt) -> None:
    model.head.output = Adapter(model.head.output)  # type: ignore[assignment]


def hooked(model: Gpt) -> None:
    model.head.register_forward_hook(lambda _module, _args, scores: scores * 2)


def recomputed(model: Gpt) -> None:
    apply_transforms(model, ModelTransforms(recompute=["_Head"]))


@pytest.mark.parametrize(("change", "reason"), [
    (adapted, "its output layer is a Adapter"), (hooked, "_Head has a hook that may read scores"),
    (recomputed, "_Head, which holds its output layer, has another forward"),
])  # fmt: skip
def test_a_layer_that_is_not_plain_keeps_its_scores_and_the_summary_says_why(
    change: Callable[[Gpt], None], reason: str
) -> None:
    model = gpt()
    change(model)
    assert INSIDE.loss(model, BATCH).outputs is not None
    assert INSIDE.notes(model, BATCH) == [f"the loss is computed from all scores: {reason}."]
    torch.testing.assert_close(grads_of(INSIDE, model, BATCH), grads_of(PLAIN, model, BATCH), rtol=0, atol=0)


def test_a_hook_that_comes_later_is_called_with_scores_and_its_removal_gives_the_loss_back() -> None:
    model, kinds = gpt(), []

    def see(_module: object, _args: object, scores: object) -> None:
        kinds.append(type(scores))

    for register in (model.head.register_forward_hook, nn.modules.module.register_module_forward_hook):
        assert INSIDE.loss(model, BATCH).outputs is None
        handle = register(see)
        INSIDE.loss(model, BATCH)
        handle.remove()
        assert set(kinds) == {torch.Tensor}
        kinds.clear()


class Doubled(LanguageModelling):
    """A loss of one's own, of scores."""

    draws_nothing: ClassVar[bool] = True

    def score(self, outputs: Any, targets: Tensor) -> Loss:
        """Twice the other."""
        loss = super().score(outputs, targets)
        loss.loss_sum = loss.loss_sum * 2
        return loss


def test_evaluation_float16_and_an_objective_that_replaces_score_alone_are_given_scores() -> None:
    model = gpt()
    assert Doubled().loss(model, BATCH).outputs is not None
    with torch.no_grad():
        assert INSIDE.loss(model, BATCH).outputs is not None
    with Precision(value="fp16_mixed").autocast(["cpu"]):
        assert INSIDE.loss(model, BATCH).outputs is not None
    assert INSIDE.loss(model.eval(), BATCH).outputs is not None


def test_a_model_that_loses_the_loss_of_its_layer_is_named() -> None:
    class Loses(Gpt):
        def forward(self, tokens: Tensor) -> Tensor:
            super().forward(tokens)
            return torch.zeros(3, 8, 32)

    model = gpt()
    model.__class__ = Loses
    with pytest.raises(TrainingError, match=r"contain the result of its output_layer\(\) 0 times"):
        INSIDE.loss(model, BATCH)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["GPTJ", "Gemma2"])
def test_a_causal_model_of_transformers_is_scored_inside_unless_it_changes_its_scores(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers  # slow: only this test pays for it

    monkeypatch.setitem(chunked.linear_cross_entropy.__kwdefaults__ or {}, "few", 0)
    sizes = {"vocab_size": 32, "num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2}
    more = {"num_key_value_heads": 1, "head_dim": 4, "intermediate_size": 8, "tie_word_embeddings": family != "GPTJ"}
    none = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "rotary_dim": 2}
    config = getattr(transformers, f"{family}Config")(**sizes, **more, **none)
    model = transformers.AutoModelForCausalLM.from_config(config).train()
    labels = CHUNKED_TOKENS.masked_fill(CHUNKED_TOKENS < 6, -100)
    batch = {"input_ids": CHUNKED_TOKENS, "labels": labels}

    for objective, inputs in ((ModelComputesLoss(shifted=True), batch), (INSIDE, (CHUNKED_TOKENS, labels))):
        plain = type(objective)(**{**vars(objective), "cross_entropy": "plain"})
        assert (objective.loss(model, inputs).outputs is None) == (family != "Gemma2")
        assert objective.loss(model, inputs).weight == plain.loss(model, inputs).weight
        torch.testing.assert_close(
            grads_of(objective, model, inputs), grads_of(plain, model, inputs), rtol=1e-4, atol=1e-5
        )
    changed = "the loss is computed from all scores: Gemma2ForCausalLM changes the output of its output layer."
    assert INSIDE.notes(model, (CHUNKED_TOKENS, CHUNKED_TOKENS)) == ([changed] if family == "Gemma2" else [])


@pytest.mark.slow
def test_the_planned_peak_does_not_hold_all_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    words, rows = 8192, 4 * 64
    monkeypatch.setattr(chunked, "CHUNK_BYTES", 4 * words * 16)
    keys = [
        "recipe=null", "model=gpt", "data=synthetic_tokens", "objective=language_modelling", "batch.global_size=4",
        f"model.vocab_size={words}", f"data.vocab_size={words}", "model.context=64", "data.context=64",
        "model.width=16", "model.num_layers=1",
    ]  # fmt: skip

    def peak(chosen: str) -> int:
        plan = make_plan(api.compose([*keys, f"objective.cross_entropy={chosen}"]).cfg)
        return present(device_memory(plan, meta_model(plan.cfg), evaluates=False).activations)

    assert peak("plain") > 2 * 4 * rows * words
    assert peak("auto") < 4 * rows * words / 2


def test_the_kernel_of_liger_gets_the_hidden_states_and_is_refused_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    liger, model, calls = LanguageModelling(cross_entropy="liger"), gpt(), []

    def fused(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, **settings: Any) -> Tensor:
        calls.append(settings)
        return chunked.linear_cross_entropy(hidden, weight, targets, bias=bias)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused = ((None, model, "needs Liger Kernel"), (SimpleNamespace(), model, "runs on GPUs, and there is none here"),
               (SimpleNamespace(), nn.Linear(2, 2), "Linear has no output_layer()"))  # fmt: skip
    for installed, candidate, word in refused:
        monkeypatch.setattr("importlib.util.find_spec", lambda _name, spec=installed: spec)
        (problem,) = liger.validate_model(candidate, BATCH)
        assert word in str(problem)

    functional = ModuleType("liger_kernel.transformers.functional")
    functional.liger_fused_linear_cross_entropy = fused  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, functional.__name__, functional)
    torch.testing.assert_close(grads_of(liger, model, BATCH), grads_of(PLAIN, model, BATCH))
    assert calls == [{"ignore_index": -100, "reduction": "sum", "accum_dtype": torch.float32}]
    with pytest.raises(ConfigError, match="not used where the loss is computed from scores"):
        liger.loss(model.eval(), BATCH)
