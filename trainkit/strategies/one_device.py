"""One device, in the calling process: no process group, no exchange, no overhead for unused features."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from trainkit.cluster.tasks import Task
from trainkit.errors import Problem
from trainkit.fields import placement
from trainkit.strategies.base import WHOLE_REPLICAS, Facts, PlanContext, SetupRequest
from trainkit.strategies.core.graphs.shards import makers_of
from trainkit.strategies.core.replica import Replica
from trainkit.strategies.core.step import ShardStep
from trainkit.strategies.core.synchronous import OneProcess, SynchronousExecutor, build_parts
from trainkit.strategies.groups.process_group import device_problems, parse_device


@dataclass(frozen=True, kw_only=True)
class OneDevice(OneProcess):
    """Train on one device.

    Example:
        >>> OneDevice(device="cpu").tasks(PlanContext())
        (Task(role='worker', index=0, rank=0, device='cpu'),)
    """

    facts: ClassVar[Facts] = replace(WHOLE_REPLICAS, position=0)
    shard_step: ClassVar[type[ShardStep]] = ShardStep
    """The class of a try at a step; a subclass may set another one."""

    device: Annotated[str, placement] = "auto"
    """`auto` (the first GPU, else the CPU), `cpu`, `cuda:1`, `/gpu:1`."""

    @classmethod
    def spread_over(cls, count: int) -> dict[str, int]:  # noqa: ARG003 - one device
        """Return no keys."""
        return {}

    def validate(self, context: PlanContext) -> list[Problem]:
        """Return problems: a device that does not exist, and processes that have no work."""
        if problems := self.launch_problems(context.launch):
            return problems
        if self.device == "auto":
            return []
        return device_problems("strategy.device", self.device, context.num_gpus)

    def proof_problems(self, context: PlanContext) -> list[Problem]:  # noqa: ARG002 - the same on any host
        """Return the problem that it is the reference itself; a subclass may compute differently."""
        if type(self) is not OneDevice:
            return []
        rule = "is the reference of every proof, and comparing it with itself shows nothing. Use another strategy."
        return [Problem(key="strategy", value="one_device", rule=rule)]

    def tasks(self, context: PlanContext) -> tuple[Task, ...]:
        """Return one task on the device."""
        fallback = "cuda:0" if context.num_gpus else "cpu"
        device = fallback if self.device == "auto" else parse_device(self.device)
        return (Task(role="worker", index=0, rank=0, device=device or fallback),)

    def observed_ranks(self, context: PlanContext) -> tuple[int, ...]:  # noqa: ARG002 - the same on any host
        """Return the only rank."""
        return (0,)

    def setup(self, request: SetupRequest) -> SynchronousExecutor[Replica]:
        """Move the model to the device."""
        replica = Replica(build_parts(request))
        make_step, graphs = makers_of(request, replica, self.shard_step)
        return SynchronousExecutor(replica, request.training, make_step=make_step, graphs=graphs)
