"""Optional protocols of strategies and executors, each with the one function that uses it.

A class has a capability if it has its methods. The trainer calls the functions, which define the default without it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Protocol, runtime_checkable

from torch import nn

from trainkit.cluster.tasks import Task
from trainkit.errors import Problem
from trainkit.objectives.base import Access, needs_of
from trainkit.strategies.base import Executor, LeftOut, PlanContext, Strategy, TaskContext, Traits
from trainkit.strategies.tensors.sharded import ShardedState, TensorShard

JsonMap = Mapping[str, object]
"""A JSON object."""


@runtime_checkable
class ValidatesModel(Protocol):
    """A strategy that does not support every model."""

    def validate_model(self, model: nn.Module, context: PlanContext) -> list[Problem]:
        """Return the problems of the strategy for this model, which may be on the meta device; pure."""


def validate_model(strategy: Strategy, model: nn.Module, context: PlanContext) -> list[Problem]:
    """Return the problems of a strategy for a model; for a strategy without problems in `validate`."""
    return strategy.validate_model(model, context) if isinstance(strategy, ValidatesModel) else []


@runtime_checkable
class LimitsAccess(Protocol):
    """A strategy that cannot give an objective full access to the model."""

    def withheld(self, context: PlanContext) -> Mapping[Access, str]:
        """Return the access that an objective cannot have, each with the reason and an alternative; pure."""


def refused_access(strategy: Strategy, context: PlanContext, needs: Collection[Access]) -> tuple[Access, str] | None:
    """Return the first of these needs that a strategy does not support, with the reason; None if it supports all."""
    reasons = strategy.withheld(context) if isinstance(strategy, LimitsAccess) else {}
    return next(((access, reasons[access]) for access in Access if access in needs and access in reasons), None)


def access_problems(strategy: Strategy, context: PlanContext) -> list[Problem]:
    """Return the problem of an objective that needs access to the model that a strategy cannot give."""
    objective = context.objective
    refused = refused_access(strategy, context, () if objective is None else needs_of(objective))
    if refused is None:
        return []
    rule = f"{refused[0].value}, and {refused[1]}"
    return [Problem(key="objective", value=type(objective).__name__, rule=rule)]


@runtime_checkable
class ResolvesAtStart(Protocol):
    """A strategy with fields that depend on the model or the launch."""

    def resolve(self, build: Callable[[], nn.Module], context: PlanContext) -> Strategy:
        """Return the strategy with these fields set; `build` makes the model without its data; pure."""


def resolve(strategy: Strategy, build: Callable[[], nn.Module], context: PlanContext) -> Strategy:
    """Return the strategy with all fields set; called in each process before `setup`."""
    return strategy.resolve(build, context) if isinstance(strategy, ResolvesAtStart) else strategy


@runtime_checkable
class HasNotes(Protocol):
    """A strategy with notes for the user."""

    def notes(self, model: nn.Module) -> tuple[str, ...]:
        """Return lines for the plan and the summary; the model may be on the meta device; pure."""


def notes_of(strategy: Strategy, model: nn.Module) -> tuple[str, ...]:
    """Return the lines about a strategy for the plan and the summary."""
    return strategy.notes(model) if isinstance(strategy, HasNotes) else ()


@runtime_checkable
class ChoosesReducer(Protocol):
    """A strategy that lets the user choose how gradients are summed over replicas."""

    def sum_of_gradients(self, context: PlanContext) -> str | None:
        """Return the reducer and the compression in words; None where no key decides; pure."""


def sum_of_gradients(strategy: Strategy, context: PlanContext) -> str | None:
    """Return how a strategy sums gradients over replicas, for the summary; None where no key decides."""
    return strategy.sum_of_gradients(context) if isinstance(strategy, ChoosesReducer) else None


@runtime_checkable
class RefusesProof(Protocol):
    """A strategy that, depending on its fields, may run the same code as one device."""

    def proof_problems(self, context: PlanContext) -> list[Problem]:
        """Return why a comparison with one device would show nothing; pure."""


def proof_problems(strategy: Strategy, context: PlanContext) -> list[Problem]:
    """Return why a comparison of a strategy with one device would show nothing."""
    return strategy.proof_problems(context) if isinstance(strategy, RefusesProof) else []


@runtime_checkable
class ConditionalMaths(Protocol):
    """A strategy whose fields decide whether it trains differently from one device."""

    @property
    def changes_maths_here(self) -> bool:
        """Whether the strategy trains differently, with its current fields."""


def changes_maths_here(strategy: Strategy) -> bool:
    """Return whether a strategy, with its current fields, trains differently from one device."""
    return strategy.changes_maths_here if isinstance(strategy, ConditionalMaths) else strategy.changes_maths


@runtime_checkable
class UpdatesAsynchronously(Protocol):
    """A strategy that may apply gradients as they arrive."""

    @property
    def is_asynchronous(self) -> bool:
        """Whether updates are asynchronous with the current fields: the loss of a step then belongs to parameters of
        earlier updates.
        """


def is_asynchronous(strategy: Strategy) -> bool:
    """Return whether a strategy, with its current fields, applies gradients as they arrive."""
    return isinstance(strategy, UpdatesAsynchronously) and strategy.is_asynchronous


@runtime_checkable
class ConditionalTraits(Protocol):
    """A strategy whose fields decide some of its properties."""

    @property
    def traits_here(self) -> Traits:
        """The properties of the strategy with its current fields."""


def traits_here(strategy: Strategy) -> Traits:
    """Return the properties of a strategy with its current fields."""
    return strategy.traits_here if isinstance(strategy, ConditionalTraits) else strategy.traits


@runtime_checkable
class PrefersManyShards(Protocol):
    """A strategy whose replicas need several shards of a step to be busy."""

    @property
    def default_shards_per_replica(self) -> int:
        """Shards of a step per replica, if the config does not set the cut of a step."""


def default_shards_per_replica(strategy: Strategy) -> int:
    """Return the shards of a step that keep a replica busy."""
    return strategy.default_shards_per_replica if isinstance(strategy, PrefersManyShards) else 1


@runtime_checkable
class RunsAuxiliaryTasks(Protocol):
    """A strategy with tasks that do not run the training loop."""

    def runs_loop(self, task: Task) -> bool:
        """Return whether a task runs the training loop; rank 0 does; pure."""

    def restarts_alone(self, task: Task) -> bool:
        """Return whether a task that dies is restarted while the others continue, and then rejoins them; pure."""

    def run_auxiliary(self, context: TaskContext) -> None:
        """Run a task without a loop, until rank 0 ends it.

        Raises:
            ConnectionError: rank 0 has ended.
        """


def runs_loop(strategy: Strategy, task: Task) -> bool:
    """Return whether a task runs the training loop."""
    return strategy.runs_loop(task) if isinstance(strategy, RunsAuxiliaryTasks) else True


def restarts_alone(strategy: Strategy, task: Task) -> bool:
    """Return whether a task that dies is restarted while the others continue."""
    return isinstance(strategy, RunsAuxiliaryTasks) and strategy.restarts_alone(task)


def run_auxiliary(strategy: Strategy, context: TaskContext) -> None:
    """Run a task that does not run the loop."""
    if not isinstance(strategy, RunsAuxiliaryTasks):
        raise NotImplementedError(f"{type(strategy).__name__} has no auxiliary tasks")
    strategy.run_auxiliary(context)


@runtime_checkable
class PeriodicSync(Protocol):
    """A strategy whose replicas differ between some steps."""

    def next_sync_step(self, step: int) -> int:
        """Return the first step >= `step` at which replicas hold identical parameters; pure."""


def next_sync_step(strategy: Strategy, step: int) -> int:
    """Return the first step >= `step` at which a run may be evaluated, saved and stopped."""
    return strategy.next_sync_step(step) if isinstance(strategy, PeriodicSync) else step


# Capabilities of executors.


@runtime_checkable
class Syncs(Protocol):
    """An executor whose replica may differ from the others when the training ends."""

    def sync(self) -> tuple[LeftOut, ...]:
        """Make the replicas identical; collective.

        Returns:
            The skipped steps that no outcome has reported.
        """


def sync(executor: Executor) -> tuple[LeftOut, ...]:
    """Make the replicas identical at the end of a training; collective."""
    return executor.sync() if isinstance(executor, Syncs) else ()


@runtime_checkable
class ShardsState(Protocol):
    """An executor whose rank holds only a part of the state."""

    def sharded_state_dict(self) -> ShardedState:
        """Return the shards that this rank writes into a checkpoint; each part of a tensor is written by one rank."""


def sharded_state_dict(executor: Executor) -> ShardedState:
    """Return the shards that this rank writes into a checkpoint: the whole state on rank 0, unless it is sharded."""
    if isinstance(executor, ShardsState):
        return executor.sharded_state_dict()
    if not executor.local.is_rank0:
        return {}
    return {name: (TensorShard.whole(tensor),) for name, tensor in executor.state_dict().items()}


@runtime_checkable
class KeepsExtraState(Protocol):
    """An executor with state other than tensors, so that a resumed run makes the same choices."""

    def state_dict_extra(self) -> JsonMap:
        """Return this state for a checkpoint; JSON."""

    def load_state_extra(self, extra: JsonMap) -> None:
        """Restore what `state_dict_extra` returned; before `tune`.

        Raises:
            ValueError: the state is malformed.
        """


def state_dict_extra(executor: Executor) -> JsonMap:
    """Return the state of an executor other than tensors for a checkpoint; JSON."""
    return executor.state_dict_extra() if isinstance(executor, KeepsExtraState) else {}


def load_state_extra(executor: Executor, extra: JsonMap) -> None:
    """Restore what `state_dict_extra` returned."""
    if isinstance(executor, KeepsExtraState):
        executor.load_state_extra(extra)


@runtime_checkable
class Tunes(Protocol):
    """An executor that makes choices by measuring."""

    def tune(self) -> tuple[str, ...]:
        """Choose, before the first step and after a checkpoint was restored; collective.

        Returns:
            Lines for the summary about the choice and its reason.
        """


def tune(executor: Executor) -> tuple[str, ...]:
    """Let an executor make its choices by measuring; returns lines for the summary; collective."""
    return executor.tune() if isinstance(executor, Tunes) else ()


@runtime_checkable
class Recovers(Protocol):
    """An executor that may undo a step that an error has interrupted."""

    def recover(self, step: int) -> bool:
        """Restore the state after `step` updates, without another rank; return whether that was possible.

        It is impossible if the state is uncertain: an update had begun, or other ranks hold a part of it.
        """


def recover(executor: Executor, step: int) -> bool:
    """Restore the state at the end of the last complete step after an error; returns whether that was possible."""
    return isinstance(executor, Recovers) and executor.recover(step)


@runtime_checkable
class RefreshesModel(Protocol):
    """An executor whose local model lags behind the trained one."""

    def refresh_model(self) -> None:
        """Bring the local model up to date."""


def refresh_model(executor: Executor) -> None:
    """Bring the local model up to date, before it is evaluated or sampled from."""
    if isinstance(executor, RefreshesModel):
        executor.refresh_model()


@runtime_checkable
class SwapsAverages(Protocol):
    """An executor that can compute with the averages of its parameters."""

    def swap_averages(self) -> bool:
        """Exchange the parameters of the local model and their averages, a second call undoes this exactly.

        Returns:
            Whether there are averages on this rank.
        """


def swap_averages(executor: Executor) -> bool:
    """Exchange the parameters of the local model and their averages; return whether there are averages here."""
    return isinstance(executor, SwapsAverages) and executor.swap_averages()


@runtime_checkable
class ReportsResult(Protocol):
    """An executor that adds keys to result.json."""

    def result_extra(self) -> JsonMap:
        """Return the keys and values to add; JSON."""


def result_extra(executor: Executor) -> JsonMap:
    """Return the keys that an executor adds to result.json."""
    return executor.result_extra() if isinstance(executor, ReportsResult) else {}


@runtime_checkable
class ChecksReplicas(Protocol):
    """An executor whose parameters other ranks hold as well."""

    def check_replicas(self) -> str | None:
        """Return the parameter in which replicas differ, with the ranks; None if all are equal. Collective."""


def check_replicas(executor: Executor) -> str | None:
    """Return the parameter in which replicas differ, with the ranks that do; collective."""
    return executor.check_replicas() if isinstance(executor, ChecksReplicas) else None


@runtime_checkable
class ChecksModel(Protocol):
    """An executor that checks before each step whether code outside of the steps has changed what a step reads."""

    def expect_unchanged(self) -> None:
        """Leave the check before the next step out: since the last step, only code of the trainer has run."""


def unchanged_listener(executor: Executor, *, checks_always: bool) -> Callable[[], None]:
    """Return the function that tells an executor to leave out a check; it does nothing if each step is checked."""
    return executor.expect_unchanged if isinstance(executor, ChecksModel) and not checks_always else lambda: None
