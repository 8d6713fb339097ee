"""Facts about a step from a run without data: the calls of modules, and the state of the optimizer."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorFacts:
    """The size of a tensor in a dry run."""

    numel: int
    """Number of elements, in an unsharded replica."""
    width: int
    """Bytes of an element."""
    requires_grad: bool = False
    """Whether backward computes its gradient."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor, which are also those of its gradient."""
        return self.numel * self.width


@dataclass(kw_only=True, slots=True)
class ModuleCall:
    """One call of a module in forward and backward of a shard."""

    name: str
    """The canonical name of the module."""
    given: TensorFacts | None
    """First argument of the call; None if it is not a tensor."""
    returned: TensorFacts | None = None
    """Output of the call; None if it is not a tensor, or if recomputation ended earlier."""
    has_loss: bool = False
    """Whether it returns the loss of its outputs instead of them (`trainkit.objectives.linear_cross_entropy`)."""
    is_again: bool = False
    """Whether backward recomputes it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveCall:
    """A collective of the first rank in a step."""

    kind: Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all"]
    ranks: tuple[int, ...]
    """The ranks that take part."""
    num_bytes: int
    """Bytes of the whole tensor, of which each rank has a part before or after, or which is summed."""
    shard: int | None
    """Number of the observed shard of the rank; None: between the last backward pass and the next step."""
    is_in_update: bool = False
    """Whether the update makes it."""
    times: int = 1
    """Number of shards of the rank with the same one."""


class DryRun(Protocol):
    """Runs the largest shard of a step, or an update, on tensors without data."""

    def collectives(self) -> Sequence[CollectiveCall] | None:
        """Return the collectives of the first rank in a step with the first two and the last of its shards, in order;
        None if it cannot run without data.
        """

    def calls(self, names: Collection[str]) -> Sequence[ModuleCall] | None:
        """Return the calls of modules in forward and backward of a shard, in order; None if it cannot run without data.

        Args:
            names: canonical names of the modules.
        """

    def state_elements(self) -> int | None:
        """Return the elements of the optimizer's state of a whole model; None if the optimizer cannot run without
        data.
        """
