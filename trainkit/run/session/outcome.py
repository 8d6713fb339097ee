"""The progress of a run and the reason for its end, as recorded in result.json."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainkit.errors import (
    CheckpointError,
    ConfigError,
    Problem,
    TrainingError,
    TrainkitError,
    callback_note,
    status_of_error,
)
from trainkit.run.folder.rollbacks import rollbacks_of
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.process.error_report import ErrorReport
from trainkit.run.signals import REASONS
from trainkit.trainer.checkpoint.tensors import meta_of
from trainkit.trainer.events import Run
from trainkit.trainer.manifest import MANIFEST, list_complete, read_manifest

Report = Callable[[BaseException], ErrorReport]
"""Function that reports an error to the parent and the other ranks."""


def progress_of(run: Run) -> dict[str, Any]:
    """Return the progress of a run, and its skipped and repeated steps."""
    state = run.state
    found = {"steps": state.step, "samples": state.samples, "seconds": state.seconds, **state.left_out.findings()}
    if state.own_loss:
        found["own_loss"] = True
    return found if run.cfg.numerics.on_nonfinite != "rollback" else {**found, "rollbacks": rollbacks_of(run.folder)}


def own_loss_refusal(checkpoint: Path) -> ConfigError:
    """Return the error of a training that only the user's own loop can continue, because it gave the losses."""
    rule = "has steps with a loss from its own loop (trainkit.session). Continue it with its script and resume=RUN."
    return ConfigError([Problem(key="resume", value=str(checkpoint), rule=rule)])


def refuse_own_losses(checkpoints: Path) -> None:
    """Refuse to continue a training with losses of a user's own loop in a process without such a loop.

    Args:
        checkpoints: a folder of checkpoints, or one checkpoint.

    Raises:
        ConfigError: the newest checkpoint has steps with such a loss.
    """
    with contextlib.suppress(CheckpointError):  # a damaged one is reported when it is restored
        newest = [read_manifest(checkpoints)] if (checkpoints / MANIFEST).is_file() else list_complete(checkpoints)[:1]
        states = [meta_of(one).get("state") for one in newest]
        if any(isinstance(state, dict) and state.get("own_loss") is True for state in states):
            raise own_loss_refusal(newest[0].folder)


def status_of(run: Run) -> dict[str, str]:
    """Return the status of a run that ended regularly, and the reason."""
    reason = run.stop_reason
    if reason is not None:
        known = reason in REASONS
        return {"status": reason if known else "finished", "reason": REASONS[reason] if known else reason}
    if run.state.step < run.num_steps:
        asked = run.cfg.stop_at_step
        left = asked is None or run.state.step < asked
        return {"status": "stopped", "reason": "the loop was left" if left else f"stop_at_step={asked}"}
    return {"status": "finished", "reason": "all steps done"}


def failure_of(error: BaseException, folder: RunFolder, *, lost: bool) -> dict[str, Any]:
    """Return the entries of the result for an error; if another rank's failure caused it, only that fact."""
    reason = str(error) if isinstance(error, TrainkitError) else f"{type(error).__name__}: {error}"
    reason += callback_note(error)
    if lost:
        reason = "another rank has failed"
    return {
        "status": status_of_error(error),
        "reason": "Ctrl-C, twice" if isinstance(error, KeyboardInterrupt) else reason,
        "resume": folder.resume_command,
    }


def reported(error: BaseException, report: Report | None) -> bool:
    """Report an error; return whether it only reports that another rank was lost."""
    if report is None or isinstance(error, KeyboardInterrupt):
        return False
    return report(error).is_secondary


def unless_exit(error: BaseException, report: Report | None, step: int | None) -> BaseException:
    """Return the error that ends a rank: for `sys.exit` in the only process of a run, one that names the call.

    Python would end that process with the code given to `sys.exit`, and 0 would count as success. If there is a parent,
    the parent names the rank.
    """
    if report is not None or not isinstance(error, SystemExit):
        return error
    frame = traceback.extract_tb(error.__traceback__)[-1]
    when = "while the run was starting" if step is None else f"in step {step}"
    return TrainingError(
        f"the process was to exit with code {error.code or 0} {when}, before the training was done: sys.exit was "
        f"called in {frame.filename}, line {frame.lineno}, in {frame.name}."
    )
