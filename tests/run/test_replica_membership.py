import pytest

from tests.support.present import present
from trainkit.cluster.tasks import Task
from trainkit.run.supervisor.supervisor import ReplicaMembership


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def membership_of(count: int, clock: Clock, min_replicas: int | None = 1, retry_s: float = 60.0) -> ReplicaMembership:
    tasks = [Task(role="worker", index=rank, rank=rank, device=f"cuda:{rank}") for rank in range(count)]
    return ReplicaMembership(tasks, min_replicas=min_replicas, retry_s=retry_s, clock=clock)


def indices(membership: ReplicaMembership) -> list[int]:
    assert [task.rank for task in membership.tasks] == list(range(len(membership.tasks)))
    return [task.index for task in membership.tasks]


def test_a_replica_is_removed_by_its_second_failure(clock: Clock) -> None:
    membership = membership_of(4, clock)
    assert membership.record_failure(2, at_start=False) is None
    expected = "worker:2 (cuda:2) is lost: the run continues with 3 of 4 replicas, and retries it in 60 s."
    assert membership.record_failure(2, at_start=False) == expected
    assert indices(membership) == [0, 1, 3]
    assert [task.device for task in membership.tasks] == ["cuda:0", "cuda:1", "cuda:3"]


def test_a_newer_checkpoint_clears_the_account(clock: Clock) -> None:
    membership = membership_of(4, clock)
    membership.record_failure(2, at_start=False)
    membership.clear_failures()
    assert membership.record_failure(2, at_start=False) is None


def test_a_replica_that_fails_in_a_restart_before_its_first_step_is_removed_at_once(clock: Clock) -> None:
    membership = membership_of(4, clock)
    assert membership.record_failure(0, at_start=True) is not None
    assert indices(membership) == [1, 2, 3]


def test_a_lost_replica_returns_after_its_waiting_time(clock: Clock) -> None:
    membership = membership_of(3, clock)
    membership.record_failure(1, at_start=True)
    clock.now = 59.9
    assert (membership.is_due, membership.next_members(), indices(membership)) == (False, (), [0, 2])
    clock.now = 60.0
    assert membership.is_due
    assert membership.next_members() == ("tries worker:1 (cuda:1) again: 3 of 3 replicas.",)
    assert (membership.is_due, indices(membership)) == (False, [0, 1, 2])


def test_the_wait_doubles_until_a_checkpoint_was_made_with_it(clock: Clock) -> None:
    membership, waits = membership_of(2, clock), []
    for _ in range(3):
        waits.append(present(membership.record_failure(1, at_start=True)).rpartition(" in ")[2])
        clock.now += 1000.0
        membership.next_members()
    membership.clear_failures()
    waits.append(present(membership.record_failure(1, at_start=True)).rpartition(" in ")[2])
    assert waits == ["60 s.", "120 s.", "240 s.", "60 s."]


def test_a_checkpoint_made_without_it_changes_nothing_for_a_lost_one(clock: Clock) -> None:
    membership = membership_of(2, clock)
    membership.record_failure(1, at_start=True)
    membership.clear_failures()
    clock.now = 60.0
    membership.next_members()
    assert present(membership.record_failure(1, at_start=True)).endswith("retries it in 120 s.")


@pytest.mark.parametrize("fewest", [None, 3])
def test_without_elasticity_or_at_the_minimum_no_replica_is_removed(clock: Clock, fewest: int | None) -> None:
    membership = membership_of(3, clock, min_replicas=fewest)
    assert [membership.record_failure(0, at_start=True) for _ in range(3)] == [None] * 3
    assert membership.at_minimum == (fewest is not None)
