"""The parameter server as a strategy, with the tasks chief, worker, ps and evaluator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal

import torch
from torch import nn

from trainkit.cluster.host import keep_freed_memory
from trainkit.cluster.launch import LaunchEnvironment
from trainkit.cluster.tasks import Task
from trainkit.config.values import MOST_PROCESSES
from trainkit.errors import LinkError, Problem, TrainingError
from trainkit.fields import above, at_least, at_most, maths, placement, unit
from trainkit.numerics.batch import BatchPlan
from trainkit.numerics.copies import copied
from trainkit.numerics.precision import Precision
from trainkit.objectives.base import Access, needs_of
from trainkit.strategies.base import (
    Facts,
    LoopCall,
    ModelMemory,
    PlanContext,
    Remedies,
    Scaled,
    SetupRequest,
    StepCut,
    Strategy,
    TaskContext,
    Transfer,
    ignore_phase,
)
from trainkit.strategies.core.buffers import sample_dims_of
from trainkit.strategies.core.copies import ComputingCopies, computing_copy
from trainkit.strategies.core.optimizer import OptimizerStepper
from trainkit.strategies.core.refusals import async_problems, no_rollback, phase_problems
from trainkit.strategies.core.replica import Replica
from trainkit.strategies.core.step import sparse_problems
from trainkit.strategies.core.synchronous import build_parts, make_stepper, no_reducer
from trainkit.strategies.model_transforms.compiling import uncompiled
from trainkit.strategies.traffic import lookups_of
from trainkit.strategies.updates.chief import Chief, Worker, sparse_tables
from trainkit.strategies.updates.group import GroupWorker
from trainkit.strategies.updates.links import AddressBook
from trainkit.strategies.updates.scheduler import (
    FILE,
    AsyncScheduler,
    ReplayScheduler,
    Staleness,
    SyncScheduler,
    WorkScheduler,
    read_record,
)
from trainkit.strategies.updates.server import CHIEF, ParameterServerClient, VariableServer
from trainkit.strategies.updates.variables import VariableShards, split_problems, step_transfers, variables_of

if TYPE_CHECKING:
    from trainkit.strategies.mesh.strategy import Mesh

_ACCEPT = Staleness()
_COMPUTING: Final = ("chief", "worker")


@dataclass(frozen=True, kw_only=True)
class ParameterServer(Strategy):
    """Keep the variables on servers, and let workers join and leave.

    The chief assigns tickets and chooses the gradients of the next update; it also computes, on a separate thread.
    Workers pull the variables, compute, and push gradients. Each server holds a part of the variables, balanced by
    bytes, with their optimizer state. In `sync` a ticket is a shard of a step for any idle worker, and the training is
    that of one device, to the bit with `numerics.reproducible`; in `async` it is a whole step, and every gradient is a
    separate update when it arrives: another training, which depends on the speed of the workers.

    Example:
        >>> [str(task) for task in ParameterServer(workers=2, servers=1, evaluator=True).tasks(PlanContext())]
        ['chief:0', 'worker:0', 'ps:0', 'evaluator:0']

    Source: Dean et al. 2012, Large Scale Distributed Deep Networks; Li et al. 2014, Scaling Distributed Machine
    Learning with the Parameter Server; Chen et al. 2016, arXiv:1604.00981; tf.distribute.ParameterServerStrategy.
    """

    facts: ClassVar[Facts] = Facts(compiles="model", several_optimizers=True)

    workers: Annotated[int | Literal["auto"], at_least(1), at_most(MOST_PROCESSES), placement, unit("processes")] = (
        "auto"
    )
    """Workers that compute, the chief among them; auto: 2, or as many as a cluster names."""
    devices_per_worker: Annotated[int, at_least(1), at_most(MOST_PROCESSES), placement, unit("devices")] = 1
    """Devices that a worker computes with: GPUs, or threads on the CPU; the sum of their gradients is pushed once."""
    shard: Annotated[int, at_least(1), at_most(MOST_PROCESSES), placement, unit("processes")] = 1
    """Processes of a worker, over which its parameters are sharded; above 1 the chief does not compute."""
    tensor: Annotated[int, at_least(1), at_most(MOST_PROCESSES), placement, unit("processes")] = 1
    """Processes of a worker, over which each layer of the model's plan is cut; above 1 the chief does not compute."""
    servers: Annotated[int | Literal["auto"], at_least(1), at_most(MOST_PROCESSES), placement, unit("processes")] = (
        "auto"
    )
    """Processes that hold variables; auto: 1, or as many as a cluster names."""
    evaluator: Annotated[bool, placement] = False
    """Whether an additional process evaluates each checkpoint in parallel to the training."""
    mode: Annotated[Literal["sync", "async"], maths(neutral="sync")] = "sync"
    """`sync`: one update of all gradients of a step; `async`: one update per gradient, when it arrives."""
    spare_replicas: Annotated[int, at_least(0), placement, unit("replicas")] = 0
    """`sync`: workers, among `workers`, that a step need not wait for."""
    spare_mode: Annotated[Literal["duplicate", "replace"], maths(neutral="duplicate")] = "duplicate"
    """Work of spares: `duplicate` outstanding shards, or `replace` them by shards of the following steps."""
    staleness: Annotated[Staleness, maths] = _ACCEPT
    """`async`: policy for gradients of variables that were updated in the meantime."""
    warmup_steps: Annotated[int, at_least(0), maths(neutral=0), unit("steps")] = 0
    """`async`: updates at the beginning in which one gradient at a time is computed."""
    transfer: Annotated[Literal["full", "bf16"], maths(neutral="full")] = "full"
    """Send variables and gradients unchanged, or as bfloat16: half the bytes, and a different result."""
    replay: Annotated[str | None, maths(neutral=None)] = None
    """A run folder whose updates are repeated in the same order, from the same gradients."""
    timeout_s: Annotated[float, above(0), placement, unit("seconds")] = 600.0
    """Seconds that tasks wait for each other, and that a worker has for a work item."""

    def facts_in(self, context: PlanContext) -> Facts:
        """Return whether several workers update asynchronously, updates mix shards of steps, or numbers are rounded."""
        rule = "its workers and servers run no loop: the chief assigns their work. Use strategy=multi_worker_mirrored."
        facts = super().facts_in(context)
        if self._size > 1:
            parts = self._mesh.facts_in(_alone(context))
            keeps, withheld = parts.keeps_memory_format, parts.withheld
            facts = replace(facts, compiles=parts.compiles, keeps_memory_format=keeps, withheld=withheld)
        return replace(
            facts,
            changes_maths=(self.mode == "async" and self.workers != 1) or self._replaces or self.transfer != "full",
            is_asynchronous=self.mode == "async",
            withheld_calls={LoopCall.session: rule},
        )

    def launch_problems(self, launch: LaunchEnvironment) -> list[Problem]:
        """Return problems: no task to keep the variables, or other numbers of tasks than the fields give."""
        if launch.names_roles and not any(task.role == "ps" for task in launch.tasks):
            rule = f"{launch.kind} names no task of the role ps, which keeps the variables. Add one: ps=[HOST:PORT]."
            return [Problem(key="strategy", value="parameter_server", rule=rule)]
        needed = 2 if self.servers == "auto" else self.servers + 1
        if not launch.names_roles and launch.num_ranks < needed:
            rule = f"needs a chief and {needed - 1} to keep the variables, and {launch.kind} started "
            rule += f"{launch.num_ranks} process{'' if launch.num_ranks == 1 else 'es'}. Start {needed} or more."
            return [Problem(key="strategy", value="parameter_server", rule=rule)]
        members = sum(task.role in _COMPUTING for task in self._tasks_of(launch)) - 1
        if self._size > 1 and (members < 1 or members % self._size):
            rule = f"takes {self._size} processes for each worker, and beside the chief {launch.kind} has {members} to "
            rule += f"compute. Start a multiple of {self._size}."
            return [self._problem(self._cut_key, rule)]
        facts, problems = PlanContext(launch=launch), []
        for key, count in {"workers": self.num_workers(facts), "servers": self.num_servers(facts)}.items():
            if getattr(self, key) not in ("auto", count):
                named = f"{launch.kind} {'names' if launch.names_roles else f'started {launch.num_ranks} processes:'}"
                rule = f"but {named} {count}{', the chief among them' * (key == 'workers')}. Leave it out."
                problems.append(self._problem(key, rule))
        return problems

    def validate(self, context: PlanContext) -> list[Problem]:
        """Return problems of the fields, with each other and with the context."""
        if context.launch is not None and (problems := self.launch_problems(context.launch)):
            return problems
        exact, gpus, workers = context.numerics.reproducible, context.num_gpus, self.num_workers(context)
        is_async, replaces, spares = self.mode == "async", self._replaces, self.spare_replicas
        devices, size, cut = self.devices_per_worker, self._size, f"strategy.{self._cut_key}"
        problems = [*phase_problems(context), *(async_problems(context) if is_async else [])]
        mixing = "with strategy.spare_mode=replace"
        if replaces:
            problems += no_rollback(f"{mixing} the first shards that arrive make a step", context)
        if self.replay is not None:
            problems += no_rollback("strategy.replay follows the record of another run", context)
        together = f"with {cut}, the processes of a worker add up their gradients at once. Use {cut}=1, or "
        if exact and (replaces or size > 1):
            time = f"{mixing}, which shards make a step depends on time. Use duplicate, or "
            problems.append(
                Problem(key="numerics.reproducible", value=True, rule=f"{time if replaces else together}false.")
            )
        waits = "has no effect with strategy.mode=async: no step waits for all its gradients. Leave it out."
        fresh = "has no effect with strategy.mode=sync: gradients are never stale. Leave it out."
        few = f"spares are among strategy.workers={workers}, and at least one must compute. Use {workers - 1} or less."
        none = "has no effect without strategy.spare_replicas. Leave it out."
        single = f"{mixing}, an update is made of single shards. Use duplicate, or 1."
        many = f"of {size} processes each take {workers * size} devices, and this host has {gpus} GPUs. Use fewer."
        bits = (
            "rounds transferred numbers, and numerics.reproducible promises the bits of one device. Use full, or false."
        )
        record = f"holds no {FILE}. Give the folder of a run with strategy=parameter_server."
        has_record = self.replay is None or (Path(self.replay).expanduser() / FILE).is_file()
        rules = [
            (is_async and spares > 0, "spare_replicas", waits),
            (is_async and self.spare_mode == "replace", "spare_mode", waits),
            (not is_async and spares >= workers, "spare_replicas", few),
            (not is_async and self.spare_mode == "replace" and not spares, "spare_mode", none),
            (not is_async and self.staleness.policy != "accept", "staleness.policy", fresh),
            (not is_async and self.warmup_steps > 0, "warmup_steps", fresh),
            (replaces and devices > 1, "devices_per_worker", single),
            (0 < gpus < devices, "devices_per_worker", f"and this host has {gpus} GPUs. Use that many, or fewer."),
            (size > 1 and replaces, "spare_mode", f"{together}duplicate."),
            (size > 1 and devices > 1, "devices_per_worker", f"with {cut} each process has one. Use {cut}=1, or 1."),
            (size > 1 and context.launch is None and 0 < gpus < workers * size, "workers", many),
            (self.transfer != "full" and exact, "transfer", bits),
            (not has_record, "replay", record),
        ]
        problems += [self._problem(key, rule) for holds, key, rule in rules if holds]
        return [*problems, *self.staleness.problems()]

    def _problem(self, key: str, rule: str) -> Problem:
        """Return a problem of one of these keys."""
        return Problem(key=f"strategy.{key}", value=attrgetter(key)(self), rule=rule)

    def validate_model(self, model: nn.Module, context: PlanContext) -> list[Problem]:
        """Return a problem if the optimizer is not elementwise and a variable would be split by rows."""
        problems = split_problems(self._shares(model, context.formats, context), context)
        if self._size > 1:
            why = "whose rows the processes of a worker would have to read together"
            problems += self._mesh.validate_model(model, _alone(context))
            problems = problems or sparse_problems(model, why)
        if self._replaces and any(dim is not None for dim in sample_dims_of(model).values()):
            rule = "adds up shards of several steps, and the model keeps state per sample. Use duplicate."
            problems.append(self._problem("spare_mode", rule))
        if self.replay is not None and self.mode == "async" and sparse_tables(model):
            rule = "cannot be to the bit: rows of sparse tables are read at each lookup. Leave it out."
            problems.append(self._problem("replay", rule))
        if sparse_tables(model) and context.objective is not None and Access.parameters in needs_of(context.objective):
            rule = (
                "reads the parameters of the model, and a worker has only the looked-up rows of a sparse table. Use "
                "strategy=mirrored, or a dense table."
            )
            problems.append(Problem(key="objective", value=type(context.objective).__name__, rule=rule))
        return problems

    def resolve(self, build: Callable[[], nn.Module], context: PlanContext) -> ParameterServer:  # noqa: ARG002 - no model needed
        """Return the strategy with the numbers of tasks of the launch."""
        return replace(self, workers=self.num_workers(context), servers=self.num_servers(context))

    def notes(self, model: nn.Module, context: PlanContext) -> tuple[str, ...]:
        """Return notes of workers in parts, and of a training that differs from that of one device."""
        lines: tuple[str, ...] = ()
        if self._size > 1:
            line = f"parameter_server: each worker is {self._size} processes with parts of the model; the chief and "
            line += "the first process of each worker have it whole in the memory of their hosts, too. The bytes of a "
            line += "step are not planned: those within a worker are not known."
            lines = (line, *self._mesh.notes(model, _alone(context))[1:])
        if not self.facts_in(context).changes_maths:
            return lines
        why = {
            "the gradients of several workers are applied as they arrive": self.mode == "async",
            "the first shards that arrive make a step": self._replaces,
            "numbers are sent as bfloat16": self.transfer != "full",
        }
        reasons = ", ".join(text for text, holds in why.items() if holds)
        return (*lines, f"parameter_server: {reasons}: a different training from that of one device.")

    def num_workers(self, context: PlanContext) -> int:
        """Return the number of workers that compute gradients."""
        count = self._count(context, self.workers, _COMPUTING, 2)
        return count if self._size == 1 or context.launch is None else (count - 1) // self._size

    def num_servers(self, context: PlanContext) -> int:
        """Return the number of processes that hold variables."""
        return self._count(context, self.servers, ("ps",), 1)

    def _count(
        self, context: PlanContext, configured: int | Literal["auto"], roles: tuple[str, ...], default: int
    ) -> int:
        if context.launch is not None:
            return sum(task.role in roles for task in self._tasks_of(context.launch))
        return default if configured == "auto" else configured

    def _tasks_of(self, launch: LaunchEnvironment) -> tuple[Task, ...]:
        """Return the tasks of a launch by role: of one without roles, rank 0 is the chief, and the last ranks serve."""
        if launch.names_roles:
            return launch.tasks
        serving = 1 if self.servers == "auto" else self.servers
        return _by_role({"chief": 1, "worker": launch.num_ranks - serving - 1, "ps": serving})

    def num_replicas(self, context: PlanContext) -> int:
        """Return the number of worker devices that a step needs; in `async` each worker computes whole steps."""
        workers = 1 if self.mode == "async" else max(self.num_workers(context) - self.spare_replicas, 1)
        return workers * self._width

    def tasks(self, context: PlanContext) -> tuple[Task, ...]:
        """Return the chief, the other workers, the servers and the evaluator; workers share the GPUs of a host."""
        if context.launch is not None:
            local_rank = context.launch.local_rank
            return tuple(self._on_device(task, context.num_gpus, local_rank) for task in self._tasks_of(context.launch))
        counts = {
            "chief": 1,
            "worker": self.num_workers(context) * self._size - (self._size == 1),
            "ps": self.num_servers(context),
            "evaluator": int(self.evaluator),
        }
        return tuple(self._on_device(task, context.num_gpus, task.rank) for task in _by_role(counts))

    def num_slots(self, num_gpus: int) -> int:
        """Return the number of GPUs of all workers; without GPUs, a core per process and per computing thread."""
        workers = self.num_workers(PlanContext())
        if num_gpus:
            return min(workers * self.devices_per_worker * self._size, num_gpus)
        return len(self.tasks(PlanContext())) + workers * (self.devices_per_worker - 1)

    def runs_loop(self, task: Task) -> bool:
        """Return whether the task is the chief: rank 0, also where a cluster names workers only."""
        return task.rank == 0

    def restarts_alone(self, task: Task) -> bool:
        """Return whether the task is a worker of its own, which has no state that another task would need."""
        return task.role == "worker" and task.rank > 0 and self._size == 1

    def estimate_memory(self, model: nn.Module, context: PlanContext) -> ModelMemory:
        """Return a whole replica and the chief's second model; each thread on a CPU has its own gradients.

        Of workers in parts on GPUs: the parts of one process.
        """
        if self._size > 1 and context.num_gpus:
            return self._mesh.estimate_memory(model, _alone(context))
        return ModelMemory.whole(model, gradient_copies=self.devices_per_worker)

    def traffic(self, model: nn.Module, context: PlanContext, cut: StepCut) -> tuple[Transfer, ...] | None:
        """Return the transfers between workers and servers: pulls and pushes, and rows of sparse tables.

        None for workers in parts, whose own exchanges are not known.
        """
        if self._size > 1 or (named := lookups_of(model, cut)) is None:
            return None
        lookups = dict(zip(sparse_tables(model), named.values(), strict=True))
        shards = self._shares(model, context.formats, context)
        tasks = [task for task in self.tasks(context) if not task.is_evaluator]
        narrow = torch.bfloat16 if self.transfer == "bf16" else None
        workers = [task.rank for task in tasks if task.role != "ps"]
        orders = 1 if self.mode == "async" else -(-cut.num_shards // self.devices_per_worker)
        return step_transfers(
            model,
            shards,
            servers=[task.rank for task in tasks if task.role == "ps"],
            workers=workers,
            num_shards=cut.num_shards,
            pulls=orders if self.mode == "async" else min(orders, len(workers)),
            pushes=orders,
            read_width=(narrow or context.formats.model_dtype).itemsize,
            width=(narrow or shards.master_dtype).itemsize,
            lookups=lookups,
            pushes_rows=not (context.numerics.reproducible and self.mode == "sync"),
        )

    def observed_ranks(self, context: PlanContext) -> tuple[int, ...]:
        """Return none, so that one device is observed; of workers in parts on GPUs the chief, which is refused."""
        return (0,) if self._size > 1 and context.num_gpus else ()

    def as_observed(self) -> ParameterServer:
        """Return this strategy.

        Raises:
            TrainingError: a process of a worker in parts takes no step without the others.
        """
        if self._size > 1:
            raise TrainingError("no step is taken without the other processes of a worker")
        return self

    def scaled(self, replicas: int, context: PlanContext) -> Scaled | None:
        """Return the key for `replicas` workers, and keys that change their traffic; None for workers in parts."""
        if self._size > 1:
            return None
        is_async = self.mode == "async"
        return Scaled(
            keys={"workers": replicas},
            waits=not is_async,
            remedies=Remedies(
                compression="strategy.transfer=bf16" if self.transfer == "full" else None,
                num_servers=self.num_servers(context),
                spares=None if is_async or self.spare_replicas else "strategy.spare_replicas",
            ),
        )

    def setup(self, request: SetupRequest) -> Chief:
        """Make the chief's models, one for evaluation and one for computing, and connect to the servers.

        A thread computes while this one evaluates: two threads must not compile, so the evaluated model is eager.
        """
        work = None
        if self._size == 1:
            computing = _replica(replace(request, model=copied(request.model)))
            work = partial(self._work, request, computing)
        uncompiled(request.model)
        eval_model = _replica(request)
        addresses = AddressBook(request.identity, self.timeout_s)
        shares = self._shares(eval_model.model, request.precision)
        return Chief(
            request,
            eval_model,
            addresses,
            self._connect(addresses, shares, CHIEF),
            scheduler=self._scheduler(request.training.plan),
            work=work,
            mode=self.mode,
            mixes=self._replaces,
            timeout_s=self.timeout_s,
        )

    def run_auxiliary(self, context: TaskContext) -> None:
        """Run a worker or a server until the chief ends it.

        Raises:
            LinkError: the connection to the chief or a server broke.
        """
        addresses, task = AddressBook(context.identity, self.timeout_s), context.identity.task
        is_member = task.role == "worker" and self._size > 1  # the others of its worker wait for it in any case
        if addresses.is_over and not is_member:
            return
        if task.role == "ps":
            shares = self._shares(context.precision.adapt(context.model), context.precision)
            listener = addresses.listener(str(task))
            addresses.publish(str(task), listener.address)
            context.on_phase("idle", 0)
            keep_freed_memory()  # for the next push

            def make(masters: Mapping[str, nn.Parameter]) -> OptimizerStepper:
                optimizers = tuple(named for named in context.optimizers if named.params & masters.keys())
                return make_stepper(replace(context, optimizers=optimizers), masters)

            server = VariableServer(shares, task.index, make, context.on_phase, self.timeout_s)
            server.serve(listener, lambda: addresses.is_over)
            return
        context.on_phase("idle", 0)
        if is_member:
            self._work_together(context, addresses)
            return
        with _until_over(addresses):
            self._work(context, _replica(context))

    def _work(self, request: SetupRequest, replica: Replica) -> None:
        """Run a worker until the chief ends it; the chief's own on a thread, whose waiting the chief reports."""
        addresses, task = AddressBook(request.identity, self.timeout_s), request.identity.task
        is_own = self.runs_loop(task)
        name, shares = CHIEF if is_own else str(task), self._shares(replica.model, replica.precision)
        devices = [replica.device] * self.devices_per_worker
        if replica.device.type != "cpu":
            first, count = replica.device.index or 0, torch.cuda.device_count()
            devices = [torch.device("cuda", (first + index) % count) for index in range(self.devices_per_worker)]
        with ExitStack() as stack:
            servers = self._connect(addresses, shares, f"worker:{CHIEF}" if is_own else name)
            stack.enter_context(closing(servers))
            data = request.open_data(replica.device)
            link = stack.enter_context(closing(addresses.connect(CHIEF, name=name)))
            more = [computing_copy(replica, device, shares=device == replica.device) for device in devices[1:]]
            copies = stack.enter_context(closing(ComputingCopies(replica, [replica, *more])))
            worker = Worker(copies, servers, data, request.training, mode=self.mode, mixes=self._replaces)
            worker.run(link, ignore_phase if is_own else request.on_phase)

    def _work_together(self, request: SetupRequest, addresses: AddressBook) -> None:
        """Run one process of a worker in parts until the chief ends it: a rank of a process group of that worker."""
        task, size, mesh = request.identity.task, self._size, self._mesh
        group, rank = divmod(task.rank - 1, size)
        prefix = f"{request.identity.prefix}/worker/{group}"
        identity = replace(request.identity, task=replace(task, rank=rank), num_ranks=size, prefix=prefix)
        shares = self._shares(request.precision.adapt(request.model), request.precision)  # of the whole model
        ranks = mesh.join(identity)
        replica, _, make_step = mesh.build(replace(request, identity=identity), ranks)
        data = request.open_data(replica.device)
        worker = GroupWorker(replica, data, request.training, make_step=make_step, shares=shares, mode=self.mode)
        with _until_over(addresses), ExitStack() as stack:
            link = None
            if rank == 0:
                stack.enter_context(worker.leading())
                worker.use_servers(stack.enter_context(closing(self._connect(addresses, shares, str(task)))))
                link = stack.enter_context(closing(addresses.connect(CHIEF, name=str(task))))
            worker.run(link, request.on_phase)
        ranks.close(failed=False)

    def _connect(self, addresses: AddressBook, shares: VariableShards, name: str) -> ParameterServerClient:
        """Connect to all servers, for one thread of a task."""
        narrow, peers = torch.bfloat16 if self.transfer == "bf16" else None, range(shares.num_servers)
        with ExitStack() as stack:  # the first links are closed if a later one fails
            links = [stack.enter_context(closing(addresses.connect(f"ps:{peer}", name=name))) for peer in peers]
            client = ParameterServerClient(links, shares, transfer=narrow, timeout_s=self.timeout_s)
            stack.pop_all()
        return client

    def _shares(self, model: nn.Module, precision: Precision, context: PlanContext | None = None) -> VariableShards:
        """Return the partition of the variables over the servers."""
        return VariableShards(variables_of(model, precision.master_dtype), self.num_servers(context or PlanContext()))

    def _scheduler(self, plan: BatchPlan) -> WorkScheduler:
        if self.replay is not None:
            script = list(read_record(Path(self.replay).expanduser() / FILE))
            return ReplayScheduler(script=script, staleness=self.staleness)
        if self.mode == "async":
            return AsyncScheduler(plan=plan, staleness=self.staleness, warmup_steps=self.warmup_steps)
        return SyncScheduler(plan=plan, spares=self.spare_replicas, width=self._width, replaces=self._replaces)

    @property
    def _size(self) -> int:
        """Processes of a worker."""
        return self.shard * self.tensor

    @property
    def _width(self) -> int:
        """Shards that a worker computes at a time."""
        return self.devices_per_worker * self.shard

    @property
    def _cut_key(self) -> str:
        """The key that makes a worker several processes, for messages."""
        return "shard" if self.shard > 1 else "tensor"

    @property
    def _mesh(self) -> Mesh:
        """The processes of one worker."""
        from trainkit.strategies.mesh.strategy import Mesh  # noqa: PLC0415 - slow to import, for several processes only

        return Mesh(shard=self.shard, tensor=self.tensor, timeout_s=self.timeout_s)

    @property
    def _replaces(self) -> bool:
        """Whether an update may contain shards of several steps."""
        return self.mode == "sync" and self.spare_mode == "replace" and self.spare_replicas > 0

    def _on_device(self, task: Task, num_gpus: int, local_rank: int) -> Task:
        """Return a task with its device: the GPUs in turn for those that compute, the CPU for the others."""
        first = int(self._size > 1)  # the chief only evaluates a model that fits on no device
        computes = task.role in _COMPUTING and task.rank >= first and num_gpus > 0
        device = f"cuda:{(local_rank - first) * self.devices_per_worker % num_gpus}" if computes else "cpu"
        return Task(role=task.role, index=task.index, rank=task.rank, device=device)


def _alone(context: PlanContext) -> PlanContext:
    """Return the context for the processes of one worker, which a launcher's other processes do not concern."""
    return replace(context, launch=None)


@contextmanager
def _until_over(addresses: AddressBook) -> Iterator[None]:
    """Ignore a broken connection inside once the training is over."""
    try:
        yield
    except LinkError:
        if not addresses.is_over:
            raise


def _by_role(counts: Mapping[str, int]) -> tuple[Task, ...]:
    """Return the tasks of each role, in the order of their ranks."""
    placed = [(role, index) for role, count in counts.items() for index in range(count)]
    return tuple(Task(role=role, index=index, rank=rank) for rank, (role, index) in enumerate(placed))


def _replica(request: SetupRequest) -> Replica:
    """Return a task's replica; the servers sum its gradients."""
    return Replica(build_parts(request, make_reducer=no_reducer))
