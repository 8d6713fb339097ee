"""Published speed-ups, with the inputs that their sources state and, as ranges, those that had to be assumed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from trainkit.scaling.model import Exchanges, Interval, Link, Workload, predictions, ring, servers

Range = tuple[float, float]
"""Smallest and largest value; equal if the source states the value."""


@dataclass(frozen=True, kw_only=True)
class Published:
    """One published speed-up, and the known facts about its training."""

    name: str
    replicas: int
    speedup: Range
    """The published values; equal if the source gives one number."""
    source: str
    num_servers: int
    """Parameter servers; 0: an all-reduce over a ring."""
    compute_s: Range
    """Seconds of a replica's forward and backward pass of its samples."""
    megabytes: Range
    gbit: Range
    """The link of a host, Gbit/s."""
    latency_us: Range
    spread: Range
    overlap: Range = (0.0, 0.0)
    per_host: int = 1
    base: int = 1
    """The number of replicas to which the source compares."""

    def predicted(self, *, seed: int = 0) -> Interval:
        """Return the predicted speed-up with its interval, over the ranges of the inputs."""
        positive = (self.compute_s, self.megabytes, self.gbit, self.latency_us)
        middles = [math.sqrt(low * high) for low, high in positive]
        middle = self._workload([*middles, sum(self.spread) / 2, sum(self.overlap) / 2])
        return predictions(middle, self._draw, (self.replicas,), base=self.base, seed=seed)[0].speedup

    def _exchange(self, num_bytes: float) -> Exchanges:
        return servers(num_bytes, self.num_servers) if self.num_servers else ring(num_bytes)

    def _draw(self, rng: np.random.Generator) -> Workload:
        bounds = (self.compute_s, self.megabytes, self.gbit, self.latency_us)
        positive = (log_uniform(rng, *bound) for bound in bounds)
        shares = float(rng.uniform(*self.spread)), float(rng.uniform(*self.overlap))
        return self._workload([*positive, *shares])

    def _workload(self, values: Sequence[float]) -> Workload:
        compute_s, megabytes, gbit, latency_us, spread, overlap = values
        return Workload(
            share_s={1: compute_s},
            samples=1,
            grows=True,
            exchange=self._exchange(megabytes * 1e6),
            between=Link(bandwidth=gbit * 1e9 / 8, latency_s=latency_us / 1e6),
            per_host=self.per_host,
            spread=spread,
            overlap=overlap,
        )


def log_uniform(rng: np.random.Generator, low: float, high: float) -> float:
    """Draw a positive number whose logarithm is uniform between two bounds."""
    return float(np.exp(rng.uniform(math.log(low), math.log(high)))) if high > low else low


_DEAN: Final = "Dean, talks of 2016, after Géron 2019, Hands-On Machine Learning, 2nd edition, chapter 19"
_INCEPTION: Final = Published(
    name="Inception-v3", replicas=50, speedup=(32, 32), source=_DEAN, num_servers=17, compute_s=(1.0, 2.2),
    megabytes=(95.2, 95.2), gbit=(10, 40), latency_us=(20, 100), spread=(0.05, 0.2),
)  # fmt: skip
_HOROVOD: Final = Published(
    name="Inception V3, Horovod", replicas=512, speedup=(0.9 * 512, 0.9 * 512), num_servers=0, per_host=4,
    source="Sergeev and Del Balso 2018, arXiv:1802.05799, and Horovod's README", compute_s=(64 / 160, 64 / 130),
    megabytes=(95.2, 95.2), gbit=(25, 25), latency_us=(2, 20), spread=(0.005, 0.05), overlap=(0.0, 0.67),
)  # fmt: skip
PUBLISHED: Final = (
    replace(
        _INCEPTION, name="dense models", speedup=(25, 40), compute_s=(0.5, 3.0), megabytes=(95, 240),
        spread=(0.02, 0.2)),
    _INCEPTION,
    replace(_INCEPTION, replicas=100, speedup=(56, 56), source="Murray 2016, Announcing TensorFlow 0.8"),
    replace(
        _INCEPTION, name="translation", replicas=8, speedup=(6, 6), num_servers=0, compute_s=(0.3, 1.0),
        megabytes=(400, 1000), gbit=(40, 96), latency_us=(5, 20), spread=(0.02, 0.15)),
    replace(
        _INCEPTION, name="sparse (RankBrain)", replicas=500, speedup=(300, 300), num_servers=100,
        compute_s=(0.05, 0.5), megabytes=(1, 10), spread=(0.05, 0.3)),
    _HOROVOD,
    replace(
        _HOROVOD, name="VGG-16, Horovod", speedup=(0.68 * 512, 0.68 * 512), compute_s=(64 / 170, 64 / 140),
        megabytes=(553, 553)),
    replace(
        _HOROVOD, name="ResNet-50, 8 to 256 GPUs", replicas=256, base=8, speedup=(0.9 * 32, 0.9 * 32),
        source="Goyal et al. 2017, arXiv:1706.02677, section 5", compute_s=(32 / 219, 0.2), megabytes=(100, 100),
        gbit=(50, 50), per_host=8),
)  # fmt: skip
