"""Predict a run from its plan: the bytes that its tasks exchange in a step, work, the time of a step as a band, hours
and cost.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from trainkit.data.stored import travelling_bytes
from trainkit.files import num_bytes
from trainkit.run.estimates.hardware import Band, Hardware, hardware_of
from trainkit.run.estimates.memory import DeviceMemory, device_memory
from trainkit.run.estimates.passes import dry_pass
from trainkit.run.planning.memory import checkpoint_bytes
from trainkit.run.planning.plan import RunPlan
from trainkit.strategies.base import CollectiveCall, StepCut, Transfer
from trainkit.strategies.traffic import ranks_a_host, times, traffic_of

LinkKind = Literal["memory", "within_host", "between_hosts"]
"""Path of a byte: memory shared by the tasks of a host, a link within a host, or one between hosts."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """The transfers of a full step."""

    transfers: tuple[Transfer, ...]
    ranks_a_host: int
    """Number of consecutive ranks on one host."""

    def link_of(self, transfer: Transfer, pair: tuple[int, int]) -> LinkKind:
        """Return the link between two ranks."""
        if transfer.by == "memory":
            return "memory"
        sender, receiver = (rank // self.ranks_a_host for rank in pair)
        return "within_host" if sender == receiver else "between_hosts"

    def at(self, step: int) -> Traffic:
        """Return the transfers of one step: some begin later, end, or occur once in several steps."""
        return self._of_one_step(transfer for transfer in self.transfers if transfer.occurs_at(step))

    def around(self, step: int) -> Traffic:
        """Return the transfers of the phase of a step, on average: a transfer every 8 steps counts one eighth.

        Example:
            >>> average = Transfer(what="parameters", how="all-reduce", flows={(0, 1): 80.0}, every=8)
            >>> Traffic(transfers=(average,), ranks_a_host=2).around(0).network_bytes()
            10.0
        """
        return self._of_one_step(
            replace(
                transfer,
                flows=times(transfer.flows, 1 / transfer.every),
                messages=-(-transfer.messages // transfer.every),
            )
            for transfer in self.transfers
            if transfer.lasts_at(step)
        )

    def _of_one_step(self, transfers: Iterable[Transfer]) -> Traffic:
        single = tuple(replace(transfer, first_step=0, end_step=None, every=1) for transfer in transfers)
        return replace(self, transfers=single)

    def by_link(self) -> dict[LinkKind, float]:
        """Return the bytes of a step on average, in the last phase, over each kind of link, of all ranks together."""
        total: dict[LinkKind, float] = {}
        for transfer in self.around(max((transfer.first_step for transfer in self.transfers), default=0)).transfers:
            for pair, size in transfer.flows.items():
                link = self.link_of(transfer, pair)
                total[link] = total.get(link, 0.0) + size
        return total

    def network_bytes(self, rank: int | None = None) -> float:
        """Return the bytes that all ranks send over a network in a step, or that one rank sends and receives."""
        flows = [transfer.flows for transfer in self.transfers if transfer.by == "network"]
        return sum(size for flow in flows for pair, size in flow.items() if rank is None or rank in pair)

    def mean_bytes(self, first: int, end: int, *, rank: int) -> float:
        """Return the bytes that a rank sends and receives over a network in a step, averaged over the steps from
        `first` to `end`.
        """
        return sum(self.at(step).network_bytes(rank) for step in range(first, end)) / max(end - first, 1)

    def rows(self) -> Iterator[tuple[str, str]]:
        """Yield the lines of `trainkit plan`: label, text."""
        names = {"memory": "shared memory", "within_host": "within a host", "between_hosts": "between hosts"}
        links = [f"{num_bytes(int(size))} {names[link]}" for link, size in self.by_link().items()]
        if self.transfers:
            yield "sent a step", f"{', '.join(links)}: {'; '.join(map(_text, self.transfers))}"

    def notes(self) -> Iterator[str]:
        """Yield notes about the limits of the figures."""
        yield from dict.fromkeys(transfer.note for transfer in self.transfers if transfer.note is not None)

    def document(self) -> Mapping[str, object]:
        """Return the object `traffic` of `trainkit plan --json`: bytes of a step, of all ranks."""
        return {
            "links": {link: round(size) for link, size in self.by_link().items()},
            "transfers": [
                {
                    "what": transfer.what,
                    "how": transfer.how,
                    "bytes": round(transfer.num_bytes),
                    "messages": transfer.messages,
                    "overlaps": transfer.overlaps,
                    "first_step": transfer.first_step,
                    "end_step": transfer.end_step,
                    "every": transfer.every,
                }
                for transfer in self.transfers
            ],
        }


def _text(transfer: Transfer) -> str:
    text = f"{num_bytes(int(transfer.num_bytes))} {transfer.what} by {transfer.how}"
    if transfer.end_step is not None:
        return f"{text} before step {transfer.end_step:,}"
    text += f" every {transfer.every:,} steps" if transfer.every > 1 else ""
    return text + (f" from step {transfer.first_step:,} on" if transfer.first_step else "")


def step_traffic(
    plan: RunPlan, model: nn.Module, collectives: Mapping[int, Sequence[CollectiveCall]] | None = None
) -> Traffic | None:
    """Return the traffic of a full step; None if that is not known before the run.

    Args:
        plan: the run, with the choices of its strategy resolved.
        model: the model, with or without data; unchanged.
        collectives: those of each observed rank, if they are known; None: they are observed if necessary.
    """
    cut = StepCut(
        num_shards=plan.batch.num_shards(0),
        num_replicas=plan.num_replicas,
        dry_run=PlannedDryRun(plan=plan, model=model, observed=collectives),
    )
    transfers = traffic_of(plan.components.strategy, model, plan.context, cut)
    if transfers is None:
        return None
    count = sum(not task.is_evaluator for task in plan.tasks)
    return Traffic(transfers=transfers, ranks_a_host=ranks_a_host(plan.context, count))


@dataclass(frozen=True, kw_only=True)
class PlannedDryRun:
    """The dry run of a plan (`trainkit.strategies.traffic.DryRun`)."""

    plan: RunPlan
    model: nn.Module
    """The model, with or without data; unchanged."""
    observed: Mapping[int, Sequence[CollectiveCall]] | None = None
    """The collectives of each observed rank, if they are known already."""

    def lookups(self, names: Collection[str]) -> Mapping[str, Sequence[tuple[int, bool]]] | None:
        """Return (number of indices, whether backward recomputes it) of each lookup of the largest shard, by table."""
        calls: dict[str, list[tuple[int, bool]]] = {name: [] for name in names}
        has_ended: list[bool] = []  # hooks are functions: a copy of a table shares them, and so this list

        def noted(name: str, args: tuple[Any, ...]) -> None:
            calls[name].append((args[0].numel(), bool(has_ended)))

        try:
            with ExitStack() as stack:
                for name in names:
                    hook = lambda _, args, kwargs, name=name: noted(name, (*args, *kwargs.values()))  # noqa: E731
                    table = self.model.get_submodule(name)
                    stack.callback(table.register_forward_pre_hook(hook, with_kwargs=True).remove)
                dry_pass(self.plan, self.model, after_forward=lambda: has_ended.append(True))
        except Exception:  # noqa: BLE001 - the user's model and objective may fail in any way without data
            return None
        return calls

    def collectives(self) -> Mapping[int, Sequence[CollectiveCall]] | None:
        """Return the collectives of each observed rank in a step; None if it cannot run without data."""
        if self.observed is not None:
            return self.observed
        from trainkit.run.estimates.fake_run import observe  # noqa: PLC0415 - imports torch's compiler: seconds

        ranks = self.plan.components.strategy.observed_ranks(self.plan.context)
        try:
            return {rank: observe(self.plan, self.model, rank=rank).collectives for rank in ranks}
        except Exception:  # noqa: BLE001 - the user's model and objective may fail in any way without data
            return None


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
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not is_free(func):
            formula: Callable[..., int] | None = flop_registry.get(func._overloadpacket)  # noqa: SLF001 - as torch does
            flops = 0 if formula is None else int(formula(*args, **kwargs, out_val=result))
            # one that is argument and result counts once
            tensors = {id(leaf): leaf for leaf in tree_iter((args, kwargs, result)) if isinstance(leaf, Tensor)}
            self._operations[flops, sum(leaf.nbytes for leaf in tensors.values() if leaf.layout is torch.strided)] += 1
        return result

    def work(self) -> Work:
        """Return the work counted so far."""
        return Work(operations=dict(self._operations))


def is_free(func: Any) -> bool:
    """Return whether an operation neither reads nor writes the elements of a tensor."""
    name: str = func._schema.name  # noqa: SLF001 - torch has no public name for the schema
    returns = func._schema.returns  # noqa: SLF001
    if not name.startswith("aten::") or name in _ALLOCATE or not returns:
        return True
    return any(result.alias_info is not None and not result.alias_info.is_write for result in returns)


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


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The seconds of a full step."""

    band: Band
    """Bounds of the time of a step."""
    parts: Mapping[str, float]
    """Part of `PARTS` -> seconds that the step waits for it, in the middle of the band."""
    mfu: float | None
    """Share of the devices' peak that the operations of the model use, in the middle of the band."""

    @property
    def step_s(self) -> float:
        """The middle of the band."""
        return self.band.middle

    def shares(self) -> dict[str, float]:
        """Return the share of the step that each part takes."""
        total = sum(self.parts.values())
        return {name: seconds / total for name, seconds in self.parts.items()} if total else {}


def step_time(work: RankWork, traffic: Traffic | None, hardware: Hardware, precision: str) -> StepTime:
    """Return the time of a full step.

    Operations take the longer of arithmetic and memory, each at a share of its rate within `hardware.reached`; the host
    starts them one after the other, on a GPU while it computes, on the CPU in addition. Transfers that can overlap are
    hidden behind backward at the lower bound, and not at the upper one; the same holds for samples.

    Args:
        work: work of the busiest rank.
        traffic: traffic of the step; None: unknown, counted as zero.
        hardware: figures of a device and its links.
        precision: the number formats.
    """
    network = _network_s(traffic, hardware)
    low, high = (
        _joined(_computed(work, hardware, precision, share), network, work, hardware, hidden=hidden)
        for share, hidden in ((hardware.reached.high, True), (hardware.reached.low, False))
    )
    fastest, slowest = sorted(max(sum(parts.values()), 1e-9) for parts in (low, high))  # equal up to rounding
    band = Band(low=fastest, high=slowest)
    scale = band.middle / ((band.low + band.high) / 2)
    middle = {name: (low[name] + high[name]) / 2 * scale for name in low}
    peak = hardware.peak_flops(precision)
    devices = work.num_devices / (work.tasks_a_host if hardware.whole_host else 1)
    mfu = None if peak is None else work.flops / (band.middle * peak * devices)
    return StepTime(band=band, parts=middle, mfu=mfu)


def _computed(work: RankWork, hardware: Hardware, precision: str, share: float) -> Seconds:
    """Return the seconds of the counted operations at a share of the rates."""
    crowd = float(work.tasks_a_host if hardware.whole_host else 1)
    bandwidth_share = _MEMORY.low if share < hardware.reached.high else _MEMORY.high
    total = dict.fromkeys(("compute", "memory", "host"), 0.0)
    for part, count in ((work.shard, work.shards), (work.update, 1.0)):
        compute, memory = part.bound_s(hardware, precision)
        host = part.num_operations * hardware.operation_us * 1e-6
        compute, memory = compute * crowd / share, memory * crowd / max(share, bandwidth_share)
        if not hardware.whole_host:  # the host runs ahead of the device
            host = max(host - compute - memory, 0.0)
        for name, seconds in (("compute", compute), ("memory", memory), ("host", host)):
            total[name] += seconds * count
    return total


def _network_s(traffic: Traffic | None, hardware: Hardware) -> tuple[float, float]:
    """Return the seconds of transfers that may overlap with computing, and of all other transfers."""
    hidden = shown = 0.0
    for transfer in () if traffic is None else traffic.transfers:
        sent: dict[tuple[int, str], float] = {}
        slowest = 0.0
        flows = transfer.flows.items()
        for pair, size in flows:
            link = traffic.link_of(transfer, pair) if traffic is not None else "within_host"
            rate = hardware.between_hosts if link == "between_hosts" else hardware.within_host
            for end in ((pair[0], "out"), (pair[1], "in")):
                sent[end] = sent.get(end, 0.0) + size / (rate.gb_s * 1e9)
            slowest = max(slowest, rate.latency_us * 1e-6)
        seconds = max(sent.values(), default=0.0)
        if hardware.whole_host and traffic is not None:  # all ranks share the cores that copy
            inside = sum(size for pair, size in flows if traffic.link_of(transfer, pair) != "between_hosts")
            hosts = len({rank // traffic.ranks_a_host for pair, _ in flows for rank in pair}) or 1
            seconds = max(seconds, inside / (2 * hardware.within_host.gb_s * 1e9) / hosts)
        seconds += transfer.messages * slowest
        if transfer.overlaps:
            hidden += seconds
        else:
            shown += seconds
    return hidden, shown


def _joined(
    parts: Seconds, network: tuple[float, float], work: RankWork, hardware: Hardware, *, hidden: bool
) -> Seconds:
    """Add the time of exchange and input that computing does not hide."""
    computing = sum(parts.values())
    overlapping, shown = (seconds * (_EXCHANGE.low if hidden else _EXCHANGE.high) for seconds in network)
    if hidden:
        overlapping = max(overlapping - computing * _BACKWARD, 0.0)
    exchange = overlapping + shown
    samples = 0.0
    if hardware.input_mb_s is not None:
        samples = work.input_bytes / (hardware.input_mb_s * 1e6 * max(work.loaders, 1))
    if work.loaders:  # other processes read them meanwhile
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


def budget_of(
    time: StepTime, *, num_steps: int, num_devices: int, hardware: Hardware, most_s: float = math.inf
) -> Budget:
    """Return hours and cost of `num_steps` steps, in `most_s` seconds at most, on `num_devices` devices (or hosts, if a
    device is a host).

    Example:
        >>> from trainkit.run.estimates.hardware import Link
        >>> link = Link(gb_s=1.0)
        >>> gpu = Hardware(name="x", memory_gib=1.0, memory_gb_s=1.0, tflops={"fp32": 1.0}, within_host=link,
        ...     between_hosts=link, price_usd_h=2.0)
        >>> time = StepTime(band=Band(low=1.0, high=4.0), parts={}, mfu=None)
        >>> budget = budget_of(time, num_steps=3600, num_devices=8, hardware=gpu)
        >>> budget.hours, budget.device_hours, budget.cost_usd
        (Band(low=1.0, high=4.0), 16.0, Band(low=16.0, high=64.0))
    """
    whole = time.band.times(num_steps / 3600)
    hours = Band(low=min(whole.low, most_s / 3600), high=min(whole.high, most_s / 3600))
    price = hardware.price_usd_h
    cost = None if not price else hours.times(price * num_devices)
    return Budget(hours=hours, device_hours=hours.middle * num_devices, cost_usd=cost)


def _seconds(band: Band) -> str:
    unit, factor = ("s", 1.0) if band.low >= 1 else ("ms", 1e3) if band.low >= 1e-3 else ("us", 1e6)
    return f"{band.low * factor:.3g} to {band.high * factor:.3g} {unit}"


def _hours(band: Band) -> str:
    unit, factor = ("days", 1 / 24) if band.low >= 48 else ("hours", 1.0) if band.low >= 1 else ("minutes", 60.0)
    if unit == "minutes" and band.high * 60 < 1:
        unit, factor = "seconds", 3600.0
    return f"{band.low * factor:.3g} to {band.high * factor:.3g} {unit}"


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """Predictions for a run before it starts; None if unknown."""

    memory: DeviceMemory
    """Memory of the device with the largest use."""
    traffic: Traffic | None
    """Traffic of a full step."""
    work: RankWork | None
    """Work of the busiest rank."""
    checkpoint_bytes: int
    """Bytes of one checkpoint, without optimizer state of unknown size."""
    hardware: Hardware | None
    time: StepTime | None
    """Time of a step; None without hardware or work."""
    budget: Budget | None
    """Hours and cost to the end of the training."""

    @property
    def cost_usd(self) -> float | None:
        """US dollars to the end, the middle of the band; None if the price or the work is unknown."""
        return None if self.budget is None or self.budget.cost_usd is None else self.budget.cost_usd.middle

    def rows(self) -> Iterator[tuple[str, str]]:
        """Yield the lines of `trainkit plan` in addition to those of the memory: label, text."""
        if self.traffic is not None:
            yield from self.traffic.rows()
        if self.work is not None:
            yield "work a step", f"{_counted(self.work.flops)}FLOP"
        yield "checkpoint", num_bytes(self.checkpoint_bytes)
        if (time := self.time) is not None:
            shares = ", ".join(f"{name} {share:.0%}" for name, share in time.shares().items() if share >= 0.005)
            yield "time a step", f"{_seconds(time.band)}: {shares}"
            if time.mfu is not None:
                yield "MFU", f"{time.mfu:.1%} of the peak"
        if self.budget is not None:
            yield "time to the end", _hours(self.budget.hours)
            if self.budget.cost_usd is not None:
                low, high = self.budget.cost_usd.low, self.budget.cost_usd.high
                dollars = f"{low:,.2f} to {high:,.2f}" if high >= 0.01 else "less than 0.01"
                yield "cost to the end", f"{dollars} US dollars ({self.budget.device_hours:,.3g} device hours)"

    def notes(self) -> Iterator[str]:
        """Yield notes about unknown figures, and about the source of the hardware figures."""
        if self.traffic is None:
            yield "the bytes of a step are not known before the run: they depend on the data or on measurements."
        else:
            yield from self.traffic.notes()
        if self.hardware is None:
            return
        yield from self.hardware.notes
        if self.time is None:
            yield "times and costs are not known, because the work of a step is not."
        elif self.hardware.price_usd_h is None:
            yield "the cost is not known: give hardware.price_usd_h."

    def document(self) -> dict[str, object]:
        """Return the objects of `trainkit plan --json` other than the memory."""
        time, budget, work = self.time, self.budget, self.work
        return {
            "traffic": None if self.traffic is None else self.traffic.document(),
            "work": {"flops": None if work is None else work.flops, "checkpoint_bytes": self.checkpoint_bytes},
            "time": {
                "step_s": None if time is None else time.step_s,
                "low_s": None if time is None else time.band.low,
                "high_s": None if time is None else time.band.high,
                "shares": None if time is None else time.shares(),
                "mfu": None if time is None else time.mfu,
                "total_h": None if budget is None else budget.hours.middle,
            },
            "cost": {
                "total": self.cost_usd,
                "currency": "USD",
                "device_h": None if budget is None else budget.device_hours,
            },
            "hardware": None if self.hardware is None else self.hardware.name,
        }


def _counted(number: float) -> str:
    """Return a number with a prefix of the SI.

    Example:
        >>> _counted(2.5e13), _counted(740.0)
        ('25 T', '740 ')
    """
    for prefix, factor in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= factor:
            return f"{number / factor:.3g} {prefix}"
    return f"{number:.3g} "


def outlook_of(plan: RunPlan, model: nn.Module, *, ends: bool = True) -> Outlook:
    """Return the predictions for a run.

    Args:
        plan: the run, with the choices of its strategy resolved.
        model: the model, with or without data; unchanged.
        ends: whether the number of steps is known; otherwise there is no budget.

    Raises:
        ConfigError: the hardware is not known.
    """
    hardware, counter = hardware_of(plan.cfg), WorkCounter()
    memory = device_memory(plan, model, counter)
    work = (
        None
        if memory.activations is None
        else rank_work(plan, model, counter.work(), slots_bytes=memory.static.optimizer_bytes or 0)
    )
    traffic = step_traffic(plan, model, memory.collectives)
    time = budget = None
    if hardware is not None and work is not None:
        lasting = None if traffic is None else traffic.around(plan.num_steps - 1)
        time = step_time(work, lasting, hardware, plan.components.precision.value)
        devices = _num_hosts(plan) if hardware.whole_host else work.num_devices
        if ends:
            budget = budget_of(
                time,
                num_steps=plan.num_steps,
                num_devices=devices,
                hardware=hardware,
                most_s=plan.stop_after_s or math.inf,
            )
    return Outlook(
        memory=memory,
        traffic=traffic,
        work=work,
        checkpoint_bytes=checkpoint_bytes(plan, model),
        hardware=hardware,
        time=time,
        budget=budget,
    )


def _num_hosts(plan: RunPlan) -> int:
    return 1 if plan.context.launch is None else plan.context.launch.num_hosts


def rank_work(plan: RunPlan, model: nn.Module, shard: Work, *, slots_bytes: int = 0) -> RankWork:
    """Return the work of the busiest rank in a step.

    Args:
        plan: the run, with the choices of its strategy resolved.
        model: the model, with or without data; unchanged.
        shard: forward and backward of a shard.
        slots_bytes: bytes of the optimizer's state on a device.
    """
    strategy, batch = plan.components.strategy, plan.batch
    shards = batch.num_shards(0)
    cut = StepCut(num_shards=shards, num_replicas=plan.num_replicas)
    parts = strategy.replica_parts(model, plan.context)
    names = {name for name, param in model.named_parameters() if param.requires_grad}
    trained = max(sum(size for name, size in part.memory.resident.items() if name in names) for part in parts)
    width = plan.components.precision.master_dtype.itemsize
    slots = round(slots_bytes / max(trained * width, 1))
    components = plan.components
    sample = travelling_bytes(
        components.datasets["train"], components.sample, collates=components.hooks.collate is not None
    )
    share = strategy.work_share(cut)
    return RankWork(
        shard=shard.cut(1 / share.size),
        shards=cut.shards_a_replica * share.operations,
        update=update_work(trained, width=width, slots=slots),
        flops=float(shard.flops) * shards,
        input_bytes=sample * batch.global_size // plan.num_replicas,
        loaders=plan.cfg.loader.num_processes,
        tasks_a_host=max(plan.num_computing // _num_hosts(plan), 1),
        num_devices=max(plan.num_computing, plan.num_replicas * len(parts)),
    )
