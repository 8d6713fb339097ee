"""Which host a process is on, and whether a process still lives; from /proc, on Linux."""

from __future__ import annotations

import hashlib
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["ProcessId", "host_id"]

_DEAD: Final = frozenset({"Z", "X", "x", "gone"})
"""States of a process that has ended; a zombie waits for its parent to notice."""


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process that cannot be taken for a later one with the same number."""

    pid: int
    started: int
    """Clock ticks after boot at which it was started."""

    @classmethod
    def own(cls) -> ProcessId:
        """That of this process."""
        found = _stat(os.getpid())
        return cls(os.getpid(), found[1] if found else 0)

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        """Return the mark of a process that this process has started and not yet reaped."""
        found = _stat(pid)
        return cls(pid, found[1] if found else 0)

    @property
    def state(self) -> str:
        """The state of the process in /proc/PID/stat, a letter; `gone`: it has ended; empty: this system has no /proc.

        Example:
            >>> ProcessId.own().state
            'R'
        """
        found = _stat(self.pid)
        if found is None and not Path("/proc/self/stat").exists():
            return ""
        return found[0] if found is not None and found[1] == self.started else "gone"

    @property
    def lives(self) -> bool:
        """Whether it has not ended.

        Example:
            >>> ProcessId.own().lives
            True
        """
        return self.state not in _DEAD


def _stat(pid: int) -> tuple[str, int] | None:
    """State and start time of a process; None where there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name before it may hold anything
    return fields[0], int(fields[19])


def host_id() -> int:
    """A number that two processes share if and only if they can share memory and loopback, 63 bits.

    Two containers, or two network namespaces, of one machine count as two hosts.
    """
    parts = [socket.gethostname(), _content("/proc/sys/kernel/random/boot_id")]
    parts += [_namespace(kind) for kind in ("pid", "net")]
    return int.from_bytes(hashlib.sha256("\n".join(parts).encode()).digest()[:8], "little") >> 1


def _content(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def _namespace(kind: str) -> str:
    try:
        return str(Path(f"/proc/self/ns/{kind}").stat().st_ino)
    except OSError:
        return ""
