"""Prepare a job: the dataset, the strategy and its tasks, and refuse what cannot be computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from trainkit.cluster.host import count_gpus, use_device
from trainkit.cluster.tasks import Identity, Task
from trainkit.config.schema import RunConfig
from trainkit.config.targets.allowed import TARGET
from trainkit.config.targets.build import build
from trainkit.data.hooks import DataHooks
from trainkit.data.reading.collate import shape_text
from trainkit.data.reading.iterable import Stream
from trainkit.data.splits import build_split, build_splits, folded, read_sample, size_of, splits_of
from trainkit.errors import ConfigError, Problem, TrainingError, TrainkitError, named_first_line
from trainkit.inference.predicting import Outputs
from trainkit.numerics.batch import BatchPlan
from trainkit.numerics.copies import copied
from trainkit.numerics.precision import Precision
from trainkit.objectives.base import Access, needs_of
from trainkit.run.folder.model_file import load_model
from trainkit.run.inference.request import JobRequest, Source
from trainkit.run.planning.build import (
    Components,
    build_model,
    build_objective,
    model_of_rank,
    model_transforms_of,
    numerics_of,
)
from trainkit.run.planning.coupling import kept_generators
from trainkit.run.planning.memory import meta_model
from trainkit.run.planning.plan import plan_context
from trainkit.strategies.base import (
    Batch,
    LocalModel,
    LossWeighting,
    PhaseListener,
    PlanContext,
    SetupRequest,
    StepContext,
    Strategy,
    Ticket,
    UpdateParams,
)
from trainkit.strategies.collectives import LocalCollective
from trainkit.strategies.model_transforms import apply_transforms
from trainkit.strategies.tensor_shards import model_weights
from trainkit.trainer.checkpoint.tensors import load

_CHEAP: Final = 50_000_000
"""Up to this number of parameters, the model is run on samples before anything starts."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job with everything that is resolved before a process starts or a model is on a device."""

    cfg: RunConfig
    request: JobRequest
    parts: Components
    dataset: Any
    """The split to compute."""
    facts: PlanContext
    tasks: tuple[Task, ...]
    strategy: Strategy
    outputs: Outputs
    model: nn.Module
    """The model: for an exported model, with its weights on the CPU; for a checkpoint, without data, if the constructor
    allows it.
    """

    @property
    def eval_batch_size(self) -> int:
        """Samples per forward pass in evaluation, as in the training."""
        return self.cfg.eval.batch_size or max(self.cfg.batch.micro_size or 0, 256)


def split_of(cfg: RunConfig, split: str | None) -> str:
    """Return the split to compute: the given one, or `val`, or the only one of data without `val`.

    Raises:
        ConfigError: the data has no such split.
    """
    names = ("train", "val") if cfg.cv.folds is not None else splits_of(cfg.data)
    if split is None and "val" not in names and len(names) == 1:
        return names[0]
    wanted = split or "val"
    if wanted not in names:
        rule = f"the data has {'the split' if len(names) == 1 else 'the splits'} {', '.join(names)}."
        raise ConfigError([Problem(key="--split", value=wanted, rule=rule, origin="command line")])
    return wanted


def open_split(cfg: RunConfig, split: str) -> Any:
    """Build one split of the data.

    Raises:
        DataError: the dataset is absent, damaged or empty.
    """
    if cfg.cv.folds is not None:
        return folded(build_splits(cfg.data), cfg.cv)[split]
    return build_split(cfg.data, split)


def prepare(cfg: RunConfig, request: JobRequest) -> Job:
    """Prepare a job; starts no process.

    Raises:
        ConfigError: the strategy or the outputs do not suit the model, the data or this machine.
        DataError: the dataset is absent, damaged or empty.
    """
    dataset = open_split(cfg, request.split)
    size_of(dataset)
    parts = Components(
        strategy=build(cfg.strategy, "strategy"),
        precision=build(cfg.precision, "precision"),
        schedule=build(cfg.schedule, "schedule"),
        objective=build_objective(cfg),
        datasets={"train": dataset},
        numerics=numerics_of(cfg),
        hooks=DataHooks.of(cfg.data),
    )
    facts = plan_context(cfg, parts, num_gpus=count_gpus(), launch=None)
    facts = replace(facts, micro_size=cfg.batch.micro_size or 1)
    outputs = Outputs.parse(cfg.predict.outputs)
    problems = list(parts.strategy.validate(facts))
    if request.verb == "evaluate":
        problems += parts.strategy.access_problems(facts)
    if problems:
        raise ConfigError(problems)
    model = _model_of_source(cfg, request.source)
    problems += parts.strategy.validate_model(model, facts)
    if request.verb == "predict":
        problems += [*outputs.problems(parts.objective, model), *_withheld(parts, outputs, facts)]
    if problems:
        raise ConfigError(problems)
    tasks = parts.strategy.tasks(facts)
    if len(tasks) > 1 and _is_quantized(request, model):
        rule = "a quantized model runs on one device. Leave it out."
        raise ConfigError([Problem(key="strategy", value=cfg.strategy[TARGET], rule=rule)])
    if any(task.is_evaluator for task in tasks):
        rule = f"has no effect on {request.verb}. Leave it out."
        raise ConfigError([Problem(key="strategy.evaluator", value=True, rule=rule)])
    return Job(
        cfg=cfg,
        request=request,
        parts=parts,
        dataset=dataset,
        facts=facts,
        tasks=tasks,
        strategy=parts.strategy.resolve(lambda: model, facts),
        outputs=outputs,
        model=model,
    )


def refuse_misfits(job: Job) -> None:
    """Run the model on its first samples, on the CPU, and refuse data that does not fit.

    A large model, and one that the CPU cannot run, is not run.

    Raises:
        ConfigError: the model or the objective cannot take the samples.
        DataError: a sample cannot be read.
    """
    if not hasattr(job.dataset, "__getitem__") or isinstance(job.dataset, Stream):
        return  # reading a stream twice may cost more than its first error
    if sum(param.numel() for param in job.model.parameters()) > _CHEAP:
        return
    with kept_generators():
        model = job.model if job.request.source.checkpoint is None else build_model(job.cfg)
        places = range(min(2, size_of(job.dataset)))
        samples = [read_sample(job.dataset, place) for place in places]
        batch = job.parts.hooks.collate_function(samples, places)
        objective, precision = job.parts.objective, job.parts.precision
        run = objective.loss if job.request.verb == "evaluate" else objective.predict
        if not _is_quantized(job.request, model):
            model = precision.adapt(copied(model) if model is job.model else model)
        try:
            with torch.no_grad(), precision.autocast(["cpu"]):
                run(model.eval(), batch)
        except TrainkitError as error:
            if error.exit_code != 1:
                raise
            raise _misfit(job, samples[0], error) from error
        except Exception as error:
            if isinstance(error, NotImplementedError) or any(task.device != "cpu" for task in job.tasks):
                return
            raise _misfit(job, samples[0], error) from error


def _misfit(job: Job, sample: Any, error: Exception) -> ConfigError:
    what = "model and objective" if job.request.verb == "evaluate" else "model"
    rule = f"the samples of {job.request.split} do not fit the {what}: {named_first_line(error)}. A sample is "
    return ConfigError([Problem(key="data", value=job.cfg.data[TARGET], rule=f"{rule}{shape_text(sample)}.")])


def _withheld(parts: Components, outputs: Outputs, facts: PlanContext) -> list[Problem]:
    """Return the problem of a strategy that cannot provide the access to the model that a prediction needs."""
    needs = set(needs_of(parts.objective)) | ({Access.methods} if outputs.layer else set())
    refused = parts.strategy.facts_in(facts).refused_access(needs)
    if refused is None:
        return []
    key, value = ("objective", type(parts.objective).__name__)
    if outputs.layer and refused[0] is Access.methods:
        key, value = "predict.outputs", f"embedding:{outputs.layer}"
    return [Problem(key=key, value=value, rule=f"{refused[0].value}, and {refused[1]}")]


def _model_of_source(cfg: RunConfig, source: Source) -> nn.Module:
    """Return the model for `Job.model`."""
    if source.checkpoint is None:
        return load_model(Path(source.path), checkpoint=source.which)
    return meta_model(cfg)


@dataclass(frozen=True, kw_only=True)
class PlacedModel:
    """The trained model of one rank, on its device."""

    local: LocalModel
    close: Callable[[bool], None]
    """Function that leaves the group of ranks; its argument is whether this rank has failed."""


def place_model(job: Job, identity: Identity, *, on_phase: PhaseListener) -> PlacedModel:
    """Place the trained model under the strategy of the job; collective.

    Raises:
        CheckpointError: the weights are damaged, or those of another model.
    """
    on_phase("join", 0)
    model = model_of(job, identity.task.rank)
    if _is_quantized(job.request, model):
        use_device(device := torch.device(identity.task.device))
        local = LocalModel(model=model.to(device), device=device, data_ranks=LocalCollective(), precision=Precision())
        return PlacedModel(local=local, close=lambda _failed: None)
    executor = job.strategy.setup(setup_request(job, identity, model, on_phase=on_phase))
    try:
        on_phase("load", 0)
        if job.request.source.checkpoint is not None:
            executor.load_state_dict(model_weights(load(Path(job.request.source.checkpoint)).tensors))
        executor.refresh_model()
    except BaseException:
        executor.close(failed=True)
        raise
    return PlacedModel(local=executor.local, close=lambda failed: executor.close(failed=failed))


def _is_quantized(request: JobRequest, model: nn.Module) -> bool:
    """Return whether the weights of an exported model are tensor subclasses, or none can be trained: then no optimizer,
    and so no strategy, accepts them.
    """
    if request.source.checkpoint is not None:
        return False
    params = list(model.parameters())
    return any(type(param.detach()) is not Tensor for param in params) or not any(one.requires_grad for one in params)


def model_of(job: Job, rank: int) -> nn.Module:
    """Return the model for the executor of a rank, once: initialised for a checkpoint to be loaded, or with the weights
    of a file.
    """
    cfg = job.cfg
    written = job.request.source.checkpoint is None
    model = job.model if written else model_of_rank(cfg, job.strategy, rank)
    apply_transforms(model, model_transforms_of(cfg), compiles=job.strategy.facts_in(PlanContext()).compiles)
    return model


def setup_request(job: Job, identity: Identity, model: nn.Module, *, on_phase: PhaseListener) -> SetupRequest:
    """Return what the strategy needs; its optimizer is never stepped."""
    parts = job.parts
    return SetupRequest(
        model=model,
        identity=identity,
        precision=parts.precision,
        numerics=parts.numerics,
        make_optimizer=lambda params: torch.optim.SGD(params.values(), lr=0.0),
        training=step_context(job),
        open_data=lambda _device: _NoTrainingData(),
        on_phase=on_phase,
    )


def step_context(job: Job) -> StepContext:
    """Return the settings of a step, which a job never executes."""
    size = job.cfg.batch.global_size or 1
    plan = BatchPlan(
        num_samples=size_of(job.dataset),
        global_size=size,
        micro_size=min(job.cfg.batch.micro_size or size, size),
        drop_last=False,
    )
    return StepContext(
        plan=plan,
        objective=job.parts.objective,
        weighing=LossWeighting(per_sample=1.0, planned=1.0),
        rule=lambda _version: UpdateParams(1.0, None),
    )


class _NoTrainingData:
    """Loader without batches: a job executes no step."""

    def fetch(self, ticket: Ticket) -> Sequence[Batch]:
        """Raise an error."""
        raise TrainingError(f"a job without training was asked for the batches of step {ticket.step}.")
