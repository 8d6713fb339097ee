"""Strategies of a single process, whatever devices it drives."""

from __future__ import annotations

from typing import ClassVar

from trainkit.cluster.identity import Identity
from trainkit.errors import Problem
from trainkit.objectives.base import Collective
from trainkit.strategies.base import Numerics, PlanContext
from trainkit.strategies.core.synchronous import Synchronous
from trainkit.strategies.groups.collective import LocalCollective
from trainkit.strategies.reducers import DeterministicReducer, LocalReducer, Reducer

__all__ = ["SingleProcess"]


class SingleProcess(Synchronous):
    """What strategies of one process share: nobody to meet, and nothing for further processes to do."""

    named: ClassVar[str]
    """Its name in the config."""
    called: ClassVar[str] = "it"
    """What a message calls it."""

    def launch_problems(self, facts: PlanContext) -> list[Problem]:
        """Whether something else started processes that there is no work for."""
        if facts.launch is None or facts.launch.num_ranks == 1:
            return []
        started = f"{facts.launch.kind} started {facts.launch.num_ranks} processes"
        rule = f"{started}, and {self.called} has work for one. Use strategy=multi_worker_mirrored."
        return [Problem(key="strategy", value=self.named, rule=rule)]

    def num_replicas(self, facts: PlanContext) -> int:  # noqa: ARG002 - the same on any host
        """One."""
        return 1

    def connect(self, identity: Identity) -> Collective:  # noqa: ARG002 - there is nobody to meet
        """Nobody to meet."""
        return LocalCollective()

    def make_reducer(self, collective: Collective, numerics: Numerics) -> Reducer:  # noqa: ARG002
        """The lanes of a reproducible run, else nothing: what is computed here is one sum already."""
        if numerics.reproducible:
            return DeterministicReducer(lanes=numerics.lanes, rank=0, num_ranks=1)
        return LocalReducer()
