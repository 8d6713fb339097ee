"""joblib: worker processes on this machine, which run one job after another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from trainkit.sweeps.backends.base import JobBackend
from trainkit.sweeps.backends.job_spec import Driver, exit_with_driver, run_described


@dataclass(frozen=True, kw_only=True)
class Joblib(JobBackend):
    """Run jobs on joblib's workers (joblib's backend loky).

    Source: https://joblib.readthedocs.io/en/stable/parallel.html
    """

    name: ClassVar[str] = "joblib"
    packages: ClassVar[tuple[str, ...]] = ("joblib",)
    extra: ClassVar[str] = "joblib"
    carries_secrets: ClassVar[bool] = True  # through the pipe of a worker

    @contextmanager
    def connect(self, folder: Path) -> Iterator[_Workers]:  # noqa: ARG002 - it stores nothing
        """Start workers when jobs need them, as many as run at once; stop them at the end of the block."""
        from joblib.externals.loky import get_reusable_executor  # noqa: PLC0415 - only where it is used

        executor = get_reusable_executor(
            max_workers=self.width(), timeout=None, initializer=exit_with_driver, initargs=(Driver.here(),)
        )
        try:
            yield _Workers(executor)
        finally:
            executor.shutdown(wait=True, kill_workers=True)


@dataclass(frozen=True)
class _Workers:
    executor: Any

    def submit(self, path: str, *, slots: int, secrets: Mapping[str, str]) -> _Future:  # noqa: ARG002 - the width counts them
        """Submit a job."""
        return _Future(self.executor.submit(run_described, path, dict(secrets)))


@dataclass(frozen=True)
class _Future:
    future: Any

    def lost(self) -> str | None:
        """Return the exception that ended the worker, if any."""
        if not self.future.done() or self.future.cancelled():
            return "joblib: the job was cancelled." if self.future.cancelled() else None
        error = self.future.exception()
        return None if error is None else f"joblib: {type(error).__name__}: {error}"

    def cancel(self) -> None:
        """Cancel the job if it has not started."""
        self.future.cancel()
