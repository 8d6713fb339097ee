"""The chief's process: the model that is looked at, the one that computes, and what makes the updates."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any, Self

from torch import Tensor, nn

from trainkit.cluster.identity import Identity
from trainkit.errors import CheckpointError, LinkError
from trainkit.numerics.batch import BatchPlan
from trainkit.strategies.base import Outcome, Placed, Training
from trainkit.strategies.parameter_server.chief import Chief
from trainkit.strategies.parameter_server.clients import Servers
from trainkit.strategies.parameter_server.desk import Desk
from trainkit.strategies.parameter_server.errands import Errands
from trainkit.strategies.parameter_server.greeting import Listener
from trainkit.strategies.parameter_server.meeting import Meeting
from trainkit.strategies.parameter_server.policies import told_staleness
from trainkit.strategies.parameter_server.record import FILE, Record
from trainkit.strategies.parameter_server.setting import Setting
from trainkit.strategies.parameter_server.shares import Shares
from trainkit.strategies.parameter_server.staff import Staff
from trainkit.strategies.parameter_server.variables import tensors_of, unsaved_of
from trainkit.strategies.replica import Replica, replica_state, restore_replica

__all__ = ["Office"]


@dataclass(kw_only=True)
class Office(Placed):
    """What the chief works with."""

    mirror: Replica
    """The model that is looked at: evaluated, sampled from, shown; up to date after `catch_up`."""
    computing: Replica
    """The model of the chief's own worker."""
    setting: Setting
    meeting: Meeting
    shares: Shares
    servers: Servers
    """The links that give orders."""
    listener: Listener
    """Where workers of other processes come to."""
    numerics_lanes: int | None
    """Lanes of the reproducible order of summation."""
    recalled: dict[str, Any] = field(default_factory=dict)
    """What a checkpoint knows of what was handed out."""
    chief: Chief | None = None
    """None until the first step."""
    _desk: Desk | None = None
    _version: int = 0
    _seen: int = 0
    """The version that the mirror shows."""

    @classmethod
    def open(
        cls, setting: Setting, identity: Identity, place: Callable[[nn.Module], Replica], model: nn.Module
    ) -> Self:
        """Place the model twice, and meet the servers.

        Args:
            setting: what the tasks agree on.
            identity: the chief's.
            place: makes a replica of a model.
            model: as `Strategy.place` takes it.

        Raises:
            LinkError: a server has not come.
        """
        computing = place(copy.deepcopy(model))
        mirror, meeting = place(model), setting.meet(identity)
        shares = setting.shares(mirror)
        return cls(
            model=mirror.model,
            device=mirror.device,
            device_types=mirror.device_types,
            collective=mirror.collective,
            loss_scale=mirror.loss_scale,
            precision=mirror.precision,
            mirror=mirror,
            computing=computing,
            setting=setting,
            meeting=meeting,
            shares=shares,
            servers=setting.servers(meeting, shares, "chief"),
            listener=meeting.listener("chief"),
            numerics_lanes=mirror.numerics.lanes if mirror.numerics.reproducible else None,
        )

    def begin(self, plan: BatchPlan, version: int, until: int | None) -> None:
        """Prepare the desk for what is to come, give the servers what they shall hold; again after a rollback."""
        self._desk = self.setting.desk(plan, until)
        try:
            self._desk.recall(self.recalled, version)
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"meta.json does not tell which steps were handed out: {error}.") from None
        self._version = self._seen = version
        unsaved = unsaved_of(self.mirror.model)
        self.servers.load_state(replica_state(self.mirror), version=version, unsaved=unsaved)
        if self.chief is not None:
            if self.chief.record is not None:
                self.chief.record.close()
            self.chief.start_again(self._desk, self._record())

    def next_update(self, training: Training) -> Outcome:
        """Wait for the next update; at the first call, everybody is let in."""
        if self.chief is None:
            self.chief = self._appoint(training)
        outcome = self.chief.next_update(training)
        self._version = self.chief.desk.version
        return outcome

    def catch_up(self) -> None:
        """Bring the model that is looked at up to date."""
        if self._seen != self._version:
            self.servers.pull(tensors_of(self.mirror.model))
            self._seen = self._version

    def state(self) -> dict[str, Tensor]:
        """What the servers hold; before the first step, what they will."""
        if self.chief is None:
            return replica_state(self.mirror)
        if self.chief.record is not None:
            self.chief.record.flush()
        return self.servers.state()

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore a checkpoint; the servers get it from `begin`."""
        restore_replica(self.mirror, tensors)

    def remember(self) -> dict[str, Any]:
        """What is handed out and not applied."""
        return self.recalled if self._desk is None else self._desk.remember()

    def findings(self) -> dict[str, Any]:
        """What the updates were like."""
        if self.chief is None:
            return {}
        found: dict[str, Any] = {}
        if self.chief.staleness:
            found["staleness"] = told_staleness(self.chief.staleness)
        if self.chief.desk.late:
            found["late_gradients"] = dict(sorted(self.chief.desk.late.items()))
        if self.chief.mixed:
            found["mixed_reads"] = self.chief.mixed
        return found

    def close(self) -> None:
        """Send everybody home; nobody is left, and nothing."""
        self.meeting.end()
        if self.chief is not None:
            self.chief.close()
        with suppress(LinkError):
            self.servers.bye()
        self.servers.close()
        self.listener.close()

    def _appoint(self, training: Training) -> Chief:
        assert self._desk is not None
        staff = Staff()
        record = self._record()
        numerics = self.mirror.numerics
        chief = Chief(
            placed=self,
            desk=self._desk,
            servers=self.servers,
            staff=staff,
            record=record,
            mode=self.setting.mode,
            lanes=self.numerics_lanes,
            leaves_out=numerics.leaves_out,
            mixes=self.setting.replaces,
            timeout_s=self.setting.timeout_s,
        )
        if self.setting.mode == "async" and record is not None:
            chief.staleness.update(line.staleness for line in record.kept)
        self.listener.serve(staff.attend)
        self.meeting.tell("chief", self.listener.address)
        staff.employ(lambda errands: self._work(errands, training))
        return chief

    def _record(self) -> Record | None:
        """Return the record of updates, cut at the version that the training begins with."""
        return None if self.folder is None else Record(self.folder / FILE, self._version)

    def _work(self, errands: Errands, training: Training) -> None:
        """On a thread: what a worker does in a process of its own."""
        assert self.open_data is not None
        self.computing.on_phase = self.on_phase
        servers = self.setting.servers(self.meeting, self.shares, "worker:chief")
        with closing(servers), closing(self.setting.team(self.computing)) as team:
            self.setting.worker(team, servers, self.open_data(self.device), training).run(errands)
