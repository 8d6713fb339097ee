"""A task: one process of a run, with role, index, rank and device."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One process of a run.

    Example:
        >>> str(Task(role="worker", index=1, rank=2, device="cuda:2"))
        'worker:1'
    """

    role: str
    """chief, worker, ps or evaluator; the synchronous strategies have workers only."""
    index: int
    """The number among the tasks of its role, from 0."""
    rank: int
    """The number among all tasks, from 0; rank 0 owns the run folder."""
    device: str = "cpu"
    """The device of its replica: `cpu`, `cuda:0`."""

    @property
    def is_evaluator(self) -> bool:
        """Whether it evaluates the checkpoints of the others, which do not wait for it."""
        return self.role == "evaluator"

    def __str__(self) -> str:
        return f"{self.role}:{self.index}"
