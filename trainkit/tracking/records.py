"""Read the data for a tracker from a run folder: parameters, new metrics, files."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final

from trainkit.errors import AbsentFileError, UnreadableError
from trainkit.files import parse_json, parse_yaml, read_lines, read_map, read_text, refuse_link, size_of
from trainkit.redaction import mask
from trainkit.tracking.service import LoggedRow, TrackedRun
from trainkit.tracking.state import TrackingState

_ROWS: Final = ("metrics.jsonl", "evaluations.jsonl")
_COUNTERS: Final = frozenset({"step"})
_MOST_PARAMETERS, _MOST_FILES, _MOST_METRICS = 2000, 1000, 10_000
_LONGEST_NAME: Final = 200
_BATCH: Final = 500
"""Largest number of rows per message."""


def tracked_run(folder: Path, state: TrackingState) -> TrackedRun:
    """Return the description of a run for a tracker; it has no secrets, since no file of a run folder has any.

    Raises:
        UnreadableError: a file of the run folder cannot be read.
    """
    try:
        values = parse_yaml(read_text(folder / "resolved.yaml"))
    except ValueError as error:
        raise UnreadableError(folder / "resolved.yaml", str(error)) from None
    values = values if isinstance(values, Mapping) else {}
    found = read_map(folder / "environment.json", {"fingerprint": str})
    parameters = dict(islice(_flat(values, ""), _MOST_PARAMETERS))
    if state.placement:  # a resumed run may be elsewhere, and a mixture of two placements is that of no run
        parameters = {name: value for name, value in parameters.items() if not is_placement(name)} | state.placement
    return TrackedRun(
        folder=folder,
        id=state.id,
        project=state.project,
        mode=state.mode,
        name=f"{values.get('name') or 'run'}/{folder.name}"[:_LONGEST_NAME],
        fingerprint=found["fingerprint"][:64],
        parameters=parameters,
    )


def is_placement(name: str) -> bool:
    """Return whether a parameter is a key of the placement.

    Example:
        >>> is_placement("strategy.replicas"), is_placement("optimizer.lr")
        (True, False)
    """
    return name.partition(".")[0] in ("strategy", "cluster")


def _flat(values: Mapping[str, Any], above: str) -> Iterator[tuple[str, str | float | bool]]:
    for name, value in values.items():
        key = f"{above}{name}"
        if isinstance(value, Mapping):
            yield from _flat(value, f"{key}.")
        elif isinstance(value, str | bool | int | float):
            yield key, mask(value) if isinstance(value, str) else value
        elif value is not None:
            yield key, mask(json.dumps(value, default=str))


class NewRows:
    """The rows of a run folder that were not sent to a tracker yet.

    Args:
        folder: the run folder.
        sent: metric -> the last step that was sent.
    """

    def __init__(self, folder: Path, sent: Mapping[str, int]) -> None:
        self._folder = folder
        self.sent = dict(sent)
        """Metric -> the last step that was sent; updated by `confirm`."""
        self._read: dict[str, tuple[int, int]] = {}
        """File -> its inode, and the number of bytes that were sent."""

    def batches(self) -> Iterator[Sequence[LoggedRow]]:
        """Yield new rows in batches; a batch counts as sent when the next one is requested.

        Raises:
            UnreadableError: a file does not have the format of a run.
        """
        for name in _ROWS:
            yield from self._of(name)

    def _of(self, name: str) -> Iterator[Sequence[LoggedRow]]:
        path = self._folder / name
        try:
            size_of(path)
        except AbsentFileError:
            return
        inode, place = path.stat().st_ino, 0
        if name in self._read and self._read[name][0] == inode:  # a resumed run replaces the file
            place = self._read[name][1]
        lines = read_lines(path, start=place)
        while chunk := list(islice(lines, _BATCH)):
            rows = [row for line in chunk if (row := self._new_in(line)) is not None]
            if rows:
                yield rows
            for row in rows:
                self.sent.update(dict.fromkeys(row.values, row.step))
            place += sum(map(len, chunk))
            self._read[name] = (inode, place)

    def _new_in(self, line: bytes) -> LoggedRow | None:
        try:
            found = parse_json(line)
        except ValueError:
            return None
        step = found.get("step") if isinstance(found, dict) else None
        if not isinstance(step, int | float) or isinstance(step, bool) or not 0 <= step < 2**53:
            return None
        values = {
            mask(name)[:_LONGEST_NAME]: float(value)
            for name, value in found.items()
            if name not in _COUNTERS and type(value) in (int, float) and math.isfinite(value)
        }
        new = {name: value for name, value in values.items() if self._is_new(name, int(step))}
        return LoggedRow(step=int(step), values=new) if new else None

    def _is_new(self, name: str, step: int) -> bool:
        if name not in self.sent:
            return len(self.sent) < _MOST_METRICS
        return step > self.sent[name]


def files_of(folder: Path, patterns: Sequence[str]) -> Iterator[tuple[Path, str]]:
    """Yield the regular files of a run folder that match a pattern, with their relative names; no link is followed.

    A pattern that leads out of the folder matches no file.
    """
    seen: set[str] = set()
    for pattern in patterns:
        if Path(pattern).is_absolute() or ".." in Path(pattern).parts:
            continue
        for path in islice(sorted(folder.glob(pattern)), _MOST_FILES):
            name = path.relative_to(folder).as_posix()
            if name not in seen and _is_own(folder, path):
                seen.add(name)
                yield path, name


def _is_own(folder: Path, path: Path) -> bool:
    """Return whether a path is a regular file, and none of its folders is a link."""
    try:
        size_of(path)
        for parent in path.relative_to(folder).parents:
            refuse_link(folder / parent) if os.fspath(parent) != "." else None
    except UnreadableError:
        return False
    return True


def ending_of(folder: Path) -> str:
    """Return the status of `result.json`; `killed` if there is none."""
    try:
        return str(read_map(folder / "result.json", {"status": str})["status"])
    except UnreadableError:
        return "killed"
