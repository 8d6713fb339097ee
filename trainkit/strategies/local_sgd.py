"""Local SGD: replicas step independently and average periodically, which changes the maths and saves communication."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Annotated, Any, ClassVar, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainkit.config.values import MOST_PROCESSES
from trainkit.errors import Problem
from trainkit.fields import above, at_least, at_most, below, maths, placement, unit
from trainkit.numerics.batch import BatchPlan, Ticket, shards_of_rank
from trainkit.objectives.base import Collective
from trainkit.strategies.base import (
    Batch,
    Facts,
    LeftOut,
    LoopCall,
    ModelMemory,
    PlanContext,
    SetupRequest,
    StateDict,
    Status,
    StepContext,
    StepCut,
    StepOutcome,
    Strategy,
    Transfer,
)
from trainkit.strategies.collectives import GroupCollective, LocalCollective, RankGroup, all_gather_object
from trainkit.strategies.core.refusals import optimizer_problems
from trainkit.strategies.core.replica import Replica, joined_norms
from trainkit.strategies.core.step import MakeStep, ShardStep, cloned_batch
from trainkit.strategies.core.synchronous import SynchronousExecutor, broadcast_initial, build_parts
from trainkit.strategies.groups.process_group import ProcessGroupOptions
from trainkit.strategies.mesh.step import ShardedWork
from trainkit.strategies.mesh.strategy import Mesh
from trainkit.strategies.reducers.vector import LocalReducer
from trainkit.strategies.tensor_shards import select
from trainkit.strategies.tensors.layouts import FlatBuffer, dense_strides, in_layout
from trainkit.strategies.traffic import (
    Vector,
    exchanged_elements,
    gathered_rows,
    joined,
    lookups_of,
    ranks_a_host,
    ranks_of,
    reduction,
    weights_of,
)

_MOMENTUM: Final = "outer_momentum"
"""Name of the slot of the optimizer that holds the outer optimizer's momentum."""


@dataclass(frozen=True, kw_only=True)
class OuterOptimizer:
    """The outer optimizer: SGD on the change of the parameters between two averages.

    With x the parameters after the last average, m the new average, d = x - m, and v = momentum v + d:
    x <- x - lr (d + momentum v) with Nesterov's momentum, x - lr v without. A rate of 1 without momentum gives m.

    Source: Douillard et al. 2023, arXiv:2311.08105, algorithm 1 (rate 0.7, momentum 0.9).
    """

    lr: Annotated[float | None, maths, above(0)] = None
    """Rate of the outer optimizer; null: the average itself becomes the parameters."""
    momentum: Annotated[float, maths, below(0, 1)] = 0.9
    """Momentum of the outer optimizer."""
    nesterov: Annotated[bool, maths] = True
    """Nesterov's momentum instead of heavy-ball momentum."""


_AVERAGE_ALONE: Final = OuterOptimizer()
"""The average without an outer optimizer."""


@dataclass(frozen=True, kw_only=True)
class _ReplicaPlan(BatchPlan):
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

    facts: ClassVar[Facts] = Facts(
        changes_maths=True,
        compiles="model",
        runs_hooks=True,
        withheld_calls={
            LoopCall.apart: "its replicas step independently between two averages. Use step(), or strategy=mirrored."
        },
    )

    replicas: Annotated[int, maths, at_least(1), at_most(MOST_PROCESSES), unit("replicas")] = 2
    """Number of replicas; it changes the result."""
    shard: Annotated[int, placement, at_least(1), at_most(MOST_PROCESSES)] = 1
    """Processes of a replica, over which its parameters are sharded; each computes its own shards of the replica's."""
    average_every: Annotated[int, maths, at_least(1), unit("steps")] = 8
    """Steps between two averages."""
    local_after: Annotated[int, maths, at_least(0), unit("steps")] = 0
    """Steps at the beginning in which gradients are summed over all replicas, as in mirrored."""
    outer: Annotated[OuterOptimizer, maths] = _AVERAGE_ALONE
    """The outer optimizer, which steps after an average."""

    @property
    def wanted_replicas(self) -> int:
        """The number of processes: all of them have samples of their own."""
        return self.replicas * self.shard

    @property
    def _mesh(self) -> Mesh:
        """The ranks: replicas, each sharded over its processes."""
        return Mesh(replicate=self.replicas, shard=self.shard, devices=self.devices, timeout_s=self.timeout_s)

    def facts_in(self, context: PlanContext) -> Facts:
        """Return the facts: with shards, those of sharded parameters."""
        facts = super().facts_in(context)
        if self.shard == 1:
            return facts
        sharded = self._mesh.facts_in(context)
        return replace(
            facts,
            compiles=sharded.compiles,
            is_sharded=sharded.is_sharded,
            forward_is_collective=sharded.forward_is_collective,
            runs_hooks=sharded.runs_hooks,
            keeps_memory_format=sharded.keeps_memory_format,
            withheld=sharded.withheld,
        )

    def replicas_problem(self, rule: str, value: object = None) -> Problem:
        """Return a problem of the number of processes, which two keys set if replicas are sharded."""
        if self.shard == 1:
            return super().replicas_problem(rule, value)
        return Problem(key="strategy", value=f"local_sgd (replicas={self.replicas}, shard={self.shard})", rule=rule)

    def validate(self, context: PlanContext) -> list[Problem]:
        """Return problems of every process group, and settings that differing replicas do not support."""
        problems = super().validate(context)
        if self.shard > 1:
            problems += optimizer_problems(context)
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

    def validate_model(self, model: nn.Module, context: PlanContext) -> list[Problem]:
        """Return problems of parameters that cannot be sharded."""
        return super().validate_model(model, context) if self.shard == 1 else self._mesh.validate_model(model, context)

    def notes(self, model: nn.Module, context: PlanContext) -> tuple[str, ...]:  # noqa: ARG002 - the same of any
        """Return a note about the averages."""
        first = f", after {self.local_after} steps as in mirrored" if self.local_after else ""
        steps = "step" if self.average_every == 1 else f"{self.average_every} steps"
        outer = "" if self.outer.lr is None else f", then an outer step at rate {self.outer.lr:g}"
        parts = "" if self.shard == 1 else f", each sharded over {self.shard} processes,"
        many = f"1 replica{parts} steps independently and averages"
        if self.replicas > 1:
            many = f"{self.replicas} replicas{parts} step independently and average"
        line = f"local_sgd: {many} every {steps}{first}{outer}"
        return (f"{line}: a different training from that of one device.",)

    def estimate_memory(self, model: nn.Module, context: PlanContext) -> ModelMemory:
        """Return the replica of a rank, the vector of an average (parameters and two moments), and the outer
        optimizer.
        """
        memory = ModelMemory.whole(model) if self.shard == 1 else self._mesh.estimate_memory(model, context)
        return replace(memory, gradient_copies=3 + (3 if self.outer.lr is not None else 0))

    def traffic(self, model: nn.Module, context: PlanContext, cut: StepCut) -> tuple[Transfer, ...] | None:
        """Return the transfers: the average every `average_every` steps, and before `local_after` the sum of gradients
        in each step.

        An average is one all-reduce of parameters, optimizer state and buffers, independent of the gradients; None if
        the step cannot run without data.
        """
        step = self._mesh.traffic(model, context, cut)
        lookups = lookups_of(model, cut) if self.local_after else {}
        if step is None or lookups is None:
            return None
        average, every = "parameters and optimizer state", self.average_every
        transfers = tuple(  # each observed step averages
            replace(transfer, what=average, overlaps=False, first_step=self.local_after, every=every)
            if (transfer.what, transfer.how) == ("gradients", "all-reduce")
            else transfer
            for transfer in step
        )
        if not self.local_after:
            return transfers
        ranks, width = ranks_of(self, context), context.formats.master_dtype.itemsize
        dense = exchanged_elements(model) - sum(table.numel() for table in weights_of(lookups))
        vector = Vector(num_bytes=dense // self.shard * width, element_bytes=width)
        parts = [ranks[index :: self.shard] for index in range(self.shard)]  # ranks with the same part
        host = ranks_a_host(context, len(ranks))
        by_part = [reduction("backend", part, vector, ranks_a_host=host)[0] for part in parts if len(part) > 1]
        summed = [replace(by_part[0], flows=joined(*(transfer.flows for transfer in by_part)))] if by_part else []
        summed += gathered_rows(lookups, ranks, shards=cut.shards_a_replica, width=width)
        return (*transfers, *(replace(transfer, end_step=self.local_after) for transfer in summed))

    def observed_ranks(self, context: PlanContext) -> tuple[int, ...]:  # noqa: ARG002 - the same in any
        """Return the first rank."""
        return (0,)

    def as_observed(self) -> LocalSgd:
        """Return the strategy with an average in each step."""
        return replace(self, average_every=1, local_after=0)

    def next_sync_step(self, step: int) -> int:
        """Return the step of the next average, or the step itself before `local_after`."""
        apart = step - self.local_after
        return step if apart <= 0 else step + -apart % self.average_every

    def setup(self, request: SetupRequest) -> LocalSgdExecutor:
        """Join the other ranks, and broadcast the model of rank 0."""
        ranks = self.join(request.identity)
        within: Collective = LocalCollective()
        step: MakeStep[Replica] = ShardStep
        step_alone: MakeStep[Replica] = ShardStep
        copies = join_norms = None
        if self.shard == 1:
            replica = Replica(build_parts(request, ranks=ranks))
            broadcast_initial(replica)
        else:
            replica, place, step = self._mesh.build(request, ranks)
            group, copies = place.group("shard"), place.group("replicate")
            rank, device = place.coordinates["shard"], replica.device
            within = GroupCollective(rank=rank, num_ranks=self.shard, device=device, group=group)
            join_norms = joined_norms(dict.fromkeys(replica.params, True), device, group)
            step_alone = partial(ShardedWork, group=group)
        # for independent steps, the same model, optimizer and buffers, without sums over the other replicas
        parts = replace(
            replica.parts_made_of, data_ranks=within, all_ranks=within, reducer=LocalReducer(), join_norms=join_norms
        )
        return LocalSgdExecutor(
            self, replica, Replica(parts), request.training, ranks, make_steps=(step, step_alone), copies=copies
        )


class LocalSgdExecutor(SynchronousExecutor[Replica]):
    """A rank of a replica that steps independently and is averaged with the others every few steps.

    Args:
        replica: the model, with sums over all ranks.
        apart: the same model, with sums over the ranks of its replica.
        make_steps: the makers of a step of all replicas together, and of a step of one replica.
        copies: the ranks with the same part of the other replicas; None: all ranks.
    """

    def __init__(
        self,
        settings: LocalSgd,
        replica: Replica,
        apart: Replica,
        training: StepContext,
        ranks: RankGroup,
        *,
        make_steps: tuple[MakeStep[Replica], MakeStep[Replica]],
        copies: dist.ProcessGroup | None,
    ) -> None:
        super().__init__(replica, training, ranks=ranks, make_step=make_steps[0])
        self._settings, self._apart, self._make_step_apart = settings, apart, make_steps[1]
        self._replica_ranks, self._copies = apart.data_ranks, copies
        self._steps = 0
        """Steps since the last average, the same on every rank."""
        self._targets: Tensor | float = 0.0
        """Number of targets of this rank in these steps."""
        self._samples = 0.0
        """Number of samples of this rank in these steps."""
        self._start: Tensor | None = None
        """The parameters at the last average, one flat vector; only with an outer optimizer."""
        self._states: list[Tensor] = []
        """State per sample at the last average: the changes of all ranks are added to it."""
        self._momentum: Tensor | None = None
        """The outer optimizer's momentum, one flat vector; None before its first step, also after a restore."""
        self._skipped: list[tuple[int, int]] = []
        """(step, shard) of the shards that this replica has skipped since the last average."""

    def assign(self, step: int) -> tuple[int, ...]:
        """Return this rank's share of the shards of its replica."""
        return self._shards_of_replica(step)[self._replica_ranks.rank :: self._replica_ranks.num_ranks]

    def _shards_of_replica(self, step: int) -> tuple[int, ...]:
        replica, ranks_a_replica = self._replica, self._replica_ranks.num_ranks
        return shards_of_rank(
            self._training.plan.num_shards(step),
            rank=replica.rank // ranks_a_replica,
            num_ranks=replica.num_ranks // ranks_a_replica,
            lanes=replica.lanes,
        )

    def step(self, ticket: Ticket, batches: Sequence[Batch]) -> StepOutcome:
        """Update only this replica; after the last step of a window, average."""
        if ticket.step < self._settings.local_after:
            return super().step(ticket, batches)
        training = self._training
        if self._steps == 0:
            self._states = [state.clone() for state in self._replica.buffers.per_sample()]
            if self._settings.outer.lr is not None:
                self._start = self._masters.pack(list(self._replica.masters.values()), into=self._start)
        plan = {item.name: getattr(training.plan, item.name) for item in fields(BatchPlan)}
        context = replace(training, plan=_ReplicaPlan(**plan, shards=self._shards_of_replica(ticket.step)))
        outcome = self._step_alone(ticket, batches, context)
        self._steps += 1
        self._targets = self._targets + outcome.weight
        if outcome.status is Status.applied:
            self._samples += context.plan.batch_size(ticket.step)
        if self._settings.next_sync_step(ticket.step + 1) == ticket.step + 1:
            self._replica.on_phase("reduce", ticket.step)
            self._average()
            return replace(outcome, left_out=self._left_out_by_any())
        return outcome

    def _step_alone(self, ticket: Ticket, batches: Sequence[Batch], context: StepContext) -> StepOutcome:
        """Run forward, backward and update of one replica, with the loss averaged over its own targets."""
        replica, apart = self._replica, self._apart
        if replica.packing is None:
            self._make_step(replica, ticket, batches, self._training).agree_on_grad_layout()
        if apart.packing is None:
            apart.adopt_layout(replica)
            apart.set_stand_in(replica.stand_in)
        if not context.plan.num_shards(ticket.step):  # in a short batch
            self._agree_on_used([None] * len(apart.params))
            return StepOutcome(ticket.step, Status.applied, None, 0.0)
        outcome = None
        while outcome is None or outcome.status is Status.retry:  # at half the scale: the others go on meanwhile
            apart.set_loss_scale(replica.loss_scale)
            fresh = [cloned_batch(batch) for batch in batches] if replica.loss_scale.moves else batches
            work = self._make_step_apart(apart, ticket, fresh, context)
            sums = list(work.run())
            self._agree_on_used(sums[: len(apart.params)])
            for index, param in enumerate(apart.trained):
                if replica.exchanges and sums[index] is None and apart.used[index]:
                    sums[index] = torch.zeros_like(param, dtype=apart.precision.master_dtype)
            outcome = self._update(work, sums, context)
            replica.set_loss_scale(apart.loss_scale)
        if outcome.status is Status.skipped:
            self._skipped += [(ticket.step, shard) for shard in ticket.shards]
            return StepOutcome(ticket.step, outcome.status, None, 0.0)
        return outcome

    def _agree_on_used(self, grads: Sequence[Tensor | None]) -> None:
        """Find which parameters get gradients in any replica; collective, once. Whole ones have done so before."""
        replica, apart = self._replica, self._apart
        if replica.cuts and not apart.used:
            replica.agree_on_used([grad is not None for grad in grads])
            apart.set_exchange(used=replica.used, sparse={})

    def _left_out_by_any(self) -> tuple[LeftOut, ...]:
        """Return the steps of the window that a replica has skipped, with the shards; collective."""
        if not self._replica.numerics.leaves_out:
            return ()
        skipped, self._skipped = self._skipped, []
        shards: dict[int, list[int]] = {}
        for step, shard in (pair for pairs in all_gather_object(skipped, self._replica.all_ranks) for pair in pairs):
            shards.setdefault(step, []).append(shard)
        return tuple(LeftOut(step, (Ticket(step, tuple(sorted(shards[step]))),)) for step in sorted(shards))

    def sync(self) -> tuple[LeftOut, ...]:
        """Average at the end of the training, if steps were made since the last average."""
        if not self._steps:
            return ()
        self._average()
        return self._left_out_by_any()

    @property
    def _masters(self) -> FlatBuffer:
        """The layout of all parameters as one vector."""
        replica = self._replica
        return FlatBuffer.like(list(replica.masters.values()), replica.precision.master_dtype, replica.device)

    @torch.no_grad()
    def _average(self) -> None:
        """Average the replicas, and give them the lowest of their loss scales; collective, unless there is one."""
        replica = self._replica
        if replica.num_ranks > self._replica_ranks.num_ranks:
            _make_state(replica)
            self._exchange()
        if self._settings.outer.lr is not None:
            self._step_outside(self._settings.outer.lr)
        replica.refresh_params()
        replica.reload()
        self._steps, self._targets, self._samples = 0, 0.0, 0.0
        if replica.loss_scale.moves:
            scale = replica.loss_scale.state()
            gathered = replica.all_ranks.gather(torch.tensor(list(scale.values()), dtype=torch.float64))
            lowest = min(values.tolist() for values in gathered)
            replica.set_loss_scale(replica.loss_scale.restored(dict(zip(scale, lowest, strict=True))))

    def _exchange(self) -> None:
        """Sum one vector over the replicas.

        Parameters and optimizer state are weighted by the targets of their replica, buffers by its samples; counters
        (Adam's steps, integer buffers) are taken from the first one, which has a shard of every step.
        """
        replica, copies = self._replica, self._copies
        targets = torch.as_tensor(self._targets, dtype=replica.precision.master_dtype, device=replica.device)
        weighed, counters = _trained(replica)
        states = replica.buffers.per_sample()
        for state, start in zip(states, self._states, strict=True):
            moved = state.to(replica.precision.master_dtype).sub_(start)
            dist.all_reduce(moved, group=copies)
            state.copy_(moved.add_(start))
        state_ids = set(map(id, states))
        buffers = [buffer for buffer in replica.buffers.tensors() if id(buffer) not in state_ids]
        counters += [buffer for buffer in buffers if not buffer.is_floating_point()]
        buffers = [buffer for buffer in buffers if buffer.is_floating_point()]
        tensors = [*weighed, *buffers, *counters]
        packing = FlatBuffer(
            [*(tensor.shape for tensor in tensors), torch.Size([2])],
            replica.precision.master_dtype,
            replica.device,
            strides=[*map(dense_strides, tensors), None],
        )
        flat = packing.pack([*tensors, None])
        lengths = [sum(tensor.numel() for tensor in group) for group in (weighed, buffers, counters)]
        by_targets, by_samples, counts, totals = flat.split_with_sizes([*lengths, 2])
        # A replica without targets must not count, and a window without any must not divide by zero.
        totals[0], totals[1] = self._replica_ranks.sum(targets), self._samples
        totals.clamp_(min=1e-20)
        by_targets.mul_(totals[0])
        by_samples.mul_(totals[1])
        # exact in float32 up to 2^24, as Adam's own count is
        counts.mul_(float(replica.rank < self._replica_ranks.num_ranks))
        dist.all_reduce(flat, group=copies)
        by_targets.div_(totals[0])
        by_samples.div_(totals[1])
        torch._foreach_copy_(tensors, packing.views(flat)[:-1])

    def _step_outside(self, lr: float) -> None:
        """Step the outer optimizer from the average."""
        masters: list[Tensor] = list(self._replica.masters.values())
        packing, outer = self._masters, self._settings.outer
        assert self._start is not None
        moved = self._start - packing.pack(masters)
        if outer.momentum:
            if self._momentum is None:
                self._momentum = self._momentum_in_slots()
            self._momentum.mul_(outer.momentum).add_(moved)
            moved = moved.add_(self._momentum, alpha=outer.momentum) if outer.nesterov else self._momentum
        torch._foreach_copy_(masters, packing.views(self._start.sub_(moved, alpha=lr)))

    def _momentum_in_slots(self) -> Tensor:
        """Return the momentum as one vector, whose parts become slots of the parameters, which checkpoints hold.

        Adam takes a parameter without other slots, which was never updated, for one that has them all.
        """
        (optimizer,), masters, packing = self._replica.stepper.optimizers, self._replica.masters.values(), self._masters
        states, keeps_slots = [optimizer.state.get(master, {}) for master in masters], any(optimizer.state.values())
        flat = packing.pack([state.get(_MOMENTUM) for state in states])
        for master, state, view in zip(masters, states, packing.views(flat), strict=True):
            if state or not keeps_slots:
                optimizer.state[master][_MOMENTUM] = view
        return flat

    def recover(self, step: int) -> bool:
        """Return False: between averages each rank has its own parameters."""
        del step
        return False

    def load_state_dict(self, state: StateDict) -> None:
        """Restore the tensors of a checkpoint of any strategy, by name."""
        self._momentum = None
        keeps = self._settings.outer.lr is not None
        super().load_state_dict(select(state, lambda name: keeps or not name.startswith(f"optimizer/{_MOMENTUM}/")))


def _trained(replica: Replica) -> tuple[list[Tensor], list[Tensor]]:
    """Return parameters with the optimizer's tensors, and its counters; in canonical order, the same on every rank."""
    weighed: list[Tensor] = [master.detach() for master in replica.masters.values()]
    counters: list[Tensor] = []
    (optimizer,) = replica.stepper.optimizers
    for master in replica.masters.values():
        state: dict[str, Any] = optimizer.state.get(master, {})
        for slot, value in sorted(state.items()):
            if isinstance(value, Tensor) and slot != _MOMENTUM:
                if value.is_sparse:  # momentum of sparse gradients, whose rows differ between ranks
                    state[slot] = in_layout(value.to_dense(), master.stride())
                (weighed if value.dim() else counters).append(state[slot])
    return weighed, counters


def _make_state(replica: Replica) -> None:
    """Make the optimizer of a rank that had no shards yet create its state, by a step with learning rate 0."""
    (optimizer,) = replica.stepper.optimizers
    if not optimizer.state:
        zeros: list[Tensor | None] = [
            torch.zeros_like(master) if used else None
            for master, used in zip(replica.masters.values(), replica.used, strict=True)
        ]
        for index, dims in (replica.sparse or {}).items():
            zeros[index] = torch.zeros_like(replica.trained[index]).to_sparse(dims)
        replica.stepper.step(zeros, 0.0)
