"""What `explain`, `ls`, `top` and `diff` write with `--json`."""

from __future__ import annotations

from typing import Any, Literal, TypedDict

Effect = Literal["maths", "placement", "speed", "cosmetic"]


class ExplainedKey(TypedDict):
    """One key of a config that holds no further keys."""

    key: str
    """The key with its groups, `batch.micro_size`."""
    value: Any
    """Its value in this composition; secrets are redacted."""
    set_by: str
    """The place that set it: `command line`, `FILE:LINE`, or an empty text for the default."""
    type: str
    """The accepted values, in words."""
    unit: str
    """The unit of a quantity; `none` for a key that holds no quantity."""
    default: Any
    """The value without any setting; null if it is required."""
    required: bool
    """Whether the user must give it."""
    meaning: str
    """Its documentation, in one line."""
    tag: Effect
    """What changing it can affect."""


class Explanation(TypedDict):
    """What `trainkit explain KEY --json` writes."""

    version: Literal[1]
    """Version of this document."""
    key: str
    """The key that was asked for: one key, or a group or section of keys."""
    choice: str | list[str] | None
    """The choice of a group; null for any other key."""
    meaning: str
    """Documentation of the key that was asked for."""
    keys: list[ExplainedKey]
    """The key, or every key below it."""
    notes: list[str]
    """Remarks of the composition that concern the key."""


class ListedChoice(TypedDict):
    """One choice of a group."""

    group: str
    """The group, `strategy`."""
    name: str
    """The choice, `mirrored`."""
    description: str
    """The first comment of its file."""
    file: str
    """The YAML file."""
    target: str | None
    """The class that it names; null for one without."""


class ListedRun(TypedDict):
    """One run folder."""

    folder: str
    """The run folder."""
    state: str
    """What the run does, as the list shows it."""
    note: str
    """A remark on the state; empty without one."""
    step: int | None
    """Steps done; null if unknown."""
    resumable: bool
    """Whether a checkpoint is there to continue from."""
    updated: float | None
    """Seconds since 1970 of the last change; null if unknown."""
    process: str
    """Where its process runs; empty if it has none."""


class Listing(TypedDict):
    """What `trainkit ls --json` writes."""

    version: Literal[1]
    """Version of this document."""
    choices: list[ListedChoice]
    """The choices that were asked for; empty in a list of runs."""
    text: str | None
    """The YAML text of one choice, without secrets; null if several were asked for."""
    runs: list[ListedRun]
    """The runs of a folder, the most recently updated first; empty in a list of choices."""


class RankedRun(TypedDict):
    """One run of a leaderboard."""

    rank: int
    """Its place, from 1."""
    job: str
    """Its number in the sweep, or the name of its folder."""
    status: str
    """How it ended: `finished`, `pruned`, `stopped`, `failed` ..."""
    folder: str
    """The run folder."""
    value: float | None
    """Its value of the metric; null if it has none."""
    metrics: dict[str, float | None]
    """Every final metric; null for one that is not finite."""
    steps: int | None
    """Its updates; null if unknown."""
    seconds: float | None
    """Seconds of training alone; null if unknown."""
    overrides: list[str]
    """The overrides that distinguish it from the other runs; secrets are redacted."""


class Ranking(TypedDict):
    """What `trainkit top DIR --json` writes."""

    version: Literal[1]
    """Version of this document."""
    metric: str
    """The metric that orders the runs."""
    mode: Literal["min", "max"]
    """Whether lower or higher values are better."""
    total: int
    """Runs of the folder, shown or not."""
    runs: list[RankedRun]
    """The best runs, best first."""
    remarks: list[str]
    """What the order does not show."""


class ChangedKey(TypedDict):
    """One key in which two runs differ."""

    key: str
    """The key with its groups."""
    left: Any
    """Its value in the first run; null if it has no such key."""
    right: Any
    """Its value in the second run; null if it has no such key."""
    tag: Effect
    """What the difference can affect."""


class Comparison(TypedDict):
    """What `trainkit diff RUN RUN --json` writes."""

    version: Literal[1]
    """Version of this document."""
    differences: list[ChangedKey]
    """The differences; differences that can change the result come first."""
    can_change_result: int
    """How many of them can change the result."""


class ListedLayer(TypedDict):
    """One layer of a model."""

    name: str
    """Its name in the model."""
    kind: str
    """The name of its class."""
    output: list[int] | None
    """Shape of the first tensor that it returns; null if unknown."""
    parameters: int
    """Elements of its own parameters."""
    trained: int
    """Those of them that the training changes."""
    calls: int
    """Calls in one forward pass."""
    flops: int | None
    """Floating-point operations of these calls; null if unknown."""


class ListedModel(TypedDict):
    """What `trainkit ls --model --json` writes."""

    version: Literal[1]
    """Version of this document."""
    batch: int
    """Samples of the batch that the shapes and operations are of."""
    parameters: int
    """Elements of all parameters, a shared one once."""
    trained: int
    """Those of them that the training changes."""
    flops: int | None
    """Floating-point operations of a forward pass; null if it cannot run without data."""
    note: str
    """Why there are no shapes and operations; empty if there are."""
    layers: list[ListedLayer]
    """The layers, in the order of their definition."""
