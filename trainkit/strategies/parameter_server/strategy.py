"""The parameter server as a strategy: tasks chief, worker, ps and evaluator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from trainkit.cluster.identity import Identity
from trainkit.cluster.tasks import Task
from trainkit.config.values import MOST_PROCESSES, above, at_least, at_most
from trainkit.errors import Problem
from trainkit.fields import maths, placement
from trainkit.numerics.batch import BatchPlan
from trainkit.numerics.precision import Precision
from trainkit.objectives.base import Collective
from trainkit.strategies.base import (
    Numerics,
    Placed,
    PlanContext,
    StepContext,
    StepCounter,
    StepOutcome,
    TaskContext,
    Ticket,
)
from trainkit.strategies.core.synchronous import Synchronous
from trainkit.strategies.groups.collective import LocalCollective
from trainkit.strategies.model_transforms import Compiles
from trainkit.strategies.parameter_server.coordinator.staleness import Staleness
from trainkit.strategies.parameter_server.coordinator.state import CoordinatorState
from trainkit.strategies.parameter_server.settings import PsSettings, run_server, run_worker
from trainkit.strategies.parameter_server.validation import limits
from trainkit.strategies.parameter_server.wire.variable_shards import VariableShards, split_problems
from trainkit.strategies.parameter_server.wire.variables import variables_of
from trainkit.strategies.parameter_server.worker.sparse_embeddings import sparse_tables
from trainkit.strategies.reducers import LocalReducer, Reducer

__all__ = ["ParameterServer"]

_ACCEPT = Staleness()


@dataclass(frozen=True, kw_only=True)
class ParameterServer(Synchronous):
    """Keep the variables on servers, and let workers come and go.

    The chief orders: it hands out tickets, and says which gradients make the next update; it works itself, on a thread
    of its own. Workers pull the variables, compute, and push gradients. Servers hold a share of the variables each,
    balanced by bytes, with its part of the optimizer. In `sync` a ticket is a shard of a step, for whoever is free, and
    the training is that of one device, to the bit where `numerics.reproducible` says so; in `async` it is a whole step,
    and every gradient is an update of its own when it comes: another training, which depends on who is faster.

    Example:
        >>> [str(task) for task in ParameterServer(workers=2, servers=1, evaluator=True).tasks(PlanContext())]
        ['chief:0', 'worker:0', 'ps:0', 'evaluator:0']

    Source: Dean et al. 2012, Large Scale Distributed Deep Networks; Li et al. 2014, Scaling Distributed Machine
    Learning with the Parameter Server; Chen et al. 2016, arXiv:1604.00981; tf.distribute.ParameterServerStrategy.
    """

    named: ClassVar[str] = "parameter_server"
    compiles: ClassVar[Compiles] = "nothing"

    workers: Annotated[int | Literal["auto"], at_least(1), at_most(MOST_PROCESSES), placement] = "auto"
    """Processes that compute, the chief among them; auto: 2, or those that a cluster names."""
    devices_per_worker: Annotated[int, at_least(1), at_most(MOST_PROCESSES), placement] = 1
    """Devices that a worker computes with: GPUs, or threads on the CPU; what they add up to is pushed once."""
    servers: Annotated[int | Literal["auto"], at_least(1), at_most(MOST_PROCESSES), placement] = "auto"
    """Processes that hold variables; auto: 1, or those that a cluster names."""
    evaluator: Annotated[bool, placement] = False
    """Whether a process more evaluates each checkpoint beside training."""
    mode: Annotated[Literal["sync", "async"], maths(neutral="sync")] = "sync"
    """`sync`: one update of all gradients of a step; `async`: an update a gradient, when it comes."""
    spare_replicas: Annotated[int, at_least(0), placement] = 0
    """`sync`: workers, among `workers`, that a step need not wait for."""
    spare_mode: Annotated[Literal["duplicate", "replace"], maths(neutral="duplicate")] = "duplicate"
    """What spares do: `duplicate` outstanding shards, or `replace` them by shards of the steps to come."""
    staleness: Annotated[Staleness, maths] = _ACCEPT
    """`async`: what is done about gradients of variables that were updated meanwhile."""
    warmup_steps: Annotated[int, at_least(0), maths(neutral=0)] = 0
    """`async`: updates at the beginning in which one gradient at a time is computed."""
    transfer: Annotated[Literal["full", "bf16"], maths(neutral="full")] = "full"
    """Variables and gradients on the wire as they are, or as bfloat16: half the bytes, and another result."""
    replay: Annotated[str | None, maths(neutral=None)] = None
    """A run folder, whose updates are made again in its order, of the same gradients."""
    timeout_s: Annotated[float, above(0), placement] = 600.0
    """Seconds that tasks wait for each other, and that a worker has for an errand."""

    @property
    def is_another_training(self) -> bool:
        """In `async`, unless one worker is alone; where shards of several steps are mixed, or numbers are rounded."""
        mixes = self.spare_mode == "replace" and self.spare_replicas > 0
        return (self.mode == "async" and self.workers != 1) or mixes or self.transfer != "full"

    def problems(self, facts: PlanContext) -> list[Problem]:
        """What does not go together."""
        return limits(self, facts)

    def problems_with(self, model: nn.Module, facts: PlanContext) -> list[Problem]:
        """An optimizer that is not elementwise, where a variable would be cut by rows."""
        precision = Precision(value=facts.precision)  # type: ignore[arg-type]
        found = split_problems(
            VariableShards(variables_of(model, precision.master_dtype), self.num_servers(facts)), facts
        )
        if self.replay is not None and self.mode == "async" and sparse_tables(model):
            rule = "cannot be to the bit: the rows of sparse tables are read when they are looked up. Leave it out."
            found.append(Problem(key="strategy.replay", value=self.replay, rule=rule))
        return found

    def decided(self, build: Callable[[], nn.Module], facts: PlanContext) -> ParameterServer:  # noqa: ARG002 - no model needed
        """With the numbers of tasks that a launch has."""
        return replace(self, workers=self.num_workers(facts), servers=self.num_servers(facts))

    def notes(self) -> tuple[str, ...]:
        """That it is another training, where it is."""
        if not self.is_another_training:
            return ()
        why = {
            "the gradients of several workers are applied as they come": self.mode == "async",
            "the first shards that come make a step": self.spare_mode == "replace" and self.spare_replicas > 0,
            "numbers travel as bfloat16": self.transfer != "full",
        }
        said = ", ".join(text for text, holds in why.items() if holds)
        return (f"parameter_server: {said}: another training than that of one device.",)

    def num_workers(self, facts: PlanContext) -> int:
        """Processes that compute."""
        return self._count(facts, self.workers, ("chief", "worker"), 2)

    def num_servers(self, facts: PlanContext) -> int:
        """Processes that hold variables."""
        return self._count(facts, self.servers, ("ps",), 1)

    @staticmethod
    def _count(facts: PlanContext, said: int | Literal["auto"], roles: tuple[str, ...], default: int) -> int:
        if facts.launch is not None:
            return sum(task.role in roles for task in facts.launch.tasks)
        return default if said == "auto" else said

    def num_replicas(self, facts: PlanContext) -> int:
        """The devices of the workers that a step needs; in `async` each worker takes whole ones."""
        workers = 1 if self.mode == "async" else max(self.num_workers(facts) - self.spare_replicas, 1)
        return workers * self.devices_per_worker

    def tasks(self, facts: PlanContext) -> tuple[Task, ...]:
        """The chief, the other workers, the servers, the evaluator; workers share the GPUs of a host."""
        if facts.launch is not None:
            place = facts.launch.local_rank
            return tuple(self._on_device(task, facts.num_gpus, place) for task in facts.launch.tasks)
        counts = {
            "chief": 1,
            "worker": self.num_workers(facts) - 1,
            "ps": self.num_servers(facts),
            "evaluator": int(self.evaluator),
        }
        roles = [(role, index) for role, count in counts.items() for index in range(count)]
        tasks = (Task(role=role, index=index, rank=rank) for rank, (role, index) in enumerate(roles))
        return tuple(self._on_device(task, facts.num_gpus, task.rank) for task in tasks)

    def num_slots(self, num_gpus: int) -> int:
        """The GPUs of all workers; without any, a core a process and a thread that computes."""
        computing = self.num_workers(PlanContext()) * self.devices_per_worker
        if num_gpus:
            return min(computing, num_gpus)
        return len(self.tasks(PlanContext())) + computing - self.num_workers(PlanContext())

    def trains(self, task: Task) -> bool:
        """The chief alone."""
        return task.role == "chief"

    def replaces(self, task: Task) -> bool:
        """Workers keep nothing that another would need."""
        return task.role == "worker"

    def gradient_copies(self, numerics: Numerics, num_replicas: int) -> int:  # noqa: ARG002 - the servers hold them
        """The chief's second model; gradients wait at the servers. Threads on a CPU have their own."""
        return self.devices_per_worker

    def connect(self, identity: Identity) -> Collective:  # noqa: ARG002 - what looks at the model is the chief alone
        """Nobody: the chief evaluates and logs by itself."""
        return LocalCollective()

    def make_reducer(self, collective: Collective, numerics: Numerics) -> Reducer:  # noqa: ARG002
        """Nothing: what a worker computes is one sum, and the servers add them up."""
        return LocalReducer()

    def place(
        self,
        model: nn.Module,
        *,
        identity: Identity,
        precision: Precision,
        numerics: Numerics,
        make_optimizer: Callable[[Mapping[str, nn.Parameter]], torch.optim.Optimizer],
    ) -> Any:
        """The chief's: a model to look at, one to compute with, and links to the servers."""
        rest: dict[str, Any] = {
            "identity": identity,
            "precision": precision,
            "numerics": numerics,
            "make_optimizer": make_optimizer,
        }
        place = super().place
        return CoordinatorState.open(self._setting(), identity, lambda one: place(one, **rest), model)

    def assist(self, bench: TaskContext) -> None:
        """What workers and servers do, until the chief says bye."""
        setting = self._setting()
        if bench.identity.task.role == "ps":
            run_server(setting, bench)
            return
        replica = super().place(
            bench.model,
            identity=bench.identity,
            precision=bench.precision,
            numerics=bench.numerics,
            make_optimizer=bench.make_optimizer,
        )
        run_worker(setting, bench, replica)

    def assign(self, plan: BatchPlan, step: int, placed: Placed) -> tuple[int, ...]:
        """Nothing is known beforehand: shards are for whoever is free."""
        del plan, step, placed
        return ()

    def tickets(
        self, plan: BatchPlan, position: StepCounter, placed: Any, until: int | None = None
    ) -> Iterator[Ticket]:
        """Empty ones: wait for the next update."""
        placed.start(plan, position.step, until)
        while True:
            yield Ticket(position.step, ())

    def recover(self, placed: Any, step: int) -> bool:  # noqa: ARG002 - the same at any step
        """Never: the servers hold the variables, and workers go on changing them."""
        return False

    def step(self, placed: Any, ticket: Ticket, batches: Sequence[Any], training: StepContext) -> StepOutcome:
        """The next update, of whatever workers have computed."""
        del ticket, batches
        outcome: StepOutcome = placed.next_update(training)
        return outcome

    def state(self, placed: Any) -> dict[str, Tensor]:
        """What the servers hold."""
        found: dict[str, Tensor] = placed.state()
        return found

    def load_state(self, placed: Any, tensors: Mapping[str, Tensor]) -> None:
        """Restore the tensors of a checkpoint; the servers get them before the next step."""
        placed.load_state(tensors)

    def remember(self, placed: Any) -> dict[str, Any]:
        """What is handed out and not applied."""
        found: dict[str, Any] = placed.remember()
        return found

    def recall(self, placed: Any, remembered: Mapping[str, Any]) -> None:
        """Hand it out again, before anything else."""
        placed.recalled = dict(remembered)

    def catch_up(self, placed: Any) -> None:
        """Read the variables into the model that is looked at."""
        placed.catch_up()

    def findings(self, placed: Any) -> dict[str, Any]:
        """The staleness of the updates, and the gradients that came too late."""
        found: dict[str, Any] = placed.findings()
        return found

    def leave(self, placed: Any) -> None:
        """Send everybody home."""
        placed.close()

    def _setting(self) -> PsSettings:
        return PsSettings(
            num_servers=self.num_servers(PlanContext()),
            num_devices=self.devices_per_worker,
            mode=self.mode,
            spares=self.spare_replicas,
            replaces=self.spare_mode == "replace" and self.spare_replicas > 0,
            staleness=self.staleness,
            warmup_steps=self.warmup_steps,
            transfer=torch.bfloat16 if self.transfer == "bf16" else None,
            replay=self.replay,
            timeout_s=self.timeout_s,
        )

    def _on_device(self, task: Task, num_gpus: int, place: int) -> Task:
        """Servers and the evaluator compute on the CPU; workers on the GPUs in turn, shared where there are more."""
        computes = task.role in ("chief", "worker") and num_gpus > 0
        device = f"cuda:{place * self.devices_per_worker % num_gpus}" if computes else "cpu"
        return Task(role=task.role, index=task.index, rank=task.rank, device=device)
