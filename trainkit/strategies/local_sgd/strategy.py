"""Local SGD: replicas step alone and average now and then, which changes the maths and saves exchanges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, ClassVar, Final

import torch
from torch import Tensor

from trainkit.cluster.launch import LaunchEnvironment
from trainkit.config.values import MOST_PROCESSES, at_least, at_most
from trainkit.errors import Problem
from trainkit.fields import maths
from trainkit.numerics.batch import BatchPlan
from trainkit.strategies.base import LeftOut, Numerics, PlanContext, Status, StepContext, StepOutcome, Ticket
from trainkit.strategies.core.replica import PlacedModel, Replica
from trainkit.strategies.core.replica_check import drifted_parameter
from trainkit.strategies.core.step import ShardStep
from trainkit.strategies.core.update import apply_update
from trainkit.strategies.data_parallel.base import DataParallel
from trainkit.strategies.groups.collective import LocalCollective
from trainkit.strategies.groups.gather_objects import all_gather_object
from trainkit.strategies.local_sgd.averaging import AveragingWindow, OuterOptimizer
from trainkit.strategies.reducers import LocalReducer

__all__ = ["LocalSgd"]

_AVERAGE_ALONE: Final = OuterOptimizer()
"""No outer optimizer."""


@dataclass(kw_only=True)
class _LocalReplica(Replica):
    """A replica that keeps account of the steps it made alone."""

    window: AveragingWindow
    skipped: list[tuple[int, int]] = field(default_factory=list)
    """(step, shard) of the shards that this replica has left out since the last average."""


@dataclass(frozen=True, kw_only=True)
class _OwnPart(BatchPlan):
    """A plan as a replica sees a step that it makes alone: the shards it computes are the batch."""

    shards: tuple[int, ...]

    def batch_size(self, step: int) -> int:
        return sum(self.shard_size(step, shard) for shard in self.shards)

    def num_shards(self, step: int) -> int:  # noqa: ARG002 - a part is of one step
        return len(self.shards)


@dataclass(frozen=True, kw_only=True)
class LocalSgd(DataParallel):
    """Replicas that step alone and average every few steps: another training than that of one device, and said so.

    In a step every replica updates its own copy by its own shards. After every `average_every` steps parameters and
    optimizer state become their mean, weighted by targets. With `outer.lr` an outer optimizer steps by what the mean
    has moved (DiLoCo); with `local_after` the first steps are those of mirrored (post-local SGD). With
    `average_every=1` and SGD, unclipped, it is the training of one device to rounding.

    Example:
        >>> [LocalSgd(average_every=4, local_after=10).settles_at(step) for step in (3, 10, 11, 14, 15)]
        [3, 10, 14, 14, 18]

    Source: Stich 2018, arXiv:1805.09767; Lin et al. 2018, arXiv:1808.07217; Douillard et al. 2023, arXiv:2311.08105.
    """

    changes_maths: ClassVar[bool] = True
    elastic: ClassVar[bool] = False

    replicas: Annotated[int, maths, at_least(1), at_most(MOST_PROCESSES)] = 2
    """Processes. Their number changes the result."""
    average_every: Annotated[int, maths, at_least(1)] = 8
    """Steps between two averages."""
    local_after: Annotated[int, maths, at_least(0)] = 0
    """Steps at the beginning in which gradients are summed over all replicas, as in mirrored."""
    outer: Annotated[OuterOptimizer, maths] = _AVERAGE_ALONE
    """What becomes of the average."""

    def problems(self, facts: PlanContext) -> list[Problem]:
        """What concerns every data-parallel strategy, and what replicas that differ cannot keep."""
        problems = self._count_problems(facts.launch) or super().problems(facts)
        if facts.numerics.reproducible:
            rule = "local_sgd depends on the number of replicas. Use strategy=mirrored, or false."
            problems.append(Problem(key="numerics.reproducible", value=True, rule=rule))
        if facts.precision == "fp16_mixed":
            rule = "has one loss scale, and replicas overflow apart. Use precision=bf16_mixed."
            problems.append(Problem(key="precision", value="fp16_mixed", rule=rule))
        if facts.numerics.on_nonfinite == "rollback":
            rule = "needs replicas that decide together, and those of local_sgd step alone. Use skip or stop."
            problems.append(Problem(key="numerics.on_nonfinite", value="rollback", rule=rule))
        if self.outer.lr is None and self.outer != _AVERAGE_ALONE:
            rule = "has no effect without strategy.outer.lr: the average itself is taken."
            key, value = ("momentum", self.outer.momentum) if self.outer.nesterov else ("nesterov", False)
            problems.append(Problem(key=f"strategy.outer.{key}", value=value, rule=rule))
        return problems

    def _count_problems(self, launch: LaunchEnvironment | None) -> list[Problem]:
        if launch is None or self.replicas == launch.num_ranks:
            return []
        if launch.takes_devices and self.replicas % launch.num_ranks == 0:
            return []
        count = launch.num_ranks
        use = f"a multiple of {count}" if launch.takes_devices else count
        rule = f"but {launch.kind} started {count}, and their number changes the result. Use {use}."
        return [Problem(key="strategy.replicas", value=self.replicas, rule=rule)]

    def replicas_here(self, launch: LaunchEnvironment | None) -> int:
        """The share of this host: `replicas` counts those of all hosts, since their number changes the result."""
        return self.replicas if launch is None else self.replicas * launch.num_local // launch.num_ranks

    def notes(self) -> tuple[str, ...]:
        """What is averaged when, and that it is another training."""
        first = f", after {self.local_after} steps as in mirrored" if self.local_after else ""
        steps = "step" if self.average_every == 1 else f"{self.average_every} steps"
        outer = "" if self.outer.lr is None else f", then an outer step at rate {self.outer.lr:g}"
        many = (
            "1 replica steps alone and averages"
            if self.replicas == 1
            else f"{self.replicas} replicas step alone and average"
        )
        said = f"local_sgd: {many} every {steps}{first}{outer}"
        return (f"{said}: another training than that of one device.",)

    def gradient_copies(self, numerics: Numerics, num_replicas: int) -> int:  # noqa: ARG002 - the same on any number
        """The flat vector of an average: parameters and two moments; what an outer optimizer keeps and works in."""
        return 3 + (3 if self.outer.lr is not None else 0)

    def settles_at(self, step: int) -> int:
        """The next average, or the step itself while replicas are still in step."""
        apart = step - self.local_after
        return step if apart <= 0 else step + -apart % self.average_every

    def make_replica(self, held: PlacedModel, **rest: Any) -> _LocalReplica:
        """As every data-parallel strategy's, with an account of the steps made alone."""
        return _LocalReplica(
            model=held.model, params=held.params, masters=held.masters, window=AveragingWindow(outer=self.outer), **rest
        )

    def step(self, placed: Any, ticket: Ticket, batches: Sequence[Any], training: StepContext) -> StepOutcome:
        """An update of this replica's own; after the last one of a window the average."""
        if ticket.step < self.local_after:
            return super().step(placed, ticket, batches, training)
        replica: _LocalReplica = placed
        replica.window.begin(replica)
        plan = {item.name: getattr(training.plan, item.name) for item in fields(BatchPlan)}
        own = replace(training, plan=_OwnPart(**plan, shards=ticket.shards))
        outcome = _step_alone(replica, ticket, batches, own)
        counts = outcome.loss_sum is not None
        replica.window.record(outcome.weight, own.plan.batch_size(ticket.step) if counts else 0)
        if self.settles_at(ticket.step + 1) == ticket.step + 1:
            if placed.on_phase is not None:
                placed.on_phase("reduce", ticket.step)
            replica.window.average(replica)
            outcome.left_out = _left_out_by_any(replica)
        return outcome

    def settle(self, placed: Any) -> tuple[LeftOut, ...]:
        """Average what was trained since the last time: the training ends here."""
        replica: _LocalReplica = placed
        if not replica.window.steps:
            return ()
        replica.window.average(replica)
        return _left_out_by_any(replica)

    def check_replicas(self, placed: Any) -> str | None:
        """The first parameter whose bits are not the same on all ranks; asked where replicas are alike. Collective."""
        return drifted_parameter(placed)

    def state(self, placed: Any) -> dict[str, Tensor]:
        """What every synchronous strategy keeps, and the outer optimizer's momentum; alike on every rank."""
        return {**super().state(placed), **placed.window.state(placed)}

    def recover(self, placed: Any, step: int) -> bool:  # noqa: ARG002 - the same at any step
        """Never: between averages each rank has parameters of its own."""
        return False

    def load_state(self, placed: Any, tensors: Mapping[str, Tensor]) -> None:
        """Take over the tensors of a checkpoint of any strategy, by name."""
        super().load_state(placed, placed.window.load_state(placed, tensors))


def _step_alone(replica: _LocalReplica, ticket: Ticket, batches: Sequence[Any], own: StepContext) -> StepOutcome:
    """Forward, backward and update of one replica, by the mean over its own targets."""
    work = ShardStep(replica, ticket, batches, own)
    if replica.packing is None:
        work.agree_on_grad_layout()
    if not ticket.shards:  # in a short batch
        return StepOutcome(ticket.step, Status.applied, None, 0.0)
    together = replica.data_ranks, replica.reducer
    replica.data_ranks, replica.reducer = LocalCollective(), LocalReducer()
    try:
        sums = list(work.run())
    finally:
        replica.data_ranks, replica.reducer = together
    for place, param in enumerate(replica.trained):
        if sums[place] is None and replica.used[place]:
            sums[place] = torch.zeros_like(param, dtype=replica.precision.master_dtype)
    if replica.on_phase is not None:
        replica.on_phase("update", ticket.step)
    status, norm = apply_update(
        replica, sums, work.divisor, own.rule(ticket.step), loss_sum=work.loss_sum, deciders=LocalCollective()
    )
    if status is Status.skipped:
        replica.skipped += [(ticket.step, shard) for shard in ticket.shards]
        return StepOutcome(ticket.step, status, None, 0.0)
    return StepOutcome(ticket.step, status, work.loss_sum, work.weight, norm)


def _left_out_by_any(replica: _LocalReplica) -> tuple[LeftOut, ...]:
    """Return the steps of the window that any replica has left out, with the shards of those replicas; collective."""
    if not replica.numerics.leaves_out:
        return ()
    here, replica.skipped = replica.skipped, []
    shards: dict[int, list[int]] = {}
    for step, shard in (pair for pairs in all_gather_object(here, replica.all_ranks) for pair in pairs):
        shards.setdefault(step, []).append(shard)
    return tuple(LeftOut(step, (Ticket(step, tuple(sorted(shards[step]))),)) for step in sorted(shards))
