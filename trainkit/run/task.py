"""Run one task of a run: one rank from its plan to `result.json`."""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from trainkit.cluster.host import memory_share
from trainkit.cluster.tasks import Identity, Task
from trainkit.config.commands import printed_command
from trainkit.config.schema import RunConfig
from trainkit.errors import AbsentFileError, CheckpointError, StopKind, StorageError, TrainingError
from trainkit.files import read_map, reporting
from trainkit.run.agent.self_watch import BeatCounter
from trainkit.run.begin import Result
from trainkit.run.estimates.remedies import explained
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.folder.run_result import RunResult
from trainkit.run.planning.build import build_callbacks
from trainkit.run.planning.plan import RunPlan, make_plan
from trainkit.run.planning.proof_records import last_proof
from trainkit.run.process.error_report import ErrorReport
from trainkit.run.process.heartbeat import Heartbeat, beats_of
from trainkit.run.process.nccl_dumps import recorder_variables
from trainkit.run.process.setup import variables
from trainkit.run.session.auxiliary import findings_of, run_auxiliary
from trainkit.run.session.loop_loss import LoopLoss
from trainkit.run.session.session import TaskSession
from trainkit.run.signals import StopFlag
from trainkit.strategies.base import ignore_phase
from trainkit.strategies.flight_recorder import FlightRecorder
from trainkit.trained.checking import NotExportableError
from trainkit.trained.export import export_at_end
from trainkit.trainer.ownership import uncontested

Report = Callable[[BaseException], ErrorReport]
"""Function that reports an error to the parent and the other ranks."""

_RESERVE: Final = 64 * 2**20
"""Bytes of unused address space that are freed for the report of an error, in case of a memory limit."""


def limit_memory(task: Task, tasks: Sequence[Task], share: float) -> None:
    """Limit what this process takes of its GPUs, which it shares with other jobs: its part of the job's share.

    Without a limit the first job to grow takes the memory of the others, whose steps then fail.
    """
    for device in {task.device, *task.computes_on} if share < 1 else ():
        if device.startswith("cuda"):
            num_ranks = sum(device in (other.device, *other.computes_on) for other in tasks)
            torch.cuda.set_per_process_memory_fraction(share / max(num_ranks, 1), device)


@dataclass(kw_only=True)
class TaskRun:
    """One task of a run in this process."""

    cfg: RunConfig
    """The resolved config."""
    identity: Identity
    """Rank and task of this process."""
    folder: RunFolder
    """The run folder; rank 0 owns it."""
    stop: StopFlag
    """Requests to stop this process."""
    plan: RunPlan | None = None
    """The plan of `cfg`, if the caller has computed it."""
    confirm: Callable[[], None] = uncontested
    """Function that raises if another worker group owns the folder now; called before files are written to it."""
    report: Report | None = None
    """Sends an error to the parent and the other ranks, before this rank leaves the group or closes anything; None:
    there are no others."""
    follow: Callable[[Callable[[], int]], None] = lambda _: None
    """Receives a function that returns the current step, once the training can begin; nothing: another process reads
    the step from the heartbeat."""
    beats: BeatCounter | None = None
    """Counts the heartbeats of a run of one process; None: heartbeats are written to the run folder for other
    processes."""
    begun: float = field(default_factory=time.perf_counter)
    session: TaskSession | None = None
    trained: dict[str, Any] = field(default_factory=dict)
    """Result of `TaskSession.finish`."""
    result: Result = None
    """Content of result.json on rank 0 after the end."""

    def step(self) -> int:
        """Return the current step; -1 before the session is open."""
        return -1 if self.session is None else self.session.run.state.step

    def run(self) -> Result:
        """Run the task to its end.

        Returns:
            Content of result.json on rank 0; None on other ranks.

        Raises:
            TrainkitError: the training failed; rank 0 has recorded it in result.json.
        """
        with self.opened() as session:
            if session is not None:
                self.end_with(session.train())
        return self.result

    def end_with(self, trained: dict[str, Any]) -> None:
        """Record the result of `TaskSession.finish`, for the end of `opened`."""
        self.trained = trained

    def receive(self, result: Result) -> None:
        """Replace the result by the agreed one of all processes of a launch."""
        self.result = result

    @contextmanager
    def opened(self, loop_loss: LoopLoss | None = None) -> Iterator[TaskSession | None]:
        """Open the session of this task; at the end of the block, record the result or the error, and close it.

        Args:
            loop_loss: holds the loss that a loop of the user's own gives to a step; None: the trainer's own loop runs.

        Yields:
            The session, which the block trains; None for an auxiliary task, which has ended by then.
        """
        folder, task = self.folder, self.identity.task
        recorder = FlightRecorder(folder.collectives_of, task.rank, self.step) if self.identity.store else nullcontext()
        dumps = variables(recorder_variables(folder) if task.device != "cpu" else {}, unless_set=True)
        with reproducible_process(enabled=self.cfg.numerics.reproducible), recorder, dumps:
            try:
                heartbeat = self.beats or beats_of(self.identity, folder)
                plan = self.plan = self.plan or make_plan(self.cfg)
                limit_memory(task, plan.tasks, memory_share(os.environ))
                if task.rank in plan.auxiliary_ranks:
                    explained_oom = explain_oom(plan, task, lambda: 0 if heartbeat is None else heartbeat.step)
                    with nullcontext() if task.is_evaluator else explained_oom, report_compiling(heartbeat):
                        requested, on_phase = lambda: self.stop.requested, heartbeat or ignore_phase
                        run_auxiliary(plan, self.identity, folder, requested=requested, on_phase=on_phase)
                    yield None
                    return
                with (
                    reporting(folder.path),
                    explain_oom(plan, task, lambda: None if self.session is None else self.step()),
                ):
                    session = self.session = self._open(plan, heartbeat, loop_loss)
                    self.follow(self.step)
                    if self.beats is not None:
                        self.beats.follow(self.step)
                    with report_compiling(heartbeat, session.count_compiling):
                        yield session
                total = time.perf_counter() - self.begun
                self.trained = {**self.trained, "seconds_total": total, **_checkpoint_paths(folder, plan)}
            except BaseException as error:
                ending = self._record_failure(error)
                if ending is not error:
                    raise ending from error
                raise
            _close_and_record(session, self.trained, folder, requested=lambda: self.stop.requested)
            self.result = self.trained if task.rank == 0 else None

    def _record_failure(self, error: BaseException) -> BaseException:
        """Report an error first, then save, and record it; return the error that ends this rank."""
        session, folder = self.session, self.folder
        if session is not None:
            error.add_note(f"rank {self.identity.task.rank}, step {self.step()}")
        lost = _reported(error, self.report)
        if session is not None:
            session.save_last(error)
        ending = unless_exit(error, self.report, None if session is None else self.step())
        failed = {**RunResult.of_error(ending, lost=lost).content(), "resume": folder.resume_command}
        if session is not None:
            failed = {**session.progress(), **failed, **_checkpoint_paths(folder, session.plan)}
            _close_and_record(session, failed, folder, ending)
        elif self.identity.task.rank == 0:
            with contextlib.suppress(OSError):
                folder.write_result({"skipped_steps": [], **failed})
        return ending

    def _open(
        self, plan: RunPlan, heartbeat: Heartbeat | BeatCounter | None, loop_loss: LoopLoss | None
    ) -> TaskSession:
        notes: list[str] = []
        with contextlib.suppress(AbsentFileError):  # a rank that was started by hand
            content = read_map(self.folder.environment, {"notes": list})
            notes = [note for note in content["notes"] if isinstance(note, str)]
        planned, present = len(plan.training_tasks), self.identity.num_ranks
        if present < planned:
            per_replica = plan.components.strategy.facts_in(plan.context).ranks_a_replica
            replicas = f"{present // per_replica} of {planned // per_replica}"
            notes += [f"continues with {replicas} replicas: they share the shards of each step"]
        session = TaskSession(
            plan,
            self.identity,
            self.folder.path,
            callbacks=build_callbacks(plan.cfg),
            stop_requested=lambda: self.stop.requested,
            check_fence=self.confirm,
            on_phase=heartbeat or ignore_phase,
            within_steps=heartbeat is not None and heartbeat.within_steps,
            notes=tuple(notes),
            loop_loss=loop_loss,
        )
        try:
            session.restore_or_init()
        except BaseException as error:
            _reported(error, self.report)
            session.close(failed=True)
            raise
        return session


def _reported(error: BaseException, report: Report | None) -> bool:
    """Report an error; return whether it only reports that another rank was lost."""
    if report is None or isinstance(error, KeyboardInterrupt):
        return False
    return report(error).is_secondary


def unless_exit(error: BaseException, report: Report | None, step: int | None) -> BaseException:
    """Return the error that ends a rank: for `sys.exit` in the only process of a run, one that names the call.

    Python would end that process with the code given to `sys.exit`, and 0 would count as success. If there is a parent,
    the parent names the rank.
    """
    if report is not None or not isinstance(error, SystemExit):
        return error
    frame = traceback.extract_tb(error.__traceback__)[-1]
    when = "while the run was starting" if step is None else f"in step {step}"
    return TrainingError(
        f"the process was to exit with code {error.code or 0} {when}, before the training was done: sys.exit was "
        f"called in {frame.filename}, line {frame.lineno}, in {frame.name}."
    )


def _close_and_record(
    session: TaskSession,
    result: dict[str, Any],
    folder: RunFolder,
    error: BaseException | None = None,
    requested: Callable[[], StopKind | None] = lambda: None,
) -> None:
    """Leave the process group, write the result, and call `run_end` of the callbacks, except after a second Ctrl-C.

    If the run has already failed, write errors are suppressed here: the error that ended the run is raised instead.
    """
    session.close(failed=error is not None)
    suppressed = () if error is None else (OSError, StorageError)
    with contextlib.suppress(*suppressed):
        if session.run.is_owner:
            session.check_fence()
            if session.plan.has_evaluator:
                result |= findings_of(session, folder, failed=error is not None, requested=requested)
                session.check_fence()
            result |= _exported(session, folder, result)
            folder.write_result(result)
    if not isinstance(error, KeyboardInterrupt):
        session.callbacks.call("run_end", session.run, result, suppressed=suppressed)


def _exported(session: TaskSession, folder: RunFolder, result: Mapping[str, Any]) -> dict[str, Any]:
    """Write the trained model of a finished run; an error is recorded, and the training stays finished."""
    if result["status"] != "finished" or not session.cfg.checkpoint.export:
        return {"model": None}
    try:
        with reporting(folder.path):
            export = export_at_end(
                folder.path, session.cfg, result["metrics"], folder.take(), working=lambda: session.enter("end")
            )
    except NotExportableError as error:
        return {"model": None, "model_note": str(error)}
    except CheckpointError as error:
        return {"model": None, "model_error": f"{error} Then: {printed_command('export', [folder.path])}"}
    return export.to_result()


def _checkpoint_paths(folder: RunFolder, plan: RunPlan) -> dict[str, Any]:
    """Return the checkpoint paths, the resume command, and the last proof of this training on this placement."""
    return {**folder.best_and_last(), "resume": folder.resume_command, "proved": last_proof(plan)}


@contextmanager
def explain_oom(plan: RunPlan, task: Task, step: Callable[[], int | None]) -> Iterator[None]:
    """Convert a failed allocation inside the block into an error with the memory that the run needs, and remedies.

    Raises:
        OutOfMemoryError: there was no memory, on the device, on the host or in /dev/shm.
        TrainingError: a kernel needs more on-chip memory than the device has.
    """
    with ExitStack() as reserve:
        with contextlib.suppress(OSError):  # a limit refuses it
            reserve.enter_context(mmap.mmap(-1, _RESERVE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        try:
            yield
        except Exception as error:
            reserve.close()
            if (explanation := explained(error, plan, task, step=step())) is None:
                raise
            raise explanation from error


@contextlib.contextmanager
def report_compiling(
    beats: Heartbeat | BeatCounter | None, count: Callable[[float], None] = lambda _: None
) -> Iterator[None]:
    """Enter the phase `compile` whenever torch.compile works, and give its seconds to `count`, within the block.

    Does nothing if torch.compile was not imported: creating any optimizer of torch imports it.
    """
    handler: Any = getattr(sys.modules.get("torch._dynamo.callback"), "callback_handler", None)
    if beats is None or handler is None:
        yield
        return
    before, begun = [(beats.phase, beats.step)], [0.0]

    def begins(*_: Any) -> None:
        begun[0] = time.perf_counter()
        step = beats.step  # call it first: it may begin the phase of another step
        before[0] = (beats.phase, step)
        beats("compile", step)

    def ends(*_: Any) -> None:
        count(time.perf_counter() - begun[0])
        if beats.phase == "compile":
            beats(*before[0])

    handler.register_start_callback(begins)
    handler.register_end_callback(ends)
    try:
        yield
    finally:
        handler.remove_start_callback(begins)
        handler.remove_end_callback(ends)


@contextmanager
def reproducible_process(*, enabled: bool) -> Iterator[None]:
    """Use one thread, deterministic algorithms and no autotuning; restore all settings afterwards.

    The number of threads changes how torch splits its own sums, which changes bits: 3 of 3 models differed between one
    and two threads.
    """
    if not enabled:
        yield
        return
    threads = torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    benchmark = torch.backends.cudnn.benchmark
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        with variables({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}):  # required by cuBLAS, which reads it at its first use
            yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)
        torch.backends.cudnn.benchmark = benchmark
