"""Central storage: the variables on one device, copies that compute on several devices of one process.

Updates follow a step of all threads; or, asynchronously, they are applied as they arrive.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from functools import partial
from threading import Lock
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor, nn

from trainkit.adapters.average import SLOTS, count_update, detach
from trainkit.cluster.tasks import Task
from trainkit.data.reading.collate import to_device
from trainkit.errors import Problem
from trainkit.fields import maths, placement
from trainkit.files import whole_numbers
from trainkit.numerics.batch import Ticket
from trainkit.strategies.base import (
    Batch,
    Executor,
    Facts,
    JsonMap,
    LeftOut,
    LoopCall,
    ModelMemory,
    PlanContext,
    SetupRequest,
    StateDict,
    Status,
    StepContext,
    StepCounter,
    StepOutcome,
    ignore_phase,
)
from trainkit.strategies.core.copies import ComputingCopies, CopiesStep, ThreadWork, computing_copy
from trainkit.strategies.core.optimizer import OptimizerStepper
from trainkit.strategies.core.refusals import async_problems, phase_problems
from trainkit.strategies.core.replica import Replica, replica_state, restore_replica
from trainkit.strategies.core.step import apply_update
from trainkit.strategies.core.synchronous import OneProcess, SynchronousExecutor, build_parts, make_stepper, set_rates
from trainkit.strategies.groups.process_group import device_list_problems, device_problems, parse_device
from trainkit.strategies.model_transforms.compiling import uncompiled
from trainkit.strategies.updates.scheduler import AsyncScheduler, PendingUpdate, WorkItem, settled

_CPU_THREADS = 2
"""Default number of copies on a host without GPUs: as many as mirrored has."""


@dataclass(frozen=True, kw_only=True)
class CentralStorage(OneProcess):
    """Keep parameters and optimizer in one place, and compute on several devices, in one process.

    One thread per compute device works on a copy of the model. In `sync` the copies are refreshed after every update,
    the gradients of all shards are summed where the variables are, and make one update: the training of one device. In
    `async` a thread computes whole steps from the current variables, and each gradient is applied when it arrives, by
    the optimizer of that thread: a different training, which depends on the speed of the threads. GPUs hold no
    optimizer state.

    Example:
        >>> strategy = CentralStorage(compute_devices=("/gpu:0", "/gpu:1"))
        >>> strategy.num_replicas(PlanContext(num_gpus=2)), strategy.tasks(PlanContext(num_gpus=2))[0].device
        (2, 'cpu')

    Source: tf.distribute.experimental.CentralStorageStrategy; in-graph replication, Abadi et al. 2016,
    arXiv:1605.08695, section 4.4.
    """

    called: ClassVar[str] = "central storage"
    facts: ClassVar[Facts] = Facts(compiles="model", several_optimizers=True)

    parameter_device: Annotated[int | str, placement] = "auto"
    """Device of the parameters and the optimizer; `auto`: the CPU, or the only compute device."""
    compute_devices: Annotated[tuple[int | str, ...] | None, placement] = None
    """Devices with one thread each, `[0,1]`; null: all GPUs, else two on the CPU. `cpu` may be named several times."""
    mode: Annotated[Literal["sync", "async"], maths(neutral="sync")] = "sync"
    """`sync`: one update of all gradients of a step; `async`: one update per gradient, when it arrives."""

    def validate(self, context: PlanContext) -> list[Problem]:
        """Return problems: devices that do not exist or are repeated, and processes that have no work."""
        if problems := self.launch_problems(context.launch):
            return problems
        key, names = "strategy.compute_devices", self.compute_devices
        problems = device_list_problems(key, names, context.num_gpus, because="A GPU computes one copy.")
        if self.parameter_device != "auto":
            problems += device_problems("strategy.parameter_device", self.parameter_device, context.num_gpus)
        problems += phase_problems(context)
        if self.mode == "async":
            problems += async_problems(context)
        if not problems and context.numerics.reproducible and self.num_replicas(context) > context.numerics.lanes:
            rule = f"more devices than numerics.lanes={context.numerics.lanes}. Use at most that many, or more lanes."
            problems.append(Problem(key=key, value=self.num_replicas(context), rule=rule))
        return problems

    def facts_in(self, context: PlanContext) -> Facts:
        """Return whether threads update as gradients arrive; a step of its own loop ends with `step()` alone."""
        if self.mode == "sync":
            rule = "its threads compute and update as one. Use step(), or strategy=mirrored."
            return replace(super().facts_in(context), withheld_calls={LoopCall.apart: rule})
        rule = "strategy.mode=async has no step that ends before the next one. Use mode=sync."
        return replace(
            super().facts_in(context),
            changes_maths=len(self._copy_devices(context.num_gpus)) > 1,
            is_asynchronous=True,
            withheld_calls={LoopCall.session: rule},
        )

    def num_replicas(self, context: PlanContext) -> int:
        """Return the number of compute devices, which share a step; 1 in `async`, where each computes whole steps."""
        return 1 if self.mode == "async" else len(self._copy_devices(context.num_gpus))

    def notes(self, model: nn.Module, context: PlanContext) -> tuple[str, ...]:  # noqa: ARG002 - the same of any
        """Return a note if asynchronous updates train differently."""
        if not self.facts_in(context).changes_maths:
            return ()
        count = len(self._copy_devices(context.num_gpus))
        line = f"central_storage: {count} threads apply gradients as they arrive"
        return (f"{line}: a different training from that of one device, and another every time.",)

    def num_slots(self, num_gpus: int) -> int:
        """Return the number of devices, or of CPU cores, that have their own thread."""
        return max(1, len(self._copy_devices(num_gpus)))

    def tasks(self, context: PlanContext) -> tuple[Task, ...]:
        """Return one task, on the parameter device; it computes on the devices of the copies."""
        computing = tuple(dict.fromkeys(self._copy_devices(context.num_gpus)))
        return (Task(role="worker", index=0, rank=0, device=self._home(context.num_gpus), computes_on=computing),)

    def estimate_memory(self, model: nn.Module, context: PlanContext) -> ModelMemory:
        """Return a whole replica, the gradients of the other copies and their sum."""
        lanes, count = context.numerics.lanes, self.num_replicas(context)
        copies = 0 if count == 1 else count
        if self.mode == "async":  # copies of parameters, too
            copies = 2 * len(self._copy_devices(context.num_gpus))
        elif context.numerics.reproducible:  # those of each lane and of the tree
            copies = lanes + lanes.bit_length()
        return ModelMemory.whole(model, gradient_copies=copies)

    def setup(self, request: SetupRequest) -> CentralExecutor | AsyncCentralExecutor:
        """Put the variables on the parameter device, and a copy on each compute device."""
        variables = Replica(build_parts(request))
        devices = [torch.device(name) for name in self._copy_devices(torch.cuda.device_count())]
        for device in devices:
            request.precision.apply_globally(device.type, reproducible=request.numerics.reproducible)
        is_async = self.mode == "async"
        phases = [ignore_phase if is_async or index else request.on_phase for index in range(len(devices))]
        copies = [
            computing_copy(variables, device, shares=not is_async, on_phase=on_phase)
            for device, on_phase in zip(devices, phases, strict=True)
        ]
        computing = ComputingCopies(variables, copies)
        if not is_async:
            return CentralExecutor(computing, request.training)
        uncompiled(variables.model)  # which is evaluated while the copies compute
        masters = variables.masters
        steppers = [make_stepper(request, masters) for _ in devices]
        for optimizer in [optimizer for stepper in steppers[1:] for optimizer in stepper.optimizers]:
            detach(optimizer)
        return AsyncCentralExecutor(computing, request.training, steppers)

    def _copy_devices(self, num_gpus: int) -> list[str]:
        """Return the devices of the model copies."""
        if self.compute_devices is None:
            return [f"cuda:{index}" for index in range(num_gpus)] or ["cpu"] * _CPU_THREADS
        return [parse_device(name) or "cpu" for name in self.compute_devices]

    def _home(self, num_gpus: int) -> str:
        """Return the parameter device."""
        if self.parameter_device != "auto":
            return parse_device(self.parameter_device) or "cpu"
        computing = self._copy_devices(num_gpus)
        return computing[0] if len(computing) == 1 else "cpu"


class CentralExecutor(SynchronousExecutor[Replica]):
    """The variables in one place, and the copies that compute with them."""

    def __init__(self, copies: ComputingCopies, training: StepContext) -> None:
        super().__init__(copies.source, training, make_step=partial(CopiesStep, copies=copies))
        self._copies = copies

    @property
    def local(self) -> Replica:
        """The first copy, which is evaluated."""
        return self._copies.copies[0]

    def step(self, ticket: Ticket, batches: Sequence[Batch]) -> StepOutcome:
        """Run forward and backward on all threads, and update the variables once."""
        self._copies.set_loss_scale(self.local.loss_scale)
        outcome = super().step(ticket, batches)
        self.local.set_loss_scale(self._replica.loss_scale)
        self._copies.refresh()
        return outcome

    def load_state_dict(self, state: StateDict) -> None:
        """Restore the tensors of a checkpoint of any strategy, and copy them to the copies."""
        super().load_state_dict(state)
        self._copies.refresh(frozen=True)

    def swap_averages(self) -> bool:
        """Exchange the variables and their averages."""
        has_averages = super().swap_averages()
        self._copies.refresh()
        return has_averages

    def close(self, *, failed: bool = False) -> None:
        """End the threads."""
        super().close(failed=failed)
        self._copies.close()


class AsyncCentralExecutor(Executor):
    """The variables and the copies, each of which computes whole steps and has its own optimizer over the variables."""

    def __init__(self, copies: ComputingCopies, training: StepContext, steppers: Sequence[OptimizerStepper]) -> None:
        self._copies, self._variables, self._training = copies, copies.source, training
        self._steppers = list(steppers)
        self._scheduler = AsyncScheduler(plan=training.plan)
        for index in range(len(steppers)):
            self._scheduler.join(str(index))
        self._chosen: WorkItem | None = None
        """The work of the ticket that was yielded last."""
        self._running: dict[Future[tuple[ThreadWork, int]], WorkItem] = {}
        """Steps in progress, in the order of assignment."""
        self._recalled: JsonMap = {}
        self._lock = Lock()
        """Held while all variables are read or written, and while they are exchanged for their averages."""
        self._shows_averages = False

    @property
    def local(self) -> Replica:
        """The variables, which are evaluated."""
        return self._variables

    def assign(self, step: int) -> tuple[int, ...]:
        """Return all shards: a thread computes a whole step."""
        return tuple(range(self._training.plan.num_shards(step)))

    def tickets(self, position: StepCounter, until: int | None = None) -> Iterator[Ticket]:
        """Yield whole steps, first the unfinished ones of an earlier start; empty tickets wait for the rest."""
        self._scheduler.recall(self._recalled, position.step, until)
        while True:
            idle = self._idle
            self._chosen = self._scheduler.next(idle[0]) if idle else None
            yield Ticket(position.step, ()) if self._chosen is None else self._chosen.ticket

    def step(self, ticket: Ticket, batches: Sequence[Batch]) -> StepOutcome:
        """Assign a step to an idle copy; if none is left, apply the first gradient that arrives.

        Args:
            ticket: a whole step; an empty one only waits.
            batches: one per shard, on the variables' device.

        Returns:
            The applied update, as the step of its version; or the outcome of a step in progress.
        """
        if self._chosen is not None:
            self._send(self._chosen, batches)
            if self._idle:
                return StepOutcome(ticket.step, Status.handed_out, None, 0.0)
        self._variables.on_phase("reduce", ticket.step)  # the time in which the copies compute
        done, _ = wait(self._running, return_when=FIRST_COMPLETED)
        first = next(future for future in self._running if future in done)
        item = self._running.pop(first)
        work, read = first.result()
        self._scheduler.report(item.number, item.worker, read)
        update = self._scheduler.next_ready_update()
        assert update is not None, "each gradient makes an update"
        return self._apply(update, work)

    @property
    def _idle(self) -> list[str]:
        busy = {item.worker for item in self._running.values()}
        return [worker for worker in map(str, range(len(self._steppers))) if worker not in busy]

    def _send(self, item: WorkItem, batches: Sequence[Batch]) -> None:
        copies, index = self._copies, int(item.worker)
        copy = copies.copies[index]
        copy.set_loss_scale(self._variables.loss_scale)
        work = ThreadWork(copy, item.ticket, [to_device(batch, copy.device) for batch in batches], self._training)
        copies.agree(work)
        compiles = copies.may_compile([(index, work.batches)])
        if compiles:
            wait(self._running)
        future = copies.submit(self._compute_step, work)
        self._running[future] = item
        if compiles:
            wait([future])

    def _compute_step(self, work: ThreadWork) -> tuple[ThreadWork, int]:
        """Read the current variables and compute a whole step with them, on a thread; return their version, too."""
        with self._lock:
            self._copies.refresh(work.replica)
            version = self._scheduler.version
        work.compute(self._variables.device)
        return work, version

    def _apply(self, update: PendingUpdate, work: ThreadWork) -> StepOutcome:
        """Update the variables by the optimizer of the copy that computed; the first one keeps the averages of all."""
        (item,), variables = update.items, self._variables
        ((_, sums),) = work.lane_sums
        variables.on_phase("update", item.ticket.step)
        with self._lock:
            variables.use_stepper(self._steppers[int(item.worker)])
            variables.set_sparse(work.replica.sparse)
            variables.buffers.begin_step()
            rule = set_rates(variables.stepper, update.version, self._training.rule(update.version))
            current, used = variables.loss_scale, work.replica.loss_scale.scale
            variables.set_loss_scale(replace(variables.precision.loss_scale(), scale=used))
            status, norm = apply_update(variables, sums, work.divisor, rule, loss_sum=work.loss_sum)
            leaves_out = variables.numerics.leaves_out
            status, scale = settled(current, used, status, leaves_out=leaves_out)
            if status is Status.applied and item.worker != "0":
                pairs = zip(variables.masters.values(), sums, strict=False)
                count_update(self._steppers[0].optimizers, [param for param, grad in pairs if grad is not None])
            if status is Status.retry:
                self._scheduler.requeue_after_overflow(update)
            else:
                self._scheduler.merged(update)
        variables.set_loss_scale(scale)
        variables.step_metrics["staleness"] = float(update.staleness)
        weight = work.weight.to(variables.device) if isinstance(work.weight, Tensor) else work.weight
        assert work.loss_sum is not None
        losses = work.loss_sum.to(variables.device)
        left_out = (LeftOut(update.version, update.tickets),) if status is Status.skipped else ()
        terms = {name: term.to(variables.device) for name, term in work.terms.items()}
        return StepOutcome(update.version, status, losses, weight, norm, left_out, update.tickets, terms)

    def state_dict(self) -> StateDict:
        """Return the variables and the first copy's optimizer state; that of other copies in slots `NAME@COPY`."""
        variables = self._variables
        variables.use_stepper(self._steppers[0])
        state = replica_state(variables)
        for index, stepper in enumerate(self._steppers[1:], start=1):
            for key, tensor in stepper.state(variables.masters).items():
                kind, slot, name = key.split("/", 2)
                state[f"{kind}/{slot}@{index}/{name}"] = tensor
        return state

    def load_state_dict(self, state: StateDict) -> None:
        """Restore a state of `state_dict`, or of another strategy, whose optimizer state every copy then uses."""
        variables = self._variables
        variables.use_stepper(self._steppers[0])
        restore_replica(variables, state)
        keys = [key for key in state if key.startswith("optimizer/") and key.split("/")[1] not in SLOTS]
        for index, stepper in enumerate(self._steppers[1:], start=1):
            slots = {key.replace(f"@{index}/", "/", 1): state[key] for key in state if f"@{index}/" in key}
            stepper.restore(variables.masters, slots or {key: state[key].clone() for key in keys if "@" not in key})
        self._copies.refresh(frozen=True)

    def swap_averages(self) -> bool:
        """Exchange the variables and their averages; until the second call, no copy reads the variables."""
        if not self._shows_averages:
            self._lock.acquire()
        try:
            self._variables.use_stepper(self._steppers[0])
            has_averages = self._variables.swap_averages()
            self._shows_averages = has_averages and not self._shows_averages
        finally:
            if not self._shows_averages:
                self._lock.release()
        return has_averages

    def close(self, *, failed: bool = False) -> None:  # noqa: ARG002 - there is no other rank
        """End the threads."""
        if self._shows_averages:
            self._lock.release()
        self._copies.close()

    def state_dict_extra(self) -> JsonMap:
        """Return the steps that are assigned and not applied."""
        return self._scheduler.remember()

    def load_state_extra(self, extra: JsonMap) -> None:
        """Assign these steps again, before any other."""
        self._recalled = {"handed_out": whole_numbers(extra.get("handed_out", []))}
