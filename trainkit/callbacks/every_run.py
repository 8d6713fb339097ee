"""Callbacks of every run: the file of its metrics, the time of torch.compile, and the summaries at start and end."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Final

from trainkit.errors import AbsentFileError
from trainkit.files import expect_map, json_value, naming, open_regular, parse_json, read_lines, replacing, size_of
from trainkit.objectives.tables import Table
from trainkit.report.tables import print_closing, print_summary
from trainkit.trainer.events import Callback, Row, Run

_log = logging.getLogger(__name__)
_FIRST_STEPS: Final = 3
"""Steps of a start in which other shapes, and code that first runs then, are compiled."""
_TOLERATED: Final = 2
"""Later steps that may compile again without a word: a ragged last batch, then any size."""


class CompileTime:
    """Adds up the time in which torch.compile works, and warns once if later steps compile again; does nothing if
    torch.compile was not imported.

    Args:
        step: returns the number of the current step.
    """

    def __init__(self, step: Callable[[], int] = lambda: 0, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds = 0.0
        self._clock, self._begun = clock, 0.0
        self._step, self._first = step, step()
        self._recompiled: set[int] = set()
        self._handler: Any = getattr(sys.modules.get("torch._dynamo.callback"), "callback_handler", None)
        if self._handler is not None:
            self._handler.register_start_callback(self._start)
            self._handler.register_end_callback(self._stop)

    def _start(self, *_: object) -> None:
        self._begun = self._clock()

    def _stop(self, *args: object) -> None:
        self.seconds += self._clock() - self._begun
        step, number = self._step(), str(getattr(args[0], "compile_id", "") if args else "").rpartition("/")[2]
        if step < self._first + _FIRST_STEPS or number.partition("_")[0] in ("", "0"):  # the number of a variant
            return
        has_warned = len(self._recompiled) > _TOLERATED
        self._recompiled.add(step)
        if not has_warned and len(self._recompiled) > _TOLERATED:
            steps = ", ".join(map(str, sorted(self._recompiled)))
            _log.warning(
                "compile.mode: torch.compile has compiled the same code again in steps %s, which may take longer than "
                "it saves. %s Keep a value that changes at each step in a buffer, or use compile.mode=off.",
                steps,
                _reason(),
            )

    def close(self) -> None:
        """Stop counting."""
        if self._handler is not None:
            self._handler.remove_start_callback(self._start)
            self._handler.remove_end_callback(self._stop)
            self._handler = None


def _reason() -> str:
    """Return torch's reason of the last recompilation, as far as this version of torch keeps it."""
    metrics = getattr(sys.modules.get("torch._dynamo.utils"), "get_compilation_metrics", None)
    values: list[Any] = [] if metrics is None else [getattr(entry, "recompile_reason", None) for entry in metrics()]
    reasons = [str(value) for value in values if value]
    if not reasons:
        return "TORCH_LOGS=recompiles shows its reason."
    first = reasons[-1].partition("(HINT")[0].partition("\n")[0]
    return f"Its reason: {' '.join(first.partition(': ')[2].split())}."


class MetricsFile(Callback):
    """Writes the rows of a run; part of every run, since plots and resumes read them.

    Rows are buffered and written once a second, before a checkpoint is begun, and at the end: a crash loses at most the
    rows of its last second, which a resumed run creates again.
    """

    def __init__(self, *, flush_s: float = 1.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._flush_s = flush_s
        self._clock = clock
        self._waiting: dict[str, list[Mapping[str, Any]]] = {"metrics.jsonl": [], "tables.jsonl": []}
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
        stamp = {"step": run.state.step, "epoch": run.state.epoch}
        self._waiting["tables.jsonl"] += [{**stamp, "name": name, **table.to_json()} for name, table in tables.items()]

    def rolled_back(self, run: Run, step: int) -> None:
        """Drop the rows of the steps that are trained again."""
        self._flush(run)
        if run.is_owner:
            _keep(run)

    def state(self) -> dict[str, Any]:
        """Write the buffered rows: a run that resumes from the checkpoint has every earlier row, even after a kill.

        A thread completes the checkpoint, up to one row before `checkpoint_saved` is called.
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
        self._waiting["metrics.jsonl"].append(row)
        self._run = run
        if self._clock() >= self._due:
            self._flush(run)

    def _flush(self, run: Run) -> None:
        self._due = self._clock() + self._flush_s
        for name, waiting in self._waiting.items():
            rows = list(waiting)
            waiting.clear()
            if run.is_owner and rows:
                append_rows(run.folder / name, rows)


def _keep(run: Run) -> None:
    for name in ("metrics.jsonl", "tables.jsonl"):
        keep_until(run.folder / name, run.state.step)


def append_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Append rows to a file of JSON lines."""
    content = "".join(f"{json.dumps(json_value(row))}\n" for row in rows).encode()
    with naming(path, needed=len(content)), open_regular(path, "ab") as file:
        file.write(content)


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
    with naming(path), replacing(path, sync=False) as new:
        new.writelines(line for line in read_lines(source) if step > 0 and _step_of(line) <= step)


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
            more = {"compile_s": compile_s, "page": run.cfg.report_page}
            print_closing({**result, **more}, Path(_short(run.folder)))


def _short(folder: Path) -> str:
    """Return the folder as the user would type it in the current directory."""
    try:
        relative = os.path.relpath(folder)
    except ValueError:  # another drive
        return str(folder)
    return str(folder) if relative.startswith("..") else relative
