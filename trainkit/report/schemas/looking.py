"""Outputs of `explain`, `ls`, `top`, `diff`, `compare`, `capabilities` and `advise` with `--json`, and of an error."""

from __future__ import annotations

from typing import Any, Literal

from typing_extensions import TypedDict

Effect = Literal["maths", "placement", "speed", "cosmetic"]


class ExplainedKey(TypedDict):
    """One key of a config that holds no further keys."""

    key: str
    """The key with its groups, `batch.micro_size`."""
    value: Any
    """Value of the key in this composition; secrets are redacted."""
    set_by: str
    """The place that set it: `command line`, `FILE:LINE`, or an empty text for the default."""
    type: str
    """The accepted values, in words."""
    unit: str
    """The unit of a quantity; `none` for a key that holds no quantity."""
    default: Any
    """The value without any setting; null if it is required."""
    required: bool
    """Whether the user must give the key."""
    meaning: str
    """Documentation of the key, in one line."""
    tag: Effect
    """The effect that changing the key can have."""


class Explanation(TypedDict):
    """Output of `trainkit explain KEY --json`."""

    version: Literal[1]
    """Version of this document."""
    key: str
    """The requested key: one key, or a group or section of keys."""
    choice: str | list[str] | None
    """The choice of a group; null for any other key."""
    meaning: str
    """Documentation of the requested key."""
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
    """The first comment of the YAML file."""
    file: str
    """The YAML file."""
    target: str | None
    """The class that it names; null if it names none."""


class ListedRun(TypedDict):
    """One run folder."""

    folder: str
    """The run folder."""
    state: str
    """The state of the run, as the list shows it."""
    note: str
    """Note on the state; may be empty."""
    step: int | None
    """Steps done; null if unknown."""
    resumable: bool
    """Whether there is a checkpoint to continue from."""
    updated: float | None
    """Seconds since 1970 of the last change; null if unknown."""
    process: str
    """Location of the process of the run; empty if it has none."""


class Listing(TypedDict):
    """Output of `trainkit ls --json`."""

    version: Literal[1]
    """Version of this document."""
    choices: list[ListedChoice]
    """The requested choices; empty in a list of runs."""
    text: str | None
    """The YAML text of one choice, without secrets; null if several were requested."""
    runs: list[ListedRun]
    """The runs of a folder, the most recently updated first; empty in a list of choices."""


class RankedRun(TypedDict):
    """One run of a leaderboard."""

    rank: int
    """Rank of the run, from 1."""
    job: str
    """Number of the job in the sweep, or the name of its folder."""
    status: str
    """End of the run: `finished`, `pruned`, `stopped`, `failed` ..."""
    folder: str
    """The run folder."""
    value: float | None
    """Value of the metric, over several runs the mean; null if the run has none."""
    spread: float | None
    """Standard deviation of the metric over runs that differ in seed or fold alone; null for a single run."""
    num_runs: int
    """Number of these runs."""
    metrics: dict[str, float | None]
    """Every final metric; null for one that is not finite."""
    steps: int | None
    """Updates of the run; null if unknown."""
    seconds: float | None
    """Seconds of training only; null if unknown."""
    overrides: list[str]
    """The overrides that distinguish the run from the others; secrets are redacted."""


class Ranking(TypedDict):
    """Output of `trainkit top DIR --json`."""

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
    """Facts that the order does not show."""


class ChangedKey(TypedDict):
    """One key in which two runs differ."""

    key: str
    """The key with its groups."""
    left: Any
    """Value of the key in the first run; null if it has no such key."""
    right: Any
    """Value of the key in the second run; null if it has no such key."""
    tag: Effect
    """The effect that the difference can have."""


class Comparison(TypedDict):
    """Output of `trainkit diff RUN RUN --json`."""

    version: Literal[1]
    """Version of this document."""
    differences: list[ChangedKey]
    """The differences; differences that can change the result come first."""
    can_change_result: int
    """Number of differences that can change the result."""


class ComparedSide(TypedDict):
    """One side of a comparison."""

    name: str
    """The folder or the overrides, as given."""
    folder: str
    """The folder of its runs."""
    state: str
    """Hash of config, sources, data, package versions and threads of its runs; empty if not recorded."""
    diverged: int
    """Runs that diverged or failed; their pairs do not count."""


class ComparedPair(TypedDict):
    """The two runs of one seed."""

    seed: int
    """The seed."""
    a: float | None
    """Metric of A, over folds the mean; null if it diverged."""
    b: float | None
    """Metric of B."""
    sha256_a: list[str]
    """SHA-256 of the weights of A, one for each fold."""
    sha256_b: list[str]
    """SHA-256 of the weights of B."""


class PairedComparison(TypedDict):
    """Output of `trainkit compare A B --json`, and a line of outputs/comparisons.jsonl."""

    version: Literal[1]
    """Version of this document."""
    time: str
    """End of the comparison, ISO 8601."""
    a: ComparedSide
    """The side that is compared with."""
    b: ComparedSide
    """The side that is judged."""
    differences: list[ChangedKey]
    """Keys in which they differ, without the seed; those that can change the result come first."""
    metric: str
    """The metric."""
    mode: Literal["min", "max"]
    """Whether lower or higher values are better."""
    answer: str
    """better, worse, the same, the same bits, the same within DELTA, or not distinguishable yet."""
    difference: float | None
    """Mean of B - A; null without a pair that counts."""
    interval: list[float | None]
    """Bounds of that mean; null: none."""
    alpha: float
    """Bound on the probability that the interval, at any time, misses the mean."""
    more_pairs: int | None
    """Pairs that are missing if mean and deviation stay as they are; null: more than the budget, or unknown."""
    pairs: list[ComparedPair]
    """The pairs, by seed."""
    gain_of_pairing: float | None
    """Variance of a difference of unequal seeds over that of a pair; null with fewer than 4 pairs."""
    unpaired: list[str]
    """Why runs of one seed begin differently; empty if they do not."""
    remarks: list[str]
    """What weakens the answer, or gives its reason."""
    seconds: float
    """Seconds of training of the runs of all pairs."""
    line: str
    """The answer in one line."""


class Comparisons(TypedDict):
    """Output of `trainkit compare --json`: the ledger."""

    version: Literal[1]
    """Version of this document."""
    comparisons: list[PairedComparison]
    """The comparisons that were made here, the first one first."""


class Capability(TypedDict):
    """What a strategy answers to a feature."""

    feature: str
    """The feature, as in docs/features.md."""
    strategy: str
    """The strategy, or an axis of the mesh."""
    supported: bool | None
    """Whether a run with both is planned; null: the strategy, or its model, has no such key."""
    reason: str | None
    """The message that refuses it; null if it is planned."""


class Capabilities(TypedDict):
    """Output of `trainkit capabilities --json`."""

    version: Literal[1]
    """Version of this document."""
    strategies: dict[str, list[str]]
    """Strategy -> the arguments with which it was planned."""
    features: dict[str, list[str]]
    """Feature -> its arguments."""
    capabilities: list[Capability]
    """One for each feature and strategy."""


class FirstDifference(TypedDict):
    """The first metric of a replay that is another."""

    step: int
    """The step of the row."""
    name: str
    """The metric."""
    recorded: float | None
    """Its value in the run; null for one that is not finite."""
    replayed: float | None
    """Its value in the replay."""


class Replay(TypedDict):
    """Output of `trainkit replay RUN --json`."""

    version: Literal[1]
    """Version of this document."""
    run: str
    """Folder of the run."""
    folder: str
    """Folder of the replay."""
    same: bool
    """Whether the weights and all metrics in common are the same bits."""
    steps: int
    """Updates of both."""
    rows: int
    """Number of rows of metrics about the same steps."""
    weights_sha256: str
    """Hash of the weights of the run."""
    replayed_sha256: str
    """Hash of the weights of the replay."""
    first: FirstDifference | None
    """The first difference; null if all metrics are equal."""
    differing: list[str]
    """What is known to differ between the place of the run and this one: versions, hardware, threads, sources."""


class AdvisedWay(TypedDict):
    """One way to train."""

    overrides: list[str]
    """Arguments to add to the command line."""
    command: str
    """The command that plans it."""
    reason: str
    """Why it is the best way, or why it is not."""
    fits: bool | None
    """Whether it fits into the memory; null if its plan is refused or its activations are unknown."""
    needs: int | None
    """Bytes that the device with the largest share needs."""
    devices: int | None
    """Number of devices that train."""
    step_s: float | None
    """Seconds of a step, the middle of the plan's band."""
    cost: float | None
    """US dollars to the end of the training; null without a price."""


class AdviceDocument(TypedDict):
    """Output of `trainkit advise --json`."""

    version: Literal[1]
    """Version of this document."""
    goal: Literal["time", "cost", "memory"]
    """The goal by which the ways are ranked."""
    hardware: str
    """The device that is planned for."""
    devices: int
    """Largest number of devices."""
    best: AdvisedWay | None
    """The best way; null if none can be chosen."""
    runner_up: AdvisedWay | None
    """The second best."""
    ways: list[AdvisedWay]
    """All ways: the ranking, then the ways that cannot be chosen."""


class ToldProblem(TypedDict):
    """One problem of a config."""

    key: str
    """The key, or another subject: an argument, a file."""
    value: str | None
    """Its value as YAML; null if the key itself is the problem. Secrets are redacted."""
    rule: str
    """The violated rule, and the remedy."""
    origin: str
    """The place that set it: `command line`, `FILE:LINE`; empty if unknown."""


class ErrorDocument(TypedDict):
    """Output of any verb with `--json` that ends with an error; standard error has the same as text."""

    version: Literal[1]
    """Version of this document."""
    error: str
    """Class of the error in `trainkit.errors`."""
    exit_code: int
    """Exit code of the command."""
    message: str
    """The error as text."""
    problems: list[ToldProblem]
    """All problems of a config; empty for other errors."""
    sections: list[str]
    """`trainkit explain errors.SECTION` explains it."""
