"""The synchronous base: a loop over this rank's shards, one reduction, one update, the same on every rank."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.cluster.identity import Identity
from trainkit.numerics.batch import BatchPlan, Ticket, shards_of_rank
from trainkit.numerics.drawing import Drawing
from trainkit.numerics.precision import Precision
from trainkit.numerics.randomness import BlockKeys
from trainkit.objectives.base import Collective
from trainkit.strategies.base import LeftOut, Numerics, Placed, Status, StepContext, StepCounter, StepOutcome, Strategy
from trainkit.strategies.core.buffers import StepBuffers
from trainkit.strategies.core.optimizer import OptimizerStepper
from trainkit.strategies.core.placement import Placement, SingleDevicePlacement
from trainkit.strategies.core.replica import PlacedModel, Replica, make_master_params, replica_state, restore_replica
from trainkit.strategies.core.step import ShardStep
from trainkit.strategies.core.update import apply_update
from trainkit.strategies.reducers import Reducer
from trainkit.strategies.tensors.layouts import make_dense

__all__ = ["Synchronous"]


class Synchronous(Strategy):
    """Every rank computes its shards of a step, then all make the same update.

    A subclass says which processes there are (`tasks`), how they meet (`connect`), and what adds up their partial
    sums (`make_reducer`).
    """

    @abstractmethod
    def connect(self, identity: Identity) -> Collective:
        """Meet the other ranks; collective."""

    @abstractmethod
    def make_reducer(self, collective: Collective, numerics: Numerics) -> Reducer:
        """What adds up the partial sums of a step."""

    def gradient_copies(self, numerics: Numerics, num_replicas: int) -> int:
        """A flat vector for the exchange; with lanes, the partial sums that wait for their neighbour in the tree."""
        if not numerics.reproducible:
            return 0 if num_replicas == 1 else 1
        depth = numerics.lanes.bit_length()
        return depth if num_replicas == 1 else max(depth - num_replicas.bit_length() + 1, 1) + 3

    def place(
        self,
        model: nn.Module,
        *,
        identity: Identity,
        precision: Precision,
        numerics: Numerics,
        make_optimizer: Callable[[Mapping[str, nn.Parameter]], torch.optim.Optimizer],
    ) -> Replica:
        """Move the model to this rank's devices and precision, and build its optimizer there."""
        collective = self.connect(identity)
        spread = self.spread(model, identity, precision)
        for device in spread.devices:
            precision.apply_globally(device.type)
        drawing = Drawing.of(model)  # sharding changes the classes of modules
        held = self.hold(model, precision, spread)
        masters = held.masters
        reducer = self.make_reducer(collective, numerics)
        replica = self.make_replica(
            held,
            device=spread.device,
            device_types=tuple(sorted({device.type for device in spread.devices})),
            data_ranks=collective,
            all_ranks=self.everyone(identity, collective),
            loss_scale=precision.loss_scale(),
            precision=precision,
            lanes=reducer.lanes,
            stepper=OptimizerStepper(make_optimizer(masters), list(masters.values())),
            buffers=StepBuffers(held.model, precision.master_dtype),
            keys=BlockKeys(held.model, seed=numerics.seed, devices=spread.devices, drawing=drawing),
            reducer=reducer,
            numerics=numerics,
        )
        self.align(replica)
        return replica

    def hold(self, model: nn.Module, precision: Precision, spread: Placement) -> PlacedModel:
        """Put the tensors of a model where they belong, in the numbers they are held in; collective.

        Raises:
            ConfigError: a trainable parameter is an expanded tensor.
        """
        make_dense(model)
        initial = make_master_params(model, precision, spread)  # before rounding
        model = spread.move(precision.adapt(model))
        params = {name: param for name, param in model.named_parameters() if param.requires_grad}
        return PlacedModel(model=model, params=params, masters=initial or params)

    def make_replica(self, held: PlacedModel, **rest: Any) -> Replica:
        """What a step works on; a strategy that keeps more than others do makes one of its own."""
        return Replica(model=held.model, params=held.params, masters=held.masters, **rest)

    def everyone(self, identity: Identity, collective: Collective) -> Collective:  # noqa: ARG002
        """All processes of the run, where those are more than the data ranks."""
        return collective

    def spread(self, model: nn.Module, identity: Identity, precision: Precision) -> Placement:  # noqa: ARG002
        """Where the tensors of the model go: all to this rank's device, where a subclass does not say otherwise."""
        return SingleDevicePlacement(device=torch.device(identity.task.device))

    def align(self, replica: Replica) -> None:
        """Make every replica begin alike; collective."""

    def assign(self, plan: BatchPlan, step: int, placed: Placed) -> tuple[int, ...]:
        """Arithmetic on (rank, step)."""
        shards = plan.num_shards(step)
        return shards_of_rank(shards, rank=placed.rank, num_ranks=placed.num_ranks, lanes=placed.lanes)

    def tickets(
        self,
        plan: BatchPlan,
        position: StepCounter,
        placed: Any,
        until: int | None = None,  # noqa: ARG002 - the loop ends there
    ) -> Iterator[Ticket]:
        """The ticket of the position's step: the next one once it has moved, the same one while it has not."""
        while True:
            step = position.step
            yield Ticket(step, self.assign(plan, step, placed))

    def step(self, placed: Replica, ticket: Ticket, batches: Sequence[Any], training: StepContext) -> StepOutcome:
        """Forward and backward over this rank's shards, one reduction, one update."""
        work = self.work(placed, ticket, batches, training)
        sums = work.run()
        if placed.on_phase is not None:
            placed.on_phase("update", ticket.step)
        placed.begin_update(ticket.step)
        status, norm = apply_update(placed, sums, work.divisor, training.rule(ticket.step), loss_sum=work.loss_sum)
        placed.end_update(ticket.step)
        left_out = (LeftOut.whole(training.plan, ticket.step),) if status is Status.skipped else ()
        return StepOutcome(ticket.step, status, work.loss_sum, work.weight, norm, left_out)

    def work(self, placed: Replica, ticket: Ticket, batches: Sequence[Any], training: StepContext) -> ShardStep:
        """What computes a ticket."""
        return ShardStep(placed, ticket, batches, training)

    def state(self, placed: Replica) -> dict[str, Tensor]:
        """Parameters in the masters' dtype, buffers, optimizer slots; the same on every rank."""
        return replica_state(placed)

    def recover(self, placed: Any, step: int) -> bool:
        """Put the buffers of an interrupted step back, where every rank has a whole copy and no update has begun."""
        return not self.holds_pieces and isinstance(placed, Replica) and placed.recover(step)

    def load_state(self, placed: Replica, tensors: Mapping[str, Tensor]) -> None:
        """Take over the tensors of a checkpoint of any strategy, by name."""
        restore_replica(placed, tensors)

    def leave(self, placed: Replica) -> None:  # noqa: ARG002 - strategies with a group have one to end
        """Nothing to end."""
        return
