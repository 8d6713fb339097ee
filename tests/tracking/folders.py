"""Run folders without a training, and services that only record."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainkit.tracking.service import LoggedRow, TrackedRun
from trainkit.trainer.events import Callback

FINGERPRINT = "0b29" * 16


def run_folder(path: Path, *, resolved: str = "name: digits\nseed: 0\n") -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "resolved.yaml").write_text(resolved)
    (path / "environment.json").write_text(json.dumps({"fingerprint": FINGERPRINT}))
    return path


def add_rows(folder: Path, *rows: Mapping[str, float | None]) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(f"{json.dumps(row)}\n" for row in rows)


@dataclass
class Recording:
    """A service that keeps what it is sent; `fails` is raised by the next call."""

    opened: list[TrackedRun] = field(default_factory=list)
    rows: list[LoggedRow] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    closed: list[tuple[bool, str]] = field(default_factory=list)
    fails: Exception | None = None
    holds_last: bool = False

    def open(self, run: TrackedRun) -> None:
        self._fail()
        self.opened.append(run)

    def log(self, rows: Sequence[LoggedRow]) -> None:
        self._fail()
        self.rows += rows

    def add_file(self, path: Path, name: str) -> None:
        self.files.append(name)

    def close(self, *, has_finished: bool, status: str) -> None:
        self.closed.append((has_finished, status))

    def _fail(self) -> None:
        error, self.fails = self.fails, None
        if error is not None:
            raise error

    @property
    def points(self) -> list[tuple[int, dict[str, float]]]:
        return [(step, dict(values)) for step, values in self.rows]


@dataclass(frozen=True, kw_only=True)
class Keyed(Callback):
    """A logger with a secret."""

    api_key: str
