"""What `trainkit scale --json` writes, for `trainkit schema scale` and `trainkit schema scale_simulate`."""

from __future__ import annotations

from typing import Literal, TypedDict

from trainkit.scaling.answers import Remedy
from trainkit.scaling.inputs import Origin
from trainkit.scaling.model import Interval
from trainkit.scaling.study import CheckpointRow, ReplicasRow, ServersRow, SparesRow


class InputValue(TypedDict):
    """One input of a prediction or simulation."""

    value: float
    """Its value, in its unit."""
    unit: str | None
    """The unit; null for a number without one."""
    origin: Origin
    """Where the value comes from."""


class MeasuredShare(TypedDict):
    """One replica, alone, with a share of a step."""

    what: str
    """Samples of the share, and threads."""
    step_s: Interval
    """Seconds of a step: median, least and most of the turns."""


class CheckedPoint(TypedDict):
    """A measured number of replicas beside its prediction from the smaller ones."""

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
    """What so many replicas bring."""

    replicas: int
    """Replicas."""
    step_s: float
    """Seconds of a step."""
    parts_s: dict[str, float]
    """These seconds by what takes them."""
    samples_per_s: Interval
    """Samples per second of all replicas."""
    speedup: Interval
    """Samples per second by those of one replica."""
    efficiency: float
    """Speed-up by replica."""
    cost_per_million: float | None
    """Price of a million samples; null where nothing has a price."""


class Binding(TypedDict):
    """What costs the most, beside computing."""

    at_replicas: int
    """The number of replicas at which it does."""
    what: str
    """The part of a step."""
    share: float
    """Its share of a step."""


class ScaleDocument(TypedDict):
    """What `trainkit scale OVERRIDES --json` and `scale.json` hold."""

    version: Literal[1]
    """Version of this document."""
    to_replicas: int
    """The target."""
    seed: int
    """Seed of the intervals."""
    inputs: dict[str, InputValue]
    """What was not measured, by name."""
    measured: list[MeasuredShare]
    """What one replica measured."""
    checks: list[CheckedPoint]
    """Measured numbers of replicas; empty where this machine measures one alone."""
    predictions: list[PredictedPoint]
    """By replicas, up to the target."""
    knee: Interval
    """The last number of replicas up to which each further one brings at least half of the first."""
    use_one_device: bool
    """Whether not even the second replica does."""
    binds: Binding
    """What binds at twice the knee."""
    remedies: list[Remedy]
    """Changes that help there, the best first."""
    servers_needed: int | None
    """Parameter servers whose links are no wall at the target; null without servers, or where none suffice."""
    notes: list[str]
    """Remarks for the user."""


class SimulatedAnswers(TypedDict):
    """What was simulated."""

    replicas: list[ReplicasRow]
    """Synchronous steps with an all-reduce."""
    spares: list[SparesRow]
    """Synchronous steps that do not wait for the slowest."""
    servers: list[ServersRow]
    """Asynchronous updates with equal workers, by the number of servers."""
    policies: list[ServersRow]
    """The same with a tenth of the workers twice as slow, by what is done about stale gradients."""
    servers_needed: int | None
    """Servers at which their links are no wall; null: more than were tried."""
    checkpoints: list[CheckpointRow]
    """Intervals between checkpoints."""
    mtbf_s: float
    """Mean seconds between two failures of the whole run."""
    best_spares: int
    """Spares of the most samples per second."""
    best_checkpoint_s: float
    """Seconds between two checkpoints by Daly's formula."""


class SimulationDocument(TypedDict):
    """What `trainkit scale --simulate --json` writes."""

    version: Literal[1]
    """Version of this document."""
    to_replicas: int
    """The target."""
    seed: int
    """Seed of the simulation."""
    inputs: dict[str, InputValue]
    """The inputs, by name."""
    simulation: SimulatedAnswers
    """The answers."""
