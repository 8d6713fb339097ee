"""What a failing rank leaves behind for the supervisor: a small JSON file, `live/rank_N.error.json`."""

from __future__ import annotations

import json
import re
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from trainkit import errors
from trainkit.errors import ConfigError, CrashLoopError, HangError, Problem, TrainkitError
from trainkit.redaction import mask
from trainkit.run.folder import write_json_atomically

__all__ = ["LastWords", "last_words", "read_last_words", "words_from", "write_last_words"]

_LOST_PEER: Final = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|socket closed|timed out waiting|remote process exited"
    r"|peer|ncclRemoteError|ncclSystemError",
    re.IGNORECASE,
)
_LOST_PEER_TYPES: Final = frozenset({"DistBackendError", "DistNetworkError", "DistStoreError"})


@dataclass(frozen=True, kw_only=True)
class LastWords:
    """Why a rank failed, as it saw it."""

    rank: int
    moment: float
    """Seconds since the epoch, so that the first of several failures can be told."""
    kinds: tuple[str, ...]
    """The names of the exception's class and its bases, nearest first."""
    message: str
    traceback: str
    exit_code: int
    aftermath: bool
    """Whether it only tells that another rank is gone."""
    final: bool
    """Whether a restart would end the same way: one of our own errors, raised for a reason."""
    problems: tuple[Mapping[str, Any], ...] = field(default=())
    """Of a ConfigError: its problems."""

    def error(self, where: str = "") -> TrainkitError:
        """The exception again, in this process: one of ours as it was, of any other class nothing but its message.

        Args:
            where: the process that met it, where that is another than this one; put beside the place of each problem.
        """
        known = (getattr(errors, name) for name in self.kinds if name in errors.__all__)
        kind = next((found for found in known if isinstance(found, type) and issubclass(found, TrainkitError)), None)
        if kind is not None and issubclass(kind, ConfigError):
            told = [
                {**problem, "origin": ", ".join(filter(None, (problem["origin"], where)))} for problem in self.problems
            ]
            return ConfigError(Problem(**problem) for problem in told)
        message = f"{where}: {self.message}" if where else self.message
        return kind(message) if kind is not None else TrainkitError(message)

    @property
    def brief(self) -> str:
        """The failure in a line."""
        lines = self.message.splitlines() or [self.kinds[0]]
        return lines[1].strip() if self.problems and len(lines) > 1 else lines[0]


def write_last_words(path: Path, rank: int, error: BaseException) -> LastWords:
    """Write down an error; returns what was written."""
    words = last_words(rank, error)
    write_json_atomically(path, asdict(words))
    return words


def last_words(rank: int, error: BaseException) -> LastWords:
    """What there is to tell of an error."""
    aftermath = any(_is_lost_peer(cause) for cause in _chain(error))
    ours = isinstance(error, TrainkitError) and not isinstance(error, HangError | CrashLoopError)
    problems = error.problems if isinstance(error, ConfigError) else ()
    return LastWords(
        rank=rank,
        moment=time.time(),
        kinds=tuple(kind.__name__ for kind in type(error).__mro__),
        message=mask(str(error)),
        traceback=mask("".join(traceback.format_exception(error)).rstrip()),
        exit_code=error.exit_code if isinstance(error, TrainkitError) else 1,
        aftermath=aftermath,
        final=ours and not aftermath,
        problems=tuple(_shown(problem) for problem in problems),
    )


def read_last_words(path: Path) -> LastWords | None:
    """What a rank wrote; None where it wrote nothing."""
    try:
        return words_from(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def words_from(content: Mapping[str, Any]) -> LastWords:
    """Last words out of the JSON they became."""
    return LastWords(**{**content, "kinds": tuple(content["kinds"]), "problems": tuple(content["problems"])})


def _shown(problem: Problem) -> dict[str, Any]:
    content: dict[str, Any] = {"key": problem.key, "rule": mask(problem.rule), "origin": problem.origin}
    if problem.value is not errors.MISSING:
        value = problem.shown_value
        plain = value is None or isinstance(value, bool | int | float | str)
        content["value"] = value if plain else str(value)
    return content


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def _is_lost_peer(error: BaseException) -> bool:
    if type(error).__name__ in _LOST_PEER_TYPES or isinstance(error, ConnectionError):
        return True
    return isinstance(error, RuntimeError) and _LOST_PEER.search(str(error)) is not None
