"""Time limits: how long a rank may make no progress, by its phase."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, Literal

from trainkit.config.sections import SupervisorConfig
from trainkit.run.process.heartbeat import HeartbeatReading
from trainkit.trainer.failpoints import Phase

__all__ = ["FLOOR_S", "Limit", "TimeLimits"]

FLOOR_S: Final = 30.0
"""The smallest limit that `supervisor.hang_timeout_s=auto` chooses."""
_FACTOR: Final = 10.0
"""The limit that `auto` chooses, as a multiple of the longest recent pause."""
_KEYS: Final[Mapping[Phase, str]] = {
    "start": "start_timeout_s",
    "join": "start_timeout_s",
    "load": "load_timeout_s",
    "callback": "eval_timeout_s",
    "evaluate": "eval_timeout_s",
    "save": "checkpoint_timeout_s",
    "end": "checkpoint_timeout_s",
    "compile": "first_step_timeout_s",
}
"""The key of each phase that is not part of a step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """How long a rank may make no progress in its phase."""

    key: str
    """The full name of the key that sets it."""
    seconds: float
    longest_s: float | None = None
    """The longest recent pause from which the limit was derived; None if the limit was given."""

    def remedy(self, silence_s: float) -> str:
        """Return a text with this limit, and what to do if the rank was healthy.

        Args:
            silence_s: how long the rank has made no progress.

        Example:
            >>> Limit(key="supervisor.eval_timeout_s", seconds=600).remedy(601)
            'The limit is supervisor.eval_timeout_s=600: raise it if the rank was healthy.'
        """
        if self.longest_s is None:
            return f"The limit is {self.key}={self.seconds:g}: raise it if the rank was healthy."
        return (
            f"The limit is {self.seconds:.0f} s by {self.key}=auto, where recent steps paused for "
            f"{self.longest_s:.2g} s at most: set {self.key} to more than {silence_s:.0f} if the rank was healthy."
        )


@dataclass(frozen=True, kw_only=True)
class TimeLimits:
    """The `supervisor.*_timeout_s` keys of a run, each in seconds without progress.

    Example:
        >>> steady = HeartbeatReading(moment=1.0, step=7, phase="forward", longest_s=4.5)
        >>> TimeLimits().limit_of(steady).seconds, TimeLimits(hang_timeout_s=9).limit_of(steady).seconds
        (45.0, 9)
        >>> TimeLimits().limit_of(None).key
        'supervisor.start_timeout_s'
    """

    hang_timeout_s: float | Literal["auto"] = SupervisorConfig.hang_timeout_s
    start_timeout_s: float = SupervisorConfig.start_timeout_s
    first_step_timeout_s: float = SupervisorConfig.first_step_timeout_s
    checkpoint_timeout_s: float = SupervisorConfig.checkpoint_timeout_s
    eval_timeout_s: float = SupervisorConfig.eval_timeout_s
    load_timeout_s: float = SupervisorConfig.load_timeout_s

    @classmethod
    def of(cls, settings: SupervisorConfig | Mapping[str, Any]) -> TimeLimits:
        """Return the limits that a config sets, or those of a mapping that `dataclasses.asdict` made."""
        if isinstance(settings, Mapping):
            return cls(**settings)
        return cls(**{one.name: getattr(settings, one.name) for one in fields(cls)})

    @property
    def shortest_s(self) -> float:
        """The smallest of all limits: heartbeats must be read more often."""
        values = (getattr(self, one.name) for one in fields(self))
        return min(FLOOR_S if value == "auto" else float(value) for value in values)

    @property
    def longest(self) -> Limit:
        """The largest of the given limits."""
        names = [one.name for one in fields(self) if getattr(self, one.name) != "auto"]
        return self._given(max(names, key=lambda name: float(getattr(self, name))))

    def limit_of(self, heartbeat: HeartbeatReading | None) -> Limit | None:
        """Return the limit for the phase of a rank; None if it may wait for ever.

        Args:
            heartbeat: its last heartbeat; None: it has none yet.
        """
        if heartbeat is None:
            return self._given("start_timeout_s")
        if heartbeat.phase == "idle":
            return None
        if heartbeat.phase in _KEYS:
            return self._given(_KEYS[heartbeat.phase])
        if heartbeat.is_first:
            return self._given("first_step_timeout_s")
        if self.hang_timeout_s != "auto":
            return self._given("hang_timeout_s")
        seconds = max(FLOOR_S, _FACTOR * heartbeat.longest_s)
        return Limit(key="supervisor.hang_timeout_s", seconds=seconds, longest_s=heartbeat.longest_s)

    def _given(self, name: str) -> Limit:
        return Limit(key=f"supervisor.{name}", seconds=getattr(self, name))
