"""Axes are multiplied in one place."""

from trainkit.errors import Problem
from trainkit.strategies.groups.mesh import Axes


def test_ranks_of_the_last_axis_are_neighbours() -> None:
    axes = Axes(replicate=2, shard=3, tensor=2)
    assert axes.num_ranks == 12
    assert [axes.coordinates(rank)["tensor"] for rank in range(4)] == [0, 1, 0, 1]
    assert axes.coordinates(5) == {"replicate": 0, "shard": 2, "tensor": 1}


def test_every_rank_has_its_own_coordinates() -> None:
    axes = Axes(replicate=2, shard=2, tensor=3)
    places = [tuple(axes.coordinates(rank).values()) for rank in range(axes.num_ranks)]
    assert len(set(places)) == axes.num_ranks
    assert places == sorted(places)


def test_axes_that_do_not_make_up_the_world_are_a_problem() -> None:
    assert Axes(shard=2, tensor=2).problems(4) == []
    rule = "2 (shard) x 2 (tensor) make 4 ranks, and the run has 6."
    assert Axes(shard=2, tensor=2).problems(6) == [Problem(key="strategy", rule=rule)]
