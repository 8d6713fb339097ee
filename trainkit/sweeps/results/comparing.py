"""The page that compares runs: several run folders, or the jobs of a sweep, which writes it at its end."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Final

from trainkit.config.commands import repeating_command
from trainkit.config.identity import difference, tag_of
from trainkit.config.schema import MonitoredMetric, load_resolved
from trainkit.config.values import leaves
from trainkit.errors import UnreadableError, yaml_text
from trainkit.fields import Tag
from trainkit.files import Kind, read_map
from trainkit.report.curves import MetricsReader, number
from trainkit.report.web.comparison_document import ComparedRun, Comparison, DifferingKey, comparison_page
from trainkit.report.web.run_document import Spread
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.record import write_page, write_run_page
from trainkit.sweeps.results.job_results import (
    FOLD,
    JobResult,
    by_point,
    config_of,
    first_config,
    read_entries,
    read_entry,
)
from trainkit.sweeps.results.leaderboard import Leaderboard, command_of

_MOST_DEVICES: Final = 1e6
_LIMIT: Final = 4 << 20
"""Largest number of bytes of a JSON file of a run."""
_FINISHED: Final = ("finished", "stopped")
_ORDER: Final = (Tag.maths, Tag.placement, Tag.speed, Tag.cosmetic)


def compare_runs(folders: Sequence[Path]) -> Comparison:
    """Return the comparison of some runs.

    Raises:
        ConfigError: a folder does not hold the config of a run.
    """
    cfgs = [load_resolved(folder / "resolved.yaml") for folder in folders]
    tags: dict[str, Tag] = {}
    for item in (item for cfg in cfgs[1:] for item in difference(cfgs[0], cfg)):
        tags[item.key] = min(tags.get(item.key, item.tag), item.tag, key=_ORDER.index)
    values = [{".".join(path): yaml_text(value) for path, value in leaves(cfg.to_dict())} for cfg in cfgs]
    differences = [
        DifferingKey(key=key, tag=tag.value, values=[of_run.get(key, "") for of_run in values])
        for key, tag in tags.items()
        if key != "name"
    ]
    names = _names(folders)
    runs = [
        _compared(
            read_entry(folder, job=name),
            settings={item.key: item.values[index] for item in differences if item.tag != Tag.cosmetic.value},
            command=repeating_command(_read(folder / "environment.json", {"argv": list}, {"begun": dict})),
        )
        for index, (folder, name) in enumerate(zip(folders, names, strict=True))
    ]
    goals = [MonitoredMetric.of(cfg.eval) for cfg in cfgs]
    notes = [f"The runs monitor different metrics; the page shows that of {names[0]}."] if len({*goals}) > 1 else []
    return Comparison(title=", ".join(names), goal=goals[0], runs=runs, differences=differences, notes=notes)


def _names(folders: Sequence[Path]) -> list[str]:
    """Return the shortest ends of the paths that differ."""
    parts = [folder.absolute().parts for folder in folders]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(path[-length:]) for path in parts]
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
    commands = {run.job: command_of(point) for point in by_point(entries) for run in point.runs or (point,)}
    keys = dict.fromkeys(key for entry in entries for key in entry.settings)
    cfg = first_config(entries)
    tags = {key: Tag.maths if cfg is None else tag_of(cfg, tuple(key.split("."))).tag for key in keys}
    return Comparison(
        title=f"sweep {folder.absolute().name}",
        goal=board.goal,
        runs=[_compared(entry, settings=entry.settings, command=commands[entry.job]) for entry in entries],
        differences=[
            DifferingKey(key=key, tag=tags[key].value, values=[entry.settings.get(key, "") for entry in entries])
            for key in keys
        ],
        is_sweep=True,
    )


def _compared(entry: JobResult, *, settings: Mapping[str, str], command: str) -> ComparedRun:
    return ComparedRun(
        name=entry.job,
        folder=str(entry.folder),
        status=entry.status,
        is_faded=entry.status not in _FINISHED,
        command=command,
        metrics=entry.metrics,
        seconds=entry.seconds,
        usd_s=_usd_a_second(entry.folder),
        steps=entry.steps,
        settings=settings,
        rows=MetricsReader(entry.folder / "metrics.jsonl").read(),
    )


def _usd_a_second(folder: Path) -> float | None:
    """Return the cost of a second of a run: the price of a device, times the devices of its plan; None: unknown."""
    plan = _read(folder / "plan.json", {"time": dict, "cost": dict})
    hours, device_hours = number(plan.get("time", {}).get("total_h")), number(plan.get("cost", {}).get("device_h"))
    devices = device_hours / hours if hours and device_hours else 0.0
    cfg = config_of(folder) if 0.5 < devices < _MOST_DEVICES else None
    price = None if cfg is None else number(cfg.hardware.get("price_usd_h"))
    return None if price is None else price * round(devices) / 3600


def _read(path: Path, kinds: Mapping[str, Kind], optional: Mapping[str, Kind] | None = None) -> dict[str, Any]:
    try:
        return read_map(path, kinds, optional=optional, limit=_LIMIT)
    except UnreadableError:
        return {}


def spread_of_run(folder: Path) -> Spread | None:
    """Return mean and spread of the jobs of a sweep that differ from this one only in their seed; None if there are
    none.
    """
    try:
        entries = read_entries(folder.parent) if (folder.parent / "sweep.json").is_file() else []
    except UnreadableError:
        return None
    cfg = config_of(folder) if entries else None
    if cfg is None:
        return None
    return spreads_of(entries, MonitoredMetric.of(cfg.eval).metric).get(folder.absolute())


def spreads_of(entries: Sequence[JobResult], metric: str) -> dict[Path, Spread]:
    """Return the folder of a job -> mean and spread of at least two finished jobs that differ from it in the seed."""
    spreads = {}
    for point in by_point(entries):
        values = [run.metrics[metric] for run in point.runs if run.status == "finished" and metric in run.metrics]
        if len(values) > 1 and len(point.repeats(FOLD)) == 1:
            spread = Spread(mean=fmean(values), deviation=stdev(values), num_seeds=len(values))
            spreads.update({run.folder.absolute(): spread for run in point.runs})
    return spreads


FILE: Final = "report.html"

_log = logging.getLogger(__name__)


def page_at_end(folder: Path, board: Leaderboard) -> Path | None:
    """Write the page at the end of a sweep and return its path; None if there is none.

    No page is written with `report_page=false`, or before any job has started. A page that cannot be written is a
    warning: the results of the jobs exist.
    """
    path = folder / FILE
    try:
        cfg = first_config(board.entries)  # the first that is readable decides for all
        if cfg is None or not cfg.report_page:
            return None
        comparison = compare_sweep(folder, board)
        write_page(path, comparison_page(comparison))
    except Exception as error:  # noqa: BLE001 - any error: the results of the sweep exist
        _log.warning("%s cannot be written: %s: %s", path, type(error).__name__, error)
        return None
    _add_spreads(folder, comparison)
    return path


def _add_spreads(folder: Path, comparison: Comparison) -> None:
    """Write the pages of jobs with other seeds again; the rows are those of the comparison."""
    spreads = spreads_of(read_entries(folder), comparison.goal.metric)
    for job in comparison.runs:
        run_dir = Path(job.folder)
        spread, page = spreads.get(run_dir.absolute()), run_dir / FILE
        try:
            if spread is not None and page.is_file():
                write_run_page(RunFolder(run_dir), page, rows=job.rows, spread=spread)
        except Exception as error:  # noqa: BLE001 - as above
            _log.warning("%s cannot be written: %s: %s", page, type(error).__name__, error)
