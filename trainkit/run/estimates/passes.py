"""The passes of a run that its plan traces on tensors without data: a shard of a step, and a batch of an evaluation."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from trainkit.data.splits import size_of, test_splits, validation_splits
from trainkit.numerics.generators import Untouched
from trainkit.objectives.base import Access, Loss, Model, Objective
from trainkit.run.estimates.activations import Timeline, TracedPass
from trainkit.run.planning.build import model_transforms_of
from trainkit.run.planning.optimizers import assigned_parameters
from trainkit.run.planning.plan import RunPlan
from trainkit.strategies.base import PlannedShard, ReplicaPart
from trainkit.strategies.model_transforms import recomputed_modules
from trainkit.trained.build import frozen_models


class NoSampleError(Exception):
    """No sample of the data is known."""


def example_batch(plan: RunPlan, size: int | None = None) -> Any:
    """Return a batch, made of one repeated sample.

    Args:
        plan: the run.
        size: the number of samples; None: that of the largest shard.

    Raises:
        NoSampleError: no sample of the training data is known.
    """
    sample = plan.components.sample
    if sample is None:
        raise NoSampleError("no sample of the data is known")
    size = plan.batch.shard_size(0, 0) if size is None else size
    with Untouched(seed=0):
        return plan.components.hooks.collate_function([sample] * size, list(range(size)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """The timeline of forward and backward of a shard."""

    timeline: Timeline
    share: float = 1.0
    """The share of the parameters that get gradients."""
    place: int | None = None
    """The place of a device in the timeline; None: one device has all of it."""
    of_rank: bool = False
    """Whether it has exactly the tensors of one rank: gathered parameters, and shards of gradients."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A shard of a step."""

    plan: RunPlan
    model: nn.Module
    parts: Sequence[ReplicaPart]
    shards: int
    """The shards that the replica computes."""
    beside: AbstractContextManager[object]
    """Context manager around forward and backward."""

    def lines(self) -> list[list[Line]]:
        """Return the lines of each part: one for each phase of the objective."""
        plan, batch = self.plan, example_batch(self.plan)
        objective = own_copy(plan.components.objective)
        traced = self._traced(batch, objective.loss)
        if not objective.phases:
            return self._of_parts([(1.0, traced)])
        sizes = {name: param.numel() for name, param in self.model.named_parameters() if param.requires_grad}
        phases = []
        for phase, names in assigned_parameters(self.model, plan.optimizers).items():
            share = sum(sizes[name] for name in names) / sum(sizes.values())
            loss = partial(objective.phase_loss, phase)
            phases.append((share, replace(traced, loss=loss, updated=frozenset(names))))
        return self._of_parts(phases)

    def _traced(self, batch: Any, loss: Callable[[Model, Any], Loss]) -> TracedPass:
        """Return the traced pass of a whole replica."""
        model, precision = self.model, self.plan.components.precision
        return TracedPass(
            model=model,
            batch=batch,
            loss=loss,
            precision=precision,
            recomputed=recomputed_names(self.plan, model),
            selective=self.plan.cfg.activation_checkpointing == "selective",
            places=_places(self.parts),
            accumulates=self.shards > 1 and precision.model_dtype is precision.master_dtype and not self._has_vector,
            beside=self.beside,
        )

    @property
    def _has_vector(self) -> bool:
        """Whether gradients outlive a step: then the backward pass of the first shard has the peak."""
        return any(part.memory.bucket is not None for part in self.parts)

    def _of_parts(self, phases: Sequence[tuple[float, TracedPass]]) -> list[list[Line]]:
        found: list[list[Line]] = [[] for _ in self.parts]
        strategy = self.plan.components.strategy
        for share, whole in phases:
            shard = PlannedShard(batch=whole.batch, count=self.shards)
            passes = strategy.rank_passes(self.model, self.plan.context, shard)
            for lines, one in zip(found, passes, strict=False):
                lines.append(Line(timeline=replace(whole, rank=one, places={}).run(), share=share, of_rank=True))
            if not passes:
                timeline, several = whole.run(), len(self.parts) > 1
                for place, lines in enumerate(found):
                    lines.append(Line(timeline=timeline, share=share, place=place if several else None))
        return found


@dataclass(frozen=True, kw_only=True)
class EvaluatedBatch:
    """The largest batch of the evaluations of a run."""

    plan: RunPlan
    model: nn.Module
    parts: Sequence[ReplicaPart]

    def lines(self) -> list[Line]:
        """Return the line of each part; none if the run evaluates nothing, or in a pipeline, whose ranks send tensors
        to each other.
        """
        plan, size = self.plan, evaluated_samples(self.plan)
        if not size or any(part.received for part in self.parts):
            return []
        objective = own_copy(plan.components.objective)
        whole = TracedPass(
            model=self.model,
            batch=example_batch(plan, size),
            loss=objective.loss,
            precision=plan.components.precision,
            places=_places(self.parts),
        )
        gradients = Access.derivatives in objective.needs
        shard = PlannedShard(batch=whole.batch, count=1)
        passes = plan.components.strategy.rank_passes(self.model, plan.context, shard)
        found = [replace(whole, rank=one, places={}).run_evaluation(gradients=gradients) for one in passes]
        if found:
            return [Line(timeline=timeline, of_rank=True) for timeline in found]
        timeline, several = whole.run_evaluation(gradients=gradients), len(self.parts) > 1
        return [Line(timeline=timeline, place=place if several else None) for place in range(len(self.parts))]


def evaluated_samples(plan: RunPlan) -> int:
    """Return the samples of the largest batch of an evaluation; 0 if the run evaluates nothing."""
    datasets = plan.components.datasets
    names = [] if plan.is_measurement else [*validation_splits(datasets), *test_splits(datasets)]
    return max((min(size_of(datasets[name]), plan.eval_batch_size) for name in names), default=0)


def _places(parts: Sequence[ReplicaPart]) -> dict[str, int]:
    """Return the place of each module whose device is known: name -> number of the part."""
    return {name: place for place, part in enumerate(parts) for name in part.modules}


def batch_bytes(plan: RunPlan) -> int:
    """Return the bytes of the batch of the largest shard."""
    leaves = tree_iter(example_batch(plan))
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves if isinstance(leaf, Tensor))


def own_copy(objective: Objective) -> Objective:
    """Return a copy whose state a pass without data may change; frozen models are shared."""
    return copy.deepcopy(objective, {id(model): model for _, model in frozen_models(objective)})


def recomputed_names(plan: RunPlan, model: nn.Module) -> list[str]:
    """Return the names of the modules that backward recomputes."""
    chosen = {id(module) for module in recomputed_modules(model, model_transforms_of(plan.cfg))}
    return [name for name, module in model.named_modules() if id(module) in chosen]
