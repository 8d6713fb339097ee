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
from trainkit.strategies.base import Placed, StepContext, StepOutcome
from trainkit.strategies.core.replica import Replica, replica_state, restore_replica
from trainkit.strategies.parameter_server.coordinator.dispatcher import UpdateDispatcher
from trainkit.strategies.parameter_server.coordinator.registry import WorkerRegistry
from trainkit.strategies.parameter_server.coordinator.scheduler import WorkScheduler
from trainkit.strategies.parameter_server.coordinator.staleness import staleness_summary
from trainkit.strategies.parameter_server.coordinator.update_log import FILE, UpdateLog
from trainkit.strategies.parameter_server.settings import PsSettings
from trainkit.strategies.parameter_server.wire.address_book import AddressBook
from trainkit.strategies.parameter_server.wire.auth import AuthenticatedListener
from trainkit.strategies.parameter_server.wire.client import ParameterServerClient
from trainkit.strategies.parameter_server.wire.variable_shards import VariableShards
from trainkit.strategies.parameter_server.wire.variables import tensors_of, unsaved_of
from trainkit.strategies.parameter_server.wire.work_channel import WorkChannel

__all__ = ["CoordinatorState"]


@dataclass(kw_only=True)
class CoordinatorState(Placed):
    """What the chief works with."""

    eval_model: Replica
    """The model that is looked at: evaluated, sampled from, shown; up to date after `catch_up`."""
    computing: Replica
    """The model of the chief's own worker."""
    setting: PsSettings
    meeting: AddressBook
    shares: VariableShards
    servers: ParameterServerClient
    """The links that give orders."""
    listener: AuthenticatedListener
    """Where workers of other processes come to."""
    numerics_lanes: int | None
    """Lanes of the reproducible order of summation."""
    recalled: dict[str, Any] = field(default_factory=dict)
    """What a checkpoint knows of what was handed out."""
    chief: UpdateDispatcher | None = None
    """None until the first step."""
    _desk: WorkScheduler | None = None
    _version: int = 0
    _seen: int = 0
    """The version that the mirror shows."""

    @classmethod
    def open(
        cls, setting: PsSettings, identity: Identity, place: Callable[[nn.Module], Replica], model: nn.Module
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
            data_ranks=mirror.data_ranks,
            loss_scale=mirror.loss_scale,
            precision=mirror.precision,
            eval_model=mirror,
            computing=computing,
            setting=setting,
            meeting=meeting,
            shares=shares,
            servers=setting.servers(meeting, shares, "chief"),
            listener=meeting.listener("chief"),
            numerics_lanes=mirror.numerics.lanes if mirror.numerics.reproducible else None,
        )

    def start(self, plan: BatchPlan, version: int, until: int | None) -> None:
        """Prepare the desk for what is to come, give the servers what they shall hold; again after a rollback."""
        self._desk = self.setting.desk(plan, until)
        try:
            self._desk.recall(self.recalled, version)
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"meta.json does not tell which steps were handed out: {error}.") from None
        self._version = self._seen = version
        unsaved = unsaved_of(self.eval_model.model)
        self.servers.load_state(replica_state(self.eval_model), version=version, unsaved=unsaved)
        if self.chief is not None:
            if self.chief.record is not None:
                self.chief.record.close()
            self.chief.start_again(self._desk, self._record())

    def next_update(self, training: StepContext) -> StepOutcome:
        """Wait for the next update; at the first call, everybody is let in."""
        if self.chief is None:
            self.chief = self._start_dispatcher(training)
        outcome = self.chief.next_update(training)
        self._version = self.chief.desk.version
        return outcome

    def catch_up(self) -> None:
        """Bring the model that is looked at up to date."""
        if self._seen != self._version:
            self.servers.pull(tensors_of(self.eval_model.model))
            self._seen = self._version

    def state(self) -> dict[str, Tensor]:
        """What the servers hold; before the first step, what they will."""
        if self.chief is None:
            return replica_state(self.eval_model)
        if self.chief.record is not None:
            self.chief.record.flush()
        return self.servers.state()

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore a checkpoint; the servers get it from `begin`."""
        restore_replica(self.eval_model, tensors)

    def remember(self) -> dict[str, Any]:
        """What is handed out and not applied."""
        return self.recalled if self._desk is None else self._desk.remember()

    def findings(self) -> dict[str, Any]:
        """What the updates were like."""
        if self.chief is None:
            return {}
        found: dict[str, Any] = {}
        if self.chief.staleness:
            found["staleness"] = staleness_summary(self.chief.staleness)
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
            self.servers.shutdown()
        self.servers.close()
        self.listener.close()

    def _start_dispatcher(self, training: StepContext) -> UpdateDispatcher:
        assert self._desk is not None
        staff = WorkerRegistry()
        record = self._record()
        numerics = self.eval_model.numerics
        chief = UpdateDispatcher(
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
        self.listener.serve(staff.serve_connection)
        self.meeting.tell("chief", self.listener.address)
        staff.start_local_worker(lambda errands: self._work(errands, training))
        return chief

    def _record(self) -> UpdateLog | None:
        """Return the record of updates, cut at the version that the training begins with."""
        return None if self.folder is None else UpdateLog(self.folder / FILE, self._version)

    def _work(self, errands: WorkChannel, training: StepContext) -> None:
        """On a thread: what a worker does in a process of its own."""
        assert self.make_loader is not None
        self.computing.on_phase = self.on_phase
        servers = self.setting.servers(self.meeting, self.shares, "worker:chief")
        with closing(servers), closing(self.setting.team(self.computing)) as team:
            self.setting.worker(team, servers, self.make_loader(self.device), training).run(errands)
