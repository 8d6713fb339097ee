"""A rank that only lost a connection and is named instead of the one that failed first is caught here alone.
A planted failure that hits another rank, step or attempt, so that kill tests test nothing, is caught here alone.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

import pytest

from tests.support.verdicts import plain
from trainkit.cluster.host import ProcessId
from trainkit.cluster.tasks import Task
from trainkit.errors import CheckpointError, ConfigError, HangError, LinkError, Problem, TrainingError, TrainkitError
from trainkit.run.agent.agent import Agent, AgentSettings
from trainkit.run.agent.failure import (
    AT_THE_AGENT,
    AT_THE_STORE,
    Failure,
    Graces,
    MemoryEvents,
    ProcessEvidence,
    RankFacts,
    facts_of,
    failure_of,
    first_failure,
    is_clean,
)
from trainkit.run.agent.monitor import Limit, OverdueRank
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.process.error_report import (
    ErrorReport,
    Reporter,
    is_after_effect,
    read_error_report,
    write_error_report,
)
from trainkit.run.process.heartbeat import Heartbeat, read_heartbeat
from trainkit.run.process.nccl_dumps import recorder_variables
from trainkit.run.process.setup import variables
from trainkit.run.process.worker_group import ProcessExit
from trainkit.trainer import failpoints
from trainkit.trainer.failpoints import Phase, hit, parse, reload

RESET = "[gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:27059: Connection reset by peer."
TIMED_OUT = "[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 5000ms for recv operation to complete"


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


def beat(folder: RunFolder, rank: int, step: int, phase: Phase = "forward") -> None:
    heart = Heartbeat(folder.heartbeat_of(rank))
    heart.beat(step, phase)
    heart.close()


def exited(rank: int, code: int = 1) -> ProcessExit:
    return ProcessExit(attempt=0, rank=rank, code=code)


def write_error(folder: RunFolder, rank: int, error: BaseException) -> None:
    write_error_report(folder.error_of(rank), rank, error)


def root_cause(
    folder: RunFolder,
    exits: Sequence[ProcessExit],
    running: Sequence[int],
    evidence: ProcessEvidence | None = None,
    overdue: OverdueRank | None = None,
) -> Failure:
    evidence = evidence or ProcessEvidence(folder)
    return failure_of(evidence, facts_of(evidence, exits=exits, running=running, overdue=overdue))


def raised_in_c(kind: type[Exception], text: str) -> Exception:
    """The error as C code raises it: no `raise` statement is in its traceback."""
    try:
        ctypes.pythonapi.PyErr_SetString(ctypes.py_object(kind), text.encode())
    except kind as error:
        return error
    raise AssertionError


def raised(error: BaseException, module: str = __name__) -> BaseException:
    """The error as a `raise` statement of a module raises it."""
    try:
        exec("def fail(error): raise error\nfail(error)", {"__name__": module, "error": error})
    except type(error):
        return error
    raise AssertionError


def test_an_own_error_comes_before_a_signal_and_a_signal_before_a_lost_connection(folder: RunFolder) -> None:
    exits = [exited(0), exited(1, -9), exited(2)]
    write_error(folder, 0, raised_in_c(RuntimeError, RESET))
    assert root_cause(folder, exits[:2], []).headline == "rank 1 was ended by SIGKILL while starting."
    write_error(folder, 2, ValueError("bad batch"))
    assert plain(root_cause(folder, exits, []).headline) == "rank 2 failed while starting: ValueError: bad batch."


def test_of_one_kind_the_lower_step_comes_first_whatever_arrived_first(folder: RunFolder) -> None:
    for rank, step in ((0, 7), (1, 5)):
        beat(folder, rank, step)
        write_error(folder, rank, ValueError(f"of rank {rank}"))
    assert root_cause(folder, [exited(0), exited(1)], []).rank == 1
    for rank, step in ((2, 4), (3, 3)):
        beat(folder, rank, step)
    assert root_cause(folder, [exited(2, -9), exited(3, -9)], []).rank == 3


def test_within_a_step_the_first_to_arrive_here_comes_first_whatever_clocks_say(folder: RunFolder) -> None:
    evidence = ProcessEvidence(folder)
    for rank, moment in ((1, 2.0e9), (0, 1.0e9)):
        write_error(folder, rank, ValueError(f"of rank {rank}"))
        os.utime(folder.error_of(rank), (moment, moment))
        evidence.look([0, 1])
    assert root_cause(folder, [exited(0), exited(1)], [], evidence).rank == 1
    assert root_cause(folder, [exited(5, -9), exited(4, -9)], []).rank == 5


def test_a_rank_that_reported_its_error_and_still_runs_is_named_before_others(folder: RunFolder) -> None:
    write_error(folder, 0, raised_in_c(RuntimeError, RESET))
    write_error(folder, 1, ValueError("bad batch"))
    headline = plain(root_cause(folder, [exited(0)], [1, 2]).headline)
    assert headline == "rank 1 failed while starting: ValueError: bad batch."


@pytest.mark.parametrize(
    "error",
    [
        raised(RuntimeError(RESET)),
        raised(ConnectionResetError("connection closed by peer")),  # of a server of the user's
        raised(ConnectionResetError("the same"), module="urllib3.connection"),
        raised(LinkError("ps:0 is gone")),
        raised_in_c(ConnectionResetError, "the same, of a socket in user code"),
        raised_in_c(RuntimeError, "mat1 and mat2 shapes cannot be multiplied"),
        raised_in_c(RuntimeError, "[enforce fail at gloo/transport/tcp/pair.cc:456] op.preamble.length <= op.nbytes."),
        raised_in_c(RuntimeError, "NCCL error: ncclUnhandledCudaError: Cuda failure 2 'out of memory'"),
        raised(RuntimeError("EADDRINUSE: address already in use"), module="torch.distributed.rendezvous"),
    ],
)
def test_an_error_of_a_ranks_own_is_not_excused_by_its_text(error: Exception) -> None:
    assert not is_after_effect(error)


@pytest.mark.parametrize(
    "error",
    [
        raised_in_c(RuntimeError, RESET),  # also where user code waits for a collective
        raised_in_c(RuntimeError, TIMED_OUT),
        raised_in_c(RuntimeError, "NCCL error: ncclRemoteError: remote process exited or there was a network error"),
        raised(LinkError("ps:0 is gone"), module="trainkit.strategies.updates.links"),
        raised(ConnectionResetError(104, "gone"), module="trainkit.strategies.reducers.vector"),
        raised(RuntimeError("wait timeout after 1000ms, keys: /0"), module="torch.distributed.distributed_c10d"),
    ],
)
def test_an_error_that_a_transport_raised_for_a_lost_peer_is_an_after_effect(error: Exception) -> None:
    assert is_after_effect(error)
    wrapped = ValueError("what the user makes of it")
    wrapped.__cause__ = error
    assert is_after_effect(raised(wrapped))


def test_a_cause_that_was_never_raised_belongs_to_the_error_that_names_it(folder: RunFolder) -> None:
    def fail(module: str) -> bool:
        code = "raise TrainingError('rank 1 is silent') from ConnectionAbortedError('rank 1')"
        try:
            exec(code, {"__name__": module, "TrainingError": TrainingError})
        except TrainingError as error:
            return is_after_effect(error)
        raise AssertionError

    assert fail("trainkit.strategies.reducers.shared_memory")
    assert not fail("my_package.model")


def test_if_all_reports_are_lost_connections_the_unresponsive_rank_is_named(folder: RunFolder) -> None:
    write_error(folder, 0, raised_in_c(RuntimeError, RESET))
    for rank, step in ((0, 4), (1, 3), (2, 4)):
        beat(folder, rank, step)
    failure = root_cause(folder, [exited(0)], [1, 2])
    assert failure.headline == "rank 1 stopped answering in step 3 (forward)."
    assert isinstance(failure.error(), HangError)


@pytest.fixture
def stopped() -> Iterator[ProcessId]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        mark = ProcessId.of(process.pid)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        yield mark
        process.kill()


def test_a_stopped_process_is_named_before_one_that_is_further_behind(folder: RunFolder, stopped: ProcessId) -> None:
    beat(folder, 0, 4)
    beat(folder, 1, 5)
    evidence = ProcessEvidence(folder, lambda: {0: ProcessId.of(os.getpid()), 1: stopped})
    limit = Limit(key="supervisor.hang_timeout_s", seconds=5)
    overdue = OverdueRank(rank=0, heartbeat=read_heartbeat(folder.heartbeat_of(0)), silence_s=6.0, limit=limit)
    failure = root_cause(folder, [], [0, 1], evidence, overdue)
    assert failure.rank == 1
    remedy = f"it is stopped by a signal (state T). To let it continue: kill -CONT {stopped.pid}. {limit.remedy(6.0)}"
    assert plain(failure.headline) == f"rank 1 has made no progress for 6 s in step 5 (forward): {remedy}"
    lost = raised_in_c(RuntimeError, RESET)
    write_error(folder, 2, lost)
    unresponsive = root_cause(folder, [exited(2)], [0, 1], evidence)
    assert plain(unresponsive.headline).startswith("rank 1 is stopped by a signal (state T)")
    later = ProcessEvidence(folder, lambda: {1: ProcessId(stopped.pid, stopped.started - 1)})
    assert (later.suspended(1), later.has_ended(1)) == (None, True), "another process has taken the pid of the rank"


def test_a_rank_that_has_not_called_a_collective_is_named(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in (0, 1):
        beat(folder, rank, 0, "data")
    monkeypatch.setattr("trainkit.run.agent.failure.waited_for", lambda _ranks, _file_of: {1})
    limit = Limit(key="supervisor.first_step_timeout_s", seconds=20)
    overdue = OverdueRank(rank=0, heartbeat=read_heartbeat(folder.heartbeat_of(0)), silence_s=21.0, limit=limit)
    assert root_cause(folder, [], [0, 1], overdue=overdue).rank == 1
    beat(folder, 1, 1, "data")  # further than rank 0, which is what all wait for
    assert root_cause(folder, [], [0, 1], overdue=overdue).rank == 0


def test_a_kill_for_lack_of_memory_is_told_by_the_counter_of_the_cgroup(folder: RunFolder, tmp_path: Path) -> None:
    events = tmp_path / "memory.events"
    events.write_text("low 0\nhigh 0\nmax 7\noom 1\noom_kill 3\n")
    evidence = ProcessEvidence(folder, memory=MemoryEvents([tmp_path / "absent", events]))
    kill = [exited(1, -signal.SIGKILL)]
    assert root_cause(folder, kill, [], evidence).headline == "rank 1 was ended by SIGKILL while starting."
    events.write_text("low 0\nhigh 0\nmax 9\noom 2\noom_kill 4\n")
    counted = f"Its cgroup ran out of memory: oom_kill in {events} rose by 1."
    assert root_cause(folder, kill, [], evidence).headline == f"rank 1 was ended by SIGKILL while starting. {counted}"
    assert root_cause(folder, [exited(1, -signal.SIGTERM)], [], evidence).headline.endswith("SIGTERM while starting.")
    uncounted = ProcessEvidence(folder, memory=MemoryEvents([tmp_path / "absent"]))
    assert root_cause(folder, kill, [], uncounted).headline.endswith("The system may have run out of memory.")


def test_exit_code_0_before_the_end_is_a_failure_and_that_of_a_requested_stop_is_not(folder: RunFolder) -> None:
    beat(folder, 1, 7)
    assert not is_clean(folder, exited(1, 0), stopping=True)
    failure = root_cause(folder, [exited(1, 0)], [])
    assert failure.headline == "rank 1 exited with code 0 in step 7 (forward) before the training was done."
    folder.done_of(1).touch()
    assert is_clean(folder, exited(1, 0), stopping=False)
    assert [is_clean(folder, exited(2, 130), stopping=stopping) for stopping in (True, False)] == [True, False]


def test_sys_exit_is_reported_with_the_line_that_called_it(folder: RunFolder) -> None:
    beat(folder, 1, 7)
    write_error(folder, 1, raised(SystemExit(0)))
    failure = root_cause(folder, [exited(1, 0)], [])
    assert plain(failure.headline) == "rank 1 exited with code 0 in step 7 (forward) before the training was done."
    assert failure.detail.splitlines()[-1] == "SystemExit: 0"


def test_the_first_error_of_a_rank_is_the_one_it_reports(folder: RunFolder) -> None:
    report = Reporter(folder.error_of(1), 1)
    report(ValueError("the cause"))
    beat(folder, 1, 9, "save")
    assert report(OSError("while it was ending")).message == "the cause"
    failure = root_cause(folder, [exited(1)], [])
    assert plain(failure.headline) == "rank 1 failed while starting: ValueError: the cause."


def test_a_verdict_names_pid_and_host(folder: RunFolder) -> None:
    write_error(folder, 1, ValueError("bad"))
    host = os.uname().nodename
    assert root_cause(folder, [exited(1)], []).headline.startswith(f"rank 1 (pid {os.getpid()} on {host}) failed")
    evidence = ProcessEvidence(folder, lambda: {2: ProcessId(42, 7)})
    assert root_cause(folder, [exited(2, 3)], [], evidence).headline.startswith(f"rank 2 (pid 42 on {host}) exited")


def test_a_process_without_an_error_report_shows_the_end_of_its_log(folder: RunFolder) -> None:
    folder.logs.mkdir()
    folder.log_of(1).write_text("".join(f"line {number}\n" for number in range(30)))
    text = str(root_cause(folder, [exited(1, -11)], []).error("So be it."))
    assert text.splitlines()[:3] == [
        "rank 1 was ended by SIGSEGV while starting. So be it.",
        f"The end of {folder.log_of(1)}:",
        "  line 10",
    ]


@pytest.mark.parametrize(
    "error",
    [
        CheckpointError("damaged"),
        ConfigError([Problem(key="a.b", value=3, rule="too large.", origin="x.yaml:2"), Problem(key="c", rule="odd.")]),
    ],
)
def test_an_error_of_ours_arrives_as_it_was_raised(folder: RunFolder, error: TrainkitError) -> None:
    write_error(folder, 1, error)
    failure = root_cause(folder, [exited(1, error.exit_code)], [])
    assert failure.is_permanent
    assert (type(failure.error()), str(failure.error())) == (type(error), str(error))


def test_an_error_class_of_a_user_arrives_as_the_one_of_ours_it_is_made_from(folder: RunFolder) -> None:
    class BadBatchError(TrainingError):
        pass

    write_error(folder, 0, BadBatchError("batch 7"))
    error = root_cause(folder, [exited(0)], []).error()
    assert (type(error), str(error)) == (TrainingError, "batch 7")
    folder.error_of(0).write_text('{"rank": 0}')
    assert read_error_report(folder.error_of(0)) is None, "a damaged report is ignored"


def test_an_exit_that_is_reported_when_no_rank_runs_any_more_counts(folder: RunFolder) -> None:
    write_error(folder, 0, raised_in_c(RuntimeError, RESET))
    write_error(folder, 1, ValueError("bad batch"))
    tasks = [Task(role="worker", index=rank, rank=rank) for rank in range(2)]
    agent = Agent(tasks, AgentSettings(), mock.Mock(signals={}, folder=folder), command=[], groups=mock.Mock())
    agent.events.put(exited(1))
    failure, exits = agent._first_failure(mock.Mock(running=[], marks={}), 0, exited(0))
    assert plain(failure.headline) == "rank 1 failed while starting: ValueError: bad batch."
    assert [event.rank for event in exits] == [0, 1]


LOST = ErrorReport(
    rank=0, kinds=("RuntimeError",), message="lost", traceback="", exit_code=1, is_secondary=True, is_permanent=False
)
ENDED, WAITS, GONE = RankFacts(rank=1, exit_code=-9), RankFacts(rank=2), RankFacts(rank=2, has_ended=True)
CUT_OFF = RankFacts(rank=0, report=LOST)


@pytest.mark.parametrize(
    ("facts", "graces", "wait_s"),
    [
        ([ENDED, WAITS], AT_THE_AGENT, 0.1),  # the error that made it end may still arrive
        ([CUT_OFF, WAITS], AT_THE_AGENT, 1.0),
        ([CUT_OFF, WAITS, GONE], AT_THE_AGENT, 10.0),  # its exit is on the way
        ([CUT_OFF, WAITS], AT_THE_STORE, 3.0),
        ([CUT_OFF, GONE], AT_THE_STORE, 0.2),  # it writes no report any more
        ([CUT_OFF, ENDED, WAITS], AT_THE_STORE, 0.2),
        ([CUT_OFF, ENDED], AT_THE_AGENT, 0.0),  # no rank is left that could report
    ],
)
def test_a_failure_waits_for_the_one_that_caused_it(facts: list[RankFacts], graces: Graces, wait_s: float) -> None:
    verdict = first_failure(facts, waited_s=0.0, graces=graces)
    assert verdict == wait_s if wait_s else isinstance(verdict, tuple)
    assert isinstance(first_failure(facts, waited_s=wait_s, graces=graces), tuple)


def open_folder(path: Path) -> RunFolder:
    folder = RunFolder(path)
    folder.begin()
    folder.open_live()
    return folder


def test_a_verdict_names_the_dumps_and_how_to_compare_them(tmp_path: Path) -> None:
    folder = open_folder(tmp_path)
    exits = [ProcessExit(attempt=0, rank=1, code=-6)]
    assert root_cause(folder, exits, [0]).dumps == ""
    (tmp_path / "live/nccl_rank_\x1b[2J").write_bytes(b"of another program")
    for rank in (0, 1):
        (tmp_path / f"live/nccl_rank_{rank}").write_bytes(b"\x80\x02")
    dumps = f"NCCL's last collectives are in {tmp_path}/live: nccl_rank_0 to nccl_rank_1. To compare them: torchfrtrace"
    assert dumps in str(root_cause(folder, exits, [0]).error())
    write_error(folder, 2, raised_in_c(RuntimeError, RESET))
    assert dumps in str(root_cause(folder, [exited(2)], [0, 1]).error())


def test_a_rank_that_gave_up_waiting_does_not_hide_the_rank_it_waited_for(tmp_path: Path) -> None:
    folder = open_folder(tmp_path)
    for rank in (0, 1, 2):
        Heartbeat(folder.heartbeat_of(rank)).beat(5, "data" if rank == 2 else "reduce")
    exits = [ProcessExit(attempt=0, rank=rank, code=-6) for rank in (0, 1)]
    assert root_cause(folder, exits, [2]).rank == 0  # nothing shows that NCCL has ended them
    for rank in (0, 1, 2):
        folder.nccl_dumps.with_name(f"nccl_rank_{rank}").write_bytes(b"\x80\x02")
    assert root_cause(folder, exits, [2]).headline == "rank 2 stopped answering in step 5 (data)."
    assert root_cause(folder, exits, []).headline.startswith("rank 0 was ended by SIGABRT in step 5 (reduce).")
    assert root_cause(folder, [*exits, ProcessExit(attempt=0, rank=2, code=-9)], []).rank == 2


def test_the_recorder_writes_into_the_run_folder_unless_the_user_has_set_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    before, recorder = dict(os.environ), recorder_variables(RunFolder(tmp_path))
    assert f"{tmp_path}/live/nccl_rank_" in recorder.values()
    with variables(recorder, unless_set=True):
        assert dict(os.environ) == {**before, **recorder, "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
    assert dict(os.environ) == before


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    reload({})


def test_a_failpoint_fails_at_its_moment_only() -> None:
    reload({"TRAINKIT_FAIL": "step=3,phase=backward,action=raise"})
    hit("backward", 2)
    hit("forward", 3)
    with pytest.raises(RuntimeError, match=r"^failpoint in backward of step 3$"):
        hit("backward", 3)
    reload({"TRAINKIT_FAIL": "action=full"})  # without step or phase every moment is meant
    with pytest.raises(OSError, match="No space left on device"):
        hit("save", 12)


@pytest.mark.parametrize(
    "environ",
    [
        {"TRAINKIT_RANK": "0", "TRAINKIT_FAIL": "rank=1,action=raise"},
        {"TRAINKIT_RANK": "1", "TRAINKIT_FAIL": "action=raise"},
        {"TRAINKIT_ATTEMPT": "1", "TRAINKIT_FAIL": "attempt=0,action=raise"},
        {},
    ],
)
def test_others_are_spared(environ: dict[str, str]) -> None:
    reload(environ)
    hit("forward", 0)
    assert not failpoints.ARMED


@pytest.mark.parametrize(
    "text", ["step=x,action=kill", "action=burn", "phase=lunch,action=kill", "kill", "when=2,action=kill"]
)
def test_what_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"TRAINKIT_FAIL=.*: write rank=N,index=N,step=N"):
        parse(text)
