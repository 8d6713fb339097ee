"""Create a run folder and write its initial files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from trainkit.config.identity import fingerprint
from trainkit.config.schema import RunConfig
from trainkit.run.folder.metadata import write_environment, write_resolved
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.planning.memory import checkpoint_bytes
from trainkit.run.planning.plan import RunPlan
from trainkit.run.resume import ResumePoint
from trainkit.trainer.checkpoint import refuse_small_disk

__all__ = ["Job", "Result", "begin_folder", "new_folder", "refuse_lack_of_room", "resumed_from"]

Result = dict[str, Any] | None
"""Content of result.json on rank 0; None on other ranks."""

Job = Callable[[Path, Callable[[], Result]], Result]
"""Calls the training in its folder, for example within the job context that Hydra sets up."""


def new_folder(cfg: RunConfig, run_dir: Path | None) -> RunFolder:
    """Create a run folder that no run has used."""
    return RunFolder.create(Path("outputs"), cfg.name) if run_dir is None else RunFolder.claim(run_dir)


def refuse_lack_of_room(plan: RunPlan, model: nn.Module, folder: RunFolder | None, run_dir: Path | None) -> None:
    """Refuse a run whose checkpoints do not fit on the file system, before anything is written or started.

    Args:
        plan: the run.
        model: from `meta_model`.
        folder: the run folder, if it exists.
        run_dir: the folder to be created; None: below `outputs/<name>`.

    Raises:
        StorageError: there is too little free space.
    """
    settings = plan.cfg.checkpoint
    kept = settings.keep_last + settings.keep_best + int(plan.has_evaluator)
    where = folder.path if folder is not None else run_dir or Path("outputs") / plan.cfg.name
    refuse_small_disk(where, size=checkpoint_bytes(plan, model), kept=kept, steps_left=plan.last_step)


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
