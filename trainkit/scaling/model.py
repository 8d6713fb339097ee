"""The time of a step on n replicas: computing, small shares, cores, the slowest, the exchange, the input."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from trainkit.scaling.distributions import StepTimes

_DRAWS: Final = 200
_LOW, _HIGH = 0.05, 0.95
"""The interval of a prediction leaves out a twentieth of the draws at each end."""


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
    """Standard deviation of the seconds of a share, divided by their mean."""
    overlap: float = 0.0
    """Share of the computing time behind which an exchange that overlaps is hidden."""
    input_share: float = 0.0
    """Share of the computing time that is waiting for samples."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """The predicted seconds of a step, by part."""

    compute_s: float
    """Seconds that one replica needs, divided by the replicas that share the work."""
    input_s: float = 0.0
    """Seconds of waiting for samples, divided in the same way."""
    small_s: float = 0.0
    """Additional seconds because shares are small: launches, updates, idle units."""
    cores_s: float = 0.0
    """Slowdown of replicas that share the cores of a host."""
    waiting_s: float = 0.0
    """Seconds of waiting for the slowest replica."""
    latency_s: float = 0.0
    """Seconds for the latency of the messages of the exchange."""
    transfer_s: float = 0.0
    """Seconds for the bytes of the exchange that computing does not hide."""
    wall_s: float = 0.0
    """Seconds of waiting for the busiest link."""

    @property
    def total_s(self) -> float:
        """Seconds of the step."""
        return math.fsum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """Return the seconds by name."""
        return {
            "compute": self.compute_s,
            "input": self.input_s,
            "small shares": self.small_s,
            "cores": self.cores_s,
            "slowest replica": self.waiting_s,
            "messages": self.latency_s,
            "bytes": self.transfer_s,
            "fullest link": self.wall_s,
        }


def predict(work: Workload, replicas: int) -> Step:
    """Return the seconds of a step on `replicas` replicas.

    Example:
        >>> ring = lambda n: Exchange(own_bytes=2 * (n - 1) / n * 1e8, messages=2 * (n - 1))
        >>> work = Workload(share_s={1: 0.4}, samples=64, grows=True, exchange=ring, per_host=1)  # 10 Gbit/s
        >>> round(predict(work, 1).total_s, 3), round(predict(work, 8).total_s, 3)
        (0.4, 0.541)
    """
    alone_s = share_alone_s(work.share_s, replicas)
    ideal_s = work.share_s[1] / (1 if work.grows else replicas)
    on_host = min(replicas, work.per_host or replicas)
    crowding = max(1.0, on_host / work.cores) if work.cores else 1.0
    busy_s = alone_s * crowding * ((work.crowd if on_host > 1 else 1.0) * (work.missing if replicas > 1 else 1.0))
    exchange = work.exchange(replicas)
    link = work.within if replicas == on_host else work.between
    latency_s = exchange.messages * link.latency_s * work.missing
    own_s = exchange.own_bytes / link.bandwidth * work.missing
    hidden_s = min(own_s, work.overlap * busy_s) if exchange.overlaps else 0.0
    slowest = StepTimes(mean_s=1.0, spread=work.spread).slowest(replicas) - 1 if exchange.waits else 0.0
    wall_s = exchange.wall_bytes / link.bandwidth * work.missing
    beyond_s = wall_s - own_s if exchange.waits else wall_s - (busy_s + own_s + latency_s)
    return Step(
        compute_s=ideal_s * (1 - work.input_share),
        input_s=ideal_s * work.input_share,
        small_s=alone_s - ideal_s,
        cores_s=busy_s - alone_s,
        waiting_s=busy_s * slowest,
        latency_s=latency_s,
        transfer_s=own_s - hidden_s,
        wall_s=max(beyond_s, 0.0),
    )


def share_alone_s(share_s: Mapping[int, float], replicas: int) -> float:
    """Return the seconds of a share, interpolated in logarithms between measured ones, constant beyond them.

    Example:
        >>> round(share_alone_s({1: 0.4, 4: 0.1}, 2), 3), round(share_alone_s({1: 0.4, 4: 0.1}, 8), 3)
        (0.2, 0.1)
    """
    counts = sorted(share_s)
    places, values = np.log(counts), np.log([share_s[count] for count in counts])
    return (
        float(np.exp(np.interp(math.log(replicas), places, values))) if replicas not in share_s else share_s[replicas]
    )


def samples_per_s(work: Workload, replicas: int) -> float:
    """Return the samples per second of `replicas` replicas."""
    return work.samples * (replicas if work.grows else 1) / predict(work, replicas).total_s


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
    step: Step
    samples_per_s: Interval
    speedup: Interval
    """Samples per second divided by those of one replica."""

    @property
    def efficiency(self) -> float:
        """Speed-up divided by the number of replicas."""
        return self.speedup.middle / self.replicas


Draw = Callable[[np.random.Generator], Workload]
"""Function that draws one of the workloads that the uncertain inputs allow."""


def predictions(work: Workload, draw: Draw, counts: Sequence[int], *, base: int = 1, seed: int = 0) -> list[Prediction]:
    """Predict for several numbers of replicas, each with its interval; the speed-up is relative to `base` replicas."""
    rng = np.random.default_rng(seed)
    drawn = [draw(rng) for _ in range(_DRAWS)]
    ones = np.asarray([samples_per_s(one, base) for one in drawn])
    slowest = samples_per_s(work, base)
    found = []
    for count in counts:
        rates = np.asarray([samples_per_s(one, count) for one in drawn])
        rate = samples_per_s(work, count)
        found.append(
            Prediction(
                replicas=count,
                step=predict(work, count),
                samples_per_s=_interval(rates, rate),
                speedup=_interval(rates / ones, rate / slowest),
            )
        )
    return found


def _interval(values: np.ndarray[tuple[int], np.dtype[np.float64]], middle: float) -> Interval:
    low, high = np.quantile(values, [_LOW, _HIGH])
    return Interval(low=min(float(low), middle), middle=middle, high=max(float(high), middle))
