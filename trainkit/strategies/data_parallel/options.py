"""How mirrored strategies add up gradients: by which reducer, how exactly, and what is refused."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from trainkit.cluster.tasks import Task
from trainkit.config.values import at_least
from trainkit.errors import Problem
from trainkit.fields import maths, placement, speed
from trainkit.strategies.base import PlanContext
from trainkit.strategies.reducers.compression import Compression

__all__ = ["Reduce", "ReductionOptions"]

Reduce = Literal["backend", "shared_memory", "ring", "hierarchical", "to_one_device", "auto"]
"""Who adds up gradients over the ranks."""


@dataclass(frozen=True, kw_only=True)
class ReductionOptions:
    """The choice of how gradients are summed over ranks."""

    reduce: Annotated[Reduce, placement] = "backend"
    """Who sums gradients; shared_memory is for CPU processes of one host, auto times what can work here."""
    bucket_mb: Annotated[float, at_least(0), speed] = 25.0
    """MiB of gradients that the backend exchanges at once while backward computes the others; 0: all at the end."""
    compression: Annotated[Compression, maths(neutral="none")] = "none"
    """Gradients as bfloat16 or float16, or as two thin matrices each (powersgd): fewer bytes, and another result."""
    powersgd_rank: Annotated[int, at_least(1), maths(neutral=1)] = 1
    """Width of PowerSGD's matrices: more is more exact, and more bytes."""
    powersgd_after: Annotated[int, at_least(2), maths(neutral=1000)] = 1000
    """Steps whose gradients PowerSGD sends whole, before it begins."""
    allow_unused: Annotated[bool, placement] = False
    """Whether parameters may get no gradient; they are then left out of the exchange. False names them in an error."""

    def reduction_problems(self, context: PlanContext, tasks: Callable[[], Sequence[Task]]) -> list[Problem]:
        """Return reducers, compression and modes that do not go together; pure.

        Args:
            context: what the config says.
            tasks: gives the tasks of the run.
        """
        if context.numerics.reproducible:
            return self._beside_lanes()
        return [*self._reduce_problems(context, tasks), *self._compression_problems(context)]

    def _beside_lanes(self) -> list[Problem]:
        rule = "cannot be had with numerics.reproducible=true, whose order of summation is fixed. Leave one out."
        chosen = {"reduce": (self.reduce, "backend"), "compression": (self.compression, "none")}
        return [
            Problem(key=f"strategy.{key}", value=value, rule=rule)
            for key, (value, default) in chosen.items()
            if value != default
        ]

    def _reduce_problems(self, context: PlanContext, tasks: Callable[[], Sequence[Task]]) -> list[Problem]:
        found = []
        if self.reduce == "shared_memory":
            hosts = context.launch.num_hosts if context.launch is not None else 1
            if hosts > 1:
                rule = f"reaches the processes of one host, and there are {hosts}. Use backend, hierarchical or auto."
                found.append(Problem(key="strategy.reduce", value=self.reduce, rule=rule))
            elif any(task.device != "cpu" for task in tasks()):
                rule = "sums in the memory of the host, and the replicas are on GPUs. Use backend."
                found.append(Problem(key="strategy.reduce", value=self.reduce, rule=rule))
            elif not sys.platform.startswith("linux"):
                rule = f"needs Linux, and this is {sys.platform}. Use backend."
                found.append(Problem(key="strategy.reduce", value=self.reduce, rule=rule))
        if self.reduce not in ("backend", "auto") and self.bucket_mb != ReductionOptions.bucket_mb:
            rule = f"has no effect with strategy.reduce={self.reduce}: only backend sends buckets."
            found.append(Problem(key="strategy.bucket_mb", value=self.bucket_mb, rule=rule))
        return found

    def _compression_problems(self, context: PlanContext) -> list[Problem]:
        found = []
        if self.compression != "none" and self.reduce != "backend":
            rule = f"is done by the backend, and strategy.reduce={self.reduce}. Use strategy.reduce=backend."
            found.append(Problem(key="strategy.compression", value=self.compression, rule=rule))
        if self.compression != "powersgd":
            for key in ("powersgd_rank", "powersgd_after"):
                if getattr(self, key) != getattr(ReductionOptions, key):
                    rule = "has no effect without strategy.compression=powersgd."
                    found.append(Problem(key=f"strategy.{key}", value=getattr(self, key), rule=rule))
            return found
        kept = "what one such step loses would stay in its error feedback for good. Use bf16 or none."
        if context.precision == "fp16_mixed":
            rule = f"cannot leave out a step that overflows, as precision=fp16_mixed does: {kept}"
            found.append(Problem(key="strategy.compression", value=self.compression, rule=rule))
        if context.numerics.leaves_out:
            rule = f"cannot leave out a step, as numerics.on_nonfinite={context.numerics.on_nonfinite} does: {kept}"
            found.append(Problem(key="strategy.compression", value=self.compression, rule=rule))
        return found
