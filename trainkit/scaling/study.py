"""Simulate a training on many replicas: its speed, its spares, its parameter servers, its checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from trainkit.scaling.closed_forms import Interruptions, checkpoint_interval_s, goodput, ring_all_reduce_s
from trainkit.scaling.distributions import StepTimes
from trainkit.scaling.inputs import Inputs
from trainkit.scaling.simulation import Scene, Simulated, simulate

_ITEMS: Final = 60_000
"""Approximate number of shards of one simulation: half a second."""
_ENOUGH: Final = 0.95
"""Servers suffice if the speed reaches this share of the speed without link limits."""
_MOST_SERVERS: Final = 4096
_SLOW_SHARE: Final = 0.1
_POLICIES: Final = ("accept", "bound", "drop")


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicasRow:
    """Synchronous steps with an all-reduce."""

    replicas: int
    """Number of replicas."""
    step_s: float
    """Seconds of a step."""
    waiting_s: float
    """Seconds of the step spent waiting for the slowest replica, beyond the mean."""
    exchange_s: float
    """Seconds of the step in the all-reduce that computing does not hide."""
    samples_per_s: float
    """Samples per second of all replicas."""
    speedup: float
    """Samples per second, divided by those of one replica."""
    cost_per_million: float | None
    """Price of a million samples; None if a replica has no price."""

    @property
    def efficiency(self) -> float:
        """Speed-up divided by the number of replicas."""
        return self.speedup / self.replicas


@dataclass(frozen=True, kw_only=True, slots=True)
class SparesRow:
    """Synchronous steps that do not wait for the slowest; links are ignored."""

    spares: int
    """Argument that adds replicas for which a step does not wait."""
    step_s: float
    """Seconds of a step."""
    gain: float
    """Samples per second that count, divided by those without spares."""
    wasted: float
    """Share of the shards whose results were discarded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServersRow:
    """Asynchronous updates through parameter servers."""

    servers: int
    """Number of parameter servers."""
    policy: str
    """Policy for stale gradients, as a value of `strategy.staleness`."""
    slow_workers: int
    """Workers that take twice as long as the others."""
    updates_per_s: float
    """Updates per second."""
    of_ideal: float
    """Updates per second, divided by those if links took no time."""
    link_load: float
    """Share of the time in which the busier direction of a server's link transferred."""
    staleness: float
    """Updates between reading and applying, the mean over gradients."""
    staleness_p95: float
    """The 95th percentile of the staleness."""
    wasted: float
    """Share of the gradients that were discarded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointRow:
    """A run that is killed from time to time, and restarts from its last checkpoint."""

    interval_s: float
    """Seconds of computing between two checkpoints."""
    simulated: float
    """Share of time spent on progress."""
    formula: float
    """The same share by Daly's formula."""
    is_best: bool
    """Whether the interval is the optimum of the formula."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Study:
    """The results of a simulation."""

    replicas: tuple[ReplicasRow, ...]
    spares: tuple[SparesRow, ...]
    servers: tuple[ServersRow, ...]
    """Results with equal workers, by the number of servers."""
    policies: tuple[ServersRow, ...]
    """Results with a tenth of the workers twice as slow, by policy for stale gradients."""
    servers_needed: int | None
    """Number of servers at which their links are no limit (0.95 of the speed without links); None: more than were
    tried.
    """
    checkpoints: tuple[CheckpointRow, ...]
    mtbf_s: float
    """Mean seconds between two failures of the whole run."""

    @property
    def best_spares(self) -> SparesRow:
        """The row with the largest gain."""
        return max(self.spares, key=lambda row: row.gain)

    @property
    def best_checkpoint(self) -> CheckpointRow:
        """The row with the interval of Daly's formula."""
        return next(row for row in self.checkpoints if row.is_best)


def study(inputs: Inputs, target: int, *, seed: int = 0) -> Study:
    """Simulate up to `target` replicas.

    Example:
        >>> found = study(Inputs(spread=0.3), 16)
        >>> found.best_spares.spares, found.servers_needed
        (2, 4)
    """
    times = StepTimes(mean_s=inputs.compute_s, spread=inputs.spread)
    servers = servers_rows(inputs, target, seed=seed)
    enough = servers[-1].of_ideal >= _ENOUGH
    slow = max(1, round(target * _SLOW_SHARE)) if target > 1 else 0
    last = servers[-1].servers
    mtbf_s = inputs.mtbf_h * 3600 / target
    return Study(
        replicas=tuple(_replicas(inputs, times, number, seed) for number in replica_counts(target)),
        spares=spares_rows(times, target, seed=seed),
        servers=servers,
        policies=tuple(_server_row(inputs, target, last, policy, seed=seed, slow=slow) for policy in _POLICIES),
        servers_needed=last if enough else None,
        checkpoints=_checkpoints(inputs, mtbf_s, seed),
        mtbf_s=mtbf_s,
    )


def replica_counts(target: int) -> list[int]:
    """Return the powers of two below a number, and the number.

    Example:
        >>> replica_counts(12)
        [1, 2, 4, 8, 12]
    """
    return [*(2**power for power in range((target - 1).bit_length())), target]


def _updates(workers: int) -> int:
    return min(2000, max(30, _ITEMS // workers))


def _replicas(inputs: Inputs, times: StepTimes, number: int, seed: int) -> ReplicasRow:
    exchange_s = ring_all_reduce_s(number, inputs.num_bytes, inputs.bandwidth, inputs.latency_s)
    hidden_s = min(exchange_s, inputs.overlap * inputs.compute_s)
    scene = Scene(
        workers=number,
        compute=times,
        num_bytes=inputs.num_bytes,
        bandwidth=inputs.bandwidth,
        latency_s=inputs.latency_s,
        hidden_s=hidden_s,
    )
    step_s = simulate(scene, updates=_updates(number), seed=seed).mean_s if number > 1 else inputs.compute_s
    exposed_s = exchange_s - hidden_s
    return ReplicasRow(
        replicas=number,
        step_s=step_s,
        waiting_s=max(step_s - exposed_s - inputs.compute_s, 0.0),
        exchange_s=exposed_s,
        samples_per_s=number * inputs.samples / step_s,
        speedup=number * inputs.compute_s / step_s,
        cost_per_million=inputs.price_h / 3600 * step_s / inputs.samples * 1e6 if inputs.price_h else None,
    )


def spares_rows(times: StepTimes, target: int, *, seed: int = 0) -> tuple[SparesRow, ...]:
    """Simulate synchronous steps without spares, and with up to a fifth of the replicas as spares."""
    counts = sorted({0, *(round(target * share) for share in (0.01, 0.02, 0.05, 0.1, 0.2))})
    found: list[SparesRow] = []
    base = 0.0
    for spares in (count for count in counts if count < target):
        scene = Scene(workers=target, compute=times, spares=spares)
        simulated = simulate(scene, updates=_updates(target), seed=seed)
        rate = (target - spares) / simulated.mean_s
        base = base or rate
        row = SparesRow(spares=spares, step_s=simulated.mean_s, gain=rate / base, wasted=_wasted(simulated))
        found.append(row)
    return tuple(found)


def _wasted(simulated: Simulated) -> float:
    return simulated.discarded / simulated.computed if simulated.computed else 0.0


def servers_rows(inputs: Inputs, target: int, *, seed: int = 0) -> tuple[ServersRow, ...]:
    """Double the servers until their links are no limit."""
    rows: list[ServersRow] = []
    count = 1
    while count <= _MOST_SERVERS and (not rows or rows[-1].of_ideal < _ENOUGH):
        rows.append(_server_row(inputs, target, count, "accept", seed=seed))
        count *= 2
    return tuple(rows)


def _server_row(inputs: Inputs, target: int, servers: int, policy: str, *, seed: int, slow: int = 0) -> ServersRow:
    drop_above = round(1.25 * target)
    scene = Scene(
        workers=target,
        compute=StepTimes(mean_s=inputs.compute_s, spread=inputs.spread),
        num_bytes=inputs.num_bytes,
        bandwidth=inputs.bandwidth,
        latency_s=inputs.latency_s,
        servers=servers,
        server_bandwidth=inputs.server_bandwidth,
        is_async=True,
        staleness_bound=4 if policy == "bound" else None,
        drop_above=drop_above if policy == "drop" else None,
        slow_workers=slow,
        slow_factor=2.0,
    )
    found = simulate(scene, updates=max(_ITEMS // 3, 10 * target), seed=seed)
    # Without a limit by the servers, the worker's own link and messages still take time.
    transfer_s = 2 * (inputs.num_bytes / inputs.bandwidth + inputs.latency_s)
    ideal = (target - slow) / (inputs.compute_s + transfer_s) + slow / (2 * inputs.compute_s + transfer_s)
    return ServersRow(
        servers=servers,
        policy={"accept": "accept", "bound": "bound=4", "drop": f"drop, bound={drop_above}"}[policy],
        slow_workers=slow,
        updates_per_s=1 / found.mean_s,
        of_ideal=1 / found.mean_s / ideal,
        link_load=found.link_load,
        staleness=float(found.staleness.mean()),
        staleness_p95=float(np.percentile(found.staleness, 95)),
        wasted=_wasted(found),
    )


def _checkpoints(
    inputs: Inputs, mtbf_s: float, seed: int, factors: Sequence[float] = (0.25, 0.5, 1, 2, 4)
) -> tuple[CheckpointRow, ...]:
    best_s = max(checkpoint_interval_s(inputs.write_s, mtbf_s), 1.0)
    stops = Interruptions(write_s=inputs.write_s, restart_s=inputs.restart_s, mtbf_s=mtbf_s)
    return tuple(
        CheckpointRow(
            interval_s=best_s * factor,
            simulated=simulate_goodput(best_s * factor, stops, seed=seed),
            formula=goodput(best_s * factor, stops),
            is_best=factor == 1,
        )
        for factor in factors
    )


def simulate_goodput(interval_s: float, stops: Interruptions, *, failures: int = 4000, seed: int = 0) -> float:
    """Return the share of time spent on progress.

    The run computes for `interval_s`, then writes a checkpoint. A failure loses the work since the last complete
    checkpoint, and costs a restart, during which the next failure may occur.

    Example:
        >>> round(simulate_goodput(3266.0, Interruptions(write_s=30.0, restart_s=300.0, mtbf_s=180_000.0)), 2)
        0.98
    """
    rng = np.random.default_rng(seed)
    useful_s = elapsed_s = 0.0
    for _ in range(failures):
        alive_s = float(rng.exponential(stops.mtbf_s))
        useful_s += alive_s // (interval_s + stops.write_s) * interval_s
        elapsed_s += alive_s
        while (again_s := float(rng.exponential(stops.mtbf_s))) < stops.restart_s:
            elapsed_s += again_s
        elapsed_s += stops.restart_s
    return useful_s / elapsed_s
