"""The options of the sum of gradients over ranks: who adds up, in which buckets, and how compressed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.distributed as dist

from trainkit.cluster.host import host_id
from trainkit.cluster.tasks import Task
from trainkit.config.values import at_least
from trainkit.errors import Problem
from trainkit.fields import maths, placement, speed
from trainkit.objectives.base import Collective
from trainkit.strategies.base import PlanContext
from trainkit.strategies.reducers import BackendReducer, Reducer
from trainkit.strategies.reducers.compression import Compression, Compressor
from trainkit.strategies.reducers.flat import HierarchicalReducer, ReduceThenBroadcastReducer, RingReducer
from trainkit.strategies.reducers.shared_memory import SharedMemoryReducer

Reduce = Literal["backend", "shared_memory", "ring", "hierarchical", "to_one_device", "auto"]
"""The reducers that sum gradients over the ranks."""


@dataclass(frozen=True, kw_only=True)
class ReductionOptions:
    """The options of summing gradients over ranks."""

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
        """Return problems of combined reducers, compression and modes; pure."""
        if context.numerics.reproducible:
            return self._beside_lanes()
        found = [*self._reduce_problems(context, tasks), *self._compression_problems(context)]
        return [*found, *(self._beside_optimizers() if context.optimizers else ())]

    def _beside_optimizers(self) -> list[Problem]:
        rules = {
            ("reduce", "auto"): "times one exchange a step, and with optimizers there may be several. Name a reducer.",
            ("compression", "powersgd"): "is for one exchange a step, and with optimizers there may be several.",
        }
        return [
            Problem(key=f"strategy.{key}", value=value, rule=rule)
            for (key, value), rule in rules.items()
            if getattr(self, key) == value
        ]

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
        if self.compression != "none" and self.reduce not in ("backend", "auto"):
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

    @property
    def bucket_bytes(self) -> int:
        """Bytes of gradients from which on they are copied into the vector of the exchange; 0: all after backward."""
        return int(self.bucket_mb * 2**20) if self.compression != "powersgd" else 0

    def exchange_copies(self, num_ranks: int) -> float:
        """Return the copies of all gradients that the exchange needs beside its vector; pure."""
        # ring: a slice that receives; shared_memory: a part of the total.
        beside = 1 / num_ranks if self.reduce in ("ring", "shared_memory", "auto") else 0
        # Two bytes instead of four; PowerSGD: the error, and the gradients to compare with.
        compressed = {"none": 0, "bf16": 1, "fp16": 1, "powersgd": 2}
        return beside + compressed[self.compression]

    def reducer_makers(self, collective: Collective, *, timeout_s: float) -> dict[str, Callable[[], Reducer]]:
        """Return a factory for each reducer; with auto, only for distinct ones that work here; collective.

        With auto and a compression that is `backend` alone, which compresses.
        """
        hosts = [int(mark) for mark in torch.cat(collective.gather(torch.tensor([host_id()])))]
        rank = collective.rank
        makers: dict[str, Callable[[], Reducer]] = {
            "backend": self._backend,
            "shared_memory": lambda: SharedMemoryReducer(collective, timeout_s=timeout_s),
            "ring": lambda: RingReducer(collective),
            "hierarchical": lambda: HierarchicalReducer(hosts, rank=rank, timeout_s=timeout_s),
            "to_one_device": ReduceThenBroadcastReducer,
        }
        if self.reduce == "auto":
            num_hosts = len(set(hosts))
            alone = collective.num_ranks == 1
            on_gpus = "nccl" in dist.get_backend()
            if alone or num_hosts > 1 or on_gpus or not sys.platform.startswith("linux"):
                del makers["shared_memory"]
            if num_hosts in (1, len(hosts)):
                del makers["hierarchical"]
            if self.compression != "none":
                return {"backend": self._backend}
        return makers

    def _backend(self) -> BackendReducer:
        compressor = None
        if self.compression != "none":
            compressor = Compressor(
                self.compression, powersgd_rank=self.powersgd_rank, powersgd_after=self.powersgd_after
            )
        return BackendReducer(bucket_mb=self.bucket_mb, compressor=compressor)
