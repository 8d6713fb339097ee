"""Output of `trainkit scale --json`, for `trainkit schema scale` and `trainkit schema scale_simulate`."""

from __future__ import annotations

from typing import Literal, TypedDict

from trainkit.scaling.answers import Remedy
from trainkit.scaling.inputs import Origin
from trainkit.scaling.model import Interval
from trainkit.scaling.study import CheckpointRow, ReplicasRow, ServersRow, SparesRow


class InputValue(TypedDict):
    """One input of a prediction or simulation."""

    value: float
    """Value of the input, in its unit."""
    unit: str | None
    """The unit; null for a number without one."""
    origin: Origin
    """Origin of the value."""


class MeasuredShare(TypedDict):
    """One replica, alone, with a share of a step."""

    what: str
    """Samples of the share, and threads."""
    step_s: Interval
    """Seconds of a step: median, least and most of the turns."""


class CheckedPoint(TypedDict):
    """A measured number of replicas, and its prediction from the smaller ones."""

    replicas: int
    """Replicas that were measured together."""
    predicted_s: Interval
    """Predicted seconds of a step."""
    measured_s: float
    """Measured seconds of a step, the median."""
    error: float
    """Relative error of the prediction."""
    inside: bool
    """Whether the measurement lies in the predicted interval."""


class PredictedPoint(TypedDict):
    """The prediction for one number of replicas."""

    replicas: int
    """Number of replicas."""
    step_s: float
    """Seconds of a step."""
    parts_s: dict[str, float]
    """The seconds of a step by part."""
    samples_per_s: Interval
    """Samples per second of all replicas."""
    speedup: Interval
    """Samples per second divided by those of one replica."""
    efficiency: float
    """Speed-up divided by the number of replicas."""
    cost_per_million: float | None
    """Price of a million samples; null if there is no price."""


class Binding(TypedDict):
    """The bottleneck other than computing."""

    at_replicas: int
    """The number of replicas at which it is the bottleneck."""
    what: str
    """The part of a step."""
    share: float
    """Share of a step."""


class ScaleDocument(TypedDict):
    """Content of `trainkit scale OVERRIDES --json` and `scale.json`."""

    version: Literal[1]
    """Version of this document."""
    to_replicas: int
    """The target number of replicas."""
    seed: int
    """Seed of the intervals."""
    inputs: dict[str, InputValue]
    """Values that were not measured, by name."""
    measured: list[MeasuredShare]
    """Measurements of one replica."""
    checks: list[CheckedPoint]
    """Measured numbers of replicas; empty if this machine can measure only one."""
    predictions: list[PredictedPoint]
    """By replicas, up to the target."""
    knee: Interval | None
    """The last number of replicas up to which each further one adds at least half of the speed of the first. It and the
    other answers are null if a check lies outside its interval.
    """
    use_one_device: bool | None
    """Whether not even the second replica adds that much."""
    binds: Binding | None
    """The bottleneck at twice the knee."""
    remedies: list[Remedy]
    """Changes that help there, the best first."""
    servers_needed: int | None
    """Parameter servers whose links do not limit the target; null without servers, or if no number suffices."""
    notes: list[str]
    """Remarks for the user."""


class SimulatedAnswers(TypedDict):
    """Results of a simulation."""

    replicas: list[ReplicasRow]
    """Synchronous steps with an all-reduce."""
    spares: list[SparesRow]
    """Synchronous steps that do not wait for the slowest."""
    servers: list[ServersRow]
    """Asynchronous updates with equal workers, by the number of servers."""
    policies: list[ServersRow]
    """The same with a tenth of the workers twice as slow, by policy for stale gradients."""
    servers_needed: int | None
    """Number of servers at which their links are no limit; null: more than were tried."""
    checkpoints: list[CheckpointRow]
    """Intervals between checkpoints."""
    mtbf_s: float
    """Mean seconds between two failures of the whole run."""
    best_spares: int
    """Number of spares with the most samples per second."""
    best_checkpoint_s: float
    """Seconds between two checkpoints by Daly's formula."""


class SimulationDocument(TypedDict):
    """Output of `trainkit scale --simulate --json`."""

    version: Literal[1]
    """Version of this document."""
    to_replicas: int
    """The target number of replicas."""
    seed: int
    """Seed of the simulation."""
    inputs: dict[str, InputValue]
    """The inputs, by name."""
    simulation: SimulatedAnswers
    """The answers."""
