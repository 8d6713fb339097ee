"""Content of the page of a run, as JSON: built only from the files of the run, so that it can be built again."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from trainkit.config.commands import printed_command
from trainkit.config.schema import MonitoredMetric, RunConfig
from trainkit.redaction import mask
from trainkit.report.curves import Curve, LoggedRows, compact_curve, number
from trainkit.report.numbers import count, duration, figure
from trainkit.report.web.commands import printable_command, repeating_command
from trainkit.report.web.figures_document import figures_of
from trainkit.report.web.page import make_page, printable, to_json
from trainkit.report.web.run_files import RunFiles
from trainkit.report.web.trust import trust_strip

SCRIPTS: Final = ("dom.js", "charts.js", "paper.js", "figures.js", "run.js")
_MOST_MARKS: Final = 300
_NAMES_STEP: Final = re.compile(r": (after |rank \d+, )?step \d")
"""Pattern of the reason of an end that already names the step."""
_REFRESH_S: Final = 30
"""Seconds after which a browser loads the page of a running run again: half of the time between two pages."""


@dataclass(frozen=True, kw_only=True)
class Standing:
    """The current state of a run."""

    state: str
    """`running`, `finished`, `killed` ..."""
    step: int | None
    words: str
    """The state in words: `runs as process 7 on host, at step 3`."""


@dataclass(frozen=True, kw_only=True)
class RankLine:
    """Facts about one rank."""

    rank: int
    step: int | None
    phase: str
    log: str
    """Log of the rank, relative to the run folder."""


@dataclass(frozen=True, kw_only=True)
class Spread:
    """The best metric of the runs that differ from this one only in the seed."""

    mean: float
    deviation: float
    """Standard deviation of the sample."""
    num_seeds: int


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """The input for the page of a run."""

    files: RunFiles
    rows: LoggedRows
    cfg: RunConfig | None
    """The config; None: `resolved.yaml` cannot be read."""
    standing: Standing
    ranks: Sequence[RankLine] = ()
    spread: Spread | None = None
    lasted: float | None = None
    """Seconds from the start of the last command to its end, with all restarts, to a second; None: unknown."""


def run_page(facts: RunFacts) -> str:
    """Return the page of a run, which loads itself again while the run goes on; a curve has at most 2,000 points."""
    curves = [{"name": printable(name), **compact_curve(curve.points(), curve.seen)} for name, curve in _ordered(facts)]
    data = {**run_document(facts), "curves": curves}
    refresh_s = _REFRESH_S if facts.standing.state in ("starting", "running") else None
    return make_page(data["title"], to_json(data), scripts=SCRIPTS, refresh_s=refresh_s)


def _ordered(facts: RunFacts) -> list[tuple[str, Curve]]:
    """Return the curves, the monitored metric and the losses first."""
    goal = goal_of(facts)
    return sorted(facts.rows.curves.items(), key=lambda item: (item[0] != goal.metric, "loss" not in item[0]))


def goal_of(facts: RunFacts) -> MonitoredMetric:
    """Return the monitored metric of a run."""
    return MonitoredMetric(metric="val/loss", mode="min") if facts.cfg is None else MonitoredMetric.of(facts.cfg.eval)


def run_document(facts: RunFacts) -> dict[str, Any]:
    """Return the content of the page of a run without the curves."""
    files, cfg = facts.files, facts.cfg
    name = files.folder.name if cfg is None else f"{cfg.name} {files.folder.name}"
    return {
        "version": 1,
        "kind": "run",
        "title": printable(name),
        "folder": printable(str(files.folder)),
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "state": printable(facts.standing.state, 40),
        "verdict": printable(mask(_verdict(facts)), 600),
        "best": _best(facts),
        "commands": list(_commands(facts)),
        "trust": trust_strip(files, cfg, state=facts.standing.state),
        "marks": list(_marks(facts)),
        "plan": list(_plan(files.result)),
        "time": _time(facts),
        "ranks": [vars_of(one) for one in facts.ranks],
        "worst": _worst(files),
        "figures": figures_of(files.folder),
        "settings": _settings(files),
        "recipe": None if cfg is None or cfg.recipe is None else printable(cfg.recipe),
        "environment": list(_environment(files.environment)),
        "result": list(flattened(files.result)),
        "notes": [printable(mask(text)) for text in _notes(facts)],
    }


def vars_of(rank: RankLine) -> dict[str, Any]:
    """Return a rank as a row of a table."""
    return {"rank": rank.rank, "step": rank.step, "phase": printable(rank.phase), "log": printable(rank.log)}


def _verdict(facts: RunFacts) -> str:
    """Return one line: how the run ended, or its current state."""
    result, state = facts.files.result, facts.standing.state
    if not result or state in ("starting", "running", "killed", "silent"):
        return f"This run {facts.standing.words}."
    steps, seconds = result.get("steps"), result.get("seconds")
    reason = str(result.get("reason") or "").strip().splitlines()
    ended, why = f"{state[:1].upper()}{state[1:]}", f": {reason[0]}" if reason else ""
    if _NAMES_STEP.match(why):  # the loss is read only every few steps: more steps were trained than the failed one
        return f"{ended}{why}"
    trained = "" if not isinstance(steps, int) else f" after {count(steps)} steps"
    lasted = "" if seconds is None else f" and {duration(seconds)} of training"
    return f"{ended}{trained}{lasted}{why}"


def _best(facts: RunFacts) -> dict[str, Any] | None:
    goal = goal_of(facts)
    curve = facts.rows.curves.get(goal.metric)
    points = [(goal.sign * value, step, value) for step, value in curve.points() if value is not None] if curve else []
    ended = number((facts.files.result.get("metrics") or {}).get(goal.metric))
    if not points and ended is None:
        return None
    _, step, value = min(points) if points else (0.0, facts.files.result.get("steps"), ended)
    spread = facts.spread
    return {
        "metric": printable(goal.metric),
        "mode": goal.mode,
        "value": value,
        "shown": figure(value) if value is not None else "",
        "step": step,
        "last": ended,
        "spread": None
        if spread is None
        else f"{figure(spread.mean)} ± {figure(spread.deviation)} over {spread.num_seeds} seeds",
    }


def _commands(facts: RunFacts) -> Iterator[dict[str, str]]:
    """Yield the commands that repeat and continue the run."""
    repeat = repeating_command(facts.files.environment)
    if repeat:
        yield {"what": "repeat", "command": repeat}
    resume = facts.files.result.get("resume") or (
        printed_command("resume", [facts.files.folder]) if facts.files.checkpoints else None
    )
    if isinstance(resume, str):
        yield {"what": "continue", "command": printable_command(resume)}


def _marks(facts: RunFacts) -> Iterator[dict[str, Any]]:
    """Yield the steps that are marked in the curves."""
    files = facts.files
    for step in files.checkpoints[-_MOST_MARKS:]:
        yield {"kind": "checkpoint", "step": step, "text": "best" if step == files.best_step else ""}
    evaluations = facts.rows.evaluations
    stride = max(1, math.ceil(len(evaluations) / _MOST_MARKS))
    for step in evaluations[::stride]:
        yield {"kind": "evaluation", "step": step, "text": ""}
    for step in files.continued_at[-_MOST_MARKS:]:
        yield {"kind": "restart", "step": step, "text": "continued by another command"}
    for one in (files.rollbacks or [])[:_MOST_MARKS]:
        yield {"kind": "rollback", "step": one["step"], "text": f"trained again from step {one['checkpoint']}"}
    for one in files.restarts[:_MOST_MARKS]:
        at = one.get("checkpoint") if one.get("step") is None else one.get("step")
        if isinstance(at, int):
            yield {"kind": "restart", "step": at, "text": printable(str(one.get("cause") or ""))}


_PLANNED: Final = {"memory": "peak memory", "step_s": "time of a step", "bytes_a_step": "data sent in a step"}


def _plan(result: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield each planned figure with the measured one."""
    plan, measured = result.get("plan") or {}, result.get("measured") or {}
    at_end, differs = (_map_in(measured, key) for key in ("at_end", "per_cent"))
    for key, what in _PLANNED.items():
        row = {"planned": plan.get(key), "measured": measured.get(key), "at_end": at_end.get(key)}
        found = {name: number(value) for name, value in row.items()}
        if any(value is not None for value in found.values()):
            yield {"figure": key, "what": what, **found, "per_cent": number(differs.get(key))}


def _map_in(content: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = content.get(key)
    return found if isinstance(found, dict) else {}


def _time(facts: RunFacts) -> dict[str, Any]:
    """Return how the time was spent, in seconds, and the goodput: the share of the time spent training."""
    result, rows = facts.files.result, facts.rows
    trained = number(result.get("seconds")) if result else rows.seconds or None
    if trained is None:
        return {"parts": [], "goodput": None, "note": "The goodput is known at the end of a run."}
    waited = min(rows.waited_s, trained)
    parts = [{"name": "steps", "seconds": trained - waited}, {"name": "waiting for data", "seconds": waited}]
    exported = number(result.get("model_seconds")) or 0.0
    total = _whole_time(facts, trained, exported)
    if isinstance(total, str):
        return {"parts": parts, "goodput": None, "note": total}
    started_again = "restarts, " if any(map(_is_of_all, facts.files.restarts)) else ""
    parts += [
        {"name": f"{started_again}start, evaluation and saving", "seconds": total - exported - trained},
        {"name": "writing the model", "seconds": exported},
    ]
    return {"parts": parts, "goodput": trained / total if total else None, "note": ""}


def _whole_time(facts: RunFacts, trained: float, exported: float) -> float | str:
    """Return the seconds of all starts of the run together, or the reason why they are unknown."""
    files, total = facts.files, number(facts.files.result.get("seconds_total"))
    if not files.result:
        return "The goodput is known at the end of a run."
    if files.continued_at or files.environment.get("begun"):
        return "The goodput of this run is not known: the time of the command that began it was not recorded."
    if facts.cfg is not None and facts.cfg.resume not in (None, "auto"):
        return "The goodput is not known: the run began at a checkpoint of another run."
    if total is None or any(map(_is_of_all, files.restarts)):  # `seconds_total` is that of the last start of rank 0
        total = None if facts.lasted is None else facts.lasted - exported
    if total is None or total < trained:
        return "The goodput is not known: the time of all its starts was not recorded."
    return total + exported


def _is_of_all(restart: Mapping[str, Any]) -> bool:
    """Return whether a restart ended the process of rank 0; only the restart of a single other task does not."""
    return restart.get("kind") != "alone"


def _worst(files: RunFiles) -> dict[str, Any] | None:
    found = files.evaluation
    if found is None:
        return None
    table = found["worst"]
    rows = [row for row in table.get("rows") or [] if isinstance(row, list)][:32]
    return {
        "what": printable(f"split {found['split']}, checkpoint {found['checkpoint']}"),
        "columns": [printable(str(name), 60) for name in table["columns"][:12]],
        "rows": [[printable(str(cell), 200) for cell in row[:12]] for row in rows],
        "picture": files.picture,
    }


def _settings(files: RunFiles) -> list[dict[str, str]] | None:
    if files.settings is None:
        return None
    return [
        {
            "key": printable(one["key"]),
            "value": printable(mask(_text(one["value"]))),
            "recipe": printable(mask(_text(one["recipe"]))),
            "set_by": printable(one["set_by"]),
            "tag": one["tag"] if one["tag"] in ("maths", "placement", "speed", "cosmetic") else "maths",
        }
        for one in files.settings
    ]


def _environment(content: Mapping[str, Any]) -> Iterator[list[str]]:
    for key, value in flattened({key: content[key] for key in content if key not in ("argv", "notes", "begun")}):
        yield [key, value.strip('"')]


def _notes(facts: RunFacts) -> Iterator[str]:
    yield from (text for text in (facts.files.environment.get("notes") or [])[:30] if isinstance(text, str))
    yield from facts.files.unreadable
    if facts.cfg is None:
        yield "resolved.yaml cannot be read: the monitored metric is taken to be val/loss."
    if facts.rows.malformed:
        yield f"metrics.jsonl: {count(facts.rows.malformed)} lines are not rows and are left out."
    if facts.rows.left_out:
        named = ", ".join(itertools.islice(sorted(facts.rows.left_out), 3))
        yield f"Of the metrics the first 200 are shown; left out are {named} and others."


def flattened(content: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yield every value of a JSON map with its key, as JSON; a list of plain values is one value.

    Example:
        >>> list(flattened({"plan": {"memory": 8}, "best": None}))
        [['plan.memory', '8'], ['best', 'null']]
    """
    for key, value in _leaves(content, ""):
        yield [printable(key), printable(mask(_text(value)), 20_000)]


def _leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _leaves(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list) and any(isinstance(item, Mapping | list) for item in value):
        for place, inner in enumerate(value):
            yield from _leaves(inner, f"{key}[{place}]")
    else:
        yield key, value


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
