"""The model of a step against the simulator: a limit that is named wrongly is caught here alone."""

from dataclasses import replace

import pytest

from tests.scaling.exchanges import ring, servers
from trainkit.scaling.answers import Remediable, binding, knee, knee_of, remedies, servers_needed
from trainkit.scaling.distributions import StepTimes
from trainkit.scaling.fit import Check, Fit
from trainkit.scaling.inputs import KnownInputs, LinkInputs
from trainkit.scaling.model import Interval, Link, Workload, predict
from trainkit.scaling.result import ScalingSubject, scaling_json, scaling_lines, scaling_of
from trainkit.scaling.simulation import Scene, simulate

WORK = Workload(share_s={1: 0.4}, samples=64, grows=True, per_host=1, between=Link(bandwidth=1.25e9, latency_s=1e-4))


@pytest.mark.parametrize("replicas", [1, 2, 16, 64])
def test_the_model_of_a_ring_agrees_with_the_simulator(replicas: int) -> None:
    work = replace(WORK, exchange=ring(1e8), spread=0.1)
    times = StepTimes(mean_s=0.4, spread=0.1)
    scene = Scene(workers=replicas, compute=times, num_bytes=1e8, bandwidth=1.25e9, latency_s=1e-4)
    assert predict(work, replicas).total_s == pytest.approx(simulate(scene, updates=600).mean_s, rel=0.02)


@pytest.mark.parametrize("count", [1, 4, 64])
def test_the_model_of_asynchronous_servers_agrees_with_the_simulator(count: int) -> None:
    work = replace(WORK, exchange=servers(1e8, count, is_async=True))
    scene = Scene(
        workers=32, compute=StepTimes(mean_s=0.4, form="constant"), num_bytes=1e8, servers=count, is_async=True,
        bandwidth=1.25e9, server_bandwidth=1.25e9, latency_s=1e-4,
    )  # fmt: skip
    assert predict(work, 32).total_s / 32 == pytest.approx(simulate(scene, updates=3000).mean_s, rel=0.05)


def test_replicas_that_share_cores_pay_up_to_the_number_of_cores() -> None:
    work = Workload(share_s={1: 0.08, 2: 0.045, 4: 0.025}, samples=64, cores=2, exchange=ring(4e5))
    assert knee_of(work, 8) == 2
    assert binding(work, 4)[0] == "cores"


def test_a_slow_link_says_to_use_one_device() -> None:
    work = Workload(share_s={1: 0.01, 2: 0.005}, samples=64, per_host=1, exchange=ring(1e8))
    assert knee_of(work, 8) == 1
    assert binding(work, 2)[0] == "bytes"


def test_the_link_of_one_server_is_the_limit_and_more_servers_raise_it() -> None:
    work = replace(WORK, exchange=servers(1e8, 1))
    assert binding(work, 32)[0] == "fullest link"
    found = remedies(work, 32, Remediable(num_servers=1))
    assert "twice the servers" in [one.name for one in found]
    assert servers_needed(work, 32, 1) == 32  # each has the bytes of one replica: no wall of theirs is left
    assert "spares for the slowest" not in [one.name for one in found]


@pytest.mark.parametrize(("rates", "last"), [([(1, 10.0), (2, 14.9)], 1), ([(1, 10.0), (2, 15.1), (4, 30.0)], 4)])
def test_the_knee_is_the_last_replica_that_adds_half_of_the_first(rates: list[tuple[int, float]], last: int) -> None:
    assert knee(rates) == last


@pytest.mark.parametrize(("measured_s", "verdict"), [(1.0, True), (3.0, False)])
def test_a_failed_check_leaves_no_verdict(measured_s: float, verdict: bool) -> None:
    check = Check(replicas=2, predicted_s=Interval(low=0.9, middle=1.0, high=1.1), measured_s=measured_s)
    fit = Fit(work=WORK, others=(WORK,), weights=(1.0,), computing=0.03, checks=(check,))
    known = KnownInputs(values=LinkInputs())
    subject = ScalingSubject(title="", known=known, shares=(), keys=Remediable(), on_cpu=True, notes=())
    found = scaling_of(fit, [1, 2, 4], subject, seed=0)
    document = scaling_json(found, target=4, seed=0)
    assert [document[key] is not None for key in ("knee", "use_one_device", "binds")] == [verdict] * 3
    assert any(line.startswith("no verdict") for line in scaling_lines(found)) is not verdict
