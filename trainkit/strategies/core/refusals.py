"""Limits that several strategies share, found before any process starts."""

from __future__ import annotations

from trainkit.errors import Problem
from trainkit.strategies.base import PlanContext

__all__ = ["no_rollback"]


def no_rollback(because: str, facts: PlanContext) -> list[Problem]:
    """Return the problem of `numerics.on_nonfinite=rollback` where a second pass would be another training.

    Args:
        because: why the updates of a second pass differ; the start of a sentence.
        facts: what the config says.
    """
    if facts.numerics.on_nonfinite != "rollback":
        return []
    rule = f"trains the same steps again, and {because}: a second pass is another training. Use skip or stop."
    return [Problem(key="numerics.on_nonfinite", value="rollback", rule=rule)]
