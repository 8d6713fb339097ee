"""A strategy at work, without the run around it: its own interface, step after step, in the processes of the pool."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, Self
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support import drawing_models, own_objectives, reference, zoo
from tests.support.counting import Calls, StepTrace, counting_graphs
from tests.support.pool import Member, Pool
from trainkit.cluster.tasks import Identity
from trainkit.config.targets.build import build, resolve_target
from trainkit.config.targets.choices import read_choice
from trainkit.data.reading.collate import to_device
from trainkit.errors import ConfigError, TrainingError
from trainkit.numerics.batch import BatchPlan, SampleOrder, Ticket
from trainkit.numerics.precision import Precision
from trainkit.objectives.base import Objective
from trainkit.objectives.classification import Classification
from trainkit.strategies.base import (
    Executor,
    LossWeighting,
    NamedOptimizer,
    Numerics,
    Phase,
    PhaseListener,
    PlanContext,
    SetupRequest,
    Status,
    StepContext,
    Strategy,
    TaskContext,
    UpdateParams,
    ignore_phase,
)
from trainkit.strategies.model_transforms import ModelTransforms, apply_transforms

CONF = Path(__file__).resolve().parents[2] / "conf"


def node_of(strategy: str) -> dict[str, Any]:
    """What a strategy's YAML and its class say."""
    return dict(read_choice(CONF / "strategy" / f"{strategy}.yaml").values)


def takes_replicas(strategy: str) -> bool:
    """Whether a strategy has the key `replicas`."""
    return "replicas" in node_of(strategy)


def changes_maths(strategy: str) -> bool:
    """Whether a strategy says that it is another training."""
    changes: bool = resolve_target(node_of(strategy)["_target_"]).facts.changes_maths
    return changes


def runs_here(strategy: str) -> bool:
    """Whether this machine has what a strategy needs, as its YAML sets it."""
    built: Strategy = build(node_of(strategy))
    return not built.validate(PlanContext())


STRATEGIES = sorted(
    path.stem for path in (CONF / "strategy").glob("*.yaml") if not changes_maths(path.stem) and runs_here(path.stem)
)
"""Strategies that give the training of one device."""


PLACES: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("one_device", "device_map", "central_storage", "parameter_server", "pipeline")},
    **{name: {"replicas": 2} for name in ("mirrored", "fsdp", "tensor_parallel")},
}
"""Strategies, each with settings for two devices of this machine."""

BASE_LR = 0.5
RATES = (0.1, 0.3, 0.5, 0.4, 0.3, 0.2, 0.1, 0.4, 0.2, 0.05)
"""The learning rate of each step, for SGD; AdamW takes a tenth. Six steps end in the second or third epoch."""

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=BASE_LR, momentum=0.9, fused=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=BASE_LR, weight_decay=0.1, fused=True),
    "adamw_loop": lambda params: torch.optim.AdamW(params, lr=BASE_LR, weight_decay=0.1),
    "plain_sgd": lambda params: torch.optim.SGD(params, lr=BASE_LR, fused=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=BASE_LR),
    "sparse_adam": lambda params: torch.optim.SparseAdam(params, lr=BASE_LR),
}


class Trial(NamedTuple):
    """What a task is made of."""

    model: Callable[..., nn.Module]
    data: Callable[[], Any]
    loss_sum: reference.LossSum
    objective: Callable[[], Objective]


WEIGHTED = partial(Classification, class_weights=zoo.CLASS_WEIGHTS, label_smoothing=0.1)

TASKS = {
    "classes": Trial(zoo.Net, zoo.Points, zoo.classes_sum, partial(Classification, ignore_index=None)),
    "unlabelled": Trial(zoo.Net, zoo.PartlyLabelled, zoo.torch_sum, WEIGHTED),
    "masks": Trial(zoo.pixels, zoo.Masks, zoo.torch_sum, WEIGHTED),
    "soft_masks": Trial(zoo.pixels, partial(zoo.Masks, soft=True), zoo.torch_sum, WEIGHTED),
    "tokens": Trial(zoo.Attention, zoo.Sentences, zoo.tokens_sum, zoo.CountedTokens),
    "gpt": Trial(zoo.small_gpt, zoo.Sentences, zoo.tokens_sum, zoo.CountedTokens),
    "hidden": Trial(zoo.small_gpt, zoo.Sentences, zoo.tokens_sum, zoo.HiddenTokens),
    "channels_last": Trial(zoo.channels_last, zoo.Pictures, zoo.classes_sum, Classification),
    "transposed": Trial(zoo.transposed, zoo.Points, zoo.classes_sum, Classification),
    "transposed_tied": Trial(zoo.transposed_tied, zoo.Sentences, zoo.tokens_sum, zoo.CountedTokens),
    "functional_dropout": Trial(drawing_models.FunctionalDropout, zoo.Points, zoo.classes_sum, Classification),
    "vae": Trial(drawing_models.Reparametrised, zoo.Points, zoo.classes_sum, Classification),
    "drop_path": Trial(drawing_models.DropPath, zoo.Points, zoo.classes_sum, Classification),
    "drawing_body": Trial(drawing_models.DrawingBody, zoo.Points, zoo.classes_sum, Classification),
    "diffusion": Trial(zoo.Net, zoo.Points, zoo.classes_sum, drawing_models.Diffusion),
    "diffusion_in_dropout": Trial(
        drawing_models.FunctionalDropout, zoo.Points, zoo.classes_sum, drawing_models.Diffusion
    ),
    "two_views": Trial(drawing_models.FunctionalDropout, zoo.Points, zoo.classes_sum, drawing_models.TwoViews),
    "mixup": Trial(zoo.Net, zoo.Points, zoo.classes_sum, drawing_models.Mixup),
    "noisy_scores": Trial(drawing_models.DropPath, zoo.Points, zoo.classes_sum, drawing_models.NoisyScores),
    "masked_words": Trial(zoo.Attention, zoo.Sentences, zoo.tokens_sum, drawing_models.MaskedWords),
    "two_terms": Trial(zoo.Net, zoo.Points, own_objectives.two_terms_sum, own_objectives.TwoTerms),
    "two_heads": Trial(own_objectives.TwoHeads, zoo.Points, own_objectives.both_heads_sum, own_objectives.BothHeads),
    "gradient_penalty": Trial(zoo.Net, zoo.Points, own_objectives.penalty_sum, own_objectives.GradientPenalty),
    "weight_penalty": Trial(zoo.Net, zoo.Points, own_objectives.weight_penalty_sum, own_objectives.WeightPenalty),
    "taught": Trial(zoo.Net, zoo.Points, own_objectives.taught_sum, own_objectives.Taught),
    "resnet": Trial(zoo.small_resnet, zoo.Pictures, zoo.classes_sum, Classification),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training."""

    strategy: str = "one_device"
    settings: dict[str, Any] = field(default_factory=dict)
    """Keys of the strategy that differ from its YAML."""
    task: str = "classes"
    """`classes`: points, each a target; `tokens`: sequences with unequal numbers of targets; `gpt` and `resnet`: the
    repo's own models, on these sequences and on images."""
    build: Callable[..., nn.Module] | None = None
    """What makes the model; None: that of the task."""
    samples: Callable[[], Any] | None = None
    """What makes the data; None: those of the task."""
    model: dict[str, Any] = field(default_factory=dict)
    optimizer: str = "sgd"
    global_size: int = 8
    micro_size: int = 8
    num_steps: int = 6
    rate_scale: float = 1.0
    max_norm: float | None = None
    precision: str = "fp64"
    initial_scale: float = 65536.0
    reproducible: bool = False
    seed: int = 3
    resume_at: int | None = None
    """Save after so many steps and continue from there in a new placement."""
    shaping: ModelTransforms = ModelTransforms()  # noqa: RUF009 - frozen
    """What is recomputed and compiled."""
    checks_always: bool = False
    """Whether compiled steps check by guards, before each step, what they read."""
    start: dict[str, Tensor] | None = None
    """A checkpoint's tensors to start from, at step 0."""
    slowed: dict[int, float] = field(default_factory=dict)
    """Ranks that, beside the loop, wait for their batches: for seconds, at random up to so many."""
    folder: Path | None = None
    """The run folder, for strategies that keep a record."""
    phases: tuple[Phase, ...] = ()
    """The phases of a step."""

    def make_optimizers(self, model: nn.Module) -> tuple[NamedOptimizer, ...]:
        """Return several optimizers; none: the one of `optimizer`."""
        return ()

    def make_model(self) -> nn.Module:
        """The model at step 0."""
        return (self.build or TASKS[self.task].model)(**self.model)

    def make_data(self) -> Any:
        """The training samples."""
        return (self.samples or TASKS[self.task].data)()

    def rate(self, step: int) -> float:
        """The learning rate of an update."""
        return self.rate_scale * RATES[step % len(RATES)] * (1.0 if self.optimizer == "sgd" else 0.1)

    def make_strategy(self) -> Strategy:
        """The strategy of its YAML."""
        strategy: Strategy = build(node_of(self.strategy) | self.settings)
        return strategy


@dataclass(frozen=True, kw_only=True)
class Frozen(Case):
    """The first layer is not trained, and is another one than that of the model at step 0."""

    def make_model(self) -> nn.Module:
        """The model as it is built."""
        model = super().make_model()
        for param in next(model.children()).parameters():
            param.requires_grad = False
        return model

    def from_a_checkpoint(self) -> Self:
        """Started with other numbers."""
        return replace(
            self, start={f"param/{name}": 0.5 * param for name, param in self.make_model().state_dict().items()}
        )


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What one rank ended with."""

    state: dict[str, Tensor]
    losses: list[float]
    """The mean loss of every step, over all ranks."""
    samples: list[list[int]]
    """This rank's samples, step by step; where several ranks compute a replica, the first one's."""
    norms: list[float]
    scale: float
    computed: dict[int, list[int]] = field(default_factory=dict)
    """The samples, step by step, that this rank has computed beside the loop, or while it assisted another."""

    @property
    def weights(self) -> dict[str, Tensor]:
        """Parameters and buffers by name, as a model's state_dict has them."""
        kinds = ("param", "buffer")
        return {name: t for key, t in self.state.items() for kind, _, name in [key.partition("/")] if kind in kinds}


def train(pool: Pool, case: Case) -> list[Trained]:
    """What every rank of a case ended with; a single task is trained right here.

    The fast lane skips a test of several tasks here: what it is compared with is better computed afterwards.
    """
    strategy = case.make_strategy()
    tasks = strategy.tasks(PlanContext())
    if len(tasks) == 1:
        return [run_rank(None, case)]
    trained: list[Trained] = pool.run("tests.contract.stepping.run_rank", case, num_ranks=len(tasks))
    ranks = [rank for rank, task in zip(trained, tasks, strict=True) if strategy.runs_loop(task)]
    if len(ranks) < len(tasks):
        _share_samples(ranks, trained)
    return ranks


def train_in_threads(pool: Pool, case: Case) -> list[Trained]:
    """As `train`, with a thread a task, for strategies without a process group: quick to start.

    Args:
        pool: its store is where the threads meet.
        case: nothing in it is random: threads share a generator.
    """
    strategy = case.make_strategy()
    tasks = strategy.tasks(PlanContext())
    store, prefix = pool.address(), f"threads/{uuid4()}"
    members = [Member(rank=rank, num_ranks=len(tasks), store=store, prefix=prefix) for rank in range(len(tasks))]
    with ThreadPoolExecutor(len(tasks)) as threads:
        trained = list(threads.map(lambda member: run_rank(member, case), members))
    return [rank for rank, task in zip(trained, tasks, strict=True) if strategy.runs_loop(task)]


def _share_samples(ranks: list[Trained], trained: list[Trained]) -> None:
    """Where tasks besides the training ones compute: what all tasks have used, with the first."""
    for step, used in enumerate(ranks[0].samples):
        used.extend(index for rank in trained for index in rank.computed.get(step, ()))


def arguments_of(case: Case) -> dict[str, Any]:
    """The arguments of a loop by hand that trains a case without clipping."""
    data = case.make_data()
    return {
        "model": case.make_model(),
        "samples": [data[index] for index in range(len(data))],
        "loss_sum": TASKS[case.task].loss_sum,
        "optimizer": reference.sgd(momentum=0.9) if case.optimizer == "sgd" else reference.adamw(weight_decay=0.1),
        "rate": case.rate,
        **{name: getattr(case, name) for name in ("num_steps", "global_size", "micro_size", "seed")},
    }


def oracle(case: Case, **others: Any) -> reference.Trained:
    """What the case must come to; `others` replace arguments of the loop."""
    return reference.train(max_norm=case.max_norm, **arguments_of(case) | others)


def run_rank(member: Member | None, case: Case) -> Trained:
    """One rank, from a new process group to its end."""
    rank = _Rank(member, case)
    return rank.train() if rank.strategy.runs_loop(rank.task) else rank.assist()


def refused_by_rank(member: Member, case: Case) -> str:
    """The error that each rank of a case ends with; a task that raised would end the processes of the pool."""
    try:
        run_rank(member, case)
    except (TrainingError, ConfigError) as error:
        dist.destroy_process_group()
        return str(error)
    return ""


def refusals_of(pool: Pool, case: Case) -> set[str]:
    """What the ranks of a case say that is refused on all of them."""
    count = len(case.make_strategy().tasks(PlanContext()))
    return set(pool.run("tests.contract.stepping.refused_by_rank", case, num_ranks=count))


def calls_of_a_step(member: Member | None, case: Case) -> dict[str, Calls]:
    """What the last step of a case calls on this rank, by phase; the operations of a compiled step as of its graphs."""
    rank, trace = _Rank(member, case), StepTrace()
    rank.on_phase = trace.listen
    with counting_graphs(trace) if case.shaping.graph_settings else nullcontext():
        executor = rank.setup(0)
        executor.tune()
        rank.steps(executor, case.num_steps - 1)
        ticket = next(iter(executor.tickets(rank.position, case.num_steps)))
        batches = rank.fetch(ticket)
        trace.phases.clear()  # the graphs of earlier steps
        with trace:
            executor.step(ticket, batches)
    executor.close()
    return trace.phases


@dataclass
class _Position:
    step: int = 0


class _Rank:
    """One rank of a case."""

    def __init__(self, member: Member | None, case: Case) -> None:
        self.member, self.case, self.position = member, case, _Position()
        self.data, self.strategy = case.make_data(), case.make_strategy()
        count = len(self.data)
        self.order = SampleOrder(num_samples=count, seed=case.seed)
        plan = BatchPlan(num_samples=count, global_size=case.global_size, micro_size=case.micro_size)
        objective = TASKS[case.task].objective()
        weighing = LossWeighting.of(objective, self.data[0])
        self.training = StepContext(
            plan=plan, objective=objective, weighing=weighing, rule=self._rule, phases=case.phases
        )
        self.precision = Precision(value=case.precision, initial_scale=case.initial_scale)  # type: ignore[arg-type]
        self.numerics = Numerics(seed=case.seed, reproducible=case.reproducible)
        self.on_phase: PhaseListener = ignore_phase
        self.sums: list[tuple[Any, Any]] = []
        """Loss sum and weight of each step."""
        self.samples: list[list[int]] = []
        self.computed: dict[int, list[int]] = {}
        self.norms: list[float] = []
        self.task = self.strategy.tasks(PlanContext())[member.rank if member else 0]
        self.random = Random(self.task.rank)

    def fetch(self, ticket: Ticket) -> list[Any]:
        """The batches of a ticket, for what computes beside the loop."""
        indices = [self._indices(ticket.step, shard) for shard in ticket.shards]
        if self.task.rank in self.case.slowed:
            time.sleep(self.case.slowed[self.task.rank] * self.random.random())
        self.computed.setdefault(ticket.step, []).extend(index for shard in indices for index in shard)
        return [self._batch(shard) for shard in indices]

    def assist(self) -> Trained:
        """All parts of the training, as a task that does not train."""
        for part in range(1 if self.case.resume_at is None else 2):
            model = self._model()
            context = TaskContext(
                identity=self._identity(part),
                model=model,
                make_optimizer=self._optimizer,
                optimizers=self.case.make_optimizers(model),
                precision=self.precision,
                numerics=self.numerics,
                training=self.training,
                num_steps=self.case.num_steps,
                open_data=lambda _device: self,
                requested=lambda: None,
                on_phase=lambda _phase, _step: None,
            )
            self.strategy.run_auxiliary(context)
        return Trained(state={}, losses=[], samples=[], norms=[], scale=0.0, computed=self.computed)

    def train(self) -> Trained:
        """All steps, with a new placement in between where the case asks for one."""
        ends = [self.case.num_steps] if self.case.resume_at is None else [self.case.resume_at, self.case.num_steps]
        state, remembered = self.case.start or {}, dict[str, object]()
        for part, end in enumerate(ends):
            executor = self.setup(part)
            if state:
                executor.load_state_dict(state)
            if part:
                executor.load_state_extra(remembered)
            executor.tune()
            self.steps(executor, end)
            tensors = executor.state_dict().items()  # contiguous, as a checkpoint gives them back
            state = {key: tensor.detach().clone(memory_format=torch.contiguous_format) for key, tensor in tensors}
            remembered = dict(executor.state_dict_extra())
            losses, scale = self.losses(executor), executor.local.loss_scale.scale
            executor.close()
        return Trained(
            state=state, losses=losses, samples=self.samples, norms=self.norms, scale=scale, computed=self.computed
        )

    def setup(self, part: int) -> Executor:
        """The executor of a part of the training."""
        model = self._model()
        return self.strategy.setup(
            SetupRequest(
                model=model,
                optimizers=self.case.make_optimizers(model),
                identity=self._identity(part),
                precision=self.precision,
                numerics=self.numerics,
                make_optimizer=self._optimizer,
                training=self.training,
                open_data=lambda _device: self,
                folder=self.case.folder,
                on_phase=self.on_phase,
                graphs=self.case.shaping.graph_settings,
            )
        )

    def _model(self) -> nn.Module:
        """The model as a run builds it: without data where rank 0 sends the values."""
        facts = self.strategy.facts_in(PlanContext())
        with torch.device("meta") if facts.supports_meta_init and self.task.rank else nullcontext():
            model = self.case.make_model()
        return apply_transforms(model, self.case.shaping, compiles=facts.compiles)

    def _identity(self, part: int) -> Identity:
        return Identity(
            task=self.task,
            num_ranks=self.member.num_ranks if self.member else 1,
            store=self.member.store if self.member else None,
            prefix=f"{self.member.prefix}/{part}" if self.member else "",
            token="of this test",
        )

    def steps(self, executor: Executor, end: int) -> None:
        """Train up to a step."""
        local = executor.local
        for ticket in executor.tickets(self.position, self.case.num_steps):
            if self.position.step >= end:
                return
            indices = [self._indices(ticket.step, shard) for shard in ticket.shards]
            if not self.case.checks_always:
                executor.expect_unchanged()
            batches = [to_device(self._batch(shard), local.device) for shard in indices]
            outcome = executor.step(ticket, batches)
            if outcome.status is Status.retry:
                continue
            self.position.step += 1
            first = local.all_ranks.rank % (local.all_ranks.num_ranks // local.num_ranks) == 0
            self.samples.append([index for shard in indices for index in shard if first])
            self.sums.append((outcome.loss_sum, outcome.weight))
            if outcome.grad_norm is not None:
                self.norms.append(float(outcome.grad_norm))

    def _indices(self, step: int, shard: int) -> list[int]:
        epoch, start, stop = self.training.plan.shard_range(step, shard)
        indices: list[int] = self.order.indices(epoch, start, stop).tolist()
        return indices

    def _batch(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        inputs, targets = (part[indices] for part in self.data.tensors())
        return (inputs.to(self.precision.model_dtype) if inputs.is_floating_point() else inputs), targets

    def _rule(self, version: int) -> UpdateParams:
        return UpdateParams(lr_factor=self.case.rate(version) / BASE_LR, max_norm=self.case.max_norm)

    def _optimizer(self, params: Any) -> torch.optim.Optimizer:
        return OPTIMIZERS[self.case.optimizer](list(params.values()))

    def losses(self, executor: Executor) -> list[float]:
        """The mean loss of every step so far, over all ranks; collective."""
        rows = [[float(loss_sum or 0.0), float(weight)] for loss_sum, weight in self.sums]
        total = executor.local.data_ranks.sum(torch.tensor(rows, dtype=torch.float64))
        return [float(loss_sum / weight) for loss_sum, weight in total]
