"""The time of a step on n replicas: computing, small shares, cores, the slowest, the exchange, the input."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

_DRAWS: Final = 200
_LOW, _HIGH = 0.05, 0.95
"""The interval of a prediction leaves out a twentieth of the draws at each end."""
_NODES: Final = 4000
"""Points of the quadrature of the slowest replica; its error is below 1e-4 of the mean up to 100,000 replicas."""
_SHARDS: Final = 30_000
"""Number of shards that are drawn for a step with spares."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """The exchange of a step."""

    own_bytes: float = 0.0
    """Bytes in sequence through the link of one replica."""
    wall_bytes: float = 0.0
    """Bytes through the busiest link, with those of all replicas."""
    messages: float = 0
    """Number of messages in sequence."""
    overlaps: bool = False
    """Whether replicas compute during the exchange."""
    waits: bool = True
    """Whether a step ends only when all replicas have exchanged; not so for asynchronous updates."""


Exchanges = Callable[[int], Exchange]
"""Function from the number of replicas to the exchange of a step."""


def ring(num_bytes: float) -> Exchanges:
    """Return the exchanges of an all-reduce over a ring: 2 (n-1) rounds, each of 1/n of the bytes.

    Source: Patarasuk and Yuan 2009, Bandwidth optimal all-reduce algorithms for clusters of workstations.
    """

    def of(replicas: int) -> Exchange:
        sent = 2 * (replicas - 1) / replicas * num_bytes
        return Exchange(own_bytes=sent, wall_bytes=sent, messages=2 * (replicas - 1), overlaps=True)

    return of


def servers(num_bytes: float, count: float, *, is_async: bool = False) -> Exchanges:
    """Return the exchanges with parameter servers: variables are pulled, gradients pushed.

    The two directions of a link are used one after the other by a synchronous step, at the same time otherwise.
    """

    def of(replicas: int) -> Exchange:
        wall = replicas * num_bytes / count * (1 if is_async else 2)
        return Exchange(own_bytes=2 * num_bytes, wall_bytes=wall, messages=2, waits=not is_async)

    return of


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """The link between replicas."""

    bandwidth: float
    """Bytes per second, in each direction."""
    latency_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """The facts about a training that determine the time of its steps on n replicas."""

    share_s: Mapping[int, float]
    """Number of replicas -> seconds in which one of them, alone, computes its share of a step; at least for 1."""
    samples: float
    """Samples of a step of one replica."""
    grows: bool = False
    """Whether each replica keeps its samples, and the step grows with them; else all share the samples of the step."""
    exchange: Exchanges = field(default=lambda _: Exchange())
    within: Link = field(default_factory=lambda: Link(bandwidth=1e10))
    """Link between replicas of one host."""
    between: Link = field(default_factory=lambda: Link(bandwidth=1.25e9, latency_s=5e-5))
    """Link between hosts."""
    per_host: int | None = None
    """Replicas of a host; None: all replicas."""
    cores: int | None = None
    """Replicas that a host computes at full speed; None: each has its own device."""
    crowd: float = 1.0
    """Factor by which several replicas slow each other on one host, beyond the sharing of cores: memory, power."""
    missing: float = 1.0
    """Correction factor of the seconds of several replicas, for effects outside of the model."""
    spread: float = 0.0
    """Standard deviation of the seconds of a share, divided by their mean; they are lognormal."""
    spares: int = 0
    """Replicas whose gradient a step does not wait for; their late work is finished and discarded."""
    overlap: float = 0.0
    """Share of the computing time behind which an exchange that overlaps is hidden."""
    input_share: float = 0.0
    """Share of the computing time that is waiting for samples."""


@dataclass(frozen=True, slots=True)
class Step:
    """The predicted seconds of a step."""

    parts: Mapping[str, float]
    """Part -> seconds. `compute` and `input` are those of one replica, divided by the replicas that share the work;
    the others are what is added to them.
    """

    @property
    def total_s(self) -> float:
        """Seconds of the step."""
        return math.fsum(self.parts.values())

    @property
    def binding(self) -> tuple[str, float]:
        """The bottleneck other than computing, and its share of the step."""
        name = max((part for part in self.parts if part != "compute"), key=self.parts.__getitem__)
        return name, max(self.parts[name], 0.0) / self.total_s


def predict(work: Workload, replicas: int) -> Step:
    """Return the seconds of a step on `replicas` replicas.

    Example:
        >>> work = Workload(share_s={1: 0.4}, samples=64, grows=True, exchange=ring(1e8), per_host=1)  # 10 Gbit/s
        >>> round(predict(work, 1).total_s, 3), round(predict(work, 8).total_s, 3)
        (0.4, 0.541)
    """
    working = replicas - work.spares
    alone_s = share_alone_s(work.share_s, working)
    ideal_s = work.share_s[1] / (1 if work.grows else working)
    on_host = min(replicas, work.per_host or replicas)
    crowding = max(1.0, on_host / work.cores) if work.cores else 1.0
    busy_s = alone_s * crowding * ((work.crowd if on_host > 1 else 1.0) * (work.missing if replicas > 1 else 1.0))
    exchange = work.exchange(replicas)
    link = work.within if replicas == on_host else work.between
    latency_s = exchange.messages * link.latency_s * work.missing
    own_s = exchange.own_bytes / link.bandwidth * work.missing
    hidden_s = min(own_s, work.overlap * busy_s) if exchange.overlaps else 0.0
    slowest = slowest_of(replicas, work.spread, spares=work.spares) - 1 if exchange.waits else 0.0
    wall_s = exchange.wall_bytes / link.bandwidth * work.missing
    beyond_s = wall_s - own_s if exchange.waits else wall_s - (busy_s + own_s + latency_s)
    return Step(
        {
            "compute": ideal_s * (1 - work.input_share),
            "input": ideal_s * work.input_share,  # waiting for samples
            "small shares": alone_s - ideal_s,  # launches, updates, idle units
            "cores": busy_s - alone_s,  # replicas that share the cores of a host
            "slowest replica": busy_s * slowest,
            "messages": latency_s,
            "bytes": own_s - hidden_s,  # that computing does not hide
            "fullest link": max(beyond_s, 0.0),
        }
    )


def share_alone_s(share_s: Mapping[int, float], replicas: int) -> float:
    """Return the seconds of a share, interpolated in logarithms between measured ones, constant beyond them.

    Example:
        >>> round(share_alone_s({1: 0.4, 4: 0.1}, 2), 3), round(share_alone_s({1: 0.4, 4: 0.1}, 8), 3)
        (0.2, 0.1)
    """
    counts = sorted(share_s)
    return float(np.exp(np.interp(math.log(replicas), np.log(counts), np.log([share_s[count] for count in counts]))))


@lru_cache(maxsize=4096)
def slowest_of(count: int, spread: float, *, spares: int = 0) -> float:
    """Return the mean of the largest of `count` lognormal values with mean 1; with spares, of the last one that a step
    waits for.

    E[X(n:n)] = n * integral of Q(u) u^(n-1) du, with Q the quantile function. With spares, steps are drawn: a replica
    whose gradient came too late finishes it before it starts another.

    Example:
        >>> round(slowest_of(64, 0.1), 2), round(slowest_of(64, 0.1, spares=2), 2)
        (1.26, 1.19)

    Source: David and Nagaraja 2003, Order Statistics, section 3.1.
    """
    if spread <= 0 or count == 1:
        return 1.0
    variance = math.log1p(spread**2)
    location, scale = -variance / 2, math.sqrt(variance)
    if spares:
        return _drawn_step(count, spares, location, scale)
    scores = torch.linspace(-9.0, 9.0, _NODES, dtype=torch.float64)  # of a standard normal: above 9 lies 1e-19
    weights = torch.softmax((count - 1) * torch.special.log_ndtr(scores) - scores**2 / 2, dim=0)
    return float(weights @ torch.exp(location + scale * scores))


def _drawn_step(count: int, spares: int, location: float, scale: float) -> float:
    """Return the mean length of drawn steps that take the first gradients, when a shard takes 1 on average."""
    rng, steps = np.random.default_rng(0), max(30, _SHARDS // count)
    busy: list[tuple[float, int]] = []  # (end, step) of the shard that each busy replica computes
    now, step, begun, arrived = 0.0, 0, 0, 0
    while step < steps:
        while begun < count and len(busy) < count:  # each shard of a step, and as many again as there are spares
            heapq.heappush(busy, (now + rng.lognormal(location, scale), step))
            begun += 1
        now, of_step = heapq.heappop(busy)
        arrived += of_step == step
        if arrived == count - spares:
            step, begun, arrived = step + 1, 0, 0
    return now / steps


def samples_per_s(work: Workload, replicas: int) -> float:
    """Return the samples per second of `replicas` replicas."""
    return work.samples * (replicas - work.spares if work.grows else 1) / predict(work, replicas).total_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A prediction and the bounds between which it lies, with the uncertainty of its inputs."""

    low: float
    """Lower bound."""
    middle: float
    """The prediction."""
    high: float
    """Upper bound."""

    def contains(self, value: float) -> bool:
        """Return whether a value lies between the bounds."""
        return self.low <= value <= self.high


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """The prediction for one number of replicas."""

    replicas: int
    """Number of replicas."""
    step_s: float
    """Seconds of a step."""
    parts_s: Mapping[str, float]
    """The seconds of a step by part."""
    samples_per_s: Interval
    """Samples per second of all replicas."""
    speedup: Interval
    """Samples per second divided by those of one replica."""
    efficiency: float
    """Speed-up divided by the number of replicas."""
    cost_per_million: float | None = None
    """Price of a million samples; null if there is no price."""


Draw = Callable[[np.random.Generator], Workload]
"""Function that draws one of the workloads that the uncertain inputs allow."""


def predictions(work: Workload, draw: Draw, counts: Sequence[int], *, base: int = 1, seed: int = 0) -> list[Prediction]:
    """Predict for several numbers of replicas, each with its interval; the speed-up is relative to `base` replicas."""
    rng = np.random.default_rng(seed)
    drawn = [draw(rng) for _ in range(_DRAWS)]
    bases, base_rate = np.asarray([samples_per_s(variant, base) for variant in drawn]), samples_per_s(work, base)
    result = []
    for count in counts:
        rates = np.asarray([samples_per_s(variant, count) for variant in drawn])
        rate, step = samples_per_s(work, count), predict(work, count)
        speedup = _interval(rates / bases, rate / base_rate)
        result.append(
            Prediction(
                replicas=count,
                step_s=step.total_s,
                parts_s=step.parts,
                samples_per_s=_interval(rates, rate),
                speedup=speedup,
                efficiency=speedup.middle / count,
            )
        )
    return result


def _interval(values: NDArray[np.float64], middle: float) -> Interval:
    low, high = np.quantile(values, [_LOW, _HIGH])
    return Interval(low=min(float(low), middle), middle=middle, high=max(float(high), middle))
