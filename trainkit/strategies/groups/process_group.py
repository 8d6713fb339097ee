"""Strategies whose ranks form one process group, one device each.

The ranks are processes on this host or in a launch over several.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any, ClassVar, Final, Literal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from trainkit.cluster.host import mig_instances, use_device
from trainkit.cluster.launch import LaunchEnvironment
from trainkit.cluster.tasks import Identity, Task
from trainkit.config.values import MOST_PROCESSES
from trainkit.errors import LinkError, Problem
from trainkit.fields import above, at_least, at_most, placement, unit
from trainkit.strategies.base import PlanContext, choice_of
from trainkit.strategies.collectives import GroupCollective, RankGroup
from trainkit.strategies.rendezvous_store import store_client

_PATTERN = re.compile(r"^/?(?:device:)?(?P<kind>cpu|gpu|cuda)(?::(?P<index>\d+))?$", re.IGNORECASE)


def parse_device(name: str | int) -> str | None:
    """Return a device in torch's spelling; None if the name is not a device.

    Example:
        >>> parse_device("/gpu:1"), parse_device(0), parse_device("cpu"), parse_device("gpu:x")
        ('cuda:1', 'cuda:0', 'cpu', None)
    """
    if isinstance(name, int):
        return f"cuda:{name}"
    match = _PATTERN.match(name)
    if match is None:
        return None
    if match["kind"].lower() == "cpu":
        return "cpu"
    return f"cuda:{match['index'] or 0}"


def device_list_problems(key: str, names: Sequence[str | int] | None, num_gpus: int, *, because: str) -> list[Problem]:
    """Return the problems of a list of devices: invalid names, repeated GPUs, an empty list."""
    if names is None:
        return []
    if not names:
        return [Problem(key=key, value=[], rule="names no device. Leave it out for all.")]
    problems = [problem for name in names for problem in device_problems(key, name, num_gpus)]
    parsed = [parse_device(name) for name in names]
    twice = sorted({name for name in parsed if name is not None and name != "cpu" and parsed.count(name) > 1})
    if twice:
        problems.append(Problem(key=key, value=list(names), rule=f"names {', '.join(twice)} twice. {because}"))
    return problems


def device_problems(key: str, name: str | int, num_gpus: int) -> list[Problem]:
    """Return the problems of the name of a device on a host of `num_gpus` GPUs."""
    device = parse_device(name)
    if device is None:
        return [Problem(key=key, value=name, rule="not the name of a device. Use cpu, cuda:0 or /gpu:0.")]
    index = int(device.partition(":")[2] or 0)
    if device != "cpu" and index >= num_gpus:
        have = f"{num_gpus}, counted from 0" if num_gpus else "none"
        return [Problem(key=key, value=name, rule=f"no such GPU: this host has {have}.")]
    return []


_POLL_S: Final = 0.02
_DUMP_SIGNAL: Final = "exception_dump"
"""Key of NCCL's signal that an exchange has failed (kStoreDumpKey of ProcessGroupNCCL.hpp); it never has a prefix."""


@dataclass(frozen=True, kw_only=True)
class GroupOfOne:
    """The option of strategies whose exchanges work in a process group of one rank; before `ProcessGroupOptions`."""

    process_group: Annotated[Literal["auto", "always"], placement] = "auto"
    """auto: several ranks join a process group; always: even a single rank, to try the exchanges on one device."""

    @property
    def is_grouped(self) -> bool:
        """Whether even a single rank joins a process group."""
        return self.process_group == "always"


@dataclass(frozen=True, kw_only=True)
class ProcessGroup:
    """The common options of strategies with several processes: the processes, their devices, and the process group.

    Without a launch a process is started for every rank, on a device of this host; in a launch its processes are the
    ranks, one device each. A replica consists of `ranks_a_replica` neighbouring ranks: one if it is not split.
    """

    alone_as_one_device: ClassVar[bool] = False
    """Whether a single rank runs the code of one device; not inherited: a subclass may compute differently."""

    devices: Annotated[tuple[int | str, ...] | None, placement] = None
    """The devices of this host to use, `[0, 1]` or `[/gpu:0, /gpu:1]`; null: the first GPUs, or the CPU."""
    timeout_s: Annotated[float, placement, above(0), unit("seconds")] = 600.0
    """Seconds that a rank waits for the others in an exchange."""

    @property
    def wanted_replicas(self) -> int | Literal["auto"]:
        """The number of replicas that the fields give; auto: as many as the devices or the launch make up."""
        return "auto"

    def replicas_problem(self, rule: str, value: object = None) -> Problem:
        """Return a problem of the number of replicas, at the key that sets it.

        Args:
            rule: what is wrong, and the remedy.
            value: the number, where it is not that of the fields.
        """
        return Problem(key="strategy.replicas", value=self.wanted_replicas if value is None else value, rule=rule)

    @property
    def is_grouped(self) -> bool:
        """Whether even a single rank joins a process group."""
        return False

    @property
    def ranks_a_replica(self) -> int:
        """Number of processes that compute one replica together."""
        return 1

    @property
    def loss_rank(self) -> int:
        """The rank within a replica, counted from 0, that holds the loss (the last pipeline stage, for example)."""
        return 0

    def validate(self, context: PlanContext) -> list[Problem]:
        """Return problems: invalid or repeated devices, replicas without device or lane, a launch that does not fit."""
        problems = self._device_problems(context)
        if problems:
            return problems
        if self.wanted_replicas != "auto" and self.wanted_replicas < 1:
            return [self.replicas_problem("must be 1 or more.")]
        launch, count = context.launch, self.num_replicas(context)
        problems = self._host_problems(context) if launch is None else self._placement_problems(context, launch)
        if not problems and context.numerics.reproducible and count > context.numerics.lanes:
            rule = f"more replicas than numerics.lanes={context.numerics.lanes}. Use at most that many, or more lanes."
            return [self.replicas_problem(rule, count)]
        return problems

    def proof_problems(self, context: PlanContext) -> list[Problem]:
        """Return the problem that a single rank without a process group runs the same code as one_device."""
        alone = type(self).__dict__.get("alone_as_one_device", False) and not self.is_grouped
        if len(self.tasks(context)) > 1 or not alone:
            return []
        use = "strategy.replicas=2"
        if context.num_gpus == 1:
            use = "strategy.process_group=always"
        rule = f"a single rank runs the code of one_device, and comparing the two shows nothing. Use {use}."
        return [self.replicas_problem(rule)]

    def replicas_here(self, launch: LaunchEnvironment | None) -> int | Literal["auto"]:
        """Return the share of this host in the replicas that the config requests."""
        if launch is None or self.wanted_replicas == "auto":
            return self.wanted_replicas
        return self.wanted_replicas * launch.num_local // launch.num_ranks

    def launch_problems(self, launch: LaunchEnvironment) -> list[Problem]:
        """Return problems: roles that are not used here, and replicas that the processes do not make up."""
        others = sorted({task.role for task in launch.tasks} - {"chief", "worker"})
        name = choice_of(type(self)) if others else ""
        problems = [
            Problem(
                key=f"cluster.{role}",
                rule=f"{launch.kind} names tasks of this role, and {name} has workers only.",
                origin="environment" if launch.ignore else "",
            )
            for role in others
        ]
        count, each, replicas = launch.num_ranks, self.ranks_a_replica, self.wanted_replicas
        started = f"{launch.kind} started {_counted(count, 'process', 'es')}"
        if launch.takes_devices:
            if replicas != "auto" and replicas * each % count:
                use = f"Use a multiple of {count // math.gcd(count, each)}."
                rule = f"but {started}, each with as many replicas. {use}"
                if each > 1:
                    rule = f"of {each} ranks each, but {started}, each with as many ranks. {use}"
                problems.append(self.replicas_problem(rule))
            return problems
        started += ", a replica each" if each == 1 else f", and a replica takes {each}"
        if count % each:
            problems.append(Problem(key="strategy", rule=f"{started}. Start a multiple of {each}."))
        elif replicas not in ("auto", count // each):
            rule = f"but {started}. Use {count // each}, or start {each * replicas}."
            problems.append(self.replicas_problem(rule))
        return problems

    def _host_problems(self, context: PlanContext) -> list[Problem]:
        count, each = self.num_replicas(context) * self.ranks_a_replica, self.ranks_a_replica
        if count > MOST_PROCESSES:
            rule = f"{self._described(context)}, and one host starts {MOST_PROCESSES:,} processes at most. Use fewer."
            return [self.replicas_problem(rule)]
        if self.devices is not None and len(self.devices) != count:
            rule = f"names {_counted(len(self.devices), 'device', 's')}, and {self._described(context)}. Name as many."
            return [Problem(key="strategy.devices", value=list(self.devices), rule=rule)]
        if self.devices is None and 0 < context.num_gpus < count:
            if each > 1:
                rule = f"{self._described(context)}, and this host has {_counted(context.num_gpus, 'GPU', 's')}."
            else:
                rule = f"more than the {context.num_gpus} GPUs of this host. Use {context.num_gpus} or fewer."
            return [self.replicas_problem(rule)]
        return []

    def _described(self, context: PlanContext) -> str:
        count, each = self.num_replicas(context), self.ranks_a_replica
        verb = "needs" if count == 1 else "need"
        return f"{_counted(count, 'replica', 's')} of {each} ranks {verb} {count * each} devices"

    def _placement_problems(self, context: PlanContext, launch: LaunchEnvironment) -> list[Problem]:
        """Return problems: processes of a launch that do not fit the devices of this host."""
        problems, each = self.launch_problems(launch), self.ranks_a_replica
        share = self._ranks_a_process(context, launch)
        started = f"{launch.kind} started {_counted(launch.num_local, 'process', 'es')} on this host"
        if launch.takes_devices and launch.num_ranks * share % each:
            rule = f"{started}, of {_counted(share, 'rank', 's')} each, and a replica takes {each}. Give replicas."
            problems.append(Problem(key="strategy", rule=rule))
        local = launch.num_local * share
        if self.devices is not None and len(self.devices) != local:
            rule = f"{started}. Name as many devices, or leave it out."
            problems.append(Problem(key="strategy.devices", value=list(self.devices), rule=rule))
        if self.devices is None and 0 < context.num_gpus < local and not launch.has_own_gpu:
            rule = f"more replicas on this host than its {_counted(context.num_gpus, 'GPU', 's')}. Start fewer."
            problems.append(self.replicas_problem(rule, local))
        return problems

    def _device_problems(self, context: PlanContext) -> list[Problem]:
        if self.devices is None:
            return []
        because = "NCCL allows one replica per GPU."
        problems = device_list_problems("strategy.devices", self.devices, context.num_gpus, because=because)
        if self.ranks_a_replica == 1 and self.replicas_here(context.launch) not in ("auto", len(self.devices)):
            rule = f"but strategy.devices names {len(self.devices)}. Leave one of the two out."
            problems.append(self.replicas_problem(rule))
        return problems

    def num_replicas(self, context: PlanContext) -> int:
        """Return the requested number of replicas, or one per device; in a launch, over all its processes."""
        if context.launch is not None:
            return context.launch.num_ranks * self._ranks_a_process(context, context.launch) // self.ranks_a_replica
        if self.wanted_replicas != "auto":
            return self.wanted_replicas
        if self.devices is not None:
            return max(len(self.devices) // self.ranks_a_replica, 1)
        return max((context.num_gpus or 2) // self.ranks_a_replica, 1)

    def tasks(self, context: PlanContext) -> tuple[Task, ...]:
        """Return a worker task per rank; in a launch, the ranks of each process in sequence."""
        launch = context.launch
        if launch is None:
            names = self._devices(context, range(self.num_replicas(context) * self.ranks_a_replica))
            return tuple(Task(role="worker", index=rank, rank=rank, device=name) for rank, name in enumerate(names))
        share = self._ranks_a_process(context, launch)
        first = 0 if launch.has_own_gpu else launch.local_rank * share
        names = self._devices(context, range(first, first + share))
        return tuple(
            Task(role=task.role, index=task.index * share + offset, rank=task.rank * share + offset, device=name)
            for task in launch.tasks
            for offset, name in enumerate(names)
        )

    def _ranks_a_process(self, context: PlanContext, launch: LaunchEnvironment) -> int:
        """Return the ranks of a process: one, unless it takes all devices of its host."""
        if not launch.takes_devices:
            return 1
        if self.devices is not None and launch.num_local == 1:
            return len(self.devices)
        if self.wanted_replicas != "auto":
            return max(self.wanted_replicas * self.ranks_a_replica // launch.num_ranks, 1)
        return max(context.num_gpus, 1) if launch.num_local == 1 else 1

    def _devices(self, context: PlanContext, indices: range) -> list[str]:
        """Return the devices of some of this host's ranks."""
        if self.devices is not None:
            return [parse_device(self.devices[index]) or "cpu" for index in indices]
        return [f"cuda:{index}" if context.num_gpus else "cpu" for index in indices]

    def backend(self, device_type: str, *, exchanges_on_cpu: bool = False) -> str:
        """Return the backend of the process group, for ranks with this type of device."""
        if device_type != "cuda":
            return "gloo"
        return "cpu:gloo,cuda:nccl" if exchanges_on_cpu else "nccl"

    def join(self, identity: Identity, *, exchanges_on_cpu: bool = False, exchanges_on_gpus: bool = False) -> RankGroup:
        """Join the process group of this attempt, or use the one that this process is in; collective.

        Args:
            identity: the identity of this task.
            exchanges_on_cpu: whether ranks with a GPU also exchange tensors of the CPU.
            exchanges_on_gpus: whether a rank exchanges tensors of several GPUs, so that NCCL is bound to none of them.
        """
        device = torch.device(identity.task.device)
        use_device(device)
        if identity.store is None and not self.is_grouped:
            return RankGroup()
        if not dist.is_initialized():
            self._connect(identity, device, exchanges_on_cpu=exchanges_on_cpu, exchanges_on_gpus=exchanges_on_gpus)
        each, ranks = self.ranks_a_replica, range(0, identity.num_ranks, self.ranks_a_replica)
        every = GroupCollective(rank=identity.task.rank, num_ranks=identity.num_ranks, device=device)
        if each == 1:
            return RankGroup(data_ranks=every, all_ranks=every, is_joined=True)
        data = GroupCollective(
            rank=identity.task.rank // each,
            num_ranks=identity.num_ranks // each,
            device=device,
            representatives=tuple(first + self.loss_rank for first in ranks),
        )
        return RankGroup(data_ranks=data, all_ranks=every, is_joined=True)

    def _connect(
        self, identity: Identity, device: torch.device, *, exchanges_on_cpu: bool, exchanges_on_gpus: bool
    ) -> None:
        store = HashStore() if identity.store is None else store_client(identity.store, self.timeout_s)
        store.delete_key(_DUMP_SIGNAL)  # of an earlier attempt: NCCL would end this one minutes later
        backend = self.backend(device.type, exchanges_on_cpu=exchanges_on_cpu)
        if identity.num_ranks > 1 and "nccl" in backend and mig_instances(os.environ):
            backend = "gloo"  # NCCL supports one rank per GPU, and MIG instances share one
        # A fresh prefix for each attempt: a restarted rank must not read a dead peer's address.
        store = dist.PrefixStore(identity.prefix, store)  # type: ignore[attr-defined]
        _await_ranks(store, identity, self.timeout_s)
        dist.init_process_group(
            backend,
            store=store,
            rank=identity.task.rank,
            world_size=identity.num_ranks,
            timeout=timedelta(seconds=self.timeout_s),
            device_id=device if "nccl" in backend and not exchanges_on_gpus else None,
        )


@dataclass(frozen=True, kw_only=True)
class ProcessGroupOptions(ProcessGroup):
    """The options of a process group whose replicas are one number."""

    replicas: Annotated[Literal["auto"] | int, placement, at_least(1), at_most(MOST_PROCESSES), unit("replicas")] = (
        "auto"
    )
    """Replicas of the run, over all hosts; auto: as many as the GPUs make up, or 2 processes; in a launch, as many as
    its processes.
    """

    @property
    def wanted_replicas(self) -> int | Literal["auto"]:
        """The number of replicas that the fields give."""
        return self.replicas


def _await_ranks(store: Any, identity: Identity, timeout_s: float) -> None:
    """Wait until all ranks are about to join: torch's own wait can be interrupted neither by a signal nor by an error.

    Raises:
        LinkError: a rank did not come.
    """
    rank, deadline = identity.task.rank, time.monotonic() + timeout_s
    store.set(f"joining/{rank}", "")
    store.add("joining", 1)
    while store.add("joining", 0) < identity.num_ranks:
        if time.monotonic() > deadline:
            missing = [str(other) for other in range(identity.num_ranks) if not store.check([f"joining/{other}"])]
            raise LinkError(f"rank {rank} waited {timeout_s:g} s (strategy.timeout_s) for rank {', '.join(missing)}")
        time.sleep(_POLL_S)


def _counted(count: int, word: str, plural: str) -> str:
    return f"{count} {word}{'' if count == 1 else plural}"
