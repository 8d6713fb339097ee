"""Mirrored: synchronous data parallelism, one process and one whole copy of the model a device."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Literal

import torch
import torch.distributed as dist

from trainkit.cluster.identity import Identity
from trainkit.cluster.tasks import Task
from trainkit.errors import Problem
from trainkit.fields import placement
from trainkit.objectives.base import Collective
from trainkit.strategies.base import Facts, Numerics
from trainkit.strategies.collective import GroupCollective, LocalCollective
from trainkit.strategies.devices import device_problems, parse_device
from trainkit.strategies.reducers import BackendReducer, LaneReducer, LocalReducer, Reducer
from trainkit.strategies.replica import Replica
from trainkit.strategies.synchronous import Synchronous

__all__ = ["Mirrored"]


@dataclass(frozen=True, kw_only=True)
class Mirrored(Synchronous):
    """Train a copy of the model on every device of this host, in step.

    Each replica computes its shards of the global batch; gradients are summed over all (NCCL on GPUs, gloo on CPUs),
    and every replica makes the same update.

    Example:
        >>> [task.device for task in Mirrored(replicas=2).tasks(Facts())]
        ['cpu', 'cpu']

    Source: Goyal et al. 2017, arXiv:1706.02677, section 3; tf.distribute.MirroredStrategy.
    """

    replicas: Annotated[int | Literal["auto"], placement] = "auto"
    """Processes; auto: one a GPU, or 2 on a host without."""
    devices: Annotated[tuple[int | str, ...] | None, placement] = None
    """The devices to use, `[0, 1]` or `[/gpu:0, /gpu:1]`; null: the first `replicas` GPUs, or the CPU."""
    timeout_s: Annotated[float, placement] = 600.0
    """Seconds that a rank waits for the others in an exchange."""

    def problems(self, facts: Facts) -> list[Problem]:
        """Devices that do not exist or stand twice, replicas that have no device or no lane."""
        problems = self._device_problems(facts)
        if problems:
            return problems
        count = self.num_replicas(facts)
        if count < 1:
            return [Problem(key="strategy.replicas", value=self.replicas, rule="must be 1 or more.")]
        if self.devices is None and facts.num_gpus and count > facts.num_gpus:
            rule = f"more than the {facts.num_gpus} GPUs of this host. Use {facts.num_gpus} or fewer."
            return [Problem(key="strategy.replicas", value=self.replicas, rule=rule)]
        if facts.numerics.reproducible and count > facts.numerics.lanes:
            rule = f"more replicas than numerics.lanes={facts.numerics.lanes}. Use at most that many, or more lanes."
            return [Problem(key="strategy.replicas", value=count, rule=rule)]
        return []

    def _device_problems(self, facts: Facts) -> list[Problem]:
        if self.devices is None:
            return []
        problems = [p for name in self.devices for p in device_problems("strategy.devices", name, facts.num_gpus)]
        parsed = [parse_device(name) for name in self.devices]
        twice = sorted({str(name) for name in parsed if name != "cpu" and parsed.count(name) > 1})
        if twice:
            rule = f"names {', '.join(twice)} twice. NCCL takes one replica a GPU."
            problems.append(Problem(key="strategy.devices", value=list(self.devices), rule=rule))
        if self.replicas != "auto" and self.replicas != len(self.devices):
            rule = f"but strategy.devices names {len(self.devices)}. Leave one of the two out."
            problems.append(Problem(key="strategy.replicas", value=self.replicas, rule=rule))
        if not self.devices:
            problems.append(Problem(key="strategy.devices", value=[], rule="names no device. Leave it out for all."))
        return problems

    def num_replicas(self, facts: Facts) -> int:
        """The replicas asked for, or a replica a device."""
        if self.devices is not None:
            return len(self.devices)
        return (facts.num_gpus or 2) if self.replicas == "auto" else self.replicas

    def tasks(self, facts: Facts) -> tuple[Task, ...]:
        """A worker a replica."""
        count = self.num_replicas(facts)
        names: list[str] = [f"cuda:{index}" if facts.num_gpus else "cpu" for index in range(count)]
        if self.devices is not None:
            names = [parse_device(name) or "cpu" for name in self.devices]
        return tuple(Task(role="worker", index=rank, rank=rank, device=name) for rank, name in enumerate(names))

    def connect(self, identity: Identity) -> Collective:
        """Join the process group of this attempt."""
        if identity.store is None:
            return LocalCollective()
        device = torch.device(identity.task.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        host, port = identity.store
        timeout = timedelta(seconds=self.timeout_s)
        store = dist.TCPStore(host, port, is_master=False, timeout=timeout)  # type: ignore[attr-defined]
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            # A fresh prefix an attempt: a restarted rank must not read a dead peer's address.
            store=dist.PrefixStore(identity.prefix, store),  # type: ignore[attr-defined]
            rank=identity.task.rank,
            world_size=identity.num_ranks,
            timeout=timeout,
        )
        return GroupCollective(rank=identity.task.rank, num_ranks=identity.num_ranks, device=device)

    def make_reducer(self, collective: Collective, numerics: Numerics) -> Reducer:
        """The lanes of a reproducible run, else the backend's all-reduce."""
        if numerics.reproducible:
            return LaneReducer(lanes=numerics.lanes, rank=collective.rank, num_ranks=collective.num_ranks)
        return LocalReducer() if collective.num_ranks == 1 else BackendReducer()

    def align(self, replica: Replica) -> None:
        """Take over rank 0's parameters and buffers: a model may draw its own where no seed reaches. Collective."""
        if replica.num_ranks > 1:
            for tensor in [*replica.model.state_dict().values(), *replica.masters.values()]:
                dist.broadcast(tensor.detach(), src=0)

    def leave(self, placed: Replica) -> None:  # noqa: ARG002 - the default group is the replica's
        """End the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()
