"""Local SGD: replicas step independently and average periodically, which changes the maths and saves communication."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, ClassVar, Final

import torch
from torch import nn

from trainkit.config.values import MOST_PROCESSES
from trainkit.errors import Problem
from trainkit.fields import at_least, at_most, maths
from trainkit.numerics.batch import BatchPlan
from trainkit.strategies.base import (
    Batch,
    Facts,
    LeftOut,
    LoopCall,
    PlanContext,
    SetupRequest,
    StateDict,
    Status,
    StepContext,
    StepOutcome,
    Strategy,
    Ticket,
)
from trainkit.strategies.collectives import LocalCollective, RankGroup, all_gather_object
from trainkit.strategies.core.replica import Replica
from trainkit.strategies.core.replica_check import drifted_parameter
from trainkit.strategies.core.step import ShardStep, cloned_batch
from trainkit.strategies.core.synchronous import SynchronousExecutor, broadcast_initial, build_parts
from trainkit.strategies.core.update import apply_update
from trainkit.strategies.groups.process_group import ProcessGroupOptions
from trainkit.strategies.local_sgd.averaging import AveragingWindow, OuterOptimizer
from trainkit.strategies.memory import ModelMemory
from trainkit.strategies.reducers import LocalReducer
from trainkit.strategies.traffic import (
    StepCut,
    Transfer,
    all_reduce,
    exchanged_elements,
    precision_of,
    ranks_a_host,
    ranks_of,
)
from trainkit.strategies.traffic.reductions import Vector, reduction
from trainkit.strategies.traffic.tables import gathered_rows, lookups_of, weights_of

_AVERAGE_ALONE: Final = OuterOptimizer()
"""The average without an outer optimizer."""


@dataclass(frozen=True, kw_only=True)
class _OwnPart(BatchPlan):
    """The plan of an independent step of a replica: its own shards are the batch."""

    shards: tuple[int, ...]

    def batch_size(self, step: int) -> int:
        return sum(self.shard_size(step, shard) for shard in self.shards)

    def num_shards(self, step: int) -> int:  # noqa: ARG002 - a part belongs to one step
        return len(self.shards)


@dataclass(frozen=True, kw_only=True)
class LocalSgd(ProcessGroupOptions, Strategy):
    """Replicas that step independently and average every few steps, which is a different training from that of one
    device.

    In a step every replica updates its own copy by its own shards. After every `average_every` steps parameters and
    optimizer state become their mean, weighted by targets. With `outer.lr` an outer optimizer steps by the change of
    the mean (DiLoCo); with `local_after` the first steps are those of mirrored (post-local SGD). With `average_every=1`
    and SGD, unclipped, it equals the training of one device up to rounding.

    Example:
        >>> [LocalSgd(average_every=4, local_after=10).next_sync_step(step) for step in (3, 10, 11, 14, 15)]
        [3, 10, 14, 14, 18]

    Source: Stich 2018, arXiv:1805.09767; Lin et al. 2018, arXiv:1808.07217; Douillard et al. 2023, arXiv:2311.08105.
    """

    changes_maths: ClassVar[bool] = True
    facts: ClassVar[Facts] = Facts(
        compiles="model",
        runs_hooks=True,
        withheld_calls={
            LoopCall.apart: "its replicas step independently between two averages. Use step(), or strategy=mirrored."
        },
    )

    replicas: Annotated[int, maths, at_least(1), at_most(MOST_PROCESSES)] = 2
    """Number of processes; it changes the result."""
    average_every: Annotated[int, maths, at_least(1)] = 8
    """Steps between two averages."""
    local_after: Annotated[int, maths, at_least(0)] = 0
    """Steps at the beginning in which gradients are summed over all replicas, as in mirrored."""
    outer: Annotated[OuterOptimizer, maths] = _AVERAGE_ALONE
    """The outer optimizer, which steps after an average."""

    def validate(self, context: PlanContext) -> list[Problem]:
        """Return problems of every process group, and settings that differing replicas do not support."""
        problems = super().validate(context)
        if context.numerics.reproducible:
            rule = "local_sgd depends on the number of replicas. Use strategy=mirrored, or false."
            problems.append(Problem(key="numerics.reproducible", value=True, rule=rule))
        if context.average is not None:
            rule = "averages weights that every rank has after a step, and those of local_sgd differ. Use none."
            problems.append(Problem(key="average", rule=rule))
        if context.numerics.on_nonfinite == "rollback":
            rule = "needs replicas that decide together, and those of local_sgd step independently. Use skip or stop."
            problems.append(Problem(key="numerics.on_nonfinite", value="rollback", rule=rule))
        if self.outer.lr is None and self.outer != _AVERAGE_ALONE:
            rule = "has no effect without strategy.outer.lr: the average itself becomes the parameters."
            key, value = ("momentum", self.outer.momentum) if self.outer.nesterov else ("nesterov", False)
            problems.append(Problem(key=f"strategy.outer.{key}", value=value, rule=rule))
        return problems

    def notes(self, model: nn.Module, context: PlanContext) -> tuple[str, ...]:  # noqa: ARG002 - the same of any
        """Return a note about the averages."""
        first = f", after {self.local_after} steps as in mirrored" if self.local_after else ""
        steps = "step" if self.average_every == 1 else f"{self.average_every} steps"
        outer = "" if self.outer.lr is None else f", then an outer step at rate {self.outer.lr:g}"
        many = (
            "1 replica steps independently and averages"
            if self.replicas == 1
            else f"{self.replicas} replicas step independently and average"
        )
        line = f"local_sgd: {many} every {steps}{first}{outer}"
        return (f"{line}: a different training from that of one device.",)

    def estimate_memory(self, model: nn.Module, context: PlanContext) -> ModelMemory:  # noqa: ARG002 - on any number
        """Return a whole replica, the vector of an average (parameters and two moments), and the outer optimizer."""
        return ModelMemory.whole(model, gradient_copies=3 + (3 if self.outer.lr is not None else 0))

    def traffic(self, model: nn.Module, context: PlanContext, cut: StepCut) -> tuple[Transfer, ...] | None:
        """Return the transfers: the average every `average_every` steps, and before `local_after` the sum of gradients
        in each step.

        An average is one all-reduce of parameters, optimizer state and buffers, independent of the gradients; None if
        the size of the optimizer's state is not known.
        """
        slots = None if cut.dry_run is None else cut.dry_run.state_elements()
        lookups = lookups_of(model, cut) if self.local_after else {}
        if slots is None or lookups is None:
            return None
        ranks, width = ranks_of(self, context), precision_of(context).master_dtype.itemsize
        elements = exchanged_elements(model)
        average = Transfer(
            what="parameters and optimizer state",
            how="all-reduce",
            flows=all_reduce(ranks, (elements + slots) * width),
            messages=2 * (len(ranks) - 1),
            first_step=self.local_after,
            every=self.average_every,
        )
        if not self.local_after:
            return (average,)
        dense = elements - sum(table.numel() for table in weights_of(lookups))
        summed = (
            *reduction("backend", ranks, Vector.of(dense, width), ranks_a_host=ranks_a_host(context, len(ranks))),
            *gathered_rows(lookups, ranks, shards=cut.shards_a_replica, width=width),
        )
        return (*(replace(one, end_step=self.local_after) for one in summed), average)

    def next_sync_step(self, step: int) -> int:
        """Return the step of the next average, or the step itself before `local_after`."""
        apart = step - self.local_after
        return step if apart <= 0 else step + -apart % self.average_every

    def setup(self, request: SetupRequest) -> LocalSgdExecutor:
        """Join the other ranks, and broadcast the model of rank 0."""
        ranks = self.join(request.identity)
        parts = build_parts(request, ranks=ranks)
        replica = Replica(parts)
        broadcast_initial(replica)
        # For independent steps, this rank computes with the same model, optimizer and buffers, without sums over ranks.
        alone = LocalCollective()
        apart = Replica(replace(parts, data_ranks=alone, all_ranks=alone, reducer=LocalReducer()))
        return LocalSgdExecutor(self, replica, apart, request.training, ranks)


class LocalSgdExecutor(SynchronousExecutor[Replica]):
    """A replica that steps independently and is averaged with the others every few steps.

    `apart` is the same model, with a reducer that does not sum over ranks.
    """

    def __init__(
        self, settings: LocalSgd, replica: Replica, apart: Replica, training: StepContext, ranks: RankGroup
    ) -> None:
        super().__init__(replica, training, ranks=ranks)
        self._settings, self._apart = settings, apart
        self._window = AveragingWindow(outer=settings.outer)
        self._skipped: list[tuple[int, int]] = []
        """(step, shard) of the shards that this replica has skipped since the last average."""

    def step(self, ticket: Ticket, batches: Sequence[Batch]) -> StepOutcome:
        """Update only this replica; after the last step of a window, average."""
        if ticket.step < self._settings.local_after:
            return super().step(ticket, batches)
        training = self._training
        self._window.begin(self._replica)
        plan = {item.name: getattr(training.plan, item.name) for item in fields(BatchPlan)}
        own = replace(training, plan=_OwnPart(**plan, shards=ticket.shards))
        outcome = self._step_alone(ticket, batches, own)
        counts = outcome.loss_sum is not None
        self._window.record(outcome.weight, own.plan.batch_size(ticket.step) if counts else 0)
        if self._settings.next_sync_step(ticket.step + 1) == ticket.step + 1:
            self._replica.on_phase("reduce", ticket.step)
            self._average()
            return replace(outcome, left_out=self._left_out_by_any())
        return outcome

    def _average(self) -> None:
        """Make the replicas equal, with the lowest of their loss scales; collective."""
        replica = self._replica
        self._window.average(replica)
        if replica.loss_scale.moves:
            scale = replica.loss_scale.state()
            every = replica.all_ranks.gather(torch.tensor(list(scale.values()), dtype=torch.float64))
            lowest = min(one.tolist() for one in every)
            replica.set_loss_scale(replica.loss_scale.restored(dict(zip(scale, lowest, strict=True))))

    def _step_alone(self, ticket: Ticket, batches: Sequence[Batch], own: StepContext) -> StepOutcome:
        """Run forward, backward and update of one replica, with the loss averaged over its own targets."""
        replica, apart = self._replica, self._apart
        if replica.packing is None:
            ShardStep(replica, ticket, batches, own).agree_on_grad_layout()
        if apart.packing is None:
            apart.adopt_layout(replica)
        if not ticket.shards:  # in a short batch
            return StepOutcome(ticket.step, Status.applied, None, 0.0)
        status = Status.retry
        while status is Status.retry:  # at half the scale: the others go on meanwhile
            apart.set_loss_scale(replica.loss_scale)
            fresh = [cloned_batch(batch) for batch in batches] if replica.loss_scale.moves else batches
            work = ShardStep(apart, ticket, fresh, own)
            sums = list(work.run())
            for place, param in enumerate(apart.trained):
                if sums[place] is None and apart.used[place]:
                    sums[place] = torch.zeros_like(param, dtype=apart.precision.master_dtype)
            replica.on_phase("update", ticket.step)
            status, norm = apply_update(apart, sums, work.divisor, own.rule(ticket.step), loss_sum=work.loss_sum)
            replica.set_loss_scale(apart.loss_scale)
        if status is Status.skipped:
            self._skipped += [(ticket.step, shard) for shard in ticket.shards]
            return StepOutcome(ticket.step, status, None, 0.0)
        return StepOutcome(ticket.step, status, work.loss_sum, work.weight, norm, terms=work.terms)

    def _left_out_by_any(self) -> tuple[LeftOut, ...]:
        """Return the steps of the window that a replica has skipped, with the shards; collective."""
        if not self._replica.numerics.leaves_out:
            return ()
        here, self._skipped = self._skipped, []
        shards: dict[int, list[int]] = {}
        for step, shard in (pair for pairs in all_gather_object(here, self._replica.all_ranks) for pair in pairs):
            shards.setdefault(step, []).append(shard)
        return tuple(LeftOut(step, (Ticket(step, tuple(sorted(shards[step]))),)) for step in sorted(shards))

    def sync(self) -> tuple[LeftOut, ...]:
        """Average at the end of the training, if steps were made since the last average."""
        if not self._window.steps:
            return ()
        self._average()
        return self._left_out_by_any()

    def check_replicas(self) -> str | None:
        """Return the first parameter that differs between ranks, at a step with identical replicas; collective."""
        return drifted_parameter(self._replica)

    def state_dict(self) -> StateDict:
        """Return the state of every synchronous strategy, and the outer optimizer's momentum."""
        return {**super().state_dict(), **self._window.state(self._replica)}

    def recover(self, step: int) -> bool:
        """Return False: between averages each rank has its own parameters."""
        del step
        return False

    def load_state_dict(self, state: StateDict) -> None:
        """Restore the tensors of a checkpoint of any strategy, by name."""
        super().load_state_dict(self._window.load_state(self._replica, state))
