"""The sections of a run's config: run-level keys that belong together, such as `batch` and `checkpoint`.

Each key is a field with type, limits, tag and a line of documentation. `trainkit.config.schema` holds the whole run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final, Literal

from trainkit.config.values import MOST_PROCESSES
from trainkit.fields import above, at_least, at_most, below, cosmetic, maths, pattern, placement, speed, unit, within

MOST_JOBS: Final = 10_000
"""Jobs of one sweep."""
MOST_EPOCHS: Final = 10**12
DURATION: Final = pattern(
    r"(?=.*[1-9])[0-9]{1,9}(\.[0-9]{1,6})?(s|min|h)", "must be a number above 0 with its unit: 90s, 5min or 2h."
)
"""Times that a person gives with their unit."""
BUDGET: Final = pattern(
    r"(?=.*[1-9])[0-9]{1,9}(\.[0-9]{1,6})?(gpu_hours|usd|s|min|h)",
    "must be a number above 0 with its unit: 4gpu_hours, 20usd or 30min.",
)
FOLDER_NAME: Final = pattern(
    r"(?!\.+$)[A-Za-z0-9._-]{1,200}", "may hold letters, digits, . _ and - only, 200 at most, and not dots alone."
)
"""Names that trainkit's folders can have."""


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """The samples of one update. Two of the keys define the third; `global_size` alone gives a replica one shard."""

    global_size: Annotated[int | None, maths, at_least(1), unit("samples")] = 64
    """Samples per step, over all replicas."""
    micro_size: Annotated[int | None, maths, at_least(1), unit("samples")] = None
    """Most samples in a shard, the unit of one forward and backward pass; null derives it."""
    accumulation: Annotated[int | None, maths, at_least(1), unit("shards")] = None
    """Shards that each replica computes per step; null derives it."""
    drop_last: Annotated[bool, maths] = False
    """Leave out the last, short batch of an epoch instead of training on it."""

    def overrides(self, *, global_size: int, micro_size: int) -> tuple[str, ...]:
        """Return the overrides that give a step of this config other sizes.

        Example:
            >>> BatchConfig(global_size=64, accumulation=2).overrides(global_size=64, micro_size=8)
            ('batch.micro_size=8', 'batch.accumulation=null')
        """
        global_lines = () if self.global_size == global_size else (f"batch.global_size={global_size}",)
        accumulation_lines = () if self.accumulation is None else ("batch.accumulation=null",)
        return *global_lines, f"batch.micro_size={micro_size}", *accumulation_lines


@dataclass(frozen=True, kw_only=True)
class LrScalingConfig:
    """Scaling of the learning rate with the global batch."""

    rule: Annotated[Literal["linear", "sqrt", "none"], maths] = "linear"
    """linear: times global_size / reference_batch; sqrt: times its root; none: unchanged."""
    reference_batch: Annotated[int | None, maths, at_least(1), unit("samples")] = None
    """Samples per step that `optimizer.lr` was tuned for; null scales nothing."""


@dataclass(frozen=True, kw_only=True)
class WarmupConfig:
    """The increase of the learning rate to its peak."""

    epochs: Annotated[float | None, maths, at_least(0), at_most(MOST_EPOCHS), unit("epochs")] = None
    """Length in epochs."""
    steps: Annotated[int | None, maths, at_least(0), unit("steps")] = 0
    """Length in steps."""
    start: Annotated[Literal["zero", "base"], maths] = "zero"
    """Start of the increase: at zero, or at the unscaled `optimizer.lr`."""


@dataclass(frozen=True, kw_only=True)
class ClipConfig:
    """Bounds on the gradient."""

    max_norm: Annotated[float | None, maths, above(0)] = None
    """Largest global norm of a step's gradient; null does not clip."""


@dataclass(frozen=True, kw_only=True)
class CompileConfig:
    """Settings of torch.compile for the model."""

    mode: Annotated[Literal["off", "default", "max-autotune", "step"], speed] = "off"
    """Compiled code: off none, default the model, max-autotune the model with timed kernels, step whole shards.

    `step` compiles forward and backward together; the model must draw no random numbers. Under `default` and
    `max-autotune` random draws have other values than in an eager run, with the same distribution.
    """
    backend: Annotated[str, speed] = "inductor"
    """The compiler of the graphs: inductor generates code, aot_eager runs them unchanged, for debugging."""
    cuda_graphs: Annotated[bool, speed] = False
    """Capture the kernels of a compiled shard, and launch all of them by one call; for mode=step on a CUDA device.

    The captured graph keeps its memory between steps.
    """


@dataclass(frozen=True, kw_only=True)
class NumericsConfig:
    """The order of summation, and the reaction to NaN and infinity."""

    reproducible: Annotated[bool, maths] = False
    """The same bits on any number of replicas up to `lanes`; costs speed."""
    lanes: Annotated[int, maths, at_least(1), at_most(MOST_PROCESSES), unit("sums")] = 8
    """Partial sums that are combined in a fixed order in reproducible mode; a power of two."""
    on_nonfinite: Annotated[Literal["stop", "skip", "rollback"], maths] = "stop"
    """For a NaN or infinite loss or gradient: end the run, skip the step, or retry from a checkpoint before skipping.

    A loss or gradient that overflowed because of the loss scale does not count. `rollback` trains again from the last
    checkpoint, and skips the step if it is not finite again.
    """
    max_skips_in_a_row: Annotated[int, cosmetic, at_least(1), unit("steps")] = 10
    """With `on_nonfinite=skip`, end the run after this many skipped steps in a row."""
    max_skipped_share: Annotated[float, cosmetic, within(0, 1), unit("a share, 0 to 1")] = 0.01
    """With `on_nonfinite=skip`, end the run when a larger share of its steps is skipped; checked from step 100 on."""
    check_replicas_every: Annotated[int | None, cosmetic, at_least(1), unit("steps")] = None
    """Compare the replicas' parameters every this many steps, and stop the run if they differ."""


@dataclass(frozen=True, kw_only=True)
class LoaderConfig:
    """Settings for forming batches from samples."""

    shuffle: Annotated[bool, maths] = True
    """A new permutation each epoch; false keeps the dataset's order."""
    cache: Annotated[Literal["auto"] | bool, maths(neutral=("auto", False))] = "auto"
    """true reads the whole dataset into memory once; auto does so if it already is in memory."""
    num_workers: Annotated[Literal["auto"] | int, speed, at_least(0), at_most(MOST_PROCESSES), unit("processes")] = 0
    """Processes that prefetch samples; 0 reads in the training process, small batches together; auto measures."""
    prefetch: Annotated[int, speed, at_least(1), at_most(MOST_PROCESSES), unit("batches")] = 2
    """Batches that each worker prefetches."""
    pin_memory: Annotated[Literal["auto"] | bool, speed] = "auto"
    """Copy batches to a CUDA device through page-locked memory, concurrently with its kernels; auto: if the device is
    CUDA.
    """

    @property
    def num_processes(self) -> int:
        """Number of processes that prefetch samples; 0 while `auto` is not resolved."""
        return 0 if self.num_workers == "auto" else self.num_workers


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When the run is saved, and which checkpoints are kept."""

    every_steps: Annotated[int | None, cosmetic, at_least(1), unit("steps")] = None
    """Save every this many steps; the end and Ctrl-C always save."""
    every_epochs: Annotated[float | None, cosmetic, above(0), unit("epochs")] = None
    """Save every this many epochs."""
    every_s: Annotated[float | None, cosmetic, above(0), unit("seconds")] = 600.0
    """Save when this many seconds have passed since the last save; null disables this."""
    keep_last: Annotated[int, cosmetic, at_least(1), unit("checkpoints")] = 2
    """Number of newest checkpoints kept."""
    keep_best: Annotated[int, cosmetic, at_least(0), unit("checkpoints")] = 1
    """Number of best checkpoints kept, by `eval.metric`."""
    background: Annotated[bool, speed] = True
    """Write in the background; a step only waits for the copy to host memory."""
    export: Annotated[bool, cosmetic] = True
    """Write the trained model into one file at the end: RUN/model/model.safetensors."""


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Evaluation on the validation split."""

    every_steps: Annotated[int | None, cosmetic, at_least(1), unit("steps")] = None
    """Evaluate every this many steps."""
    every_epochs: Annotated[float | None, cosmetic, above(0), unit("epochs")] = 1
    """Evaluate every this many epochs; the end always evaluates."""
    metric: Annotated[str | None, cosmetic] = None
    """The metric for the best checkpoint, early stopping and searches, such as val/accuracy; null is val/loss."""
    mode: Annotated[Literal["min", "max"] | None, cosmetic] = None
    """Whether lower or higher values of `metric` are better."""
    batch_size: Annotated[int | None, speed, at_least(1), unit("samples")] = None
    """Samples per forward pass of each rank; null derives it from the training's."""
    beside: Annotated[bool, placement] = False
    """Evaluate every checkpoint in a separate process, on the CPU, while the training continues."""


OUTPUTS: Final = pattern(
    r"logits|probabilities|classes|embedding:.+|output:.+",
    "must be logits, probabilities, classes, embedding:LAYER with the name of a module of the model, or output:NAME "
    "with the name or index of one of its outputs.",
)


@dataclass(frozen=True, kw_only=True)
class PredictConfig:
    """Predictions of a trained model, `trainkit predict`."""

    outputs: Annotated[str, cosmetic, OUTPUTS] = "logits"
    """Content of a row: logits, probabilities, classes, embedding:LAYER, the outputs of a module by its name, or
    output:NAME, one of several outputs.
    """
    batch_size: Annotated[int, cosmetic, at_least(1), unit("samples")] = 64
    """Samples per forward pass; independent of the number of replicas, and so are the bytes of the file."""
    threads: Annotated[int, cosmetic, at_least(1), at_most(MOST_PROCESSES), unit("threads")] = 1
    """Threads of a forward pass on the CPU, per process; another number may round differently."""


@dataclass(frozen=True, kw_only=True)
class SupervisorConfig:
    """Handling of failed ranks, in runs with several ranks."""

    max_restarts: Annotated[int, placement, at_least(0), unit("restarts")] = 3
    """Most restarts in a row without a newer complete checkpoint, and most restarts of failures in one step."""
    hang_timeout_s: Annotated[Literal["auto"] | float, placement, above(0), unit("seconds")] = "auto"
    """Seconds without progress within a step after which a rank counts as hanging; auto adapts to recent steps.

    `auto` is 10 times the longest recent pause of a step, and at least 30.
    """
    start_timeout_s: Annotated[float, placement, above(0), unit("seconds")] = 600.0
    """Seconds without progress that a rank may take to start: imports, rendezvous, placing the model."""
    first_step_timeout_s: Annotated[float, placement, above(0), unit("seconds")] = 1800.0
    """Seconds without progress while opening the data, in the first step, and while torch.compile works."""
    checkpoint_timeout_s: Annotated[float, placement, above(0), unit("seconds")] = 1800.0
    """Seconds without progress while writing a checkpoint."""
    eval_timeout_s: Annotated[float, placement, above(0), unit("seconds")] = 600.0
    """Seconds without progress in a batch of an evaluation, and in callbacks that receive metrics or a checkpoint."""
    load_timeout_s: Annotated[float, placement, above(0), unit("seconds")] = 1800.0
    """Seconds without progress while restoring a checkpoint."""
    join_timeout_s: Annotated[float, placement, above(0), unit("seconds")] = 600.0
    """Seconds that a process of a launch waits for the others to join."""
    evaluator_timeout_s: Annotated[float, placement, above(0), unit("seconds")] = 3600.0
    """Seconds that the result of a run waits for its evaluator to evaluate one more checkpoint."""


@dataclass(frozen=True, kw_only=True)
class ElasticConfig:
    """Continue with fewer replicas after some are lost, and with all of them when they return."""

    min_replicas: Annotated[int | None, placement, at_least(1), unit("replicas")] = None
    """Fewest replicas with which the run continues; null waits for every replica, however often it fails."""
    retry_s: Annotated[float, placement, above(0), unit("seconds")] = 60.0
    """Seconds until a lost replica is retried; doubled after each further loss."""


@dataclass(frozen=True, kw_only=True)
class CvConfig:
    """Cross-validation: the training split in folds, each held out once by a run of its own."""

    folds: Annotated[int | None, maths(neutral=None), at_least(2), at_most(MOST_JOBS), unit("parts")] = None
    """Number of parts of the training split; without `cv.fold`, one run each. null: use the dataset's own split."""
    fold: Annotated[int | None, maths(neutral=None), at_least(0)] = None
    """The fold that this run validates on, from 0."""
    seed: Annotated[int, maths(neutral=0), below(0, 2**63)] = 0
    """Seed of the assignment of samples to folds; independent of the run's seed, so that all runs have the same folds.
    """


@dataclass(frozen=True, kw_only=True)
class SweepConfig:
    """Many runs of one command, `-m`."""

    name: Annotated[str | None, cosmetic, FOLDER_NAME] = None
    """Folder of the sweep below outputs/sweeps; null takes the date and time."""
    resume: Annotated[str | None, placement] = None
    """Folder of an earlier sweep to resume: jobs with a result are not run again, interrupted jobs continue."""
    slots: Annotated[Literal["auto"] | int, placement, at_least(1), at_most(MOST_PROCESSES), unit("jobs")] = "auto"
    """Jobs that run at a time: GPUs, or shares of the cores without GPUs; auto: all GPUs, else one per core."""
    jobs_per_device: Annotated[int, placement, at_least(1), at_most(MOST_PROCESSES), unit("jobs")] = 1
    """Jobs that share a GPU."""
    retries: Annotated[int, placement, at_least(0), unit("restarts")] = 0
    """Number of times that a failed job is retried, from its checkpoint."""
    on_error: Annotated[Literal["continue", "stop"], placement] = "continue"
    """Reaction to a failed job: the others continue, or the running ones save and stop and no other starts."""
    budget: Annotated[str | None, placement, BUDGET] = None
    """What all jobs may use, as 4gpu_hours, 20usd or 30min: then running jobs save and stop, and no other starts."""
    trials: Annotated[int | None, cosmetic, at_least(1), at_most(MOST_JOBS), unit("points")] = None
    """Points that hydra/sweeper=random or optuna tries."""
    seed: Annotated[int, cosmetic, below(0, 2**32)] = 0
    """Seed of a search."""
    pruner: Annotated[Literal["median", "halving", "hyperband", "none"], cosmetic] = "median"
    """Rule by which hydra/sweeper=optuna ends jobs early: the median of others, successive halving, or Hyperband."""
    min_steps: Annotated[int | None, cosmetic, at_least(1), unit("steps")] = None
    """Steps that every job of hydra/sweeper=optuna takes before it may be ended; null: until its first evaluation."""
    reduction: Annotated[int, cosmetic, at_least(2), unit("jobs")] = 3
    """Halving and Hyperband let one of this many jobs continue, for this many times the steps."""
