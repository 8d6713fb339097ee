"""The rows of a run, read from its files as they grow, and their curves.

Every point of a curve is kept up to a limit; above it the minimum, the maximum and the last of each bucket.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from trainkit.errors import UnreadableError
from trainkit.files import parse_json, read_lines, size_of

MAX_POINTS: Final = 2_000
"""Up to this many points, a curve keeps every point."""
_MAX_CURVES: Final = 200
_MAX_NAME: Final = 300
_MAX_MARKS: Final = 2_000
_ROWS_AT_ONCE: Final = 128
"""Number of rows between two pauses of a reader."""
_POSITION: Final = frozenset({"step", "epoch", "samples", "seconds"})
"""Keys of a row that describe its position; they are not metrics."""

Point = tuple[int, float | None]
"""Step and value; None: the value was not finite."""


def thinned(points: Sequence[Point], most: int) -> list[Point]:
    """Return at most `most` points, 4 or more: of equal parts of the steps the least, the largest and the last value,
    and the first that is not finite.

    Example:
        >>> thinned([(step, abs(step - 3.0)) for step in range(9)], 4)
        [(3, 0.0), (8, 5.0)]
    """
    if len(points) <= most:
        return list(points)
    first, span, chosen = points[0][0], points[-1][0] - points[0][0] + 1, list[Point]()
    for _, part in itertools.groupby(points, lambda point: (point[0] - first) * (most // 4) // span):
        bucket = list(part)
        finite = [(value, -index) for index, (_, value) in enumerate(bucket) if value is not None]
        gap = next((index for index, (_, value) in enumerate(bucket) if value is None), None)
        ends = [-min(finite)[1], -max(finite)[1]] if finite else []
        indices = {*ends, len(bucket) - 1, *([] if gap is None else [gap])}
        chosen += [bucket[index] for index in sorted(indices)]
    return chosen


@dataclass(slots=True)
class Curve:
    """One metric over the steps, in bounded memory: it is thinned whenever there are too many points.

    Example:
        >>> curve = Curve()
        >>> for step in range(5):
        ...     curve.add(step, step / 2)
        >>> curve.points()[-1], curve.num_points
        ((4, 2.0), 5)
    """

    num_points: int = 0
    """Points that were added."""
    _points: list[Point] = field(default_factory=list)

    @property
    def last(self) -> float | None:
        """The newest value."""
        return self._points[-1][1] if self._points else None

    def add(self, step: int, value: float | None) -> None:
        """Add a point; None stands for a value that is not finite."""
        self.num_points += 1
        self._points.append((step, value))
        if len(self._points) > 2 * MAX_POINTS:
            self._points = thinned(self._points, MAX_POINTS)

    def points(self, most: int = MAX_POINTS) -> list[Point]:
        """Return the points to show, at most `most`."""
        return thinned(self._points, most)


def compact_curve(points: Sequence[Point], num_points: int) -> dict[str, Any]:
    """Return a curve for a page: its steps as differences, its values with 7 significant digits.

    Args:
        points: step and value of each point, in order.
        num_points: number of points before any were left out.

    Example:
        >>> compact_curve([(10, 0.5), (20, 0.25), (30, None)], 3)
        {'seen': 3, 'every': [10, 10, 3], 'y': [0.5, 0.25, None]}
    """
    steps = [step for step, _ in points]
    between = [later - earlier for earlier, later in itertools.pairwise(steps)]
    values = column([value for _, value in points])
    if steps and len(set(between)) <= 1:
        return {"seen": num_points, "every": [steps[0], between[0] if between else 1, len(steps)], "y": values}
    return {"seen": num_points, "dx": [*steps[:1], *between], "y": values}


def column(values: Sequence[float | None], *, digits: int = 7) -> list[float | int | None]:
    """Return numbers for a page, with at most 7 significant digits; None for a number that is not finite."""
    return [None if value is None else _rounded(value, digits) for value in values]


def _rounded(value: float, digits: int) -> float | int:
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded.is_integer() and math.fabs(rounded) < 1e15 else rounded


@dataclass
class LoggedRows:
    """The content of a `metrics.jsonl`, in bounded memory."""

    curves: dict[str, Curve] = field(default_factory=dict)
    """Metric -> its curve; the first 200 metrics."""
    clock: dict[str, Curve] = field(default_factory=dict)
    """`samples` and `seconds` over the steps."""
    evaluations: list[int] = field(default_factory=list)
    """The steps of the first 2,000 evaluations."""
    num_evaluations: int = 0
    waited_s: float = 0.0
    """Seconds of training in which the steps waited for data."""
    malformed: int = 0
    """Lines that are no rows."""
    left_out: set[str] = field(default_factory=set)
    """Names of metrics beyond the first 200, at most 200."""

    def add(self, line: bytes) -> None:
        """Add a line of the file."""
        try:
            row = parse_json(line)
        except ValueError:
            row = None
        step = row.get("step") if isinstance(row, dict) else None
        if type(step) is not int or step < 0:
            self.malformed += 1
            return
        if "samples" in row:
            self._note_position(row, step)
        else:
            self.num_evaluations += 1
            if len(self.evaluations) < _MAX_MARKS:
                self.evaluations.append(step)
        for name, value in row.items():
            figure = number(value)
            if name not in _POSITION and (figure is not None or value is None):
                self._add_to(name, step, figure)

    def _add_to(self, name: str, step: int, value: float | None) -> None:
        curve = self.curves.get(name) or self.curves.get(name[:_MAX_NAME])
        if curve is None and len(self.curves) >= _MAX_CURVES:
            if len(self.left_out) < _MAX_CURVES:
                self.left_out.add(name[:_MAX_NAME])
            return
        if curve is None:
            curve = self.curves[name[:_MAX_NAME]] = Curve()
        curve.add(step, value)

    def _note_position(self, row: Mapping[str, Any], step: int) -> None:
        before = self.seconds
        for name in ("samples", "seconds"):
            value = number(row.get(name))
            if value is not None:
                if name not in self.clock:
                    self.clock[name] = Curve()
                self.clock[name].add(step, value)
        waited = number(row.get("data_wait"))
        if waited is not None and 0 <= waited <= 1:
            self.waited_s += waited * max(0.0, self.seconds - before)

    @property
    def seconds(self) -> float:
        """Seconds of training up to the newest row."""
        newest = self.clock["seconds"].last if "seconds" in self.clock else None
        return newest or 0.0


class RowFile:
    """A file of JSON lines that grows: each call of `new` continues behind the last line that was read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read, self._file = 0, 0

    def begins_again(self) -> bool:
        """Return whether the file is another one, or shorter, since the last reading: a resumed run replaces it."""
        try:
            size, file = size_of(self._path), self._path.lstat().st_ino
        except (OSError, UnreadableError):
            return False
        if size >= self._read and file == self._file:
            return False
        self._read, self._file = 0, file
        return True

    def new(self) -> Iterator[bytes]:
        """Yield the lines that were added.

        Raises:
            UnreadableError: a line of more than a megabyte: nothing behind it is read.
        """
        if not self._file or size_of(self._path) <= self._read:
            return
        for line in read_lines(self._path, start=self._read):
            self._read += len(line)
            yield line


class MetricsReader:
    """Reads the curves of a `metrics.jsonl` that grows.

    Args:
        path: the file.
        rest: called after every 128 rows (3 ms on one core). A reader thread in a training process pauses there: a
            resumed run may have a million rows, and Python runs only one thread at a time.
    """

    def __init__(self, path: Path, *, rest: Callable[[], object] = lambda: None) -> None:
        self._file, self._rest = RowFile(path), rest
        self.rows = LoggedRows()
        """All rows that were read."""

    def read(self) -> LoggedRows:
        """Read the rows that were added; from the start if the file was replaced or has become shorter."""
        if self._file.begins_again():
            self.rows = LoggedRows()
        try:
            for index, line in enumerate(self._file.new(), start=1):
                self.rows.add(line)
                if index % _ROWS_AT_ONCE == 0:
                    self._rest()
        except UnreadableError:
            self.rows.malformed += 1
        return self.rows


def number(value: Any) -> float | None:
    """Return a finite number; None for anything else."""
    if type(value) is not float and type(value) is not int:  # not isinstance: a bool is not a number
        return None
    return float(value) if math.isfinite(value) else None
