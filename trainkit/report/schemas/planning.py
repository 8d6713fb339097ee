"""What `plan` writes with `--json`, and the plan in a run folder."""

from __future__ import annotations

from typing import Literal, TypedDict


class PlannedTask(TypedDict):
    """One process of the run."""

    task: str
    """Role and number, `worker:0`."""
    rank: int
    """Its number among all tasks."""
    device: str
    """The device of its replica, `cuda:0`; in a launch, the one that a task of this process would have."""


class PlannedBatch(TypedDict):
    """The batch of a step."""

    global_size: int
    """Samples of a step, over all replicas."""
    micro_size: int
    """Samples of a shard, at most."""


class PlannedStage(TypedDict):
    """One part of a replica that spans several devices."""

    stage: int
    """Its number, in the order of the model."""
    modules: str
    """Its blocks, `embed, blocks.0-5`."""
    num_params: int
    """Its parameters."""
    device: str
    """Its device."""


class PlannedMemory(TypedDict):
    """Bytes on the fullest device."""

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
    """Models that the objective reads and does not train."""
    staging: int
    """The copy of the state on the host that is written in the background; in `peak` where the device is the CPU."""
    activations: int | None
    """Batches, what backward needs, outputs and temporary tensors, when they are most; null if unknown."""
    peak: int | None
    """The most bytes at any moment of a step; null if unknown."""
    moment: Literal["forward", "backward", "exchange", "optimizer step"] | None
    """The part of a step with the peak; null if unknown."""
    checkpoint: int
    """Bytes while a checkpoint is copied; on the CPU with `checkpoint.background`, with the copy."""


class PlannedRemedy(TypedDict):
    """A change with which the run fits."""

    overrides: str
    """What to add to the command line."""
    price: str
    """What it costs, in words."""
    needs: int
    """Bytes that the fullest device then needs."""
    fits: bool
    """Whether that is enough."""


class PlannedTransfer(TypedDict):
    """What the ranks send each other in a step."""

    what: str
    """What is sent: gradients, parameters, activations ..."""
    how: str
    """By which collective or message."""
    bytes: int
    """Bytes of all ranks together."""
    messages: int
    """Number of messages, one after another."""
    overlaps: bool
    """Whether the ranks compute meanwhile."""
    first_step: int
    """The first step with it."""
    end_step: int | None
    """The step before which it ends; null: it does not."""
    every: int
    """Only the last of so many steps has it: 1, but for averages of `local_sgd`."""


class PlannedTraffic(TypedDict):
    """The bytes of a full step, of all ranks."""

    links: dict[str, int]
    """Kind of link -> bytes of a step on average."""
    transfers: list[PlannedTransfer]
    """What is sent, and how."""


class PlannedWork(TypedDict):
    """What a step computes, and what a checkpoint holds."""

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
    """The middle of the band; null if unknown."""
    currency: str
    """The currency, `USD`."""
    device_h: float | None
    """Hours of all devices together; null if unknown."""


class Plan(TypedDict):
    """What `trainkit plan --json` writes."""

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
    """Bytes on the fullest device."""
    fits: bool | None
    """Whether the run fits into the memory of the hardware; null if unknown."""
    remedies: list[PlannedRemedy]
    """What makes it fit, if it does not."""
    traffic: PlannedTraffic | None
    """Bytes that the ranks send in a step; null if unknown."""
    work: PlannedWork
    """What a step computes."""
    time: PlannedTime
    """Times on the hardware."""
    cost: PlannedCost
    """The cost to the end."""
    hardware: str | None
    """The name of the hardware; null without `hardware`."""
    notes: list[str]
    """Remarks of the plan."""


class RunPlan(TypedDict):
    """`RUN/plan.json`: what was planned, for a run of 20 steps or more. Later versions add keys and remove none."""

    version: Literal[1]
    """Version of this document."""
    memory: PlannedMemory
    """Bytes on the fullest device."""
    traffic: PlannedTraffic | None
    """Bytes that the ranks send in a step; null if unknown."""
    work: PlannedWork
    """What a step computes."""
    time: PlannedTime
    """Times on the hardware."""
    cost: PlannedCost
    """The cost to the end."""
    hardware: str | None
    """The name of the hardware; null without `hardware`."""
