"""Synchronous data parallelism: a copy of the model a rank, gradients summed over all of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import nn

from trainkit.cluster.host import host_id
from trainkit.cluster.tasks import Task
from trainkit.config.values import at_least
from trainkit.errors import Problem
from trainkit.fields import maths, placement, speed
from trainkit.objectives.base import Collective
from trainkit.strategies.base import Numerics, PlanContext, SetupRequest, StepContext, Strategy, Traits
from trainkit.strategies.capabilities import JsonMap, ModelMemory
from trainkit.strategies.core.replica import Replica
from trainkit.strategies.core.replica_check import drifted_parameter
from trainkit.strategies.core.step import ShardStep
from trainkit.strategies.core.synchronous import (
    MakeStep,
    SynchronousExecutor,
    backend_or_lanes,
    broadcast_initial,
    build_parts,
    synchronous_gradient_copies,
)
from trainkit.strategies.groups.process_group import ProcessGroupOptions, RankGroup
from trainkit.strategies.reducers import (
    AutoReducer,
    BackendReducer,
    Reducer,
)
from trainkit.strategies.reducers.compression import Compression, Compressor
from trainkit.strategies.reducers.flat import HierarchicalReducer, ReduceThenBroadcastReducer, RingReducer
from trainkit.strategies.reducers.shared_memory import SharedMemoryReducer
from trainkit.strategies.tensors.layouts import FlatBuffer

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


@dataclass(frozen=True, kw_only=True)
class DataParallel(ReductionOptions, ProcessGroupOptions, Strategy):
    """The common code of mirrored and multi_worker_mirrored: all but the accepted launches.

    Each replica computes its shards of the global batch; gradients are summed over all (NCCL on GPUs, gloo on CPUs),
    and every replica makes the same update.
    """

    traits: ClassVar[Traits] = Traits(elastic=True, compiles="model", several_optimizers=True)
    shard_step: ClassVar[type[ShardStep]] = ShardStep
    """The class of a try at a step; a subclass may set another one."""

    def validate(self, context: PlanContext) -> list[Problem]:
        """Return problems of every process group, and of combined reducers, compression and modes."""
        found = super().validate(context)
        return [*found, *self.reduction_problems(context, lambda: self.tasks(context))]

    def estimate_memory(self, model: nn.Module, context: PlanContext) -> ModelMemory:
        """Return a whole replica, the vector of the exchange, and the memory of reducers and compression."""
        return ModelMemory.whole(
            model, gradient_copies=self.gradient_copies(context.numerics, self.num_replicas(context))
        )

    def gradient_copies(self, numerics: Numerics, num_replicas: int) -> int:
        """Return the copies of all gradients at the peak of a step; pure."""
        copies = synchronous_gradient_copies(numerics, num_replicas)
        if numerics.reproducible or num_replicas == 1:
            return copies
        # shared_memory: a slot, a result, and a part of the total; ring: a receive buffer.
        beside = {"backend": 0, "to_one_device": 0, "hierarchical": 0, "ring": 1, "shared_memory": 2, "auto": 2}
        # Two bytes instead of four; PowerSGD: the error, and the gradients to compare with.
        compressed = {"none": 0, "bf16": 1, "fp16": 1, "powersgd": 2}
        return copies + beside[self.reduce] + compressed[self.compression]

    def setup(self, request: SetupRequest) -> DataParallelExecutor:
        """Join the other ranks, and broadcast the model of rank 0."""
        ranks = self.join(request.identity)
        parts = build_parts(request, ranks=ranks, make_reducer=self.make_reducer)
        refuses_unused = not self.allow_unused and ranks.data_ranks.num_ranks > 1
        replica = Replica(replace(parts, refuses_unused=refuses_unused))
        broadcast_initial(replica)
        return DataParallelExecutor(
            replica,
            request.training,
            ranks=ranks,
            make_step=self.shard_step,
            recovers=self.compression != "powersgd",
        )

    def make_reducer(self, collective: Collective, numerics: Numerics) -> Reducer:
        """Return the lanes of a reproducible run, none for one replica, else the reducer of `reduce`; collective."""
        if numerics.reproducible or collective.num_ranks == 1:
            return backend_or_lanes(collective, numerics)
        makers = self._makers(collective)
        if self.reduce == "auto":
            return AutoReducer(makers, collective)
        return makers[self.reduce]()

    def _makers(self, collective: Collective) -> dict[str, Callable[[], Reducer]]:
        """Return a factory for each reducer; with auto, only for distinct ones that work here; collective."""
        hosts = [int(mark) for mark in torch.cat(collective.gather(torch.tensor([host_id()])))]
        rank, timeout_s = collective.rank, self.timeout_s
        makers: dict[str, Callable[[], Reducer]] = {
            "backend": self._backend,
            "shared_memory": lambda: SharedMemoryReducer(collective, timeout_s=timeout_s),
            "ring": lambda: RingReducer(collective),
            "hierarchical": lambda: HierarchicalReducer(hosts, rank=rank, timeout_s=timeout_s),
            "to_one_device": ReduceThenBroadcastReducer,
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


class DataParallelExecutor(SynchronousExecutor[Replica]):
    """A rank with a copy of the model, whose gradients a reducer sums over the ranks.

    Args:
        recovers: whether an interrupted exchange leaves no state behind.
    """

    def __init__(
        self,
        replica: Replica,
        training: StepContext,
        *,
        ranks: RankGroup,
        make_step: MakeStep[Replica],
        recovers: bool,
    ) -> None:
        super().__init__(replica, training, ranks=ranks, make_step=make_step)
        self._recovers = recovers

    def tune(self) -> tuple[str, ...]:
        """With auto, time the reducers on this model's gradients, or keep the choice of the resumed run."""
        replica, reducer = self._replica, self._replica.reducer
        if not isinstance(reducer, AutoReducer):
            return ()
        masters = list(replica.masters.values())
        return (reducer.choose(FlatBuffer.like(masters, replica.precision.master_dtype, replica.device)),)

    def state_dict_extra(self) -> JsonMap:
        """Return the reducer that auto chose, or the steps of PowerSGD."""
        reducer = self._replica.reducer
        if isinstance(reducer, AutoReducer) and reducer.chosen is not None:
            return {"reduce": reducer.chosen}
        if isinstance(reducer, BackendReducer) and reducer.compressor is not None:
            return {"compressed_steps": reducer.compressor.steps}
        return {}

    def load_state_extra(self, extra: JsonMap) -> None:
        """Restore the choice; PowerSGD's error feedback begins at zero."""
        reducer = self._replica.reducer
        if isinstance(reducer, AutoReducer):
            reducer.recall(extra.get("reduce"))
        if isinstance(reducer, BackendReducer) and reducer.compressor is not None:
            reducer.compressor.set_steps(int(str(extra.get("compressed_steps", 0))))

    def check_replicas(self) -> str | None:
        """Return the first parameter whose bits are not the same on all ranks; collective."""
        return drifted_parameter(self._replica)

    def recover(self, step: int) -> bool:
        """Undo an interrupted step, unless the exchange leaves state behind (PowerSGD's error feedback)."""
        return self._recovers and super().recover(step)


@dataclass(frozen=True, kw_only=True)
class Mirrored(DataParallel):
    """Train a copy of the model on every device of this host, synchronously.

    Each replica computes its shards of the global batch; gradients are summed over all (NCCL on GPUs, gloo on CPUs),
    and every replica makes the same update.

    Example:
        >>> [task.device for task in Mirrored(replicas=2).tasks(PlanContext())]
        ['cpu', 'cpu']

    Source: Goyal et al. 2017, arXiv:1706.02677, section 3; tf.distribute.MirroredStrategy.
    """

    alone_as_one_device: ClassVar[bool] = True

    def validate(self, context: PlanContext) -> list[Problem]:
        """Return the problems of any data-parallel strategy, and that of a launch on more than one host."""
        if context.launch is not None and context.launch.num_hosts > 1:
            rule = f"is of one host, and {context.launch.kind} started {context.launch.num_hosts}. {_OTHER}"
            return [Problem(key="strategy", value="mirrored", rule=rule)]
        return super().validate(context)


_OTHER = "Use strategy=multi_worker_mirrored: the same training over hosts."


@dataclass(frozen=True, kw_only=True)
class MultiWorkerMirrored(DataParallel):
    """Train a copy of the model on every device of every host, synchronously: mirrored, over machines.

    It joins the processes that torchrun, SLURM, MPI, TF_CONFIG or a cluster spec started. Where nothing started it, it
    takes the devices of this host.

    Example:
        >>> from trainkit.strategies.base import PlanContext
        >>> [task.device for task in MultiWorkerMirrored(replicas=2).tasks(PlanContext())]
        ['cpu', 'cpu']

    Source: tf.distribute.MultiWorkerMirroredStrategy.
    """

    alone_as_one_device: ClassVar[bool] = True
