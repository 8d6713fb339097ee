"""A pool that gives a task the processes, or the results, of a failed one is caught here alone."""

import os

import pytest
import torch

from tests.support.pool import Place, Pool, TaskError


def total(place: Place, start: int) -> int:
    tensor = torch.tensor(start + place.rank)
    torch.distributed.all_reduce(tensor)
    return int(tensor)


def pid(place: Place) -> int:
    return os.getpid()


def fail_on_rank_one(place: Place) -> None:
    if place.rank == 1:
        raise ValueError("on purpose")


def die(place: Place) -> None:
    os.kill(os.getpid(), 9)


def test_ranks_share_a_group_for_the_length_of_a_task(pool: Pool) -> None:
    assert pool.run("tests.support.test_pool.total", 10, num_ranks=2, group=True) == [21, 21]
    assert pool.run("tests.support.test_pool.total", 0, num_ranks=2, group=True) == [1, 1]


def test_processes_stay_for_the_next_task(pool: Pool) -> None:
    first = pool.run("tests.support.test_pool.pid", num_ranks=2)
    assert pool.run("tests.support.test_pool.pid", num_ranks=2) == first


@pytest.mark.long
def test_a_failing_rank_is_named_and_the_next_task_works() -> None:
    with Pool() as pool:
        with pytest.raises(TaskError, match=r"rank 1 of 2:(.|\n)*ValueError: on purpose"):
            pool.run("tests.support.test_pool.fail_on_rank_one", num_ranks=2)
        with pytest.raises(TaskError, match="exit code 139"):
            pool.run("tests.support.test_pool.die", num_ranks=1)
        assert len(pool.run("tests.support.test_pool.pid", num_ranks=1)) == 1


@pytest.mark.long
def test_a_process_keeps_its_rank_when_others_are_replaced() -> None:
    with Pool() as pool:
        before = pool.run("tests.support.test_pool.pid", num_ranks=3)
        with pytest.raises(TaskError):
            pool.run("tests.support.test_pool.fail_on_rank_one", num_ranks=2)
        assert pool.run("tests.support.test_pool.pid", num_ranks=3)[2] == before[2]
