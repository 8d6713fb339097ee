"""Each tolerance of a comparison, by its own number: half of the bound is rounding, twice the bound is a difference."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainkit.objectives.base import Loss, Model, Objective
from trainkit.run.diagnosis.evidence import Shard, add_up
from trainkit.run.diagnosis.matching import differing_buffers, differing_gradients, differing_parameters
from trainkit.run.equivalence.comparing import compare, is_rounding, moved_by_rounding
from trainkit.run.planning.coupling import probe

HALF_AND_TWICE = pytest.mark.parametrize(("times", "differs"), [(0.5, False), (2.0, True)])


@HALF_AND_TWICE
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2.0**-11), (torch.float64, 2.0**-40)])
def test_weights_of_prove_differ_by_4096_units_of_their_norm(
    times: float, differs: bool, dtype: torch.dtype, bound: float
) -> None:
    expected = {1: {"param/w": torch.tensor([1.0], dtype=dtype)}}
    found = {1: {"param/w": torch.tensor([1.0 + times * bound], dtype=dtype)}}
    (one,) = compare(expected, found)
    assert (one.verdict, is_rounding(expected, found)) == (("different", False) if differs else ("rounding", True))


@HALF_AND_TWICE
def test_a_weight_without_gradient_may_move_by_1e_8_of_the_rates(times: float, differs: bool) -> None:
    expected = {1: {"param/w": torch.full((1,), 1e-6)}}
    found = {1: {"param/w": torch.full((1,), 1e-6 + times * 3e-8)}}
    allowed = moved_by_rounding([1.0, 2.0])
    (one,) = compare(expected, found, no_gradient=frozenset({"param/w"}), allowed=allowed)
    assert one.verdict == ("different" if differs else "rounding")


def gradients_differ(
    found: dict[str, Tensor], *, read_from: dict[str, Tensor] | None = None, rate: float = 1.0
) -> bool:
    """Whether gradients differ from one of 1 for w and of 0 for b."""
    right = {"w": torch.ones_like(found["w"]), "b": torch.zeros_like(found["b"])}
    expected = add_up([Shard(gradient=right, weight=1.0, size=1)], {})
    return differing_gradients(0, expected, found, errors={}, read_from=read_from, rate=rate) is not None


@HALF_AND_TWICE
def test_a_gradient_differs_by_4096_units_of_its_terms(times: float, differs: bool) -> None:
    assert gradients_differ({"w": torch.tensor([1 + times * 2.0**-11]), "b": torch.zeros(1)}) == differs


@HALF_AND_TWICE
def test_a_gradient_of_zero_differs_by_1e_12_of_all(times: float, differs: bool) -> None:
    one = torch.ones(1, dtype=torch.float64)
    assert gradients_differ({"w": one, "b": one * times * 1e-12}) == differs


@HALF_AND_TWICE
def test_a_gradient_read_from_parameters_differs_by_four_units_of_them_over_the_rate(
    times: float, differs: bool
) -> None:
    params = {"param/w": torch.ones(1), "param/b": torch.zeros(1)}
    found = {"w": torch.tensor([1.0 + times * (0.5 + 2.0**-11)]), "b": torch.zeros(1)}
    assert gradients_differ(found, read_from=params, rate=2.0**-20) == differs


@HALF_AND_TWICE
def test_a_buffer_differs_by_4096_units_of_its_norm(times: float, differs: bool) -> None:
    found = {"mean": torch.tensor([1.0 + times * 2.0**-11])}
    assert (differing_buffers(0, {"mean": torch.ones(1)}, found) is not None) == differs


@HALF_AND_TWICE
@pytest.mark.parametrize(("before", "bound"), [(1.0, 2.0**-20), (0.0, 2.0**-11 + 2.0**-20)])
def test_an_update_differs_by_eight_units_and_4096_of_the_move(
    times: float, differs: bool, before: float, bound: float
) -> None:
    right, start = {"w": torch.ones(1)}, {"w": torch.full((1,), before)}
    found = {"w": torch.tensor([1.0 + times * bound])}
    assert (differing_parameters(0, right, before=start, found=found, skipped=()) is not None) == differs


@dataclass(frozen=True, kw_only=True)
class Coupled(Objective):
    """The sum of the outputs, and a part of the square of a sum that couples the samples."""

    share: float
    by_outputs: bool

    def loss(self, model: Model, batch: Any) -> Loss:
        outputs = model(batch)
        total = (outputs if self.by_outputs else batch[:, 0]).sum()
        return Loss(loss_sum=outputs.sum() + self.share / 2 * total**2, weight=float(len(batch)))


def couples(objective: Objective) -> Sequence[tuple[str, str]]:
    """What a probe finds with two samples of 0 and two of 1; sums of four losses are 4."""
    model = nn.Linear(2, 1, bias=False)
    model.weight = nn.Parameter(torch.tensor([[1.0, 0.0]]))
    samples = [torch.tensor([value, 0.0]) for value in (0.0, 0.0, 1.0, 1.0)]
    return probe(model, objective, samples, lambda given, _: torch.stack(list(given))).found


@HALF_AND_TWICE
def test_a_plan_finds_gradients_that_couple_by_64_units(times: float, differs: bool) -> None:
    assert bool(couples(Coupled(share=times * 2.0**-17, by_outputs=True))) == differs


@HALF_AND_TWICE
def test_a_plan_finds_losses_that_couple_by_64_units_of_their_sum(times: float, differs: bool) -> None:
    assert bool(couples(Coupled(share=times * 2.0**-15, by_outputs=False))) == differs
