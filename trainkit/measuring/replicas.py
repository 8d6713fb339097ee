"""Measure one replica with shares of a step, and a few numbers of replicas, to fit the scaling model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from statistics import median_low
from typing import Final

from torch import nn

from trainkit.cluster.host import num_cores
from trainkit.config.schema import RunConfig
from trainkit.errors import ConfigError, Problem
from trainkit.measuring.bench import Candidate, Choice, Turn, bench, run_turn
from trainkit.run.estimates import hardware as estimates
from trainkit.run.planning.plan import RunPlan, make_plan
from trainkit.scaling.answers import MeasuredShare
from trainkit.scaling.fit import Fit, Point, fit
from trainkit.scaling.model import Exchange, Interval, Link, Workload
from trainkit.strategies.base import Scaled, StepCut, Strategy, Transfer
from trainkit.strategies.shipped import names_of
from trainkit.strategies.traffic import traffic_of
from trainkit.trained.build import meta_model

SHARES: Final = (1, 2, 4, 16, 64, 256)
"""Numbers of replicas whose share of a step is measured on one replica."""
MEASURED: Final = (2, 4)
"""Numbers of replicas that are measured."""
_STEPS: Final = 100_000
_ONE_DEVICE: Final = {"_target_": "trainkit.strategies.OneDevice", "device": "auto"}


@dataclass(frozen=True, kw_only=True)
class ScalableTraining:
    """A training whose strategy can have any number of replicas."""

    cfg: RunConfig
    plan: RunPlan
    model: nn.Module
    """The model, on the meta device."""
    cores: int
    """Number of cores of this host."""

    @property
    def on_cpu(self) -> bool:
        """Whether the replicas share the cores of this host."""
        return not self.plan.context.num_gpus

    @property
    def most_replicas(self) -> int:
        """Largest number of replicas with a part of each step: one sample, or one shard if the config fixes the cut of
        a step. In `async` each computes whole steps, and there is no limit.
        """
        if not self.at(2).waits:
            return _STEPS
        return self.plan.batch.global_size if self.cut_is_free else self.plan.batch.num_shards(0)

    @property
    def cut_is_free(self) -> bool:
        """Whether the shards of a step become smaller with more replicas."""
        return self.plan.micro_size_depends_on_replicas

    def share(self, count: int) -> int:
        """Return the samples of a step of the largest share among `count` replicas."""
        if not self.at(2).waits:
            return self.plan.batch.global_size
        if self.cut_is_free:
            return -(-self.plan.batch.global_size // count)
        return -(-self.plan.batch.num_shards(0) // count) * self.plan.batch.micro_size

    def at(self, replicas: int) -> Scaled:
        """Return the strategy with this number of replicas."""
        scaled = self.plan.components.strategy.scaled(replicas, self.plan.context)
        assert scaled is not None, "checked by scalable()"
        return scaled

    @property
    def has_tables(self) -> bool:
        """Whether the model has tables (embeddings) with dense gradients."""
        tables = (module for module in self.model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag))
        return any(not table.sparse for table in tables)

    def transfers(self, replicas: int) -> tuple[Transfer, ...] | None:
        """Return the transfers of a late step with this number of replicas; None if they are not known."""
        # A strategy of a config is a frozen dataclass, as each component is.
        strategy: Strategy = replace(self.plan.components.strategy, **self.at(replicas).keys)  # type: ignore[type-var]
        gpus = max(self.plan.context.num_gpus, replicas) if self.plan.context.num_gpus else 0
        shards = replicas if self.cut_is_free else self.plan.batch.num_shards(0)
        cut = StepCut(num_shards=max(shards, replicas), num_replicas=replicas)
        transfers = traffic_of(strategy, self.model, replace(self.plan.context, num_gpus=gpus), cut)
        return None if transfers is None else tuple(transfer for transfer in transfers if transfer.occurs_at(_STEPS))

    def measured_counts(self, target: int) -> list[int]:
        """Return the numbers of replicas above 1 that this machine can measure."""
        most = target if self.on_cpu else min(target, self.plan.context.num_gpus)
        return [count for count in MEASURED if count <= min(most, self.most_replicas)]

    def shares(self, target: int) -> list[int]:
        """Return the numbers of replicas whose shares one replica computes.

        In `async` all shares are whole steps and differ only in the number of CPU threads.
        """
        if not self.at(2).waits:
            return [count for count in SHARES if count <= min(target, self.cores if self.on_cpu else 1)]
        return sorted({*(count for count in SHARES if count < target), target})


def scalable(cfg: RunConfig) -> ScalableTraining:
    """Plan a training for `scale`.

    Raises:
        ConfigError: the config has problems, or its strategy cannot have other numbers of replicas.
    """
    plan = make_plan(cfg, launch=None)
    if plan.components.strategy.scaled(2, plan.context) is None:
        name = cfg.strategy["_target_"].rpartition(".")[2]
        rule = (
            f"{name} has one replica, or an exchange that scale has no figures for. Use "
            f"{names_of(lambda kind: kind.scaled is not Strategy.scaled)}; --simulate needs none of them."
        )
        raise ConfigError([Problem(key="strategy", rule=rule)])
    training = ScalableTraining(cfg=cfg, plan=plan, model=meta_model(plan.cfg), cores=num_cores())
    if training.transfers(2) is None:
        rule = "the transfers of this strategy and model are not known before the run; --simulate does not need them."
        raise ConfigError([Problem(key="strategy", rule=rule)])
    return training


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """The measurements for the scaling model."""

    shares: Mapping[int, Choice]
    """Number of replicas -> one replica, alone, with its share of a step."""
    replicas: Mapping[int, Choice]
    """Number of replicas -> these replicas together."""

    @property
    def failures(self) -> list[str]:
        """Reasons why measurements failed."""
        choices = [*self.shares.values(), *self.replicas.values()]
        return [f"{choice.label}: {choice.failure}" for choice in choices if not choice.is_measured]

    def points(self, *, grows: bool) -> list[Point]:
        """Return the measured numbers of replicas.

        Args:
            grows: whether each replica computes whole steps, so that n updates are one step of the model.
        """
        steps = [(n, n if grows else 1, choice.step_s) for n, choice in self.replicas.items() if choice.is_measured]
        return [
            Point(replicas=n, step_s=times * step.median, low_s=times * step.low, high_s=times * step.high)
            for n, times, step in steps
            if step is not None
        ]


def measure(
    training: ScalableTraining,
    target: int,
    *,
    rounds: int,
    steps: int | None = None,
    counts: Sequence[int] | None = None,
    log: Callable[[str], None] = lambda _: None,
    start: Callable[..., Turn] = run_turn,
) -> Measurements:
    """Measure the shares of one replica, then `counts` replicas (default: 2 and 4, if there are devices for them)."""
    shares, replicas = {}, {}
    for count in training.shares(target):
        threads, size = max(1, training.cores // count) if training.on_cpu else None, training.share(count)
        beside = "" if threads is None else f", {threads} thread{'' if threads == 1 else 's'}"
        label = f"one replica, {size} sample{'' if size == 1 else 's'} a step{beside}"
        micro = None if training.cut_is_free else training.plan.batch.micro_size
        batch = replace(training.cfg.batch, global_size=size, micro_size=micro, accumulation=None)
        cfg = replace(training.cfg, steps=_STEPS, strategy=_ONE_DEVICE, batch=batch)
        candidate = Candidate(label=label, cfg=cfg, num_steps=_STEPS)
        alone = partial(start, threads=threads)
        shares[count] = bench([candidate], rounds=rounds, steps=steps, log=log, start=alone)[0]
    for count in training.measured_counts(target) if counts is None else counts:
        cfg = replace(training.cfg, steps=_STEPS, strategy={**training.cfg.strategy, **training.at(count).keys})
        candidate = Candidate(label=f"{count} replicas", cfg=cfg, num_steps=_STEPS)
        replicas[count] = bench([candidate], rounds=rounds, steps=steps, log=log, start=start)[0]
    return Measurements(shares=shares, replicas=replicas)


def workload(training: ScalableTraining, measured: Measurements, *, within: Link) -> Workload:
    """Return the model of a training on this host, as far as one replica determines it.

    A sum through memory of the host is assumed four times as fast as one over `within`.
    """
    first = measured.shares[1]
    step = first.step_s
    assert step is not None, "the caller has refused a measurement that failed"
    waiting = first.spread("input")
    seconds = {count: time.median for count, choice in measured.shares.items() if (time := choice.step_s) is not None}
    spread = first.spread("step_spread")
    in_memory = all(transfer.by == "memory" for transfer in training.transfers(2) or ())

    @cache
    def exchange(replicas: int) -> Exchange:
        transfers = training.transfers(replicas) or ()
        return exchange_of(transfers, waits=training.at(replicas).waits) if replicas > 1 else Exchange()

    return Workload(
        share_s=seconds,
        samples=training.plan.batch.global_size,
        grows=not training.at(2).waits,
        exchange=exchange,
        within=replace(within, bandwidth=4 * within.bandwidth) if in_memory else within,
        cores=training.cores if training.on_cpu else None,
        spread=min(spread.median if spread is not None else 0.0, 1.0),
        input_share=min(waiting.median / step.median, 1.0) if waiting is not None else 0.0,
    )


def exchange_of(transfers: Sequence[Transfer], *, waits: bool) -> Exchange:
    """Return the bytes that a replica and the busiest link send, for transfers in sequence.

    The two directions of a link are used at the same time. If steps wait for all replicas, the transfers follow each
    other on every link; otherwise those of several replicas overlap.

    Example:
        >>> ring = Transfer(what="gradients", how="ring", flows={(0, 1): 8.0, (1, 0): 8.0}, messages=2)
        >>> exchange_of([ring], waits=True).own_bytes
        8.0
    """
    by_rank = []
    for transfer in transfers:  # the bytes of the busier direction of each rank's link
        busiest: dict[int, float] = {}
        for (rank, _), size in _directions([transfer]).items():
            busiest[rank] = max(busiest.get(rank, 0.0), size)
        by_rank.append(busiest or {0: 0.0})
    own_bytes = math.fsum(median_low(sizes.values()) for sizes in by_rank)
    if waits:
        wall = math.fsum(max(sizes.values()) for sizes in by_rank)
    else:
        wall = max(_directions(transfers).values(), default=0.0)
    return Exchange(
        own_bytes=own_bytes,
        wall_bytes=wall,
        messages=sum(transfer.messages for transfer in transfers),
        overlaps=any(transfer.overlaps for transfer in transfers),
        waits=waits,
    )


def _directions(transfers: Sequence[Transfer]) -> dict[tuple[int, bool], float]:
    """Return the bytes of each rank's link in each direction: (rank, whether it sends) -> bytes."""
    total: dict[tuple[int, bool], float] = {}
    for transfer in transfers:
        for (sender, receiver), size in transfer.flows.items():
            total[sender, True] = total.get((sender, True), 0.0) + size
            total[receiver, False] = total.get((receiver, False), 0.0) + size
    return total


def measured_shares(measured: Measurements) -> list[MeasuredShare]:
    """Return what one replica measured."""
    return [
        MeasuredShare(what=choice.label, step_s=Interval(low=seconds.low, middle=seconds.median, high=seconds.high))
        for choice in measured.shares.values()
        if (seconds := choice.step_s) is not None
    ]


def fitted(training: ScalableTraining, measured: Measurements, link: estimates.Link | None) -> Fit:
    """Return the model of a training on this host.

    Args:
        training: the training.
        measured: its measurements, of which none failed.
        link: the link within a host; None: that of the fit, from gloo over loopback, or PCIe 3 x 16.
    """
    within = Link(bandwidth=2e9, latency_s=1e-4) if training.on_cpu else Link(bandwidth=1e10, latency_s=1e-5)
    if link is not None:
        within = Link(bandwidth=link.gb_s * 1e9, latency_s=link.latency_us / 1e6)
    work = workload(training, measured, within=within)
    # The uncertainty of the shares: half of the widest range of turns, and 3 % at least.
    ranges = [math.log(share.step_s.high / share.step_s.low) / 2 for share in measured_shares(measured)]
    return fit(work, measured.points(grows=work.grows), computing=max(0.03, *ranges))
