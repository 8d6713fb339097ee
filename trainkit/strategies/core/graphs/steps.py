"""Run the steps of a replica as graphs of torch.compile.

If nothing happens between the gradients of a step and its update, both are one graph: forward and backward of the last
shard, clipping, the update of the optimizer. Earlier shards are runs of a second graph, which adds their gradients to
sums that this class holds. If ranks exchange gradients, or a step may be skipped, the second graph computes every
shard, and clipping and the update are a separate graph.

The first step of a start is eager: it finds the parameters that get gradients, and creates the slots of the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trainkit.errors import ConfigError, Problem, TrainingError
from trainkit.numerics.batch import Ticket
from trainkit.numerics.generators import GeneratorStates
from trainkit.strategies.base import (
    Batch,
    GraphSettings,
    SetupRequest,
    Status,
    StepContext,
    StepOutcome,
    UpdateParams,
)
from trainkit.strategies.core.graphs.captured import CapturingCaller, CudaCapture
from trainkit.strategies.core.graphs.direct import RepeatedGraph
from trainkit.strategies.core.graphs.shard import ShardGradients
from trainkit.strategies.core.graphs.update import OptimizerTensors, Updates
from trainkit.strategies.core.graphs.whole import UntraceableError, WholeGraph, refuse_draws
from trainkit.strategies.core.optimizer import OptimizerStepper
from trainkit.strategies.core.replica import Replica
from trainkit.strategies.core.step import ShardStep, added, divisor_of


class StepGraphs:
    """The graphs of a replica's steps, created at the first step that needs them.

    Args:
        replica: a whole model on one device.
        training: plan, objective and update rule.
        settings: the backend of torch.compile.
    """

    def __init__(self, replica: Replica, training: StepContext, settings: GraphSettings) -> None:
        assert isinstance(replica.stepper, OptimizerStepper)
        self._replica, self._training, self._settings = replica, training, settings
        self._stepper, self._keys = replica.stepper, replica.keys
        self._updates: Updates | None = None
        self._sums: list[Tensor | None] = []
        self.ready = False
        """Whether an eager step has found the facts that the graphs need."""
        self._unchanged = False
        self._pool = torch.cuda.graph_pool_handle() if settings.cuda_graphs else None

    @classmethod
    def of(cls, request: SetupRequest, replica: Replica, shard_step: type[ShardStep]) -> StepGraphs:
        """Return the graphs of a run that requests them.

        Raises:
            ConfigError: a class of the strategy runs the steps, and a graph would not call it.
        """
        assert request.graphs is not None
        if shard_step is not ShardStep:
            rule = (
                f"{shard_step.__name__} runs the steps of this strategy, and a graph would not call it. Leave it out."
            )
            raise ConfigError([Problem(key="compile.mode", value="step", rule=rule)])
        return cls(replica, request.training, request.graphs)

    def forget(self) -> None:
        """Run the next step eagerly, because slots of the optimizer were replaced."""
        self.ready = False

    def expect_unchanged(self) -> None:
        """Run the next step without guards: since the last one, only code of the trainer has run."""
        self._unchanged = True

    def end_step(self) -> None:
        """Check the next step by guards, unless `expect_unchanged` is called before it."""
        self._unchanged = False

    @contextmanager
    def probing(self) -> Iterator[None]:
        """Run the eager step inside, without keys.

        Raises:
            TrainingError: the step has drawn random numbers.
        """
        self._keys.silence(silent=True)
        try:
            before = GeneratorStates([self._replica.device])
            yield
            if before.moved():
                refuse_draws(self._settings.key, None)
        finally:
            self._keys.silence(silent=False)

    def learn(self, sums: Sequence[Tensor | None]) -> None:
        """Run the following steps as graphs, by the layout of the sums of an eager step.

        Raises:
            TrainingError: a gradient is sparse, or the optimizer has hooks.
        """
        replica, stepper = self._replica, self._stepper
        used = [grad is not None for grad in sums[: len(replica.params)]]
        if replica.sparse:
            raise TrainingError("compile.mode=step: a gradient is sparse. Use compile.mode=default, or a dense one.")
        if stepper.has_other_hooks:
            raise TrainingError(
                "compile.mode=step: hooks are registered on the optimizer, and a graph would not call them. Remove "
                "them, "
                "or use compile.mode=default."
            )
        if self._updates is None:
            self._updates = Updates(replica, stepper, used)
            self._sums = self._new_sums(used)
            self._make_graphs(self._updates, used)
        else:
            self._updates.bind(used)
        self.ready = True

    def take(self, ticket: Ticket, batches: Sequence[Batch]) -> StepOutcome:
        """Run a step whose gradients and update are one graph; only if `is_whole`."""
        replica, training, updates = self._replica, self._training, self._updates
        assert updates is not None
        batch_size = training.plan.batch_size(ticket.step)
        divisor, update = divisor_of(training.weighing, batch_size), training.rule(ticket.step)
        values = updates.values(replica.loss_scale.scale / divisor.value, divisor.value, update)
        several = len(batches) > 1 and bool(replica.buffers.names)
        if several:
            replica.buffers.begin_step()
        found = _Sums(training.objective.term_names)
        last = ticket.shards[-1]
        for shard, batch in zip(ticket.shards, batches, strict=True):
            replica.on_phase("forward", ticket.step)
            if shard != last:
                found.add(*self.add(batch, values))
            else:
                replica.begin_update(ticket.step)
                sums = self._sums if len(batches) > 1 else None
                before = (found.weight,) if divisor.counted and isinstance(found.weight, Tensor) else ()
                earlier = None if not divisor.counted else 0.0 if before else found.weight
                clips = update.max_norm is not None
                fixed = (earlier, sums, updates.tensors, clips)
                *one, norm = self._run(self._finish, (batch, values, before), fixed, unchanged=self._unchanged)
                found.add(*one)
            if several:
                replica.buffers.end_forward(training.plan.shard_size(ticket.step, shard) / batch_size)
                if shard != last:
                    replica.buffers.reset()
        if several:
            replica.buffers.finish(replica.buffers.take())
        updates.count()
        replica.end_update(ticket.step)
        return StepOutcome(ticket.step, Status.applied, found.loss_sum, found.weight, norm, terms=found.terms)

    @property
    def is_whole(self) -> bool:
        """Whether nothing happens between gradients and update: no exchange, and no decision on the step."""
        replica = self._replica
        decides = replica.loss_scale.moves or replica.numerics.leaves_out
        return not replica.exchanges and not decides

    def shards(self, ticket: Ticket, batches: Sequence[Batch]) -> ShardStep:
        """Return a try at a step whose shards are runs of one graph, and whose update is another graph."""
        return GraphedShards(self._replica, ticket, batches, self._training, self)

    def begin_shards(self) -> None:
        """Set the sums of gradients to zero."""
        torch._foreach_zero_([total for total in self._sums if total is not None])

    def add(self, batch: Batch, values: Tensor) -> tuple[Tensor, Tensor | float, tuple[Tensor, ...]]:
        """Add the gradients of a shard to `sums`; return its loss, weight and terms."""
        found: tuple[Tensor, Tensor | float, tuple[Tensor, ...]] = self._run(
            self._add, (batch, values), (self._sums,), unchanged=self._unchanged
        )
        return found

    @property
    def sums(self) -> list[Tensor | None]:
        """The sums of the gradients of a step's shards; None for a parameter that gets none."""
        return self._sums

    def values(self, seed: float) -> Tensor:
        """Return the values of a step for `add`."""
        assert self._updates is not None
        return self._updates.values(seed, 1.0, UpdateParams(lr_factor=1.0, max_norm=None))

    def update(self, grads: Sequence[Tensor | None], update: UpdateParams) -> Tensor | None:
        """Clip mean gradients and update the parameters; return the norm before clipping, if they are clipped."""
        assert self._updates is not None
        values = self._updates.values(0.0, 1.0, update)
        clips = update.max_norm is not None
        norm: Tensor | None = self._run(self._step, list(grads), values, self._updates.tensors, clips)
        self._updates.count()
        return norm

    def _new_sums(self, used: Sequence[bool]) -> list[Tensor | None]:
        """Return zeros with the strides of the parameters, in the masters' dtype."""
        masters = self._replica.masters.values()
        return [
            torch.zeros_like(one, requires_grad=False) if flag else None
            for one, flag in zip(masters, used, strict=True)
        ]

    def _make_graphs(self, updates: Updates, used: Sequence[bool]) -> None:
        by_others = self._replica.num_ranks > 1
        gradients = ShardGradients(self._replica, self._training, used=used, by_others=by_others)

        def add(batch: Batch, values: Tensor, sums: list[Tensor | None]) -> tuple[Any, ...]:
            loss_sum, weight, terms, grads = gradients(batch, values[0])
            with torch.no_grad():
                for total, grad in zip(sums, grads, strict=True):
                    if total is not None and grad is not None:
                        total.add_(grad)
            return loss_sum, weight, terms

        def finish(  # noqa: PLR0917 - a call of a compiled function by position is faster
            batch: Batch,
            values: Tensor,
            before: tuple[Tensor, ...],
            earlier: float | None,
            sums: list[Tensor | None] | None,
            tensors: OptimizerTensors,
            clips: bool,
        ) -> tuple[Any, ...]:
            loss_sum, weight, terms, grads = gradients(batch, values[0])
            with torch.no_grad():
                if sums is not None:
                    grads = [_sum(total, grad) for total, grad in zip(sums, grads, strict=True)]
                if earlier is not None:
                    counted = torch.as_tensor(added(before[0] if before else earlier, weight))
                    factor = torch.where(counted > 0, values[1] / counted, 0.0)
                    grads = [None if grad is None else grad * factor for grad in grads]
                norm = updates.apply(grads, values, tensors, clips=clips)
                for total in sums or ():
                    if total is not None:
                        total.zero_()
            return loss_sum, weight, terms, norm

        def step(
            grads: list[Tensor | None],
            values: Tensor,
            tensors: OptimizerTensors,
            clips: bool,
        ) -> Tensor | None:
            with torch.no_grad():
                return updates.apply(grads, values, tensors, clips=clips)

        self._add, self._finish = self._repeated(add), self._repeated(finish)
        # All gradients are its arguments: comparing their layouts is work in each step, and a capture would copy them.
        self._step = WholeGraph(step, self._settings, self._replica.device, is_joint=True)

    def _repeated(self, function: Callable[..., Any]) -> RepeatedGraph:
        if self._pool is None:
            return RepeatedGraph(function, self._settings, self._replica.device)
        call = CapturingCaller(partial(CudaCapture, self._pool))
        return RepeatedGraph(function, self._settings, self._replica.device, call)

    def _run(self, graph: Callable[..., Any], *args: Any, **settings: Any) -> Any:
        keys = self._keys
        keys.silence(silent=True)
        try:
            return graph(*args, **settings)
        except UntraceableError as error:
            raise TrainingError(
                f"compile.mode=step: this step cannot be one graph: {error}. Use compile.mode=default."
            ) from error
        finally:
            keys.silence(silent=False)


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    return other if one is None else one if other is None else one + other


class _Sums:
    """The sums over the shards of a step."""

    def __init__(self, names: Sequence[str]) -> None:
        self.loss_sum: Tensor | None = None
        self.weight: Tensor | float = 0.0
        self.terms: dict[str, Tensor] = {}
        self._names = names

    def add(self, loss_sum: Tensor, weight: Tensor | float, terms: Sequence[Tensor]) -> None:
        """Add a shard."""
        self.loss_sum = loss_sum if self.loss_sum is None else self.loss_sum + loss_sum
        self.weight = added(self.weight, weight)
        for name, term in zip(self._names, terms, strict=True):
            self.terms[name] = self.terms[name] + term if name in self.terms else term


class GraphedShards(ShardStep):
    """One try at a step on one rank, whose shards are runs of one graph."""

    def __init__(
        self, replica: Replica, ticket: Ticket, batches: Sequence[Batch], training: StepContext, graphs: StepGraphs
    ) -> None:
        super().__init__(replica, ticket, batches, training)
        self._graphs, self.graphed_update = graphs, graphs.update
        graphs.begin_shards()
        self._values = graphs.values(replica.loss_scale.scale / self.divisor.value)

    def _shard(self, shard: int, batch: Batch) -> Tensor | float:
        """Run the graph of one shard; return its weight."""
        buffers = self.replica.buffers
        self._enter("forward")
        loss_sum, weight, terms = self._graphs.add(batch, self._values)
        if buffers.names:
            buffers.end_forward(self._shard_fraction(shard))
            buffers.reset()
        self.loss_sum = loss_sum if self.loss_sum is None else self.loss_sum + loss_sum
        for name, term in zip(self.training.objective.term_names, terms, strict=True):
            self.terms[name] = self.terms[name] + term if name in self.terms else term
        self.replica.hold_grads(self._graphs.sums)
        return weight
