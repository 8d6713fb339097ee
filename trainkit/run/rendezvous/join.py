"""Train in an external launch: its processes meet at a store, agree, and train in one run folder.

- Every process composes and checks its own config, and waits at the store of the launch; missing ranks are reported.
- All compare the hash of their configs: a different one is refused, and nothing is written.
- Rank 0 finds where to begin; all plan it (`trainkit.run.begin.begun`).
- Rank 0 creates, locks and marks the one run folder; all check that they see it.
- All train: rank 0 at the terminal, the others into logs/rank_N.log.
- Late ones join, if the others need not wait for them (`join_running_job`).
- All end with one exit code.

TF_CONFIG and a cluster spec name one task per host. Such a task starts one worker per device and watches them; workers
are not restarted: a failure ends this task, and with it the others.

Workers without state and the evaluator may join late or again. The others begin without them; then the chief publishes
the folder, batch and config of the run in the store, or why it cannot begin, and a task that arrives reads them. No
process waits for a task that leaves.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from secrets import token_hex
from typing import Any, Final, TypeVar

import torch

from trainkit.cluster.host import mig_instances, num_cores, own_cores, threads_of
from trainkit.cluster.launch import LaunchEnvironment, socket_environ
from trainkit.cluster.tasks import Identity, Task
from trainkit.config.identity import fingerprint, run_config
from trainkit.config.schema import RunConfig
from trainkit.config.targets.build import build
from trainkit.errors import (
    ConfigError,
    CrashLoopError,
    HangError,
    HangupError,
    PeerError,
    StopKind,
    StoppedError,
    TerminatedError,
    TrainkitError,
    UnreadableError,
    refuse,
)
from trainkit.files import Kind, expect_map, expect_maps, parse_json, read_map, whole_numbers, write_json_atomically
from trainkit.run.agent.agent import Agent, AgentSettings, Launch
from trainkit.run.agent.monitor import TimeLimits
from trainkit.run.agent.policy import record_relaunch
from trainkit.run.backends.engine import failure_in
from trainkit.run.begin import Agreement, BegunRun, Job, Result, ResumePoint, RunRequest, adopt, begun, find_start
from trainkit.run.folder.run_folder import FENCE, FencingToken, RunFolder
from trainkit.run.folder.run_result import ENDING, RunResult, record_failure
from trainkit.run.planning.plan import RunPlan, make_plan, plan_to_environ
from trainkit.run.process.error_report import Reporter, error_report, report_from_json
from trainkit.run.process.fork_server import ENTRY, worker_group_factory
from trainkit.run.process.setup import announce_log, identity_for, redirect_output
from trainkit.run.process.worker_group import worker_environ
from trainkit.run.rendezvous.barrier import (
    ProcessBarrier,
    StoreClient,
    WaitReporter,
    facts_of_plan,
    mismatches,
    refuse_mismatches,
    values_of,
)
from trainkit.run.rendezvous.shutdown import SharedEnding, ending_together
from trainkit.run.session.auxiliary import training_has_ended
from trainkit.run.signals import StopFlag, ignore_request, stop_error
from trainkit.run.task import TaskRun
from trainkit.strategies.base import PlanContext, Strategy
from trainkit.trainer import failpoints

_OPEN_KEY: Final = "trainkit/open"
_JOIN_INFO: Final[Mapping[str, Kind]] = {
    **dict.fromkeys(("prefix", "folder", "fence", "token"), str),
    "likeness": dict,
    "batch": list,
    "num_gpus": int,
}
_REFUSAL: Final[Mapping[str, Kind]] = {"prefix": str, "failed": dict}
_POLL_S: Final = 0.2
_TOKEN: Final = "TRAINKIT_TOKEN"  # noqa: S105 - the name of the variable that holds it
_REFUSAL_S: Final = 5.0
"""Seconds for which a chief that cannot begin waits until the late tasks have read why."""
_SHUTDOWN_GRACE_S: Final = 30.0
"""Seconds that a stopped task waits for the chief to write the result."""


def late_joining_ranks(cfg: RunConfig, launch: LaunchEnvironment) -> frozenset[int]:
    """Return the ranks of a launch that the others do not wait for: those that may be started by hand, one by one.

    A launcher starts and ends all of its processes together.

    Raises:
        ConfigError: the strategy cannot be built.
    """
    strategy: Strategy = build(cfg.strategy, "strategy")
    alone = [task for task in strategy.tasks(PlanContext(launch=launch.training)) if strategy.restarts_alone(task)]
    evaluator = [task for task in launch.tasks if task.is_evaluator]
    return frozenset(task.rank for task in (*alone, *evaluator) if launch.by_hand)


@contextlib.contextmanager
def refusing_late_tasks(barrier: ProcessBarrier, late: Collection[int]) -> Iterator[None]:
    """Tell the late tasks, if the run cannot begin, and give them time to read it before the store ends; for rank 0."""
    try:
        yield
    except Exception as error:
        if late and barrier.launch.rank == 0:
            failed = {"prefix": barrier.prefix, "failed": asdict(error_report(0, error))}
            with contextlib.suppress(RuntimeError):  # the store's DistError
                barrier.store.set(_OPEN_KEY, json.dumps(failed))
                unread, deadline = {f"refused/{rank}" for rank in late}, time.monotonic() + _REFUSAL_S
                while unread and (left_s := deadline - time.monotonic()) > 0:
                    unread -= barrier.read_any(unread, within_s=left_s).keys()
        raise


def join_running_job(cfg: RunConfig, launch: LaunchEnvironment) -> dict[str, Any]:
    """Run a task that may join late; arguments as in `train_external`.

    Returns:
        Status and reason of the run.

    Raises:
        ConfigError: it cannot be planned, differs from that of the chief, or sees another folder.
        PeerError: the chief could not begin.
        HangError: the chief did not arrive, or is gone.
        StoppedError, TerminatedError, HangupError: this process was asked to end; the others continue.
    """
    task, datasets = launch.task, None
    if cfg.resume is None and not task.is_evaluator:  # nobody waits for this task: refuse before the chief is there
        datasets = make_plan(cfg, launch=launch).components.datasets
    store = StoreClient(launch)
    waiter = WaitReporter(lambda: launch.place_of(0), timeout_s=cfg.supervisor.join_timeout_s)
    with ExitStack() as stack:
        stack.callback(store.close)
        store.open(stack, waiter)
        while (info := _checked(store, stack, waiter)) is None:
            waiter.wait(_POLL_S)
        if "failed" in info:
            store.set(f"{info['prefix']}/refused/{launch.rank}", "true")
            report = info["failed"]
            raise PeerError(f"{task} ends with {launch.place_of(0)}: {report.summary}", exit_code=report.exit_code)
        others = {launch.place_of(0): info["likeness"]}
        refuse(mismatches(values_of(cfg), others, origin=launch.place_of(launch.rank)))
        global_size, micro_size = info["batch"]
        batch = replace(cfg.batch, global_size=global_size, micro_size=micro_size, accumulation=None)
        num_gpus = info["num_gpus"] if task.is_evaluator else None  # it plans what the others train
        plan = make_plan(replace(cfg, batch=batch), launch=launch, num_gpus=num_gpus, splits=datasets)
        folder = RunFolder(Path(info["folder"]))
        fencing_token = FencingToken.verify(folder, info["fence"])
        identity = identity_for(
            launch,
            plan,
            store=store.address,
            prefix=info["prefix"],
            token=os.environ.get(_TOKEN) or info["token"],
            life=store.add(f"{info['prefix']}/lives/{launch.rank}", 1) - 1,
        )
        failpoints.reload({**os.environ, **identity.to_environ()})
        rank = identity.task.rank
        reporter = Reporter(folder.error_of(rank), rank)
        announce_log(launch, folder.log_of(rank))
        with (
            redirect_output(folder.log_of(rank)),
            StopFlag(ignore_request if identity.task.is_evaluator else _abort_task) as stop,
        ):
            try:
                TaskRun(
                    cfg=plan.cfg,
                    identity=identity,
                    folder=folder,
                    stop=stop,
                    plan=plan,
                    confirm=fencing_token.check,
                    report=reporter,
                ).run()
            except (StoppedError, TerminatedError, HangupError, KeyboardInterrupt):
                raise
            except (Exception, SystemExit) as error:  # noqa: BLE001 - reported with the cause of this task
                _raise_cause(launch, folder, error, reporter)
        if stop.requested:
            raise stop_error(stop.requested, "the others continue.")
        deadline = time.monotonic() + _SHUTDOWN_GRACE_S
        while (result := folder.read_result()) is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        result = result or RunResult.of_status("finished").content()
        return {**{key: result.get(key) for key in ENDING}, "folder": str(folder.path)}


def _checked(store: StoreClient, stack: ExitStack, waiter: WaitReporter) -> dict[str, Any] | None:
    """Return the join information of the chief; None as long as there is none."""
    try:
        if not store.has(_OPEN_KEY):
            return None
        message = store.message(_OPEN_KEY)
    except RuntimeError:  # the store's DistError: the store of a run that was just ending
        store.open(stack, waiter)
        return None
    try:
        if isinstance(message, dict) and "failed" in message:
            refusal = expect_map(message, _REFUSAL)
            return {**refusal, "failed": report_from_json(refusal["failed"])}
        info = expect_map(message, _JOIN_INFO)
        whole_numbers([size for size in info["batch"] if size is not None])
        if len(info["batch"]) != len(("global_size", "micro_size")):
            raise ValueError("its batch is not two numbers")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise store.misfit(_OPEN_KEY, ValueError(str(error))) from None
    return info


def _abort_task(reason: StopKind) -> None:
    """End this task at once: other tasks take over its work."""
    raise stop_error(reason, "asked to end; the others continue.")


def _raise_cause(launch: LaunchEnvironment, folder: RunFolder, error: BaseException, reporter: Reporter) -> None:
    """Raise the error that ended this task, unless the training had ended before."""
    if training_has_ended(folder):
        return
    report = reporter(error)
    sys.stderr.write("".join(traceback.format_exception(error)))  # printed to its log
    if not report.is_secondary:
        raise error
    if not training_has_ended(folder):
        raise HangError(
            f"{launch.place_of(0)} cannot be reached any more, and the run needs it. Start every task again; "
            "resume=auto continues from the last checkpoint."
        ) from error


_KEY: Final = "folder"
_RAISED: Final[Mapping[str, Kind]] = {"task": str, "rank": int, "step": (int, type(None)), "text": str}
"""Fields that a group stores about the exceptions that ended it."""
ENDED: Final = ("finished", "stopped")
"""Statuses of a run that its launcher does not restart; a user who repeats the command wants another run."""


def resume_point_of_launch(cfg: RunConfig, run_dir: Path | None, barrier: ProcessBarrier) -> ResumePoint:
    """Find the resume point of the launch; for rank 0.

    A launcher that restarts its processes repeats their command, and expects them to continue. The folder of the launch
    is found in the launcher's store, or below `outputs/<name>/.launches` by the name of the launch.

    Raises:
        ConfigError: the path in `resume` does not exist, or is another training.
    """
    launch = barrier.launch
    for path in (_of_earlier_group(barrier, _KEY), _recorded(cfg, launch), run_dir if launch.attempt else None):
        start = None if path is None else _continued(cfg, Path(path))
        if start is not None:
            return start
    return find_start(cfg, run_dir)


def _continued(cfg: RunConfig, path: Path) -> ResumePoint | None:
    """Return a start that continues in a folder, if it holds this training, and the training has not ended."""
    folder = RunFolder(path)
    result = folder.read_result()
    if not folder.resolved.is_file() or (result is not None and result.get("status") in ENDED):
        return None
    try:
        earlier = run_config(path)
    except (ConfigError, UnreadableError):
        return None
    adopted = adopt(cfg, earlier)
    if fingerprint(adopted) != fingerprint(earlier):
        return None
    note = f"restarted by the launcher: continues {path}"
    return ResumePoint(cfg=adopted, folder=folder, note=note, relaunched=True)


def note_restart_of(folder: RunFolder, barrier: ProcessBarrier) -> None:
    """Record that the launcher has restarted all processes; for rank 0, before it writes the initial files of the
    folder.

    Raises:
        CrashLoopError: user code raised the same exception twice in the same place. If the launcher restarts the
            processes even so, they end in the same way at once.
    """
    failure, key = failure_in(folder), "raised"
    try:
        entries = expect_maps(parse_json(_of_earlier_group(barrier, key) or "[]"), _RAISED)
    except ValueError as error:
        raise barrier.store.misfit(f"trainkit/{key}", error) from None
    before = [{name: entry[name] for name in _RAISED} for entry in entries]
    relaunch = record_relaunch(folder, failure, before=before)
    if relaunch.refusal is not None and failure is not None:
        refusal = CrashLoopError(f"{relaunch.refusal}: {failure.error()}")
        record_failure(folder, refusal)
        raise refusal
    barrier.store.set(f"trainkit/{key}", json.dumps(relaunch.to_json()))


def _of_earlier_group(barrier: ProcessBarrier, key: str) -> str | None:
    """Return the value that an earlier group of this launch stored; None if there is none, or its store is gone."""
    name = f"trainkit/{key}"
    return barrier.store.get(name).decode(errors="replace") if barrier.store.has(name) else None


def _record(cfg: RunConfig, launch: LaunchEnvironment) -> Path:
    name = re.sub(r"[^A-Za-z0-9._-]", "_", launch.name)
    return Path("outputs") / cfg.name / ".launches" / f"{name}.json"


def _recorded(cfg: RunConfig, launch: LaunchEnvironment) -> str | None:
    if not launch.name:
        return None
    try:
        return str(read_map(_record(cfg, launch), {"folder": str})["folder"])
    except UnreadableError:
        return None


T = TypeVar("T")

_LOCK_TIMEOUT_S: Final = 10.0
"""Seconds that the previous group may take to end after its launcher has started a new one."""


def train_external(request: RunRequest, launch: LaunchEnvironment, job: Job | None) -> dict[str, Any]:
    """Train as one process of an external launch; arguments and result as in `trainkit.run.runner.train`.

    Raises:
        ConfigError: this combination of settings is invalid, or processes were started with different configs.
        HangError: a process did not arrive.
        PeerError: another process failed.
    """
    announce(launch)
    if launch.rank in late_joining_ranks(request.cfg, launch):
        return join_running_job(request.cfg, launch)
    with joined(request, launch) as group:

        def run() -> Result:
            with group.ending() as ending:
                ending.finish(group.run_here(ending))
            return ending.result

        with group.recorded():
            result = (run() if job is None or launch.rank > 0 else job(group.run.folder.path, run)) or {}
        group.end(result)
        return {**result, "folder": str(group.run.folder.path)}


@dataclass(frozen=True, kw_only=True)
class JoinedGroup:
    """The processes of a launch, which have agreed on the plan and the folder of a run; one process's view."""

    barrier: ProcessBarrier
    run: BegunRun
    fence: FencingToken
    token: str
    """Secret of the group for its auxiliary tasks; empty if it has none."""

    @property
    def ranks_here(self) -> int:
        """Ranks that this process runs: several if it has all devices of a host."""
        return len(self.run.plan.training_tasks) // self.barrier.launch.training.num_ranks

    def ending(self) -> AbstractContextManager[SharedEnding]:
        """Return a block that runs this process's part, and ends it with the others."""
        return ending_together(self.barrier, self.run, self.fence, runs_local_workers=self.ranks_here > 1)

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Record the output inside: that of rank 0 with the status of the run, that of another rank in its log."""
        launch = self.barrier.launch
        if launch.rank > 0:
            announce_log(launch, log := self.run.folder.log_of(launch.rank))
            with redirect_output(log):
                yield
            return
        with self.run.recorded(first=[launch.line()]):
            yield

    def run_here(self, ending: SharedEnding) -> Result:
        """Run the rank or the ranks of this process."""
        if self.ranks_here > 1:
            return run_local_workers(HostLaunch(self, ending.peers.look))
        with self.task(ending.report) as task:
            return task.run()

    @contextlib.contextmanager
    def task(self, report: Reporter) -> Iterator[TaskRun]:
        """Give the rank of this process, which the block runs; stop signals are caught inside."""
        barrier = self.barrier
        identity = identity_for(
            barrier.launch, self.run.plan, store=barrier.store.address, prefix=barrier.prefix, token=self.token
        )
        failpoints.reload({**os.environ, **identity.to_environ()})
        with StopFlag() as stop:
            yield TaskRun(
                cfg=self.run.resolved,
                identity=identity,
                folder=self.run.folder,
                stop=stop,
                plan=self.run.plan,
                confirm=self.fence.check,
                report=report,
            )

    def end(self, result: Mapping[str, Any]) -> None:
        """Clear the record of the folder of a run that has ended, so that a restart of the launch begins a new run."""
        if self.barrier.launch.rank == 0 and result.get("status") in ENDED:
            cfg, launch = self.run.plan.cfg, self.barrier.launch
            if _recorded(cfg, launch) == str(self.run.folder.path.absolute()):  # the record of another folder stays
                _record(cfg, launch).unlink(missing_ok=True)


@contextlib.contextmanager
def joined(request: RunRequest, launch: LaunchEnvironment) -> Iterator[JoinedGroup]:
    """Meet the other processes of a launch, and agree with them on the plan and the folder of the run; collective."""
    cfg = request.cfg
    late = late_joining_ranks(cfg, launch)
    ranks = [rank for rank in range(launch.num_ranks) if rank not in late]
    stopped_s = TimeLimits.of(cfg.supervisor).of_stopped(None).seconds
    meeting = ProcessBarrier(launch, timeout_s=cfg.supervisor.join_timeout_s, stopped_s=stopped_s, ranks=ranks)
    with meeting as barrier, ExitStack() as stack:
        with refusing_late_tasks(barrier, late):
            refuse_mismatches(barrier, values_of(cfg))
            launch = share_host(barrier, launch)
            run = stack.enter_context(begun(request, LaunchAgreement(barrier, launch)))
            plan, folder, fence = run.plan, run.folder, run.fence
            assert fence is not None
            if launch.rank == 0:  # for the next start of this launch
                path = str(folder.path.absolute())
                barrier.store.set(f"trainkit/{_KEY}", path)
                if launch.name:
                    (record := _record(plan.cfg, launch)).parent.mkdir(parents=True, exist_ok=True)
                    write_json_atomically(record, {"launch": launch.name, "folder": path})
            # A token of the chief goes through the store, where any process that reaches its port can read it.
            shared = barrier.run_on_rank0(lambda: token_hex(32)) if plan.auxiliary_ranks else ""
            token = os.environ.get(_TOKEN) or shared if plan.auxiliary_ranks else ""
            if late and launch.rank == 0:
                info = {
                    "prefix": barrier.prefix,
                    "likeness": values_of(cfg),  # the composed config of a late task has to equal this one
                    "batch": [plan.batch.global_size, plan.batch.micro_size],
                    "num_gpus": plan.context.num_gpus,
                    "folder": str(folder.path.absolute()),
                    "fence": fence.token,
                    "token": "" if os.environ.get(_TOKEN) else token,
                }
                barrier.store.set(_OPEN_KEY, json.dumps(info))
        yield JoinedGroup(barrier=barrier, run=run, fence=fence, token=token)


def announce(launch: LaunchEnvironment) -> None:
    """Set the environment variables for the network, and print the identity of this process."""
    for name, value in socket_environ(launch.store[0], on_one_host=launch.num_hosts == 1).items():
        os.environ.setdefault(name, value)
    if launch.rank == 0 or launch.by_hand:
        print(launch.line(), file=sys.stderr, flush=True)  # noqa: T201 - meant for the terminal


def share_host(barrier: ProcessBarrier, launch: LaunchEnvironment) -> LaunchEnvironment:
    """Set the threads of torch by the share of this process in the cores of its host, unless the user has set them.

    Returns:
        The launch, with whether each process of this host sees one GPU, different for each (`srun --gpus-per-task=1`,
        pods); otherwise all share the GPUs that they see. Collective.
    """
    shares = launch.num_local > 1 and not launch.takes_devices
    facts = {"host": socket.gethostname(), "cores": own_cores(), "gpu": device_of_process() if shares else ""}
    peers = barrier.all_gather_object(facts)
    if "OMP_NUM_THREADS" not in os.environ:  # torchrun sets it on hosts with several processes only
        torch.set_num_threads(threads_of(facts, peers))
    return replace(launch, has_own_gpu=bool(facts["gpu"]) and [peer["gpu"] for peer in peers].count(facts["gpu"]) == 1)


def device_of_process() -> str:
    """Return the UUID of the only CUDA device that this process sees; empty if there is none, or more than one."""
    if torch.cuda.device_count() != 1 or mig_instances(os.environ)[1:]:
        return ""
    return str(torch.cuda.get_device_properties(0).uuid)


class LaunchAgreement(Agreement):
    """The processes of a launch, which agree over its store: only rank 0 reads and writes folders, which other hosts
    may see differently.
    """

    def __init__(self, barrier: ProcessBarrier, launch: LaunchEnvironment) -> None:
        self.launch = launch
        self._barrier = barrier

    def everywhere(self, work: Callable[[], T]) -> T:
        """Run a function in every process; if it fails in one, all fail; collective."""
        return self._barrier.run_everywhere(work)

    def on_rank0(self, work: Callable[[], dict[str, str]]) -> dict[str, str]:
        """Run a function on rank 0, and return its result, or raise its error, everywhere; collective."""
        return self._barrier.run_on_rank0(work)

    def find_start(self, cfg: RunConfig, run_dir: Path | None) -> ResumePoint:
        """Return the state that rank 0 finds; collective."""
        starts: list[ResumePoint] = []

        def find() -> dict[str, Any]:
            starts.append(resume_point_of_launch(cfg, run_dir, self._barrier))
            (start,) = starts
            batch = start.cfg.batch
            paths = {"folder": None if start.folder is None else start.folder.path, "checkpoints": start.checkpoints}
            return {
                "batch": [batch.global_size, batch.micro_size, batch.accumulation],
                "num_workers": start.cfg.loader.num_workers,
                "changes": start.cfg.changes,
                **{name: None if path is None else str(path.absolute()) for name, path in paths.items()},
            }

        shared = self._barrier.run_on_rank0(find)
        if starts:
            return starts[0]
        global_size, micro_size, accumulation = shared["batch"]
        batch = replace(cfg.batch, global_size=global_size, micro_size=micro_size, accumulation=accumulation)
        loader = replace(cfg.loader, num_workers=shared["num_workers"])
        return ResumePoint(
            cfg=replace(cfg, batch=batch, loader=loader, changes=shared["changes"], resume_allows=[]),
            folder=RunFolder(Path(shared["folder"])) if shared["folder"] else None,
            checkpoints=Path(shared["checkpoints"]) if shared["checkpoints"] else None,
        )

    def compare(self, plan: RunPlan) -> None:
        """Refuse processes whose plans differ, but for auxiliary tasks, which compute something else; collective."""
        if plan.num_computing == len(plan.training_tasks):
            facts = facts_of_plan(plan, len(self._barrier.ranks), self._barrier.launch.rank)
            refuse_mismatches(self._barrier, facts, remedy="All need the same.")

    @contextlib.contextmanager
    def lock(self, folder: RunFolder, *, is_new: bool) -> Iterator[int]:
        """Hold the lock of the folder, whose previous group may still be ending."""
        deadline = time.monotonic() + (0.0 if is_new else _LOCK_TIMEOUT_S)
        with ExitStack() as stack:
            while True:
                try:
                    descriptor = stack.enter_context(folder.lock())
                    break
                except ConfigError:
                    if time.monotonic() >= deadline:
                        raise
                    time.sleep(0.2)
            yield descriptor

    def claim(self, folder: RunFolder, start: ResumePoint) -> dict[str, str]:
        """Take the folder from earlier groups."""
        folder.take()
        token = FencingToken.acquire(folder).token
        if start.relaunched:
            note_restart_of(folder, self._barrier)
        return {"fence": token}

    def fenced(self, folder: RunFolder, claimed: Mapping[str, str]) -> FencingToken:
        """Check that this host sees the folder of rank 0; return the token of this group."""
        return FencingToken.verify(folder, claimed["fence"])


class HostLaunch(Launch):
    """The workers of one host of an external launch, for their agent.

    Args:
        group: this process among those of the launch.
        peers: returns the error of another host, with which the workers of this host have to end.
    """

    def __init__(self, group: JoinedGroup, peers: Callable[[], TrainkitError | None]) -> None:
        super().__init__(group.run.folder)
        self.group, self.plan, self._peers = group, group.run.plan, peers
        first = group.barrier.launch.rank * group.ranks_here
        self.tasks = self.plan.tasks[first : first + group.ranks_here]
        self.sees_all = len(self.tasks) == len(self.plan.training_tasks)

    def identity(self, task: Task, num_ranks: int, attempt: int, life: int) -> Identity:
        """Return the identity of a rank, one of those of all hosts."""
        del num_ranks, life
        count, barrier = len(self.plan.training_tasks), self.group.barrier
        prefix = f"{barrier.prefix}/group"
        return Identity(task=task, num_ranks=count, store=barrier.store.address, prefix=prefix, attempt=attempt)

    def environ(self, identity: Identity) -> dict[str, str]:
        """Return the environment of a worker: its share of the cores of this host, the plan, and the fencing token."""
        threads = {"OMP_NUM_THREADS": str(max(1, num_cores() // len(self.tasks)))}
        inherited = {**plan_to_environ(self.plan), FENCE: self.group.fence.token}
        return {**worker_environ({**threads, **os.environ}, identity), **inherited}

    def peer_error(self) -> TrainkitError | None:
        """Return the error of another host."""
        return self._peers()


def run_local_workers(launch: HostLaunch) -> dict[str, Any] | None:
    """Start the workers of this host and watch them until they have ended; forward Ctrl-C, SIGTERM and SIGHUP.

    Returns:
        The content of result.json.

    Raises:
        TrainkitError: the first failure on this host, or the error of another host.
    """
    folder = launch.folder
    settings = AgentSettings(max_restarts=0, limits=TimeLimits.of(launch.plan.cfg.supervisor))
    command = [*ENTRY, str(folder.resolved)]
    folder.open_live()
    with (
        worker_group_factory(command, launch.tasks) as groups,
        (agent := Agent(launch.tasks, settings, launch, command=command, groups=groups)).stop,
    ):
        failure = agent.run(launch.group.barrier.launch.attempt, launch.tasks)
        if failure is None:
            return folder.read_result()
        if agent.stop.requested and not failure.is_permanent:
            raise stop_error(agent.stop.requested, str(failure.error()))
        lost = failure.report is not None and failure.report.is_secondary
        raise failure.error() from (ConnectionError("a rank of another host is lost") if lost else None)
