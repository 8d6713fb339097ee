"""Tensor parallelism: every layer of a plan is cut over the ranks of a replica, which compute each sample together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import nn

from trainkit.cluster.identity import Identity
from trainkit.config.values import MOST_PROCESSES, at_most
from trainkit.errors import ConfigError, Problem
from trainkit.fields import placement
from trainkit.numerics.batch import Ticket
from trainkit.numerics.drawing import draws_at_random, draws_nothing
from trainkit.numerics.precision import Precision
from trainkit.strategies.base import Numerics, PlanContext, StepContext
from trainkit.strategies.core.placement import Placement
from trainkit.strategies.core.replica import PlacedModel, Replica
from trainkit.strategies.core.step import ShardStep
from trainkit.strategies.fsdp.sharded.base import Sharded
from trainkit.strategies.fsdp.sharded.fully import Sharding, fully_sharded, gathers_anew
from trainkit.strategies.fsdp.sharded.norms import joined_norms
from trainkit.strategies.fsdp.sharded.work import ShardedWork
from trainkit.strategies.fsdp.sharded.wrap_policy import blocks_of_model, without_shared
from trainkit.strategies.groups.mesh import Axes
from trainkit.strategies.groups.process_group import ProcessGroupStrategy
from trainkit.strategies.model_transforms import Compiles
from trainkit.strategies.reducers import BackendReducer
from trainkit.strategies.tensor_parallel.activation_rng import ActivationRngRegions
from trainkit.strategies.tensor_parallel.cutting import cut_parameters, exchange_activations
from trainkit.strategies.tensor_parallel.plans import MatchedPlan, described, match_plan, shares_rng_across_ranks
from trainkit.strategies.tensor_parallel.replica import (
    CutHeld,
    OnMesh,
    TensorReplica,
    begin_alike,
    drifted_part,
    within,
)

__all__ = ["TensorParallel"]


@dataclass(frozen=True, kw_only=True)
class TensorParallel(Sharded):
    """Train replicas of which each layer is cut over `degree` ranks.

    Example:
        >>> len(TensorParallel(degree=2, replicas=2).tasks(PlanContext()))
        4
    """

    alone_as_one_device: ClassVar[bool] = True
    compiles: ClassVar[Compiles] = "nothing"

    degree: Annotated[int, placement, at_most(MOST_PROCESSES)] = 1
    """Ranks that each layer of the plan is cut over; 1 cuts nothing."""
    shard: Annotated[bool, placement] = False
    """Cut what a rank holds over the replicas as well, and gather it block by block, as fsdp does."""
    plan: Annotated[Mapping[str, str] | Literal["auto"], placement] = "auto"
    """Module names, their ends or globs, each with a style (`colwise`, `rowwise` ...); `auto`: the model's own plan."""

    @property
    def ranks_a_replica(self) -> int:
        """The ranks that each layer is cut over."""
        return max(self.degree, 1)

    def problems(self, facts: PlanContext) -> list[Problem]:
        """Degrees that are none, and what cut layers cannot keep; `problems_with` judges the plan by the model."""
        if self.degree < 1:
            return [Problem(key="strategy.degree", value=self.degree, rule="must be 1 or more.")]
        problems = super().problems(facts)
        if self.degree == 1 and self.plan != "auto":
            rule = "has no effect with strategy.degree=1, which cuts nothing. Use a degree of 2 or more."
            problems.append(Problem(key="strategy.plan", value=_plan_text(self.plan), rule=rule))
        if self.shard and not problems and self.num_replicas(facts) == 1:
            rule = "has no effect with 1 replica. Use strategy.replicas=2 or more."
            problems.append(Problem(key="strategy.shard", value=True, rule=rule))
        return problems

    def problems_with(self, model: nn.Module, facts: PlanContext) -> list[Problem]:
        """What is wrong with the plan for this model; what cannot be cut over the replicas."""
        fit = self._fitted(model)
        found = [*(fit.problems or shares_rng_across_ranks(model, fit))]
        return [*found, *(super().problems_with(model, facts) if self.shard else [])]

    def notes(self) -> tuple[str, ...]:
        """That nothing is cut."""
        if self.degree > 1:
            return ()
        return ("strategy.degree=1 cuts no layer: every replica is whole, as in strategy=mirrored.",)

    def notes_with(self, model: nn.Module) -> tuple[str, ...]:
        """Which layers are cut how, and whether what they draw is then another training's."""
        fit = self._fitted(model)
        if fit.problems or not fit.chosen:
            return ()
        whole = sum(param.numel() for name, param in model.named_parameters() if name not in fit.dims)
        count = sum(param.numel() for param in model.parameters())
        said = f"cut over {self.degree} ranks: {described(fit)}. {whole:,} of {count:,} parameters are whole on each."
        if not any(draws_at_random(module) for module in model.modules()):
            return (said,)
        return (said, "the model draws random numbers: where layers are cut, alike in distribution only.")

    def held(self, model: nn.Module, facts: PlanContext) -> dict[str, int]:
        """A part of each parameter that is cut; with `shard`, of the rows of all of them as well."""
        fit, sharers = self._fitted(model), self.num_replicas(facts) if self.shard else 1
        found = {}
        for name, param in model.named_parameters():
            dim, rows = fit.dims.get(name), param.shape[0] if param.dim() else 1
            here = rows // self.degree if dim == 0 else rows
            row = param.numel() // max(rows, 1) // (self.degree if dim else 1)
            found[name] = -(-here // sharers) * row
        return found

    def gathered(self, model: nn.Module, facts: PlanContext) -> int:
        """With `shard`: what the model itself owns, a block and the next, the gradients of one, and these as sent."""
        if not self.shard or self.num_replicas(facts) == 1:
            return 0
        fit = self._fitted(model)
        part = {id(p): p.numel() // (self.degree if name in fit.dims else 1) for name, p in model.named_parameters()}
        blocks = without_shared(model, blocks_of_model(model)).values()
        units = [sum(part[id(param)] for param in block.parameters()) for block in blocks]
        largest = max(units, default=0)
        rest = max(sum(part.values()) - sum(units), 0)
        return rest + 2 * largest + 2 * max(largest, rest)

    def gradient_copies(self, numerics: Numerics, num_replicas: int) -> int:
        """The vector that replicas exchange; none where backward sums part by part."""
        return ProcessGroupStrategy.gradient_copies(self, numerics, 1 if self.shard else num_replicas)

    def spread(self, model: nn.Module, identity: Identity, precision: Precision) -> OnMesh:  # noqa: ARG002
        """The device of this rank, and its place on the mesh; collective.

        Raises:
            ConfigError: the degrees do not make up the ranks of the run.
        """
        device = torch.device(identity.task.device)
        if identity.store is None:
            return OnMesh(device=device)
        count = identity.num_ranks // self.degree
        axes = Axes(shard=count, tensor=self.degree) if self.shard else Axes(replicate=count, tensor=self.degree)
        if problems := axes.problems(identity.num_ranks):
            raise ConfigError(problems)
        return OnMesh(device=device, axes=axes, rank=identity.task.rank, mesh=axes.mesh(device.type))

    def hold(self, model: nn.Module, precision: Precision, spread: Placement) -> CutHeld:
        """Leave this rank its part of each layer of the plan, and let the layers exchange what they need.

        Raises:
            ConfigError: the plan does not fit the model.
        """
        assert isinstance(spread, OnMesh)
        fit, places, draws = self._fitted(model), spread.places, not draws_nothing(model)
        if fit.problems:
            raise ConfigError(list(fit.problems))
        is_first = places["replicate"] == 0
        cuts = cut_parameters(model, fit, place=places["tensor"], degree=self.degree, is_first=is_first)
        hold = ProcessGroupStrategy.hold if spread.axes.shard == 1 else Sharded.hold
        held = hold(self, model, precision, spread)
        if spread.mesh is not None and fit.chosen:
            regions = ActivationRngRegions(place=places["tensor"], devices=spread.devices, draws=draws)
            exchange_activations(fit, spread.mesh["tensor"], regions)
        cuts = {name: within(cuts[name], param) for name, param in held.model.named_parameters()}
        return CutHeld(model=held.model, params=held.params, masters=held.masters, cuts=cuts, spread=spread)

    def cut(self, model: nn.Module, precision: Precision, spread: Placement) -> nn.Module:
        """Cut what is left of each layer over the replicas; collective."""
        assert isinstance(spread, OnMesh)
        assert spread.mesh is not None
        units = without_shared(model, blocks_of_model(model)).values()
        sharding = Sharding(mesh=spread.mesh["shard"], device=spread.device, precision=precision)
        return fully_sharded(model, units, sharding)

    def make_replica(self, held: PlacedModel, **rest: Any) -> TensorReplica:
        """The parts of this rank, and how gradients are summed: over the ranks that hold the same parts."""
        assert isinstance(held, CutHeld)
        if (copies := held.spread.group("replicate")) is not None:
            rest["reducer"] = BackendReducer(group=copies)
        replica = TensorReplica(
            model=held.model,
            params=held.params,
            masters=held.masters,
            cuts=held.cuts,
            owners=dict(held.model.named_parameters()),
            spread=held.spread,
            **rest,
        )
        if held.spread.axes.shard > 1:
            replica.reload = partial(gathers_anew, held.model)
        if held.spread.mesh is not None:
            replica.join_norms = joined_norms([held.cuts[name] for name in held.params], replica.device)
        return replica

    def align(self, replica: Replica) -> None:
        """Begin with the numbers of the first replica; collective."""
        assert isinstance(replica, TensorReplica)
        begin_alike(replica)

    def work(self, placed: Replica, ticket: Ticket, batches: Sequence[Any], training: StepContext) -> ShardStep:
        """What computes a ticket: together with the other replicas, where they share out the parameters."""
        assert isinstance(placed, TensorReplica)
        if (sharers := placed.spread.group("shard")) is None:
            return ProcessGroupStrategy.work(self, placed, ticket, batches, training)
        return ShardedWork(placed, ticket, batches, training, group=sharers)

    def check_replicas(self, placed: Any) -> str | None:
        """The parameter of which ranks hold the same part in different bits; collective."""
        return drifted_part(placed)

    def _fitted(self, model: nn.Module) -> MatchedPlan:
        return match_plan(model, self.plan, self.degree) if self.degree > 1 else MatchedPlan()


def _plan_text(plan: Mapping[str, str] | str) -> str:
    return plan if isinstance(plan, str) else "{" + ",".join(f"{key}:{style}" for key, style in plan.items()) + "}"
