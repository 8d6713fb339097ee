"""Evaluate or predict with a trained model: in this process, or in as many as the strategy needs; one rank of it.

A job is a task of the agent like a training: every process reads its config from `resolved.yaml`, and its request from
`job.json` in the same folder.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from trainkit.cluster.host import count_gpus, use_device
from trainkit.cluster.tasks import Identity, Task
from trainkit.config.schema import RunConfig
from trainkit.config.targets.allowed import TARGET
from trainkit.data.hooks import Reading
from trainkit.data.reading.collate import shape_text
from trainkit.data.reading.iterable import Stream
from trainkit.data.reading.loader import EvalBatches
from trainkit.data.splits import build_split, build_splits, folded, read_sample, size_of, splits_of
from trainkit.errors import ConfigError, Problem, StopKind, TrainingError, TrainkitError, named_first_line, refuse
from trainkit.files import read_map
from trainkit.numerics.batch import BatchPlan, Ticket
from trainkit.numerics.copies import copied
from trainkit.numerics.generators import Untouched
from trainkit.numerics.precision import Precision
from trainkit.objectives.base import Access, needs_of
from trainkit.run.agent.agent import AgentSettings
from trainkit.run.agent.monitor import TimeLimits
from trainkit.run.agent.supervisor import supervise
from trainkit.run.begin import write_resolved
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.planning.build import Components, build_components, model_of_rank, model_transforms_of
from trainkit.run.planning.plan import plan_context
from trainkit.run.process.error_report import Reporter
from trainkit.run.process.heartbeat import beats_of
from trainkit.run.process.worker_group import JOB
from trainkit.run.signals import REASONS, StopFlag, stop_error
from trainkit.run.task import reproducible_process
from trainkit.strategies.base import (
    LocalModel,
    LossWeighting,
    PhaseListener,
    PlanContext,
    SetupRequest,
    StepContext,
    Strategy,
    TaskContext,
    UpdateParams,
    ignore_phase,
)
from trainkit.strategies.collectives import LocalCollective
from trainkit.strategies.model_transforms import apply_transforms
from trainkit.strategies.tensor_shards import model_weights
from trainkit.trained.build import build_model, meta_model
from trainkit.trained.model import load_described
from trainkit.trained.predict import Chunks, Outputs, Parts, compute_parts, predicted
from trainkit.trainer.checkpoint.tensors import load
from trainkit.trainer.evaluate import evaluate
from trainkit.trainer.manifest import MANIFEST
from trainkit.trainer.ownership import print_notice

FILE: Final = "job.json"
Verb = Literal["evaluate", "predict"]
Result = dict[str, Any]
"""Result of rank 0: `status`, and the figures of an evaluation."""
_CHEAP: Final = 50_000_000
"""Up to this number of parameters, the model is run on samples before anything starts."""
_PROGRESS_S: Final = 2.0
"""Seconds between two lines of progress."""


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """A job: its model, its data, and the operation."""

    verb: Verb
    split: str
    """The split of the data."""
    weights: str
    """The manifest of a checkpoint, or the description of a written model."""
    parts: str = ""
    """The folder of the parts of a prediction."""
    todo: Sequence[int] = field(default_factory=list)
    """The chunks that a prediction computes; the same on every rank."""

    @classmethod
    def read(cls, folder: Path) -> JobRequest:
        """Read the request of a job.

        Raises:
            UnreadableError: the file is not a request.
        """
        kinds = {"verb": str, "split": str, "weights": str, "parts": str, "todo": list}
        return cls(**read_map(folder / FILE, kinds))


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job with everything that is resolved before a process starts or a model is on a device."""

    cfg: RunConfig
    request: JobRequest
    parts: Components
    dataset: Any
    """The split to compute."""
    tasks: tuple[Task, ...]
    strategy: Strategy
    outputs: Outputs
    model: nn.Module
    """The model: for a written model, with its weights on the CPU; for a checkpoint, without data, if the constructor
    allows it.
    """

    @property
    def eval_batch_size(self) -> int:
        """Samples per forward pass in evaluation, as in the training."""
        return self.cfg.eval.batch_size or max(self.cfg.batch.micro_size or 0, 256)

    @property
    def chunks(self) -> Chunks:
        """The rows of a prediction."""
        return Chunks(num_rows=size_of(self.dataset), batch_size=self.cfg.predict.batch_size)

    @property
    def checkpoint(self) -> Path | None:
        """The folder of the checkpoint; None: the weights are those of a written model."""
        file = Path(self.request.weights)
        return file.parent if file.name == MANIFEST else None

    def reading(self, local: LocalModel) -> Reading:
        """Return how the samples are read on a rank."""
        return Reading(device=local.device, settings=self.cfg.loader, hooks=self.parts.hooks)

    @property
    def is_together(self) -> bool:
        """Whether ranks compute one forward pass together."""
        return self.strategy.facts_in(PlanContext()).forward_is_collective

    @property
    def is_quantized(self) -> bool:
        """Whether the weights of a written model are tensor subclasses, or none can be trained: then no optimizer, and
        so no strategy, accepts them.
        """
        if self.checkpoint is not None:
            return False
        params = list(self.model.parameters())
        has_gradients = any(param.requires_grad for param in params)
        return not has_gradients or any(type(param.detach()) is not Tensor for param in params)


def split_of(cfg: RunConfig, split: str | None) -> str:
    """Return the split to compute: the given one, or `val`, or the only one of data without `val`.

    Raises:
        ConfigError: the data has no such split.
    """
    names = ("train", "val") if cfg.cv.folds is not None else splits_of(cfg.data)
    if split is None and "val" not in names and len(names) == 1:
        return names[0]
    name = split or "val"
    if name not in names:
        rule = f"the data has {'the split' if len(names) == 1 else 'the splits'} {', '.join(names)}."
        raise ConfigError([Problem(key="--split", value=name, rule=rule, origin="command line")])
    return name


def prepare(cfg: RunConfig, request: JobRequest) -> Job:
    """Prepare a job; starts no process.

    Raises:
        ConfigError: the strategy or the outputs do not suit the model, the data or this machine.
        DataError: the dataset is absent, damaged or empty.
    """
    split = request.split
    dataset = build_split(cfg.data, split) if cfg.cv.folds is None else folded(build_splits(cfg.data), cfg.cv)[split]
    size_of(dataset)
    parts = build_components(cfg, {"train": dataset})
    facts = replace(plan_context(cfg, parts, num_gpus=count_gpus(), launch=None), micro_size=cfg.batch.micro_size or 1)
    outputs = Outputs.parse(cfg.predict.outputs)
    problems = list(parts.strategy.validate(facts))
    if request.verb == "evaluate":
        problems += parts.strategy.access_problems(facts)
    refuse(problems)
    file = Path(request.weights)
    model = meta_model(cfg) if file.name == MANIFEST else load_described(file)
    problems += parts.strategy.validate_model(model, facts)
    if request.verb == "predict":
        is_embedding = outputs.kind == "embedding"
        needs = set(needs_of(parts.objective)) | ({Access.methods} if is_embedding else set())
        problems += outputs.problems(parts.objective, model)
        if (refused := parts.strategy.facts_in(facts).refused_access(needs)) is not None:
            of_outputs = is_embedding and refused[0] is Access.methods
            key, value = "objective", type(parts.objective).__name__
            key, value = ("predict.outputs", outputs.text) if of_outputs else (key, value)
            problems.append(Problem(key=key, value=value, rule=f"{refused[0].value}, and {refused[1]}"))
    refuse(problems)
    job = Job(
        cfg=cfg,
        request=request,
        parts=parts,
        dataset=dataset,
        tasks=parts.strategy.tasks(facts),
        strategy=parts.strategy.resolve(lambda: model, facts),
        outputs=outputs,
        model=model,
    )
    if len(job.tasks) > 1 and job.is_quantized:
        rule = "a quantized model runs on one device. Leave it out."
        raise ConfigError([Problem(key="strategy", value=cfg.strategy[TARGET], rule=rule)])
    if any(task.is_evaluator for task in job.tasks):
        rule = f"has no effect on {request.verb}. Leave it out."
        raise ConfigError([Problem(key="strategy.evaluator", value=True, rule=rule)])
    return job


def _refuse_misfits(job: Job) -> None:
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
    objective, precision, evaluates = job.parts.objective, job.parts.precision, job.request.verb == "evaluate"

    def misfit(error: Exception) -> ConfigError:
        subject = "model and objective" if evaluates else "model"
        rule = f"the samples of {job.request.split} do not fit the {subject}: {named_first_line(error)}. A sample is "
        return ConfigError([Problem(key="data", value=job.cfg.data[TARGET], rule=f"{rule}{shape_text(samples[0])}.")])

    with Untouched(seed=0):
        model = build_model(job.cfg) if job.checkpoint is not None else job.model
        indices = range(min(2, size_of(job.dataset)))
        samples = [read_sample(job.dataset, index) for index in indices]
        batch = job.parts.hooks.collate_function(samples, indices)
        if not job.is_quantized:
            model = precision.adapt(copied(model) if model is job.model else model)
        try:
            with torch.no_grad(), precision.autocast(["cpu"]), job.outputs.of(model.eval(), objective) as outputs:
                if evaluates:
                    objective.loss(model, batch)
                else:
                    outputs(batch, num_rows=len(samples))
        except TrainkitError as error:
            if error.exit_code != 1:
                raise
            raise misfit(error) from error
        except Exception as error:
            if isinstance(error, NotImplementedError) or any(task.device != "cpu" for task in job.tasks):
                return
            raise misfit(error) from error


def run_job(job: Job, folder: Path, *, log: Callable[[str], None]) -> Result:
    """Run a job; its folder exists and holds nothing but parts of this job.

    Args:
        job: the prepared job.
        folder: folder for files of the processes and parts of a prediction.
        log: logs lines of progress.

    Returns:
        The result of rank 0: its `status` is `finished`, or the reason why it was stopped.

    Raises:
        TrainkitError: a process failed.
    """
    _refuse_misfits(job)
    run_folder = RunFolder(folder)
    if len(job.tasks) == 1:
        with StopFlag() as stop:
            return _run_task(job, Identity.solo(job.tasks[0].device), run_folder, stop, log=log) or {}
    run_folder.take()
    write_resolved(run_folder, replace(job.cfg, resume=None))
    (folder / FILE).write_text(json.dumps(asdict(job.request)), encoding="utf-8")
    run_folder.begin()
    note = "The finished rows are kept: the same command continues."
    settings = AgentSettings(
        max_restarts=0,
        environ={JOB: "1"},
        note_without_checkpoint=note if job.request.verb == "predict" else "",
        limits=TimeLimits.of(job.cfg.supervisor),
        auxiliary_ranks=[task.rank for task in job.tasks if not job.strategy.runs_loop(task)],
        replaceable=[task.rank for task in job.tasks if job.strategy.restarts_alone(task)],
    )
    try:
        return supervise(run_folder.resolved, job.tasks, settings, folder=run_folder)
    finally:
        run_folder.release_reserve()


def run_task_of_job(
    cfg: RunConfig, identity: Identity, folder: RunFolder, stop: StopFlag, report: Reporter
) -> dict[str, Any] | None:
    """Run the task of this process, one of several; rank 0 writes the result."""
    job = prepare(cfg, JobRequest.read(folder.path))
    result = _run_task(job, identity, folder, stop, log=print_notice, report=report)
    if result is not None:
        folder.write_result(result)
    return result


def _run_task(
    job: Job,
    identity: Identity,
    folder: RunFolder,
    stop: StopFlag,
    *,
    log: Callable[[str], None],
    report: Callable[[BaseException], object] = lambda _: None,
) -> Result | None:
    """Run one rank of a job to its end; return the result on rank 0, None on the others.

    `report` tells the parent process of an error; nothing: the only process raises its errors.
    """
    on_phase = beats_of(identity, folder) or ignore_phase
    task = _JobTask(job=job, requested=lambda: stop.requested, on_phase=on_phase, log=log)
    if not job.strategy.runs_loop(identity.task):  # an auxiliary task of the strategy, until rank 0 ends it
        request = _setup_request(job, identity, _model_of(job, identity.task.rank), on_phase=on_phase)
        job.strategy.run_auxiliary(TaskContext(**vars(request), num_steps=1, requested=task.requested))
        return None
    with ExitStack() as stack, reproducible_process(enabled=job.cfg.numerics.reproducible):
        if job.request.verb == "predict":  # the bytes of a prediction depend on the number of threads
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(job.cfg.predict.threads)
        on_phase("join", 0)
        local, close = _placed(job, identity, on_phase)
        try:
            result = task.evaluate(local) if job.request.verb == "evaluate" else task.predict(local)
        except BaseException as error:
            report(error)  # before this rank leaves its group
            close(failed=True)
            raise
        on_phase("end", 0)
        close(failed=False)
    return result if identity.task.rank == 0 else None


def _placed(job: Job, identity: Identity, on_phase: PhaseListener) -> tuple[LocalModel, Callable[..., None]]:
    """Place the trained model under the strategy of the job; return it, and what leaves the group of ranks; collective.

    Raises:
        CheckpointError: the weights are damaged, or those of another model.
    """
    model = _model_of(job, identity.task.rank)
    if job.is_quantized:
        use_device(device := torch.device(identity.task.device))
        local = LocalModel(model=model.to(device), device=device, data_ranks=LocalCollective(), precision=Precision())
        return local, lambda *, failed: None  # noqa: ARG005 - as `close` of an executor
    executor = job.strategy.setup(_setup_request(job, identity, model, on_phase=on_phase))
    try:
        on_phase("load", 0)
        if job.checkpoint is not None:
            executor.load_state_dict(model_weights(load(job.checkpoint).tensors))
        executor.refresh_model()
    except BaseException:
        executor.close(failed=True)
        raise
    return executor.local, executor.close


def _model_of(job: Job, rank: int) -> nn.Module:
    """Return the model for the executor of a rank, once: initialised for a checkpoint to be loaded, or with the weights
    of a file.
    """
    model = job.model if job.checkpoint is None else model_of_rank(job.cfg, job.strategy, rank)
    apply_transforms(model, model_transforms_of(job.cfg), compiles=job.strategy.facts_in(PlanContext()).compiles)
    return model


class _NoTrainingData:
    """Loader without batches: a job executes no step."""

    def fetch(self, ticket: Ticket) -> Sequence[Any]:
        """Raise an error."""
        raise TrainingError(f"a job without training was asked for the batches of step {ticket.step}.")


def _setup_request(job: Job, identity: Identity, model: nn.Module, *, on_phase: PhaseListener) -> SetupRequest:
    """Return what the strategy needs; its optimizer is never stepped, and a step is never executed."""
    parts, size = job.parts, job.cfg.batch.global_size or 1
    micro_size = min(job.cfg.batch.micro_size or size, size)
    plan = BatchPlan(num_samples=size_of(job.dataset), global_size=size, micro_size=micro_size, drop_last=False)
    return SetupRequest(
        model=model,
        identity=identity,
        precision=parts.precision,
        numerics=parts.numerics,
        make_optimizer=lambda params: torch.optim.SGD(params.values(), lr=0.0),
        training=StepContext(
            plan=plan,
            objective=parts.objective,
            weighing=LossWeighting(per_sample=1.0, planned=1.0),
            rule=lambda _version: UpdateParams(1.0, None),
        ),
        open_data=lambda _device: _NoTrainingData(),
        on_phase=on_phase,
    )


@dataclass(kw_only=True)
class _JobTask:
    """The work of one rank of a job."""

    job: Job
    requested: Callable[[], StopKind | None]
    """Function that returns why this process was asked to stop, or None."""
    on_phase: PhaseListener
    log: Callable[[str], None]
    """Function that logs a line of progress."""

    def evaluate(self, local: LocalModel) -> Result:
        """Return the figures and tables of a split."""
        job, objective, dataset = self.job, self.job.parts.objective, self.job.dataset
        size, together = job.eval_batch_size, job.is_together
        batches = EvalBatches(
            dataset, job.reading(local), batch_size=size, rank=local.rank, num_ranks=local.num_ranks, together=together
        )

        def watched() -> Iterator[Any]:
            for index, batch in enumerate(batches):
                if (reason := self.requested()) is not None:
                    raise stop_error(reason, "the evaluation was stopped, and nothing was written.")
                self.on_phase("evaluate", index)
                yield batch

        details, metrics = objective.details(dataset, batch_size=size), objective.metrics()
        more = {name: metric for name, metric in details.metrics.items() if name not in metrics}
        counted = batches.num_counted
        result = evaluate(local, objective, watched(), split=job.request.split, num_counted=counted, more_metrics=more)
        return {
            "status": "finished",
            "metrics": result.figures,
            "tables": {name: table.to_json() for name, table in result.tables.items()},
            "notes": list(details.notes),
            "num_samples": size_of(dataset),
        }

    def predict(self, local: LocalModel) -> Result:
        """Write the parts of this rank, and a line about the finished rows and the speed every two seconds."""
        job, parts = self.job, Parts(folder=Path(self.job.request.parts), chunks=self.job.chunks)
        begun = last = time.monotonic()
        before, total, count = parts.num_rows_done() if local.is_rank0 else 0, parts.chunks.num_rows, 0

        def goes_on() -> bool:
            nonlocal last, count
            if count:
                self.on_phase("evaluate", count)
            count += 1
            now = time.monotonic()
            if local.is_rank0 and now - last >= _PROGRESS_S:
                last, rows = now, parts.num_rows_done()
                rate = (rows - before) / (now - begun)
                remaining = f", {(total - rows) / rate:,.0f} s left" if rate else ""
                self.log(f"{rows:,} of {total:,} rows, {rate:,.0f} rows/s{remaining}")
            return self.requested() is None

        rows = partial(
            predicted, local, job.parts.objective, job.outputs, job.dataset, job.reading(local), chunks=job.chunks
        )
        done = compute_parts(
            local,
            parts,
            job.request.todo,
            lambda starts: rows(starts=starts),
            together=job.is_together,
            is_asked_to_stop=lambda: not goes_on(),
        )
        self.on_phase("idle", 0)  # other ranks may have more batches
        if local.all_ranks.sum(torch.tensor([float(not done)])).item() == 0:
            return {"status": "finished"}
        reason = self.requested() or "stopped"
        return {"status": reason, "reason": REASONS[reason]}
