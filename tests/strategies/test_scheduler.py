"""A shard that is used twice or never, since its worker was slow, died or came back, is caught here alone.

The chief's scheduler by itself: who computes what, and what makes an update. No process, no tensor.
"""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from trainkit.errors import CheckpointError, TrainingError
from trainkit.numerics.batch import BatchPlan, Ticket
from trainkit.strategies.updates.scheduler import (
    AsyncScheduler,
    Decision,
    PendingUpdate,
    Policy,
    ReplayScheduler,
    Staleness,
    SyncScheduler,
    UpdateLog,
    WorkItem,
    WorkScheduler,
    read_record,
)

PLAN = BatchPlan(num_samples=37, global_size=8, micro_size=2)  # steps of 8, 8, 8, 8 and 5 samples: 4 or 3 shards


def asynchronous(workers: int = 2, policy: Policy = "accept", bound: int | None = None, **more: Any) -> WorkScheduler:
    return with_workers(AsyncScheduler(plan=PLAN, staleness=Staleness(policy=policy, bound=bound), **more), workers)


def synchronous(workers: int = 4, spares: int = 0, **more: Any) -> WorkScheduler:
    return with_workers(SyncScheduler(plan=PLAN, spares=spares, **more), workers)


def with_workers(scheduler: WorkScheduler, workers: int) -> WorkScheduler:
    scheduler.recall({}, 0, None)
    for index in range(workers):
        scheduler.join(f"w{index}")
    return scheduler


def taken(scheduler: WorkScheduler, worker: str) -> WorkItem:
    item = scheduler.next(worker)
    assert item is not None
    return item


def applied(scheduler: WorkScheduler, item: WorkItem, read: int) -> PendingUpdate | None:
    scheduler.report(item.number, item.worker, read)
    merge = scheduler.next_ready_update()
    if merge is not None:
        scheduler.merged(merge)
    return merge


def test_each_policy_judges_by_staleness() -> None:
    drop, lr = Staleness(policy="drop", bound=2), Staleness(policy="lr")
    assert Staleness(policy="accept").decide(7) == Staleness(policy="bound", bound=1).decide(9) == Decision()
    assert [drop.decide(staleness) for staleness in (2, 3)] == [Decision(), Decision(takes=False)]
    assert Staleness(policy="scale").decide(3) == Decision(factor=0.25)
    assert [lr.decide(staleness).lr_divisor for staleness in (0, 3)] == [1.0, 3.0]


def test_a_dropped_gradient_is_computed_again_before_any_other_step() -> None:
    scheduler = asynchronous(2, "drop", 0)
    first, second = taken(scheduler, "w0"), taken(scheduler, "w1")
    assert applied(scheduler, second, 0) is not None
    assert applied(scheduler, first, 0) is None
    assert taken(scheduler, "w0").ticket == Ticket(0, (0, 1, 2, 3))
    assert scheduler.late == {"w0": 1}


def test_a_worker_ahead_of_the_slowest_waits_for_it_unless_it_is_lost() -> None:
    scheduler = asynchronous(2, "bound", 1)
    slow = taken(scheduler, "w1")
    for read in range(2):
        applied(scheduler, taken(scheduler, "w0"), read)
    assert scheduler.next("w0") is None
    applied(scheduler, slow, 0)
    applied(scheduler, taken(scheduler, "w0"), 3)
    assert scheduler.next("w0") is None
    scheduler.leave("w1")
    assert scheduler.next("w0") is not None


def test_in_the_warmup_one_gradient_at_a_time_is_computed() -> None:
    scheduler = asynchronous(3, warmup_steps=2)
    for version in range(2):
        item = taken(scheduler, "w0")
        assert scheduler.next("w1") is None
        assert applied(scheduler, item, version) is not None
    assert all(scheduler.next(worker) is not None for worker in ("w0", "w1", "w2"))


def test_an_idle_worker_computes_an_outstanding_shard_again_and_the_first_result_wins() -> None:
    scheduler = synchronous(5, spares=1)
    items = [taken(scheduler, f"w{index}") for index in range(4)]
    spare = taken(scheduler, "w4")
    assert spare.ticket == items[0].ticket
    for item in (*items[1:], spare):
        merge = applied(scheduler, item, 0)
    assert merge is not None
    assert merge.items[0].worker == "w4"
    assert not scheduler.report(items[0].number, "w0", 0)
    assert scheduler.late == {"w0": 1}


def test_no_more_than_the_spares_are_repeated() -> None:
    for spares, expected in ((2, [0, 1, 2, 3, 0, 1, None]), (0, [0, 1, 2, 3, None, None, None])):
        scheduler = synchronous(7, spares=spares)
        found = [scheduler.next(f"w{index}") for index in range(7)]
        assert [one.ticket.shards[0] if one else None for one in found] == expected


def test_where_shards_are_replaced_the_first_results_make_the_step_and_the_late_shard_returns() -> None:
    scheduler = synchronous(5, spares=1, replaces=True)
    items = [taken(scheduler, f"w{index}") for index in range(5)]
    assert items[4].ticket == Ticket(1, (0,))
    for item in items[1:]:
        merge = applied(scheduler, item, 0)
    assert merge is not None
    assert [one.ticket for one in merge.items] == [Ticket(0, (1,)), Ticket(0, (2,)), Ticket(0, (3,)), Ticket(1, (0,))]
    assert taken(scheduler, "w1").ticket == Ticket(0, (0,))
    assert not scheduler.report(items[0].number, "w0", 0)


def test_a_worker_of_several_devices_takes_several_shards_of_a_step() -> None:
    scheduler = synchronous(2, width=3)
    first, second = taken(scheduler, "w0"), taken(scheduler, "w1")
    assert (first.ticket, second.ticket) == (Ticket(0, (0, 1, 2)), Ticket(0, (3,)))
    assert applied(scheduler, second, 0) is None
    merge = applied(scheduler, first, 0)
    assert merge is not None
    assert merge.tickets == (first.ticket, second.ticket)


def test_an_overflowed_step_is_scheduled_again() -> None:
    scheduler = synchronous(4)
    for index in range(4):
        scheduler.report(taken(scheduler, f"w{index}").number, f"w{index}", 0)
    merge = scheduler.next_ready_update()
    assert merge is not None
    scheduler.requeue_after_overflow(merge)
    assert [taken(scheduler, f"w{index}").ticket for index in range(4)] == [one.ticket for one in merge.items]
    assert scheduler.version == 0


class Trial:
    """Workers at random speeds, some dying, some slow; what every update was made of."""

    def __init__(self, scheduler: WorkScheduler, seed: int, num_workers: int) -> None:
        self.scheduler, self.random = scheduler, Random(seed)
        self.names = [f"w{index}" for index in range(num_workers)]
        self.busy: dict[str, WorkItem] = {}
        self.reads: dict[int, int] = {}
        self.made: list[PendingUpdate] = []

    def run(self, updates: int) -> None:
        for name in self.names:
            self.scheduler.join(name)
        while len(self.made) < updates:
            self._turn()

    def _turn(self) -> None:
        for name in self.names:
            if name not in self.busy and (item := self.scheduler.next(name)) is not None:
                self.busy[name] = item
                self.reads[item.number] = self.scheduler.version
        name = self.random.choice(sorted(self.busy))
        if self.random.random() < 0.05 and not isinstance(self.scheduler, ReplayScheduler):
            self.scheduler.leave(name)
            self.busy.pop(name)
            self.scheduler.join(name)
        elif name not in self.names[:2] or self.random.random() < 0.2:  # two are slow
            item = self.busy.pop(name)
            self.scheduler.report(item.number, name, self.reads[item.number])
        while (merge := self.scheduler.next_ready_update()) is not None:
            self.scheduler.merged(merge)
            self.made.append(merge)


def used(made: list[PendingUpdate]) -> Counter[tuple[int, int]]:
    return Counter((one.ticket.step, shard) for merge in made for one in merge.items for shard in one.ticket.shards)


SCHEDULERS: dict[str, Callable[[], WorkScheduler]] = {
    "async": lambda: AsyncScheduler(plan=PLAN, until=20),
    "drop": lambda: AsyncScheduler(plan=PLAN, staleness=Staleness(policy="drop", bound=2), until=20),
    "bound": lambda: AsyncScheduler(plan=PLAN, staleness=Staleness(policy="bound", bound=1), until=20),
    "sync": lambda: SyncScheduler(plan=PLAN, until=20),
    "duplicate": lambda: SyncScheduler(plan=PLAN, spares=2, until=20),
    "wide duplicate": lambda: SyncScheduler(plan=PLAN, width=2, spares=2, until=20),
    "replace-2": lambda: SyncScheduler(plan=PLAN, spares=2, replaces=True, until=20),
}


@pytest.mark.parametrize("kind", SCHEDULERS)
@pytest.mark.parametrize("seed", range(3))
def test_every_shard_is_used_once_an_epoch_whichever_worker_is_slow_or_dies(kind: str, seed: int) -> None:
    trial = Trial(SCHEDULERS[kind](), seed, 5)
    trial.run(20)
    every = {(step, shard) for step in range(20) for shard in range(PLAN.num_shards(step))}
    assert used(trial.made) == Counter(dict.fromkeys(every, 1))
    if kind.startswith("replace"):
        for epoch in range(4):
            steps = {step for step, _ in used(trial.made[5 * epoch : 5 * epoch + 5])}
            assert steps == set(range(5 * epoch, 5 * epoch + 5))


@pytest.mark.parametrize("kind", ["async", "replace-2"])
@pytest.mark.parametrize("stop", [1, 7])
def test_nothing_is_lost_or_used_twice_over_a_resume(kind: str, stop: int) -> None:
    first = Trial(SCHEDULERS[kind](), 1, 5)
    first.run(stop)
    made = first.made[:stop]
    assert len(first.made) == stop
    scheduler = SCHEDULERS[kind]()
    scheduler.recall(json.loads(json.dumps(first.scheduler.remember())), stop, 20)
    second = Trial(scheduler, 2, 4)
    second.run(20 - stop)
    every = {(step, shard) for step in range(20) for shard in range(PLAN.num_shards(step))}
    assert used([*made, *second.made]) == Counter(dict.fromkeys(every, 1))


def test_equal_workers_are_as_stale_as_there_are_others() -> None:
    scheduler = asynchronous(4)
    items = {f"w{index}": (taken(scheduler, f"w{index}"), 0) for index in range(4)}
    found = []
    for _ in range(40):
        for name, (item, read) in list(items.items()):
            merge = applied(scheduler, item, read)
            assert merge is not None
            found.append(merge.staleness)
            items[name] = taken(scheduler, name), scheduler.version
    assert found[:4] == [0, 1, 2, 3]
    assert set(found[4:]) == {3}


def test_a_record_is_read_as_it_was_written_and_cut_where_a_checkpoint_is_continued(tmp_path: Path) -> None:
    trial = Trial(SCHEDULERS["async"](), 3, 3)
    trial.run(6)
    record = UpdateLog(tmp_path / "updates.jsonl", 0)
    for merge in trial.made:
        record.note(merge)
    record.close()
    lines = list(read_record(tmp_path / "updates.jsonl"))
    assert [line.text() for line in lines] == [merge.text() for merge in trial.made]
    UpdateLog(tmp_path / "updates.jsonl", 4).close()
    assert list(read_record(tmp_path / "updates.jsonl")) == lines[:4]


def test_a_damaged_record_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "updates.jsonl"
    path.write_text('{"version":0,"of":[]}\nnothing\n{"version":1')
    with pytest.raises(CheckpointError, match=r"updates\.jsonl:2 is not an update of a run"):
        list(read_record(path))


@pytest.mark.parametrize("kind", ["async", "drop", "replace-2"])
@pytest.mark.parametrize("workers", [1, 6])
def test_a_replay_makes_the_same_updates_of_gradients_that_read_the_same(kind: str, workers: int) -> None:
    recorded = Trial(SCHEDULERS[kind](), 4, 4)
    recorded.run(20)
    scheduler = ReplayScheduler(script=recorded.made)
    scheduler.recall({}, 0, 20)
    replayed = Trial(scheduler, 5, workers)
    replayed.run(20)

    def told(made: list[PendingUpdate]) -> list[tuple[tuple[Ticket, ...], tuple[int, ...]]]:
        return [(merge.tickets, tuple(one.version for one in merge.items)) for merge in made]

    assert told(replayed.made) == told(recorded.made)


def test_a_replay_that_cannot_continue_raises_an_error() -> None:
    items = [WorkItem(worker=f"w{step}", ticket=Ticket(step, (0,)), version=0) for step in range(2)]
    scheduler = ReplayScheduler(script=[PendingUpdate(version=step, items=(one,)) for step, one in enumerate(items)])
    with pytest.raises(TrainingError, match=r"cannot continue from step 1: update 1 .* computed at version 0"):
        scheduler.recall({}, 1, 3)
    scheduler.recall({}, 0, 3)
    with pytest.raises(TrainingError, match=r"the recorded run made 2 updates, and this run needs more"):
        Trial(scheduler, 0, 2).run(3)
