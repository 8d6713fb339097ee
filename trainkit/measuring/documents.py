"""Content of `trainkit bench --json` and `trainkit find --json`, and of the files that they write."""

from __future__ import annotations

from typing import Literal

from typing_extensions import TypedDict

from trainkit.measuring.bench import Spread, Target


class PartsOfRank(TypedDict):
    """Seconds of the parts of all measured steps of a turn, on one rank."""

    input: float
    """Waiting for the batch."""
    forward: float
    """The forward passes."""
    backward: float
    """The backward passes."""
    exchange: float
    """Summing the gradients after backward, and waiting for other ranks."""
    update: float
    """Updating the parameters."""


class PartsOfStep(TypedDict):
    """Seconds of the parts of a step, the mean over the ranks."""

    input: Spread | None
    """Waiting for the batch."""
    forward: Spread | None
    """The forward passes."""
    backward: Spread | None
    """The backward passes."""
    exchange: Spread | None
    """Summing the gradients after backward, and waiting for other ranks."""
    update: Spread | None
    """Updating the parameters."""
    rest: Spread | None
    """Time that belongs to no part: the loop, the log, agreement between ranks."""


class Reached(TypedDict):
    """The moment at which a training reached the result of `--until`."""

    seconds: float
    """Seconds of training until then, without evaluations."""
    steps: int
    """Updates until then."""
    samples: int
    """Samples used until then."""
    value: float
    """Value of the metric."""


class MeasuredTurn(TypedDict):
    """The measurement of one turn."""

    steps: int
    """Measured steps."""
    samples: int
    """Samples of these steps, over all replicas."""
    seconds: float
    """Seconds of these steps."""
    targets: float
    """Targets of these steps (tokens of a language model), or their weight."""
    joules: float | None
    """Energy of the devices in these steps, in joules; null if no device reports it."""
    ranks: list[PartsOfRank]
    """The parts of these steps on each rank."""
    peak_bytes: int
    """The most memory of a process, in bytes."""
    began_at: float
    """When the first step began, in seconds since the epoch."""
    first_step_s: float
    """Seconds of the first step."""
    step_spread: float
    """Standard deviation of single steps divided by their median, on rank 0; 0 if there were too few steps."""
    compile_s: float
    """Seconds in which torch.compile worked."""
    replicas: int
    """Replicas with shards of their own."""
    device: str
    """cpu or cuda."""
    until: Reached | None
    """The moment at which the result of `--until` was reached; null if it was not, or without `--until`."""
    metric: float | None
    """The last value of the metric of `--until`."""
    trained_s: float
    """Seconds of training of the whole turn."""
    trained_steps: int
    """Updates of the whole turn."""


class MeasuredChoice(TypedDict):
    """One choice."""

    label: str
    """The arguments that distinguish the choice from the others; with --data, its number of workers."""
    status: Literal["measured", "failed"]
    """Whether a turn failed."""
    failure: str | None
    """Reason of the failure; null if no turn failed."""
    replicas: int | None
    """Replicas with shards of their own."""
    device: str | None
    """cpu or cuda."""
    steps: int | None
    """Measured steps of a turn."""
    samples_per_s: Spread | None
    """Samples per second over all replicas."""
    targets_per_s: Spread | None
    """Targets per second; null if each sample is one target."""
    step_s: Spread | None
    """Seconds of a step."""
    parts_s: PartsOfStep
    """Seconds of the parts of a step."""
    peak_bytes: int | None
    """The most memory of a process, in bytes."""
    start_s: Spread | None
    """Seconds from the start of the process to the first step."""
    first_step_s: Spread | None
    """Seconds of the first step."""
    compile_s: Spread | None
    """Seconds in which torch.compile worked."""
    cold_start_s: float | None
    """Seconds to the first step in the turn before the first round; null if there was none."""
    joules_per_sample: Spread | None
    """Energy of the devices per sample, in joules; null if no device reports it."""
    until_s: Spread | None
    """Seconds of training to the result of --until; null if a turn has not reached it, or without --until."""
    turns: list[MeasuredTurn]
    """The turns that count."""


class Machine(TypedDict):
    """The machine of the measurement."""

    system: str
    """The operating system."""
    processor: str
    """Name of the processor."""
    cores: int
    """Cores that trainkit may use."""
    gpus: list[str]
    """The names of its GPUs."""
    packages: dict[str, str]
    """Versions of packages, by name."""


class DataVerdict(TypedDict):
    """The verdict of --data."""

    bound_by: Literal["loader", "model"]
    """The bottleneck of the training."""
    num_workers: int
    """The loader.num_workers to use."""
    reason: str
    """The number of workers and the reason for it, in words."""


class BenchDocument(TypedDict):
    """The result of `trainkit bench`."""

    version: int
    """The version of this document."""
    command: str
    """The command, without secrets."""
    date: str
    """When the measurement ended, with the time zone."""
    machine: Machine
    """The machine of the measurement."""
    rounds: int
    """Turns of each choice."""
    until: Target | None
    """The requested result; null without --until."""
    choices: list[MeasuredChoice]
    """The choices, in the order of the command."""
    notes: list[str]
    """Notes for the user."""
    data: DataVerdict | None
    """The verdict of --data; null without."""


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
    samples_per_s: Spread | None
    """Samples per second over all replicas."""
    step_s: Spread | None
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
