"""Synchronous data parallelism: one copy of the model per rank, gradients summed over all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain
from typing import Annotated, ClassVar, Self

import torch
from torch import nn

from trainkit.cluster.launch import LaunchEnvironment
from trainkit.cluster.tasks import Task
from trainkit.errors import Problem
from trainkit.fields import placement
from trainkit.objectives.base import Collective
from trainkit.strategies.base import (
    WHOLE_REPLICAS,
    Facts,
    ModelMemory,
    Numerics,
    PlanContext,
    Remedies,
    ReplicaPart,
    Scaled,
    SetupRequest,
    StagePart,
    StepCut,
    Strategy,
    Transfer,
)
from trainkit.strategies.core.graphs.shards import makers_of
from trainkit.strategies.core.replica import Replica
from trainkit.strategies.core.step import ShardStep
from trainkit.strategies.core.synchronous import (
    SynchronousExecutor,
    backend_or_lanes,
    broadcast_initial,
    build_parts,
    synchronous_gradient_copies,
)
from trainkit.strategies.groups.process_group import GroupOfOne, ProcessGroupOptions
from trainkit.strategies.maps.layout import BlockMap, Devices, ReplicaMap, group_problems
from trainkit.strategies.model_transforms import Compiles
from trainkit.strategies.reducers.options import ReductionOptions
from trainkit.strategies.reducers.vector import PerDeviceReducer, Reducer, largest_bucket
from trainkit.strategies.traffic import (
    Vector,
    exchanged_elements,
    gathered_rows,
    in_lanes,
    lookups_of,
    powersgd,
    ranks_a_host,
    ranks_of,
    reduction,
    weights_of,
)


@dataclass(frozen=True, kw_only=True)
class DataParallel(GroupOfOne, ReductionOptions, ProcessGroupOptions, Strategy):
    """The common code of mirrored and multi_worker_mirrored: everything except the accepted launches.

    Each replica computes its shards of the global batch; gradients are summed over all (NCCL on GPUs, gloo on CPUs),
    and every replica makes the same update.
    """

    facts: ClassVar[Facts] = replace(WHOLE_REPLICAS, position=1, elastic=True)
    shard_step: ClassVar[type[ShardStep]] = ShardStep
    """The class of a try at a step; a subclass may set another one."""

    devices: Annotated[Devices | None, placement] = None  # type: ignore[assignment] # groups too, only here
    """The device of each replica, `[0, 1]`, or with `map` a group for each, `[[0, 1], [2, 3]]`; null: GPUs in order."""
    map: Annotated[BlockMap | None, placement] = None
    """Place of each block in a replica's group of devices, `{embed: 0, rest: 1}`; auto: by bytes; null: one device."""

    def validate(self, context: PlanContext) -> list[Problem]:
        """Return problems of every process group, of groups of devices, and of combined reducers and modes."""
        placed = self.map is not None or self.devices is not None
        if placed and (problems := group_problems(self.map, self.devices, self.replicas_here(context.launch), context)):
            return problems
        problems = ProcessGroupOptions.validate(self._on_first_devices(context, only_named=True), context)
        if self.map is not None and self.compression == "powersgd":
            rule = "compresses all gradients of a replica at once, and strategy.map distributes them. Use bf16 or none."
            problems.append(Problem(key="strategy.compression", value=self.compression, rule=rule))
        if self.is_grouped and self.reduce == "shared_memory" and self.num_replicas(context) == 1:
            rule = "needs two replicas or more, and strategy.process_group=always has one. Use strategy.reduce=backend."
            problems.append(Problem(key="strategy.reduce", value=self.reduce, rule=rule))
        return [*problems, *self.reduction_problems(context, lambda: self.tasks(context))]

    def _replica_map(self, context: PlanContext) -> ReplicaMap | None:
        """Return the groups of devices and the map; None if a replica is on one device."""
        replicas = self.replicas_here(context.launch)
        return None if self.map is None else ReplicaMap.of(self.map, self.devices, replicas, context)

    def _on_first_devices(self, context: PlanContext, *, only_named: bool = False) -> Self:
        """Return the same strategy with a device for each rank: the first of its replica's group."""
        replica_map = self._replica_map(context)
        if replica_map is None:
            return self
        has_devices = self.devices is not None or (context.num_gpus > 0 and not only_named)
        return replace(self, map=None, devices=replica_map.first_devices if has_devices else None)

    def num_replicas(self, context: PlanContext) -> int:
        """Return the requested number of replicas, or one for each device or group; in a launch, over all processes."""
        return ProcessGroupOptions.num_replicas(self._on_first_devices(context), context)

    def tasks(self, context: PlanContext) -> tuple[Task, ...]:
        """Return a worker task for each replica, on the first device of its group."""
        return ProcessGroupOptions.tasks(self._on_first_devices(context), context)

    def num_slots(self, num_gpus: int) -> int:
        """Return the GPUs of all replicas; without GPUs, one core for each replica."""
        context = PlanContext(num_gpus=num_gpus)
        replica_map, tasks = self._replica_map(context), self.tasks(context)
        used = {task.device for task in tasks} if replica_map is None else set(chain.from_iterable(replica_map.groups))
        return len(used - {"cpu"}) or len(tasks)

    def proof_problems(self, context: PlanContext) -> list[Problem]:
        """Return the problem that a single rank on one device runs the same code as one_device."""
        return ProcessGroupOptions.proof_problems(self, context) if self.map is None else []

    def facts_in(self, context: PlanContext) -> Facts:
        """Return the facts: with a map, only blocks are compiled, because activations move between them."""
        facts = super().facts_in(context)
        if self.map is None:
            return facts
        compiles: Compiles = "blocks" if facts.compiles == "model" else facts.compiles
        return replace(facts, compiles=compiles, compiles_step=False)

    def validate_model(self, model: nn.Module, context: PlanContext) -> list[Problem]:
        """Return problems of the map for this model."""
        replica_map = self._replica_map(context)
        return [] if replica_map is None else replica_map.planned.problems(model, context)

    def resolve(self, build: Callable[[], nn.Module], context: PlanContext) -> Self:
        """Return the strategy with a map instead of `auto`: the activations of each block are known only here."""
        replica_map = self._replica_map(context)
        if replica_map is None or self.map != "auto":
            return self
        layout = replica_map.planned.layout(build(), context.formats, context)
        return replace(self, map={unit.name: index for unit, index in layout.placed}, devices=replica_map.groups)

    def describe_partition(self, model: nn.Module, context: PlanContext) -> tuple[StagePart, ...]:
        """Return each consecutive part of a replica with a map; `device` names that of every replica of this host."""
        replica_map = self._replica_map(context)
        return () if replica_map is None else replica_map.parts(model, context)

    def replica_parts(self, model: nn.Module, context: PlanContext) -> tuple[ReplicaPart, ...]:
        """Return the blocks of each device of a replica with a map that fits; without one, one part for all."""
        copies, kept_copies = self.gradient_copies(context)
        parts: tuple[ReplicaPart, ...] = ()
        if (replica_map := self._replica_map(context)) is not None:
            parts = replica_map.planned.device_parts(model, context, gradient_copies=copies)
        if not parts:
            bucket = None
            if self._takes_gradients(context.numerics, self.num_replicas(context)):
                bucket = largest_bucket(model, context.formats.master_dtype, self.bucket_bytes)
            parts = (ReplicaPart(modules=(), memory=ModelMemory.whole(model, gradient_copies=copies, bucket=bucket)),)
        return tuple(replace(part, memory=replace(part.memory, kept_copies=kept_copies)) for part in parts)

    def estimate_memory(self, model: nn.Module, context: PlanContext) -> ModelMemory:
        """Return the memory of the device with the largest use: its part of a replica, the vector of the exchange, the
        memory of reducers.
        """
        memories = (part.memory for part in self.replica_parts(model, context))
        return max(memories, key=lambda memory: sum(memory.resident.values()))

    def observed_ranks(self, context: PlanContext) -> tuple[int, ...]:  # noqa: ARG002 - the same in any
        """Return the first rank; none if a replica is on several devices."""
        return (0,) if self.map is None else ()

    def as_observed(self) -> Self:
        """Return the strategy with the backend's sum: no other reducer works without the other ranks."""
        compression = "none" if self.compression == "powersgd" else self.compression
        return replace(self, reduce="backend", compression=compression)

    def scaled(self, replicas: int, context: PlanContext) -> Scaled:
        """Return the key for `replicas` replicas, and alternatives of compression and reducer."""
        is_free, on_cpu = not context.numerics.reproducible, not context.num_gpus
        planned, _ = self.planned_reducer(context, self.tasks(context))
        return Scaled(
            keys={"replicas": replicas},
            remedies=Remedies(
                compression="strategy.compression=bf16" if is_free and self.compression == "none" else None,
                shared_memory="strategy.reduce=shared_memory"
                if is_free and on_cpu and planned != "shared_memory"
                else None,
            ),
        )

    def sum_of_gradients(self, context: PlanContext) -> str | None:
        """Return the reducer and the compression, for the summary; lanes leave no choice."""
        return None if context.numerics.reproducible else self.described(context, self.tasks(context))

    def _takes_gradients(self, numerics: Numerics, num_replicas: int) -> bool:
        """Return whether the vector of the exchange is the memory of the gradients."""
        return not numerics.reproducible and (num_replicas > 1 or self.is_grouped) and self.map is None

    def gradient_copies(self, context: PlanContext) -> tuple[float, float]:
        """Return the copies of all gradients at the peak of a step, in addition to the gradients, and how many of them
        outlive it; pure.
        """
        numerics, num_replicas = context.numerics, self.num_replicas(context)
        if numerics.reproducible or (num_replicas == 1 and not self.is_grouped):
            return synchronous_gradient_copies(numerics, num_replicas), 0
        vectors = 0 if self._takes_gradients(numerics, num_replicas) else 1
        copies, kept_copies = self.exchange_copies(self.planned_reducer(context, self.tasks(context))[0], num_replicas)
        return vectors + copies, vectors + kept_copies

    def traffic(self, model: nn.Module, context: PlanContext, cut: StepCut) -> tuple[Transfer, ...] | None:
        """Return the exchange of the gradients, by the reducer and the compression, and of the rows of sparse ones."""
        ranks, width = ranks_of(self, context), context.formats.master_dtype.itemsize
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
        reducer, _ = self.planned_reducer(context, self.tasks(context))
        summed = reduction(reducer, ranks, vector, ranks_a_host=ranks_a_host(context, len(ranks)))
        return (*(summed if self.map is None else (replace(transfer, overlaps=False) for transfer in summed)), *rows)

    def setup(self, request: SetupRequest) -> SynchronousExecutor[Replica]:
        """Join the other ranks, and broadcast the model of rank 0."""
        replica_map = self._replica_map(PlanContext(num_gpus=torch.cuda.device_count()))
        spread = None if replica_map is None else replica_map.placement(request)
        ranks = self.join(
            request.identity,
            exchanges_on_cpu=replica_map is not None and replica_map.mixes_types,
            exchanges_on_gpus=replica_map is not None and replica_map.spans_gpus,
        )
        settled, note = self, None
        if not request.numerics.reproducible:
            grads = sum(param.numel() for param in request.model.parameters() if param.requires_grad)
            settled, note = self.without_obstacle(
                ranks.data_ranks, on_gpus=self._on_gpus, num_bytes=grads * request.precision.master_dtype.itemsize
            )
        parts = build_parts(request, ranks=ranks, placement=spread, make_reducer=settled.make_reducer)
        refuses_unused = not self.allow_unused and (ranks.data_ranks.num_ranks > 1 or self.is_grouped)
        replica = Replica(replace(parts, refuses_unused=refuses_unused, is_grouped=self.is_grouped))
        broadcast_initial(replica)
        make_step, graphs = makers_of(request, replica, self.shard_step, is_whole=self.map is None)
        notes = () if note is None else (note,)
        return SynchronousExecutor(
            replica, request.training, ranks=ranks, make_step=make_step, graphs=graphs, notes=notes
        )

    def make_reducer(self, collective: Collective, numerics: Numerics) -> Reducer:
        """Return the lanes of a reproducible run, none for one replica, else the reducer of `reduce`; collective."""
        if numerics.reproducible or (collective.num_ranks == 1 and not self.is_grouped):
            return backend_or_lanes(collective, numerics)
        make = self.reducer_of(collective, timeout_s=self.timeout_s, on_gpus=self._on_gpus)
        return make() if self.map is None else PerDeviceReducer(make)

    @property
    def _on_gpus(self) -> bool:
        """Whether a replica of this host is on a GPU, or a part of one."""
        context = PlanContext(num_gpus=torch.cuda.device_count())
        replica_map, tasks = self._replica_map(context), self.tasks(context)
        devices = [task.device for task in tasks] if replica_map is None else chain.from_iterable(replica_map.groups)
        return any(device != "cpu" for device in devices)


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

    @classmethod
    def spread_over(cls, count: int) -> dict[str, int]:
        """Return the number of replicas, each on a device."""
        return {"replicas": count}

    def launch_problems(self, launch: LaunchEnvironment) -> list[Problem]:
        """Return the problems of any data-parallel strategy, or the problem of a launch on more than one host."""
        if launch.num_hosts > 1:
            rule = f"runs on one host, and {launch.kind} started {launch.num_hosts}. {_OTHER}"
            return [Problem(key="strategy", value="mirrored", rule=rule)]
        return super().launch_problems(launch)


_OTHER = "Use strategy=multi_worker_mirrored: the same training over hosts."


@dataclass(frozen=True, kw_only=True)
class MultiWorkerMirrored(DataParallel):
    """Train a copy of the model on every device of every host, synchronously: mirrored over several machines.

    It joins the processes that torchrun, SLURM, MPI, TF_CONFIG or a cluster spec started. Without a launch, it uses the
    devices of this host.

    Example:
        >>> from trainkit.strategies.base import PlanContext
        >>> [task.device for task in MultiWorkerMirrored(replicas=2).tasks(PlanContext())]
        ['cpu', 'cpu']

    Source: tf.distribute.MultiWorkerMirroredStrategy.
    """

    alone_as_one_device: ClassVar[bool] = True
