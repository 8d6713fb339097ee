"""Padding that counts as a token, in the loss or in a perplexity over ranks, is caught here alone."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from tests.objectives.ranks import Alone, on_ranks
from trainkit.objectives import fields, language_modelling
from trainkit.objectives.base import Collective
from trainkit.objectives.fields import exact
from trainkit.objectives.language_modelling import LanguageModelling, Perplexity

SCORES = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
PADDED = torch.tensor([[1, 2, -100], [4, -100, -100]])
FULL = torch.tensor([[1, 2, 3], [4, 0, 1]])


@pytest.mark.parametrize(("targets", "weight"), [(PADDED, 3), (FULL, 6)], ids=["padded", "full"])
def test_sum_over_weight_is_the_mean_over_tokens_that_are_not_padding(targets: torch.Tensor, weight: int) -> None:
    loss = LanguageModelling().score(SCORES, targets)
    expected = functional.cross_entropy(SCORES.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(loss.loss_sum / loss.weight, expected)
    assert loss.weight == weight


def test_a_shard_of_padding_alone_is_zero_over_zero_not_nan() -> None:
    loss = LanguageModelling().score(SCORES, torch.full((2, 3), -100))
    assert (float(loss.loss_sum), int(loss.weight)) == (0, 0)


def test_the_weight_is_known_beforehand_only_without_padding() -> None:
    assert LanguageModelling(padding=False).weight_per_sample((FULL[0], FULL[0])) == 3
    assert LanguageModelling().planned_weight_per_sample((FULL[0], PADDED[0])) == 3


def test_perplexity_is_that_of_all_tokens_not_a_mean_of_ranks() -> None:
    objective = LanguageModelling()

    def evaluate(collective: Collective) -> float:
        metric = Perplexity()
        part = slice(collective.rank, collective.rank + 1)
        metric.update(objective.score(SCORES[part], PADDED[part]), None)
        return metric.compute(collective)

    expected = math.exp(functional.cross_entropy(SCORES.flatten(0, 1).double(), PADDED.flatten()))

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
