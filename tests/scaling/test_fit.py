"""The model fitted to measurements: a share that is measured with the threads of another is caught here alone.
The model of a step against formulas and measured runs: a factor of two in a ring or in spares is caught here alone.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.measuring.trainings import config
from trainkit.config.schema import RunConfig
from trainkit.measuring.bench import Choice, Turn
from trainkit.measuring.replicas import Measurements, ScalableTraining, exchange_of, measure, scalable, workload
from trainkit.scaling.answers import (
    best_spares,
    checkpoint_interval_s,
    goodput,
    knee_of,
    remedies,
    scale_document,
    scale_lines,
    servers_needed,
)
from trainkit.scaling.fit import Check, Fit, Point, fit
from trainkit.scaling.inputs import HOSTS, assumed
from trainkit.scaling.model import (
    Interval,
    Link,
    Workload,
    predict,
    predictions,
    ring,
    samples_per_s,
    servers,
    slowest_of,
)
from trainkit.strategies.base import Remedies
from trainkit.trainer.metrics_accumulator import PARTS

ASSUMED = Workload(
    share_s={1: 0.08, 2: 0.043, 4: 0.025, 8: 0.015},
    samples=64,
    cores=4,
    exchange=ring(2e7),
    within=Link(bandwidth=2e9, latency_s=1e-4),
)


def measured(true: Workload, *counts: int) -> list[Point]:
    seconds = {count: predict(true, count).total_s for count in counts}
    return [Point(replicas=count, step_s=s, low_s=0.98 * s, high_s=1.02 * s) for count, s in seconds.items()]


@pytest.mark.parametrize("slower", [0.5, 3.0])
def test_a_fit_to_two_and_four_replicas_predicts_eight(slower: float) -> None:
    true = replace(ASSUMED, within=Link(bandwidth=2e9 / slower, latency_s=1e-4), crowd=1.1, overlap=0.2)
    estimate = fit(ASSUMED, measured(true, 2, 4))
    eight = predictions(estimate.work, estimate.draw, (8,))[0].samples_per_s
    assert eight.middle == pytest.approx(samples_per_s(true, 8), rel=0.15)
    assert eight.contains(samples_per_s(true, 8))


def test_each_measurement_is_predicted_before_it_is_used() -> None:
    true = replace(ASSUMED, within=Link(bandwidth=5e8, latency_s=1e-4))
    two, four = fit(ASSUMED, measured(true, 4, 2)).checks
    assert (two.replicas, four.replicas) == (2, 4)
    assert two.measured_s == predict(true, 2).total_s
    assert abs(four.error) < abs(two.error)  # that of 2 told of the link


def test_what_no_model_explains_widens_the_intervals() -> None:
    points = measured(ASSUMED, 2, 4)
    strange = [points[0], replace(points[1], step_s=8 * points[1].step_s, low_s=0.3, high_s=0.3)]
    usual, wide = (fit(ASSUMED, chosen) for chosen in (points, strange))
    assert not wide.checks[1].inside
    narrow, broad = (predictions(estimate.work, estimate.draw, (8,))[0].speedup for estimate in (usual, wide))
    assert broad.high / broad.low > 1.5 * narrow.high / narrow.low


def test_what_was_measured_on_one_host_is_predicted_for_several_with_their_link() -> None:
    estimate = fit(ASSUMED, measured(ASSUMED, 2, 4)).on_hosts(2, Link(bandwidth=1e8))
    assert estimate.work.within != ASSUMED.within
    sent_s = 2 * 3 / 4 * 2e7 / 1e8  # of four replicas, over the link between hosts
    assert predict(estimate.work, 4).parts["bytes"] == pytest.approx(sent_s, rel=0.2)


class FakeTurns:
    """Turns of a machine on which a sample takes 1 ms, alone or not, and a step 2 ms beside."""

    def __init__(self) -> None:
        self.turns: list[tuple[str, int, int | None, int | None]] = []

    def __call__(self, cfg: RunConfig, folder: Path, threads: int | None = None) -> Turn:
        del folder
        name = cfg.strategy["_target_"].rpartition(".")[2]
        replicas, size = cfg.strategy.get("replicas", 1), cfg.batch.global_size
        assert size is not None
        self.turns.append((name, replicas, size, threads))
        seconds = 10 * (0.002 + 0.001 * size / replicas)
        ranks = [dict.fromkeys(PARTS, 0.0)]
        return Turn(figures={"steps": 10, "samples": 10 * size, "seconds": seconds, "ranks": ranks, "step_spread": 0.1})


def mirrored(*overrides: str) -> ScalableTraining:
    return scalable(config("strategy=mirrored", *overrides))


def test_one_replica_computes_the_shares_of_several_with_their_threads() -> None:
    training, turns = replace(mirrored(), cores=4), FakeTurns()
    measurement = measure(training, 8, rounds=1, steps=10, start=turns)
    assert turns.turns == [
        ("OneDevice", 1, 64, 4),
        ("OneDevice", 1, 32, 2),
        ("OneDevice", 1, 16, 1),
        ("OneDevice", 1, 8, 1),
        ("Mirrored", 2, 64, None),
        ("Mirrored", 4, 64, None),
    ]
    work = workload(training, measurement, within=Link(bandwidth=2e9))
    assert dict(work.share_s) == pytest.approx({1: 0.066, 2: 0.034, 4: 0.018, 8: 0.010})
    assert (work.spread, work.cores, work.exchange(1).own_bytes) == (0.1, 4, 0.0)
    assert work.exchange(4).own_bytes == pytest.approx(1.5 * 4 * (64 * 128 + 128 + 128 * 10 + 10))


def test_asynchronous_workers_compute_whole_steps() -> None:
    training = scalable(config("strategy=parameter_server", "strategy.mode=async"))
    training = replace(training, cores=4)
    assert (training.shares(16), training.share(4), training.at(16).keys, training.at(16).waits) == (
        [1, 2, 4],
        64,
        {"workers": 16},
        False,
    )
    updates = Choice(label="", turns=[Turn(figures={"steps": 10, "seconds": 0.5})])
    assert Measurements(shares={}, replicas={4: updates}).points(grows=True)[0].step_s == pytest.approx(4 * 0.05)


def test_the_link_of_the_servers_carries_the_bytes_of_all_workers() -> None:
    training = scalable(config("strategy=parameter_server", "strategy.servers=2"))
    size = 4.0 * (64 * 128 + 128 + 128 * 10 + 10)
    exchange = exchange_of(training.transfers(8) or (), waits=True)
    assert exchange.own_bytes == pytest.approx(2 * size, rel=0.02)
    assert exchange.wall_bytes == pytest.approx(8 * 2 * size / 2, rel=0.02)


WORK = Workload(share_s={1: 0.4}, samples=64, grows=True, per_host=1, between=Link(bandwidth=1.25e9, latency_s=1e-4))


def test_a_step_is_the_slowest_replica_and_a_ring_of_2_n_minus_1_rounds() -> None:
    work = replace(WORK, exchange=ring(1e8), spread=0.1)
    ring_s = 2 * 15 * (1e8 / 16 / 1.25e9 + 1e-4)
    assert predict(work, 16).total_s == pytest.approx(0.4 * slowest_of(16, 0.1) + ring_s)
    assert predict(work, 1).total_s == pytest.approx(0.4)


@pytest.mark.parametrize(("count", "update_s"), [(1, 1e8 / 1.25e9), (64, (0.4 + 2 * (1e8 / 1.25e9 + 1e-4)) / 32)])
def test_the_link_of_a_server_bounds_asynchronous_updates(count: int, update_s: float) -> None:
    work = replace(WORK, exchange=servers(1e8, count, is_async=True))
    assert predict(work, 32).total_s / 32 == pytest.approx(update_s)


def test_the_slowest_is_that_of_the_tables() -> None:
    """Harter 1961, Expected values of normal order statistics: a lognormal of small spread is a normal."""
    ratios = [(slowest_of(count, 1e-3) - 1) / 1e-3 for count in (2, 10, 100)]
    assert ratios == pytest.approx([0.56419, 1.53875, 2.50759], abs=5e-3)


def test_steps_with_random_shards_take_the_time_of_measured_runs() -> None:
    """Four workers and a spread of 0.5, without a spare and with one: benchmarks/results/scale.md."""
    step_s = [0.1 * slowest_of(4, 0.5, spares=spares) + 0.004 for spares in (0, 1)]
    assert step_s == pytest.approx([0.153, 0.126], rel=0.05)


@pytest.mark.parametrize(("spread", "pays"), [(0.0, False), (0.5, True)])
def test_spares_pay_only_where_times_spread(spread: float, pays: bool) -> None:
    work = replace(WORK, spread=spread)
    assert (best_spares(work, 20) > 0) == pays
    names = [remedy.key for remedy in remedies(work, 20, Remedies(spares="strategy.spare_replicas"))]
    assert ("strategy.spare_replicas=4" in names) == pays


@pytest.mark.parametrize("interval_s", [200.0, 3000.0])
def test_killed_runs_advance_as_daly_says(interval_s: float) -> None:
    rng, useful_s, elapsed_s = np.random.default_rng(0), 0.0, 0.0
    for alive_s in rng.exponential(7200.0, 4000):
        useful_s += alive_s // (interval_s + 30.0) * interval_s
        elapsed_s += alive_s + 120.0
        while (again_s := rng.exponential(7200.0)) < 120.0:  # killed during its restart
            elapsed_s += again_s
    assert goodput(interval_s, 30.0, 7200.0, restart_s=120.0) == pytest.approx(useful_s / elapsed_s, rel=0.02)


def test_no_interval_beats_that_of_young_and_daly() -> None:
    best_s = checkpoint_interval_s(30.0, 7200.0)
    tried = {factor: goodput(best_s * factor, 30.0, 7200.0, restart_s=120.0) for factor in (0.6, 0.9, 1.0, 1.1, 1.6)}
    assert max(tried, key=tried.__getitem__) == 1.0
    assert best_s == pytest.approx((2 * 30 * 7200) ** 0.5, rel=0.05)  # Young's first order


def test_replicas_that_share_cores_pay_up_to_the_number_of_cores() -> None:
    work = Workload(share_s={1: 0.08, 2: 0.045, 4: 0.025}, samples=64, cores=2, exchange=ring(4e5))
    assert knee_of(work, 8) == 2
    assert predict(work, 4).binding[0] == "cores"


def test_a_slow_link_says_to_use_one_device() -> None:
    work = Workload(share_s={1: 0.01, 2: 0.005}, samples=64, per_host=1, exchange=ring(1e8))
    assert knee_of(work, 8) == 1
    assert predict(work, 2).binding[0] == "bytes"


def test_the_link_of_one_server_is_the_limit_and_more_servers_raise_it() -> None:
    work = replace(WORK, exchange=servers(1e8, 1))
    assert predict(work, 32).binding[0] == "fullest link"
    offered = remedies(work, 32, Remedies(num_servers=1))
    assert "twice the servers" in [remedy.name for remedy in offered]
    assert servers_needed(work, 32, 1) == 32  # each has the bytes of one replica: no wall of theirs is left
    assert "spares for the slowest" not in [remedy.name for remedy in offered]


@pytest.mark.parametrize(("measured_s", "verdict"), [(1.0, True), (3.0, False)])
def test_a_failed_check_leaves_no_verdict(measured_s: float, verdict: bool) -> None:
    seconds = Interval(low=0.9, middle=1.0, high=1.1)
    check = Check(replicas=2, predicted_s=seconds, measured_s=measured_s, error=0.0, inside=verdict)
    fit = Fit(work=WORK, draw=lambda _: WORK, checks=(check,))
    document = scale_document(fit, 4, assumed(HOSTS, {}), Remedies(), seed=0)
    assert [answer is not None for answer in (document.knee, document.use_one_device, document.binds)] == [verdict] * 3
    assert any(line.startswith("no verdict") for line in scale_lines(document, "")) is not verdict
