"""Callbacks of every run: the files of its rows and tables, the startup and the final summary.

`metrics.jsonl` holds every logged row, one JSON object per line; `tables.jsonl` every table of an evaluation.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from trainkit.bounded import expect_map, parse_json
from trainkit.callbacks.compile_time import CompileTime
from trainkit.errors import AbsentFileError
from trainkit.files import open_regular, read_lines, size_of
from trainkit.objectives.tables import Table
from trainkit.report.tables import print_closing, print_summary
from trainkit.storage import naming
from trainkit.trainer.events import Callback, Row, Run


class MetricsFile(Callback):
    """Writes the rows of a run; part of every run, since plots and resumes read them.

    Rows are buffered and written once a second, before a checkpoint is begun, and at the end: a crash loses at most the
    rows of its last second, which a resumed run creates again.
    """

    def __init__(self, *, flush_s: float = 1.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._flush_s = flush_s
        self._clock = clock
        self._rows: list[Row] = []
        self._tables: list[dict[str, Any]] = []
        self._run: Run | None = None
        self._due = -math.inf

    def run_start(self, run: Run) -> None:
        """Drop the rows of an earlier attempt after the step that this one starts from: they are created again."""
        if run.is_owner:
            _keep(run)

    def log(self, run: Run, row: Row) -> None:
        """Add a row."""
        self._add(run, row)

    def eval_end(self, run: Run, metrics: Row) -> None:
        """Add the metrics of an evaluation, as a separate row."""
        self._add(run, {"step": run.state.step, "epoch": run.state.epoch, **metrics})

    def eval_tables(self, run: Run, tables: Mapping[str, Table]) -> None:
        """Add the tables of an evaluation, a line each."""
        place = {"step": run.state.step, "epoch": run.state.epoch}
        self._tables += [{**place, "name": name, **table.to_json()} for name, table in tables.items()]

    def rolled_back(self, run: Run, step: int) -> None:
        """Drop the rows of the steps that are trained again."""
        self._flush(run)
        if run.is_owner:
            _keep(run)

    def state(self) -> dict[str, Any]:
        """Write the buffered rows: a run that resumes from the checkpoint has every earlier row, even after a kill.

        A thread completes the checkpoint, up to a row before `checkpoint_saved` tells so.
        """
        if self._run is not None:
            self._flush(self._run)
        return {}

    def train_end(self, run: Run, result: Mapping[str, Any]) -> None:
        """Write the buffered rows: a run whose metrics cannot be written has not finished."""
        self._flush(run)

    def run_end(self, run: Run, result: Mapping[str, Any]) -> None:
        """Write the buffered rows."""
        self._flush(run)

    def _add(self, run: Run, row: Row) -> None:
        if not run.is_owner:
            return
        self._rows.append(row)
        self._run = run
        if self._clock() >= self._due:
            self._flush(run)

    def _flush(self, run: Run) -> None:
        rows, self._rows = self._rows, []
        tables, self._tables = self._tables, []
        self._due = self._clock() + self._flush_s
        if run.is_owner:
            _append(_path(run), [_line(row) for row in rows])
            _append(_path(run, "tables.jsonl"), [json.dumps(table) for table in tables])


def _path(run: Run, name: str = "metrics.jsonl") -> Path:
    return run.folder / name


def _keep(run: Run) -> None:
    for name in ("metrics.jsonl", "tables.jsonl"):
        keep_until(_path(run, name), run.state.step)


def _append(path: Path, lines: Sequence[str]) -> None:
    if lines:
        text = "".join(f"{line}\n" for line in lines).encode()
        with naming(path, needed=len(text)), open_regular(path, "ab") as file:
            file.write(text)


def _line(row: Row) -> str:
    """Return a row as JSON; NaN and infinity, which JSON cannot represent, become null."""
    return json.dumps({name: value if math.isfinite(value) else None for name, value in row.items()})


def keep_until(path: Path, step: int, *, source: Path | None = None) -> None:
    """Keep the rows up to a step, in one atomic replacement of the file; step 0 keeps none.

    A row that a crash has truncated is dropped too.

    Args:
        path: the file; nothing happens if the one to read is absent.
        step: the last step to keep.
        source: the file to read, of another run; None: `path` itself.
    """
    source = source or path
    try:
        size_of(source)
    except AbsentFileError:
        return
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with naming(path), open_regular(partial, "wb") as new:
            new.writelines(line for line in read_lines(source) if step > 0 and _step_of(line) <= step)
        partial.replace(path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def _step_of(line: bytes) -> float:
    try:
        step: float = expect_map(parse_json(line), {"step": float})["step"]
    except ValueError:
        return math.inf
    return step


class StartupSummary(Callback):
    """Prints the effective values before the first step; part of every run."""

    prints: ClassVar[bool] = True

    def run_start(self, run: Run) -> None:
        """Print the table, and where a resumed run continues."""
        if not run.is_owner:
            return
        rows = {**run.summary, "continues at": f"step {run.state.step:,}" if run.state.step else None}
        print_summary(f"{run.cfg.name}  {_short(run.folder)}", rows, notes=run.notes)


class FinalSummary(Callback):
    """Prints the result, the folder, and the commands to inspect and resume; the last output of every run."""

    prints: ClassVar[bool] = True

    def __init__(self) -> None:
        self._compiling: CompileTime | None = None

    def run_start(self, run: Run) -> None:
        """Count the time of torch.compile, if the run compiles."""
        if run.is_owner and run.cfg.compile.mode != "off":
            self._compiling = CompileTime(lambda: run.state.step)

    def run_end(self, run: Run, result: Mapping[str, Any]) -> None:
        """Print the summary; not if the run only changes its size and continues at once."""
        compile_s = 0.0
        if self._compiling is not None:
            compile_s = self._compiling.seconds
            self._compiling.close()
        if run.is_owner and result.get("status") != "resized":
            print_closing({**result, "compile_s": compile_s}, Path(_short(run.folder)))


def _short(folder: Path) -> str:
    """Return the folder as the user would type it in the current directory."""
    try:
        relative = os.path.relpath(folder)
    except ValueError:  # another drive
        return str(folder)
    return str(folder) if relative.startswith("..") else relative
