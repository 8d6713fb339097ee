"""The simulator by cases that are solved in the head: a late gradient that counts is caught here alone."""

import pytest

from trainkit.scaling.distributions import StepTimes
from trainkit.scaling.inputs import Inputs
from trainkit.scaling.simulation import Late, Scene, simulate
from trainkit.scaling.study import servers_rows, spares_rows

EQUAL = StepTimes(mean_s=0.1, form="constant")


@pytest.mark.parametrize(
    ("spares", "late", "step_s"), [(0, "replace", 0.5), (1, "replace", 0.2), (1, "duplicate", 0.2)]
)
def test_one_spare_outruns_a_slow_worker(spares: int, late: Late, step_s: float) -> None:
    """Four shards on four workers, one five times slower: benchmarks/results/stragglers.md says 0.51, 0.21, 0.21."""
    scene = Scene(workers=4, compute=EQUAL, shards=4, spares=spares, late=late, slow_workers=1, slow_factor=5)
    assert simulate(scene, updates=60).mean_s == pytest.approx(step_s)


def test_equal_seeds_give_equal_simulations() -> None:
    scene = Scene(workers=8, compute=StepTimes(mean_s=0.1, spread=0.2), servers=2, num_bytes=1e7, spares=1)
    one, same, other = (simulate(scene, updates=50, seed=seed) for seed in (3, 3, 4))
    assert one.update_s.tolist() == same.update_s.tolist() != other.update_s.tolist()


def test_a_killed_worker_leaves_its_shard_to_the_others() -> None:
    scene = Scene(workers=4, compute=EQUAL, shards=8, mtbf_s=1.0, restart_s=0.5)
    found = simulate(scene, updates=400)
    assert found.kills > 100
    assert 0.2 < found.mean_s < 0.5  # 0.2 s without kills; a third of the workers is down


def test_a_bound_of_zero_makes_asynchronous_workers_wait_for_each_other() -> None:
    scene = Scene(workers=4, compute=EQUAL, servers=1, is_async=True, slow_workers=1, slow_factor=5, staleness_bound=0)
    assert simulate(scene, updates=400).mean_s == pytest.approx(0.5 / 4, rel=0.01)


def test_gradients_that_are_too_stale_are_discarded() -> None:
    scene = Scene(workers=4, compute=EQUAL, servers=1, is_async=True, slow_workers=1, slow_factor=5, drop_above=4)
    found = simulate(scene, updates=400)
    assert found.staleness.max() <= 4
    assert found.discarded == pytest.approx(found.computed / 16, rel=0.05)  # every one of the slow worker


def test_servers_are_added_until_their_links_are_no_wall() -> None:
    rows = servers_rows(Inputs(compute_s=0.3, megabytes=100, server_gbit=10, spread=0.1), 32)
    assert [row.servers for row in rows] == [1, 2, 4, 8]  # 32 gradients of 0.08 s in 0.46 s: 5.6 links
    assert rows[0].link_load == pytest.approx(1.0, rel=0.01)
    assert rows[-1].link_load < 0.8


@pytest.mark.parametrize(("spread", "pays"), [(0.0, False), (0.5, True)])
@pytest.mark.slow
def test_spares_pay_only_where_times_spread(spread: float, pays: bool) -> None:
    rows = spares_rows(StepTimes(mean_s=0.3, spread=spread), 20)
    assert (max(rows, key=lambda row: row.gain).spares > 0) == pays
