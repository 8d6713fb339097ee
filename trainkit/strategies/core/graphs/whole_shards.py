"""Compile loss and gradients of a shard as one graph, if a step draws no random numbers.

Keys of randomness are functions of Python around blocks, which no graph can hold: a model with keys is compiled block
by block, and its loss is eager. Without random numbers no keys are needed. This is checked in three ways: no module is
a random one of torch, a first pass shows whether a generator advances, and the first run of each graph checks it again;
if a generator advances there, the run ends.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from trainkit.numerics.batch import Ticket
from trainkit.numerics.generators import GeneratorStates
from trainkit.numerics.randomness import draws_at_random
from trainkit.objectives.base import Loss
from trainkit.strategies.base import Batch, GraphSettings, SetupRequest, StepContext
from trainkit.strategies.core.graphs.refusals import compiles_gradients
from trainkit.strategies.core.graphs.shard import ShardGradients
from trainkit.strategies.core.graphs.steps import StepGraphs
from trainkit.strategies.core.graphs.whole import UntraceableError, WholeGraph
from trainkit.strategies.core.replica import Replica
from trainkit.strategies.core.step import ShardStep, cloned_batch
from trainkit.strategies.core.synchronous import MakeStep
from trainkit.strategies.object_snapshot import ObjectSnapshot
from trainkit.strategies.tensors.layouts import in_layout

_LOG: Final = logging.getLogger(__name__)
_FEW_OPERATIONS: Final = 100_000_000
"""Floating point operations of a forward pass below which one graph of both passes is faster than two: autograd calls
the second through functions of Python, which takes about as long as this many operations.
"""


def makers_of(
    request: SetupRequest, replica: Replica, shard_step: type[ShardStep], *, is_whole: bool = True
) -> tuple[MakeStep[Replica], StepGraphs | None]:
    """Return the function that makes the steps of a replica in a compiled run, and the graphs of whole steps, if
    requested.

    Args:
        request: its `graphs` are the settings of compilation.
        replica: the replica on its devices.
        shard_step: the class of a try at a step.
        is_whole: whether the strategy calls the whole model on one device.

    Raises:
        ConfigError: a class of the strategy runs the steps, and a graph would not call it.
    """
    settings = request.graphs
    assert settings is not None
    if not is_whole:
        return shard_step, None
    if settings.covers == "step":
        return shard_step, StepGraphs.of(request, replica, shard_step)
    if shard_step is not ShardStep or not (compiles_gradients() and _may_be_whole(request)):
        return shard_step, None
    return partial(WholeShards, graph=ShardGraph(replica, request.training, settings)), None


def _may_be_whole(request: SetupRequest) -> bool:
    """Return whether the facts before the first step allow whole graphs of a shard."""
    training = request.training
    if request.optimizers or request.numerics.reproducible or type(training) is not StepContext:
        return False
    return not any(
        draws_at_random(one) or (isinstance(one, nn.Embedding | nn.EmbeddingBag) and one.sparse)
        for one in request.model.modules()
    )


class ShardGraph:
    """The compiled loss and gradients of a shard of a replica.

    Args:
        replica: a whole model on one device.
        training: provides the objective.
        settings: backend and mode of torch.compile.
    """

    def __init__(self, replica: Replica, training: StepContext, settings: GraphSettings) -> None:
        self._replica, self._training, self._settings = replica, training, settings
        self.is_whole: bool | None = None
        """Whether shards are computed by this graph; None: the first step decides."""
        self.is_joint = False
        """Whether one graph holds the forward and the backward pass, and not two."""
        self._graph: WholeGraph
        self._like = torch.zeros((), dtype=replica.precision.master_dtype, device=replica.device)

    def decide(self, work: WholeShards) -> None:
        """Run a forward pass of the first shard, and discard it; the ranks agree on its result. Collective."""
        found = self._probe(work) if work.ticket.shards else True
        ranks = self._replica.data_ranks
        if ranks.num_ranks > 1:
            found = all(bool(one.item()) for one in ranks.gather(torch.tensor([int(found)])))
            self.is_joint = all(bool(one.item()) for one in ranks.gather(torch.tensor([int(self.is_joint)])))
        self.is_whole = found
        if found:
            self._make()

    def _probe(self, work: WholeShards) -> bool:
        """Return whether the shard draws nothing, keeps no count in Python, and has no derivative of its own."""
        replica = self._replica
        before, attributes = GeneratorStates([replica.device]), ObjectSnapshot(replica.model.named_modules())
        counter = FlopCounterMode(display=False)
        replica.keys.silence(silent=True)
        try:
            with torch.compiler.set_stance("force_eager"), replica.buffers.watch(), counter:
                loss = work.first_loss()
            found = not before.moved() and not attributes.changed() and not _has_own_derivative(loss.loss_sum)
        finally:
            replica.keys.silence(silent=False)
            before.restore()
            attributes.restore()
        few = counter.get_total_flops() < _FEW_OPERATIONS
        self.is_joint = replica.device.type == "cpu" and (few or _has_channels_last(replica.model))
        return found

    def _make(self) -> None:
        replica, objective = self._replica, self._training.objective
        replica.keys.retire()

        def losses(batch: Batch) -> tuple[Tensor, Tensor | float, Tensor | None, dict[str, Tensor] | None]:
            loss = objective.loss(replica.model, batch)
            return loss.loss_sum, loss.weight, loss.extra, None if loss.terms is None else dict(loss.terms)

        joint = ShardGradients(replica, self._training, used=None, by_others=True)
        function = joint if self.is_joint else losses
        self._graph = WholeGraph(function, self._settings, replica.device, is_joint=self.is_joint)

    def run(self, *args: Any) -> Any:
        """Run the graph; None if the shard cannot be one graph: blocks are compiled then."""
        try:
            return self._graph(*args)
        except UntraceableError as error:
            self.is_whole = False
            self._replica.keys.resume()
            _LOG.warning("compile.mode: blocks are compiled, because a shard cannot be one graph: %s", error)
            return None

    def seed(self, factor: float) -> Tensor:
        """Return the start gradient of backward."""
        return self._replica.backward_seed(factor, self._like)


def _has_channels_last(model: nn.Module) -> bool:
    """Return whether a weight is channels_last: a separate backward graph would copy its gradients."""
    last = torch.channels_last
    return any(
        p.dim() == 4 and not p.is_contiguous() and p.is_contiguous(memory_format=last) for p in model.parameters()
    )


def _has_own_derivative(loss: Tensor) -> bool:
    """Return whether the graph of a loss contains a function with a backward pass in Python, such as a loss in
    chunks.
    """
    pending, seen = [loss.grad_fn], set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        if torch.autograd.function.BackwardCFunction in type(node).__mro__ and not getattr(node, "only_eager", False):
            return True
        seen.add(node)
        pending.extend(following for following, _ in node.next_functions)
    return False


class WholeShards(ShardStep):
    """One try at a step on one rank, whose shards are runs of a graph if possible."""

    def __init__(
        self, replica: Replica, ticket: Ticket, batches: Sequence[Batch], training: StepContext, *, graph: ShardGraph
    ) -> None:
        super().__init__(replica, ticket, batches, training)
        self._graph = graph
        self._held: list[Tensor | None] | None = None

    def run(self) -> Sequence[Tensor | None]:
        """Run the step like `ShardStep.run`; in the first step, decide what is compiled. Collective."""
        graph = self._graph
        if graph.is_whole is None:
            graph.decide(self)
        if graph.is_joint and graph.is_whole and self.replica.packing is None:
            with torch.compiler.set_stance("force_eager"):
                self.agree_on_grad_layout()
        return super().run()

    def first_loss(self) -> Loss:
        """Compute the loss of the first shard eagerly."""
        return super()._forward(self.ticket.shards[0], cloned_batch(self.batches[0]))

    def _forward(self, shard: int, batch: Batch) -> Loss:
        graph, replica = self._graph, self.replica
        if graph.is_whole and not graph.is_joint:
            with replica.precision.autocast(replica.device_types):
                found = graph.run(batch)
            if found is not None:
                loss_sum, weight, extra, terms = found
                return Loss(loss_sum=loss_sum, weight=weight, extra=extra, terms=terms)
        return super()._forward(shard, batch)

    def _shard(self, shard: int, batch: Batch) -> Tensor | float:
        """Compute loss and gradients of one shard; return its weight."""
        graph, replica = self._graph, self.replica
        if not (graph.is_whole and graph.is_joint):
            return super()._shard(shard, batch)
        self._enter("forward")
        found = graph.run(batch, graph.seed(replica.loss_scale.scale / self.divisor.value))
        if found is None:
            return super()._shard(shard, batch)
        loss_sum, weight, terms, grads = found
        if replica.buffers.names:
            replica.buffers.end_forward(self._shard_fraction(shard))
            replica.buffers.reset()
        self.loss_sum = loss_sum if self.loss_sum is None else self.loss_sum + loss_sum
        for name, term in zip(self.training.objective.term_names, terms, strict=True):
            self.terms[name] = self.terms[name] + term if name in self.terms else term
        self._hold(grads)
        return weight  # type: ignore[no-any-return]

    def _hold(self, grads: Sequence[Tensor | None]) -> None:
        """Add the gradients of a shard to those of the lane's earlier shards."""
        params = self.replica.trained
        if self._held is None:
            self._held = [
                grad if grad is None or grad.stride() == param.stride() else in_layout(grad, param.stride())
                for grad, param in zip(grads, params, strict=True)
            ]
        else:
            self._held = [_sum(one, other) for one, other in zip(self._held, grads, strict=True)]
        self.replica.hold_grads(self._held)

    def _take_grads(self, weight: Tensor | float) -> list[Tensor | None]:
        self._held = None
        return super()._take_grads(weight)


def _sum(total: Tensor | None, grad: Tensor | None) -> Tensor | None:
    return grad if total is None else total if grad is None else total.add_(grad)
