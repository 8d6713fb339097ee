"""Synchronous data parallelism: a copy of the model a rank, gradients summed over all of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Annotated, ClassVar, Literal, Self

import torch
import torch.distributed as dist
from torch import nn

from trainkit.cluster.host import host_id
from trainkit.cluster.tasks import Task
from trainkit.config.values import at_least
from trainkit.errors import Problem
from trainkit.fields import maths, placement, speed
from trainkit.objectives.base import Collective
from trainkit.strategies.base import Numerics, PlanContext, SetupRequest, StagePart, Strategy, Traits
from trainkit.strategies.core.graphs.steps import StepGraphs
from trainkit.strategies.core.replica import Replica
from trainkit.strategies.core.step import ShardStep
from trainkit.strategies.core.synchronous import (
    backend_or_lanes,
    broadcast_initial,
    build_parts,
    synchronous_gradient_copies,
)
from trainkit.strategies.data_parallel.executor import DataParallelExecutor
from trainkit.strategies.data_parallel.replica_map import BlockMap, Devices, ReplicaMap, group_problems
from trainkit.strategies.groups.process_group import GroupOfOne, ProcessGroupOptions
from trainkit.strategies.memory_capabilities import ModelMemory, ReplicaPart
from trainkit.strategies.model_transforms import Compiles
from trainkit.strategies.reducers import (
    AutoReducer,
    BackendReducer,
    PerDeviceReducer,
    Reducer,
)
from trainkit.strategies.reducers.compression import Compression, Compressor
from trainkit.strategies.reducers.flat import HierarchicalReducer, ReduceThenBroadcastReducer, RingReducer
from trainkit.strategies.reducers.shared_memory import SharedMemoryReducer
from trainkit.strategies.scaling import Remedies, Scaled
from trainkit.strategies.traffic import (
    StepCut,
    Transfer,
    exchanged_elements,
    precision_of,
    ranks_a_host,
    ranks_of,
)
from trainkit.strategies.traffic.reductions import Vector, in_lanes, powersgd, reduction
from trainkit.strategies.traffic.tables import gathered_rows, lookups_of, weights_of

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
class DataParallel(GroupOfOne, ReductionOptions, ProcessGroupOptions, Strategy):
    """The common code of mirrored and multi_worker_mirrored: all but the accepted launches.

    Each replica computes its shards of the global batch; gradients are summed over all (NCCL on GPUs, gloo on CPUs),
    and every replica makes the same update.
    """

    traits: ClassVar[Traits] = Traits(elastic=True, compiles="model", several_optimizers=True, compiles_step=True)
    shard_step: ClassVar[type[ShardStep]] = ShardStep
    """The class of a try at a step; a subclass may set another one."""

    devices: Annotated[Devices | None, placement] = None  # type: ignore[assignment] # groups too, only here
    """The device of each replica, `[0, 1]`, or with `map` a group for each, `[[0, 1], [2, 3]]`; null: GPUs in order."""
    map: Annotated[BlockMap | None, placement] = None
    """Place of each block in a replica's group of devices, `{embed: 0, rest: 1}`; auto: by bytes; null: one device."""

    def validate(self, context: PlanContext) -> list[Problem]:
        """Return problems of every process group, of groups of devices, and of combined reducers and modes."""
        is_placed = self.map is not None or self.devices is not None
        if is_placed and (found := group_problems(self.map, self.devices, self.replicas, context)):
            return found
        found = ProcessGroupOptions.validate(self._on_first_devices(context, only_named=True), context)
        if self.map is not None and self.compression == "powersgd":
            rule = "compresses all gradients of a replica at once, and strategy.map spreads them. Use bf16 or none."
            found.append(Problem(key="strategy.compression", value=self.compression, rule=rule))
        return [*found, *self._alone_problems(context), *self.reduction_problems(context, lambda: self.tasks(context))]

    def _alone_problems(self, context: PlanContext) -> list[Problem]:
        if not self.is_grouped or self.reduce != "shared_memory" or self.num_replicas(context) > 1:
            return []
        rule = "needs two replicas or more, and strategy.process_group=always has one. Use strategy.reduce=backend."
        return [Problem(key="strategy.reduce", value=self.reduce, rule=rule)]

    def _replica_map(self, context: PlanContext) -> ReplicaMap | None:
        """Return the groups of devices and the map; None where a replica is on one device."""
        return None if self.map is None else ReplicaMap.of(self.map, self.devices, self.replicas, context)

    def _on_first_devices(self, context: PlanContext, *, only_named: bool = False) -> Self:
        """Return the same strategy with a device for each rank: the first of its replica's group."""
        found = self._replica_map(context)
        if found is None:
            return self
        known = self.devices is not None or (context.num_gpus > 0 and not only_named)
        return replace(self, map=None, devices=found.first_devices if known else None)

    def num_replicas(self, context: PlanContext) -> int:
        """Return the requested number of replicas, or one for each device or group; in a launch, over all processes."""
        return ProcessGroupOptions.num_replicas(self._on_first_devices(context), context)

    def tasks(self, context: PlanContext) -> tuple[Task, ...]:
        """Return a worker task for each replica, on the first device of its group."""
        return ProcessGroupOptions.tasks(self._on_first_devices(context), context)

    def num_slots(self, num_gpus: int) -> int:
        """Return the GPUs of all replicas; without GPUs, one core for each replica."""
        context = PlanContext(num_gpus=num_gpus)
        found, tasks = self._replica_map(context), self.tasks(context)
        used = {task.device for task in tasks} if found is None else set(chain.from_iterable(found.groups))
        return len(used - {"cpu"}) or len(tasks)

    def proof_problems(self, context: PlanContext) -> list[Problem]:
        """Return that a single rank on one device runs the code of one device."""
        return ProcessGroupOptions.proof_problems(self, context) if self.map is None else []

    @property
    def traits_here(self) -> Traits:
        """Its properties: with a map, blocks alone are compiled, because activations move between them."""
        if self.map is None:
            return self.traits
        compiles: Compiles = "blocks" if self.traits.compiles == "model" else self.traits.compiles
        return replace(self.traits, compiles=compiles, compiles_step=False)

    def validate_model(self, model: nn.Module, context: PlanContext) -> list[Problem]:
        """Return problems of the map for this model."""
        found = self._replica_map(context)
        return [] if found is None else found.problems(model, context)

    def resolve(self, build: Callable[[], nn.Module], context: PlanContext) -> Self:
        """Return the strategy with a map instead of `auto`: the activations of each block are known only here."""
        found = self._replica_map(context)
        if found is None or self.map != "auto":
            return self
        return replace(self, map=found.places_by_name(build(), context), devices=found.groups)

    def describe_partition(self, model: nn.Module, context: PlanContext) -> tuple[StagePart, ...]:
        """Return each consecutive part of a replica with a map; `device` names that of every replica of this host."""
        found = self._replica_map(context)
        return () if found is None else found.parts(model, context)

    def replica_parts(self, model: nn.Module, context: PlanContext, *, num_shards: int) -> tuple[ReplicaPart, ...]:  # noqa: ARG002 - one after another
        """Return the blocks of each device of a replica with a map; none where it does not fit, or there is no map."""
        found = self._replica_map(context)
        return () if found is None else found.held_parts(model, context, gradient_copies=self._copies(context))

    def _copies(self, context: PlanContext) -> int:
        return self.gradient_copies(context.numerics, self.num_replicas(context))

    def estimate_memory(self, model: nn.Module, context: PlanContext) -> ModelMemory:
        """Return the fullest device: its part of a replica, the vector of the exchange, the memory of reducers."""
        parts = self.replica_parts(model, context, num_shards=1)
        held = [part.memory for part in parts] or [ModelMemory.whole(model, gradient_copies=self._copies(context))]
        return max(held, key=lambda memory: sum(memory.resident.values()))

    def scaled(self, replicas: int, context: PlanContext) -> Scaled:
        """Return the key of so many replicas, and the compression and the reducer that could still be chosen."""
        is_free, on_cpu = not context.numerics.reproducible, not context.num_gpus
        return Scaled(
            keys={"replicas": replicas},
            remedies=Remedies(
                compression="strategy.compression=bf16" if is_free and self.compression == "none" else None,
                shared_memory="strategy.reduce=shared_memory"
                if is_free and on_cpu and self.reduce != "shared_memory"
                else None,
            ),
        )

    def gradient_copies(self, numerics: Numerics, num_replicas: int) -> int:
        """Return the copies of all gradients at the peak of a step; pure."""
        copies = synchronous_gradient_copies(numerics, num_replicas)
        if numerics.reproducible or (num_replicas == 1 and not self.is_grouped):
            return copies
        # shared_memory: a slot, a result, and a part of the total; ring: a receive buffer.
        beside = {"backend": 0, "to_one_device": 0, "hierarchical": 0, "ring": 1, "shared_memory": 2, "auto": 2}
        # Two bytes instead of four; PowerSGD: the error, and the gradients to compare with.
        compressed = {"none": 0, "bf16": 1, "fp16": 1, "powersgd": 2}
        return copies + beside[self.reduce] + compressed[self.compression]

    def traffic(self, model: nn.Module, context: PlanContext, cut: StepCut) -> tuple[Transfer, ...] | None:
        """Return the exchange of the gradients, by the reducer and the compression, and of the rows of sparse ones."""
        ranks, width = ranks_of(self, context), precision_of(context).master_dtype.itemsize
        vector = Vector(num_bytes=exchanged_elements(model) * width, element_bytes=width, bucket_mb=self.bucket_mb)
        if context.numerics.reproducible:  # sparse gradients are summed as dense ones
            return in_lanes(ranks, vector, lanes=context.numerics.lanes, num_shards=cut.num_shards)
        if (lookups := lookups_of(model, cut)) is None:
            return None
        rows = gathered_rows(lookups, ranks, shards=cut.shards_a_replica, width=width)
        tables = weights_of(lookups)
        vector = replace(vector, num_bytes=vector.num_bytes - sum(table.numel() for table in tables) * width)
        if self.compression == "powersgd":
            thin = powersgd(ranks, vector, model, rank=self.powersgd_rank, after=self.powersgd_after, sparse=tables)
            return (*thin, *rows)
        if self.compression != "none":
            vector = replace(vector, num_bytes=vector.num_bytes * 2 / width, element_bytes=2)
        summed = reduction(self.reduce, ranks, vector, ranks_a_host=ranks_a_host(context, len(ranks)))
        return (*(summed if self.map is None else (replace(one, overlaps=False) for one in summed)), *rows)

    def setup(self, request: SetupRequest) -> DataParallelExecutor:
        """Join the other ranks, and broadcast the model of rank 0."""
        found = self._replica_map(PlanContext(num_gpus=torch.cuda.device_count()))
        spread = None if found is None else found.placement(request)
        ranks = self.join(
            request.identity,
            exchanges_on_cpu=found is not None and found.mixes_types,
            exchanges_on_gpus=found is not None and found.spans_gpus,
        )
        parts = build_parts(request, ranks=ranks, placement=spread, make_reducer=self.make_reducer)
        refuses_unused = not self.allow_unused and (ranks.data_ranks.num_ranks > 1 or self.is_grouped)
        replica = Replica(replace(parts, refuses_unused=refuses_unused, is_grouped=self.is_grouped))
        broadcast_initial(replica)
        return DataParallelExecutor(
            replica,
            request.training,
            ranks=ranks,
            make_step=self.shard_step,
            recovers=self.compression != "powersgd",
            graphs=None if request.step_backend is None else StepGraphs.of(request, replica, self.shard_step),
        )

    def make_reducer(self, collective: Collective, numerics: Numerics) -> Reducer:
        """Return the lanes of a reproducible run, none for one replica, else the reducer of `reduce`; collective."""
        if numerics.reproducible or (collective.num_ranks == 1 and not self.is_grouped):
            return backend_or_lanes(collective, numerics)
        makers = self._makers(collective)
        if self.map is not None:
            makers = {name: partial(PerDeviceReducer, make) for name, make in makers.items()}
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
            alone = collective.num_ranks == 1
            on_gpus = "nccl" in dist.get_backend()
            if alone or num_hosts > 1 or on_gpus or not sys.platform.startswith("linux"):
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
