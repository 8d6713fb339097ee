"""The chief's desk by itself: who computes what, and what makes an update. No process, no tensor."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from trainkit.errors import CheckpointError, TrainingError
from trainkit.numerics.batch import BatchPlan, Ticket
from trainkit.strategies.parameter_server.coordinator.async_scheduler import AsyncScheduler
from trainkit.strategies.parameter_server.coordinator.replay_scheduler import ReplayScheduler
from trainkit.strategies.parameter_server.coordinator.scheduler import PendingUpdate, WorkItem, WorkScheduler
from trainkit.strategies.parameter_server.coordinator.staleness import Decision, Policy, Staleness
from trainkit.strategies.parameter_server.coordinator.sync_scheduler import SyncScheduler
from trainkit.strategies.parameter_server.coordinator.update_log import (
    GradientRef,
    UpdateLog,
    UpdateRecord,
    read_record,
)

PLAN = BatchPlan(num_samples=37, global_size=8, micro_size=2)  # steps of 8, 8, 8, 8 and 5 samples: 4 or 3 shards


def asynchronous(
    workers: int = 2, policy: Policy = "accept", bound: int | None = None, warmup: int = 0
) -> AsyncScheduler:
    desk = AsyncScheduler(plan=PLAN, staleness=Staleness(policy=policy, bound=bound), warmup_steps=warmup)
    return staffed(desk, workers)  # type: ignore[return-value]


def synchronous(workers: int = 4, spares: int = 0, *, replaces: bool = False) -> SyncScheduler:
    return staffed(SyncScheduler(plan=PLAN, spares=spares, replaces=replaces), workers)  # type: ignore[return-value]


def staffed(desk: WorkScheduler, workers: int) -> WorkScheduler:
    desk.recall({}, 0)
    for index in range(workers):
        desk.join(f"w{index}")
    return desk


def taken(desk: WorkScheduler, worker: str) -> WorkItem:
    errand = desk.next(worker)
    assert errand is not None
    return errand


def applied(desk: WorkScheduler, errand: WorkItem, read: int) -> PendingUpdate | None:
    desk.report(errand.number, read)
    merge = desk.next_ready_update()
    if merge is not None:
        desk.merged(merge)
    return merge


@pytest.mark.parametrize(
    ("policy", "bound", "staleness", "expected"),
    [
        ("accept", None, 7, Decision()),
        ("drop", 2, 2, Decision()),
        ("drop", 2, 3, Decision(takes=False)),
        ("scale", None, 3, Decision(factor=0.25)),
        ("lr", None, 3, Decision(lr_divisor=3.0)),
        ("lr", None, 0, Decision(lr_divisor=1.0)),
        ("bound", 1, 9, Decision()),
    ],
)
def test_each_policy_judges_by_staleness(policy: Policy, bound: int | None, staleness: int, expected: Decision) -> None:
    assert Staleness(policy=policy, bound=bound).decide(staleness) == expected


def test_a_dropped_gradient_is_computed_again_before_any_other_step() -> None:
    desk = asynchronous(2, "drop", 0)
    first, second = taken(desk, "w0"), taken(desk, "w1")
    assert applied(desk, second, 0) is not None
    assert applied(desk, first, 0) is None
    assert [one.ticket.step for one in desk.pop_discarded()] == [0]
    assert taken(desk, "w0").ticket == Ticket(0, (0, 1, 2, 3))
    assert desk.late == {"w0": 1}


def test_a_worker_ahead_of_the_slowest_waits_for_it() -> None:
    desk = asynchronous(2, "bound", 1)
    slow = taken(desk, "w1")
    for read in range(2):
        applied(desk, taken(desk, "w0"), read)
    assert desk.next("w0") is None
    applied(desk, slow, 0)
    assert desk.next("w0") is not None


def test_nobody_waits_for_a_worker_that_is_gone() -> None:
    desk = asynchronous(2, "bound", 0)
    applied(desk, taken(desk, "w0"), 0)
    assert desk.next("w0") is None
    desk.leave("w1")
    assert desk.next("w0") is not None


def test_in_the_warmup_one_gradient_at_a_time_is_computed() -> None:
    desk = asynchronous(3, warmup=2)
    for version in range(2):
        errand = taken(desk, "w0")
        assert desk.next("w1") is None
        assert applied(desk, errand, version) is not None
    assert all(desk.next(worker) is not None for worker in ("w0", "w1", "w2"))


def test_steps_past_the_end_are_not_handed_out() -> None:
    desk = AsyncScheduler(plan=PLAN, staleness=Staleness(), until=2)
    staffed(desk, 3)
    assert [taken(desk, worker).ticket.step for worker in ("w0", "w1")] == [0, 1]
    assert desk.next("w2") is None


def test_what_a_checkpoint_found_under_way_is_handed_out_first() -> None:
    desk = asynchronous(3)
    errands = [taken(desk, worker) for worker in ("w0", "w1", "w2")]
    applied(desk, errands[1], 0)
    kept = json.loads(json.dumps(desk.remember()))
    again = asynchronous(0)
    again.recall(kept, desk.version)
    again.join("w9")
    again.join("w8")
    again.join("w7")
    assert [taken(again, worker).ticket.step for worker in ("w9", "w8", "w7")] == [0, 2, 3]


def test_a_step_is_complete_when_each_of_its_shards_is_there() -> None:
    desk = synchronous(2)
    order = [taken(desk, "w0"), taken(desk, "w1")]
    assert applied(desk, order[1], 0) is None
    assert applied(desk, order[0], 0) is None
    assert applied(desk, taken(desk, "w1"), 0) is None
    merge = applied(desk, taken(desk, "w1"), 0)
    assert merge is not None
    assert [errand.ticket for errand in merge.items] == [Ticket(0, (shard,)) for shard in range(4)]
    assert desk.version == 1


def test_an_idle_worker_computes_an_outstanding_shard_again_and_the_first_result_wins() -> None:
    desk = synchronous(5, spares=1)
    errands = [taken(desk, f"w{index}") for index in range(4)]
    spare = taken(desk, "w4")
    assert spare.ticket == errands[0].ticket
    for errand in (*errands[1:], spare):
        merge = applied(desk, errand, 0)
    assert merge is not None
    assert merge.items[0].worker == "w4"
    desk.report(errands[0].number, 0)
    assert [one.number for one in desk.pop_discarded()] == [errands[0].number]
    assert desk.late == {"w0": 1}


def test_no_more_than_the_spares_are_repeated() -> None:
    desk = synchronous(7, spares=2)
    found = [desk.next(f"w{index}") for index in range(7)]
    assert [one.ticket.shards[0] if one else None for one in found] == [0, 1, 2, 3, 0, 1, None]


def test_without_spares_an_idle_worker_waits() -> None:
    desk = synchronous(5)
    assert [desk.next(f"w{index}") is None for index in range(5)] == [False, False, False, False, True]


def test_where_shards_are_replaced_the_first_results_make_the_step_and_the_late_shard_returns() -> None:
    desk = synchronous(5, spares=1, replaces=True)
    errands = [taken(desk, f"w{index}") for index in range(5)]
    assert errands[4].ticket == Ticket(1, (0,))
    for errand in errands[1:]:
        merge = applied(desk, errand, 0)
    assert merge is not None
    assert [one.ticket for one in merge.items] == [Ticket(0, (1,)), Ticket(0, (2,)), Ticket(0, (3,)), Ticket(1, (0,))]
    assert taken(desk, "w1").ticket == Ticket(0, (0,))
    desk.report(errands[0].number, 0)
    assert [one.worker for one in desk.pop_discarded()] == ["w0"]


def test_a_worker_of_several_devices_takes_several_shards_of_a_step() -> None:
    desk = staffed(SyncScheduler(plan=PLAN, width=3), 2)
    first, second = taken(desk, "w0"), taken(desk, "w1")
    assert (first.ticket, second.ticket) == (Ticket(0, (0, 1, 2)), Ticket(0, (3,)))
    assert applied(desk, second, 0) is None
    merge = applied(desk, first, 0)
    assert merge is not None
    assert merge.items == (first, second)


def test_an_overflowed_step_is_handed_out_again() -> None:
    desk = synchronous(4)
    for index in range(4):
        desk.report(taken(desk, f"w{index}").number, 0)
    merge = desk.next_ready_update()
    assert merge is not None
    desk.requeue_after_overflow(merge)
    assert [taken(desk, f"w{index}").ticket for index in range(4)] == [one.ticket for one in merge.items]
    assert desk.version == 0


def test_the_shard_of_a_worker_that_is_gone_is_handed_out_again() -> None:
    desk = synchronous(2)
    lost, _ = taken(desk, "w0"), taken(desk, "w1")
    assert desk.leave("w0") == (lost,)
    assert taken(desk, "w1").ticket == lost.ticket
    desk.report(lost.number, 0)
    assert desk.next_ready_update() is None


class Trial:
    """Workers at random speeds, some dying, some slow; what every update was made of."""

    def __init__(self, desk: WorkScheduler, seed: int, num_workers: int) -> None:
        self.desk, self.random = desk, Random(seed)
        self.names = [f"w{index}" for index in range(num_workers)]
        self.busy: dict[str, WorkItem] = {}
        self.reads: dict[int, int] = {}
        self.made: list[PendingUpdate] = []

    def run(self, updates: int) -> None:
        for name in self.names:
            self.desk.join(name)
        while len(self.made) < updates:
            self._turn()

    def _turn(self) -> None:
        for name in self.names:
            if name not in self.busy and (errand := self.desk.next(name)) is not None:
                self.busy[name] = errand
                self.reads[errand.number] = self.desk.version
                self.desk.pulled(errand.number)
        name = self.random.choice(sorted(self.busy))
        if self.random.random() < 0.05 and not isinstance(self.desk, ReplayScheduler):
            self.desk.leave(name)
            self.busy.pop(name)
            self.desk.join(name)
        elif name not in self.names[:2] or self.random.random() < 0.2:  # two are slow
            errand = self.busy.pop(name)
            self.desk.report(errand.number, self.reads[errand.number])
        while (merge := self.desk.next_ready_update()) is not None:
            self.desk.merged(merge)
            self.made.append(merge)


def used(made: list[PendingUpdate]) -> Counter[tuple[int, int]]:
    return Counter((one.ticket.step, shard) for merge in made for one in merge.items for shard in one.ticket.shards)


DESKS: dict[str, Callable[[], WorkScheduler]] = {
    "async": lambda: AsyncScheduler(plan=PLAN, staleness=Staleness(), until=20),
    "drop": lambda: AsyncScheduler(plan=PLAN, staleness=Staleness(policy="drop", bound=2), until=20),
    "bound": lambda: AsyncScheduler(plan=PLAN, staleness=Staleness(policy="bound", bound=1), until=20),
    "sync": lambda: SyncScheduler(plan=PLAN, until=20),
    "duplicate": lambda: SyncScheduler(plan=PLAN, spares=2, until=20),
    "wide": lambda: SyncScheduler(plan=PLAN, width=3, until=20),
    "wide duplicate": lambda: SyncScheduler(plan=PLAN, width=2, spares=2, until=20),
    "replace-1": lambda: SyncScheduler(plan=PLAN, spares=1, replaces=True, until=20),
    "replace-2": lambda: SyncScheduler(plan=PLAN, spares=2, replaces=True, until=20),
}


@pytest.mark.parametrize("kind", DESKS)
@pytest.mark.parametrize("seed", range(5))
def test_every_shard_is_used_once_an_epoch_whoever_is_slow_or_dies(kind: str, seed: int) -> None:
    trial = Trial(DESKS[kind](), seed, 5)
    trial.run(20)
    every = {(step, shard) for step in range(20) for shard in range(PLAN.num_shards(step))}
    assert used(trial.made) == Counter(dict.fromkeys(every, 1))
    if kind.startswith("replace"):
        for epoch in range(4):
            steps = {step for step, _ in used(trial.made[5 * epoch : 5 * epoch + 5])}
            assert steps == set(range(5 * epoch, 5 * epoch + 5))


@pytest.mark.parametrize("kind", ["async", "replace-2"])
@pytest.mark.parametrize("stop", [1, 7, 13])
def test_nothing_is_lost_or_used_twice_over_a_resume(kind: str, stop: int) -> None:
    first = Trial(DESKS[kind](), 1, 5)
    first.run(stop)
    made = first.made[:stop]
    assert len(first.made) == stop
    desk = DESKS[kind]()
    desk.recall(json.loads(json.dumps(first.desk.remember())), stop)
    second = Trial(desk, 2, 4)
    second.run(20 - stop)
    every = {(step, shard) for step in range(20) for shard in range(PLAN.num_shards(step))}
    assert used([*made, *second.made]) == Counter(dict.fromkeys(every, 1))


def test_equal_workers_are_as_stale_as_there_are_others() -> None:
    desk = asynchronous(4)
    errands = {f"w{index}": (taken(desk, f"w{index}"), 0) for index in range(4)}
    found = []
    for _ in range(40):
        for name, (errand, read) in list(errands.items()):
            merge = applied(desk, errand, read)
            assert merge is not None
            found.append(merge.staleness)
            errands[name] = taken(desk, name), desk.version
    assert found[:4] == [0, 1, 2, 3]
    assert set(found[4:]) == {3}


def test_a_record_is_read_as_it_was_written_and_cut_where_a_checkpoint_is_continued(tmp_path: Path) -> None:
    trial = Trial(DESKS["async"](), 3, 3)
    trial.run(6)
    record = UpdateLog(tmp_path / "updates.jsonl", 0)
    for merge in trial.made:
        record.note(merge)
    record.close()
    lines = list(read_record(tmp_path / "updates.jsonl"))
    assert lines == [UpdateRecord.of(merge) for merge in trial.made]
    UpdateLog(tmp_path / "updates.jsonl", 4).close()
    assert list(read_record(tmp_path / "updates.jsonl")) == lines[:4]


def test_a_damaged_record_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "updates.jsonl"
    path.write_text('{"version":0,"of":[]}\nnothing\n{"version":1')
    with pytest.raises(CheckpointError, match=r"updates\.jsonl:2 is no update of a run"):
        list(read_record(path))


@pytest.mark.parametrize("kind", ["async", "drop", "replace-2"])
@pytest.mark.parametrize("workers", [1, 3, 6])
def test_a_replay_makes_the_same_updates_of_gradients_that_read_the_same(kind: str, workers: int) -> None:
    recorded = Trial(DESKS[kind](), 4, 4)
    recorded.run(20)
    script = [UpdateRecord.of(merge) for merge in recorded.made]
    desk = ReplayScheduler(script=script, staleness=Staleness(), until=20)
    desk.recall({}, 0)
    replayed = Trial(desk, 5, workers)
    replayed.run(20)

    def told(made: list[PendingUpdate]) -> list[tuple[tuple[Ticket, ...], tuple[int, ...]]]:
        return [(tuple(one.ticket for one in merge.items), merge.reads) for merge in made]

    assert told(replayed.made) == told(recorded.made)


def test_a_replay_says_when_it_cannot_go_on() -> None:
    line = (
        UpdateRecord(0, (GradientRef(Ticket(0, (0,)), 0, "w0"),)),
        UpdateRecord(1, (GradientRef(Ticket(1, (0,)), 0, "w1"),)),
    )
    desk = ReplayScheduler(script=line, staleness=Staleness(), until=3)
    with pytest.raises(TrainingError, match=r"cannot go on from step 1: update 1 .* computed at version 0"):
        desk.recall({}, 1)
    desk.recall({}, 0)
    with pytest.raises(TrainingError, match=r"the recorded run made 2 updates, and this one is to make more"):
        Trial(desk, 0, 2).run(3)
