"""A target that is ignored by the loss and counted by its weight or a metric is caught here alone.

So is a metric that is a mean of the means of ranks, or loses an empty rank.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.contract.running import run, weights
from tests.objectives.ranks import Alone, on_ranks
from tests.support import zoo
from trainkit.data.collates import PadImages
from trainkit.errors import DataError, TrainingError, ZeroWeightError
from trainkit.inference.predicting import Outputs
from trainkit.models.ensemble import Ensemble
from trainkit.objectives.base import Collective, Loss, Metric
from trainkit.objectives.classification import Classification
from trainkit.objectives.distillation import Distillation
from trainkit.objectives.language_modelling import LanguageModelling
from trainkit.objectives.metrics import ConfusionMatrix, PerClass, Worst, class_details, gather_ragged
from trainkit.objectives.tables import Table, results_of

needs_torchmetrics = pytest.mark.skipif(find_spec("torchmetrics") is None, reason="torchmetrics is not installed")

GENERATOR = torch.Generator().manual_seed(3)
SCORES: dict[tuple[int, ...], Tensor] = {
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
    return metric.compute(Alone())


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kind", ["hard", "soft"])
@pytest.mark.parametrize("shape", list(SCORES))
@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_shards_add_up_to_the_mean_of_torch_over_the_batch(
    shape: tuple[int, ...], kind: str, weights: list[float] | None, deterministic: bool
) -> None:
    scores, targets = SCORES[shape], targets_of(shape, kind)
    as_tensor = None if weights is None else torch.tensor(weights, dtype=torch.float64)
    expected = functional.cross_entropy(scores, targets, weight=as_tensor, label_smoothing=0.1)

    torch.use_deterministic_algorithms(deterministic)
    objective = Classification(class_weights=weights, label_smoothing=0.1)
    parts = [objective.score(scores[part], targets[part]) for part in (slice(0, 1), slice(1, 4))]
    torch.use_deterministic_algorithms(mode=False)

    found = sum(one.loss_sum for one in parts) / sum(one.weight for one in parts)
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=0)


def test_another_class_may_be_ignored_or_none() -> None:
    scores, targets = SCORES[()], torch.tensor([0, 1, 2, 0], dtype=torch.uint8)
    without = Classification(ignore_index=0).score(scores, targets)
    assert (float(without.weight), Classification(ignore_index=None).score(scores, targets).weight) == (2, 4)
    torch.testing.assert_close(without.loss_sum, functional.cross_entropy(scores[1:3], targets[1:3], reduction="sum"))
    with pytest.raises(IndexError, match="Target -100 is out of bounds"):
        Classification(ignore_index=None).score(scores, torch.tensor([0, 1, 2, -100]))
    with pytest.raises(DataError, match=r"the targets are probabilities, .* objective\.ignore_index=null\."):
        Classification(ignore_index=0).score(scores, scores.softmax(1))


@pytest.mark.parametrize(("scores", "targets", "said"), [
    ((4, 3), torch.zeros(4, 1, dtype=torch.int64), r"\(4, 3\) for targets \(4, 1\).*of \(4, 3\) are \(4,\)\.$"),
    ((4, 5, 3), torch.zeros(4, 5, dtype=torch.int64), r"the classes of \(4, 5, 3\) are \(4, 3\)\.$"),
    ((4,), torch.zeros(4, dtype=torch.int64), r"there is no dim of classes\.$"),
    ((4, 3), torch.zeros(4), "the targets are float32, and classes are whole numbers"),
    ((4, 3, 2), torch.zeros(4, 2, 3), "probabilities of the shape of the scores"),
])  # fmt: skip
def test_targets_that_are_not_those_of_the_scores_are_refused(
    scores: tuple[int, ...], targets: Tensor, said: str
) -> None:
    with pytest.raises((DataError, TrainingError), match=said):
        Classification().score(torch.zeros(scores), targets)


def test_tokens_in_another_order_than_the_scores_are_refused() -> None:
    with pytest.raises(TrainingError, match=r"the model gives \(2, 3, 5\).*targets are \(3, 2\).*place, \(2, 3\)\.$"):
        LanguageModelling().score(torch.zeros(2, 3, 5), torch.zeros(3, 2, dtype=torch.int64))


@pytest.mark.parametrize("shape", list(SCORES))
def test_hits_are_counted_over_the_targets_that_count(shape: tuple[int, ...]) -> None:
    scores, targets = SCORES[shape], targets_of(shape, "hard")
    loss = Classification().score(scores, targets)
    counted = targets != -100
    hits, two = scores.argmax(1) == targets, (scores.topk(2, dim=1).indices == targets.unsqueeze(1)).any(1)

    found = {name: value(metric, loss) for name, metric in Classification(top_k=[2]).metrics().items()}
    assert found == {"accuracy": hits[counted].double().mean(), "top2": two[counted].double().mean()}

    details = class_details(None, batch_size=4).metrics
    confusion, classes, worst = (value(details[name], loss) for name in ("confusion", "classes", "worst"))
    assert sum(sum(row[1:]) for row in confusion.rows) == sum(row[-1] for row in classes.rows) == counted.sum()
    means = [functional.cross_entropy(one[None], wanted[None]) for one, wanted in zip(scores, targets, strict=True)]
    assert {row[0]: row[1] for row in worst.rows} == pytest.approx(
        {place: float(mean) for place, mean in enumerate(means) if counted[place].any()}
    )


def test_the_class_of_probabilities_is_the_most_likely_one() -> None:
    scores = torch.eye(3)  # as many samples as classes
    soft = torch.tensor([[0.6, 0.4, 0.0], [0.9, 0.1, 0.0], [0.0, 0.0, 1.0]])
    loss = Classification().score(scores, soft)
    assert value(Classification().metrics()["accuracy"], loss) == 2 / 3
    details = class_details(None, batch_size=3).metrics
    assert value(details["confusion"], loss).rows[0] == ("0", 1.0, 1.0, 0.0)
    each = functional.cross_entropy(scores, soft, reduction="none").tolist()
    assert [row[:2] for row in value(details["worst"], loss).rows] == [
        (at, pytest.approx(each[at])) for at in (1, 0, 2)
    ]


def test_the_worst_samples_are_those_of_the_split_over_ranks_and_batches() -> None:
    scores, labels = SCORES[()].repeat(3, 1), torch.tensor([0, 1, 2] * 4)

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
@pytest.mark.parametrize("shape", list(SCORES))
def test_a_torchmetrics_class_gets_the_targets_that_count(shape: tuple[int, ...], ignore_index: int | None) -> None:
    from torchmetrics.classification import MulticlassAccuracy

    scores, targets = SCORES[shape], targets_of(shape, "hard")
    metric = MulticlassAccuracy(3, average="micro", ignore_index=ignore_index)
    objective = Classification(extra_metrics={"it": metric})
    loss = objective.score(scores, targets)
    assert value(objective.metrics()["it"], loss) == pytest.approx(value(objective.metrics()["accuracy"], loss))
    nothing = objective.metrics()["it"]
    nothing.update(objective.score(scores[:1], targets[:1]), None)  # a shard without a target
    assert value(nothing, loss) == value(objective.metrics()["it"], loss)


@pytest.mark.parametrize("shape", list(SCORES))
@pytest.mark.parametrize("squared", [True, False])
def test_a_teacher_teaches_where_a_target_counts_as_hinton_says(shape: tuple[int, ...], squared: bool) -> None:
    scores, targets = SCORES[shape], targets_of(shape, "hard")
    objective = Distillation(teacher=nn.Tanh(), temperature=3.0, share=0.7, temperature_squared=squared)
    loss = objective.loss(nn.Identity(), (scores, targets))

    rows, labels = scores.movedim(1, -1).reshape(-1, 3), targets.flatten()
    rows, labels = rows[labels != -100], labels[labels != -100]
    wanted = (torch.tanh(rows) / 3).softmax(1)
    teacher = functional.kl_div((rows / 3).log_softmax(1), wanted, reduction="batchmean")
    expected = 0.3 * functional.cross_entropy(rows, labels) + 0.7 * (9 if squared else 1) * teacher
    torch.testing.assert_close(loss.loss_sum / loss.weight, expected, rtol=1e-13, atol=0)
    torch.testing.assert_close((loss.terms or {})["teacher"], teacher * len(rows))
    assert value(objective.metrics()["accuracy"], loss) == (rows.argmax(1) == labels).double().mean()


def test_a_teacher_of_other_classes_is_refused() -> None:
    with pytest.raises(TrainingError, match=r"scores \(4, 3\), and its teacher \(4, 2\): both need the same classes"):
        Distillation(teacher=nn.Linear(3, 2).double()).loss(nn.Identity(), (SCORES[()], torch.zeros(4).long()))


def test_an_ensemble_of_masks_averages_the_probabilities_of_each_pixel() -> None:
    members = [nn.Identity(), nn.Tanh()]
    found = Ensemble(members=members, class_dim=1)(SCORES[3, 4])
    expected = (SCORES[3, 4].softmax(1) + torch.tanh(SCORES[3, 4]).softmax(1)) / 2
    torch.testing.assert_close(found.exp(), expected)


@pytest.mark.parametrize("shape", list(SCORES))
def test_a_prediction_takes_the_classes_from_the_dim_of_the_objective(shape: tuple[int, ...]) -> None:
    scores, found = SCORES[shape], {}
    for kind in ("classes", "probabilities"):
        with Outputs(kind=kind).of(nn.Identity(), Classification()) as function:
            found[kind] = function((scores,), num_rows=4)
    assert torch.equal(found["classes"], scores.argmax(1))
    torch.testing.assert_close(found["probabilities"], scores.softmax(1))


UNLABELLED = ("model=net", "data._target_=tests.support.zoo.PartlyLabelled", "optimizer=sgd", "batch.global_size=16")


def evaluated(model: nn.Module, result: Any, inputs: Tensor, targets: Tensor) -> dict[str, float]:
    """Loss and accuracy of the weights of a run."""
    model = model.double().requires_grad_(requires_grad=False)
    model.load_state_dict(weights(result))
    scores, known = model(inputs.double()), targets != -100
    loss, hits = functional.cross_entropy(scores, targets), (scores.argmax(1) == targets)[known]
    return {"val/loss": float(loss), "val/accuracy": float(hits.double().mean())}


def test_a_step_without_a_target_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(ZeroWeightError, match=r"^step 0: no sample of the global batch has a target"):
        run(tmp_path / "run", *UNLABELLED, "data.every=1", "steps=1")


def test_without_weights_the_weights_of_one_and_counting_give_the_same_training(tmp_path: Path) -> None:
    runs = {
        name: run(tmp_path / name, *UNLABELLED, "epochs=2", "batch.micro_size=3", *keys)
        for name, keys in {"plain": (), "weighted": ("objective.class_weights=[1,1,1]",)}.items()
    }
    assert runs["weighted"]["metrics"] == pytest.approx(runs["plain"]["metrics"], rel=1e-12)
    points = zoo.PartlyLabelled("val")
    expected = evaluated(zoo.Net(), runs["plain"], points.inputs, points.targets)
    assert runs["plain"]["metrics"] == pytest.approx(expected, rel=1e-12)


def test_padded_masks_are_evaluated_pixel_by_pixel(tmp_path: Path) -> None:
    result = run(
        tmp_path / "run", "model._target_=tests.support.zoo.pixels", "data._target_=tests.support.zoo.SeveralSizes",
        "data.collate=trainkit.data.PadImages", "optimizer=sgd", "batch.global_size=4", "steps=6",
        "eval.batch_size=3", "batch.micro_size=2",
    )  # fmt: skip
    images, masks = PadImages()([zoo.SeveralSizes("val")[place] for place in range(10)])
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


def theirs(name: str, **settings: Any) -> Any:
    """A metric of torchmetrics for the four classes."""
    import torchmetrics

    return getattr(torchmetrics, name)(task="multiclass", num_classes=4, **settings)


@needs_torchmetrics
@pytest.mark.parametrize("name", ["F1Score", "AUROC", "CalibrationError"])  # counted; every score kept; a mean
@pytest.mark.parametrize("parts", [PARTS, [slice(0, 50), slice(50, 50)]], ids=["uneven", "one rank empty"])
def test_a_torchmetrics_class_gives_the_same_on_two_ranks_as_on_one(name: str, parts: list[slice]) -> None:
    prototype = theirs(name, **({"average": "macro"} if name == "F1Score" else {}))
    expected = evaluate(prototype, [slice(0, 50)])(Alone())

    assert on_ranks(2, evaluate(prototype, parts)) == [pytest.approx(expected, abs=1e-7)] * 2


@needs_torchmetrics
def test_an_evaluation_starts_empty() -> None:
    prototype = theirs("F1Score")
    first, again = (evaluate(prototype, PARTS[:1])(Alone()) for _ in range(2))
    assert (first, prototype.update_called) == (again, False)


@needs_torchmetrics
@pytest.mark.parametrize("parts", [PARTS, [slice(0, 50), slice(50, 50)]], ids=["uneven", "one rank empty"])
def test_a_confusion_matrix_counts_the_same_on_two_ranks_as_on_one(parts: list[slice]) -> None:
    expected = theirs("ConfusionMatrix")(FOUR_SCORES, FOUR_LABELS)

    for num_classes in (4, None):
        found = on_ranks(2, evaluate(ConfusionMatrix(num_classes, names=["a", "b", "c", "d"]), parts))
        assert found == [Table.of(expected, ["a", "b", "c", "d"])] * 2


@needs_torchmetrics
def test_each_class_has_its_precision_recall_and_f1() -> None:
    (found,) = on_ranks(1, evaluate(PerClass(4), [slice(0, 50)]))

    for column, name in enumerate(("Precision", "Recall", "F1Score"), start=1):
        each = theirs(name, average="none")(FOUR_SCORES, FOUR_LABELS)
        assert [row[column] for row in found.rows] == pytest.approx(each.tolist(), abs=1e-6)
    assert [row[-1] for row in found.rows] == torch.bincount(FOUR_LABELS).tolist()


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

    found = on_ranks(3, lambda collective: [t.tolist() for t in gather_ragged(tensors[collective.rank], collective)])

    assert found == [[[[0, 1], [2, 3], [4, 5]], [], [[0, 1]]]] * 3
