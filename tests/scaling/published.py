"""Published speed-ups, with the inputs that their sources state and the inputs that had to be assumed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from tests.scaling.exchanges import ring, servers
from trainkit.scaling.model import Exchanges, Interval, Link, Workload, predictions

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
    year: int
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
    stated: str
    """The inputs that the source, or another publication, states."""
    assumed: str
    """The inputs whose ranges are assumptions."""

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
        positive = (log_uniform(rng, *one) for one in bounds)
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
_HOROVOD: Final = "Sergeev and Del Balso 2018, arXiv:1802.05799, and Horovod's README"
_K40: Final = (
    "23.8 million parameters (Szegedy et al. 2015, arXiv:1512.00567); 17 parameter servers, a K40 a worker "
    "(Abadi et al. 2016, OSDI, section 6.3); 32 images a worker (Chen et al. 2016, arXiv:1604.00981)"
)
_PASCAL: Final = "4 Pascal GPUs a host, 25 Gbit/s RoCE, 64 images a GPU"

PUBLISHED: Final = (
    Published(
        name="dense models",
        replicas=50,
        speedup=(25, 40),
        source=_DEAN,
        year=2016,
        num_servers=17,
        compute_s=(0.5, 3.0),
        megabytes=(95, 240),
        gbit=(10, 40),
        latency_us=(20, 100),
        spread=(0.02, 0.2),
        stated="nothing but the number of GPUs",
        assumed="model, batch and GPU: 24 to 60 million parameters, 0.5 to 3 s a step; 17 servers; links; spread",
    ),
    Published(
        name="Inception-v3",
        replicas=50,
        speedup=(32, 32),
        source=_DEAN,
        year=2016,
        num_servers=17,
        compute_s=(1.0, 2.2),
        megabytes=(95.2, 95.2),
        gbit=(10, 40),
        latency_us=(20, 100),
        spread=(0.05, 0.2),
        stated=_K40,
        assumed="15 to 32 images a second on a K40; links of 10 to 40 Gbit/s; spread 0.05 to 0.2",
    ),
    Published(
        name="Inception-v3",
        replicas=100,
        speedup=(56, 56),
        source="Murray 2016, Announcing TensorFlow 0.8",
        year=2016,
        num_servers=17,
        compute_s=(1.0, 2.2),
        megabytes=(95.2, 95.2),
        gbit=(10, 40),
        latency_us=(20, 100),
        spread=(0.05, 0.2),
        stated=_K40,
        assumed="as for 50",
    ),
    Published(
        name="translation",
        replicas=8,
        speedup=(6, 6),
        source=_DEAN,
        year=2016,
        num_servers=0,
        compute_s=(0.3, 1.0),
        megabytes=(400, 1000),
        gbit=(40, 96),
        latency_us=(5, 20),
        spread=(0.02, 0.15),
        stated="nothing but the number of GPUs",
        assumed="100 to 250 million parameters, 0.3 to 1 s a step, one host: 5 to 12 GB/s through PCIe 3; spread",
    ),
    Published(
        name="sparse (RankBrain)",
        replicas=500,
        speedup=(300, 300),
        source=_DEAN,
        year=2016,
        num_servers=100,
        compute_s=(0.05, 0.5),
        megabytes=(1, 10),
        gbit=(10, 40),
        latency_us=(20, 100),
        spread=(0.05, 0.3),
        stated="nothing but the number of GPUs",
        assumed="1 to 10 MB of rows a step, 0.05 to 0.5 s, 100 servers; links; spread",
    ),
    Published(
        name="Inception V3, Horovod",
        replicas=512,
        speedup=(0.9 * 512, 0.9 * 512),
        source=_HOROVOD,
        year=2018,
        num_servers=0,
        compute_s=(64 / 160, 64 / 130),
        megabytes=(95.2, 95.2),
        gbit=(25, 25),
        latency_us=(2, 20),
        spread=(0.005, 0.05),
        overlap=(0.0, 0.67),
        per_host=4,
        stated=f"{_PASCAL}; 23.8 million parameters",
        assumed="130 to 160 images a second on a GPU, latency of RoCE, spread of GPUs, overlap up to the backward pass",
    ),
    Published(
        name="VGG-16, Horovod",
        replicas=512,
        speedup=(0.68 * 512, 0.68 * 512),
        source=_HOROVOD,
        year=2018,
        num_servers=0,
        compute_s=(64 / 170, 64 / 140),
        megabytes=(553, 553),
        gbit=(25, 25),
        latency_us=(2, 20),
        spread=(0.005, 0.05),
        overlap=(0.0, 0.67),
        per_host=4,
        stated=f"{_PASCAL}; 138 million parameters",
        assumed="140 to 170 images a second on a GPU; the rest as for Inception V3",
    ),
    Published(
        name="ResNet-50, 8 to 256 GPUs",
        replicas=256,
        base=8,
        speedup=(0.9 * 32, 0.9 * 32),
        source="Goyal et al. 2017, arXiv:1706.02677, section 5",
        year=2017,
        num_servers=0,
        compute_s=(32 / 219, 0.2),
        megabytes=(100, 100),
        gbit=(50, 50),
        latency_us=(2, 20),
        spread=(0.005, 0.05),
        overlap=(0.0, 0.67),
        per_host=8,
        stated="8 P100 a host, 50 Gbit/s, 32 images a GPU, 100 MB of gradients, 0.12 s of backward pass",
        assumed="0.15 to 0.2 s a step, latency, spread of GPUs, overlap up to the backward pass",
    ),
)
