"""The settings that all tasks of a run share, and the entry points of workers and servers."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch

from trainkit.errors import LinkError
from trainkit.numerics.batch import BatchPlan
from trainkit.strategies.base import Data, StepContext, TaskContext
from trainkit.strategies.core.replica import Replica
from trainkit.strategies.parameter_server.coordinator.async_scheduler import AsyncScheduler
from trainkit.strategies.parameter_server.coordinator.replay_scheduler import ReplayScheduler
from trainkit.strategies.parameter_server.coordinator.scheduler import WorkScheduler
from trainkit.strategies.parameter_server.coordinator.staleness import Staleness
from trainkit.strategies.parameter_server.coordinator.sync_scheduler import SyncScheduler
from trainkit.strategies.parameter_server.coordinator.update_log import FILE, read_record
from trainkit.strategies.parameter_server.server.main import serve
from trainkit.strategies.parameter_server.wire.address_book import AddressBook
from trainkit.strategies.parameter_server.wire.auth import connect
from trainkit.strategies.parameter_server.wire.client import ParameterServerClient
from trainkit.strategies.parameter_server.wire.variable_shards import VariableShards, variables_of
from trainkit.strategies.parameter_server.wire.work_channel import RemoteWorkChannel
from trainkit.strategies.parameter_server.worker_task import Mode, Worker, WorkerReplicas


@dataclass(frozen=True, kw_only=True)
class PsSettings:
    """The fields of the strategy, with all open values resolved."""

    num_servers: int
    mode: Mode
    num_devices: int
    """Number of devices of a worker."""
    spares: int
    replaces: bool
    """Whether an update may contain shards of several steps."""
    staleness: Staleness
    warmup_steps: int
    transfer: torch.dtype | None
    """The dtype of transferred numbers; None: unchanged."""
    replay: str | None
    timeout_s: float

    def shares(self, replica: Replica) -> VariableShards:
        """Return the partition of the variables over the servers."""
        return VariableShards(variables_of(replica.model, replica.precision.master_dtype), self.num_servers)

    def servers(self, addresses: AddressBook, shares: VariableShards, name: str) -> ParameterServerClient:
        """Connect to all servers, for one thread of a task."""
        return ParameterServerClient.connect(
            [addresses.find(f"ps:{index}") for index in range(self.num_servers)],
            shares,
            token=addresses.token,
            name=name,
            timeout_s=self.timeout_s,
            transfer=self.transfer,
            is_over=lambda: addresses.is_over,
        )

    def replicas(self, replica: Replica) -> WorkerReplicas:
        """Return the replicas of a worker: the given one, and copies on the devices after its own."""
        first = replica.device
        numbers = [(first.index or 0) + place for place in range(self.num_devices)]
        if first.type == "cpu":
            return WorkerReplicas(replica, [first] * self.num_devices)
        return WorkerReplicas(
            replica, [torch.device(first.type, number % torch.cuda.device_count()) for number in numbers]
        )

    def worker(
        self, replicas: WorkerReplicas, servers: ParameterServerClient, data: Data, training: StepContext
    ) -> Worker:
        """Return the worker that executes work orders."""
        return Worker(replicas, servers, data, training, mode=self.mode, mixes=self.replaces)

    def scheduler(self, plan: BatchPlan, until: int | None) -> WorkScheduler:
        """Return the scheduler that assigns work and forms updates."""
        if self.replay is not None:
            script = list(read_record(Path(self.replay).expanduser() / FILE))
            return ReplayScheduler(script=script, staleness=self.staleness, until=until)
        if self.mode == "async":
            return AsyncScheduler(plan=plan, staleness=self.staleness, warmup_steps=self.warmup_steps, until=until)
        return SyncScheduler(plan=plan, spares=self.spares, width=self.num_devices, replaces=self.replaces, until=until)


def run_server(settings: PsSettings, context: TaskContext) -> None:
    """Run a server task, until the chief requests the end.

    Raises:
        LinkError: the connection to the chief broke.
    """
    addresses, task = AddressBook.of(context.identity, settings.timeout_s), context.identity.task
    if addresses.is_over:
        return
    model = context.precision.adapt(context.model)
    shares = VariableShards(variables_of(model, context.precision.master_dtype), settings.num_servers)
    listener = addresses.listener(str(task))
    addresses.publish(str(task), listener.address)
    context.on_phase("idle", 0)
    serve(
        listener,
        shares,
        task.index,
        make_optimizer=context.make_optimizer,
        on_phase=context.on_phase,
        timeout_s=settings.timeout_s,
        stopped=lambda: addresses.is_over,
    )


def run_worker(settings: PsSettings, context: TaskContext, replica: Replica) -> None:
    """Run a worker task in its own process, until the chief requests the end.

    Raises:
        LinkError: the connection to the chief or a server broke.
    """
    addresses, task = AddressBook.of(context.identity, settings.timeout_s), context.identity.task
    if addresses.is_over:
        return
    context.on_phase("idle", 0)
    try:
        with closing(settings.servers(addresses, settings.shares(replica), str(task))) as servers:
            data = context.open_data(replica.device)
            link = connect(
                addresses.find("chief"),
                token=addresses.token,
                name=str(task),
                peer="chief",
                timeout_s=settings.timeout_s,
                is_over=lambda: addresses.is_over,
            )
            with closing(link), closing(settings.replicas(replica)) as replicas:
                worker = settings.worker(replicas, servers, data, context.training)
                worker.run(RemoteWorkChannel(link), lambda step: context.on_phase("idle", step))
    except LinkError:
        if not addresses.is_over:
            raise
