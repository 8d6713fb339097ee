"""How mirrored strategies add up gradients: by which reducer, how exactly, and what is refused."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist

from trainkit.cluster.host import host_id
from trainkit.config.values import at_least
from trainkit.errors import Problem
from trainkit.fields import maths, placement, speed
from trainkit.objectives.base import Collective
from trainkit.strategies.base import Numerics, PlanContext
from trainkit.strategies.core.replica import Replica
from trainkit.strategies.core.replica_check import drifted_parameter
from trainkit.strategies.data_parallel.base import DataParallel
from trainkit.strategies.reducers import AutoReducer, BackendReducer, Closing, FlatReducer, Reducer
from trainkit.strategies.reducers.compression import Compression, Compressor
from trainkit.strategies.reducers.hierarchical import HierarchicalTransport
from trainkit.strategies.reducers.ring import RingTransport
from trainkit.strategies.reducers.shared_memory import SharedMemoryTransport
from trainkit.strategies.reducers.to_one_device import ReduceThenBroadcastTransport
from trainkit.strategies.tensors.flat_buffer import FlatBuffer

__all__ = ["Reduce", "ReductionOptions"]

Reduce = Literal["backend", "shared_memory", "ring", "hierarchical", "to_one_device", "auto"]
"""Who adds up gradients over the ranks."""


@dataclass(frozen=True, kw_only=True)
class ReductionOptions(DataParallel):
    """What mirrored and multi_worker_mirrored share beyond their processes: the choice of how gradients are summed."""

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

    def problems(self, facts: PlanContext) -> list[Problem]:
        """What concerns every data-parallel strategy; reducers, compression and modes that do not go together."""
        found = super().problems(facts)
        if facts.numerics.reproducible:
            return [*found, *self._beside_lanes()]
        return [*found, *self._reduce_problems(facts), *self._compression_problems(facts)]

    def _beside_lanes(self) -> list[Problem]:
        rule = "cannot be had with numerics.reproducible=true, whose order of summation is fixed. Leave one out."
        chosen = {"reduce": (self.reduce, "backend"), "compression": (self.compression, "none")}
        return [
            Problem(key=f"strategy.{key}", value=value, rule=rule)
            for key, (value, default) in chosen.items()
            if value != default
        ]

    def _reduce_problems(self, facts: PlanContext) -> list[Problem]:
        found = []
        if self.reduce == "shared_memory":
            hosts = facts.launch.num_hosts if facts.launch is not None else 1
            if hosts > 1:
                rule = f"reaches the processes of one host, and there are {hosts}. Use backend, hierarchical or auto."
                found.append(Problem(key="strategy.reduce", value=self.reduce, rule=rule))
            elif any(task.device != "cpu" for task in self.tasks(facts)):
                rule = "sums in the memory of the host, and the replicas are on GPUs. Use backend."
                found.append(Problem(key="strategy.reduce", value=self.reduce, rule=rule))
            elif not sys.platform.startswith("linux"):
                rule = f"needs Linux, and this is {sys.platform}. Use backend."
                found.append(Problem(key="strategy.reduce", value=self.reduce, rule=rule))
        if self.reduce not in ("backend", "auto") and self.bucket_mb != ReductionOptions.bucket_mb:
            rule = f"has no effect with strategy.reduce={self.reduce}: only backend sends buckets."
            found.append(Problem(key="strategy.bucket_mb", value=self.bucket_mb, rule=rule))
        return found

    def _compression_problems(self, facts: PlanContext) -> list[Problem]:
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
        if facts.precision == "fp16_mixed":
            rule = f"cannot leave out a step that overflows, as precision=fp16_mixed does: {kept}"
            found.append(Problem(key="strategy.compression", value=self.compression, rule=rule))
        if facts.numerics.leaves_out:
            rule = f"cannot leave out a step, as numerics.on_nonfinite={facts.numerics.on_nonfinite} does: {kept}"
            found.append(Problem(key="strategy.compression", value=self.compression, rule=rule))
        return found

    def gradient_copies(self, numerics: Numerics, num_replicas: int) -> int:
        """The vector of the exchange, and what reducers and compression keep beside it."""
        copies = super().gradient_copies(numerics, num_replicas)
        if numerics.reproducible or num_replicas == 1:
            return copies
        # A slot, a result, and a share of the total; ring: what comes from the neighbour.
        beside = {"backend": 0, "to_one_device": 0, "hierarchical": 0, "ring": 1, "shared_memory": 2, "auto": 2}
        # Two bytes for four; PowerSGD: what was not sent, and the gradients to compare with.
        compressed = {"none": 0, "bf16": 1, "fp16": 1, "powersgd": 2}
        return copies + beside[self.reduce] + compressed[self.compression]

    def make_reducer(self, collective: Collective, numerics: Numerics) -> Reducer:
        """The lanes of a reproducible run, nothing for one replica, else what `reduce` names; collective."""
        if numerics.reproducible or collective.num_ranks == 1:
            return super().make_reducer(collective, numerics)
        makers = self._makers(collective)
        if self.reduce == "auto":
            return AutoReducer(makers, collective)
        return makers[self.reduce]()

    def _makers(self, collective: Collective) -> dict[str, Callable[[], Reducer]]:
        """How to make each reducer; with auto, those that can work here and differ from one another; collective."""
        hosts = [int(mark) for mark in torch.cat(collective.gather(torch.tensor([host_id()])))]
        rank, timeout_s = collective.rank, self.timeout_s
        makers: dict[str, Callable[[], Reducer]] = {
            "backend": self._backend,
            "shared_memory": lambda: FlatReducer(SharedMemoryTransport(collective, timeout_s=timeout_s)),
            "ring": lambda: FlatReducer(RingTransport(collective)),
            "hierarchical": lambda: FlatReducer(HierarchicalTransport(hosts, rank=rank, timeout_s=timeout_s)),
            "to_one_device": lambda: FlatReducer(ReduceThenBroadcastTransport()),
        }
        if self.reduce == "auto":
            num_hosts = len(set(hosts))
            if num_hosts > 1 or dist.get_backend() == "nccl" or not sys.platform.startswith("linux"):
                del makers["shared_memory"]
            if num_hosts in (1, len(hosts)):
                del makers["hierarchical"]
        return makers

    def _backend(self) -> BackendReducer:
        compressor = None
        if self.compression != "none":
            compressor = Compressor(
                self.compression, powersgd_rank=self.powersgd_rank, powersgd_after=self.powersgd_after
            )
        return BackendReducer(bucket_mb=self.bucket_mb, compressor=compressor)

    def align(self, replica: Replica) -> None:
        """Take over rank 0's parameters and buffers; collective."""
        super().align(replica)
        replica.refuses_unused = not self.allow_unused and replica.num_ranks > 1

    def recover(self, placed: Any, step: int) -> bool:
        """As every data-parallel strategy; not where an exchange leaves something behind, PowerSGD's error feedback."""
        return self.compression != "powersgd" and super().recover(placed, step)

    def prepare(self, placed: Replica) -> tuple[str, ...]:
        """With auto, time the reducers on this model's gradients, or keep the choice of the run that is continued."""
        reducer = placed.reducer
        if not isinstance(reducer, AutoReducer):
            return ()
        masters = list(placed.masters.values())
        return (reducer.choose(FlatBuffer.like(masters, placed.precision.master_dtype, placed.device)),)

    def remember(self, placed: Replica) -> dict[str, Any]:
        """The reducer that auto chose, and the steps PowerSGD has seen."""
        reducer = placed.reducer
        if isinstance(reducer, AutoReducer) and reducer.chosen is not None:
            return {"reduce": reducer.chosen}
        if isinstance(reducer, BackendReducer) and reducer.compressor is not None:
            return {"compressed_steps": reducer.compressor.steps}
        return {}

    def recall(self, placed: Replica, remembered: Mapping[str, Any]) -> None:
        """Take up the same choice; PowerSGD's error feedback begins at zero."""
        reducer = placed.reducer
        if isinstance(reducer, AutoReducer):
            reducer.recalled = remembered.get("reduce")
        if isinstance(reducer, BackendReducer) and reducer.compressor is not None:
            reducer.compressor.steps = int(remembered.get("compressed_steps", 0))

    def check_replicas(self, placed: Replica) -> str | None:
        """The first parameter whose bits are not the same on all ranks; collective."""
        return drifted_parameter(placed)

    def leave(self, placed: Replica) -> None:
        """Close the reducer, then end the process group."""
        if isinstance(placed.reducer, Closing):
            placed.reducer.close()
        super().leave(placed)

    def abort(self, placed: Replica) -> None:
        """Close the reducer, then break the connections of the process group."""
        if isinstance(placed.reducer, Closing):
            placed.reducer.close()
        super().abort(placed)
