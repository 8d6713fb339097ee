"""JSON files of a run, of a sweep and of a prediction, and the output of `generate --json`."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from trainkit.config.identity import SettingKey


class Result(TypedDict):
    """`RUN/result.json`: how a run ended. Later versions add keys and remove none."""

    status: str
    """`finished`, `stopped`, `preempted`, `hangup`, `failed` ..."""
    reason: str
    """The reason for the end, in words."""
    exit_code: NotRequired[int]
    """Exit code of the command: 0 for a run that reached its end, `stop_after` or `stop_at_step`."""
    steps: NotRequired[int]
    """Updates of the whole training."""
    samples: NotRequired[int]
    """Samples of the whole training."""
    seconds: NotRequired[float]
    """Seconds of training, without start and end."""
    seconds_total: NotRequired[float]
    """Seconds from start to end."""
    skipped_steps: NotRequired[list[dict[str, Any]]]
    """The steps that were left out because a loss or gradient was not finite."""
    skipped_steps_not_listed: NotRequired[int]
    """Number of such steps beyond the first 1,000; absent without any."""
    metrics: NotRequired[dict[str, float | None]]
    """The last value of each metric; null for one that is not finite."""
    fingerprint: NotRequired[str]
    """Hash of the keys that decide the result."""
    changes: NotRequired[list[str]]
    """Changes of the training that resumes were allowed to make; absent without any."""
    notes: NotRequired[list[str]]
    """What the summary notes: keys and files that were left out, and what changes the training; absent without any."""
    weights_sha256: NotRequired[str | None]
    """Hash of the final weights."""
    best: NotRequired[str | None]
    """Folder of the best checkpoint by `eval.metric`."""
    last: NotRequired[str | None]
    """Folder of the newest checkpoint."""
    resume: NotRequired[str | None]
    """The command that continues the run."""
    model: NotRequired[str | None]
    """Folder of the exported model."""
    model_seconds: NotRequired[float]
    """Seconds in which it was written."""
    plan: NotRequired[dict[str, float | None] | None]
    """The plan: `memory` and `bytes_a_step` in bytes, `step_s` with its band `low_s` to `high_s` in seconds."""
    measured: NotRequired[dict[str, Any] | None]
    """The same figures as measured after `steps` steps, and `at_end`, each with its difference `per_cent`.

    `at_end` has `samples_per_s`, `targets_per_s`, `mfu`, `data_wait`, `launches` (`compile.mode=off` only) and, in
    bytes, `memory_peak`, too.
    """
    plan_error: NotRequired[str]
    """The reason why the run could not be compared with its plan."""
    restarts: NotRequired[list[dict[str, Any]]]
    """Restarts of the run: kind, cause, step, rank, task, checkpoint."""
    restarts_not_listed: NotRequired[int]
    """Number of restarts beyond the first 1,000; absent without any."""
    rollbacks: NotRequired[list[dict[str, int]]]
    """`step` and `checkpoint` of each step that was not finite and was trained again."""
    proved: NotRequired[dict[str, Any] | None]
    """The last proof of this training on this placement: date, command, same_training, same_numbers; null without."""


class Status(TypedDict):
    """`RUN/status.json`: the current state of a run."""

    version: Literal[1]
    """Version of this document."""
    state: str
    """`starting`, `running`, or the status with which it ended."""
    step: int | None
    """Updates done; null before the first."""
    last_step: NotRequired[int | None]
    """Updates after which the run ends; null before it is planned, and with `stop_after`."""
    stop_after_s: NotRequired[float]
    """Seconds of training after which the run ends, with `stop_after`."""
    resumable: bool
    """Whether there is a complete checkpoint."""
    updated: float
    """Time of this file, in seconds since 1970."""
    updated_at: str
    """Time of this file, UTC, ISO 8601."""
    pid: int
    """The process that writes the file."""
    process_start: int
    """Start of that process in clock ticks after the boot, because a later process may have the same number."""
    host: str
    """Host of the process."""
    boot_id: str
    """Id of the last boot of that host; empty if unknown."""
    boot_time: float
    """Time of that boot, in seconds since 1970."""
    processes: str
    """The namespace of processes that `pid` belongs to."""


class StopAfter(TypedDict):
    """`RUN/stop_after.json`: the estimated lengths of a run with `stop_after`, for its schedule."""

    version: Literal[1]
    """Version of this document."""
    stop_after: str
    """The time of training, as in the config."""
    lengths: list[list[int]]
    """Pairs of a step and the updates of the whole training, as estimated before it; of equal numbers: the end."""


class BegunBy(TypedDict):
    """The command that began a run."""

    argv: list[str]
    """The command; secrets are redacted."""
    notes: list[str]
    """Notes of its summary."""


class Environment(TypedDict):
    """`RUN/environment.json`: the environment in which a run was started. Later versions add keys and remove none."""

    started: str
    """Local time with its offset, ISO 8601."""
    argv: list[str]
    """The command; secrets are redacted."""
    cwd: str
    """The current folder."""
    host: str
    """The host that started it."""
    pid: int
    """The process that started it."""
    system: str
    """The operating system."""
    python: str
    """Version of Python."""
    git: dict[str, Any] | None
    """Commit, branch, and whether tracked files are changed; null outside a repository."""
    packages: dict[str, str]
    """Package -> version."""
    devices: dict[str, Any]
    """Cores, threads, instruction set, CUDA and GPUs of the host."""
    seed: int
    """The seed of the run."""
    fingerprint: str
    """Hash of the keys that decide the result."""
    config: NotRequired[dict[str, Any]]
    """The config of the command: a resume compares `resolved.yaml` with it."""
    notes: list[str]
    """Notes of the summary."""
    begun: NotRequired[BegunBy]
    """The command that began the run, if a later one has continued it."""


class Settings(TypedDict):
    """`RUN/settings.json`: the keys of a run that differ from its recipe."""

    version: Literal[1]
    """Version of this document."""
    settings: list[SettingKey]
    """The choices of groups, then the keys."""
    continued_at: NotRequired[list[int]]
    """Steps of the checkpoints from which later commands continued the run."""


class Evaluation(TypedDict):
    """`evaluation.json` of `trainkit evaluate`, which `--json` prints with `folder`."""

    version: Literal[1]
    """Version of this document."""
    model: str
    """The run, checkpoint or file with the weights."""
    checkpoint: str
    """The checkpoint: best, last, or its name."""
    step: int | None
    """The step of the checkpoint; null for a file without one."""
    split: str
    """The split that was evaluated."""
    num_samples: int
    """Samples of the split, each counted once."""
    strategy: str
    """The class of the strategy."""
    num_processes: int
    """Number of processes that evaluated."""
    batch_size: int
    """Samples of a forward pass."""
    precision: str
    """The number formats."""
    metrics: dict[str, float | None]
    """Name -> value; null for one that is not finite."""
    tables: dict[str, Any]
    """Name -> table of a metric that has one, such as a confusion matrix."""
    notes: list[str]
    """Remarks."""
    folder: NotRequired[str]
    """The folder of the evaluation; with `--json`."""


class GeneratedText(TypedDict):
    """One continued text."""

    prompt: str
    """The beginning."""
    text: str
    """The continuation."""


class Generation(TypedDict):
    """Output of `trainkit generate RUN --json`."""

    format: Literal[1]
    """Version of this document."""
    texts: list[GeneratedText]
    """A text for each prompt, in their order."""


class SweepJobEntry(TypedDict):
    """One job of a sweep."""

    job: str
    """Name of the job: its number in the sweep."""
    folder: str
    """Run folder of the job, relative to the folder of the sweep."""
    overrides: list[str]
    """The arguments of the run; secrets are masked."""
    exit_code: int | None
    """Exit code of the process of the job, -9 if signal 9 ended it; null if it has not ended."""
    config: str
    """Hash of the config, by which a resumed sweep recognises the job; empty if unknown."""
    slots: int
    """Devices, or shares of the CPU cores, that the job takes."""
    tries: int
    """Number of processes started for the job, over all commands that continued the sweep."""
    pruned: bool
    """Whether a search stopped the job early."""


class Sweep(TypedDict):
    """`sweep.json` of a sweep's folder: its jobs. Later versions add keys and remove none."""

    version: NotRequired[Literal[1]]
    """Version of this document; files of earlier versions of trainkit have none."""
    command: list[str]
    """The command of the sweep; secrets are masked."""
    budget: NotRequired[str]
    """`sweep.budget`; absent without one."""
    spent: NotRequired[dict[str, float]]
    """What counts for it: `elapsed_s`, seconds in which a job ran, and `device_s`, seconds of all devices."""
    jobs: list[SweepJobEntry]
    """The jobs, in their order."""


class Prediction(TypedDict):
    """`OUT.parts/prediction.json` of an unfinished `trainkit predict`: everything that determines the content of its
    parts.
    """

    version: Literal[1]
    """Version of this document."""
    weights: str
    """SHA-256 of the weights: of the manifest of a checkpoint, or of the files of a written model."""
    data: dict[str, Any]
    """The section `data` of the config; secrets are masked."""
    cv: list[int] | None
    """`folds`, `fold` and `seed` of a cross-validation; null without."""
    split: str
    """The split."""
    num_rows: int
    """Samples of the split."""
    objective: dict[str, Any]
    """The section `objective` of the config; secrets are masked."""
    outputs: str
    """The predicted outputs (`predict.outputs`)."""
    batch_size: int
    """Samples of a forward pass."""
    threads: int
    """Threads of a process (`predict.threads`)."""
    precision: str
    """The number formats."""
    compile: str
    """`compile.mode`."""
    device: list[str]
    """Kinds of the devices: `cpu`, `cuda`."""
    strategy: dict[str, Any] | None
    """The strategy, if several ranks compute one forward pass together; otherwise null."""
    torch: str
    """Version of torch."""
