"""The time of a training step as a band, its parts, and the duration and cost of the whole training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from trainkit.run.estimates.hardware import Band, Hardware
from trainkit.run.estimates.traffic import Traffic

_ALLOCATE: Final = frozenset(
    f"aten::{name}"
    for name in ("_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
)
"""Operations that return memory without reading or writing it."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """Operations, counted by their sizes.

    Example:
        >>> work = Work(operations={(2000, 120): 3, (0, 80): 1})
        >>> work.flops, work.num_bytes, work.num_operations, work.times(2).flops
        (6000, 440, 4, 12000)
    """

    operations: Mapping[tuple[int, int], float] = field(default_factory=dict)
    """(floating-point operations, bytes read and written) of an operation -> number of such operations."""

    @property
    def flops(self) -> int:
        """Floating-point operations; a multiplication with an addition counts as two."""
        return round(sum(flops * count for (flops, _), count in self.operations.items()))

    @property
    def num_bytes(self) -> int:
        """Bytes that operations read and write, as if there were no caches."""
        return round(sum(size * count for (_, size), count in self.operations.items()))

    @property
    def num_operations(self) -> int:
        """Operations that the host starts."""
        return round(sum(self.operations.values()))

    def times(self, factor: float) -> Work:
        """Return the work of `factor` repetitions."""
        return Work(operations={sizes: count * factor for sizes, count in self.operations.items()})

    def cut(self, parts: float) -> Work:
        """Return the work of one of several devices that share each operation."""
        operations: Counter[tuple[int, int]] = Counter()
        for (flops, size), count in self.operations.items():  # two may be equal after the cut
            operations[round(flops / parts), round(size / parts)] += count  # type: ignore[assignment]
        return Work(operations=operations)

    def bound_s(self, hardware: Hardware, precision: str) -> tuple[float, float]:
        """Return the seconds of operations that are bound by computing and of operations bound by memory, at the peaks.

        Source: Williams et al. 2009, "Roofline: an insightful visual performance model".
        """
        peak, rate = hardware.peak_flops(precision) or float("inf"), hardware.memory_gb_s * 1e9
        computing = moving = 0.0
        for (flops, size), count in self.operations.items():
            compute_s, memory_s = flops / peak * count, size / rate * count
            if compute_s >= memory_s:
                computing += compute_s
            else:
                moving += memory_s
        return computing, moving


class WorkCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations that run inside, with torch's own formulas for their floating-point operations.

    It is entered within a `FakeTensorMode`, so that it sees each operation once.

    Example:
        >>> with WorkCounter() as counter:
        ...     _ = torch.ones(2, 3) @ torch.ones(3, 4)
        >>> counter.work().flops
        48
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operations: Counter[tuple[int, int]] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and count it; a view and an allocation count nothing."""
        named = kwargs or {}
        found = func(*args, **named)
        if not is_free(func):
            formula: Callable[..., int] | None = flop_registry.get(func._overloadpacket)  # noqa: SLF001 - as torch does
            flops = 0 if formula is None else int(formula(*args, **named, out_val=found))
            self._operations[flops, _bytes_of((args, named, found))] += 1
        return found

    def work(self) -> Work:
        """Return the work counted so far."""
        return Work(operations=dict(self._operations))


def is_free(func: Any) -> bool:
    """Return whether an operation neither reads nor writes the elements of a tensor."""
    name: str = func._schema.name  # noqa: SLF001 - torch has no public name for the schema
    returns = func._schema.returns  # noqa: SLF001
    if not name.startswith("aten::") or name in _ALLOCATE or not returns:
        return True
    return any(one.alias_info is not None and not one.alias_info.is_write for one in returns)


def _bytes_of(values: Any) -> int:
    """Return the bytes of all tensors; one that is argument and result counts once."""
    tensors = {id(leaf): leaf for leaf in tree_iter(values) if isinstance(leaf, Tensor)}
    return sum(one.numel() * one.element_size() for one in tensors.values() if one.layout is torch.strided)


def update_work(elements: int, *, width: int, slots: int) -> Work:
    """Return the update of an optimizer: gradients are read, parameters and slots are read and written.

    Args:
        elements: trained parameters of a device.
        width: bytes of an element.
        slots: tensors of the optimizer's state that have the shape of a parameter.
    """
    return Work(operations={(0, elements * width * (3 + 2 * slots)): 1}) if elements else Work()


PARTS: Final = ("compute", "memory", "host", "exchange", "input")
"""Parts of a step that it waits for: arithmetic, the device's memory, the start of operations, other ranks, samples."""
Seconds = Mapping[str, float]
"""Part of a step -> its seconds."""
_MEMORY: Final = Band(low=0.6, high=0.9)
"""Shares of the memory bandwidth that simple operations reach; `hardware.reached` applies to matrix products."""
_EXCHANGE: Final = Band(low=0.9, high=1.15)
"""Bounds of the time of an exchange, as factors of the time at the full rate of the link."""
_TURNS: Final = Band(low=1.0, high=1.25)
"""Bounds of the slowdown of processes that take turns on a core: they share its caches, and the last one ends later
than the mean; `benchmarks/plan_time.py` shows 1.1 to 1.2 for four on two cores.
"""
_BACKWARD: Final = 2 / 3
"""The share of forward and backward during which gradients become final and can be sent."""


@dataclass(frozen=True, kw_only=True)
class RankWork:
    """The work of the busiest rank in a full step."""

    shard: Work
    """Forward and backward of one shard, on this rank."""
    shards: float
    """Number of shards of the rank, plus the shards that would fill the bubble of a pipeline."""
    update: Work
    """The update of its parameters."""
    flops: float
    """Floating-point operations of the whole step, of all ranks."""
    input_bytes: int = 0
    """Bytes of the samples of the rank."""
    loaders: int = 0
    """Processes that read them; 0: the rank itself."""
    tasks_a_host: int = 1
    """Computing tasks that share a host."""
    num_devices: int = 1
    """Computing devices of the run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Seconds that one replica alone was measured to take, replacing counted operations."""

    shard_s: float
    """Seconds of forward and backward of one shard."""
    update_s: float = 0.0
    """Seconds of the update, and of everything else that occurs once per step."""
    input_s: float = 0.0
    """Seconds of waiting for samples."""
    at_once: int = 1
    """Number of replicas, with their threads, that the cores of a host compute at once; ignored for GPUs."""
    spread: float = 0.1
    """Relative deviation of the time of a step."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The seconds of a full step."""

    band: Band
    """Bounds of the time of a step."""
    parts: Mapping[str, float]
    """Part of `PARTS` -> seconds that the step waits for it, in the middle of the band."""
    mfu: float | None
    """Share of the devices' peak that the operations of the model use, in the middle of the band."""
    calibrated: str | None = None
    """The calibration behind the times; None: they come from documents."""

    @property
    def step_s(self) -> float:
        """The middle of the band."""
        return self.band.middle

    def shares(self) -> dict[str, float]:
        """Return the share of the step that each part takes."""
        total = sum(self.parts.values())
        return {name: seconds / total for name, seconds in self.parts.items()} if total else {}


def step_time(
    work: RankWork,
    traffic: Traffic | None,
    hardware: Hardware,
    precision: str,
    *,
    measured: Measured | None = None,
) -> StepTime:
    """Return the time of a full step.

    Operations take the longer of arithmetic and memory, each at a share of its rate within `hardware.reached`; the host
    starts them one after the other, on a GPU while it computes, on the CPU in addition. Transfers that can overlap are
    hidden behind backward at the lower bound, and not at the upper one; the same holds for samples.

    Args:
        work: work of the busiest rank.
        traffic: traffic of the step; None: unknown, counted as zero.
        hardware: figures of a device and its links.
        precision: the number formats.
        measured: measured seconds of one replica, replacing those of the counted operations.
    """
    crowd = float(work.tasks_a_host if hardware.whole_host else 1)
    if measured is None:
        bounds = [
            _computed(work, hardware, precision, share, crowd)
            for share in (hardware.reached.high, hardware.reached.low)
        ]
    else:
        crowd = max(crowd / measured.at_once, 1.0)
        turns = _TURNS if crowd > 1 else Band(low=1.0, high=1.0)
        factors = (turns.low / (1 + measured.spread), turns.high * (1 + measured.spread))
        bounds = [_repeated(work, measured, factor, crowd) for factor in factors]
    network = _network_s(traffic, hardware)
    waiting = _input_s(work, hardware, measured)
    low, high = (
        _joined(parts, network, waiting, hidden=hidden) for parts, hidden in zip(bounds, (True, False), strict=True)
    )
    fastest, slowest = sorted(max(sum(parts.values()), 1e-9) for parts in (low, high))  # equal up to rounding
    band = Band(low=fastest, high=slowest)
    names = dict.fromkeys((*low, *high))
    scale = band.middle / ((band.low + band.high) / 2)
    middle = {name: (low.get(name, 0.0) + high.get(name, 0.0)) / 2 * scale for name in names}
    peak = hardware.peak_flops(precision)
    devices = work.num_devices / (work.tasks_a_host if hardware.whole_host else 1)
    mfu = None if peak is None else work.flops / (band.middle * peak * devices)
    return StepTime(band=band, parts=middle, mfu=mfu)


def _computed(work: RankWork, hardware: Hardware, precision: str, share: float, crowd: float) -> Seconds:
    """Return the seconds of the counted operations at a share of the rates."""
    least = _MEMORY.low if share < hardware.reached.high else _MEMORY.high
    found = dict.fromkeys(("compute", "memory", "host"), 0.0)
    for part, times in ((work.shard, work.shards), (work.update, 1.0)):
        compute, memory = part.bound_s(hardware, precision)
        host = part.num_operations * hardware.operation_us * 1e-6
        compute, memory = compute * crowd / share, memory * crowd / max(share, least)
        if not hardware.whole_host:  # the host runs ahead of the device
            host = max(host - compute - memory, 0.0)
        for name, seconds in (("compute", compute), ("memory", memory), ("host", host)):
            found[name] += seconds * times
    return found


def _repeated(work: RankWork, measured: Measured, factor: float, crowd: float) -> Seconds:
    return {"compute": (measured.shard_s * work.shards + measured.update_s) * factor * crowd}


def _network_s(traffic: Traffic | None, hardware: Hardware) -> tuple[float, float]:
    """Return the seconds of transfers that may overlap with computing, and of all other transfers."""
    hidden = shown = 0.0
    for one in () if traffic is None else traffic.transfers:
        sent: dict[tuple[int, str], float] = {}
        slowest = 0.0
        for pair, size in one.flows.items():
            link = traffic.link_of(one, pair) if traffic is not None else "within_host"
            rate = hardware.between_hosts if link == "between_hosts" else hardware.within_host
            for end in ((pair[0], "out"), (pair[1], "in")):
                sent[end] = sent.get(end, 0.0) + size / (rate.gb_s * 1e9)
            slowest = max(slowest, rate.latency_us * 1e-6)
        seconds = max(sent.values(), default=0.0)
        if hardware.whole_host and traffic is not None:  # all ranks share the cores that copy
            inside = sum(size for pair, size in one.flows.items() if traffic.link_of(one, pair) != "between_hosts")
            hosts = len({rank // traffic.ranks_a_host for pair in one.flows for rank in pair}) or 1
            seconds = max(seconds, inside / (2 * hardware.within_host.gb_s * 1e9) / hosts)
        seconds += one.messages * slowest
        if one.overlaps:
            hidden += seconds
        else:
            shown += seconds
    return hidden, shown


def _input_s(work: RankWork, hardware: Hardware, measured: Measured | None) -> tuple[float, bool]:
    """Return the seconds for reading samples, and whether other processes read them concurrently."""
    if measured is not None:
        return measured.input_s, False
    if hardware.input_mb_s is None:
        return 0.0, False
    seconds = work.input_bytes / (hardware.input_mb_s * 1e6 * max(work.loaders, 1))
    return seconds, work.loaders > 0


def _joined(parts: Seconds, network: tuple[float, float], waiting: tuple[float, bool], *, hidden: bool) -> Seconds:
    """Add the time of exchange and input that computing does not hide."""
    computing = sum(parts.values())
    overlapping, shown = (seconds * (_EXCHANGE.low if hidden else _EXCHANGE.high) for seconds in network)
    if hidden:
        overlapping = max(overlapping - computing * _BACKWARD, 0.0)
    samples, beside = waiting
    exchange = overlapping + shown
    if beside:
        samples = max(samples - computing - exchange, 0.0)
    return {**parts, "exchange": exchange, "input": samples}


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """Time and cost to the end of the training, without evaluation, checkpoints and the start."""

    hours: Band
    """Elapsed hours."""
    device_hours: float
    """Hours of all devices, in the middle of the band."""
    cost_usd: Band | None
    """US dollars; None: the hardware has no price."""


def budget_of(time: StepTime, *, num_steps: int, num_devices: int, hardware: Hardware) -> Budget:
    """Return hours and cost of `num_steps` steps on `num_devices` devices (or hosts, if a device is a host).

    Example:
        >>> from trainkit.run.estimates.hardware import Link
        >>> link = Link(gb_s=1.0)
        >>> one = Hardware(name="x", memory_gib=1.0, memory_gb_s=1.0, tflops={"fp32": 1.0}, within_host=link,
        ...     between_hosts=link, price_usd_h=2.0)
        >>> time = StepTime(band=Band(low=1.0, high=4.0), parts={}, mfu=None)
        >>> budget = budget_of(time, num_steps=3600, num_devices=8, hardware=one)
        >>> budget.hours, budget.device_hours, budget.cost_usd
        (Band(low=1.0, high=4.0), 16.0, Band(low=16.0, high=64.0))
    """
    hours = time.band.times(num_steps / 3600)
    price = hardware.price_usd_h
    cost = None if not price else hours.times(price * num_devices)
    return Budget(hours=hours, device_hours=hours.middle * num_devices, cost_usd=cost)


def rows_of(time: StepTime, budget: Budget | None) -> Iterator[tuple[str, str]]:
    """Yield the lines of `trainkit plan`: label, text."""
    shares = ", ".join(f"{name} {share:.0%}" for name, share in time.shares().items() if share >= 0.005)
    yield "time a step", f"{_seconds(time.band)}: {shares}"
    if time.mfu is not None:
        yield "MFU", f"{time.mfu:.1%} of the peak"
    if budget is not None:
        yield "time to the end", _hours(budget.hours)
        if budget.cost_usd is not None:
            low, high = budget.cost_usd.low, budget.cost_usd.high
            dollars = f"{low:,.2f} to {high:,.2f}" if high >= 0.01 else "less than 0.01"
            yield "cost to the end", f"{dollars} US dollars ({budget.device_hours:,.3g} device hours)"


def _seconds(band: Band) -> str:
    unit, factor = ("s", 1.0) if band.low >= 1 else ("ms", 1e3) if band.low >= 1e-3 else ("us", 1e6)
    return f"{band.low * factor:.3g} to {band.high * factor:.3g} {unit}"


def _hours(band: Band) -> str:
    unit, factor = ("days", 1 / 24) if band.low >= 48 else ("hours", 1.0) if band.low >= 1 else ("minutes", 60.0)
    if unit == "minutes" and band.high * 60 < 1:
        unit, factor = "seconds", 3600.0
    return f"{band.low * factor:.3g} to {band.high * factor:.3g} {unit}"
