"""The curves of a run: every point up to a limit; above it the minimum, the maximum and the last of each bucket."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from trainkit.bounded import parse_json
from trainkit.errors import UnreadableError
from trainkit.files import read_lines, size_of

MAX_POINTS: Final = 2_000
"""Up to this many points, a curve keeps every point."""
_BUCKETS: Final = 500
"""Buckets of a longer curve: each gives up to 4 points."""
_MAX_CURVES: Final = 200
_MAX_NAME: Final = 300
_MAX_MARKS: Final = 2_000
_ROWS_AT_ONCE: Final = 128
"""Number of rows between two pauses of a reader."""
_POSITION: Final = frozenset({"step", "epoch", "samples", "seconds"})
"""Keys of a row that describe its position; they are not metrics."""

Point = tuple[int, float | None]
"""Step and value; None: the value was not finite."""


@dataclass(slots=True)
class _Bucket:
    """Consecutive points, of which up to four are kept."""

    low: Point | None = None
    high: Point | None = None
    last: Point | None = None
    gap: Point | None = None
    """The first point that is not finite."""

    def put(self, point: Point) -> None:
        """Add the point that follows."""
        value, self.last = point[1], point
        if value is None:
            self.gap = self.gap or point
            return
        if self.low is None or value < _value(self.low):
            self.low = point
        if self.high is None or value > _value(self.high):
            self.high = point

    def add(self, other: _Bucket) -> None:
        """Add the bucket that follows this one."""
        if other.low is not None and (self.low is None or _value(other.low) < _value(self.low)):
            self.low = other.low
        if other.high is not None and (self.high is None or _value(other.high) > _value(self.high)):
            self.high = other.high
        self.last, self.gap = other.last or self.last, self.gap or other.gap

    def points(self) -> list[Point]:
        """Return the points that are kept, in the order of their steps."""
        found = {point for point in (self.low, self.high, self.last, self.gap) if point is not None}
        return sorted(found, key=lambda point: (point[0], point[1] is None))


def _bucket_of(point: Point) -> _Bucket:
    return _Bucket(gap=point, last=point) if point[1] is None else _Bucket(low=point, high=point, last=point)


def _value(point: Point) -> float:
    assert point[1] is not None
    return point[1]


@dataclass
class Curve:
    """One metric over the steps, in bounded memory: two buckets become one whenever there are too many.

    Example:
        >>> curve = Curve()
        >>> for step in range(5):
        ...     curve.add(step, step / 2)
        >>> curve.points()[-1], curve.seen
        ((4, 2.0), 5)
    """

    seen: int = 0
    """Points that were added."""
    last: float | None = None
    """The newest value."""
    _plain: list[Point] = field(default_factory=list)
    _buckets: list[_Bucket] = field(default_factory=list)
    _width: int = 0
    """Points of a bucket; 0: every point is kept."""
    _filled: int = 0
    """Points of the last bucket."""

    def add(self, step: int, value: float | None) -> None:
        """Add a point; None stands for a value that is not finite."""
        self.seen, self.last = self.seen + 1, value
        if self._width:
            self._put((step, value))
            return
        self._plain.append((step, value))
        if len(self._plain) > MAX_POINTS:
            points, self._plain = self._plain, []
            self._width = math.ceil(len(points) / _BUCKETS)
            for point in points:
                self._put(point)

    def _put(self, point: Point) -> None:
        if self._buckets and self._filled < self._width:
            self._buckets[-1].put(point)
            self._filled += 1
            return
        if len(self._buckets) == _BUCKETS:
            pairs = zip(self._buckets[::2], self._buckets[1::2], strict=True)
            self._buckets = [_merged(pair) for pair in pairs]
            self._width *= 2
        self._buckets.append(_bucket_of(point))
        self._filled = 1

    def points(self, most: int = MAX_POINTS) -> list[Point]:
        """Return the points to show.

        Args:
            most: largest number of points; 4 or more.
        """
        if not self._width and len(self._plain) <= most:
            return list(self._plain)
        buckets = self._buckets or [_bucket_of(point) for point in self._plain]
        size = math.ceil(len(buckets) / max(1, most // 4))
        if size > 1:
            buckets = [_merged(buckets[start : start + size]) for start in range(0, len(buckets), size)]
        return [point for bucket in buckets for point in bucket.points()]


def _merged(buckets: Sequence[_Bucket]) -> _Bucket:
    whole = _Bucket()
    for bucket in buckets:
        whole.add(bucket)
    return whole


def compact_curve(points: Sequence[Point], seen: int) -> dict[str, Any]:
    """Return a curve for a page: its steps as differences, its values with 7 significant digits.

    Args:
        points: step and value of each point, in order.
        seen: number of points before any were left out.

    Example:
        >>> compact_curve([(10, 0.5), (20, 0.25), (30, None)], 3)
        {'seen': 3, 'every': [10, 10, 3], 'y': [0.5, 0.25, None]}
    """
    steps = [step for step, _ in points]
    between = [later - earlier for earlier, later in itertools.pairwise(steps)]
    values = column([value for _, value in points])
    if steps and len(set(between)) <= 1:
        return {"seen": seen, "every": [steps[0], between[0] if between else 1, len(steps)], "y": values}
    return {"seen": seen, "dx": [*steps[:1], *between], "y": values}


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
            found = number(value)
            if name not in _POSITION and (found is not None or value is None):
                self._add_to(name, step, found)

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


class MetricsReader:
    """Reads a `metrics.jsonl` that grows: each call of `read` continues where the last one ended.

    Args:
        path: the file.
        rest: called after every 128 rows (3 ms on one core). A reader thread in a training process pauses there: a
            resumed run may have a million rows, and Python runs only one thread at a time.
    """

    def __init__(self, path: Path, *, rest: Callable[[], object] = lambda: None) -> None:
        self._path, self._rest = path, rest
        self._read, self._file = 0, 0
        self.rows = LoggedRows()
        """All rows that were read."""

    def read(self) -> LoggedRows:
        """Read the rows that were added; from the start if the file was replaced or has become shorter."""
        try:
            size, file = size_of(self._path), self._path.lstat().st_ino
        except (OSError, UnreadableError):
            return self.rows
        if size < self._read or file != self._file:
            self._read, self._file, self.rows = 0, file, LoggedRows()
        if size > self._read:
            try:
                for number_of, line in enumerate(read_lines(self._path, start=self._read), start=1):
                    self._read += len(line)
                    self.rows.add(line)
                    if number_of % _ROWS_AT_ONCE == 0:
                        self._rest()
            except UnreadableError:  # a line of more than a megabyte: nothing behind it is read
                self.rows.malformed += 1
        return self.rows


def number(value: Any) -> float | None:
    """Return a finite number; None for anything else."""
    if type(value) is not float and type(value) is not int:  # not isinstance: a bool is not a number
        return None
    return float(value) if math.isfinite(value) else None
