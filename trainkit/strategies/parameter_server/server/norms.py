"""Combine the norms of gradient parts from several servers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Norms", "joined"]


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
        parts: variable index -> the norms of its parts.
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
