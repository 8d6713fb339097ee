"""The model fitted to measurements: a share that is measured with the threads of another is caught here alone."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.measuring.trainings import config
from tests.scaling.exchanges import ring
from trainkit.config.schema import RunConfig
from trainkit.measuring.figures import Choice
from trainkit.measuring.replicas import Measured, Scalable, exchange_of, measure, scalable, workload
from trainkit.measuring.turns import Turn
from trainkit.scaling.fit import Point, fit
from trainkit.scaling.model import Link, Workload, predict, predictions, samples_per_s
from trainkit.trainer.phase_clock import PARTS

ASSUMED = Workload(
    share_s={1: 0.08, 2: 0.043, 4: 0.025, 8: 0.015},
    samples=64,
    cores=4,
    exchange=ring(2e7),
    within=Link(bandwidth=2e9, latency_s=1e-4),
)


def measured(true: Workload, *counts: int) -> list[Point]:
    seconds = {count: predict(true, count).total_s for count in counts}
    return [Point(replicas=count, step_s=one, low_s=0.98 * one, high_s=1.02 * one) for count, one in seconds.items()]


@pytest.mark.parametrize("slower", [0.5, 3.0])
def test_a_fit_to_two_and_four_replicas_predicts_eight(slower: float) -> None:
    true = replace(ASSUMED, within=Link(bandwidth=2e9 / slower, latency_s=1e-4), crowd=1.1, overlap=0.2)
    found = fit(ASSUMED, measured(true, 2, 4))
    eight = predictions(found.work, found.draw, (8,))[0].samples_per_s
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
    assert not wide.checks[1].is_inside
    narrow, broad = (predictions(one.work, one.draw, (8,))[0].speedup for one in (usual, wide))
    assert broad.high / broad.low > 1.5 * narrow.high / narrow.low


def test_what_was_measured_on_one_host_is_predicted_for_several_with_their_link() -> None:
    found = fit(ASSUMED, measured(ASSUMED, 2, 4)).on_hosts(2, Link(bandwidth=1e8))
    assert found.work.within != ASSUMED.within
    sent_s = 2 * 3 / 4 * 2e7 / 1e8  # of four replicas, over the link between hosts
    assert predict(found.work, 4).transfer_s == pytest.approx(sent_s, rel=0.2)


class FakeTurns:
    """Turns of a machine on which a sample takes 1 ms, alone or not, and a step 2 ms beside."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int, int | None, str | None]] = []

    def __call__(self, cfg: RunConfig, folder: Path) -> Turn:
        del folder
        name = cfg.strategy["_target_"].rpartition(".")[2]
        replicas, size = cfg.strategy.get("replicas", 1), cfg.batch.global_size
        assert size is not None
        self.seen.append((name, replicas, size, os.environ.get("OMP_NUM_THREADS")))
        seconds = 10 * (0.002 + 0.001 * size / replicas)
        ranks = [dict.fromkeys(PARTS, 0.0)]
        return Turn(figures={"steps": 10, "samples": 10 * size, "seconds": seconds, "ranks": ranks, "step_spread": 0.1})


def mirrored(*overrides: str) -> Scalable:
    return scalable(config("strategy=mirrored", *overrides))


def test_one_replica_computes_the_shares_of_several_with_their_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    what, turns = replace(mirrored(), cores=4), FakeTurns()
    found = measure(what, 8, rounds=1, steps=10, start=turns)
    assert turns.seen == [
        ("OneDevice", 1, 64, "4"),
        ("OneDevice", 1, 32, "2"),
        ("OneDevice", 1, 16, "1"),
        ("OneDevice", 1, 8, "1"),
        ("Mirrored", 2, 64, None),
        ("Mirrored", 4, 64, None),
    ]
    work = workload(what, found, within=Link(bandwidth=2e9))
    assert dict(work.share_s) == pytest.approx({1: 0.066, 2: 0.034, 4: 0.018, 8: 0.010})
    assert (work.spread, work.cores, work.exchange(1).own_bytes) == (0.1, 4, 0.0)
    assert work.exchange(4).own_bytes == pytest.approx(1.5 * 4 * (64 * 128 + 128 + 128 * 10 + 10))


def test_a_fixed_cut_of_the_step_limits_the_replicas() -> None:
    what = mirrored("batch.micro_size=16")
    assert (what.most_replicas, what.share(2), what.share(3)) == (4, 32, 32)


def test_asynchronous_workers_compute_whole_steps() -> None:
    what = scalable(config("strategy=parameter_server", "strategy.mode=async"))
    what = replace(what, cores=4)
    assert (what.shares(16), what.share(4), what.at(16).keys, what.at(16).waits) == (
        [1, 2, 4],
        64,
        {"workers": 16},
        False,
    )
    updates = Choice(label="", turns=[Turn(figures={"steps": 10, "seconds": 0.5})])
    assert Measured(shares={}, replicas={4: updates}).points(grows=True)[0].step_s == pytest.approx(4 * 0.05)


def test_the_link_of_the_servers_carries_the_bytes_of_all_workers() -> None:
    what = scalable(config("strategy=parameter_server", "strategy.servers=2"))
    size = 4.0 * (64 * 128 + 128 + 128 * 10 + 10)
    found = exchange_of(what.transfers(8) or (), waits=True)
    assert found.own_bytes == pytest.approx(2 * size, rel=0.02)
    assert found.wall_bytes == pytest.approx(8 * 2 * size / 2, rel=0.02)
