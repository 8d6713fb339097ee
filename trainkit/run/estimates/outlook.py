"""Predict a run from its plan: traffic, work, the time of a step, hours and cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from trainkit.data.stored import travelling_bytes
from trainkit.files import num_bytes
from trainkit.run.estimates.hardware import Hardware, hardware_of
from trainkit.run.estimates.memory import DeviceMemory, device_memory
from trainkit.run.estimates.step_time import (
    Budget,
    RankWork,
    StepTime,
    Work,
    WorkCounter,
    budget_of,
    rows_of,
    step_time,
    update_work,
)
from trainkit.run.estimates.traffic import Traffic, step_traffic
from trainkit.run.planning.memory import checkpoint_bytes
from trainkit.run.planning.plan import RunPlan
from trainkit.strategies.traffic import StepCut, work_share


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
        if self.time is not None:
            yield from rows_of(self.time, self.budget)

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
        else rank_work(plan, model, counter.work(), slots_bytes=memory.held.optimizer_bytes or 0)
    )
    traffic = step_traffic(plan, model, memory.collectives)
    time = budget = None
    if hardware is not None and work is not None:
        lasting = None if traffic is None else traffic.around(plan.num_steps - 1)
        time = step_time(work, lasting, hardware, plan.components.precision.value)
        devices = _num_hosts(plan) if hardware.whole_host else work.num_devices
        if ends:
            budget = budget_of(time, num_steps=plan.num_steps, num_devices=devices, hardware=hardware)
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
    parts = strategy.replica_parts(model, plan.context, num_shards=cut.shards_a_replica)
    names = {name for name, param in model.named_parameters() if param.requires_grad}
    trained = max(sum(size for name, size in part.memory.resident.items() if name in names) for part in parts)
    width = plan.components.precision.master_dtype.itemsize
    slots = round(slots_bytes / max(trained * width, 1))
    components = plan.components
    sample = travelling_bytes(
        components.datasets["train"], components.sample, collates=components.hooks.collate is not None
    )
    share = work_share(strategy, cut)
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
