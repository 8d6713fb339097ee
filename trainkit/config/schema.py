"""The schema of a run: the content of `resolved.yaml`, which every process reads.

Run-level keys are fields here, with type, limits, tag and a line of documentation. A group (`model`, `data`, ...) stays
a plain mapping: the class behind its `_target_` is its schema.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from trainkit.config.sections import (
    DURATION,
    FOLDER_NAME,
    MOST_EPOCHS,
    BatchConfig,
    CheckpointConfig,
    ClipConfig,
    CompileConfig,
    CvConfig,
    ElasticConfig,
    EvalConfig,
    LoaderConfig,
    LrScalingConfig,
    NumericsConfig,
    PredictConfig,
    SupervisorConfig,
    SweepConfig,
    WarmupConfig,
)
from trainkit.config.values import plain
from trainkit.errors import MISSING, ConfigError, Problem, refuse
from trainkit.fields import Reads, a_file, above, at_least, at_most, below, cosmetic, maths, placement, speed, unit
from trainkit.files import MAX_YAML_BYTES, parse_yaml, read_text
from trainkit.names import NAMES

GROUPS: Final = (
    "model", "data", "objective", "optimizer", "schedule", "strategy", "precision", "average", "convert", "cluster",
    "hardware", "callbacks", "logger",
)  # fmt: skip
"""The groups whose node is part of a run. `recipe` only composes a run, which stores only its name."""
LIST_GROUPS: Final = ("callbacks", "logger")
"""The groups that take any number of choices at once."""

NO_RUN: Final = "is not a run folder: it has no resolved.yaml."
"""The message about a folder that was expected to be a run folder."""

_OWN_TARGETS: Final = re.compile(r"^[ -]*_target_: (trainkit\.\S+)$", re.MULTILINE)

Node = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One complete training: run-level values and the node of every group.

    Example:
        >>> cfg = RunConfig.from_dict({"seed": 3, "batch": {"micro_size": 8}})
        >>> cfg.seed, cfg.batch.global_size, RunConfig.from_dict(cfg.to_dict()) == cfg
        (3, 64, True)
    """

    name: Annotated[str, cosmetic, FOLDER_NAME] = "run"
    """Folder of the run below outputs; the name of the recipe, if there is one."""
    seed: Annotated[int, maths, below(0, 2**63)] = 0
    """Seed of the sample order, the initial weights and all other randomness."""
    epochs: Annotated[float | None, maths, above(0), at_most(MOST_EPOCHS), unit("epochs")] = None
    """Length in passes over the data."""
    steps: Annotated[int | None, maths, at_least(1), unit("steps")] = None
    """Length in updates."""
    stop_at_step: Annotated[int | None, placement, at_least(1), unit("steps")] = None
    """End early after this step; the schedule keeps its length."""
    stop_after: Annotated[str | None, maths(neutral=None), DURATION] = None
    """End after this time of training, as 90s, 5min or 2h, at the latest at the end of epochs or steps.

    Start, compilation, evaluation and saves do not count. The schedule follows the share of the time that is used.
    """
    stop_after_record: Annotated[str | None, placement, a_file] = None
    """stop_after.json of a run with the same stop_after, whose rates and end are repeated: no clock is read."""
    batch: BatchConfig = field(default_factory=BatchConfig)
    """The samples of one update."""
    lr_scaling: LrScalingConfig = field(default_factory=LrScalingConfig)
    """Scaling of the learning rate with the global batch."""
    warmup: WarmupConfig = field(default_factory=WarmupConfig)
    """The increase of the learning rate to its peak."""
    clip: ClipConfig = field(default_factory=ClipConfig)
    """Bounds on the gradient."""
    activation_checkpointing: Annotated[Literal["none", "selective", "full"] | int | list[str], speed, at_least(1)] = (
        "none"
    )
    """Outputs that backward recomputes instead of storing: nothing, cheap operations, every block, every n-th, or
    classes.
    """
    memory_format: Annotated[Literal["auto", "contiguous", "channels_last"], speed] = "auto"
    """Memory format of the weights of convolutions; auto: channels last on CUDA with 16-bit convolutions, else
    contiguous.
    """
    compile: CompileConfig = field(default_factory=CompileConfig)
    """Settings of torch.compile for the model."""
    numerics: NumericsConfig = field(default_factory=NumericsConfig)
    """The order of summation, and the reaction to NaN and infinity."""
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    """Settings for reading samples and forming batches."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """When the run is saved."""
    eval: EvalConfig = field(default_factory=EvalConfig)
    """Evaluation on the validation split."""
    predict: PredictConfig = field(default_factory=PredictConfig)
    """Settings for predictions of the trained model."""
    supervisor: SupervisorConfig = field(default_factory=SupervisorConfig)
    """Handling of failed ranks."""
    elastic: ElasticConfig = field(default_factory=ElasticConfig)
    """Continue with fewer replicas after some are lost."""
    sweep: SweepConfig = field(default_factory=SweepConfig)
    """Many runs of one command."""
    cv: CvConfig = field(default_factory=CvConfig)
    """Cross-validation."""
    log_every_steps: Annotated[int, cosmetic, at_least(1), unit("steps")] = 10
    """Steps between two rows of the log."""
    report_page: Annotated[bool, cosmetic] = True
    """Write report.html, the page of the run: each minute, after evaluations, and at the end."""
    observer_errors: Annotated[Literal["continue", "stop"], cosmetic] = "continue"
    """For an error in a callback that only observes: continue without that callback, or end the run."""
    quiet: Annotated[bool, cosmetic] = False
    """Print nothing while training: no summary, live line, sample or closing lines."""
    resume: Annotated[str | None, placement, Reads(words=("auto",))] = None
    """auto, or the folder of a run or checkpoint to continue."""
    resume_allows: Annotated[list[Literal["new_schedule", "not_reproducible"]], placement] = field(default_factory=list)
    """What a resume may change: the learning rates of the steps done, or the guarantee of numerics.reproducible."""
    changes: Annotated[list[str], maths(neutral=[])] = field(default_factory=list)
    """Changes of this training that resumes were allowed to make, each with its step; trainkit writes them."""
    init_from: Annotated[str | None, maths, Reads()] = None
    """A checkpoint whose weights the training starts from."""
    recipe: Annotated[str | None, cosmetic] = None
    """The recipe from which this run was composed."""
    model: Node = field(default_factory=dict)
    """The model to train."""
    data: Node = field(default_factory=dict)
    """The samples."""
    objective: Node = field(default_factory=dict)
    """The loss and its metrics."""
    optimizer: Node = field(default_factory=dict)
    """The update rule; `optimizer.lr` is the base learning rate."""
    optimizers: Annotated[Node, maths(neutral={})] = field(default_factory=dict)
    """Several optimizers by name: the parameters of each, and the keys of `optimizer` that differ."""
    schedule: Node = field(default_factory=dict)
    """The learning rate after warmup, as a factor on its peak."""
    strategy: Node = field(default_factory=dict)
    """Distribution of shards over replicas."""
    precision: Node = field(default_factory=dict)
    """The number formats of the training."""
    average: Node = field(default_factory=dict)
    """The average of the weights that is kept in addition to them."""
    convert: Node = field(default_factory=dict)
    """The layers that compute in another number format than the precision's."""
    cluster: Node = field(default_factory=dict)
    """The machines of the run."""
    hardware: Node = field(default_factory=dict)
    """The kind of device that a plan counts with; a training does not read it."""
    callbacks: Node = field(default_factory=dict)
    """Callbacks of the run, by name."""
    logger: Node = field(default_factory=dict)
    """Loggers of scalars, by name."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RunConfig:
        """Return a run from plain values; an absent key takes its default.

        Raises:
            ConfigError: every unknown key and every value that does not fit.
        """
        refuse(
            Problem(key=".".join(path), rule=rule or "no such key.", value=value if rule else MISSING)
            for path, value, rule in misfits(values)
        )
        return typing.cast("RunConfig", _built(cls, values))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as `resolved.yaml` stores them."""
        return asdict(self)


def load_resolved(path: str | Path) -> RunConfig:
    """Return the run that `resolved.yaml` describes, without Hydra.

    Raises:
        ConfigError: the file does not hold the config of a run.
        UnreadableError: it is not a regular file, is too large, or is not UTF-8 text.
    """
    text = refuse_earlier_names(Path(path))
    try:
        values = parse_yaml(text)
    except ValueError as error:
        raise ConfigError([Problem(key=str(path), rule=f"cannot be read: {error}.")]) from None
    if not isinstance(values, Mapping):
        raise ConfigError([Problem(key=str(path), rule="is not a mapping of keys to values.")])
    sweep, hints = values.get("sweep"), hints_of(plain(hints_of(RunConfig)["sweep"]))
    if isinstance(sweep, Mapping):  # a key that is gone and was null: nothing was asked of it
        values = {**values, "sweep": {key: value for key, value in sweep.items() if key in hints or value is not None}}
    try:
        return RunConfig.from_dict(values)
    except ConfigError as error:
        raise ConfigError([replace(problem, origin=str(path)) for problem in error.problems]) from None


def refuse_earlier_names(path: Path) -> str:
    """Return the text of a run's config, unless the run is from before the public names: its fingerprint was another.

    Raises:
        ConfigError: it names a class of trainkit that has no public name.
        UnreadableError: it is not a regular file, is too large, or is not UTF-8 text.
    """
    text = read_text(path, limit=MAX_YAML_BYTES)
    earlier = [name for name in _OWN_TARGETS.findall(text) if name not in NAMES]
    if earlier:
        rule = f"names {earlier[0]}: a version before 0.1.0 wrote this run, with other names and fingerprints. Read "
        rule += f"and resume it with that version, or train on from its weights, init_from={path.parent}."
        raise ConfigError([Problem(key=str(path), rule=rule)])
    return text


def hints_of(kind: type) -> dict[str, Any]:
    """Return the annotations of a dataclass of the schema, with their tags and limits."""
    if kind not in _HINTS:
        _HINTS[kind] = typing.get_type_hints(kind, include_extras=True)
    return _HINTS[kind]


_HINTS: dict[type, dict[str, Any]] = {}


def misfits(
    values: Mapping[str, Any], kind: type = RunConfig, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any, str | None]]:
    """Yield each key of a run that does not fit its field: path, value and rule; no rule: no such key."""
    from trainkit.config.annotations import misfit  # noqa: PLC0415 - imports pydantic: help and lists need no run

    hints, defaults = hints_of(kind), kind()
    for name, value in values.items():
        inner, hint = (*path, str(name)), plain(hints.get(name))
        if name not in hints:
            yield inner, value, None
        elif is_dataclass(hint) and isinstance(value, Mapping):
            yield from misfits(value, typing.cast("type", hint), inner)
        elif is_dataclass(hint):
            keys = ", ".join(f"{name}.{key}" for key in hints_of(typing.cast("type", hint)))
            yield inner, value, f"has its own keys: {keys}."
        elif value == (default := getattr(defaults, name)) and type(value) is type(default):
            continue  # the default of a class fits it
        elif rule := misfit(value, hints[name]):
            yield inner, value, rule


def _built(kind: Any, values: Mapping[str, Any]) -> Any:
    hints = hints_of(kind)
    arguments = {}
    for name, value in values.items():
        hint = plain(hints[name])
        arguments[name] = _built(hint, value) if is_dataclass(hint) else value
    return kind(**arguments)


_LESS_IS_BETTER = frozenset({"loss", "perplexity", "error", "mse", "mae"})


@dataclass(frozen=True, kw_only=True, slots=True)
class MonitoredMetric:
    """The metric that selects the best checkpoint and drives early stopping, or that orders runs."""

    metric: str
    """Name of the metric, such as `val/accuracy`."""
    mode: Literal["min", "max"]
    """Whether lower or higher values are better."""

    @classmethod
    def of(cls, settings: EvalConfig) -> MonitoredMetric:
        """Return the metric of the settings; the default is the validation loss.

        Example:
            >>> MonitoredMetric.of(EvalConfig()), MonitoredMetric.of(EvalConfig(metric="val/accuracy"))
            (MonitoredMetric(metric='val/loss', mode='min'), MonitoredMetric(metric='val/accuracy', mode='max'))
        """
        metric = settings.metric or "val/loss"
        better: Literal["min", "max"] = "min" if metric.rpartition("/")[2] in _LESS_IS_BETTER else "max"
        return cls(metric=metric, mode=settings.mode or better)

    def __str__(self) -> str:
        return f"{self.metric} ({self.mode})"

    @property
    def sign(self) -> float:
        """The factor that makes lower values better."""
        return -1.0 if self.mode == "max" else 1.0
