"""How a run ended: the value that `result.json` and the exit code of a command are made of.

`rollbacks.json` holds the step of each rollback and the checkpoint that was restored.

It is written before anything is restored: a run that is killed during a rollback and resumed knows from it which step
is trained for the second time.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

from trainkit.errors import (
    AbsentFileError,
    CheckpointError,
    StoppedError,
    TrainkitError,
    UnreadableError,
    callback_note,
    status_of_error,
)
from trainkit.files import expect_map, expect_maps, read_map, write_json_atomically
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.signals import EXIT_CODES, REASONS
from trainkit.trainer.events import Run, Suspect
from trainkit.trainer.manifest import list_complete

ROLLBACKS: Final = "rollbacks.json"
"""Name of the record in the run folder."""
_MOST_ROLLBACKS: Final = 1000
"""Number of rollbacks that are kept, the latest ones."""


def rollbacks_of(folder: Path) -> list[dict[str, int]]:
    """Return `step` and `checkpoint` of each rollback of a run, the latest last.

    Raises:
        CheckpointError: the file is damaged.
    """
    path = folder / ROLLBACKS
    try:
        rollbacks = expect_maps(read_map(path, {"rollbacks": list})["rollbacks"], {"step": int, "checkpoint": int})
    except AbsentFileError:
        return []
    except (UnreadableError, ValueError) as error:
        reason = error.reason if isinstance(error, UnreadableError) else error
        raise CheckpointError(
            f"{path} is not a record of rollbacks: {reason}. Remove it to resume without it."
        ) from None
    return [{name: rollback[name] for name in ("step", "checkpoint")} for rollback in rollbacks]


def record_rollback(folder: Path, suspect: Suspect) -> None:
    """Add a rollback to the record."""
    rollbacks = [*rollbacks_of(folder), {"step": suspect.step, "checkpoint": suspect.checkpoint}]
    write_json_atomically(folder / ROLLBACKS, {"rollbacks": rollbacks[-_MOST_ROLLBACKS:]})


def suspect_checkpoint_of(folder: Path, *, checkpoint: int) -> Suspect | None:
    """Return the step that is trained for the second time when a run continues at a checkpoint; None: there is none."""
    rollbacks = rollbacks_of(folder)
    if not rollbacks or checkpoint > rollbacks[-1]["step"] or rollbacks[-1]["checkpoint"] > checkpoint:
        return None
    return Suspect(**rollbacks[-1])


def skipped_in(checkpoints: Path) -> dict[str, Any]:
    """Return `skipped_steps` for result.json from the newest complete checkpoint; an empty list if there is none."""
    for checkpoint in list_complete(checkpoints)[:1]:
        try:
            state = expect_map(read_map(checkpoint.folder / "meta.json", {"state": dict})["state"], {"left_out": dict})
            return {"skipped_steps": expect_maps(state["left_out"].get("steps"), {"step": int})}
        except (UnreadableError, ValueError):
            break  # written by an earlier version, or damaged: a resume reports that
    return {"skipped_steps": []}


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """How a run ended. Only `reason` is for a reader: nothing depends on its text.

    Example:
        >>> RunResult.of_status("preempted").exit_code, RunResult.of_error(ValueError("no")).status
        (143, 'failed')
    """

    status: str
    """`finished`, the cause of a stop (`trainkit.errors.StopKind`), or `failed`."""
    reason: str
    exit_code: int
    """Exit code of the command: 0 for a run that reached its end or `stop_at_step`."""

    @classmethod
    def of_status(cls, status: str) -> RunResult:
        """Return the result of a run that was asked to stop, or did all its steps."""
        return cls(status=status, reason=REASONS[status], exit_code=EXIT_CODES[status])

    @classmethod
    def of_run(cls, run: Run) -> RunResult:
        """Return the result of a run whose loop has ended without an error."""
        stop_at = run.cfg.stop_at_step
        if run.stop_kind is not None:
            return cls.of_status(run.stop_kind)
        if run.stop_reason is not None:
            return cls(status="finished", reason=run.stop_reason, exit_code=0)
        if run.state.step >= run.num_steps:
            return cls.of_status("finished")
        is_due = stop_at is not None and run.state.step >= stop_at
        return cls(status="stopped", reason=f"stop_at_step={stop_at}" if is_due else "the loop was left", exit_code=0)

    @classmethod
    def of_error(cls, error: BaseException, *, lost: bool = False) -> RunResult:
        """Return the result of a run that an error has ended.

        Args:
            error: the error.
            lost: whether it only says that another rank has failed.
        """
        reason = str(error) if isinstance(error, TrainkitError) else f"{type(error).__name__}: {error}"
        reason = "another rank has failed" if lost else reason + callback_note(error)
        code = error.exit_code if isinstance(error, TrainkitError) else 1
        if isinstance(error, KeyboardInterrupt):
            reason, code = "Ctrl-C, twice", StoppedError.exit_code
        return cls(status=status_of_error(error), reason=reason, exit_code=code)

    def content(self) -> dict[str, Any]:
        """Return the entries of `result.json`."""
        return asdict(self)


ENDING: Final = tuple(field.name for field in fields(RunResult))
"""Keys of `result.json` that say how the run ended."""


def record_failure(folder: RunFolder, error: TrainkitError) -> None:
    """Write the error that ends a run into `result.json`; the progress that rank 0 recorded there stays.

    Rank 0 only knows its own error, which may be that it lost another rank: the process that knows the cause calls
    this function.

    Raises:
        OSError: the file cannot be written.
    """
    complete = list_complete(folder.checkpoints)
    last = {"last": str(complete[0].folder), "steps": complete[0].step} if complete else {"last": None, "steps": 0}
    before = {**last, **skipped_in(folder.checkpoints), "resume": folder.resume_command, **(folder.read_result() or {})}
    folder.write_result({**before, **RunResult.of_error(error).content()})
