"""Staged gradients of a server by name, the sum that the chief requested last, and its norms."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from trainkit.strategies.core.sparse import with_values
from trainkit.strategies.parameter_server.server.gradient_buffer import BufferPool, Parts, StagedGradient, lane_sum
from trainkit.strategies.parameter_server.wire.protocol import RequestRejectedError
from trainkit.strategies.parameter_server.wire.variable_shards import RowShard
from trainkit.strategies.tensors.layouts import view_of


@dataclass(frozen=True, kw_only=True)
class Norms:
    """The properties of a sum that the chief needs for its decision."""

    finite: bool
    """Whether every number is finite, if requested; else True."""
    others_finite: bool = True
    """Whether finite buffers stay finite, if requested; else True."""
    values: Mapping[int, Tensor]
    """() norms of whole variables by index, if requested."""

    def total(self) -> Tensor:
        """Return () the global norm; norms of variables are combined in canonical order.

        Example:
            >>> Norms(finite=True, values={1: torch.tensor(4.0), 0: torch.tensor(3.0)}).total()
            tensor(5.)
        """
        if not self.values:
            return torch.tensor(0.0)
        total: Tensor = torch.linalg.vector_norm(torch.stack([self.values[place] for place in sorted(self.values)]))
        return total


def joined(parts: Mapping[int, Sequence[Tensor]], gather: Callable[[int], Tensor] | None) -> dict[int, Tensor]:
    """Return the norms of whole variables.

    Args:
        parts: index of a variable -> norms of its parts.
        gather: returns a whole gradient, whose norm then equals that of one device to the last bit; None: norms of
            parts are combined, which rounds differently.

    Example:
        >>> joined({0: [torch.tensor(3.0), torch.tensor(4.0)]}, None)
        {0: tensor(5.)}
    """
    found = {}
    for place, norms in parts.items():
        if len(norms) == 1:
            found[place] = norms[0]
        elif gather is None:
            found[place] = torch.linalg.vector_norm(torch.stack(list(norms)))
        else:
            found[place] = torch._foreach_norm([gather(place)], 2.0)[0]  # noqa: SLF001 - as in torch's own clipping
    return found


_MOST: Final = 4096
"""Limit of the gradients that are staged at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AggregationOptions:
    """The operations on a sum, in this order."""

    lanes: int | None = None
    """Number of lanes of the order of summation; None: one shard after another."""
    weight_factor: float | None = None
    """Factor of the sum: the divisor over the counted weight."""
    check_finite: bool = False
    """Check whether every number of the gradients is finite."""
    check_others: bool = False
    """Check whether finite buffers stay finite."""
    unscale: float | None = None
    """Factor of the sum: one over the loss scale."""
    norms: bool = False
    """Compute the norm of each gradient."""


@dataclass(frozen=True, slots=True)
class AggregationResult:
    """The information about a sum that is sent to the chief."""

    finite: bool
    places: list[int]
    """The indices of the pieces with a gradient."""
    norms: Tensor
    """(places,) the norms, if requested."""


class GradientAggregator:
    """Aggregates staged gradients. Not thread-safe, except for methods that only the chief calls."""

    def __init__(self, params: Sequence[RowShard], dtype: torch.dtype) -> None:
        self.pool = BufferPool(dtype)
        self.total: Parts = []
        self._params = list(params)
        self._staged: dict[str, StagedGradient] = {}
        self._taken: list[StagedGradient] = []
        self._had_gradient = [False] * len(self._params)

    def stage(self, key: str, gradient: StagedGradient) -> None:
        """Stage a gradient; it replaces one of the same name.

        Raises:
            RequestRejectedError: too many gradients are staged.
        """
        if key not in self._staged and len(self._staged) >= _MOST:
            self.pool.give(gradient.memory)
            raise RequestRejectedError(f"{_MOST} gradients wait already")
        self.drop([key])
        self._staged[key] = gradient

    def drop(self, keys: Sequence[str]) -> None:
        """Discard staged gradients, if they exist."""
        for key in keys:
            gradient = self._staged.pop(key, None)
            if gradient is not None:
                self.pool.give(gradient.memory)

    def take(self, keys: Sequence[str]) -> list[StagedGradient]:
        """Remove gradients from the stage and return them.

        Raises:
            RequestRejectedError: one does not exist; none is removed.
        """
        missing = [key for key in keys if key not in self._staged]
        if missing:
            raise RequestRejectedError(f"there is no gradient {missing[0]}")
        self.forget()
        self._taken = [self._staged.pop(key) for key in keys]
        return self._taken

    def forget(self) -> None:
        """Release the sum and its gradients."""
        for gradient in self._taken:
            self.pool.give(gradient.memory)
        self._taken, self.total = [], []

    def aggregate(self, gradients: Sequence[StagedGradient], options: AggregationOptions) -> AggregationResult:
        """Compute `total`."""
        count = len(self._params)
        total = lane_sum([gradient.parts for gradient in gradients], options.lanes) if gradients else []
        if options.lanes is not None:
            self._fill_seen(total)
        grads, present = with_values(total[:count])
        self.total = [*grads, *total[count:]]
        if options.weight_factor is not None and present:
            torch._foreach_mul_(present, torch.tensor(options.weight_factor, dtype=present[0].dtype))
        finite = not options.check_finite or all(bool(norm.isfinite()) for norm in _norms(present, float("inf")))
        if options.unscale is not None and present:
            torch._foreach_mul_(present, options.unscale)
        places = [place for place, grad in enumerate(grads) if grad is not None and _has_numbers(grad)]
        norms = _norms(present, 2.0) if options.norms else []
        return AggregationResult(finite, places, torch.stack(norms) if norms else torch.empty(0, dtype=self.pool.dtype))

    def scale(self, factor: float) -> None:
        """Multiply the gradients of the sum by a factor."""
        _, present = with_values(self.total[: len(self._params)])
        if factor != 1.0 and present:
            torch._foreach_mul_(present, torch.tensor(factor, dtype=present[0].dtype))

    def _fill_seen(self, total: Parts) -> None:
        """Fill in zeros for pieces that had a gradient in an earlier step only, as a vector exchange would."""
        for place, piece in enumerate(self._params if total else ()):
            self._had_gradient[place] = self._had_gradient[place] or total[place] is not None
            if self._had_gradient[place] and total[place] is None:
                total[place] = view_of(torch.zeros(piece.numel, dtype=self.pool.dtype), piece.shape, piece.strides)


def _has_numbers(grad: Tensor) -> bool:
    return bool((grad.values() if grad.is_sparse else grad).numel())


def _norms(present: list[Tensor], order: float) -> list[Tensor]:
    """Return the norm of every tensor."""
    return list(torch._foreach_norm(present, order)) if present else []  # noqa: SLF001 - as in torch's own clipping
