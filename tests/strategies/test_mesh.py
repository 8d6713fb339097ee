"""Axes are multiplied in one place."""

from trainkit.errors import Problem
from trainkit.strategies.groups.mesh import Axes


def test_ranks_of_the_last_axis_are_neighbours() -> None:
    axes = Axes(replicate=2, shard=3, tensor=2)
    assert axes.num_ranks == 12
    assert axes.num_data_ranks == 6
    assert axes.ranks("tensor", 5) == [4, 5]
    assert axes.ranks("shard", 5) == [1, 3, 5]
    assert axes.ranks("replicate", 5) == [5, 11]


def test_every_rank_has_its_own_coordinates() -> None:
    axes = Axes(replicate=2, stage=2, tensor=3)
    places = [tuple(axes.coordinates(rank).values()) for rank in range(axes.num_ranks)]
    assert len(set(places)) == axes.num_ranks
    assert places == sorted(places)


def test_axes_that_do_not_make_up_the_world_are_a_problem() -> None:
    assert Axes(shard=2, tensor=2).problems(4) == []
    rule = "2 (shard) x 2 (tensor) make 4 ranks, and the run has 6."
    assert Axes(shard=2, tensor=2).problems(6) == [Problem(key="strategy", rule=rule)]
