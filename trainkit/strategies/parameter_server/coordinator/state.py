"""The chief's process: the model for evaluation, the model for computing, and the dispatcher of updates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, suppress

import torch

from trainkit.adapters.average import AVERAGE
from trainkit.errors import CheckpointError, LinkError
from trainkit.strategies.base import (
    Batch,
    Executor,
    JsonMap,
    SetupRequest,
    StateDict,
    StepCounter,
    StepOutcome,
    Ticket,
)
from trainkit.strategies.core.replica import Replica, replica_state, restore_replica
from trainkit.strategies.parameter_server.coordinator.dispatcher import UpdateDispatcher, WorkerRegistry
from trainkit.strategies.parameter_server.coordinator.scheduler import WorkScheduler
from trainkit.strategies.parameter_server.coordinator.staleness import staleness_summary
from trainkit.strategies.parameter_server.coordinator.update_log import FILE, NoUpdateLog, UpdateLog
from trainkit.strategies.parameter_server.settings import PsSettings
from trainkit.strategies.parameter_server.wire.address_book import AddressBook
from trainkit.strategies.parameter_server.wire.variable_shards import tensors_of, unsaved_of
from trainkit.strategies.parameter_server.wire.work_channel import WorkChannel


class CoordinatorExecutor(Executor):
    """The chief: it evaluates, computes, and dispatches updates.

    Raises:
        LinkError: a server cannot be reached.
    """

    def __init__(self, settings: PsSettings, request: SetupRequest, eval_model: Replica, computing: Replica) -> None:
        self._settings, self._request = settings, request
        self._eval_model, self._computing = eval_model, computing
        self._addresses = AddressBook.of(request.identity, settings.timeout_s)
        self._shares = settings.shares(eval_model)
        self._servers = settings.servers(self._addresses, self._shares, "chief")
        """Connections to the servers."""
        self._listener = self._addresses.listener("chief")
        """Accepts the connections of workers in other processes."""
        numerics = eval_model.numerics
        self._lanes = numerics.lanes if numerics.reproducible else None
        """Lanes of the reproducible order of summation."""
        self._recalled: JsonMap = {}
        """The assigned work in a checkpoint."""
        self._chief: UpdateDispatcher | None = None
        """The dispatcher; None until the first step."""
        self._scheduler: WorkScheduler | None = None
        self._version = 0
        self._seen = 0
        """The version of the evaluated model."""
        self._shows_averages = False
        """Whether the evaluated model holds averages."""

    @property
    def local(self) -> Replica:
        """The model that is evaluated."""
        return self._eval_model

    def assign(self, step: int) -> tuple[int, ...]:
        """Return an empty tuple: shards are assigned to idle workers."""
        del step
        return ()

    def tickets(self, position: StepCounter, until: int | None = None) -> Iterator[Ticket]:
        """Yield empty tickets, each of which waits for the next update."""
        self._start(position.step, until)
        while True:
            yield Ticket(position.step, ())

    def step(self, ticket: Ticket, batches: Sequence[Batch]) -> StepOutcome:
        """Wait for the next update; at the first call, start the workers."""
        del ticket, batches
        if self._chief is None:
            self._chief = self._start_dispatcher()
        outcome = self._chief.next_update(self._request.training)
        self._version = self._chief.scheduler.version
        return outcome

    def refresh_model(self) -> None:
        """Read the variables into the model for evaluation."""
        if self._seen != self._version:
            self._servers.pull(tensors_of(self._eval_model.model))
            self._seen = self._version

    def swap_averages(self) -> bool:
        """Read the averages from the servers into the model for evaluation; if they are there already, read the
        variables again.
        """
        if self._shows_averages:
            self._shows_averages, self._seen = False, -1
            self.refresh_model()
            return True
        state = self.state_dict()
        averages = {name: state.get(f"optimizer/{AVERAGE}/{name}") for name in self._eval_model.params}
        with torch.no_grad():
            for name, average in averages.items():
                if average is not None:
                    self._eval_model.params[name].copy_(average)
        self._shows_averages = any(average is not None for average in averages.values())
        return self._shows_averages

    def state_dict(self) -> StateDict:
        """Return the state of the servers; before the first step, the state that they will load."""
        if self._chief is None:
            return replica_state(self._eval_model)
        self._chief.record.flush()
        return self._servers.state()

    def load_state_dict(self, state: StateDict) -> None:
        """Restore a checkpoint; the servers load it before the next step."""
        restore_replica(self._eval_model, state)

    def state_dict_extra(self) -> JsonMap:
        """Return the work that is assigned and not applied."""
        return self._recalled if self._scheduler is None else self._scheduler.remember()

    def load_state_extra(self, extra: JsonMap) -> None:
        """Assign this work again, before any other."""
        self._recalled = dict(extra)

    def result_extra(self) -> JsonMap:
        """Return the staleness of the updates, and the number of late gradients."""
        if self._chief is None:
            return {}
        found: dict[str, object] = {}
        if self._chief.staleness:
            found["staleness"] = staleness_summary(self._chief.staleness)
        if self._chief.scheduler.late:
            found["late_gradients"] = dict(sorted(self._chief.scheduler.late.items()))
        if self._chief.mixed:
            found["mixed_reads"] = self._chief.mixed
        return found

    def close(self, *, failed: bool = False) -> None:  # noqa: ARG002 - other tasks wait for no exchange
        """End the other tasks, and close all connections."""
        self._addresses.end()
        if self._chief is not None:
            self._chief.close()
        with suppress(LinkError):
            self._servers.shutdown()
        self._servers.close()
        self._listener.close()

    def _start(self, version: int, until: int | None) -> None:
        """Prepare the scheduler, and send the servers the variables; again after a rollback."""
        self._scheduler = self._settings.scheduler(self._request.training.plan, until)
        try:
            self._scheduler.recall(self._recalled, version)
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"meta.json does not hold the assigned steps: {error}.") from None
        self._version = self._seen = version
        unsaved = unsaved_of(self._eval_model.model)
        self._servers.load_state(replica_state(self._eval_model), version=version, unsaved=unsaved)
        if self._chief is not None:
            self._chief.record.close()
            self._chief.start_again(self._scheduler, self._record())

    def _start_dispatcher(self) -> UpdateDispatcher:
        assert self._scheduler is not None
        registry = WorkerRegistry()
        record = self._record()
        numerics = self._eval_model.numerics
        chief = UpdateDispatcher(
            local=self._eval_model,
            scheduler=self._scheduler,
            servers=self._servers,
            registry=registry,
            record=record,
            mode=self._settings.mode,
            lanes=self._lanes,
            leaves_out=numerics.leaves_out,
            mixes=self._settings.replaces,
            timeout_s=self._settings.timeout_s,
        )
        if self._settings.mode == "async":
            chief.staleness.update(line.staleness for line in record.kept)
        self._listener.serve(registry.serve_connection)
        self._addresses.publish("chief", self._listener.address)
        registry.start_local_worker(self._work)
        return chief

    def _record(self) -> UpdateLog:
        """Return the record of updates, truncated at the version with which the training begins."""
        folder = self._request.folder
        return NoUpdateLog() if folder is None else UpdateLog(folder / FILE, self._version)

    def _work(self, channel: WorkChannel) -> None:
        """Run the chief's own worker, on a thread."""
        data = self._request.open_data(self._eval_model.device)
        servers = self._settings.servers(self._addresses, self._shares, "worker:chief")
        with closing(servers), closing(self._settings.replicas(self._computing)) as replicas:
            self._settings.worker(replicas, servers, data, self._request.training).run(channel)
