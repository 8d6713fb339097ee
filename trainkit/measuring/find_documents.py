"""Content of `trainkit find --json`, for `trainkit schema find_lr` and `find_micro_size`."""

from __future__ import annotations

from typing import Literal, TypedDict

from trainkit.measuring.documents import Machine, SpreadOfTurns


class RateStep(TypedDict):
    """A step of the range test."""

    lr: float
    """The learning rate of this step, after `lr_scaling`."""
    loss: float
    """The loss of the whole step, before its update."""
    smoothed: float
    """The weighted mean of the losses around this step."""


class SuggestedRate(TypedDict):
    """A learning rate that the curve suggests."""

    lr: float
    """The learning rate of the training, after `lr_scaling`."""
    override: str
    """The override with which the training has this peak rate."""


class FindLrDocument(TypedDict):
    """The result of `trainkit find lr`."""

    version: int
    """The version of this document."""
    command: str
    """The command, without secrets."""
    date: str
    """When the test ended, with the time zone."""
    global_size: int
    """Samples per step, for which the rates hold."""
    min_lr: float
    """The learning rate of the first step."""
    max_lr: float
    """The learning rate that the last step would have had."""
    steps: int
    """Steps from `min_lr` to `max_lr`."""
    ended: Literal["diverged", "not_finite", "range"]
    """Why the test ended: the loss diverged, the loss was not finite, or `max_lr` was reached."""
    steepest: SuggestedRate | None
    """The rate at which the smoothed loss falls fastest; null if it does not fall."""
    tenth_of_minimum: SuggestedRate | None
    """A tenth of the rate with the least smoothed loss; null if it does not fall."""
    points: list[RateStep]
    """The steps, in their order."""
    notes: list[str]
    """Notes for the user."""


class TriedSize(TypedDict):
    """A size of a shard."""

    micro_size: int
    """Samples of a shard, at most."""
    accumulation: int
    """Shards that a replica computes in a step, at most."""
    status: Literal["untried", "measured", "out_of_memory", "too_big", "refused", "failed"]
    """Whether the size was measured, or why not."""
    reason: str | None
    """The reason why the size was not measured; null if it was."""
    samples_per_s: SpreadOfTurns | None
    """Samples per second over all replicas."""
    step_s: SpreadOfTurns | None
    """Seconds of a step."""
    peak_bytes: int | None
    """The most memory of a process, in bytes."""
    predicted_bytes: int | None
    """The plan's prediction for all processes of the host together, in bytes; null: no prediction."""


class FindMicroSizeDocument(TypedDict):
    """The result of `trainkit find micro_size`."""

    version: int
    """The version of this document."""
    command: str
    """The command, without secrets."""
    date: str
    """When the measurement ended, with the time zone."""
    machine: Machine
    """The machine of the measurement."""
    global_size: int
    """Samples per step, the same for every size."""
    replicas: int
    """Replicas with shards of their own."""
    rounds: int
    """Turns of each size."""
    sizes: list[TriedSize]
    """The sizes, from the largest."""
    micro_size: int | None
    """The size to use; null: none was measured."""
    overrides: list[str]
    """The overrides with which the training has this size."""
    notes: list[str]
    """Notes for the user."""
