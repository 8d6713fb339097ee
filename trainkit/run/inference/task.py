"""One rank of a job, from its executor to the figures of an evaluation or the parts of a prediction."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from trainkit.cluster.tasks import Identity
from trainkit.config.schema import RunConfig
from trainkit.data.hooks import Reading
from trainkit.data.reading.loader import EvalBatches
from trainkit.data.splits import size_of
from trainkit.inference.parts import Chunks, Parts
from trainkit.inference.predicting import PartsComputation
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.inference.job import Job, model_of, place_model, prepare, setup_request
from trainkit.run.inference.request import JobRequest
from trainkit.run.process.error_report import Reporter
from trainkit.run.process.heartbeat import beats_of
from trainkit.run.signals import REASONS, Reason, StopFlag, stop_error
from trainkit.run.task import reproducible_process
from trainkit.strategies.base import LocalModel, PhaseListener, PlanContext, TaskContext, ignore_phase
from trainkit.trainer.evaluate import evaluate
from trainkit.trainer.ownership import print_notice

_PROGRESS_S: Final = 2.0
"""Seconds between two lines of progress."""

Result = dict[str, Any]
"""Result of rank 0: `status`, and the figures of an evaluation."""


@dataclass(kw_only=True)
class JobTask:
    """One rank of a job."""

    job: Job
    identity: Identity
    requested: Callable[[], Reason | None]
    """Function that returns why this process was asked to stop, or None."""
    on_phase: PhaseListener
    log: Callable[[str], None]
    """Function that logs a line of progress."""
    report: Callable[[BaseException], object] = lambda _: None
    """Function that reports an error to the parent process; nothing: the only process raises its errors."""

    def run(self) -> Result | None:
        """Run the task to its end; return the result on rank 0, None on the others."""
        job = self.job
        if not job.strategy.runs_loop(self.identity.task):
            self._assist()
            return None
        work = {"evaluate": self._evaluate, "predict": self._predict}[job.request.verb]
        with _threads(job), reproducible_process(enabled=job.cfg.numerics.reproducible):
            placed = place_model(job, self.identity, on_phase=self.on_phase)
            try:
                result = work(placed.local)
            except BaseException as error:
                self.report(error)  # before this rank leaves its group
                placed.close(True)
                raise
            self.on_phase("end", 0)
            placed.close(False)
        return result if self.identity.task.rank == 0 else None

    def _assist(self) -> None:
        """Run an auxiliary task of the strategy until rank 0 ends it."""
        model = model_of(self.job, self.identity.task.rank)
        request = setup_request(self.job, self.identity, model, on_phase=self.on_phase)
        context = TaskContext(**vars(request), num_steps=1, requested=self.requested)
        self.job.strategy.run_auxiliary(context)

    def _evaluate(self, local: LocalModel) -> Result:
        job = self.job
        objective, dataset, split = job.parts.objective, job.dataset, job.request.split
        batches = EvalBatches(
            dataset,
            Reading(device=local.device, settings=job.cfg.loader, hooks=job.parts.hooks),
            batch_size=job.eval_batch_size,
            rank=local.rank,
            num_ranks=local.num_ranks,
            together=job.strategy.facts_in(PlanContext()).forward_is_collective,
        )
        details = objective.details(dataset, batch_size=job.eval_batch_size)
        own = objective.metrics()
        more = {name: metric for name, metric in details.metrics.items() if name not in own}
        watched = self._watched(batches)
        found = evaluate(local, objective, watched, split=split, num_counted=batches.num_counted, more_metrics=more)
        return {
            "status": "finished",
            "metrics": found.figures,
            "tables": {name: table.to_json() for name, table in found.tables.items()},
            "notes": list(details.notes),
            "num_samples": size_of(dataset),
        }

    def _watched(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches with a heartbeat each, until this process is asked to stop."""
        for place, batch in enumerate(batches):
            if (reason := self.requested()) is not None:
                raise stop_error(reason, "the evaluation was stopped, and nothing was written.")
            self.on_phase("evaluate", place)
            yield batch

    def _predict(self, local: LocalModel) -> Result:
        job = self.job
        chunks = Chunks(num_rows=size_of(job.dataset), batch_size=job.cfg.predict.batch_size)
        parts = Parts(folder=Path(job.request.parts), chunks=chunks)
        progress = Progress(parts, log=self.log) if local.is_rank0 else None

        def batch_done(count: int) -> None:
            self.on_phase("evaluate", count)
            if progress is not None:
                progress.tick()

        done = PartsComputation(
            local=local,
            objective=job.parts.objective,
            outputs=job.outputs,
            dataset=job.dataset,
            parts=parts,
            settings=job.cfg.loader,
            hooks=job.parts.hooks,
            together=job.strategy.facts_in(PlanContext()).forward_is_collective,
            is_asked_to_stop=lambda: self.requested() is not None,
            batch_done=batch_done,
        ).run(job.request.todo)
        self.on_phase("idle", 0)  # other ranks may have more batches
        if local.all_ranks.sum(torch.tensor([float(not done)])).item() == 0:
            return {"status": "finished"}
        reason = self.requested() or "stopped"
        return {"status": reason, "reason": REASONS[reason]}


class Progress:
    """Logs the number of finished rows and the speed every two seconds."""

    def __init__(self, parts: Parts, *, log: Callable[[str], None]) -> None:
        self._parts, self._log = parts, log
        self._begun = self._last = time.monotonic()
        self._rows = parts.num_rows_done()

    def tick(self) -> None:
        """Log a line if it is due."""
        now = time.monotonic()
        if now - self._last < _PROGRESS_S:
            return
        self._last = now
        rows, total = self._parts.num_rows_done(), self._parts.chunks.num_rows
        rate = (rows - self._rows) / (now - self._begun)
        left = f", {(total - rows) / rate:,.0f} s left" if rate else ""
        self._log(f"{rows:,} of {total:,} rows, {rate:,.0f} rows/s{left}")


@contextmanager
def _threads(job: Job) -> Iterator[None]:
    """Compute a prediction with the number of threads of its request, on which its bytes depend."""
    if job.request.verb != "predict":
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(job.cfg.predict.threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def run_task_of_job(
    cfg: RunConfig, identity: Identity, folder: RunFolder, stop: StopFlag, report: Reporter
) -> dict[str, Any] | None:
    """Run the task of this process, one of several; rank 0 writes the result."""
    task = JobTask(
        job=prepare(cfg, JobRequest.read(folder.path)),
        identity=identity,
        requested=lambda: stop.requested,
        on_phase=beats_of(identity, folder) or ignore_phase,
        log=print_notice,
        report=report,
    )
    result = task.run()
    if result is not None:
        folder.write_result(result)
    return result
