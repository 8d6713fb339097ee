"""Which machine a process runs on, as far as its table of processes goes."""

from __future__ import annotations

import contextlib
import socket
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Machine"]


@dataclass(frozen=True, slots=True)
class Machine:
    """What has one table of processes: a machine since its last start, or a container on it."""

    host: str
    """The name of the host."""
    boot_id: str
    """What the kernel drew when it was started; empty where there is none."""
    boot_time: int
    """Seconds since the epoch at which the kernel was started; 0 where that is not known."""
    processes: str
    """The namespace of the numbers of processes; empty where there is none."""

    @classmethod
    def here(cls) -> Machine:
        """Return that of this process."""
        boot_id, processes, boot_time = "", "", 0
        with contextlib.suppress(OSError, ValueError, StopIteration):
            boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
            processes = str(Path("/proc/self/ns/pid").readlink())
            lines = Path("/proc/stat").read_text(encoding="ascii").splitlines()
            boot_time = next(int(line.split()[1]) for line in lines if line.startswith("btime "))
        return cls(host=socket.gethostname(), boot_id=boot_id, boot_time=boot_time, processes=processes)
