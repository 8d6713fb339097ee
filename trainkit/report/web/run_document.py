"""The page of a run, as JSON for its scripts: built only from the files of the run, so that it can be built again.

Each file may be absent, damaged or malicious: content of another form is left out.
"""

from __future__ import annotations

import base64
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from trainkit.config.commands import printed_command, repeating_command
from trainkit.config.schema import MonitoredMetric, RunConfig
from trainkit.config.sections import EvalConfig
from trainkit.errors import AbsentFileError, UnreadableError
from trainkit.files import Kind, expect_map, parse_json, read_bytes, read_lines, read_map, read_tail
from trainkit.numerics.batch import AT_EQUAL_CUT, CUT_UNKNOWN
from trainkit.report.curves import Curve, LoggedRows, compact_curve, number
from trainkit.report.numbers import count, duration, figure
from trainkit.report.schemas import kinds_of
from trainkit.report.schemas.files import Environment, Result
from trainkit.report.web.page import cleaned, make_page

SCRIPTS: Final = ("dom.js", "charts.js", "paper.js", "figures.js", "run.js")
_MOST_MARKS: Final = 300
_NAMES_STEP: Final = re.compile(r": (after |rank \d+, )?step \d")
"""Pattern of the reason of an end that already names the step."""
_REFRESH_S: Final = 30
"""Seconds after which a browser loads the page of a running run again: half of the time between two pages."""
_LIMIT: Final = 4 << 20
"""Largest number of bytes of a JSON file that is shown."""
_TAIL: Final = 8 << 20
"""Bytes at the end of a file of rows that are read for its newest ones."""
_MOST_LINES: Final = 2_000
_MOST_FOLDERS: Final = 1_000
_PICTURE_BYTES: Final = 1 << 20
_PNG: Final = b"\x89PNG\r\n\x1a\n"
_CHECKPOINT: Final = re.compile(r"step_(\d{1,12})")
_SETTING: Final[Mapping[str, Kind]] = {"key": str, "value": object, "recipe": object, "set_by": str, "tag": str}
_MOST_CLASSES: Final = 24
"""Up to this many classes, the page shows the whole matrix."""
_MOST_MISTAKES: Final = 12
_MOST_COUNTED: Final = 2**53
"""Samples in a cell: the largest count that a number of 64 bits holds exactly."""
_MOST_LAYERS: Final = 64
_MOST_SPLITS: Final = 3
_LONGEST_VALUE: Final = 20_000
"""Largest number of characters of a value of `result.json`."""


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """The contents of a run folder, as far as they can be read."""

    folder: Path
    result: Mapping[str, Any]
    """`result.json`; empty before the end."""
    environment: Mapping[str, Any]
    settings: list[dict[str, Any]] | None
    """The keys that differ from the recipe (`settings.json`); None: an earlier version began the run."""
    continued_at: list[int]
    """The steps at which later commands continued the run (the same file)."""
    checkpoints: list[int]
    """The steps of the existing checkpoints."""
    best_step: int | None
    restarts: list[dict[str, Any]]
    rollbacks: list[dict[str, Any]] | None
    """`step` and `checkpoint` of each rollback (`result.json`, before the end `rollbacks.json`); None: not recorded."""
    unreadable: list[str] = field(default_factory=list)
    """Existing files that cannot be read, with the reason."""

    @classmethod
    def read(cls, folder: Path) -> RunFiles:
        """Read a run folder."""
        unreadable: list[str] = []

        def map_of(name: str, kinds: Mapping[str, Kind]) -> dict[str, Any]:
            try:
                return read_map(folder / name, {}, optional=kinds, limit=_LIMIT)
            except UnreadableError as error:
                unreadable.extend([] if isinstance(error, AbsentFileError) else [f"{name}: {error}"])
                return {}

        result = map_of("result.json", kinds_of(Result))
        recorded = map_of("settings.json", {"settings": list, "continued_at": list})
        restarts, rollbacks, settings = result.get("restarts"), result.get("rollbacks"), recorded.get("settings")
        if rollbacks is None:
            rollbacks = map_of("rollbacks.json", {"rollbacks": list}).get("rollbacks")
        if restarts is None:
            with suppress(UnreadableError):
                restarts = list(_maps_in(itertools.islice(read_lines(folder / "restarts.jsonl"), _MOST_LINES)))
        saved: list[int | None] = []
        with suppress(OSError):
            paths = itertools.islice((folder / "checkpoints").iterdir(), _MOST_FOLDERS)
            saved += [_step_in(path.name) for path in paths if (path / "manifest.json").is_file()]
        return cls(
            folder=folder,
            result=result,
            environment=map_of("environment.json", kinds_of(Environment)),
            settings=None if settings is None else _sound(settings, _SETTING),
            continued_at=[step for step in recorded.get("continued_at") or [] if type(step) is int and step >= 0],
            checkpoints=sorted(step for step in saved if step is not None),
            best_step=_step_in(map_of("checkpoints/index.json", {"best": (str, type(None))}).get("best")),
            restarts=_sound(restarts or [], {}),
            rollbacks=None if rollbacks is None else _sound(rollbacks, {"step": int, "checkpoint": int}),
            unreadable=unreadable,
        )


def _sound(items: Iterable[Any], kinds: Mapping[str, Kind]) -> list[dict[str, Any]]:
    """Return the items that are maps with keys of these kinds."""
    maps = []
    for item in items:
        with suppress(ValueError):
            maps.append(expect_map(item, kinds))
    return maps


def _maps_in(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the JSON maps among lines."""
    for line in lines:
        with suppress(ValueError):
            yield expect_map(parse_json(line), {})


def _newest(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON maps at the end of a file, the newest first."""
    with suppress(UnreadableError):
        content, is_whole = read_tail(path, _TAIL)
        lines = content.split(b"\n")
        yield from _maps_in(reversed(lines if is_whole else lines[1:]))


def _step_in(name: Any) -> int | None:
    match = _CHECKPOINT.fullmatch(name) if isinstance(name, str) else None
    return int(match[1]) if match else None


def _picture_at(path: Path) -> str | None:
    """Return a PNG of at most 1 MiB as a data URL; None if it is not a PNG, or is larger."""
    with suppress(UnreadableError):
        content = read_bytes(path, limit=_PICTURE_BYTES)
        if content.startswith(_PNG):
            return f"data:image/png;base64,{base64.b64encode(content).decode()}"
    return None


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

    @property
    def goal(self) -> MonitoredMetric:
        """The monitored metric."""
        return MonitoredMetric.of(EvalConfig() if self.cfg is None else self.cfg.eval)


def run_page(facts: RunFacts) -> str:
    """Return the page of a run, which loads itself again while the run goes on; a curve has at most 2,000 points."""

    def order(item: tuple[str, Curve]) -> tuple[bool, bool]:  # the monitored metric and the losses first
        return item[0] != facts.goal.metric, "loss" not in item[0]

    data = cleaned(run_document(facts))
    data["result"] = cleaned(list(flattened(facts.files.result)), _LONGEST_VALUE)
    data["curves"] = [
        {"name": cleaned(name), **compact_curve(curve.points(), curve.num_points)}
        for name, curve in sorted(facts.rows.curves.items(), key=order)
    ]
    return make_page(data, scripts=SCRIPTS, refresh_s=_REFRESH_S if _is_active(facts) else None)


def _is_active(facts: RunFacts) -> bool:
    return facts.standing.state in ("starting", "running")


def run_document(facts: RunFacts) -> dict[str, Any]:
    """Return the content of the page of a run without the curves and the values of `result.json`."""
    files, cfg = facts.files, facts.cfg
    environment = {key: value for key, value in files.environment.items() if key not in ("argv", "notes", "begun")}
    return {
        "version": 1,
        "kind": "run",
        "title": files.folder.name if cfg is None else f"{cfg.name} {files.folder.name}",
        "folder": str(files.folder),
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "state": facts.standing.state,
        "verdict": _verdict(facts),
        "best": _best(facts),
        "commands": list(_commands(files)),
        "trust": [dict(zip(("name", "value", "detail", "good"), row, strict=True)) for row in _trust(facts)],
        "marks": list(_marks(facts)),
        "plan": list(_plan(files.result)),
        "time": _time(facts),
        "ranks": [asdict(rank) for rank in facts.ranks],
        "worst": _worst(files.folder / "evaluations"),
        "figures": figures_of(files.folder),
        "settings": None if files.settings is None else [_setting(setting) for setting in files.settings],
        "recipe": None if cfg is None else cfg.recipe,
        "environment": [[key, value.strip('"')] for key, value in flattened(environment)],
        "notes": list(_notes(facts)),
    }


def _verdict(facts: RunFacts) -> str:
    """Return one line: how the run ended, or its current state."""
    result, state = facts.files.result, facts.standing.state
    if not result or _is_active(facts) or state in ("killed", "silent"):
        return f"This run {facts.standing.words}."
    steps, seconds = result.get("steps"), result.get("seconds")
    reason = str(result.get("reason") or "").strip().splitlines()
    ended, why = f"{state[:1].upper()}{state[1:]}", f": {reason[0]}" if reason else ""
    if _NAMES_STEP.match(why):  # the loss is read only every few steps: more steps were trained than the failed one
        return f"{ended}{why}"
    trained = "" if steps is None else f" after {count(steps)} steps"
    lasted = "" if seconds is None else f" and {duration(seconds)} of training"
    return f"{ended}{trained}{lasted}{why}"


def _best(facts: RunFacts) -> dict[str, Any] | None:
    goal, spread, result = facts.goal, facts.spread, facts.files.result
    curve = facts.rows.curves.get(goal.metric)
    points = [(goal.sign * value, step, value) for step, value in curve.points() if value is not None] if curve else []
    ended = number((result.get("metrics") or {}).get(goal.metric))
    if not points and ended is None:
        return None
    _, step, value = min(points) if points else (0.0, result.get("steps"), ended)
    return {
        "metric": goal.metric,
        "mode": goal.mode,
        "value": value,
        "shown": figure(value) if value is not None else "",
        "step": step,
        "last": ended,
        "spread": spread and f"{figure(spread.mean)} ± {spread.deviation:.2g} over {spread.num_seeds} seeds",
    }


def _commands(files: RunFiles) -> Iterator[dict[str, str]]:
    """Yield the commands that repeat and continue the run."""
    resume = printed_command("resume", [files.folder]) if files.checkpoints else None
    commands = {"repeat": repeating_command(files.environment), "continue": files.result.get("resume") or resume}
    yield from ({"what": what, "command": command} for what, command in commands.items() if command)


def _marks(facts: RunFacts) -> Iterator[dict[str, Any]]:
    """Yield the steps that are marked in the curves."""
    files, evaluations = facts.files, facts.rows.evaluations

    def mark(kind: str, step: int, text: str = "") -> dict[str, Any]:
        return {"kind": kind, "step": step, "text": text}

    for step in files.checkpoints[-_MOST_MARKS:]:
        yield mark("checkpoint", step, "best" if step == files.best_step else "")
    for step in evaluations[:: max(1, math.ceil(len(evaluations) / _MOST_MARKS))]:
        yield mark("evaluation", step)
    for step in files.continued_at[-_MOST_MARKS:]:
        yield mark("restart", step, "continued by another command")
    for event in (files.rollbacks or [])[:_MOST_MARKS]:
        yield mark("rollback", event["step"], f"trained again from step {event['checkpoint']}")
    for event in files.restarts[:_MOST_MARKS]:
        start = event.get("checkpoint") if event.get("step") is None else event.get("step")
        if isinstance(start, int):
            yield mark("restart", start, str(event.get("cause") or ""))


_PLANNED: Final = {"memory": "peak memory", "step_s": "time of a step", "bytes_a_step": "data sent in a step"}


def _plan(result: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield each planned figure with the measured one."""
    plan, measured = result.get("plan") or {}, result.get("measured") or {}
    at_end, differs = (_sound([measured.get(key)], {}) or [{}] for key in ("at_end", "per_cent"))
    sources = {"planned": plan, "measured": measured, "at_end": at_end[0], "per_cent": differs[0]}
    for key, what in _PLANNED.items():
        figures = {name: number(source.get(key)) for name, source in sources.items()}
        if any(value is not None for value in figures.values()):
            yield {"figure": key, "what": what, **figures}


def _time(facts: RunFacts) -> dict[str, Any]:
    """Return how the time was spent, in seconds, and the goodput: the share of the time spent training."""
    files, result = facts.files, facts.files.result
    trained = number(result.get("seconds")) if result else facts.rows.seconds or None
    unknown: dict[str, Any] = {"parts": [], "goodput": None, "note": "The goodput is known at the end of a run."}
    if trained is None:
        return unknown
    waited = min(facts.rows.waited_s, trained)
    parts = [{"name": "steps", "seconds": trained - waited}, {"name": "waiting for data", "seconds": waited}]
    exported, total = number(result.get("model_seconds")) or 0.0, number(result.get("seconds_total"))
    # Only the restart of a single other task does not end the process of rank 0, whose start `seconds_total` is of.
    has_restarted = any(restart.get("kind") != "alone" for restart in files.restarts)
    if total is None or has_restarted:
        total = None if facts.lasted is None else facts.lasted - exported
    if not result:
        return {**unknown, "parts": parts}
    if files.continued_at or files.environment.get("begun"):
        note = "The goodput of this run is not known: the time of the command that began it was not recorded."
    elif facts.cfg is not None and facts.cfg.resume not in (None, "auto"):
        note = "The goodput is not known: the run began at a checkpoint of another run."
    elif total is None or total < trained:
        note = "The goodput is not known: the time of all its starts was not recorded."
    else:
        name = f"{'restarts, ' * has_restarted}start, evaluation and saving"
        parts += [{"name": name, "seconds": total - trained}, {"name": "writing the model", "seconds": exported}]
        total += exported
        return {"parts": parts, "goodput": trained / total if total else None, "note": ""}
    return {"parts": parts, "goodput": None, "note": note}


def _worst(folder: Path) -> dict[str, Any] | None:
    """Return the first evaluation with a table of the worst samples."""
    with suppress(OSError):
        for path in sorted(itertools.islice(folder.iterdir(), _MOST_FOLDERS)):
            with suppress(UnreadableError, ValueError):
                kinds: dict[str, Kind] = {"split": str, "checkpoint": str, "tables": dict}
                record = read_map(path / "evaluation.json", kinds, limit=_LIMIT)
                table = expect_map(record["tables"].get(f"{record['split']}/worst"), {"columns": list, "rows": list})
                rows = [row for row in table["rows"] if isinstance(row, list)][:32]
                return {
                    "what": f"split {record['split']}, checkpoint {record['checkpoint']}",
                    "columns": list(map(str, table["columns"][:12])),
                    "rows": [list(map(str, row[:12])) for row in rows],
                    "picture": _picture_at(path / "worst.png"),
                }
    return None


def _setting(setting: Mapping[str, Any]) -> dict[str, str]:
    tag = setting["tag"] if setting["tag"] in ("maths", "placement", "speed", "cosmetic") else "maths"
    texts = {name: _text(setting[name]) for name in ("value", "recipe")}
    return {"key": setting["key"], **texts, "set_by": setting["set_by"], "tag": tag}


def _notes(facts: RunFacts) -> Iterator[str]:
    yield from _texts(facts.files.environment.get("notes"))[:30]
    yield from facts.files.unreadable
    if facts.cfg is None:
        yield "resolved.yaml cannot be read: the monitored metric is taken to be val/loss."
    if facts.rows.malformed:
        yield f"metrics.jsonl: {count(facts.rows.malformed)} lines are not rows and are left out."
    if facts.rows.left_out:
        named = ", ".join(itertools.islice(sorted(facts.rows.left_out), 3))
        yield f"Of the metrics the first 200 are shown; left out are {named} and others."


def _texts(items: Any) -> list[str]:
    return [text for text in items if isinstance(text, str)] if isinstance(items, list) else []


def flattened(content: Any, key: str = "") -> Iterator[list[str]]:
    """Yield every value of a JSON map with its key, as JSON; a list of plain values is one value.

    Example:
        >>> list(flattened({"plan": {"memory": 8}, "best": None}))
        [['plan.memory', '8'], ['best', 'null']]
    """
    if isinstance(content, Mapping) and (content or not key):
        for name, inner in content.items():
            yield from flattened(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(content, list) and any(isinstance(item, Mapping | list) for item in content):
        for index, inner in enumerate(content):
            yield from flattened(inner, f"{key}[{index}]")
    else:
        yield [key, _text(content)]


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


# The trust strip: facts that support the figures of a run, and facts that do not

_Item = tuple[str, str, str, bool | None]
"""Name, value, detail, and whether it is good; None: neither good nor bad."""
_CUTS: Final = {
    AT_EQUAL_CUT: ("to rounding, at an equal batch.micro_size", ""),
    CUT_UNKNOWN: ("to rounding, on as many replicas", " On another number it may be another training."),
}
"""Part of a note of the run -> agreement of its repetition, and a sentence to add to the note."""
_AGREEMENTS: Final = {"equal": "equal to the bit", "rounding": "equal to rounding", "different": "different numbers"}


def _trust(facts: RunFacts) -> Iterator[_Item]:
    files, result = facts.files, facts.files.result
    fingerprint = str(result.get("fingerprint") or files.environment.get("fingerprint") or "")
    yield "fingerprint", fingerprint[:12] or "unknown", fingerprint, None
    weights = str(result.get("weights_sha256") or "")
    yield "weights (SHA-256)", weights[:12] or "not yet", weights or "hashed at the end of a run", None
    yield "reproducible", *_reproducible(files.environment, facts.cfg)
    proved, name = result.get("proved"), "last proof"  # of this training on this placement
    if not result:
        yield name, "not yet", "looked up at the end of a run", None
    elif not proved:
        yield name, "none", "trainkit prove, with the arguments of this run, compares it with one device", None
    else:
        same, numbers = proved.get("same_training"), str(proved.get("same_numbers"))
        detail = f"{proved.get('date')}: same training: {same or 'not asked'}; {proved.get('command')}"
        yield name, _AGREEMENTS.get(numbers, numbers), detail, numbers != "different" and same != "no"
    kinds = Counter(str(restart.get("kind")) for restart in files.restarts)
    restarts = len(files.restarts) + (number(result.get("restarts_not_listed")) or 0)
    detail = ", ".join(f"{many} {kind}" for kind, many in kinds.items()) or "every task ran from its start to its end"
    yield "restarts", count(int(restarts)), detail, None if restarts else True
    if files.rollbacks:
        last = files.rollbacks[-1]
        detail = f"the last: step {last['step']}, trained again from the checkpoint of step {last['checkpoint']}"
        yield "rollbacks", count(len(files.rollbacks)), detail, None
    elif files.rollbacks is not None:
        yield "rollbacks", "0", "no step was trained again because it was not finite", True
    # How many samples the weights have not seen exactly once per epoch.
    skipped, name = result.get("skipped_steps"), "samples repeated or skipped"
    if skipped is None or _is_active(facts):
        yield name, "not yet", "counted at the end of a run", None
    elif not skipped:
        again = "; a step that was trained again counts once" if files.restarts or files.rollbacks else ""
        yield name, "0", f"no step was left out{again}", True
    else:
        more = number(result.get("skipped_steps_not_listed"))
        lost = sum(step["num_samples"] for step in _sound(skipped, {"num_samples": int}))
        steps = f"of {count(len(skipped) + int(more or 0))} steps that were not finite (skipped_steps)"
        yield name, f"{'' if more is None else 'at least '}{count(lost)}", steps, False


def _reproducible(environment: Mapping[str, Any], cfg: RunConfig | None) -> tuple[str, str, bool | None]:
    """Return whether a repetition of the command gives the same bits, even on other replicas, or the reason if not."""
    if cfg is None:
        return "unknown", "resolved.yaml cannot be read", None
    if (environment.get("git") or {}).get("dirty"):
        return "no", "the code had changes that no commit holds", False
    strategy, timing = cfg.strategy, ""  # why updates depend on the speed of processes or threads
    alone = strategy.get("workers") == 1 or len(strategy.get("compute_devices") or "ab") == 1
    if strategy.get("mode") == "async" and strategy.get("replay") is None and not alone:
        timing = "strategy.mode=async applies gradients as they arrive"
    elif strategy.get("spare_mode") == "replace" and strategy.get("spare_replicas"):
        timing = "strategy.spare_mode=replace makes a step of the first shards that arrive"
    if timing:
        return "no", f"{timing}: another training every time", False
    if cfg.numerics.reproducible:
        return "to the bit", "numerics.reproducible=true: sums have one order on any number of replicas", True
    # The notes of the command that began the run, and of the last one that continued it.
    notes = [note for record in (environment.get("begun") or {}, environment) for note in _texts(record.get("notes"))]
    for words, (value, more) in _CUTS.items():
        if reason := next((note for note in notes if words in note), None):
            return value, f"{reason}{more}", None
    detail = "numerics.reproducible=false: another number of processes, threads or devices rounds differently"
    return "to rounding", detail, None


# What callbacks show: a confusion matrix, the samples with the highest loss, layers


def figures_of(folder: Path) -> dict[str, Any]:
    """Return the figures of a run folder: `confusion`, `samples` and `layers`, each empty if the run has none."""
    samples: list[dict[str, Any]] = []
    with suppress(OSError):
        for path in sorted((folder / "plots").glob("worst_*.png"))[:_MOST_SPLITS]:
            split = path.stem.removeprefix("worst_")
            samples.append({"split": split, "file": f"plots/{path.name}", "picture": _picture_at(path)})
    matrices: dict[str, dict[str, Any] | None] = {}  # the newest one of each split
    for row in _newest(folder / "tables.jsonl"):
        split, _, name = str(row.get("name")).rpartition("/")
        if name == "confusion" and split not in matrices:
            matrices[split] = _matrix(row)
            if len(matrices) >= _MOST_SPLITS:
                break
    confusion = [{"split": split, **matrix} for split, matrix in matrices.items() if matrix is not None]
    return {"confusion": confusion, "samples": samples, "layers": _layers(folder / "histograms.jsonl")}


def _matrix(row: dict[str, Any]) -> dict[str, Any] | None:
    columns, rows = row.get("columns"), row.get("rows")
    if not isinstance(columns, list) or not isinstance(rows, list) or len(rows) != len(columns) - 1 or not rows:
        return None
    counts: list[list[float]] = []
    for line in rows:
        cells = [number(cell) for cell in line[1:]] if isinstance(line, list) else []
        counts.append([cell for cell in cells if cell is not None and 0 <= cell <= _MOST_COUNTED])
        if len(counts[-1]) != len(rows):
            return None
    classes, size = list(map(str, columns[1:])), len(rows)
    wrong = [(counts[i][j], i, j) for i in range(size) for j in range(size) if i != j and counts[i][j] > 0]
    wrong.sort(key=lambda mistake: (-mistake[0], mistake[1], mistake[2]))
    totals = [sum(line) for line in counts]
    hits, total = math.fsum(counts[i][i] for i in range(size)), math.fsum(totals)
    return {
        "step": number(row.get("step")),
        "right": hits / total if total else None,
        "samples": total,
        "num_classes": size,
        "classes": classes if size <= _MOST_CLASSES else [],
        "counts": counts if size <= _MOST_CLASSES else [],
        "mistakes": [
            {"class": classes[i], "guess": classes[j], "count": many, "share": many / totals[i]}
            for many, i, j in wrong[:_MOST_MISTAKES]
        ],
    }


def _layers(path: Path) -> dict[str, Any] | None:
    """Return the newest record of the layers."""
    row, kinds = next(_newest(path), None), dict[str, list[dict[str, Any]]]()
    if row is None:
        return None
    for kind in ("gradients", "activations", "weights"):
        for name, layer in itertools.islice(row[kind].items() if isinstance(row.get(kind), dict) else (), _MOST_LAYERS):
            if isinstance(layer, dict):
                quantiles = layer.get("quantiles")
                values = [number(value) for value in quantiles] if isinstance(quantiles, list) else []
                low, _, middle, _, high = values if len(values) == 5 else [None] * 5
                names = {"largest": "largest", "rms": "rms", "zeros": "zero_share", "nonfinite": "nonfinite"}
                more = {shown: number(layer.get(key)) for shown, key in names.items()}
                kinds.setdefault(kind, []).append({"name": name, "low": low, "median": middle, "high": high, **more})
    return {"step": number(row.get("step")), "kinds": kinds}
