"""A group of some ranks that waits longer than the group of all is caught here alone; so are axes in another order."""

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from tests.support.pool import Place, Pool
from trainkit.cluster.tasks import Identity
from trainkit.strategies.data_parallel import Mirrored
from trainkit.strategies.groups import process_group
from trainkit.strategies.groups.mesh import Axes
from trainkit.strategies.pipeline.groups import new_groups


def test_ranks_of_the_last_axis_are_neighbours_and_every_rank_has_coordinates_of_its_own() -> None:
    axes = Axes(replicate=2, shard=3, tensor=2)
    assert [axes.coordinates(rank)["tensor"] for rank in range(4)] == [0, 1, 0, 1]
    assert axes.coordinates(5) == {"replicate": 0, "shard": 2, "tensor": 1}
    places = [tuple(axes.coordinates(rank).values()) for rank in range(axes.num_ranks)]
    assert places == sorted(set(places))
    assert len(places) == 12


def test_axes_that_do_not_make_up_the_world_are_a_problem() -> None:
    assert Axes(shard=2, tensor=2).problems(4) == []
    (problem,) = Axes(shard=2, tensor=2).problems(6)
    assert "make 4 ranks, and the run has 6" in str(problem)


def limits(place: Place) -> list[float]:
    """The seconds that each group of some of four ranks waits for them in an exchange."""
    mesh = Axes(replicate=2, tensor=2).mesh("cpu", timeout_s=7)
    made = new_groups({"own": (0,), "tied": (0, 1)}, stages=2, replicas=2, rank=place.rank, timeout_s=8)
    groups = [mesh.get_group("replicate"), mesh.get_group("tensor"), made.replica, made.alike[0, 1]]
    backends = [group._get_backend(torch.device("cpu")) for group in groups]
    return [backend.options._timeout.total_seconds() for backend in backends]


def test_groups_of_some_ranks_wait_as_long_as_the_group_of_all(pool: Pool) -> None:
    assert pool.run("tests.strategies.test_mesh.limits", num_ranks=4, group=True) == [[7.0, 7.0, 8.0, 8.0]] * 4


def test_an_attempt_does_not_find_the_signal_of_a_failed_exchange_of_an_earlier_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = HashStore()
    store.set("exception_dump", "0")
    monkeypatch.setattr(process_group, "HashStore", lambda: store)
    ranks = Mirrored(replicas=1, process_group="always").join(Identity.solo())
    ranks.close(failed=False)
    assert not store.check(["exception_dump"])
