"""Collect runs for the page that compares them: run folders beside each other, or the jobs of a sweep."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Final

from trainkit.config.composition import leaves
from trainkit.config.identity import Difference, difference, tag_of
from trainkit.config.schema import MonitoredMetric, RunConfig, load_resolved
from trainkit.config.secrets import redacted
from trainkit.errors import ConfigError, UnreadableError, yaml_text
from trainkit.fields import Tag
from trainkit.report.web.comparison_document import ComparedRun, Comparison, DifferingKey
from trainkit.report.web.curves import MetricsReader
from trainkit.report.web.run_document import Spread
from trainkit.sweeps.results.job_results import JobResult, read_entries, read_entry
from trainkit.sweeps.results.leaderboard import Leaderboard, command_of, key_value

_SEED: Final = "seed"
_FINISHED: Final = ("finished", "stopped")
_ORDER: Final = (Tag.maths, Tag.placement, Tag.speed, Tag.cosmetic)


def compare_runs(folders: Sequence[Path]) -> Comparison:
    """Return the comparison of some runs.

    Raises:
        ConfigError: a folder does not hold the config of a run.
    """
    cfgs = [load_resolved(folder / "resolved.yaml") for folder in folders]
    pairs = [difference(cfgs[0], cfg) for cfg in cfgs[1:]]
    values = [_values(cfg) for cfg in cfgs]
    differences = [
        DifferingKey(key=key, tag=tag.value, values=[one.get(key, "") for one in values])
        for key, tag in _tags(pairs).items()
        if key != "name"
    ]
    names = _names(folders)
    runs = [
        _compared(
            read_entry(folder, job=name),
            settings={one.key: one.values[place] for one in differences if one.tag != Tag.cosmetic.value},
            command="",
        )
        for place, (folder, name) in enumerate(zip(folders, names, strict=True))
    ]
    goals = {MonitoredMetric.of(cfg.eval) for cfg in cfgs}
    notes = [] if len(goals) == 1 else [f"The runs monitor different metrics; shown is that of {names[0]}."]
    return Comparison(
        title=", ".join(names),
        goal=MonitoredMetric.of(cfgs[0].eval),
        runs=runs,
        differences=differences,
        notes=notes,
    )


def _values(cfg: RunConfig) -> dict[str, str]:
    return {".".join(path): yaml_text(value) for path, value in leaves(redacted(cfg.to_dict())[0])}


def _tags(pairs: Sequence[Sequence[Difference]]) -> dict[str, Tag]:
    """Return key -> the most consequential tag that any pair gives it."""
    found: dict[str, Tag] = {}
    for one in (one for pair in pairs for one in pair):
        known = found.get(one.key, one.tag)
        found[one.key] = min(known, one.tag, key=_ORDER.index)
    return found


def _names(folders: Sequence[Path]) -> list[str]:
    """Return the shortest ends of the paths that differ."""
    parts = [folder.absolute().parts for folder in folders]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(one[-length:]) for one in parts]
        if len({*names}) == len(names):
            return names
    return [str(folder) for folder in folders]


def compare_sweep(folder: Path, board: Leaderboard) -> Comparison:
    """Return the comparison of the jobs of a sweep.

    Args:
        folder: the folder of the sweep.
        board: its leaderboard, whose metric is the goal.
    """
    entries = read_entries(folder)
    settings = [dict(key_value(text) for text in entry.overrides) for entry in entries]
    keys = dict.fromkeys(key for one in settings for key in one)
    cfg = next((known for entry in entries if (known := _config(entry.folder)) is not None), None)
    return Comparison(
        title=f"sweep {folder.absolute().name}",
        goal=board.goal,
        runs=[
            _compared(entry, settings=one, command=command_of(entry))
            for entry, one in zip(entries, settings, strict=True)
        ],
        differences=[
            DifferingKey(key=key, tag=_tag(cfg, key), values=[one.get(key, "") for one in settings]) for key in keys
        ],
        is_sweep=True,
    )


def wants_page(board: Leaderboard) -> bool:
    """Return whether the jobs of a sweep ask for pages: the first whose config can be read decides for all."""
    cfg = next((known for entry in board.entries if (known := _config(entry.folder)) is not None), None)
    return cfg is not None and cfg.report_page


def _config(folder: Path) -> RunConfig | None:
    try:
        return load_resolved(folder / "resolved.yaml")
    except (ConfigError, UnreadableError):
        return None


def _tag(cfg: RunConfig | None, key: str) -> str:
    return Tag.maths.value if cfg is None else tag_of(cfg, tuple(key.split("."))).tag.value


def _compared(entry: JobResult, *, settings: Mapping[str, str], command: str) -> ComparedRun:
    return ComparedRun(
        name=entry.job,
        folder=str(entry.folder),
        status=entry.status,
        is_faded=entry.status not in _FINISHED,
        command=command or _repeated(entry.folder),
        metrics=entry.metrics,
        seconds=entry.seconds,
        steps=entry.steps,
        settings=settings,
        rows=MetricsReader(entry.folder / "metrics.jsonl").read(),
    )


def _repeated(folder: Path) -> str:
    """Return the command that continues the run of a folder."""
    return shlex.join(["trainkit", "resume", str(folder)])


def spread_of_run(folder: Path) -> Spread | None:
    """Return mean and spread of the jobs of a sweep that differ from one of them in their seed alone; None: no such."""
    try:
        entries = read_entries(folder.parent) if (folder.parent / "sweep.json").is_file() else []
    except UnreadableError:
        return None
    own = next((entry for entry in entries if entry.folder.absolute() == folder.absolute()), None)
    cfg = _config(folder)
    if own is None or cfg is None:
        return None
    metric = MonitoredMetric.of(cfg.eval).metric
    alike = [entry for entry in entries if _without_seed(entry) == _without_seed(own) and entry.status == "finished"]
    values: list[Any] = [entry.metrics[metric] for entry in alike if metric in entry.metrics]
    if len(values) < 2:
        return None
    return Spread(mean=fmean(values), deviation=stdev(values), num_seeds=len(values))


def _without_seed(entry: JobResult) -> tuple[str, ...]:
    return tuple(text for text in entry.arguments if key_value(text)[0] != _SEED)
