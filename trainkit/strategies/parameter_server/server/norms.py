"""Norms of whole gradients, from what servers have of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Norms", "joined"]


@dataclass(frozen=True, kw_only=True)
class Norms:
    """What the chief learns of a sum before it decides."""

    finite: bool
    """Whether every number is finite, where that was asked; else True."""
    others_finite: bool = True
    """Whether buffers that are finite stay so, where that was asked; else True."""
    values: Mapping[int, Tensor]
    """() norms of whole variables by place, where they were asked for."""

    def total(self) -> Tensor:
        """() the global norm; norms of variables are combined in canonical order.

        Example:
            >>> Norms(finite=True, values={1: torch.tensor(4.0), 0: torch.tensor(3.0)}).total()
            tensor(5.)
        """
        if not self.values:
            return torch.tensor(0.0)
        total: Tensor = torch.linalg.vector_norm(torch.stack([self.values[place] for place in sorted(self.values)]))
        return total


def joined(parts: Mapping[int, Sequence[Tensor]], gather: Callable[[int], Tensor] | None) -> dict[int, Tensor]:
    """Norms of whole variables.

    Args:
        parts: place -> the norms of its parts.
        gather: gives a whole gradient, whose norm is then that of one device to the last bit; None: norms of parts are
            put together, which rounds otherwise.

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
            found[place] = torch._foreach_norm([gather(place)], 2.0)[0]  # noqa: SLF001 - what torch's own clipping calls
    return found
