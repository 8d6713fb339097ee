"""Output of `plan --json`, and the plan in a run folder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from typing_extensions import TypedDict


class PlannedTask(TypedDict):
    """One process of the run."""

    task: str
    """Role and number, `worker:0`."""
    rank: int
    """Rank of the task among all tasks."""
    device: str
    """The device of the replica, `cuda:0`; in a launch, the device that a task of this process would have."""


class PlannedBatch(TypedDict):
    """The batch of a step."""

    global_size: int
    """Samples of a step, over all replicas."""
    micro_size: int
    """Samples of a shard, at most."""


class PlannedStage(TypedDict):
    """One part of a replica that spans several devices."""

    stage: int
    """Number of the part, in the order of the model."""
    modules: str
    """Blocks of the part, `embed, blocks.0-5`."""
    num_params: int
    """Number of parameters of the part."""
    device: str
    """Device of the part."""


class PlannedMemory(TypedDict):
    """Bytes on the device with the largest memory use."""

    parameters: int
    """Parameters, and master copies if they are separate."""
    buffers: int
    """Buffers of the model."""
    gradients: int
    """Gradients after backward."""
    exchange: int
    """Copies of the gradients for the exchange, or for the order of summation."""
    gathered: int
    """Parameters and gradients that are gathered temporarily, because the model is sharded."""
    optimizer: int | None
    """State of the optimizer; null if unknown."""
    frozen: int
    """Models that the objective runs but does not train."""
    workspaces: int
    """Workspaces of cuBLAS, of known hardware."""
    staging: int
    """The copy of the state on the host that is written in the background; included in `peak` if the device is the
    CPU.
    """
    activations: int | None
    """Largest sum of batches, tensors saved for backward, outputs and temporary tensors; null if unknown."""
    peak: int | None
    """Peak bytes of a step or an evaluation; null if unknown."""
    step: int | None
    """Peak bytes of a step; null if unknown."""
    evaluation: int | None
    """Peak bytes of an evaluation; null if unknown, or if the run evaluates nothing."""
    moment: Literal["forward", "backward", "exchange", "optimizer step", "evaluation"] | None
    """The part of a step with the peak, or the evaluation; null if unknown."""
    checkpoint: int
    """Bytes while a checkpoint is copied; includes the copy on the CPU with `checkpoint.background`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRemedy:
    """A change with which the run fits."""

    overrides: str
    """Arguments to add to the command line."""
    price: str
    """Cost of the change, in words."""
    needs: int
    """Bytes that the device with the largest memory use then needs."""
    fits: bool
    """Whether that is enough."""


class PlannedTransfer(TypedDict):
    """Data that the ranks send each other in a step."""

    what: str
    """Kind of data: gradients, parameters, activations ..."""
    how: str
    """The collective or kind of message."""
    bytes: int
    """Bytes of all ranks together."""
    messages: int
    """Number of messages, one after another."""
    overlaps: bool
    """Whether the ranks compute during the transfer."""
    first_step: int
    """The first step with this transfer."""
    end_step: int | None
    """The first step without it; null: it does not end."""
    every: int
    """Interval in steps between two transfers: 1, except for averages of `local_sgd`."""


class PlannedTraffic(TypedDict):
    """The bytes of a full step, of all ranks."""

    links: dict[str, int]
    """Kind of link -> bytes of a step on average."""
    transfers: list[PlannedTransfer]
    """The transfers of a step."""


class PlannedWork(TypedDict):
    """The operations of a step, and the size of a checkpoint."""

    flops: float | None
    """Floating-point operations of a step, over all replicas; null if unknown."""
    checkpoint_bytes: int
    """Bytes of one checkpoint."""


class PlannedTime(TypedDict):
    """Times on the hardware of the plan."""

    step_s: float | None
    """Seconds of a step, the middle of the band; null if unknown."""
    low_s: float | None
    """The lower bound of the band; null if unknown."""
    high_s: float | None
    """The upper bound of the band; null if unknown."""
    shares: dict[str, float] | None
    """Share of the step for compute, memory, host, exchange and input; null if unknown."""
    mfu: float | None
    """Share of the peak rate of the devices that the operations of the model reach; null if unknown."""
    total_h: float | None
    """Hours to the end; null if unknown."""


class PlannedCost(TypedDict):
    """The cost to the end."""

    total: float | None
    """Cost, the middle of the band; null if unknown."""
    currency: str
    """The currency, `USD`."""
    device_h: float | None
    """Hours of all devices together; null if unknown."""


class Plan(TypedDict):
    """Output of `trainkit plan --json`."""

    version: Literal[1]
    """Version of this document."""
    name: str
    """The name of the run."""
    num_params: int
    """Parameters of the model, trained or not."""
    tasks: list[PlannedTask]
    """The processes, by rank."""
    replicas: int
    """Replicas that compute their own shards."""
    fingerprint: str
    """SHA-256 of the keys that affect the result."""
    bubble: float | None
    """Share of a step that each stage waits, with equal stages; null without stages."""
    batch: PlannedBatch
    """The batch of a step."""
    steps: int | None
    """Steps of the training; null if they depend on an unknown length of the data."""
    stages: list[PlannedStage]
    """The parts of a replica that spans several devices."""
    memory: PlannedMemory
    """Bytes on the device with the largest memory use."""
    fits: bool | None
    """Whether the run fits into the memory of the hardware; null if unknown."""
    remedies: list[PlannedRemedy]
    """Changes with which the run fits, if it does not."""
    traffic: PlannedTraffic | None
    """Bytes that the ranks send in a step; null if unknown."""
    work: PlannedWork
    """The operations of a step."""
    time: PlannedTime
    """Times on the hardware."""
    cost: PlannedCost
    """The cost to the end."""
    hardware: str | None
    """The name of the hardware; null without `hardware`."""
    notes: list[str]
    """Remarks of the plan."""


class RunPlan(TypedDict):
    """`RUN/plan.json`: the plan of a run of 20 steps or more. Later versions add keys and remove none."""

    version: Literal[1]
    """Version of this document."""
    memory: PlannedMemory
    """Bytes on the device with the largest memory use."""
    traffic: PlannedTraffic | None
    """Bytes that the ranks send in a step; null if unknown."""
    work: PlannedWork
    """The operations of a step."""
    time: PlannedTime
    """Times on the hardware."""
    cost: PlannedCost
    """The cost to the end."""
    hardware: str | None
    """The name of the hardware; null without `hardware`."""
