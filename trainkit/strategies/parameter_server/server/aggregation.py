"""What waits at a server for the chief's word: gradients by their names, and the sum of those it asked for last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from trainkit.strategies.core.sparse import with_values
from trainkit.strategies.parameter_server.server.gradient_buffer import BufferPool, Parts, StagedGradient, lane_sum
from trainkit.strategies.parameter_server.wire.protocol import RequestRejectedError
from trainkit.strategies.parameter_server.wire.variable_shards import RowShard
from trainkit.strategies.tensors.layouts import view_of

__all__ = ["AggregationOptions", "AggregationResult", "GradientAggregator"]

_MOST: Final = 4096
"""Gradients that wait at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AggregationOptions:
    """What is done to a sum, in this order."""

    lanes: int | None = None
    """Lanes of the order of summation."""
    weight_factor: float | None = None
    """Multiply by it: the divisor over the counted weight."""
    check_finite: bool = False
    """See whether every number of the gradients is finite."""
    check_others: bool = False
    """See whether buffers that are finite stay so."""
    unscale: float | None = None
    """Multiply by it: one over the loss scale."""
    norms: bool = False
    """Take the norm of each gradient."""


@dataclass(frozen=True, slots=True)
class AggregationResult:
    """What the chief is told of a sum."""

    finite: bool
    places: list[int]
    """Of the pieces that have a gradient."""
    norms: Tensor
    """(places,) where they were wished for."""


class GradientAggregator:
    """Gradients on their way into the variables. Not safe for threads, but for what only the chief does.

    Args:
        params: the trainable pieces, which come first.
        dtype: that of the masters.
    """

    def __init__(self, params: Sequence[RowShard], dtype: torch.dtype) -> None:
        self.spares = BufferPool(dtype)
        self.total: Parts = []
        self._params = list(params)
        self._staged: dict[str, StagedGradient] = {}
        self._taken: list[StagedGradient] = []
        self._seen = [False] * len(self._params)

    def stage(self, key: str, gradient: StagedGradient) -> None:
        """Keep a gradient; one of the same name makes room for it.

        Raises:
            RefusedError: too many wait.
        """
        if key not in self._staged and len(self._staged) >= _MOST:
            self.spares.give(gradient.memory)
            raise RequestRejectedError(f"{_MOST} gradients wait already")
        self.drop([key])
        self._staged[key] = gradient

    def drop(self, keys: Sequence[str]) -> None:
        """Forget gradients, those that are there."""
        for key in keys:
            gradient = self._staged.pop(key, None)
            if gradient is not None:
                self.spares.give(gradient.memory)

    def take(self, keys: Sequence[str]) -> list[StagedGradient]:
        """Gradients that wait no more.

        Raises:
            RefusedError: one is not there; none is taken.
        """
        missing = [key for key in keys if key not in self._staged]
        if missing:
            raise RequestRejectedError(f"no gradient {missing[0]} is here")
        self.forget()
        self._taken = [self._staged.pop(key) for key in keys]
        return self._taken

    def forget(self) -> None:
        """Let go of the sum and of what it was made of."""
        for gradient in self._taken:
            self.spares.give(gradient.memory)
        self._taken, self.total = [], []

    def aggregate(self, gradients: Sequence[StagedGradient], wishes: AggregationOptions) -> AggregationResult:
        """Make `total`.

        Args:
            gradients: one a shard, in their order; consumed.
            wishes: the order of summation, and what is done to the sum.
        """
        count = len(self._params)
        total = lane_sum([gradient.parts for gradient in gradients], wishes.lanes) if gradients else []
        if wishes.lanes is not None:
            self._fill_seen(total)
        grads, present = with_values(total[:count])
        self.total = [*grads, *total[count:]]
        if wishes.weight_factor is not None and present:
            torch._foreach_mul_(present, torch.tensor(wishes.weight_factor, dtype=present[0].dtype))
        finite = not wishes.check_finite or all(bool(norm.isfinite()) for norm in _norms(present, float("inf")))
        if wishes.unscale is not None and present:
            torch._foreach_mul_(present, wishes.unscale)
        places = [place for place, grad in enumerate(grads) if grad is not None and _has_numbers(grad)]
        norms = _norms(present, 2.0) if wishes.norms else []
        return AggregationResult(
            finite, places, torch.stack(norms) if norms else torch.empty(0, dtype=self.spares.dtype)
        )

    def scale(self, factor: float) -> None:
        """Multiply the gradients of the sum."""
        _, present = with_values(self.total[: len(self._params)])
        if factor != 1.0 and present:
            torch._foreach_mul_(present, torch.tensor(factor, dtype=present[0].dtype))

    def _fill_seen(self, total: Parts) -> None:
        """Zeros for what had a gradient before and has none in this step: as where ranks exchange one vector."""
        for place, piece in enumerate(self._params if total else ()):
            self._seen[place] = self._seen[place] or total[place] is not None
            if self._seen[place] and total[place] is None:
                total[place] = view_of(torch.zeros(piece.numel, dtype=self.spares.dtype), piece.shape, piece.strides)


def _has_numbers(grad: Tensor) -> bool:
    return not grad.is_sparse or bool(grad.values().numel())


def _norms(present: Sequence[Tensor], order: float) -> list[Tensor]:
    """Of each; an empty part has no largest element."""
    filled = [one if one.numel() else one.new_zeros(1) for one in present]
    return list(torch._foreach_norm(filled, order)) if filled else []  # noqa: SLF001 - what torch's own clipping calls
