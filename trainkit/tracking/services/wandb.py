"""Send a run to Weights & Biases: with `mode=offline` into `RUN/tracking/wandb`, for `wandb sync`.

Source: W&B Python reference, `wandb.init` (id, resume, mode) and `wandb.Settings`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import wandb

from trainkit.tracking.service import LoggedRow, TrackedRun


class _Wandb:
    holds_last = True

    def __init__(self) -> None:
        self._run: wandb.Run | None = None

    def open(self, run: TrackedRun) -> None:
        self._run = wandb.init(
            project=run.project,
            id=run.id,
            name=run.name,
            dir=run.folder / "tracking",
            mode="offline" if run.mode == "offline" else "online",
            resume="allow",
            tags=[f"fingerprint:{run.fingerprint[:16]}"],
            config={**run.parameters, "trainkit/fingerprint": run.fingerprint},
            allow_val_change=True,
            # Disable its own collection, which would record the sending process: its command, its output, its load.
            settings=wandb.Settings(
                silent=True, console="off", save_code=False, disable_git=True, disable_code=True, x_disable_stats=True,
                x_disable_meta=True, x_save_requirements=False, x_transaction_log_flush_interval=0.5,
            ),
        )  # fmt: skip

    def log(self, rows: Sequence[LoggedRow]) -> None:
        assert self._run is not None
        for row in rows:
            self._run.log(dict(row.values), step=row.step)

    def add_file(self, path: Path, name: str) -> None:
        assert self._run is not None
        self._run.save(str(path), base_path=str(path)[: -len(name)], policy="now")

    def close(self, *, has_finished: bool, status: str) -> None:
        assert self._run is not None
        self._run.summary["trainkit/status"] = status
        self._run.finish(exit_code=0 if has_finished else 1)


def make() -> _Wandb:
    """Return the service."""
    return _Wandb()
