"""The answers about one training: predictions, knee, bottleneck, remedies, spares and the interval between checkpoints,
as a JSON document and as text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np

from trainkit.report.numbers import duration, figure, share
from trainkit.report.tables import row_lines
from trainkit.scaling import model
from trainkit.scaling.fit import Check, Fit
from trainkit.scaling.inputs import HOSTS, SIMULATED, InputValue, simulated
from trainkit.scaling.model import Exchange, Interval, Prediction, Step, Workload
from trainkit.strategies.base import Remedies

PAYS: Final = 0.5
"""A replica pays if it adds at least this share of the speed of the first one."""
_LINK_SHARE: Final = 0.05
_LEAST_GAIN: Final = 1.05
"""A remedy is named if it increases the samples per second by at least this factor."""
_SPARES: Final = (0.01, 0.02, 0.05, 0.1, 0.2)
"""Shares of the replicas that are tried as spares."""


def knee(rates: Sequence[tuple[int, float]]) -> int:
    """Return the last number of replicas up to which each further replica added at least half of the speed of the
    first.

    Args:
        rates: pairs of replicas and samples per second, from one replica on, in their order.

    Example:
        >>> knee([(1, 100.0), (2, 180.0), (3, 200.0), (4, 210.0)])
        2
    """
    (last, rate), *rest = rates
    first = rate / last
    for count, faster in rest:
        if (faster - rate) / (count - last) < PAYS * first:
            break
        last, rate = count, faster
    return last


def knee_of(work: Workload, most: int) -> int:
    """Return the knee of a workload between 1 and `most` replicas: every number up to 32, then steps of a sixteenth."""
    counts = [1]
    while counts[-1] < most:
        counts.append(min(counts[-1] + max(1, counts[-1] // 16), most))
    return knee([(count, model.samples_per_s(work, count)) for count in counts])


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """A change, and the speed that it gains."""

    name: str
    """The change, in words."""
    key: str
    """The key that sets it, or its requirement."""
    gain: float
    """Samples per second with it, divided by those without."""
    replicas: int
    """The replicas for which the gain was predicted."""
    other_training: bool
    """Whether it makes a different training."""


def remedies(work: Workload, replicas: int, keys: Remedies, *, has_tables: bool = False) -> list[Remedy]:
    """Return the changes that help at `replicas` replicas, the best first.

    Args:
        work: the training.
        replicas: more than one.
        keys: the keys of the strategy that change its exchange.
        has_tables: whether the model has tables (embeddings), whose gradients can be sparse.
    """
    have = keys.num_servers

    def times(factor: float) -> dict[int, float]:
        return {count: factor * value for count, value in work.share_s.items()}

    large = replace(work, samples=4 * work.samples, share_s=times(4))
    within, spares = replace(work.within, bandwidth=4 * work.within.bandwidth), best_spares(work, replicas)
    with_spares, half = replace(work, spares=spares), replicas // 2
    tried: list[tuple[str, str | Literal[False, 0] | None, Workload, bool]] = [
        ("a batch four times as large", "batch.global_size x 4, or batch.accumulation", large, True),
        ("local SGD, an exchange in 8 steps", "strategy=local_sgd", _with_exchange(work, 1 / 8, messages=1 / 8), True),
        ("gradients in 16 bits", keys.compression, _with_exchange(work, 0.5), True),
        ("a sum through shared memory", keys.shared_memory, replace(work, within=within), False),
        ("twice the servers", have and f"strategy.servers={2 * have}", _with_exchange(work, wall=0.5), False),
        (
            "sparse gradients, a tenth of the rows",
            has_tables and "nn.Embedding(sparse=True)",
            _with_exchange(work, 0.1),
            False,
        ),
        (f"{spares} spares for the slowest", keys.spares and f"{keys.spares}={spares}", with_spares, False),
    ]
    rates = [(name, key, model.samples_per_s(changed, replicas), other) for name, key, changed, other in tried if key]
    fewer = model.samples_per_s(replace(work, share_s=times(1 / 2)), half)
    rates.append((f"{half} replicas twice as fast", "other devices", fewer, False))
    base = model.samples_per_s(work, replicas)
    return [
        Remedy(name=name, key=key, gain=rate / base, replicas=replicas, other_training=other)
        for name, key, rate, other in sorted(rates, key=lambda item: -item[2])
        if rate >= _LEAST_GAIN * base
    ]


def best_spares(work: Workload, replicas: int) -> int:
    """Return the number of spares with the most samples per second: none, or up to a fifth of the replicas."""
    counts = {0, *(round(replicas * share) for share in _SPARES)} - {replicas}
    return max(sorted(counts), key=lambda count: model.samples_per_s(replace(work, spares=count), replicas))


def servers_needed(work: Workload, replicas: int, num_servers: int) -> int | None:
    """Return the least doubling of the servers at which their links take less than a twentieth of a step.

    Returns:
        None if even 1,024 times the servers do not suffice.
    """
    for power in range(11):
        step = model.predict(_with_exchange(work, wall=1 / (1 << power)), replicas)
        if step.parts["fullest link"] < _LINK_SHARE * step.total_s:
            return num_servers << power
    return None


def _with_exchange(work: Workload, share: float = 1.0, *, wall: float = 1.0, messages: float = 1.0) -> Workload:
    """Return the workload with shares of the bytes, of those of the busiest link, and of the messages."""

    def exchange(replicas: int) -> Exchange:
        full = work.exchange(replicas)
        own_bytes = full.own_bytes * share
        busiest = max(full.wall_bytes * share * wall, own_bytes)
        return replace(full, own_bytes=own_bytes, wall_bytes=busiest, messages=full.messages * messages)

    return replace(work, exchange=exchange)


def checkpoint_interval_s(write_s: float, mtbf_s: float) -> float:
    """Return the computing time between two checkpoints that loses the least.

    Args:
        write_s: seconds for which a checkpoint stops the training.
        mtbf_s: mean seconds between two failures of the whole run, which come at random (exponential).

    Example:
        >>> round(checkpoint_interval_s(30.0, 180_000.0))  # half a minute to write, a failure in 50 hours
        3266

    Source: Young 1974, sqrt(2 C M); Daly 2006, A higher order estimate of the optimum checkpoint interval, eq. 37.
    """
    if write_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = write_s / (2 * mtbf_s)
    return math.sqrt(2 * write_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - write_s


def goodput(interval_s: float, write_s: float, mtbf_s: float, *, restart_s: float) -> float:
    """Return the share of time spent on progress, for a training that writes a checkpoint every `interval_s`.

    Example:
        >>> round(goodput(3266.0, 30.0, 180_000.0, restart_s=300.0), 4)
        0.9802

    Source: Daly 2006, eq. 20: T = M exp(R/M) (exp((tau + C)/M) - 1) for each interval tau.
    """
    return interval_s / (mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1((interval_s + write_s) / mtbf_s))


_KNEES: Final = 40
"""Draws of the interval of the knee."""
_IMPLAUSIBLE: Final = 1.2
"""Efficiency above which a measurement must have been disturbed."""
_MOST_KNEE: Final = 1024
"""The largest number of replicas up to which a knee is searched."""


@dataclass(frozen=True, kw_only=True)
class MeasuredShare:
    """One replica, alone, with a share of a step."""

    what: str
    """Samples of the share, and threads."""
    step_s: Interval
    """Seconds of a step: median, least and most of the turns."""


@dataclass(frozen=True, kw_only=True)
class Binding:
    """The bottleneck other than computing."""

    at_replicas: int
    """The number of replicas at which it is the bottleneck."""
    what: str
    """The part of a step."""
    share: float
    """Share of a step."""


@dataclass(frozen=True, kw_only=True)
class CheckpointInterval:
    """The interval between checkpoints that loses the least, by Daly's formula."""

    every_s: float
    """Seconds of computing between two checkpoints."""
    goodput: float
    """Share of the time spent on progress."""
    mtbf_s: float
    """Mean seconds between two failures of the whole run."""


@dataclass(frozen=True, kw_only=True)
class ScaleDocument:
    """Content of `trainkit scale --json` and `scale.json`."""

    version: Literal[2] = 2
    """Version of this document."""
    to_replicas: int
    """The target number of replicas."""
    seed: int
    """Seed of the intervals."""
    inputs: Mapping[str, InputValue]
    """Values that were not measured, by name."""
    measured: Sequence[MeasuredShare] = ()
    """Measurements of one replica; empty with --simulate."""
    checks: Sequence[Check] = ()
    """Measured numbers of replicas; empty if this machine can measure only one, and with --simulate."""
    predictions: Sequence[Prediction]
    """By replicas, up to the target."""
    knee: Interval | None = None
    """The last number of replicas up to which each further one adds at least half of the speed of the first. It and the
    other answers are null if a check lies outside its interval.
    """
    use_one_device: bool | None = None
    """Whether not even the second replica adds that much."""
    binds: Binding | None = None
    """The bottleneck at twice the knee."""
    remedies: Sequence[Remedy] = ()
    """Changes that help there, the best first."""
    servers_needed: int | None = None
    """Parameter servers whose links do not limit the target, with --simulate for asynchronous updates; null without
    servers, or if no number suffices.
    """
    spares: int | None = None
    """Replicas for which a synchronous step of parameter servers should not wait; null without --simulate."""
    checkpoint: CheckpointInterval | None = None
    """Interval between checkpoints at the target; null without --simulate."""
    notes: Sequence[str] = ()
    """Remarks for the user."""


def scale_document(
    fit: Fit,
    target: int,
    inputs: Mapping[str, InputValue],
    keys: Remedies,
    *,
    seed: int,
    measured: Sequence[MeasuredShare] = (),
    has_tables: bool = False,
    on_cpu: bool = False,
    notes: Sequence[str] = (),
) -> ScaleDocument:
    """Return the answers of a fitted model.

    Args:
        fit: the model.
        target: the largest number of replicas to predict.
        inputs: values that were not measured, by name.
        keys: keys of the strategy that change its exchange.
        seed: seed of the intervals.
        measured: what one replica measured.
        has_tables: whether the model has embeddings with dense gradients.
        on_cpu: whether the replicas of a host share its price.
        notes: remarks for the user.
    """
    per_host, predictions = inputs["per_host"].value if "per_host" in inputs else 0, []
    counts = {target, *(2**power for power in range(target.bit_length())), *(check.replicas for check in fit.checks)}
    for prediction in model.predictions(fit.work, fit.draw, sorted(counts), seed=seed):
        paid = (math.ceil(prediction.replicas / per_host) if per_host else 1) if on_cpu else prediction.replicas
        cost = inputs["price_h"].value * paid / 3600 / prediction.samples_per_s.middle * 1e6
        predictions.append(replace(prediction, cost_per_million=cost or None))
    has_verdict, doubts = all(check.inside for check in fit.checks), []
    if not has_verdict:
        doubts.append("a check lies outside its interval: this machine was busy, or the model lacks something.")
    if any(prediction.efficiency > _IMPLAUSIBLE for prediction in predictions):
        doubts.append("a speed-up exceeds the replicas: the measurement of one was disturbed. Repeat it without load.")
    document = ScaleDocument(
        to_replicas=target, seed=seed, inputs=inputs, measured=measured, checks=fit.checks, predictions=predictions,
        notes=[*doubts, *notes],
    )  # fmt: skip
    if not has_verdict:
        return document  # nothing is concluded from a model that did not predict what was measured
    rng, most = np.random.default_rng(seed), min(target, _MOST_KNEE)
    knees = sorted(knee_of(fit.draw(rng), most) for _ in range(_KNEES))
    middle = knee_of(fit.work, most)
    # The bottleneck is examined beyond the knee; for a training that scales to the target, at the target.
    bound_at = min(2 * middle, target)
    name, portion = model.predict(fit.work, bound_at).binding
    return replace(
        document,
        knee=Interval(low=min(knees[2], middle), middle=middle, high=max(knees[-3], middle)),
        use_one_device=middle < 2,
        binds=Binding(at_replicas=bound_at, what=name, share=portion),
        remedies=remedies(fit.work, bound_at, keys, has_tables=has_tables) if bound_at > 1 else (),
        servers_needed=servers_needed(fit.work, target, keys.num_servers) if keys.num_servers else None,
    )


def simulated_document(inputs: Mapping[str, InputValue], target: int, *, seed: int) -> ScaleDocument:
    """Return the answers without any measurement: an all-reduce, parameter servers, spares and checkpoints.

    Example:
        >>> from trainkit.scaling.inputs import assumed
        >>> inputs = assumed(SIMULATED, {"given": {"spread": 0.3}})
        >>> document = simulated_document(inputs, 16, seed=0)
        >>> document.spares, document.servers_needed
        (2, 4)
    """
    fit, values = simulated(inputs), {name: item.value for name, item in inputs.items()}
    work = fit.work
    # Each server is counted with the bytes that cross its own link in the time of one on the link of a replica.
    exchange = model.servers(values["megabytes"] * 1e6, values["server_gbit"] / values["gbit"], is_async=True)
    unlinked = replace(work, exchange=lambda _: Exchange())
    write_s, mtbf_s = values["write_s"], values["mtbf_h"] * 3600 / target
    every_s = max(checkpoint_interval_s(write_s, mtbf_s), 1.0)
    progress = goodput(every_s, write_s, mtbf_s, restart_s=values["restart_s"])
    return replace(
        scale_document(fit, target, inputs, Remedies(), seed=seed),
        servers_needed=servers_needed(replace(work, exchange=exchange), target, 1),
        spares=best_spares(unlinked, target),
        checkpoint=CheckpointInterval(every_s=every_s, goodput=progress, mtbf_s=mtbf_s),
    )


def scale_lines(document: ScaleDocument, title: str, *, num_servers: int | None = None) -> Iterator[str]:
    """Yield the report of a training that has this number of parameter servers."""
    yield title
    specs = HOSTS if "per_host" in document.inputs else SIMULATED
    inputs = [
        (name, f"{figure(item.value)} {item.unit or ''}".rstrip(), item.origin, specs[name].means)
        for name, item in document.inputs.items()
    ]
    yield from row_lines(("input", "value", "", "meaning"), inputs)
    if document.measured:
        yield ""
        yield "measured: one replica, alone"
        yield from (f"  {item.what}: {_ms(item.step_s)} ms a step" for item in document.measured)
    if document.checks:
        yield ""
        yield "check: each number of replicas predicted from the smaller ones, then measured"
        checks = [
            (
                str(check.replicas),
                _ms(check.predicted_s),
                figure(check.measured_s * 1000),
                f"{check.error:+.0%}".replace("%", " %"),
                "inside" if check.inside else "OUTSIDE",
            )
            for check in document.checks
        ]
        yield from row_lines(("replicas", "predicted ms a step", "measured", "error", "interval"), checks)
    yield ""
    yield "predicted, with the interval of nine tenths"
    headings = ["replicas", "ms a step", "samples/s", "speed-up", "efficiency", "most, beside computing"]
    rows = []
    for item in document.predictions:
        name, portion = Step(item.parts_s).binding
        speedup = f"{item.speedup.middle:.2f} ({item.speedup.low:.2f} to {item.speedup.high:.2f})"
        row = [f"{item.replicas:,}", figure(item.step_s * 1000), figure(item.samples_per_s.middle), speedup]
        row += [share(item.efficiency), f"{name} {share(portion)}" if portion > 0 else "-"]
        rows.append([*row, *([] if item.cost_per_million is None else [figure(item.cost_per_million)])])
    has_cost = document.predictions[0].cost_per_million is not None
    yield from row_lines([*headings, *(["cost of a million samples"] if has_cost else [])], rows)
    yield ""
    yield from _answer_lines(document, num_servers)


def _answer_lines(document: ScaleDocument, num_servers: int | None) -> Iterator[str]:
    target, knee, binds = document.to_replicas, document.knee, document.binds
    if knee is None or binds is None:
        yield "no verdict: the model did not predict what was measured here. Repeat it on an idle machine."
        return
    around = f" ({knee.low:,.0f} to {knee.high:,.0f})" if knee.high > knee.low else ""
    if document.use_one_device:
        yield f"use one device{around}: a second replica brings less than half of the first"
    elif knee.middle >= target:
        yield f"the knee lies beyond {target:,} replicas{around}: each brings at least half of the first"
    else:
        yield f"the knee: {knee.middle:,.0f} replicas{around}; a further one brings less than half of the first"
    if binds.at_replicas > 1:
        yield f"bottleneck at {binds.at_replicas:,} replicas: {binds.what}, {share(binds.share)} of a step"
    if num_servers is not None:
        yield _servers_line(document.servers_needed, f"{target:,} replicas", num_servers)
    if document.checkpoint is not None:
        yield _servers_line(document.servers_needed, f"{target:,} asynchronous replicas", 0)
        interval, spares = document.checkpoint, document.spares
        yield f"spares that pay: {spares:,}" if spares else "spares gain nothing: the slowest replica costs less"
        yield f"write a checkpoint every {duration(interval.every_s)}: checkpoint.every_s={interval.every_s:.0f}"
        yield f"  {interval.goodput:.4f} of the time is progress, with a failure every {duration(interval.mtbf_s)}"
    if document.remedies:
        yield "remedies, by the model"
        changes = [
            (remedy.name, f"x {remedy.gain:.2f}", remedy.key, "another training" if remedy.other_training else "")
            for remedy in document.remedies
        ]
        yield from row_lines(("change", "speed", "by", ""), changes)


def _servers_line(need: int | None, replicas: str, have: int) -> str:
    if need is None:
        return f"the links of the servers limit {replicas}, for any number of servers"
    if need <= have:
        return f"the links of {have} server{'' if have == 1 else 's'} do not limit {replicas}"
    return f"the links of the servers limit {replicas} below {need:,} of them (strategy.servers={need})"


def _ms(seconds: Interval) -> str:
    middle = figure(seconds.middle * 1000)
    around = f" ({figure(seconds.low * 1000)} to {figure(seconds.high * 1000)})"
    return middle + (around if seconds.high > seconds.low else "")
