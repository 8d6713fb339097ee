"""End a training after a time: its length in updates is estimated while it runs, so that the schedule ends with it.

The estimates are recorded, in checkpoints and in `stop_after.json`. With that record, the same training repeats without
a clock, to the bit.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from trainkit.errors import AbsentFileError, ConfigError, Problem, UnreadableError
from trainkit.files import read_map

RECORD: Final = "stop_after.json"
"""Name of the record in the run folder."""
_ENTRIES: Final = 1000
"""Largest number of estimates of one training: a later one follows after this share of the time at the earliest."""

Lengths = list[list[int]]
"""Pairs (step, length), by step: from update `step` on, the training is estimated to have `length` updates."""


@dataclass(kw_only=True)
class TimeLimit:
    """The time that a training may take, and what its steps have taken so far.

    The schedule sees a training of step * seconds / used updates: an update's share of the length is the share of the
    time that is used. Rank 0 estimates, and the exchange of a stop or save carries the estimate to all ranks.

    Example:
        >>> limit = TimeLimit(seconds=10.0, most=1_000_000)
        >>> limit.take(20, limit.estimate(20, used=2.5)), limit.lengths
        (False, [[20, 80]])
        >>> limit.take(81, limit.estimate(81, used=10.1)), limit.lengths
        (True, [[20, 80], [81, 81]])
    """

    seconds: float
    """Seconds of training."""
    most: int
    """Updates after which the training ends in any case."""
    lengths: Lengths = field(default_factory=list)
    """The estimates, the same on every rank; the last one of a training whose time is used up is its own step."""
    repeats: bool = False
    """Whether `lengths` is a record to repeat: nothing is estimated."""
    _read: tuple[int, float] = (0, 0.0)
    _recorded: float = 0.0

    def length(self, step: int) -> int:
        """Return the length that was estimated before update `step`; `most` before the first estimate.

        Example:
            >>> limit = TimeLimit(seconds=10.0, most=900, lengths=[[2, 40], [8, 50]])
            >>> limit.length(1), limit.length(7)
            (900, 40)
        """
        index = bisect_right(self.lengths, step, key=lambda entry: entry[0])
        return self.lengths[index - 1][1] if index else self.most

    def is_over(self, step: int) -> bool:
        """Return whether the time is used up after `step` updates, before the last one of all."""
        return bool(self.lengths) and self.lengths[-1][0] == self.lengths[-1][1] <= step < self.most

    def estimate(self, step: int, used: float) -> int:
        """Return the length after `used` seconds: `step` if that is all, the last estimate while it is young."""
        if self.repeats:
            return self.length(step)
        if used >= self.seconds:
            return step
        if step == 0 or (self.lengths and 0 <= used - self._recorded < self.seconds / _ENTRIES):
            return max(self.length(step), step + 1)
        self._recorded = used
        return min(max(round(step * self.seconds / used), step + 1), self.most)

    def take(self, step: int, length: int) -> bool:
        """Record an estimate, for update `step` and later ones; return whether the time is used up."""
        if not self.repeats and (length == step or length != self.length(step)):
            if self.lengths and self.lengths[-1][0] == step:
                self.lengths.pop()  # the end of a run that is continued with more time
            self.lengths.append([step, length])
        return self.is_over(step)

    def steps_to_next(self, step: int, used: float, length: int) -> int:
        """Return the steps until the next estimate: a quarter of those that remain, at the pace since the last call."""
        if self.repeats:
            return max(1, self.lengths[-1][0] - step if self.lengths else 1)
        before, self._read = self._read, (step, used)
        pace = (used - before[1]) / max(step - before[0], 1)
        return max(1, min(int((self.seconds - used) / max(4 * pace, 1e-9)), (length - step) // 4))


def read_record(path: Path, stop_after: str) -> Lengths:
    """Return the lengths of a record.

    Raises:
        ConfigError: it is not a record, or one of another time.
    """
    try:
        record = read_map(path, {"version": int, "stop_after": str, "lengths": list})
        expect_lengths(record["lengths"])
        if record["stop_after"] != stop_after:
            raise ValueError(f"its time is {record['stop_after']}")
    except (AbsentFileError, UnreadableError, ValueError) as error:
        reason = error.reason if isinstance(error, UnreadableError) else error
        rule = f"is not the record of a run with stop_after={stop_after}: {reason}."
        raise ConfigError([Problem(key="stop_after_record", value=str(path), rule=rule)]) from None
    lengths: Lengths = record["lengths"]
    return lengths


def expect_lengths(lengths: Sequence[object]) -> None:
    """Raise a ValueError unless these are estimates in the order of their steps."""
    before = -1
    for entry in lengths:
        match entry:
            case [int(step), int(length)] if before < step <= length:
                before = step
            case _:
                raise ValueError(f"{str(entry)[:40]} is no step with a length")
