"""The schema of a run: what `resolved.yaml` holds and every process reads.

Run-level keys are fields here, with type, limits, tag and a line of documentation. A group (`model`, `data`, ...) stays
a plain mapping: the class behind its `_target_` is its schema.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from trainkit.config.values import (
    MOST_PROCESSES,
    above,
    at_least,
    at_most,
    below,
    limits_in,
    misfit,
    pattern,
    plain,
    within,
)
from trainkit.errors import ConfigError, Problem
from trainkit.fields import cosmetic, maths, placement, speed
from trainkit.moved import with_current_targets
from trainkit.reading import read_text

__all__ = [
    "GROUPS",
    "LIST_GROUPS",
    "MOST_JOBS",
    "NO_RUN",
    "BatchConfig",
    "CheckpointConfig",
    "ClipConfig",
    "CompileConfig",
    "CvConfig",
    "ElasticConfig",
    "EvalConfig",
    "LoaderConfig",
    "LrScalingConfig",
    "NumericsConfig",
    "RunConfig",
    "SupervisorConfig",
    "SweepConfig",
    "WarmupConfig",
    "hints_of",
    "load_resolved",
]

GROUPS: Final = (
    "model", "data", "objective", "optimizer", "schedule", "strategy", "precision", "cluster", "callbacks", "logger",
)  # fmt: skip
"""The groups whose node is part of a run. `recipe` only composes a run, which keeps nothing but its name."""
LIST_GROUPS: Final = ("callbacks", "logger")
"""The groups that take any number of choices at once."""

NO_RUN: Final = "is no run folder: it has no resolved.yaml."
"""The message about a folder that was expected to be a run folder."""

Node = dict[str, Any]

MOST_JOBS: Final = 10_000
"""Jobs of one sweep."""
_MOST_EPOCHS: Final = 10**12
_NAME: Final = pattern(
    r"(?!\.+$)[A-Za-z0-9._-]{1,200}", "may hold letters, digits, . _ and - only, 200 at most, and not dots alone."
)
"""Names that trainkit's folders can have."""


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """The samples of one update. Any two of the three say all; with `global_size` alone, a shard a replica."""

    global_size: Annotated[int | None, maths, at_least(1)] = 64
    """Samples per step, over all replicas."""
    micro_size: Annotated[int | None, maths, at_least(1)] = None
    """Most samples in a shard, the unit of one forward and backward pass; null lets it follow."""
    accumulation: Annotated[int | None, maths, at_least(1)] = None
    """Shards that each replica computes per step; null lets it follow."""
    drop_last: Annotated[bool, maths] = False
    """Leave out the last, short batch of an epoch instead of training on it."""


@dataclass(frozen=True, kw_only=True)
class LrScalingConfig:
    """How the learning rate follows the global batch."""

    rule: Annotated[Literal["linear", "sqrt", "none"], maths] = "linear"
    """linear: times global_size / reference_batch; sqrt: times its root; none: as it is."""
    reference_batch: Annotated[int | None, maths, at_least(1)] = None
    """Samples per step that `optimizer.lr` was tuned for; null scales nothing."""


@dataclass(frozen=True, kw_only=True)
class WarmupConfig:
    """The climb of the learning rate to its peak."""

    epochs: Annotated[float | None, maths, at_least(0), at_most(_MOST_EPOCHS)] = None
    """Length in epochs."""
    steps: Annotated[int | None, maths, at_least(0)] = 0
    """Length in steps."""
    start: Annotated[Literal["zero", "base"], maths] = "zero"
    """Where the climb begins: at zero, or at the unscaled `optimizer.lr`."""


@dataclass(frozen=True, kw_only=True)
class ClipConfig:
    """Bounds on the gradient."""

    max_norm: Annotated[float | None, maths, above(0)] = None
    """Largest global norm of a step's gradient; null does not clip."""


@dataclass(frozen=True, kw_only=True)
class CompileConfig:
    """What torch.compile does with the model."""

    mode: Annotated[Literal["off", "default", "max-autotune"], speed] = "off"
    """How hard it tries; what a model draws at random then differs from an eager run's, in its numbers alone."""
    backend: Annotated[str, speed] = "inductor"
    """What the graphs are handed to: inductor makes code of them, aot_eager runs them as they are, to find faults."""


@dataclass(frozen=True, kw_only=True)
class NumericsConfig:
    """How sums are formed, and what a number that is none does."""

    reproducible: Annotated[bool, maths] = False
    """The same bits on any number of replicas up to `lanes`; costs speed."""
    lanes: Annotated[int, maths, at_least(1), at_most(MOST_PROCESSES)] = 8
    """Partial sums that are combined in a fixed order in reproducible mode; a power of two."""
    on_nonfinite: Annotated[Literal["stop", "skip", "rollback"], maths] = "stop"
    """A loss or gradient that is NaN or infinite, and no loss scale explains it: end the run, leave the step out, or
    train it again from the last checkpoint and leave it out if it is not finite again."""
    max_skips_in_a_row: Annotated[int, cosmetic, at_least(1)] = 10
    """With `on_nonfinite=skip`, end the run after so many steps left out one after the other."""
    max_skipped_share: Annotated[float, cosmetic, within(0, 1)] = 0.01
    """With `on_nonfinite=skip`, end the run where a larger share of its steps is left out; judged from step 100 on."""
    check_replicas_every: Annotated[int | None, cosmetic, at_least(1)] = None
    """Compare the replicas' parameters each so many steps, and stop a run in which they drifted apart."""


@dataclass(frozen=True, kw_only=True)
class LoaderConfig:
    """How samples become batches."""

    shuffle: Annotated[bool, maths] = True
    """A new permutation each epoch; false takes the samples as they stand."""
    cache: Annotated[Literal["auto", True, False], maths(neutral=("auto", False))] = "auto"
    """true reads the whole dataset once into memory; auto does where it is in memory already."""
    num_workers: Annotated[int, speed, at_least(0), at_most(MOST_PROCESSES)] = 0
    """Processes that read samples ahead; 0 reads in the training process, small batches several at a time."""
    prefetch: Annotated[int, speed, at_least(1), at_most(MOST_PROCESSES)] = 2
    """Batches that each worker holds ready."""
    pin_memory: Annotated[Literal["auto", True, False], speed] = "auto"
    """Page-locked host memory for faster copies; auto where the device is CUDA."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When the run is saved, and what is kept."""

    every_steps: Annotated[int | None, cosmetic, at_least(1)] = None
    """Save each so many steps; the end and Ctrl-C always save."""
    every_epochs: Annotated[float | None, cosmetic, above(0)] = None
    """Save each so many epochs."""
    every_s: Annotated[float | None, cosmetic, above(0)] = 600.0
    """Save when so many seconds have passed since the last save; null leaves time out."""
    keep_last: Annotated[int, cosmetic, at_least(1)] = 2
    """Newest checkpoints kept."""
    keep_best: Annotated[int, cosmetic, at_least(0)] = 1
    """Best checkpoints kept, by `eval.metric`."""
    background: Annotated[bool, speed] = True
    """Write beside the training; a step only waits for the copy to host memory."""


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Evaluation on the validation split."""

    every_steps: Annotated[int | None, cosmetic, at_least(1)] = None
    """Evaluate each so many steps."""
    every_epochs: Annotated[float | None, cosmetic, above(0)] = 1
    """Evaluate each so many epochs; the end always evaluates."""
    metric: Annotated[str | None, cosmetic] = None
    """What best, early stop and leaderboards go by, such as val/accuracy; null is val/loss."""
    mode: Annotated[Literal["min", "max"] | None, cosmetic] = None
    """Whether less or more of `metric` is better."""
    batch_size: Annotated[int | None, speed, at_least(1)] = None
    """Samples per forward pass of each rank; null lets it follow the training's."""


@dataclass(frozen=True, kw_only=True)
class SupervisorConfig:
    """What is done about ranks that fail, where a run has several."""

    max_restarts: Annotated[int, placement, at_least(0)] = 3
    """Restarts from the last whole checkpoint in a row without a newer one, and restarts of failures in one step."""
    hang_timeout_s: Annotated[Literal["auto"] | float, placement, above(0)] = "auto"
    """Seconds without progress within a step after which a rank counts as hanging; auto: 10 times the longest recent
    pause of a step, and at least 30."""
    start_timeout_s: Annotated[float, placement, above(0)] = 600.0
    """The same for a rank that starts: imports, meeting the other ranks, placing the model."""
    first_step_timeout_s: Annotated[float, placement, above(0)] = 1800.0
    """The same for opening the data, the first step, and whenever torch.compile works."""
    checkpoint_timeout_s: Annotated[float, placement, above(0)] = 1800.0
    """The same for writing a checkpoint."""
    eval_timeout_s: Annotated[float, placement, above(0)] = 600.0
    """The same for a batch of an evaluation, and for callbacks that are shown figures or a checkpoint."""
    load_timeout_s: Annotated[float, placement, above(0)] = 1800.0
    """The same for restoring a checkpoint."""
    join_timeout_s: Annotated[float, placement, above(0)] = 600.0
    """Seconds that a process of a launch waits for the others to come."""
    evaluator_timeout_s: Annotated[float, placement, above(0)] = 3600.0
    """Seconds that the result of a run waits for its evaluator to evaluate one more checkpoint."""


@dataclass(frozen=True, kw_only=True)
class ElasticConfig:
    """Going on with fewer replicas where some are lost, and with all again once they return."""

    min_replicas: Annotated[int | None, placement, at_least(1)] = None
    """Fewest replicas that go on without those that are lost; null waits for every one, however often it fails."""
    retry_s: Annotated[float, placement, above(0)] = 60.0
    """Seconds until a lost replica is tried again; twice as long after each further loss."""


@dataclass(frozen=True, kw_only=True)
class CvConfig:
    """Cross-validation: the training split in folds, each held out once by a run of its own."""

    folds: Annotated[int | None, maths(neutral=None), at_least(2), at_most(MOST_JOBS)] = None
    """Parts of the training split; without `cv.fold`, a run for each. null: validates on the dataset's own split."""
    fold: Annotated[int | None, maths(neutral=None), at_least(0)] = None
    """The one that this run validates on, from 0."""
    seed: Annotated[int, maths(neutral=0), below(0, 2**63)] = 0
    """Of the order in which samples are dealt into folds; whatever the run's seed, runs have the same folds."""


@dataclass(frozen=True, kw_only=True)
class SweepConfig:
    """Many runs of one command, `-m`."""

    name: Annotated[str | None, cosmetic, _NAME] = None
    """Folder of the sweep below outputs/sweeps; null takes the date and time."""
    resume: Annotated[str | None, placement] = None
    """Folder of an earlier sweep to go on with: jobs with a result are not run again, those that ended early go on."""
    slots: Annotated[Literal["auto"] | int, placement, at_least(1), at_most(MOST_PROCESSES)] = "auto"
    """Jobs side by side: GPUs, or shares of the cores where there is none; auto takes all GPUs, else a core each."""
    jobs_per_device: Annotated[int, placement, at_least(1), at_most(MOST_PROCESSES)] = 1
    """Jobs that share a GPU."""
    retries: Annotated[int, placement, at_least(0)] = 0
    """Times that a job which fails is tried again, from its checkpoint."""
    on_error: Annotated[Literal["continue", "stop"], placement] = "continue"
    """What a job that failed means for the others: they go on, or those that run save and stop and no other starts."""
    trials: Annotated[int | None, cosmetic, at_least(1), at_most(MOST_JOBS)] = None
    """Points that hydra/sweeper=random, optuna or halving draws; null: halving takes the whole grid."""
    seed: Annotated[int, cosmetic, below(0, 2**32)] = 0
    """Key of what a search draws."""
    pruner: Annotated[Literal["median", "hyperband", "none"], cosmetic] = "median"
    """What ends a job of hydra/sweeper=optuna early: the median of the others at its step, or Hyperband's brackets."""
    min_steps: Annotated[int | None, cosmetic, at_least(1)] = None
    """Steps that every job of hydra/sweeper=optuna takes before it may be ended; null: until its first evaluation."""
    reduction: Annotated[int, cosmetic, at_least(2)] = 3
    """Of so many jobs, halving and Hyperband let one go on, for so many times the steps."""
    rungs: Annotated[int | None, cosmetic, at_least(2)] = None
    """Lengths at which halving compares its jobs, the last one whole; null: as many as leave one job."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One complete training: run-level values and the node of every group.

    Example:
        >>> cfg = RunConfig.from_dict({"seed": 3, "batch": {"micro_size": 8}})
        >>> cfg.seed, cfg.batch.global_size, RunConfig.from_dict(cfg.to_dict()) == cfg
        (3, 64, True)
    """

    name: Annotated[str, cosmetic, _NAME] = "run"
    """Folder of the run below outputs; the recipe's name where there is one."""
    seed: Annotated[int, maths, below(0, 2**63)] = 0
    """Key of the sample order, the initial weights and all that is random."""
    epochs: Annotated[float | None, maths, above(0), at_most(_MOST_EPOCHS)] = None
    """Length in passes over the data."""
    steps: Annotated[int | None, maths, at_least(1)] = None
    """Length in updates."""
    stop_at_step: Annotated[int | None, placement, at_least(1)] = None
    """End early after this step; the schedule keeps its length."""
    batch: BatchConfig = field(default_factory=BatchConfig)
    """The samples of one update."""
    lr_scaling: LrScalingConfig = field(default_factory=LrScalingConfig)
    """How the learning rate follows the global batch."""
    warmup: WarmupConfig = field(default_factory=WarmupConfig)
    """The climb of the learning rate to its peak."""
    clip: ClipConfig = field(default_factory=ClipConfig)
    """Bounds on the gradient."""
    activation_checkpointing: Annotated[Literal["none", "full"] | int | list[str], speed, at_least(1)] = "none"
    """What backward computes again instead of keeping: nothing, every block, every n-th, or modules by class."""
    compile: CompileConfig = field(default_factory=CompileConfig)
    """What torch.compile does with the model."""
    numerics: NumericsConfig = field(default_factory=NumericsConfig)
    """How sums are formed."""
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    """How samples become batches."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """When the run is saved."""
    eval: EvalConfig = field(default_factory=EvalConfig)
    """Evaluation on the validation split."""
    supervisor: SupervisorConfig = field(default_factory=SupervisorConfig)
    """What is done about ranks that fail."""
    elastic: ElasticConfig = field(default_factory=ElasticConfig)
    """Going on with fewer replicas where some are lost."""
    sweep: SweepConfig = field(default_factory=SweepConfig)
    """Many runs of one command."""
    cv: CvConfig = field(default_factory=CvConfig)
    """Cross-validation."""
    log_every_steps: Annotated[int, cosmetic, at_least(1)] = 10
    """Steps between two rows of the log."""
    quiet: Annotated[bool, cosmetic] = False
    """Print nothing while training: no summary, live line, sample or closing lines."""
    resume: Annotated[str | None, placement] = None
    """auto, or the folder of a run or checkpoint to continue."""
    init_from: Annotated[str | None, maths] = None
    """A checkpoint whose weights the training starts from."""
    recipe: Annotated[str | None, cosmetic] = None
    """The recipe this run was composed by."""
    model: Node = field(default_factory=dict)
    """What is trained."""
    data: Node = field(default_factory=dict)
    """The samples."""
    objective: Node = field(default_factory=dict)
    """The loss and its metrics."""
    optimizer: Node = field(default_factory=dict)
    """The update rule; `optimizer.lr` is the base learning rate."""
    schedule: Node = field(default_factory=dict)
    """The learning rate after warmup, as a factor on its peak."""
    strategy: Node = field(default_factory=dict)
    """How shards are spread over replicas."""
    precision: Node = field(default_factory=dict)
    """Which numbers the training is made of."""
    cluster: Node = field(default_factory=dict)
    """Which machines take part."""
    callbacks: Node = field(default_factory=dict)
    """What looks on while the run goes, by name."""
    logger: Node = field(default_factory=dict)
    """Where scalars are written, by name."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RunConfig:
        """Return a run from plain values; an absent key takes its default.

        Raises:
            ConfigError: every unknown key and every value that does not fit.
        """
        problems = list(_misfits(cls, values, ()))
        if problems:
            raise ConfigError(problems)
        return typing.cast("RunConfig", _built(cls, with_current_targets(values)))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as `resolved.yaml` stores them."""
        return typing.cast("dict[str, Any]", _plain_values(self))


def load_resolved(path: str | Path) -> RunConfig:
    """Return the run that `resolved.yaml` describes, without Hydra.

    Raises:
        ConfigError: the file does not hold the config of a run.
        UnreadableError: it is not a regular file, is too large, or is not UTF-8 text.
    """
    from trainkit.bounded_yaml import MAX_BYTES, parse_yaml  # noqa: PLC0415 - few processes read their config

    text = read_text(Path(path), limit=MAX_BYTES)
    try:
        values = parse_yaml(text)
    except ValueError as error:
        raise ConfigError([Problem(key=str(path), rule=f"cannot be read: {error}.")]) from None
    if not isinstance(values, Mapping):
        raise ConfigError([Problem(key=str(path), rule="is no mapping of keys to values.")])
    return RunConfig.from_dict(values)


def hints_of(kind: type) -> dict[str, Any]:
    """Return the annotations of a dataclass of the schema, with their tags and limits."""
    if kind not in _HINTS:
        _HINTS[kind] = typing.get_type_hints(kind, include_extras=True)
    return _HINTS[kind]


_HINTS: dict[type, dict[str, Any]] = {}


def _misfits(kind: type, values: Mapping[str, Any], path: tuple[str, ...]) -> typing.Iterator[Problem]:
    hints = hints_of(kind)
    for name, value in values.items():
        key = ".".join((*path, str(name)))
        if name not in hints:
            yield Problem(key=key, rule="no such key.")
            continue
        hint = plain(hints[name])
        if is_dataclass(hint) and isinstance(value, Mapping):
            yield from _misfits(typing.cast("type", hint), value, (*path, name))
            continue
        rule = misfit(value, hint)
        rules = [rule] if rule else [limit.rule for limit in limits_in(hints[name]) if limit.broken_by(value)]
        yield from (Problem(key=key, value=value, rule=rule) for rule in rules)


def _built(kind: Any, values: Mapping[str, Any]) -> Any:
    hints = hints_of(kind)
    arguments = {}
    for name, value in values.items():
        hint = plain(hints[name])
        arguments[name] = _built(hint, value) if is_dataclass(hint) else value
    return kind(**arguments)


def _plain_values(value: Any) -> Any:
    if is_dataclass(value):
        return {item.name: _plain_values(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain_values(item) for key, item in value.items()}
    return [_plain_values(item) for item in value] if isinstance(value, list | tuple) else value
