"""Compile loss and gradients of a shard as one graph, if a step draws no random numbers.

Keys of randomness are functions of Python around blocks, which no graph can hold: a model with keys is compiled block
by block, and its loss is eager. Without random numbers no keys are needed. This is checked in three ways: the modules
are inspected, a first pass shows whether a generator advances, and the first run of each graph checks it again; if a
generator advances there, the run ends.

`compile.mode=default` compiles blocks where this is not possible, and `step` refuses the training.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from trainkit.errors import ConfigError, Problem, TrainingError
from trainkit.numerics.batch import Ticket
from trainkit.numerics.generators import GeneratorStates
from trainkit.numerics.randomness import draws_at_random
from trainkit.objectives.base import Access, Loss, needs_of
from trainkit.strategies.base import Batch, Facts, PlanContext, SetupRequest, StepContext
from trainkit.strategies.core.graphs.captured import CapturingCaller, CudaCapture
from trainkit.strategies.core.graphs.whole import DirectCall, UntraceableError, WholeGraph, refuse_draws
from trainkit.strategies.core.replica import Replica
from trainkit.strategies.core.step import MakeStep, ShardStep, cloned_batch
from trainkit.strategies.model_transforms import ModelTransforms
from trainkit.strategies.object_snapshot import ObjectSnapshot
from trainkit.strategies.tensors.layouts import in_layout

_DEFAULT = "Use compile.mode=default."
_SPARSE = "has no graph of sparse gradients. Use sparse=False, or compile.mode=default."


def step_problems(
    model: nn.Module,
    transforms: ModelTransforms,
    context: PlanContext,
    *,
    facts: Facts,
    strategy: str,
    device: str = "cpu",
) -> list[Problem]:
    """Return why the steps of a training cannot be graphs; none if `compile.mode` is not `step`.

    Args:
        model: the model, possibly without data.
        transforms: the requested transforms.
        context: optimizer, objective and `numerics` settings.
        facts: facts of the strategy.
        strategy: the name of the strategy, for the message.
        device: the device of the first replica.
    """
    if transforms.compile_mode != "step":
        return []
    rules, objective = list[str](), context.objective
    if not facts.compiles_step:
        other = "Leave it out" if facts.compiles == "nothing" else "Use compile.mode=default"
        rules.append(f"{strategy} does not run steps as graphs. {other}, or use strategy=mirrored.")
    if not compiles_gradients():
        rules.append(f"needs torch 2.11 or newer, which compiles torch.autograd.grad. {_DEFAULT}")
    if context.numerics.reproducible:
        rules.append(f"does not work with numerics.reproducible=true, whose order of summation is fixed. {_DEFAULT}")
    if context.optimizers:
        rules.append(f"supports one update per step, and with optimizers there may be several. {_DEFAULT}")
    if objective is not None and Access.derivatives in needs_of(objective):
        rules.append(f"has no graph of {type(objective).__name__}, which {Access.derivatives.value}. {_DEFAULT}")
    rules += _model_rules(model)
    problems = [Problem(key="compile.mode", value="step", rule=rule) for rule in rules]
    if transforms.cuda_graphs and not device.startswith("cuda"):
        rule = f"is for CUDA devices, and this run is on {device}. Leave it out."
        problems.append(Problem(key="compile.cuda_graphs", value=True, rule=rule))
    return problems


def shard_problems(model: nn.Module, *, has_drawn: bool) -> list[Problem]:
    """Return what a shard that was run shows, and the modules of the model do not: why its steps cannot be graphs.

    Args:
        model: the model, with the gradients of the shard.
        has_drawn: whether the shard has drawn random numbers.
    """
    if any(_model_rules(model)):
        return []  # `step_problems` names the module
    sparse = any(param.grad is not None and param.grad.is_sparse for param in model.parameters())
    drawn = f"the model or the objective draws random numbers, which have no key inside of a graph. {_DEFAULT}"
    rules = [*([drawn] if has_drawn else ()), *([_SPARSE] if sparse else ())]
    return [Problem(key="compile.mode", value="step", rule=rule) for rule in rules]


def compiles_gradients() -> bool:
    """Return whether this torch compiles `torch.autograd.grad`, as from 2.11 on."""
    from torch._dynamo import config  # noqa: PLC0415 - slow to import, and most runs compile nothing

    return hasattr(config, "trace_autograd_ops")


def _model_rules(model: nn.Module) -> Iterator[str]:
    drawing = next((name for name, module in model.named_modules() if draws_at_random(module)), None)
    if drawing is not None:
        kind = type(model.get_submodule(drawing)).__name__
        yield f"the model draws random numbers ({drawing}: {kind}), which have no key inside of a graph. {_DEFAULT}"
    tables = (module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag))
    if any(table.sparse for table in tables):
        yield _SPARSE


_LOG: Final = logging.getLogger(__name__)
_FEW_OPERATIONS: Final = 100_000_000
"""Floating point operations of a forward pass below which one graph of both passes is faster than two: autograd calls
the second through functions of Python, which takes about as long as this many operations.
"""


def makers_of(
    request: SetupRequest, replica: Replica, shard_step: type[ShardStep], *, is_whole: bool = True
) -> tuple[MakeStep[Replica], ShardGraphs | None]:
    """Return the function that makes the steps of a replica, and their graphs, if the run compiles any.

    Args:
        request: its `graphs` are the settings of compilation.
        replica: the replica on its devices.
        shard_step: the class of a try at a step.
        is_whole: whether the strategy calls the whole model on one device.

    Raises:
        ConfigError: a class of the strategy runs the steps, and a graph would not call it.
    """
    settings, training = request.graphs, request.training
    if settings is None or not is_whole:
        return shard_step, None
    if settings.covers == "step" and shard_step is not ShardStep:
        rule = f"{shard_step.__name__} runs the steps of this strategy, and a graph would not call it. Leave it out."
        raise ConfigError([Problem(key="compile.mode", value="step", rule=rule)])
    if settings.covers == "shard" and (
        shard_step is not ShardStep
        or not compiles_gradients()
        or request.optimizers
        or request.numerics.reproducible
        or type(training) is not StepContext
        or any(_model_rules(request.model))
    ):
        return shard_step, None
    graphs = ShardGraphs(request, replica)
    return partial(GraphedShards, graphs=graphs), graphs


class ShardGraphs:
    """The compiled shards of a replica.

    Args:
        request: the settings of compilation, and the training.
        replica: a whole model on one device.
    """

    def __init__(self, request: SetupRequest, replica: Replica) -> None:
        assert request.graphs is not None
        self._replica, self._training, self._settings = replica, request.training, request.graphs
        self.is_whole: bool | None = None
        """Whether shards are computed by graphs; None: the first step decides."""
        self.is_joint = False
        """Whether one graph holds the forward and the backward pass, and not two."""
        self._graph: WholeGraph
        self._unchanged = False
        self._pool = torch.cuda.graph_pool_handle() if request.graphs.cuda_graphs else None
        self._like = torch.zeros((), dtype=replica.precision.master_dtype, device=replica.device)

    def expect_unchanged(self) -> None:
        """Run the next step without guards: since the last one, only code of the trainer has run."""
        self._unchanged = True

    def end_step(self) -> None:
        """Check the next step by guards, unless `expect_unchanged` is called before it."""
        self._unchanged = False

    def decide(self, work: GraphedShards) -> None:
        """Run a forward pass of the first shard, and discard it; the ranks agree on its result. Collective.

        Raises:
            TrainingError: with `compile.mode=step`, the pass has drawn random numbers.
        """
        replica, is_step = self._replica, self._settings.covers == "step"
        whole, joint = True, True
        if work.ticket.shards:
            before, attributes = GeneratorStates([replica.device]), ObjectSnapshot(replica.model.named_modules())
            counter = FlopCounterMode(display=False)
            replica.keys.silence(silent=True)
            try:
                with torch.compiler.set_stance("force_eager"), replica.buffers.watch(), counter:
                    loss = work.first_loss()
                drawn = before.moved()
                whole = is_step or not (drawn or attributes.changed() or _has_own_derivative(loss.loss_sum))
            finally:
                replica.keys.silence(silent=False)
                before.restore()
                attributes.restore()
            if is_step and drawn:
                refuse_draws(self._settings.key, None)
            few = counter.get_total_flops() < _FEW_OPERATIONS
            joint = is_step or (replica.device.type == "cpu" and (few or _has_channels_last(replica.model)))
        if replica.data_ranks.num_ranks > 1:
            votes = torch.stack(replica.data_ranks.gather(torch.tensor([int(whole), int(joint)])))
            whole, joint = votes.bool().all(0).tolist()
        self.is_whole, self.is_joint = whole, joint
        if not whole:
            return
        replica.keys.retire()
        if joint:
            caller = DirectCall.__call__ if self._pool is None else CapturingCaller(partial(CudaCapture, self._pool))
            gradients = gradients_of(replica, self._training)
            self._graph = WholeGraph(gradients, self._settings, replica.device, is_joint=True, call=caller)
        else:
            objective, names = self._training.objective, self._training.objective.term_names

            def losses(batch: Batch) -> tuple[Any, ...]:
                loss = objective.loss(replica.model, batch)
                return loss.loss_sum, loss.weight, loss.extra, *((loss.terms or {})[name] for name in names)

            self._graph = WholeGraph(losses, self._settings, replica.device, is_joint=False)

    def shard(self, batch: Batch, *factors: float) -> Sequence[Any] | None:
        """Run the graph of a shard: of its loss, or with a factor of their sum, of its loss and gradients.

        None if the shard cannot be one graph: blocks are compiled then.

        Raises:
            TrainingError: with `compile.mode=step`, the shard cannot be one graph.
        """
        keys = self._replica.keys
        keys.silence(silent=True)
        try:
            seeds = (self._replica.backward_seed(factor, self._like) for factor in factors)
            return self._graph(batch, *seeds, unchanged=self._unchanged and self.is_joint)
        except UntraceableError as error:
            if self._settings.covers == "step":
                rule = f"this step cannot be one graph: {error}. Use compile.mode=default."
                raise TrainingError(f"compile.mode=step: {rule}") from error
            self.is_whole = False
            keys.resume()
            _LOG.warning("compile.mode: blocks are compiled, because a shard cannot be one graph: %s", error)
            return None
        finally:
            keys.silence(silent=False)


def gradients_of(replica: Replica, training: StepContext) -> Callable[[Batch, Tensor], tuple[Any, ...]]:
    """Return a function of a collated shard and the () start gradient of backward that torch.compile traces whole.

    It returns loss, weight and terms, and the gradients in the masters' dtype: None for a parameter without.
    """
    model, params, objective, precision = replica.model, replica.trained, training.objective, replica.precision
    names, dtype, device_type = tuple(objective.term_names), precision.master_dtype, replica.device.type
    autocast = None if precision.compute_dtype is precision.model_dtype else precision.compute_dtype

    def gradients(batch: Batch, seed: Tensor) -> tuple[Any, ...]:
        with nullcontext() if autocast is None else torch.autocast(device_type, dtype=autocast):
            loss = objective.loss(model, batch)
        total = loss.total
        grads = torch.autograd.grad(total, params, seed.to(total.dtype), allow_unused=True)
        terms: Any = loss.terms or {}
        weight = loss.weight.detach() if isinstance(loss.weight, Tensor) else loss.weight
        scores = loss.loss_sum.detach(), weight, *(terms[name].detach() for name in names)
        return *scores, *(None if grad is None else grad.to(dtype) for grad in grads)

    return gradients


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
    pending, visited = [loss.grad_fn], set()
    while pending:
        node = pending.pop()
        if node is None or node in visited:
            continue
        if torch.autograd.function.BackwardCFunction in type(node).__mro__ and not getattr(node, "only_eager", False):
            return True
        visited.add(node)
        pending.extend(following for following, _ in node.next_functions)
    return False


class GraphedShards(ShardStep):
    """One try at a step on one rank, whose shards are runs of a graph if possible."""

    def __init__(
        self, replica: Replica, ticket: Ticket, batches: Sequence[Batch], training: StepContext, *, graphs: ShardGraphs
    ) -> None:
        super().__init__(replica, ticket, batches, training)
        self._graphs = graphs

    def run(self) -> Sequence[Tensor | None]:
        """Run the step like `ShardStep.run`; in the first step, decide what is compiled. Collective."""
        graphs = self._graphs
        if graphs.is_whole is None:
            graphs.decide(self)
        if graphs.is_joint and graphs.is_whole and self.replica.packing is None:
            with torch.compiler.set_stance("force_eager"):
                self.agree_on_grad_layout()
        try:
            return super().run()
        finally:
            graphs.end_step()

    def first_loss(self) -> Loss:
        """Run the first shard, and return its loss."""
        return self._forward(self.ticket.shards[0], cloned_batch(self.batches[0]))

    def _forward(self, shard: int, batch: Batch) -> Loss:
        graphs, replica = self._graphs, self.replica
        if graphs.is_whole and not graphs.is_joint:
            with replica.autocast():
                results = graphs.shard(batch)
            if results is not None:
                loss_sum, weight, extra, *terms = results
                named = dict(zip(self.training.objective.term_names, terms, strict=True))
                return Loss(loss_sum=loss_sum, weight=weight, extra=extra, terms=named or None)
        return super()._forward(shard, batch)

    def _shard(self, shard: int, batch: Batch) -> Tensor | float:
        """Compute loss and gradients of one shard; return its weight."""
        graphs, replica = self._graphs, self.replica
        if not (graphs.is_whole and graphs.is_joint):
            return super()._shard(shard, batch)
        self._enter("forward")
        results = graphs.shard(batch, replica.loss_scale.scale / self.divisor.value)
        if results is None:
            if self._lane_grads is not None:  # of earlier shards
                replica.hold_grads(self._lane_grads)
                self._lane_grads = None
            return super()._shard(shard, batch)
        names, params = self.training.objective.term_names, replica.trained
        (loss_sum, weight), terms, grads = results[:2], results[2 : 2 + len(names)], results[2 + len(names) :]
        if replica.buffers.names:
            replica.buffers.end_forward(self._shard_fraction(shard))
            replica.buffers.reset()
        self.loss_sum = loss_sum if self.loss_sum is None else self.loss_sum + loss_sum
        for name, term in zip(names, terms, strict=True):
            self.terms[name] = self.terms[name] + term if name in self.terms else term
        if self._lane_grads is None:  # of a lane's first shard
            self._lane_grads = [
                grad if grad is None or grad.stride() == param.stride() else in_layout(grad, param.stride())
                for grad, param in zip(grads, params, strict=True)
            ]
        else:
            self._lane_grads = [
                grad if total is None else total if grad is None else total.add_(grad)
                for total, grad in zip(self._lane_grads, grads, strict=True)
            ]
        return weight  # type: ignore[no-any-return]
