"""How a run ended: the value that `result.json` and the exit code of a command are made of."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Final

from trainkit.errors import StoppedError, TrainkitError, callback_note, status_of_error
from trainkit.run.folder.rollbacks import skipped_in
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.signals import EXIT_CODES, REASONS
from trainkit.trainer.events import Run
from trainkit.trainer.manifest import list_complete


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """How a run ended. Only `reason` is for a reader: nothing depends on its text.

    Example:
        >>> RunResult.of_status("preempted").exit_code, RunResult.of_error(ValueError("no")).status
        (143, 'failed')
    """

    status: str
    """`finished`, the cause of a stop (`trainkit.run.signals.Reason`), or `failed`."""
    reason: str
    exit_code: int
    """Exit code of the command: 0 for a run that reached its end or `stop_at_step`."""

    @classmethod
    def of_status(cls, status: str) -> RunResult:
        """Return the result of a run that was asked to stop, or did all its steps."""
        return cls(status=status, reason=REASONS.get(status, "all steps done"), exit_code=EXIT_CODES[status])

    @classmethod
    def of_run(cls, run: Run) -> RunResult:
        """Return the result of a run whose loop has ended without an error."""
        asked, stop_at = run.stop_reason, run.cfg.stop_at_step
        if asked is not None:
            return cls.of_status(asked) if asked in REASONS else cls(status="finished", reason=asked, exit_code=0)
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


ENDING: Final = tuple(one.name for one in fields(RunResult))
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
    known = {**last, **skipped_in(folder.checkpoints), "resume": folder.resume_command, **(folder.read_result() or {})}
    folder.write_result({**known, **RunResult.of_error(error).content()})
