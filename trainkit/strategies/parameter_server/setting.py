"""What the tasks of a run agree on from the config, and what workers and servers do with it."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch

from trainkit.cluster.identity import Identity
from trainkit.errors import LinkError
from trainkit.numerics.batch import BatchPlan
from trainkit.strategies.base import Bench, Data, Training
from trainkit.strategies.parameter_server.asynchronous import AsyncDesk
from trainkit.strategies.parameter_server.clients import Servers
from trainkit.strategies.parameter_server.desk import Desk
from trainkit.strategies.parameter_server.errands import RemoteErrands
from trainkit.strategies.parameter_server.greeting import connect
from trainkit.strategies.parameter_server.meeting import Meeting
from trainkit.strategies.parameter_server.policies import Staleness
from trainkit.strategies.parameter_server.record import FILE, read_record
from trainkit.strategies.parameter_server.replaying import ReplayDesk
from trainkit.strategies.parameter_server.server import serve
from trainkit.strategies.parameter_server.shares import Shares
from trainkit.strategies.parameter_server.synchronous import SyncDesk
from trainkit.strategies.parameter_server.team import Team
from trainkit.strategies.parameter_server.variables import variables_of
from trainkit.strategies.parameter_server.worker import Mode, Worker
from trainkit.strategies.replica import Replica

__all__ = ["Setting", "hold_a_share", "work"]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The fields of the strategy, without what is open."""

    num_servers: int
    mode: Mode
    num_devices: int
    """Of a worker."""
    spares: int
    replaces: bool
    """Whether an update may take shards of several steps."""
    staleness: Staleness
    warmup_steps: int
    transfer: torch.dtype | None
    """What numbers travel as; None: as they are."""
    replay: str | None
    timeout_s: float

    def meet(self, identity: Identity) -> Meeting:
        """Where the tasks of this run find each other."""
        return Meeting.of(identity, self.timeout_s)

    def shares(self, replica: Replica) -> Shares:
        """The cut of the variables over the servers."""
        return Shares(variables_of(replica.model, replica.precision.master_dtype), self.num_servers)

    def servers(self, meeting: Meeting, shares: Shares, name: str) -> Servers:
        """Links to all servers, of one thread of a task."""
        addresses = [meeting.find(f"ps:{index}") for index in range(self.num_servers)]
        return Servers.connect(
            addresses,
            shares,
            token=meeting.token,
            name=name,
            timeout_s=self.timeout_s,
            transfer=self.transfer,
            is_over=lambda: meeting.is_over,
        )

    def team(self, replica: Replica) -> Team:
        """What computes: a replica, and copies of it on the devices after its own."""
        first = replica.device
        numbers = [(first.index or 0) + place for place in range(self.num_devices)]
        if first.type == "cpu":
            return Team(replica, [first] * self.num_devices)
        return Team(replica, [torch.device(first.type, number % torch.cuda.device_count()) for number in numbers])

    def worker(self, team: Team, servers: Servers, data: Data, training: Training) -> Worker:
        """What carries out errands."""
        return Worker(team, servers, data, training, mode=self.mode, mixes=self.replaces)

    def desk(self, plan: BatchPlan, until: int | None) -> Desk:
        """Who gets what to compute, and what makes an update."""
        if self.replay is not None:
            script = list(read_record(Path(self.replay).expanduser() / FILE))
            return ReplayDesk(script=script, staleness=self.staleness, until=until)
        if self.mode == "async":
            return AsyncDesk(plan=plan, staleness=self.staleness, warmup_steps=self.warmup_steps, until=until)
        return SyncDesk(plan=plan, spares=self.spares, width=self.num_devices, replaces=self.replaces, until=until)


def hold_a_share(setting: Setting, bench: Bench) -> None:
    """The part of a server, until the chief says bye.

    Raises:
        LinkError: the chief is gone.
    """
    meeting, task = setting.meet(bench.identity), bench.identity.task
    if meeting.is_over:
        return
    model = bench.precision.adapt(bench.model)
    shares = Shares(variables_of(model, bench.precision.master_dtype), setting.num_servers)
    listener = meeting.listener(str(task))
    meeting.tell(str(task), listener.address)
    bench.on_phase("idle", 0)
    serve(
        listener,
        shares,
        task.index,
        make_optimizer=bench.make_optimizer,
        on_phase=bench.on_phase,
        timeout_s=setting.timeout_s,
        stopped=lambda: meeting.is_over,
    )


def work(setting: Setting, bench: Bench, replica: Replica) -> None:
    """The part of a worker in a process of its own, until the chief says bye.

    Raises:
        LinkError: the chief or a server is gone.
    """
    meeting, task = setting.meet(bench.identity), bench.identity.task
    if meeting.is_over:
        return
    replica.on_phase = bench.on_phase
    bench.on_phase("idle", 0)
    try:
        with closing(setting.servers(meeting, setting.shares(replica), str(task))) as servers:
            data = bench.open_data(replica.device)
            link = connect(
                meeting.find("chief"),
                token=meeting.token,
                name=str(task),
                peer="chief",
                timeout_s=setting.timeout_s,
                is_over=lambda: meeting.is_over,
            )
            with closing(link), closing(setting.team(replica)) as team:
                worker = setting.worker(team, servers, data, bench.training)
                worker.run(RemoteErrands(link), lambda step: bench.on_phase("idle", step))
    except LinkError:
        if not meeting.is_over:
            raise
