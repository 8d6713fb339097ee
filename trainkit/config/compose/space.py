"""The arguments of a sweep as a search space: values of each key, keys that vary together, points of a grid."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from hydra.errors import HydraException

from trainkit.config.grammar import COMMAND_LINE
from trainkit.config.sections import MOST_JOBS
from trainkit.config.values import closest
from trainkit.errors import ConfigError, Problem, refuse

_SEARCH: Final = "Draw some of them: hydra/sweeper=random sweep.trials=100, with interval(LOW,HIGH)."
_TAGS: Final = ("zip", "log")
"""zip: keys that vary together; log: an interval that is searched by orders of magnitude."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choices:
    """Listed values of one key, or of several keys that vary together."""

    keys: tuple[str, ...]
    """Keys as given in the arguments, with a leading + where there was one."""
    rows: tuple[tuple[str, ...], ...]
    """The values as texts of Hydra's grammar; each row holds one value per key."""
    ordered: bool = False
    """Whether adjacent values are similar, as those of a range are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """Numbers from low to high, for one key."""

    key: str
    low: float
    high: float
    log: bool = False
    """Whether values are uniform in their logarithm."""
    whole: bool = False
    """Whether values are integers; both ends are included."""

    def text(self, value: float) -> str:
        """Return a number of the interval as an argument, with six digits: enough for any setting, and portable.

        Example:
            >>> axis = Interval(key="optimizer.lr", low=0.001, high=0.1)
            >>> axis.text(0.0123456789), axis.text(0.1), Interval(key="width", low=8, high=64, whole=True).text(17.0)
            ('0.0123457', '0.1', '17')
        """
        if self.whole:
            return str(round(value))
        return repr(min(max(float(f"{value:.6g}"), self.low), self.high))


@dataclass(frozen=True, kw_only=True, slots=True)
class Space:
    """The arguments that all points of a sweep share, and the axes along which the points differ.

    Example:
        >>> rates = Choices(keys=("optimizer.lr",), rows=(("0.1",), ("0.03",)))
        >>> space = Space(lines={"epochs": "epochs=1", "optimizer.lr": ""}, axes=(rates,))
        >>> space.grid()
        [['epochs=1', 'optimizer.lr=0.1'], ['epochs=1', 'optimizer.lr=0.03']]
    """

    lines: Mapping[str, str]
    """Key -> its argument, in the order given; an empty text where an axis supplies the argument."""
    axes: tuple[Choices | Interval, ...]

    def point(self, values: Mapping[str, str]) -> list[str]:
        """Return the arguments of one point, in the order given."""
        return [line or f"{key}={values[key]}" for key, line in self.lines.items()]

    def grid(self) -> list[list[str]]:
        """Return every point, the last axis varying fastest; a single point without axes.

        Raises:
            ConfigError: an axis is an interval, which has no finite number of points, or there are too many points.
        """
        endless = [axis for axis in self.axes if isinstance(axis, Interval)]
        if endless:
            rule = "is a range without steps: it needs a sweeper that searches, hydra/sweeper=random or optuna."
            raise ConfigError([_problem(axis.key, f"interval({axis.low:g},{axis.high:g})", rule) for axis in endless])
        listed = [axis for axis in self.axes if isinstance(axis, Choices)]
        if (number := math.prod(len(axis.rows) for axis in listed)) > MOST_JOBS:
            rule = f"makes {number:,} points of all keys together, and {MOST_JOBS:,} is the limit. {_SEARCH}"
            raise ConfigError([Problem(key="-m", rule=rule, origin=COMMAND_LINE)])
        rows = itertools.product(*(axis.rows for axis in listed))
        return [self.point(_by_key(listed, chosen)) for chosen in rows]

    def corners(self) -> list[list[str]]:
        """Return a few points that together hold every listed value and both ends of every interval.

        The check of these points finds invalid values before the search starts.
        """
        ends = [_ends(axis) for axis in self.axes]
        number = max((len(axis.rows) for axis in ends), default=1)
        return [
            self.point(_by_key(ends, [axis.rows[min(index, len(axis.rows) - 1)] for axis in ends]))
            for index in range(number)
        ]


def _by_key(axes: Sequence[Choices], rows: Sequence[tuple[str, ...]]) -> dict[str, str]:
    pairs = zip(axes, rows, strict=True)
    return {key: text for axis, row in pairs for key, text in zip(axis.keys, row, strict=True)}


def _ends(axis: Choices | Interval) -> Choices:
    if isinstance(axis, Choices):
        return axis
    return Choices(keys=(axis.key,), rows=((axis.text(axis.low),), (axis.text(axis.high),)))


def read_space(arguments: Sequence[Override]) -> Space:
    """Build the search space of parsed arguments.

    `a,b`, `choice(a,b)`, `range(0,4)` and `glob(*)` list values, `interval(0.1,1)` is continuous; `tag(zip,...)` lets
    keys vary together, `tag(log,interval(...))` searches orders of magnitude.

    Args:
        arguments: parsed by Hydra's grammar, in order; each key once.

    Raises:
        ConfigError: every argument that cannot be searched.
    """
    problems: list[Problem] = []
    lines: dict[str, str] = {}
    swept: dict[str, Override] = {}
    for override in arguments:
        key = override.get_key_element()
        lines[key] = "" if override.is_sweep_override() else (override.input_line or "")
        if override.is_sweep_override():
            swept[key] = override
            problems += _misuse(override)
    if not problems:
        axes, problems = _axes(swept)
    refuse(problems)
    return Space(lines=lines, axes=tuple(axes))


def _misuse(override: Override) -> Iterator[Problem]:
    """Yield what is wrong with one argument by itself."""
    sweep: Any = override.value()
    tags = set(getattr(sweep, "tags", ()))
    if override.key_or_group.startswith(("sweep.", "hydra.", "hydra/")):
        yield _problem_of(override, "is a key of the sweep itself, and takes one value.")
    for tag in sorted(tags - set(_TAGS)):
        near = closest(tag, _TAGS)
        hint = f"Did you mean {near}? " if near else ""
        yield _problem_of(override, f"{tag}: no such tag. {hint}There are: {', '.join(_TAGS)}.")
    if isinstance(sweep, IntervalSweep):
        yield from _misuse_of_interval(override, sweep)
    elif "log" in tags:
        yield _problem_of(override, "log goes with an interval: tag(log,interval(0.001,0.1)).")
    if isinstance(sweep, RangeSweep):
        yield from _misuse_of_range(override, sweep)


def _misuse_of_range(override: Override, sweep: RangeSweep) -> Iterator[Problem]:
    start, stop, step = float(sweep.start or 0), float(sweep.stop or 0), float(sweep.step)
    if not all(map(math.isfinite, (start, stop, step))):
        yield _problem_of(override, "a range needs finite numbers.")
    elif step == 0:
        yield _problem_of(override, "a range needs a step other than 0.")
    elif (number := (stop - start) / step) > MOST_JOBS:
        rule = f"lists about {number:,.0f} values, and {MOST_JOBS:,} is the limit. {_SEARCH}"
        yield _problem_of(override, rule)


def _misuse_of_interval(override: Override, sweep: IntervalSweep) -> Iterator[Problem]:
    low, high = sweep.start or 0.0, sweep.end or 0.0
    if not all(map(math.isfinite, (low, high))):
        yield _problem_of(override, "an interval needs finite ends.")
    if "zip" in sweep.tags:
        yield _problem_of(override, "zip goes with listed values: tag(zip,choice(1,2)).")
    if not low < high:
        yield _problem_of(override, f"is an empty sweep: the low end, {low:g}, is not below the high end, {high:g}.")
    elif "log" in sweep.tags and low <= 0:
        yield _problem_of(override, f"log needs an interval above 0, and this one starts at {low:g}.")


def _axes(swept: Mapping[str, Override]) -> tuple[list[Choices | Interval], list[Problem]]:
    """Return the axes in the order of their first keys."""
    zipped = {key: _values(item) for key, item in swept.items() if "zip" in getattr(item.value(), "tags", ())}
    problems = [*_mismatched_zips(swept, zipped)]
    axes: list[Choices | Interval] = []
    for key, override in swept.items():
        sweep: Any = override.value()
        if isinstance(sweep, IntervalSweep):
            axes.append(_interval(key, sweep))
            continue
        values = _values(override)
        if not values:
            problems.append(_problem_of(override, "is an empty sweep: there is nothing to run."))
        elif key not in zipped:
            ordered = isinstance(sweep, RangeSweep)
            axes.append(Choices(keys=(key,), rows=tuple((text,) for text in values), ordered=ordered))
        elif key == next(iter(zipped)) and not problems:
            axes.append(Choices(keys=tuple(zipped), rows=tuple(zip(*zipped.values(), strict=True))))
    return axes, problems


def _mismatched_zips(swept: Mapping[str, Override], zipped: Mapping[str, Sequence[str]]) -> Iterator[Problem]:
    """Yield problems of keys that should vary together and cannot."""
    first = next(iter(zipped), "")
    if len(zipped) == 1:
        yield _problem_of(swept[first], "zip varies keys together, and no other key has the tag.")
    for key, values in zipped.items():
        if len(values) != len(zipped[first]):
            count = f"{len(values)} value{'' if len(values) == 1 else 's'}"
            rule = f"has {count}, and {first}, which varies with it, has {len(zipped[first])}. Give both equally many."
            yield _problem_of(swept[key], rule)


def _values(override: Override) -> list[str]:
    try:
        return list(override.sweep_string_iterator())
    except HydraException:
        return []


def _interval(key: str, sweep: IntervalSweep) -> Interval:
    whole = {type(sweep.start), type(sweep.end)} == {int}  # int(interval(1,9)) gives ints; all others are floats
    low, high = float(sweep.start or 0), float(sweep.end or 0)
    return Interval(key=key, low=low, high=high, log="log" in sweep.tags, whole=whole)


def _problem_of(override: Override, rule: str) -> Problem:
    key, _, value = (override.input_line or "").partition("=")
    return _problem(key, value, rule)


def _problem(key: str, value: str, rule: str) -> Problem:
    return Problem(key=key.lstrip("+"), value=value, rule=rule, origin=COMMAND_LINE)
