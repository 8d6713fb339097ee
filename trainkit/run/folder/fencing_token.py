"""Prevent two groups of processes from writing into one run folder, even if they cannot see each other's lock.

The lock (`trainkit.trainer.ownership`) keeps a second group out; it relies on `flock`, which local disks, NFS and most
cluster file systems share between hosts. If a file system does not, or a disconnected host comes back, the fencing
token remains: the newest group writes its token into the folder, and every group checks that the token is its own
before it renames a checkpoint or writes the result. Microseconds pass between the check and the rename, which no file
system can rule out; a checkpoint written then is one of the same training, under its own name.
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
from trainkit.files import read_map, write_json_atomically
from trainkit.run.folder.run_folder import RunFolder

VARIABLE: Final = "TRAINKIT_FENCE"
"""The environment variable with the token of a worker's group."""

_NAME: Final = ".fence"
_MAX_BYTES: Final = 4096
_TIMEOUT_S: Final = 5.0
"""Seconds that a folder may take to appear on another host: caches of network file systems live for seconds."""


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
        """Mark the folder as this group's; the previous group may no longer write to it."""
        found = cls(path=folder.path / _NAME, token=uuid.uuid4().hex)
        write_json_atomically(
            found.path, {"token": found.token, "pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}
        )
        return found

    @classmethod
    def verify(cls, folder: RunFolder, token: str, *, timeout_s: float = _TIMEOUT_S) -> Self:
        """Check that this process sees the token that rank 0 wrote, and return it.

        Raises:
            ConfigError: the folder has no token, or another one: it is not on a file system that both processes share.
        """
        found = cls(path=folder.path / _NAME, token=token)
        deadline = time.monotonic() + timeout_s
        while found.owner.get("token") != token:
            if time.monotonic() >= deadline:
                rule = (
                    f"rank 0 made it, and {socket.gethostname()} does not see it. All processes write into one run "
                    "folder: start them in a folder of a file system that the hosts share, or name one with "
                    "hydra.run.dir."
                )
                raise ConfigError([Problem(key="run folder", value=str(folder.path), rule=rule)])
            time.sleep(0.1)
        return found

    @classmethod
    def from_environ(cls, folder: RunFolder, environ: MutableMapping[str, str]) -> Self:
        """Return the token of this process's group from its environment, if it is set: a lock may be enough."""
        return cls(path=folder.path / _NAME, token=environ.pop(VARIABLE))

    @property
    def owner(self) -> dict[str, object]:
        """The process whose token is in the folder now."""
        try:
            return read_map(self.path, {"token": str, "pid": int, "host": str}, limit=_MAX_BYTES)
        except UnreadableError:
            return {}

    def check(self) -> None:
        """Check that the folder still belongs to this group.

        Raises:
            TrainingError: another group has taken it over; the error names its process.
        """
        owner = self.owner
        if owner.get("token") != self.token:
            who = f"process {owner['pid']} on {owner['host']}" if "pid" in owner else "another process"
            raise TrainingError(
                f"{self.path.parent} was taken over by {who}. This group ends and writes no more to it."
            )
