"""The update of a step: whether it is made, and how often its gradients are walked for that."""

from __future__ import annotations

import pytest
import torch

from tests.contract.stepping import Case, _Rank
from trainkit.strategies.base import LossWeighting, Numerics, Status, UpdateParams
from trainkit.strategies.core import update as module
from trainkit.strategies.core.replica import Replica
from trainkit.strategies.core.step import LossDivisor
from trainkit.strategies.core.update import apply_update


@pytest.fixture
def orders(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The orders of the norms that are taken."""
    taken, plain = list[float](), module._norms

    def norms(*args: object) -> torch.Tensor:
        taken.append(args[-1])  # type: ignore[arg-type]
        return plain(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "_norms", norms)
    return taken


def updated(value: float, precision: str, max_norm: float | None) -> Status:
    rank = _Rank(None, Case(precision=precision, optimizer="sgd"))
    rank.numerics = Numerics(on_nonfinite="stop" if precision == "fp16_mixed" else "skip")
    replica = rank.setup(0).local
    assert isinstance(replica, Replica)
    sums = [torch.full_like(param, value) for param in replica.params.values()]
    rule = UpdateParams(lr_factor=1.0, max_norm=max_norm)
    return apply_update(replica, sums, LossDivisor(1.0, counted=False), rule)[0]


@pytest.mark.parametrize("precision", ["fp32", "fp16_mixed"])
@pytest.mark.parametrize(
    ("value", "max_norm", "taken"), [(2.0, 1.0, [2.0]), (2.0, None, [torch.inf]), (1e30, 1.0, [2.0, torch.inf])]
)
def test_gradients_are_walked_once_to_be_judged_and_clipped(
    value: float, max_norm: float | None, taken: list[float], precision: str, orders: list[float]
) -> None:
    assert updated(value, precision, max_norm) is Status.applied  # the squares of 1e30 are not finite
    assert orders == taken


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
@pytest.mark.parametrize(("precision", "status"), [("fp32", Status.skipped), ("fp16_mixed", Status.retry)])
def test_an_update_of_what_is_not_finite_is_not_made(
    precision: str, status: Status, value: float, orders: list[float]
) -> None:
    assert updated(value, precision, 1.0) is status
    assert orders == [2.0, torch.inf]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_counted_weight_that_was_planned_changes_no_bit(dtype: torch.dtype) -> None:
    weighing = LossWeighting(per_sample=None, planned=1.0, exact=True)
    for size in range(1, 200):
        divisor, weights = LossDivisor.of(weighing, size), torch.tensor([size, 0, size // 2], dtype=dtype)
        factors = divisor.factor(weights).tolist()
        assert factors[:2] == [1.0, 0.0]
        assert size < 2 or factors[2] == torch.tensor(size, dtype=dtype) / (size // 2)
