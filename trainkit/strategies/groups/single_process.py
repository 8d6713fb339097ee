"""What strategies of a single process share, whatever devices it drives."""

from __future__ import annotations

from trainkit.errors import Problem
from trainkit.strategies.base import PlanContext

__all__ = ["launch_problems"]


def launch_problems(context: PlanContext, *, named: str, called: str = "it") -> list[Problem]:
    """Return the problem of processes that an external launcher started and that have no work.

    Args:
        context: what the config says.
        named: the strategy's name in the config.
        called: what the message calls the strategy.
    """
    if context.launch is None or context.launch.num_ranks == 1:
        return []
    started = f"{context.launch.kind} started {context.launch.num_ranks} processes"
    rule = f"{started}, and {called} has work for one. Use strategy=multi_worker_mirrored."
    return [Problem(key="strategy", value=named, rule=rule)]
