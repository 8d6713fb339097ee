"""The simulator against the formulas of the field, within 2 %: a factor of two in a ring or a queue is caught here."""

import numpy as np
import pytest

from trainkit.scaling import closed_forms
from trainkit.scaling.distributions import Form, StepTimes
from trainkit.scaling.inputs import Inputs
from trainkit.scaling.simulation import EventLoop, FifoLink, Late, Scene, simulate
from trainkit.scaling.study import servers_rows, simulate_goodput, spares_rows

STOPS = closed_forms.Interruptions(write_s=30.0, restart_s=120.0, mtbf_s=7200.0)
CONSTANT = StepTimes(mean_s=0.1, form="constant")


def within_2_percent(value: float) -> object:
    return pytest.approx(value, rel=0.02)


@pytest.mark.parametrize(("form", "spares"), [("exponential", 3), ("normal", 16), ("lognormal", 0)])
def test_a_step_with_spares_takes_the_order_statistic(form: Form, spares: int) -> None:
    times = StepTimes(mean_s=0.2, spread=0.3, form=form)
    found = simulate(Scene(workers=64, compute=times, spares=spares, late="cancel"), updates=1500)
    assert found.mean_s == within_2_percent(times.order_statistic(64 - spares, 64))


def test_the_slowest_normal_is_that_of_the_tables() -> None:
    """Harter 1961, Expected values of normal order statistics: 0.56419 of 2, 1.53875 of 10, 2.50759 of 100."""
    found = [StepTimes(mean_s=1.0, spread=1.0, form="normal").slowest(count) - 1 for count in (2, 10, 100)]
    assert found == pytest.approx([0.56419, 1.53875, 2.50759], abs=1e-4)


def test_messages_at_random_wait_as_in_the_queue_of_pollaczek_and_khinchine() -> None:
    """The queue M/D/1 (Pollaczek 1930, Khinchine 1932): the mean wait is rho s / (2 (1 - rho))."""
    loop, rng, count = EventLoop(), np.random.default_rng(0), 60_000
    link = FifoLink(loop=loop)
    for moment in np.cumsum(rng.exponential(1.0, count)):
        loop.schedule(float(moment), lambda: link.send(0.6, lambda: None))
    loop.run(lambda: False)
    assert link.waited_s / count == within_2_percent(0.6 * 0.6 / (2 * (1 - 0.6)))


@pytest.mark.parametrize("servers", [1, 2])
def test_the_links_of_servers_bound_the_updates(servers: int) -> None:
    scene = Scene(workers=64, compute=CONSTANT, num_bytes=1e8, servers=servers, is_async=True)
    found = simulate(scene, updates=3000)
    assert 1 / found.mean_s == within_2_percent(servers * 1.25e9 / 1e8)
    assert found.link_load == within_2_percent(1.0)


def test_a_ring_whose_replicas_start_apart_ends_as_if_all_started_with_the_last() -> None:
    """Each round, a replica waits for its own and its neighbour's previous round."""
    starts = np.random.default_rng(0).exponential(1.0, 16)
    ends = starts
    for _ in range(2 * 15):
        ends = np.maximum(ends, np.roll(ends, 1)) + 1e6 / 16 / 1e6 + 0.01
    assert ends == pytest.approx(np.full(16, starts.max() + closed_forms.ring_all_reduce_s(16, 1e6, 1e6, 0.01)))


def test_asynchronous_workers_are_stale_by_all_others() -> None:
    """Each of the 11 others makes on average one update between a worker's reading and its own update."""
    scene = Scene(
        workers=12, compute=StepTimes(mean_s=0.1, spread=0.3), servers=1, is_async=True, slow_workers=3, slow_factor=4
    )
    assert simulate(scene, updates=20_000).staleness.mean() == within_2_percent(11)


@pytest.mark.parametrize("interval_s", [200.0, 3000.0])
def test_killed_runs_advance_as_daly_says(interval_s: float) -> None:
    assert simulate_goodput(interval_s, STOPS) == within_2_percent(closed_forms.goodput(interval_s, STOPS))


def test_no_simulated_interval_beats_that_of_young_and_daly() -> None:
    best_s = closed_forms.checkpoint_interval_s(30.0, 7200.0)
    tried = {factor: simulate_goodput(best_s * factor, STOPS, failures=20_000) for factor in (0.3, 0.6, 1.0, 1.6, 3.0)}
    assert max(tried, key=tried.__getitem__) == 1.0
    assert best_s == pytest.approx((2 * 30 * 7200) ** 0.5, rel=0.05)  # Young's first order


@pytest.mark.parametrize(
    ("spares", "late", "step_s"), [(0, "replace", 0.5), (1, "replace", 0.2), (1, "duplicate", 0.2)]
)
def test_one_spare_outruns_a_slow_worker(spares: int, late: Late, step_s: float) -> None:
    """Four shards on four workers, one five times slower: benchmarks/results/stragglers.md says 0.51, 0.21, 0.21."""
    scene = Scene(workers=4, compute=CONSTANT, shards=4, spares=spares, late=late, slow_workers=1, slow_factor=5)
    assert simulate(scene, updates=60).mean_s == pytest.approx(step_s)


def test_equal_seeds_give_equal_simulations() -> None:
    scene = Scene(workers=8, compute=StepTimes(mean_s=0.1, spread=0.2), servers=2, num_bytes=1e7, spares=1)
    one, same, other = (simulate(scene, updates=50, seed=seed) for seed in (3, 3, 4))
    assert one.update_s.tolist() == same.update_s.tolist() != other.update_s.tolist()


def test_a_killed_worker_leaves_its_shard_to_the_others() -> None:
    scene = Scene(workers=4, compute=CONSTANT, shards=8, mtbf_s=1.0, restart_s=0.5)
    found = simulate(scene, updates=400)
    assert found.kills > 100
    assert 0.2 < found.mean_s < 0.5  # 0.2 s without kills; a third of the workers is down


def test_a_bound_of_zero_makes_asynchronous_workers_wait_for_each_other() -> None:
    scene = Scene(
        workers=4, compute=CONSTANT, servers=1, is_async=True, slow_workers=1, slow_factor=5, staleness_bound=0
    )
    assert simulate(scene, updates=400).mean_s == pytest.approx(0.5 / 4, rel=0.01)


def test_gradients_that_are_too_stale_are_discarded() -> None:
    scene = Scene(workers=4, compute=CONSTANT, servers=1, is_async=True, slow_workers=1, slow_factor=5, drop_above=4)
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
