"""A callback that spoils the file system of a run after a step, and the small file systems that it spoils."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainkit.trainer.events import Callback, Run


@dataclass(frozen=True, kw_only=True)
class DiskFault(Callback):
    """Does one thing, on the owner, after a step."""

    kind: str
    step: int = 8

    def step_end(self, run: Run, outcome: Any) -> None:
        """Spoil the disk after the planted step."""
        if run.is_owner and run.state.step == self.step:
            _FAULTS[self.kind](run.folder.parent, run.folder)


def _fill(mount: Path, _: Path, *, but: int = 0) -> None:
    """Take all room, or all but so many bytes; once."""
    if (mount / "filler").exists():
        return
    stats = os.statvfs(mount)
    with (mount / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        file.write(bytes(max(0, stats.f_bavail * stats.f_frsize - but)))
        while not but:
            file.write(bytes(512))


def _use_up_inodes(mount: Path, _: Path) -> None:
    with contextlib.suppress(OSError):
        for number in range(1 << 20):
            (mount / f"file-{number}").touch()


def _make_read_only(mount: Path, _: Path) -> None:
    subprocess.run(["mount", "--bind", mount, mount], check=True)
    subprocess.run(["mount", "-o", "remount,ro,bind", mount], check=True)


_FAULTS: dict[str, Any] = {
    "full": _fill,
    "nearly full": lambda mount, folder: _fill(mount, folder, but=40 << 10),
    "no inodes": _use_up_inodes,
    "read-only": _make_read_only,
    "removed": lambda _, folder: shutil.rmtree(folder),
    "renamed": lambda _, folder: folder.rename(folder.with_name("moved")),
    "unmounted": lambda mount, _: subprocess.run(["umount", "-l", mount], check=True),
}


@contextlib.contextmanager
def mounted(mount: Path, options: str) -> Iterator[Path]:
    """Mount a small file system in memory; whatever happens, nothing of it stays.

    Raises:
        PermissionError: this process may not mount; says why.
    """
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "none", str(mount)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise PermissionError(done.stderr.strip())
    try:
        yield mount
    finally:
        while os.path.ismount(mount):
            subprocess.run(["umount", "-l", mount], check=True)
