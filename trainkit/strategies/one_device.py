"""One device, in the process that asks: no group, no exchange, no overhead for what is not used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from trainkit.cluster.identity import Identity
from trainkit.cluster.tasks import Task
from trainkit.errors import Problem
from trainkit.fields import placement
from trainkit.objectives.base import Collective
from trainkit.strategies.base import Facts, Numerics
from trainkit.strategies.collective import LocalCollective
from trainkit.strategies.devices import device_problems, parse_device
from trainkit.strategies.reducers import LaneReducer, LocalReducer, Reducer
from trainkit.strategies.shaping import Compiles
from trainkit.strategies.synchronous import Synchronous

__all__ = ["OneDevice"]


@dataclass(frozen=True, kw_only=True)
class OneDevice(Synchronous):
    """Train on one device.

    Example:
        >>> OneDevice(device="cpu").tasks(Facts())
        (Task(role='worker', index=0, rank=0, device='cpu'),)
    """

    compiles: ClassVar[Compiles] = "model"

    device: Annotated[str, placement] = "auto"
    """`auto` (the first GPU, else the CPU), `cpu`, `cuda:1`, `/gpu:1`."""

    def problems(self, facts: Facts) -> list[Problem]:
        """Whether the device exists, and whether there is anything for further processes to do."""
        if facts.launch is not None and facts.launch.num_ranks > 1:
            started = f"{facts.launch.kind} started {facts.launch.num_ranks} processes"
            rule = f"{started}, and it has work for one. Use strategy=multi_worker_mirrored."
            return [Problem(key="strategy", value="one_device", rule=rule)]
        if self.device == "auto":
            return []
        return device_problems("strategy.device", self.device, facts.num_gpus)

    def num_replicas(self, facts: Facts) -> int:  # noqa: ARG002 - the same on any host
        """One."""
        return 1

    def tasks(self, facts: Facts) -> tuple[Task, ...]:
        """One task on the device."""
        fallback = "cuda:0" if facts.num_gpus else "cpu"
        device = fallback if self.device == "auto" else parse_device(self.device)
        return (Task(role="worker", index=0, rank=0, device=device or fallback),)

    def connect(self, identity: Identity) -> Collective:  # noqa: ARG002 - there is nobody to meet
        """Nobody to meet."""
        return LocalCollective()

    def make_reducer(self, collective: Collective, numerics: Numerics) -> Reducer:  # noqa: ARG002
        """The lanes of a reproducible run, else nothing."""
        if numerics.reproducible:
            return LaneReducer(lanes=numerics.lanes, rank=0, num_ranks=1)
        return LocalReducer()
