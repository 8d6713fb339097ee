"""Tensor parallelism: every layer of a plan is cut over the ranks of a replica, which compute each sample together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from trainkit.cluster.identity import Identity
from trainkit.errors import ConfigError, Problem
from trainkit.fields import placement
from trainkit.numerics.precision import Precision
from trainkit.numerics.randomness import draws_nothing
from trainkit.objectives.base import Collective
from trainkit.strategies.base import Facts, Numerics
from trainkit.strategies.grouped import Grouped
from trainkit.strategies.mesh import Axes
from trainkit.strategies.pieces import Pieces, assembled
from trainkit.strategies.reducers import BackendReducer, LocalReducer, Reducer
from trainkit.strategies.replica import Held, Replica
from trainkit.strategies.sharded.norms import joined_norms
from trainkit.strategies.sharded.replica import restore_pieces, sharded_pieces
from trainkit.strategies.spread import Spread
from trainkit.strategies.tensor_parallel.cutting import cut_parameters, exchange_activations
from trainkit.strategies.tensor_parallel.plans import Fitted, fitted
from trainkit.strategies.tensor_parallel.regions import Regions
from trainkit.strategies.tensor_parallel.replica import CutHeld, OnMesh, TensorReplica, begin_alike

__all__ = ["TensorParallel"]


@dataclass(frozen=True, kw_only=True)
class TensorParallel(Grouped):
    """Train replicas of which each layer is cut over `degree` ranks.

    Example:
        >>> len(TensorParallel(degree=2, replicas=2).tasks(Facts()))
        4
    """

    holds_pieces: ClassVar[bool] = True
    computes_together: ClassVar[bool] = True

    degree: Annotated[int, placement] = 1
    """Ranks that each layer of the plan is cut over; 1 cuts nothing."""
    shard: Annotated[bool, placement] = False
    """Cut what a rank holds over the replicas as well, and gather it block by block, as fsdp does."""
    plan: Annotated[Mapping[str, str] | Literal["auto"], placement] = "auto"
    """Module names, their ends or globs, each with a style (`colwise`, `rowwise` ...); `auto`: the model's own plan."""

    @property
    def ranks_a_replica(self) -> int:
        """The ranks that each layer is cut over."""
        return max(self.degree, 1)

    def problems(self, facts: Facts) -> list[Problem]:
        """Degrees that are none, and what cut layers cannot keep; `problems_with` judges the plan by the model."""
        if self.degree < 1:
            return [Problem(key="strategy.degree", value=self.degree, rule="must be 1 or more.")]
        problems = super().problems(facts)
        if facts.numerics.reproducible:
            rule = "tensor_parallel adds up parts of sums in an order of its own. Use strategy=mirrored, or false."
            problems.append(Problem(key="numerics.reproducible", value=True, rule=rule))
        if self.degree == 1 and self.plan != "auto":
            rule = "has no effect with strategy.degree=1, which cuts nothing. Use a degree of 2 or more."
            problems.append(Problem(key="strategy.plan", value=_shown(self.plan), rule=rule))
        if self.shard and not problems and self.num_replicas(facts) == 1:
            rule = "has no effect with 1 replica. Use strategy.replicas=2 or more."
            problems.append(Problem(key="strategy.shard", value=True, rule=rule))
        return problems

    def problems_with(self, model: nn.Module, facts: Facts) -> list[Problem]:  # noqa: ARG002 - the same on any host
        """What is wrong with the plan for this model."""
        return list(self._fitted(model).problems)

    def notes(self) -> tuple[str, ...]:
        """That nothing is cut."""
        if self.degree > 1:
            return ()
        return ("strategy.degree=1 cuts no layer: every replica is whole, as in strategy=mirrored.",)

    def make_reducer(self, collective: Collective, numerics: Numerics) -> Reducer:  # noqa: ARG002
        """Nothing, until `make_replica` knows the axis of the replicas."""
        return LocalReducer()

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

    def hold(self, model: nn.Module, precision: Precision, spread: Spread) -> CutHeld:
        """Leave this rank its part of each layer of the plan, and let the layers exchange what they need.

        Raises:
            ConfigError: the plan does not fit the model.
        """
        assert isinstance(spread, OnMesh)
        fit, places = self._fitted(model), spread.places
        if fit.problems:
            raise ConfigError(list(fit.problems))
        is_first = places["replicate"] == places["shard"] == 0
        cuts = cut_parameters(model, fit, place=places["tensor"], degree=self.degree, is_first=is_first)
        held = super().hold(model, precision, spread)
        if spread.mesh is not None and fit.chosen:
            regions = Regions(place=places["tensor"], devices=spread.devices, draws=not draws_nothing(held.model))
            exchange_activations(fit, spread.mesh["tensor"], regions)
        return CutHeld(model=held.model, params=held.params, masters=held.masters, cuts=cuts, spread=spread)

    def make_replica(self, held: Held, **rest: Any) -> TensorReplica:
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
        if held.spread.mesh is not None:
            replica.join_norms = joined_norms([held.cuts[name] for name in held.params], replica.device)
        return replica

    def align(self, replica: Replica) -> None:
        """Begin with the numbers of the first replica; collective."""
        assert isinstance(replica, TensorReplica)
        begin_alike(replica)

    def state(self, placed: Replica) -> dict[str, Tensor]:
        """Parameters, buffers and optimizer state, whole; collective, for models that fit on every rank."""
        return assembled(self.pieces(placed), placed.everyone)

    def pieces(self, placed: Any) -> Pieces:
        """The parts of this rank, where it is the first that holds them."""
        return sharded_pieces(placed)

    def load_state(self, placed: Any, tensors: Mapping[str, Tensor]) -> None:
        """Take this rank's parts of a checkpoint of any strategy."""
        restore_pieces(placed, tensors)

    def _fitted(self, model: nn.Module) -> Fitted:
        return fitted(model, self.plan, self.degree) if self.degree > 1 else Fitted()


def _shown(plan: Mapping[str, str] | str) -> str:
    return plan if isinstance(plan, str) else "{" + ",".join(f"{key}:{style}" for key, style in plan.items()) + "}"
