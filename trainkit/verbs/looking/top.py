"""`trainkit top DIR [--k N]`: list the best runs of a sweep, or of any folder; `--then` trains the best config
again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainkit.config.check import check_names
from trainkit.config.grammar import refusal
from trainkit.config.resume import compose_anew
from trainkit.config.schema import MonitoredMetric
from trainkit.config.sections import EvalConfig
from trainkit.errors import refuse
from trainkit.redaction import redacted_argument
from trainkit.sweeps.results.leaderboard import Leaderboard, collect
from trainkit.verbs.running.train import exit_code
from trainkit.verbs.support.call import Call


def run(call: Call) -> int:
    """Print the leaderboard of a folder; imports no torch unless it trains."""
    call.check_arity(1, 1, overrides="then" in call.flags)
    board, count = ranked(call)
    if "then" in call.flags and count not in (None, 1):
        raise refusal(f"--k {count}", "--then trains the best run. Use --k 1.")
    if "then" in call.flags and "json" in call.flags:
        raise refusal("--json", "prints only the leaderboard. Leave out --then.")
    shown = board if count is None else board.top(count)
    noun = "points" if any(entry.runs for entry in board.entries) else "runs"
    head = f"{len(shown.entries)} of {len(board.entries)} {noun} by {board.goal}"
    remarks = [*board.verdict(), *_remarks(shown)]
    call.show(_ranking(shown, len(board.entries), remarks), [head, *shown.lines(), *remarks])
    return _train_anew(board, call) if "then" in call.flags else 0


def ranked(call: Call, *, folds: bool = True) -> tuple[Leaderboard, int | None]:
    """Return the runs below the folder of a call, best first, and the number of runs to show; with `folds`, runs of a
    sweep that differ in seed or fold alone are one.

    Raises:
        ConfigError: no folder, no run in it, or invalid flags.
    """
    folder = Path(call.arguments[0]).expanduser()
    goal, count = _goal(call.flags), call.flags.get("k")
    if not folder.is_dir():
        raise refusal(str(folder), "is not a folder. Give the folder of a sweep, or one that contains runs.")
    board = collect(folder, goal, folds=folds)
    if not board.entries:
        raise refusal(str(folder), "contains no run: it has no result.json below it.")
    if goal is not None and all(board.value(entry) is None for entry in board.entries):
        names = sorted({name for entry in board.entries for name in entry.metrics})
        raise refusal(f"--metric {goal.metric}", f"no run has this metric. There are: {', '.join(names) or 'none'}.")
    return board, count


def _ranking(board: Leaderboard, total: int, remarks: Sequence[str]) -> dict[str, Any]:
    """Return the output of `--json`."""
    names = ("job", "status", "folder", "metrics", "steps", "seconds", "overrides")
    runs = [
        {
            "rank": rank,
            "value": board.value(entry),
            "spread": entry.spread.get(board.goal.metric),
            "num_runs": max(len(entry.runs), 1),
            **{name: getattr(entry, name) for name in names},
        }
        for rank, entry in enumerate(board.entries, start=1)
    ]
    goal = {"metric": board.goal.metric, "mode": board.goal.mode}
    return {"version": 1, **goal, "total": total, "runs": runs, "remarks": remarks}


def _remarks(board: Leaderboard) -> Iterator[str]:
    """Yield remarks about the order."""
    values = [value for entry in board.entries if (value := board.value(entry)) is not None]
    if len(set(values)) < len(values):
        yield f"equal {board.goal.metric}: the lower val/loss comes first, then the earlier job"
    if board.goal.metric.startswith("test/"):
        yield f"{board.goal.metric} selected the runs here, so it does not measure their quality"


def _train_anew(board: Leaderboard, call: Call) -> int:
    """Train the config of the best run again, from the beginning."""
    from trainkit.api import train  # noqa: PLC0415 - for --then only

    best = board.entries[0]
    if board.value(best) is None:
        raise refusal("--then", f"no run has {board.goal.metric}: there is no best run.")
    composition = compose_anew(best.folder, call.overrides, config_dirs=call.config_dirs, packages=call.packages)
    refuse(check_names(composition))
    shown = map(redacted_argument, call.overrides)
    sys.stdout.write(f"\n{' '.join(['the config of', str(best.folder), *shown])}\n")
    sys.stdout.flush()
    return exit_code(train(composition))


def _goal(flags: Mapping[str, Any]) -> MonitoredMetric | None:
    metric, mode = flags.get("metric"), flags.get("mode")
    if metric is None:
        if mode is not None:
            raise refusal("--mode", "has no effect without --metric.")
        return None
    return MonitoredMetric.of(EvalConfig(metric=metric, mode=mode))
