"""Begin a run: find what it continues, create its folder, write its initial files, and record its output and status."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from torch import nn

from trainkit.config.identity import fingerprint, other_training
from trainkit.config.schema import RunConfig, load_resolved
from trainkit.errors import CheckpointError, ConfigError, Problem, UnreadableError
from trainkit.report.train_log import TrainLog, recorded_output
from trainkit.run.folder.metadata import write_environment, write_resolved
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.folder.status import StatusFile, read_status
from trainkit.run.planning.averages import average_of
from trainkit.run.planning.memory import checkpoint_bytes, model_bytes
from trainkit.run.planning.plan import RunPlan
from trainkit.run.process.heartbeat import read_heartbeat
from trainkit.trainer.checkpoint import refuse_small_disk
from trainkit.trainer.manifest import list_complete

Result = dict[str, Any] | None
"""Content of result.json on rank 0; None on other ranks."""

Job = Callable[[Path, Callable[[], Result]], Result]
"""Calls the training in its folder, for example within the job context that Hydra sets up."""


def new_folder(cfg: RunConfig, run_dir: Path | None) -> RunFolder:
    """Create a run folder that no run has used."""
    return RunFolder.create(Path("outputs"), cfg.name) if run_dir is None else RunFolder.claim(run_dir)


def refuse_lack_of_room(plan: RunPlan, model: nn.Module, folder: RunFolder | None, run_dir: Path | None) -> None:
    """Refuse a run whose checkpoints do not fit on the file system, before anything is written or started.

    Raises:
        StorageError: there is too little free space.
    """
    settings = plan.cfg.checkpoint
    kept = settings.keep_last + settings.keep_best + int(plan.has_evaluator)
    where = folder.path if folder is not None else run_dir or Path("outputs") / plan.cfg.name
    ends = settings.export and plan.last_step == plan.num_steps
    average = average_of(plan.cfg)
    copies = 1 + bool(settings.keep_best) + (average is not None and average.export)
    exported = model_bytes(plan, model) * copies if ends else 0
    size = checkpoint_bytes(plan, model)
    refuse_small_disk(where, size=size, kept=kept, steps_left=plan.last_step, exported=exported)


def begin_folder(
    folder: RunFolder, plan: RunPlan, start: ResumePoint, *, notes: Sequence[str]
) -> tuple[RunConfig, dict[str, Any]]:
    """Write the initial files of a run folder; the caller holds its lock.

    Returns:
        The config to run, and the secrets, which are not written to any file.
    """
    folder.begin()
    resolved = resumed_from(plan.cfg, start.checkpoints)
    secrets = write_resolved(folder, resolved)
    shown = [*notes, *([start.note] if start.note else [])]
    write_environment(folder, cfg=plan.cfg, fingerprint=fingerprint(plan.cfg), notes=shown)
    return resolved, secrets


def resumed_from(cfg: RunConfig, checkpoints: Path | None) -> RunConfig:
    """Return the config with `resume` set to the checkpoint of another run, if the run starts from one."""
    return cfg if checkpoints is None else replace(cfg, resume=str(checkpoints))


_SHOWN: Final = 3
"""Number of unreadable folders that the note names."""


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """The state from which a run starts."""

    cfg: RunConfig
    """The config; keys left on auto have the values of the run that is continued."""
    folder: RunFolder | None = None
    """The run folder to continue in; None creates a new one."""
    checkpoints: Path | None = None
    """The `checkpoints` folder of another run, or one checkpoint in it, to start from."""
    note: str | None = None
    """One line that describes what is continued."""
    relaunched: bool = False
    """Whether an external launcher has restarted all processes."""


def find_start(cfg: RunConfig, run_dir: Path | None) -> ResumePoint:
    """Resolve the key `resume`.

    Raises:
        ConfigError: there is nothing to resume at the given path, or the run there is another training; the error names
            every maths key that differs.
    """
    if cfg.resume is None:
        return ResumePoint(cfg=cfg)
    if cfg.resume == "auto":
        return _auto(cfg, run_dir)
    path = Path(cfg.resume).expanduser()
    run, checkpoints = (
        (path, path / "checkpoints") if (path / "resolved.yaml").is_file() else (path.parent.parent, path)
    )
    if not (run / "resolved.yaml").is_file() or not (list_complete(checkpoints) or (path / "manifest.json").is_file()):
        rule = "is neither a run folder with a checkpoint nor a checkpoint of one."
        raise ConfigError([Problem(key="resume", value=cfg.resume, rule=rule)])
    adopted = _same_training(cfg, run)
    return ResumePoint(cfg=adopted, checkpoints=checkpoints, note=f"resume: starts from {checkpoints}")


def _auto(cfg: RunConfig, run_dir: Path | None) -> ResumePoint:
    if run_dir is not None and list_complete(run_dir / "checkpoints"):
        adopted = _same_training(cfg, run_dir)
        return ResumePoint(cfg=adopted, folder=RunFolder(run_dir), note=_continues(RunFolder(run_dir)))
    if run_dir is not None and (run_dir / "resolved.yaml").is_file():
        earlier = load_resolved(run_dir / "resolved.yaml")
        adopted = adopt(cfg, earlier)
        if fingerprint(adopted) == fingerprint(earlier):  # it ended before its first checkpoint
            return ResumePoint(cfg=adopted, folder=RunFolder(run_dir), note=f"resume=auto: starts anew in {run_dir}")
    root = Path("outputs") / cfg.name if run_dir is None else run_dir.parent
    unread: list[str] = []
    for file in sorted(root.glob("*/resolved.yaml"), key=lambda file: file.lstat().st_mtime, reverse=True):
        folder = RunFolder(file.parent)
        try:
            earlier = load_resolved(file)
            adopted = adopt(cfg, earlier)
            if not _unfinished(folder) or fingerprint(adopted) != fingerprint(earlier):
                continue
        except (
            ConfigError,
            CheckpointError,
            UnreadableError,
        ):  # an unreadable folder of another run must not prevent training
            unread.append(f"{folder.path} cannot be read and is passed over")
            continue
        _refuse_running(folder)
        return ResumePoint(cfg=adopted, folder=folder, note="; ".join([_continues(folder), *unread[:_SHOWN]]))
    note = f"resume=auto: no unfinished run of this training in {root}, so a fresh start"
    return ResumePoint(cfg=cfg, note="; ".join([note, *unread[:_SHOWN]]))


def _unfinished(folder: RunFolder) -> bool:
    return bool(list_complete(folder.checkpoints)) and read_status(folder).state != "finished"


def _continues(folder: RunFolder) -> str:
    found = read_status(folder)
    ended = "" if found.state == "unknown" or found.is_running else f", which {found.summary()}"
    return f"resume=auto: continues {folder.path}{ended}"


def _refuse_running(folder: RunFolder) -> None:
    """Refuse to resume a run that certainly still runs.

    For a run on another host only the age of its heartbeat is known, and it may have been killed: it is not refused.
    """
    found = read_status(folder)
    if found.is_running and not found.note:
        rule = (
            f"{folder.path}, the newest unfinished run of this training, {found.summary()}. Wait until it has ended, "
            "stop it, or leave out resume=auto for another run."
        )
        raise ConfigError([Problem(key="resume", value="auto", rule=rule)])


def adopt(cfg: RunConfig, earlier: RunConfig) -> RunConfig:
    """Set keys left on auto to the values that the earlier run resolved, so that a resume on other devices
    keeps them.
    """
    batch = cfg.batch
    if batch.micro_size is None and batch.accumulation is None:
        batch = replace(batch, micro_size=earlier.batch.micro_size)
    if batch.global_size is None:
        batch = replace(batch, global_size=earlier.batch.global_size, accumulation=None)
    return replace(cfg, batch=batch)


def _same_training(cfg: RunConfig, run: Path) -> RunConfig:
    earlier = load_resolved(run / "resolved.yaml")
    adopted = adopt(cfg, earlier)
    problems = other_training(earlier, adopted, run=run)
    if problems:
        raise ConfigError(problems)
    return adopted


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """The files of an active run."""

    folder: RunFolder
    log: TrainLog
    status: StatusFile

    def follow_heartbeat(self) -> None:
        """Read the step from the heartbeat of rank 0, which another process writes."""

        def step() -> int | None:
            heartbeat = read_heartbeat(self.folder.heartbeat_of(0))
            return None if heartbeat is None or heartbeat.phase == "start" else heartbeat.step

        self.status.follow(step)


@contextmanager
def recorded_run(folder: RunFolder, *, confirm: Callable[[], None] | None = None) -> Iterator[RunRecord]:
    """Record the output of a run, its status, and the error that ends it, for the duration of the block."""
    folder.take()  # renames a log or status file of the user before one is written
    with recorded_output(folder.log, separated=True) as log, StatusFile(folder, confirm=confirm) as status:
        try:
            yield RunRecord(folder=folder, log=log, status=status)
        except BaseException as error:
            log.write_error(error)
            raise
