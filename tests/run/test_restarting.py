"""A run that restarts for ever, or that is given up although it gets further, is caught here alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.run.faking import run_fakes, run_roles
from tests.support.present import present
from trainkit.cluster.tasks import Task
from trainkit.errors import CrashLoopError, DataError
from trainkit.run.folder.restart_record import FILE, Restart, record_restart, restarts_of
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.process.error_report import write_error_report
from trainkit.run.process.heartbeat import Heartbeat
from trainkit.run.supervisor.restart_policy import Fault, RaisedError, RestartPolicy, fault_of, record_relaunch


def raised(rank: int = 1, step: int = 5, text: str = "ValueError: bad sample") -> frozenset[RaisedError]:
    return frozenset({RaisedError(task=f"worker:{rank}", rank=rank, step=step, text=text)})


def killed(step: int, begun_at: int, reached: int) -> Fault:
    return Fault(step=step, begun_at=begun_at, reached=reached, newer=reached > begun_at)


def failed(step: int, begun_at: int, reached: int, **what: Any) -> Fault:
    return replace(killed(step, begun_at, reached), raised=raised(step=step, **what))


TWICE = "gave up: rank 1 raised the same exception twice in the same place, in step 5"
NO_FURTHER = "gave up after 2 restarts without progress beyond the checkpoint of step 3"
ONE_STEP = "gave up after 2 restarts: 3 attempts failed in step 5, regardless of checkpoints between them"
EARLY = "gave up after 2 restarts: 3 attempts in a row raised an exception within their first two steps"
SEQUENCES = {
    "the same exception at the same step": ([failed(5, 0, 3), failed(5, 3, 3)], TWICE),
    "the same exception, a newer checkpoint between": ([failed(5, 0, 3), failed(5, 3, 5)], TWICE),
    "other text": ([failed(5, 0, 3), failed(5, 3, 4, text="ValueError: another")], None),
    "another rank": ([failed(5, 0, 3), failed(5, 3, 4, rank=0)], None),
    "signals without a newer checkpoint": ([killed(5, 0, 3), killed(4, 3, 3), killed(3, 3, 3)], NO_FURTHER),
    "signals that fail at one step": ([killed(5, 0, 2), killed(5, 2, 3), killed(5, 3, 4)], ONE_STEP),
    "that step, with others between": (
        [killed(5, 0, 2), killed(4, 2, 3), killed(5, 3, 4), killed(6, 4, 5), killed(5, 5, 6)],
        ONE_STEP,
    ),
    "signals, each a step further": ([killed(step, step - 1, step) for step in range(1, 60)], None),
    "exceptions, each a step further": ([failed(step, step - 1, step) for step in (6, 7, 8)], EARLY),
    "exceptions, each three steps further": ([failed(step, step - 3, step) for step in range(3, 60, 3)], None),
    "failures before the first step": ([Fault(step=None, begun_at=0, reached=n, newer=True) for n in range(9)], None),
}


@pytest.mark.parametrize(("faults", "refusal"), SEQUENCES.values(), ids=SEQUENCES)
def test_the_rule_over_a_sequence_of_failures(faults: list[Fault], refusal: str | None) -> None:
    rule, lenient = RestartPolicy(max_restarts=2), RestartPolicy(max_restarts=1)
    answers = [rule.refuse(fault) for fault in faults]
    assert answers[:-1] == [None] * (len(faults) - 1)
    assert answers[-1] == refusal
    assert {lenient.refuse(fault, lost=True) for fault in faults} == {None}, "lost replicas count in no rule"


def test_the_same_exception_of_all_ranks_is_recognised_whichever_rank_is_named_first(folder: RunFolder) -> None:
    folder.live.mkdir(parents=True)
    tasks = [Task(role="worker", index=rank, rank=rank) for rank in range(2)]
    faults = []
    for named in (0, 1):
        for task in tasks:
            heart = Heartbeat(folder.heartbeat_of(task.rank))
            heart.beat(5, "forward")
            heart.close()
            write_error_report(folder.error_of(task.rank), task.rank, ValueError(f"at {object()}"))
        faults.append(fault_of(folder, tasks, named, begun_at=3, reached=3))
    rule = RestartPolicy(max_restarts=3)
    told = "gave up: rank 0 raised the same exception twice in the same place, in step 5"
    assert [rule.refuse(fault) for fault in faults] == [None, told]


@pytest.mark.parametrize(("error", "lost"), [(ValueError("gone"), True), (DataError("no such file"), False)])
def test_what_follows_from_another_rank_and_what_trainkit_raises_is_not_of_the_user(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, error: Exception, lost: bool
) -> None:
    folder.live.mkdir(parents=True)
    monkeypatch.setattr("trainkit.run.process.error_report.is_after_effect", lambda _: lost)
    write_error_report(folder.error_of(1), 1, error)
    fault = fault_of(folder, [Task(role="worker", index=1, rank=1)], 1, begun_at=None, reached=3)
    assert fault == Fault(step=None, begun_at=0, reached=3, newer=True)


def test_the_record_survives_lines_that_are_none(folder: RunFolder) -> None:
    folder.path.mkdir()
    restart = Restart(kind="all", cause="rank 1 was ended by SIGKILL.\nA second line.", step=3, rank=1, task="worker:1")
    record_restart(folder.path, restart)
    with (folder.path / FILE).open("a") as file:
        file.write('{"kind": "all"}\nnonsense\n[1]\n{"kind"')
    folder.write_result({"status": "finished"})
    expected = {"kind": "all", "step": 3, "rank": 1, "task": "worker:1", "cause": "rank 1 was ended by SIGKILL."}
    assert folder.read_result() == {"status": "finished", "restarts": [{**expected, "checkpoint": None}]}


def test_a_group_started_again_from_outside_is_refused_if_its_error_comes_again(folder: RunFolder) -> None:
    folder.path.mkdir()
    answers: list[str | None] = []
    before: list[dict[str, Any]] = []
    for _ in range(2):
        folder.begin()
        folder.live.mkdir(parents=True)
        write_error_report(folder.error_of(1), 1, ValueError("bad sample"))
        relaunch = record_relaunch(folder, "rank 1 failed.", 1, before=json.loads(json.dumps(before)))
        answers.append(relaunch.refusal)
        before = relaunch.to_json()
    assert answers == [None, "gave up: rank 1 raised the same exception twice in the same place, while starting"]
    assert [one["cause"] for one in restarts_of(folder.path)["restarts"]] == ["rank 1 failed."]
    assert record_relaunch(folder, "rank 1 failed.", 1, before=before, tolerant=True).refusal is None
    assert record_relaunch(folder, None, None, before=before).refusal is None, "the processes left no report"


def test_of_many_restarts_the_first_are_listed_and_the_rest_is_counted(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.path.mkdir()
    monkeypatch.setattr("trainkit.run.folder.restart_record._LISTED", 2)
    for step in range(5):
        record_restart(folder.path, Restart(kind="all", cause="", step=step))
    found = restarts_of(folder.path)
    assert ([one["step"] for one in found["restarts"]], found["restarts_not_listed"]) == ([0, 1], 3)


def test_an_exception_that_comes_again_ends_the_run(folder: RunFolder, fake: Callable[..., None]) -> None:
    fake("steps=6 save=1 pause=0.02", raising="1:ValueError:bad sample")
    with pytest.raises(CrashLoopError) as caught:
        run_fakes(folder, 2, max_restarts=3, log=print)
    assert caught.value.exit_code == 6
    told = "gave up: rank 1 raised the same exception twice in the same place, in step 2: rank 1 "
    assert str(caught.value).startswith(told)
    result = present(folder.read_result())
    assert result["reason"] == str(caught.value)
    assert [(one["step"], one["rank"], one["checkpoint"]) for one in result["restarts"]] == [(2, 1, 2)]


def test_restarts_are_counted_through_resume(folder: RunFolder, fake: Callable[..., None]) -> None:
    fake("steps=6 save=2 pause=0.02", fail="rank=1,step=3,phase=forward,attempt=0,action=kill")
    run_fakes(folder, 2, log=print)
    assert len(present(folder.read_result())["restarts"]) == 1
    fake("steps=9 save=2 pause=0.02", fail="rank=0,step=7,phase=forward,attempt=0,action=kill")
    run_fakes(folder, 2, log=print)
    assert [(one["kind"], one["task"], one["step"]) for one in present(folder.read_result())["restarts"]] == [
        ("all", "worker:1", 3),
        ("all", "worker:0", 7),
    ]


def test_a_worker_that_raises_it_again_is_not_started_again(folder: RunFolder, fake: Callable[..., None]) -> None:
    fake("steps=500 pause=0.02", fail="rank=1,step=3,phase=forward,action=raise")
    said: list[str] = []
    with pytest.raises(CrashLoopError) as caught:
        run_roles(folder, "worker ps", log=said.append)
    assert len(said) == 1
    told = "gave up: worker:0 raised the same exception twice in the same place: rank 1 "
    assert str(caught.value).startswith(told)
