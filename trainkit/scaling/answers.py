"""Find the number of replicas at which more do not pay, the bottleneck there, and changes that remove it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from trainkit.scaling.model import Exchange, Exchanges, Link, Workload, predict, samples_per_s

PAYS: Final = 0.5
"""A replica pays if it adds at least this share of the speed of the first one."""
_WALL: Final = 0.05
_HELPS: Final = 1.05
"""A remedy is named if it increases the samples per second by at least this factor."""


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
    """Return the knee of a workload between 1 and `most` replicas."""
    return knee([(count, samples_per_s(work, count)) for count in _counts(most)])


def _counts(most: int) -> list[int]:
    """Return every number up to 32, then steps of a sixteenth.

    Example:
        >>> _counts(40)[-4:]
        [34, 36, 38, 40]
    """
    counts = [1]
    while (following := counts[-1] + max(1, counts[-1] // 16)) <= most:
        counts.append(following)
    return counts


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


def binding(work: Workload, replicas: int) -> tuple[str, float]:
    """Return the bottleneck other than computing at `replicas` replicas, and its share of the step."""
    step = predict(work, replicas)
    parts = {name: value for name, value in step.parts().items() if name != "compute"}
    name = max(parts, key=lambda one: parts[one])
    return name, max(parts[name], 0.0) / step.total_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Remediable:
    """The remedies that a strategy has, by their keys."""

    compression: str | None = None
    """The key that sends gradients in 16 bits."""
    shared_memory: str | None = None
    """The key of a reducer through memory of the host."""
    num_servers: int | None = None
    """Parameter servers; None for a strategy without any."""
    spares: str | None = None
    has_tables: bool = False
    """Whether the model has tables (embeddings), whose gradients can be sparse."""


def remedies(work: Workload, replicas: int, keys: Remediable) -> list[Remedy]:
    """Return the changes that help at `replicas` replicas, the best first."""
    base = samples_per_s(work, replicas)
    tried = _tried(work, replicas, keys)
    found = [
        Remedy(name=name, key=key, gain=rate / base, replicas=replicas, other_training=other)
        for name, key, rate, other in tried
    ]
    return sorted((one for one in found if one.gain >= _HELPS), key=lambda one: -one.gain)


def _tried(work: Workload, replicas: int, keys: Remediable) -> list[tuple[str, str, float, bool]]:
    """Return name, key, samples per second and whether it is a different training, for every possible change."""

    def rate(changed: Workload) -> float:
        return samples_per_s(changed, replicas)

    four = replace(work, samples=work.samples * 4, share_s={count: 4 * value for count, value in work.share_s.items()})
    half = replace(work, share_s={count: value / 2 for count, value in work.share_s.items()})
    rare = replace(work, exchange=_scaled(work.exchange, 1 / 8, messages=1 / 8))
    found = [
        ("a batch four times as large", "batch.global_size x 4, or batch.accumulation", rate(four), True),
        ("local SGD, an exchange in 8 steps", "strategy=local_sgd", rate(rare), True),
    ]
    if replicas > 1:
        fewer = max(replicas // 2, 1)
        found.append((f"{fewer} replicas twice as fast", "other devices", samples_per_s(half, fewer), False))
    if keys.compression:
        found.append(("gradients in 16 bits", keys.compression, rate(_with(work, _scaled(work.exchange, 0.5))), True))
    if keys.shared_memory:
        faster = replace(work, within=Link(bandwidth=4 * work.within.bandwidth, latency_s=work.within.latency_s))
        found.append(("a sum through shared memory", keys.shared_memory, rate(faster), False))
    if keys.num_servers:
        twice = _with(work, _wall(work.exchange, 0.5))
        found.append(("twice the servers", f"strategy.servers={2 * keys.num_servers}", rate(twice), False))
    if keys.spares:
        found.append(("spares for the slowest", keys.spares, rate(replace(work, spread=work.spread / 2)), False))
    if keys.has_tables:
        sparse = _with(work, _scaled(work.exchange, 0.1))
        found.append(("sparse gradients, a tenth of the rows", "nn.Embedding(sparse=True)", rate(sparse), False))
    return found


def servers_needed(work: Workload, replicas: int, num_servers: int) -> int | None:
    """Return the least doubling of the servers at which their links take less than a twentieth of a step.

    Returns:
        None if even 1,024 times the servers do not suffice.
    """
    for power in range(11):
        step = predict(_with(work, _wall(work.exchange, 1 / (1 << power))), replicas)
        if step.wall_s < _WALL * step.total_s:
            return num_servers << power
    return None


def _with(work: Workload, exchange: Exchanges) -> Workload:
    return replace(work, exchange=exchange)


def _scaled(exchange: Exchanges, factor: float, *, messages: float = 1.0) -> Exchanges:
    return _changed(
        exchange,
        lambda one: replace(
            one,
            own_bytes=one.own_bytes * factor,
            wall_bytes=one.wall_bytes * factor,
            messages=one.messages * messages,
        ),
    )


def _wall(exchange: Exchanges, factor: float) -> Exchanges:
    return _changed(exchange, lambda one: replace(one, wall_bytes=max(one.wall_bytes * factor, one.own_bytes)))


def _changed(exchange: Exchanges, change: Callable[[Exchange], Exchange]) -> Exchanges:
    return lambda replicas: change(exchange(replicas))
