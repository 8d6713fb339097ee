"""Synchronous central storage: the threads of a process compute a step together, then the variables are updated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trainkit.numerics.batch import Ticket
from trainkit.strategies.base import (
    Batch,
    Executor,
    LocalModel,
    StateDict,
    StepContext,
    StepCounter,
    StepOutcome,
)
from trainkit.strategies.central_storage.step import central_step
from trainkit.strategies.central_storage.variables import CentralVariables
from trainkit.strategies.core.replica import replica_state, restore_replica

__all__ = ["CentralExecutor"]


class CentralExecutor(Executor):
    """The variables in one place, and the copies that compute with them.

    Args:
        central: the variables and the copies.
        training: plan, objective and update rule.
    """

    def __init__(self, central: CentralVariables, training: StepContext) -> None:
        self._central, self._training = central, training

    @property
    def local(self) -> LocalModel:
        """The model that is evaluated."""
        return self._central.local

    def assign(self, step: int) -> tuple[int, ...]:
        """Return all shards: the threads share them out."""
        return tuple(range(self._training.plan.num_shards(step)))

    def tickets(self, position: StepCounter, until: int | None = None) -> Iterator[Ticket]:  # noqa: ARG002 - the loop ends
        """Yield the position's step, whole."""
        while True:
            step = position.step
            yield Ticket(step, self.assign(step))

    def step(self, ticket: Ticket, batches: Sequence[Batch]) -> StepOutcome:
        """Run forward and backward on all threads, and update the variables once."""
        return central_step(self._central, ticket, batches, self._training)

    def state_dict(self) -> StateDict:
        """Return that of the variables."""
        return replica_state(self._central.variables)

    def load_state_dict(self, state: StateDict) -> None:
        """Restore the tensors of a checkpoint of any strategy, and give them to the copies."""
        restore_replica(self._central.variables, state)
        self._central.refresh(frozen=True)

    def recover(self, step: int) -> bool:
        """Put the buffers of an interrupted step back."""
        return self._central.variables.recover(step)

    def close(self, *, failed: bool = False) -> None:  # noqa: ARG002 - there is no other rank
        """End the threads."""
        self._central.close()
