"""Data parallelism: one process and one whole copy of the model a device, on this host or in a launch over several."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, ClassVar, Literal

import torch
import torch.distributed as dist

from trainkit.cluster.identity import Identity
from trainkit.cluster.launch import Launch
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

__all__ = ["DataParallel"]


@dataclass(frozen=True, kw_only=True)
class DataParallel(Synchronous):
    """What mirrored and multi_worker_mirrored share: everything but the machines they take.

    Each replica computes its shards of the global batch; gradients are summed over all (NCCL on GPUs, gloo on CPUs),
    and every replica makes the same update. Without a launch a worker a device of this host is started; in a launch
    its processes are the workers, one device each.
    """

    elastic: ClassVar[bool] = True

    replicas: Annotated[int | Literal["auto"], placement] = "auto"
    """Processes of this host; auto: one a GPU, or 2 on a host without; in a launch, those that it started."""
    devices: Annotated[tuple[int | str, ...] | None, placement] = None
    """The devices to use, `[0, 1]` or `[/gpu:0, /gpu:1]`; null: the first `replicas` GPUs, or the CPU."""
    timeout_s: Annotated[float, placement] = 600.0
    """Seconds that a rank waits for the others in an exchange."""

    def problems(self, facts: Facts) -> list[Problem]:
        """Devices that do not exist or stand twice, replicas that have no device or no lane, a launch that misfits."""
        problems = self._device_problems(facts)
        if problems:
            return problems
        if self.replicas != "auto" and self.replicas < 1:
            return [Problem(key="strategy.replicas", value=self.replicas, rule="must be 1 or more.")]
        found = self._host_problems(facts) if facts.launch is None else self._launch_problems(facts, facts.launch)
        count = self.num_replicas(facts)
        if not found and facts.numerics.reproducible and count > facts.numerics.lanes:
            rule = f"more replicas than numerics.lanes={facts.numerics.lanes}. Use at most that many, or more lanes."
            return [Problem(key="strategy.replicas", value=count, rule=rule)]
        return found

    def replicas_here(self, launch: Launch | None) -> int | Literal["auto"]:  # noqa: ARG002 - `replicas` is a host's
        """The replicas that the config asks for on this host."""
        return self.replicas

    def _host_problems(self, facts: Facts) -> list[Problem]:
        if self.devices is None and facts.num_gpus and self.num_replicas(facts) > facts.num_gpus:
            rule = f"more than the {facts.num_gpus} GPUs of this host. Use {facts.num_gpus} or fewer."
            return [Problem(key="strategy.replicas", value=self.replicas, rule=rule)]
        return []

    def _launch_problems(self, facts: Facts, launch: Launch) -> list[Problem]:
        """Roles that nobody plays here, and numbers of processes that fit no devices of this host."""
        others = sorted({task.role for task in launch.tasks} - {"chief", "worker"})
        problems = [
            Problem(key=f"cluster.{role}", rule=f"{launch.kind} names tasks of this role, and here all are workers.")
            for role in others
        ]
        local = launch.num_local * self._ranks_a_process(facts, launch)
        started = f"{launch.kind} started {_counted(launch.num_local, 'process', 'es')} on this host"
        if self.replicas_here(launch) not in ("auto", local) and not launch.takes_devices:
            rule = f"{started}, a replica each. Leave it out, or give {local}."
            problems.append(Problem(key="strategy.replicas", value=self.replicas, rule=rule))
        if self.devices is not None and len(self.devices) != local:
            rule = f"{started}. Name as many devices, or leave it out."
            problems.append(Problem(key="strategy.devices", value=list(self.devices), rule=rule))
        if self.devices is None and 0 < facts.num_gpus < local:
            rule = f"more replicas on this host than its {_counted(facts.num_gpus, 'GPU', 's')}. Start fewer."
            problems.append(Problem(key="strategy.replicas", value=local, rule=rule))
        return problems

    def _device_problems(self, facts: Facts) -> list[Problem]:
        if self.devices is None:
            return []
        problems = [p for name in self.devices for p in device_problems("strategy.devices", name, facts.num_gpus)]
        parsed = [parse_device(name) for name in self.devices]
        twice = sorted({str(name) for name in parsed if name != "cpu" and parsed.count(name) > 1})
        if twice:
            rule = f"names {', '.join(twice)} twice. NCCL takes one replica a GPU."
            problems.append(Problem(key="strategy.devices", value=list(self.devices), rule=rule))
        if self.replicas_here(facts.launch) not in ("auto", len(self.devices)):
            rule = f"but strategy.devices names {len(self.devices)}. Leave one of the two out."
            problems.append(Problem(key="strategy.replicas", value=self.replicas, rule=rule))
        if not self.devices:
            problems.append(Problem(key="strategy.devices", value=[], rule="names no device. Leave it out for all."))
        return problems

    def num_replicas(self, facts: Facts) -> int:
        """The replicas asked for, or a replica a device; in a launch, over all its processes."""
        if facts.launch is not None:
            return facts.launch.num_ranks * self._ranks_a_process(facts, facts.launch)
        if self.devices is not None:
            return len(self.devices)
        return (facts.num_gpus or 2) if self.replicas == "auto" else self.replicas

    def tasks(self, facts: Facts) -> tuple[Task, ...]:
        """A worker a replica; in a launch, the ranks of each of its processes one after the other."""
        launch = facts.launch
        if launch is None:
            names = self._devices(facts, range(self.num_replicas(facts)))
            return tuple(Task(role="worker", index=rank, rank=rank, device=name) for rank, name in enumerate(names))
        share = self._ranks_a_process(facts, launch)
        first = launch.local_rank * share
        names = self._devices(facts, range(first, first + share))
        return tuple(
            Task(role=task.role, index=task.index * share + place, rank=task.rank * share + place, device=name)
            for task in launch.tasks
            for place, name in enumerate(names)
        )

    def _ranks_a_process(self, facts: Facts, launch: Launch) -> int:
        """One, but for a process that takes all devices of its host."""
        if not launch.takes_devices:
            return 1
        if self.devices is not None and launch.num_local == 1:
            return len(self.devices)
        asked = self.replicas_here(launch)
        if asked != "auto":
            return asked
        return max(facts.num_gpus, 1) if launch.num_local == 1 else 1

    def _devices(self, facts: Facts, places: range) -> list[str]:
        """The devices of some of this host's replicas."""
        if self.devices is not None:
            return [parse_device(self.devices[place]) or "cpu" for place in places]
        return [f"cuda:{place}" if facts.num_gpus else "cpu" for place in places]

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


def _counted(count: int, word: str, plural: str) -> str:
    return f"{count} {word}{'' if count == 1 else plural}"
