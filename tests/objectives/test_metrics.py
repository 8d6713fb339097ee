"""A metric that is a mean of the means of ranks, or loses an empty rank, is caught here alone."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from tests.objectives.ranks import Alone, on_ranks
from trainkit.errors import TrainingError
from trainkit.objectives.base import Collective, Loss
from trainkit.objectives.classification import Classification, TopK
from trainkit.objectives.confusion import ConfusionMatrix, PerClass
from trainkit.objectives.metrics import gather_ragged
from trainkit.objectives.tables import Table, results_of

# imported by the tests: it takes seconds that collecting would cost in every process of every lane
pytestmark = pytest.mark.skipif(find_spec("torchmetrics") is None, reason="torchmetrics is not installed")

GENERATOR = torch.Generator().manual_seed(0)
SCORES = torch.randn(50, 4, generator=GENERATOR)
LABELS = torch.randint(4, (50,), generator=GENERATOR)
PARTS = [slice(0, 33), slice(33, 50)]


def evaluate(prototype: Any, parts: list[slice]) -> Callable[[Collective], Any]:
    def work(collective: Collective) -> Any:
        metric = Classification(extra_metrics={"it": prototype}).metrics()["it"]
        part = parts[collective.rank]
        if len(LABELS[part]):
            metric.update(Loss(torch.tensor(0.0), 1.0, None, SCORES[part], LABELS[part]), None)
        return metric.compute(collective)

    return work


def theirs(name: str, **settings: Any) -> Any:
    """A metric of torchmetrics for the four classes."""
    import torchmetrics

    return getattr(torchmetrics, name)(task="multiclass", num_classes=4, **settings)


@pytest.mark.parametrize("name", ["F1Score", "AUROC", "CalibrationError"])  # counted; every score kept; a mean
@pytest.mark.parametrize("parts", [PARTS, [slice(0, 50), slice(50, 50)]], ids=["uneven", "one rank empty"])
def test_a_torchmetrics_class_gives_the_same_on_two_ranks_as_on_one(name: str, parts: list[slice]) -> None:
    prototype = theirs(name, **({"average": "macro"} if name == "F1Score" else {}))
    expected = evaluate(prototype, [slice(0, 50)])(Alone())

    assert on_ranks(2, evaluate(prototype, parts)) == [pytest.approx(expected, abs=1e-7)] * 2


def test_an_evaluation_starts_empty() -> None:
    prototype = theirs("F1Score")
    first, again = (evaluate(prototype, PARTS[:1])(Alone()) for _ in range(2))
    assert (first, prototype.update_called) == (again, False)


@pytest.mark.parametrize("parts", [PARTS, [slice(0, 50), slice(50, 50)]], ids=["uneven", "one rank empty"])
def test_a_confusion_matrix_counts_the_same_on_two_ranks_as_on_one(parts: list[slice]) -> None:
    expected = theirs("ConfusionMatrix")(SCORES, LABELS)

    found = on_ranks(2, evaluate(ConfusionMatrix(4, names=["a", "b", "c", "d"]), parts))

    assert found == [Table.of(expected, ["a", "b", "c", "d"])] * 2
    gathered = on_ranks(2, evaluate(theirs("ConfusionMatrix"), parts))
    assert all(one.equal(expected) for one in gathered)


def test_each_class_has_its_precision_recall_and_f1() -> None:
    (found,) = on_ranks(1, evaluate(PerClass(4), [slice(0, 50)]))

    for column, name in enumerate(("Precision", "Recall", "F1Score"), start=1):
        each = theirs(name, average="none")(SCORES, LABELS)
        assert [row[column] for row in found.rows] == pytest.approx(each.tolist(), abs=1e-6)
    assert [row[-1] for row in found.rows] == torch.bincount(LABELS).tolist()


def test_padded_places_do_not_count() -> None:
    labels = torch.tensor([[0, 1, -100], [1, -100, -100]])
    metric = ConfusionMatrix(2)
    metric.update(Loss(torch.tensor(0.0), 3, None, torch.zeros(2, 3, 2), labels), None)

    assert metric.compute(Alone()).rows == (("0", 1.0, 0.0), ("1", 2.0, 0.0))


def test_what_a_metric_gives_is_a_number_or_a_table() -> None:
    value = {"mean": torch.tensor([0.5]), "each": torch.tensor([0.25, float("nan")]), "cube": torch.zeros(1, 1, 2)}

    figures, tables = results_of("val/f1", value)

    assert figures == {"val/f1/mean": 0.5}
    assert tables["val/f1/each"].to_json() == {"columns": ["index", "value"], "rows": [["0", 0.25], ["1", None]]}
    assert tables["val/f1/cube"].rows == (("(0, 0, 0)", 0.0), ("(0, 0, 1)", 0.0))
    with pytest.raises(TrainingError, match=r"^the metric val/f1 returns a list, and must return a number, a t"):
        results_of("val/f1", [1.0])


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
