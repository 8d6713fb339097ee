"""Which rank failed, and how: what the user reads first."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from trainkit.errors import HangError, TrainingError, TrainkitError
from trainkit.run.folder import RunFolder
from trainkit.run.group import Exited
from trainkit.run.heartbeat import Pulse, read_pulse
from trainkit.run.last_words import LastWords, read_last_words

__all__ = ["Failure", "culprit", "hung", "unanswering"]

_LOG_LINES: Final = 20


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The first failure of an attempt; the others followed from it."""

    rank: int
    headline: str
    """One sentence: who, when, what."""
    detail: str = ""
    """Traceback, stacks, or the end of a log."""
    words: LastWords | None = None
    hang: bool = False

    @property
    def final(self) -> bool:
        """Whether a restart would end the same way."""
        return self.words is not None and self.words.final

    def error(self, remark: str = "") -> TrainkitError:
        """The exception that ends the command."""
        if self.words is not None and self.words.final:
            return self.words.error()
        headline = f"{self.headline} {remark}".rstrip()
        kind = HangError if self.hang else TrainingError
        return kind("\n".join(part for part in (headline, self.detail) if part))


def culprit(folder: RunFolder, exits: Iterable[Exited], running: Iterable[int]) -> Failure:
    """Tell the failure that came first from those that followed.

    A rank that loses its peer fails too, often before the peer has ended: what it says then only tells that another
    is gone, and counts last. If nobody says anything else, and a rank still runs, it is that one that stopped
    answering.

    Args:
        folder: holds last words and pulses.
        exits: of the ranks that ended, other than cleanly.
        running: the ranks that have not ended.
    """
    running = list(running)
    ended = {exited.rank: exited for exited in exits}
    words = {rank: found for rank in (*ended, *running) if (found := read_last_words(folder.error_of(rank)))}
    silent = {rank: exited for rank, exited in ended.items() if rank not in words}
    moments = {rank: (found.aftermath, found.moment) for rank, found in words.items()}
    moments |= {rank: (False, exited.moment) for rank, exited in silent.items()}
    first = min(moments, key=lambda rank: moments[rank])
    mute = [rank for rank in running if rank not in words]
    if moments[first][0] and mute:
        return unanswering(folder, mute)
    when = _when(read_pulse(folder.heartbeat_of(first)))
    if first in words:
        return _told(words[first], when)
    return _silent(folder, silent[first], when)


def unanswering(folder: RunFolder, ranks: Iterable[int]) -> Failure:
    """The failure of the rank that the others waited for, out of those that said nothing."""
    rank, pulse = _most_behind(folder, ranks)
    return Failure(rank=rank, headline=f"rank {rank} stopped answering{_when(pulse)}.", hang=True)


def _told(words: LastWords, when: str) -> Failure:
    what = next(iter(words.message.splitlines()), "").rstrip(".")  # the whole message ends the traceback
    headline = f"rank {words.rank} failed{when}: {': '.join(filter(None, (words.kinds[0], what)))}."
    return Failure(rank=words.rank, headline=headline, detail=words.traceback, words=words)


def _silent(folder: RunFolder, exited: Exited, when: str) -> Failure:
    if exited.code >= 0:
        headline = f"rank {exited.rank} ended with exit code {exited.code}{when}, without a word."
    else:
        name = _signal_name(-exited.code)
        hint = " The system may have run out of memory." if name == "SIGKILL" else ""
        headline = f"rank {exited.rank} was ended by {name}{when}.{hint}"
    return Failure(rank=exited.rank, headline=headline, detail=_tail(folder.log_of(exited.rank)))


def hung(folder: RunFolder, running: Iterable[int], *, now: float, started: float, timeout_s: float) -> Failure | None:
    """The rank that holds up the others, where one has not beaten for too long; else None. One that is idle may wait.

    Args:
        folder: holds the pulses.
        running: the ranks to look at.
        now: this moment on the monotonic clock.
        started: the moment this attempt was started, which counts as everybody's first beat.
        timeout_s: how long a rank may go without a beat.
    """
    pulses = {rank: read_pulse(folder.heartbeat_of(rank)) for rank in running}
    pulses = {rank: pulse for rank, pulse in pulses.items() if pulse is None or pulse.phase != "idle"}
    if all(now - (pulse.moment if pulse else started) <= timeout_s for pulse in pulses.values()):
        return None
    rank, pulse = _most_behind(folder, pulses)
    silence = now - (pulse.moment if pulse else started)
    headline = (
        f"rank {rank} has made no progress for {silence:.0f} s{_when(pulse)} (supervisor.hang_timeout_s={timeout_s:g})."
    )
    return Failure(rank=rank, headline=headline, hang=True)


def _most_behind(folder: RunFolder, ranks: Iterable[int]) -> tuple[int, Pulse | None]:
    """The rank that the others wait for: the one that has come least far, and of those the longest silent."""
    pulses: Mapping[int, Pulse | None] = {rank: read_pulse(folder.heartbeat_of(rank)) for rank in ranks}

    def place(rank: int) -> tuple[tuple[int, int], float]:
        pulse = pulses[rank]
        return (pulse.progress, pulse.moment) if pulse else ((-1, 0), 0.0)

    rank = min(pulses, key=place)
    return rank, pulses[rank]


def _when(pulse: Pulse | None) -> str:
    return f" in step {pulse.step} ({pulse.phase})" if pulse else " while starting"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _tail(log: Path) -> str:
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:]
    except OSError:
        return ""
    return "\n".join([f"The end of {log}:", *(f"  {line}" for line in lines)]) if lines else ""
