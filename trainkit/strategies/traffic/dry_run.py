"""What a run without data shows of a step: the calls of modules, and the state of the optimizer."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorFacts:
    """The size of a tensor in a dry run."""

    numel: int
    """Elements, of a replica that is not cut."""
    width: int
    """Bytes of an element."""
    requires_grad: bool = False
    """Whether backward computes its gradient."""

    @property
    def num_bytes(self) -> int:
        """Its bytes, which are also those of its gradient."""
        return self.numel * self.width


@dataclass(kw_only=True, slots=True)
class ModuleCall:
    """One call of a module in forward and backward of a shard."""

    name: str
    """The canonical name of the module."""
    given: TensorFacts | None
    """Its first argument; None if that is no tensor."""
    returned: TensorFacts | None = None
    """Its output; None if that is no tensor, or if recomputation ended before."""
    has_loss: bool = False
    """Whether it returns the loss of its outputs in their place (`trainkit.objectives.from_hidden`)."""
    is_again: bool = False
    """Whether backward recomputes it."""


class DryRun(Protocol):
    """Runs the largest shard of a step, or an update, on tensors without data."""

    def calls(self, names: Collection[str]) -> Sequence[ModuleCall] | None:
        """Return the calls of modules in forward and backward of a shard, in order; None if it cannot run so.

        Args:
            names: canonical names of the modules.
        """

    def state_elements(self) -> int | None:
        """Return the elements of the optimizer's state of a whole model; None if the optimizer cannot run so."""
