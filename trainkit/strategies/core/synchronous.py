"""Synchronous training: a loop over this rank's shards, one reduction, one update, the same on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn

from trainkit.cluster.host import keep_freed_memory, use_device
from trainkit.cluster.launch import LaunchEnvironment
from trainkit.errors import Problem
from trainkit.files import whole_numbers
from trainkit.numerics.batch import Ticket, shards_of_rank
from trainkit.numerics.generators import mix64, name_id
from trainkit.numerics.precision import Precision
from trainkit.numerics.randomness import BlockKeys, Drawing, Draws
from trainkit.objectives.base import Collective
from trainkit.strategies.base import (
    Batch,
    Executor,
    JsonMap,
    LeftOut,
    ModelMemory,
    Numerics,
    Phase,
    PlanContext,
    SetupRequest,
    StateDict,
    Status,
    StepContext,
    StepCounter,
    StepOutcome,
    Strategy,
    UpdateParams,
    choice_of,
)
from trainkit.strategies.collectives import RankGroup, broadcast_values
from trainkit.strategies.core.buffers import StepBuffers
from trainkit.strategies.core.graphs.shards import ShardGraphs
from trainkit.strategies.core.optimizer import NamedSteppers, OptimizerStepper
from trainkit.strategies.core.replica import (
    PlacedModel,
    Replica,
    ReplicaParts,
    drifted_parameter,
    make_master_params,
    replica_state,
    restore_replica,
    sharded_state,
)
from trainkit.strategies.core.step import MakeStep, ShardStep, apply_update, observer
from trainkit.strategies.reducers.vector import BackendReducer, DeterministicReducer, LocalReducer, Reducer
from trainkit.strategies.tensor_shards import ShardedState, gather_full
from trainkit.strategies.tensors.layouts import Placement, SingleDevicePlacement, make_dense

R = TypeVar("R", bound=Replica)


@dataclass(frozen=True, kw_only=True)
class _Part(Generic[R]):
    """The objects for computing a phase."""

    phase: Phase
    replica: R
    """The replica that computes and updates the parameters of the phase's optimizer."""
    stepper: NamedSteppers
    others: tuple[nn.Parameter, ...]
    """The trainable parameters of the model that belong to other phases."""
    contexts: tuple[StepContext, ...]
    """The contexts, one per pass of a step."""

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Compute no gradients of the other phases' parameters inside."""
        for param in self.others:
            param.requires_grad_(False)
        try:
            yield
        finally:
            for param in self.others:
                param.requires_grad_(True)


def _parts_of(whole: R, stepper: NamedSteppers, training: StepContext) -> list[_Part[R]]:
    """Return a part for each phase; without phases one, in which all optimizers step. Each has its own rate."""

    def at_own_rate(version: int) -> UpdateParams:
        return replace(training.rule(version), lr_factor=1.0)

    if not training.phases:
        context = replace(training, rule=at_own_rate)
        return [_Part(phase=Phase(name=""), replica=whole, stepper=stepper, others=(), contexts=(context,))]
    trained, parts = dict(whole.model.named_parameters()), []
    for phase in training.phases:
        phase_stepper, key = stepper.only(phase.name), name_id(phase.name)
        contexts = tuple(
            replace(training, phase=phase.name, draw_key=mix64(key ^ number), rule=at_own_rate)
            for number in range(phase.repeats)
        )
        others = tuple(trained[name] for name in whole.params if name not in phase_stepper.names)
        replica = whole.restricted(phase_stepper.names, phase_stepper)
        parts.append(_Part(phase=phase, replica=replica, stepper=phase_stepper, others=others, contexts=contexts))
    return parts


def set_rates(stepper: OptimizerStepper, step: int, rule: UpdateParams) -> UpdateParams:
    """Set the learning rates of a step whose optimizers have their own; return the rule of its one update."""
    if not isinstance(stepper, NamedSteppers):
        return rule
    stepper.begin_step(step)
    return replace(rule, lr_factor=1.0)


def _outcome(done: Sequence[tuple[str, StepOutcome]], *, has_phases: bool) -> StepOutcome:
    """Return the outcome of a step: the sums over its passes, and those of each phase."""
    (_, first), *_ = done
    norms = [outcome.grad_norm for _, outcome in done if outcome.grad_norm is not None]
    if len(norms) > 1:
        norms = [torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))]
    losses = [outcome.loss_sum for _, outcome in done if outcome.loss_sum is not None]
    phases: dict[str, tuple[Tensor | None, Tensor | float]] = {}
    terms: dict[str, Tensor] = {}
    for name, outcome in done:
        loss, weight = phases.get(name, (None, 0.0))
        total = outcome.loss_sum if loss is None else loss if outcome.loss_sum is None else loss + outcome.loss_sum
        phases[name] = total, weight + outcome.weight
        terms.update({name: terms[name] + term if name in terms else term for name, term in outcome.terms.items()})
    return replace(
        first,
        loss_sum=sum(losses[1:], losses[0]) if losses else None,
        weight=sum((outcome.weight for _, outcome in done[1:]), first.weight),
        grad_norm=norms[0] if norms else None,
        terms=terms,
        phases=phases if has_phases else {},
    )


MakeReducer = Callable[[Collective, Numerics], Reducer]
"""Function that makes the reducer of a step over the data ranks; collective."""

MoveModel = Callable[[nn.Module, Precision, Placement], PlacedModel]
"""Function that moves the tensors of a model to their devices and dtypes; collective."""


def backend_or_lanes(collective: Collective, numerics: Numerics) -> Reducer:
    """Return the reducer: lanes for a reproducible run, none for a single rank, else the backend's all-reduce."""
    if numerics.reproducible:
        return DeterministicReducer(lanes=numerics.lanes, rank=collective.rank, num_ranks=collective.num_ranks)
    return LocalReducer() if collective.num_ranks == 1 else BackendReducer()


def no_reducer(collective: Collective, numerics: Numerics) -> Reducer:  # noqa: ARG001
    """Return a reducer that sums nothing: gradients are summed elsewhere, or during backward."""
    return LocalReducer()


def synchronous_gradient_copies(numerics: Numerics, num_replicas: int) -> int:
    """Return the number of copies of all gradients that an exchange needs.

    One flat vector; with lanes, also the partial sums that wait for their sibling in the tree.
    """
    if not numerics.reproducible:
        return 0 if num_replicas == 1 else 1
    depth = numerics.lanes.bit_length()
    return depth if num_replicas == 1 else max(depth - num_replicas.bit_length() + 1, 1) + 3


class OneProcess(Strategy):
    """The common code of strategies of one process, with one replica unless they say otherwise."""

    called: ClassVar[str] = "it"
    """The strategy in a message."""

    def launch_problems(self, launch: LaunchEnvironment | None) -> list[Problem]:
        """Return the problem of processes that an external launcher started and that have no work."""
        if launch is None or launch.num_ranks == 1:
            return []
        rule = f"{launch.kind} started {launch.num_ranks} processes, and {self.called} has work for one. "
        rule += "Use strategy=multi_worker_mirrored."
        return [Problem(key="strategy", value=choice_of(type(self)), rule=rule)]

    def num_replicas(self, context: PlanContext) -> int:  # noqa: ARG002 - the same on any host
        """Return one."""
        return 1

    def estimate_memory(self, model: nn.Module, context: PlanContext) -> ModelMemory:
        """Return a whole replica, and the partial sums of a reproducible run."""
        return ModelMemory.whole(model, gradient_copies=synchronous_gradient_copies(context.numerics, 1))


def move_and_cast(model: nn.Module, precision: Precision, placement: Placement) -> PlacedModel:
    """Move a whole model to its devices, in its dtypes.

    Raises:
        ConfigError: a trainable parameter is an expanded tensor.
    """
    make_dense(model)
    initial = make_master_params(model, precision, placement)  # before rounding
    model = placement.move(precision.adapt(model))
    params = {name: param for name, param in model.named_parameters() if param.requires_grad}
    return PlacedModel(model=model, params=params, masters=initial or params)


def build_parts(
    request: SetupRequest,
    *,
    ranks: RankGroup | None = None,
    placement: Placement | None = None,
    make_reducer: MakeReducer = backend_or_lanes,
    move: MoveModel = move_and_cast,
) -> ReplicaParts:
    """Move a model to its devices and dtypes, and build its optimizer there; `ranks` have joined. Collective."""
    ranks = ranks or RankGroup()
    placement = placement or SingleDevicePlacement(device=torch.device(request.identity.task.device))
    use_device(placement.device)
    if placement.device.type == "cpu":
        keep_freed_memory()  # before the model is sharded, which makes an exception
    precision, numerics = request.precision, request.numerics
    for device in placement.devices:
        precision.apply_globally(device.type, reproducible=numerics.reproducible)
    drawing = Drawing.of(request.model)  # sharding changes the classes of modules
    placed = move(request.model, precision, placement)
    masters = placed.masters
    reducer = make_reducer(ranks.data_ranks, numerics)
    return ReplicaParts(
        placed=placed,
        device=placement.device,
        device_types=tuple(sorted({device.type for device in placement.devices})),
        placement=placement,
        data_ranks=ranks.data_ranks,
        all_ranks=ranks.all_ranks,
        precision=precision,
        stepper=make_stepper(request, masters),
        buffers=StepBuffers(placed.model, precision.master_dtype),
        keys=BlockKeys(placed.model, seed=numerics.seed, devices=placement.devices, drawing=drawing),
        reducer=reducer,
        another_reducer=partial(make_reducer, ranks.data_ranks, numerics),
        numerics=numerics,
        draws=drawing.at_most(request.training.objective) is not Draws.nothing,
        on_phase=request.on_phase,
    )


def make_stepper(request: SetupRequest, masters: Mapping[str, nn.Parameter]) -> OptimizerStepper:
    """Build the optimizer, or the several ones, over the parameters of a replica."""
    if request.optimizers:
        return NamedSteppers.of(request.optimizers, masters)
    return OptimizerStepper(request.make_optimizer(masters), list(masters.values()))


def broadcast_initial(replica: Replica) -> None:
    """Broadcast rank 0's parameters and all buffers: a model may draw numbers that no seed controls. Collective."""
    if replica.num_ranks > 1 or replica.parts_made_of.is_grouped:
        model = replica.model
        tensors = [*model.state_dict(keep_vars=True).values(), *model.buffers(), *replica.masters.values()]
        for tensor in {id(tensor): tensor for tensor in tensors}.values():
            if isinstance(tensor, Tensor):  # not what `get_extra_state` of a module returns
                broadcast_values(tensor)


class SynchronousExecutor(Executor, Generic[R]):
    """A rank that computes its shards of a step, and then makes the same update as every other rank.

    Args:
        ranks: the ranks, which have joined; None: this one alone.
        make_step: makes a try at a step.
        graphs: the graphs of a step; None: steps are eager.
        notes: lines for the summary about choices.
    """

    def __init__(
        self,
        replica: R,
        training: StepContext,
        *,
        ranks: RankGroup | None = None,
        make_step: MakeStep[R] = ShardStep,
        graphs: ShardGraphs | None = None,
        notes: tuple[str, ...] = (),
    ) -> None:
        self._replica, self._training, self._make_step, self._graphs = replica, training, make_step, graphs
        self._notes = notes
        self._ranks = ranks or RankGroup()
        self._computed: tuple[ShardStep, Sequence[Tensor | None]]
        stepper = replica.stepper
        self._parts = _parts_of(replica, stepper, training) if isinstance(stepper, NamedSteppers) else []
        self._done: tuple[int, list[tuple[str, StepOutcome]]] = -1, []
        """Step, and the outcomes of its passes that have ended: after an overflow, only a pass is repeated."""

    @property
    def local(self) -> R:
        """The replica."""
        return self._replica

    def assign(self, step: int) -> tuple[int, ...]:
        """Return shards by arithmetic on (rank, step)."""
        shards, ranks = self._training.plan.num_shards(step), self._replica.data_ranks
        return shards_of_rank(shards, rank=ranks.rank, num_ranks=ranks.num_ranks, lanes=self._replica.lanes)

    def tickets(self, position: StepCounter, until: int | None = None) -> Iterator[Ticket]:  # noqa: ARG002 - the loop ends
        """Yield the ticket of the position's step; the same ticket again until the position advances."""
        while True:
            step = position.step
            yield Ticket(step, self.assign(step))

    def step(self, ticket: Ticket, batches: Sequence[Batch]) -> StepOutcome:
        """Run forward and backward over this rank's shards, one reduction, one update.

        Each pass of a phase is like a whole step, with the same batch.
        """
        if not self._parts:
            work = self._make_step(self._replica, ticket, batches, self._training)
            return self._update(work, work.run())
        step, whole = ticket.step, self._replica
        if self._done[0] != step:
            self._done = step, []
        done = self._done[1]
        passes = [(part, context) for part in self._parts for context in part.contexts[: part.phase.num_passes(step)]]
        for part, context in passes[len(done) :]:
            part.replica.set_loss_scale(whole.loss_scale)
            part.stepper.begin_step(step)
            with part.alone():
                work = self._make_step(part.replica, ticket, batches, context)
                sums = work.run()
            outcome = self._update(work, sums, context)
            whole.set_loss_scale(part.replica.loss_scale)
            if outcome.status is Status.retry:
                return outcome
            done.append((part.phase.name, outcome))
            if outcome.status is Status.skipped:
                part.replica.buffers.recover()
                break
        self._done = -1, []
        whole.end_update(step)
        return outcome if outcome.status is Status.skipped else _outcome(done, has_phases=bool(self._training.phases))

    def _update(
        self, work: ShardStep, sums: Sequence[Tensor | None], training: StepContext | None = None
    ) -> StepOutcome:
        """Update the parameters by the sums of a step, or of a pass in its own context."""
        replica, training, step = work.replica, training or self._training, work.ticket.step
        replica.on_phase("update", step)
        self._replica.begin_update(step)
        status, norm = apply_update(
            replica,
            sums,
            work.divisor,
            training.rule(step),
            loss_sum=work.loss_sum,
            observe=observer(replica, training, step),
        )
        if not self._parts:
            replica.end_update(step)
        left_out = (LeftOut.whole(training.plan, step),) if status is Status.skipped else ()
        return StepOutcome(step, status, work.loss_sum, work.weight, norm, left_out, terms=work.terms)

    def expect_unchanged(self) -> None:
        """Run the next step of compiled graphs without guards: since the last one, only code of the trainer has run."""
        if self._graphs is not None:
            self._graphs.expect_unchanged()

    def forward_backward(self, ticket: Ticket, batches: Sequence[Batch]) -> tuple[Tensor | None, Tensor | float]:
        """Compute the gradients of a step, which `update` then uses; collective."""
        work = self._make_step(self._replica, ticket, batches, self._training)
        self._computed = work, work.run()
        return work.loss_sum, work.weight

    def gradients(self) -> Mapping[str, Tensor]:
        """Return the mean gradients that `forward_backward` computed, by canonical name: copies, and only shards if
        parameters are sharded.
        """
        work, sums = self._computed
        replica, divisor = self._replica, work.divisor
        factor: Tensor | float = 1.0 / replica.loss_scale.scale
        if divisor.counted and (counted := sums[-1]) is not None:
            factor = divisor.factor(counted) * factor
        devices = {grad.device for grad in sums if grad is not None}
        factors = {device: factor.to(device) if isinstance(factor, Tensor) else factor for device in devices}
        named = zip(replica.params, sums, strict=False)
        return {name: grad * factors[grad.device] for name, grad in named if grad is not None}

    def update(self) -> StepOutcome:
        """Update the parameters with the gradients of `forward_backward`; collective."""
        return self._update(*self._computed)

    def tune(self) -> tuple[str, ...]:
        """Return the notes."""
        return self._notes

    def state_dict_extra(self) -> JsonMap:
        """Return the steps of a compression with state (PowerSGD, which takes no phases)."""
        compressor = self._replica.reducer.compressor
        return {} if compressor is None else {"compressed_steps": compressor.steps}

    def load_state_extra(self, extra: JsonMap) -> None:
        """Restore the steps of PowerSGD, whose error feedback begins at zero.

        Raises:
            ValueError: the state holds no whole number of them.
        """
        if (compressor := self._replica.reducer.compressor) is not None:
            compressor.set_steps(*whole_numbers([extra.get("compressed_steps", 0)]))

    def state_dict(self) -> StateDict:
        """Return parameters in the masters' dtype, buffers, optimizer slots; the same on every rank. Collective if
        ranks hold parts, which are gathered.
        """
        replica = self._replica
        return gather_full(self.sharded_state_dict(), replica.all_ranks) if replica.cuts else replica_state(replica)

    def sharded_state_dict(self) -> ShardedState:
        """Return the shards of this rank; of a whole replica, all on rank 0."""
        return sharded_state(self._replica) if self._replica.cuts else super().sharded_state_dict()

    def load_state_dict(self, state: StateDict) -> None:
        """Restore the tensors of a checkpoint of any strategy, by name."""
        restore_replica(self._replica, state)

    def recover(self, step: int) -> bool:
        """Restore the buffers of an interrupted step, if no update has begun, no other rank has parts, and the exchange
        leaves no state behind (PowerSGD's error feedback).
        """
        compressor = self._replica.reducer.compressor
        if self._replica.cuts or (compressor is not None and compressor.has_state) or not self._replica.recover(step):
            return False
        for part in self._parts:
            part.replica.buffers.recover()
        return True

    def swap_averages(self) -> bool:
        """Exchange parameters and their averages."""
        return self._replica.swap_averages()

    def check_replicas(self) -> str | None:
        """Return the first parameter whose bits are not the same on all ranks that hold it; collective."""
        return drifted_parameter(self._replica)

    def close(self, *, failed: bool = False) -> None:
        """Close the reducers, then leave the process group."""
        for part in self._parts:
            part.replica.reducer.close()
        self._replica.reducer.close()
        self._ranks.close(failed=failed)
