"""Two groups of processes never write into one run folder, also where they cannot see each other's lock.

The lock (`trainkit.run.folder.lock`) is what keeps a second group out; it relies on `flock`, which local disks, NFS and
most cluster file systems carry from host to host. Where one does not, or a host that was cut off comes back, the fence
is what remains: the group that comes last leaves a token in the folder, and a group looks whether the token is its own
before it gives a checkpoint its name or writes the result. Between the look and the rename pass microseconds, which no
file system can rule out; what would be written then is a checkpoint of the same training, under a name of its own.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from trainkit.errors import ConfigError, Problem, TrainingError, UnreadableError
from trainkit.reading import read_map
from trainkit.run.folder.run_folder import RunFolder, write_json_atomically

__all__ = ["VARIABLE", "FencingToken"]

VARIABLE: Final = "TRAINKIT_FENCE"
"""The environment variable that hands a worker the token of its group."""

_NAME: Final = ".fence"
_MAX_BYTES: Final = 4096
_PATIENCE_S: Final = 5.0
"""How long a folder may take to appear on another host: caches of network file systems live for seconds."""


@dataclass(frozen=True, kw_only=True)
class FencingToken:
    """The mark of one group in a run folder.

    Example:
        >>> import tempfile
        >>> folder = RunFolder(Path(tempfile.mkdtemp()))
        >>> first, second = FencingToken.acquire(folder), FencingToken.acquire(folder)
        >>> second.check()
        >>> first.check()
        Traceback (most recent call last):
        trainkit.errors.TrainingError: ...
    """

    path: Path
    token: str

    @classmethod
    def acquire(cls, folder: RunFolder) -> Self:
        """Mark the folder as this group's; whoever had it before is fenced off."""
        fence = cls(path=folder.path / _NAME, token=uuid.uuid4().hex)
        write_json_atomically(
            fence.path, {"token": fence.token, "pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}
        )
        return fence

    @classmethod
    def verify(cls, folder: RunFolder, token: str, *, patience_s: float = _PATIENCE_S) -> Self:
        """The fence that rank 0 put up, as another process sees it.

        Raises:
            ConfigError: it sees none, or another one: the folder is not on a file system that both share.
        """
        fence = cls(path=folder.path / _NAME, token=token)
        deadline = time.monotonic() + patience_s
        while fence.owner.get("token") != token:
            if time.monotonic() >= deadline:
                rule = (
                    f"rank 0 made it, and {socket.gethostname()} does not see it. All processes write into one run "
                    "folder: start them in a folder of a file system that the hosts share, or name one with "
                    "hydra.run.dir."
                )
                raise ConfigError([Problem(key="run folder", value=str(folder.path), rule=rule)])
            time.sleep(0.1)
        return fence

    @classmethod
    def from_environ(cls, folder: RunFolder, environ: MutableMapping[str, str]) -> Self | None:
        """The fence of this process's group, by its environment; None where a lock is enough."""
        token = environ.pop(VARIABLE, "")
        return cls(path=folder.path / _NAME, token=token) if token else None

    @property
    def owner(self) -> dict[str, object]:
        """Who put up the fence that stands there now."""
        try:
            return read_map(self.path, {"token": str, "pid": int, "host": str}, limit=_MAX_BYTES)
        except UnreadableError:
            return {}

    def check(self) -> None:
        """Make sure that the folder is still this group's.

        Raises:
            TrainingError: another group has taken it over; says which.
        """
        holder = self.owner
        if holder.get("token") != self.token:
            who = f"process {holder['pid']} on {holder['host']}" if "pid" in holder else "somebody"
            raise TrainingError(
                f"{self.path.parent} was taken over by {who}. This group ends and writes no more to it."
            )
