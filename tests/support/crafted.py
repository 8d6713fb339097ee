"""Files as an attacker would leave them in a run folder, with hashes that are right."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from trainkit.trainer.manifest import MANIFEST

__all__ = ["KINDS", "forge", "forge_header", "put", "within"]

KINDS: Final = {
    "a pipe": "it is a named pipe",
    "a link to /dev/zero": "it is a symbolic link, and trainkit follows none inside its own folders",
    "a link to a copy of itself": "it is a symbolic link, and trainkit follows none inside its own folders",
    "a dangling link": "it is a symbolic link, and trainkit follows none inside its own folders",
    "a directory": "it is a directory",
    "a socket": "it is a socket",
}
"""What can be in the place of a file -> the reason that is given."""


def put(kind: str, path: Path) -> None:
    """Put something else in the place of a file."""
    if kind == "a link to a copy of itself":
        copy = path.rename(path.with_name(f"copy_of_{path.name}"))
        path.symlink_to(copy.name)
        return
    path.unlink(missing_ok=True)
    match kind:
        case "a pipe":
            os.mkfifo(path)
        case "a link to /dev/zero":
            path.symlink_to("/dev/zero")
        case "a dangling link":
            path.symlink_to("nowhere")
        case "a directory":
            path.mkdir()
        case "a socket":
            before = Path.cwd()
            os.chdir(path.parent)  # the address of a socket has 108 bytes
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(path.name)
            os.chdir(before)


def forge(step: Path, name: str, change: Callable[[Any], Any] | bytes) -> None:
    """Change a JSON file of a checkpoint, and every hash that would tell.

    Args:
        step: the folder of the checkpoint.
        name: manifest.json, index.json or meta.json.
        change: changes the content, and returns it where it is another; or the new bytes.
    """
    if name == MANIFEST:
        _write_manifest(step, change)
        return
    content = change if isinstance(change, bytes) else _changed(json.loads((step / name).read_bytes()), change)
    (step / name).write_bytes(content)
    _record(step, name)


def forge_header(step: Path, change: Callable[[Any], Any] | bytes) -> None:
    """Change the header of the tensors of a checkpoint, and every hash that would tell."""
    (file,) = step.glob("*.safetensors")
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    content = change if isinstance(change, bytes) else _changed(json.loads(raw[8 : 8 + length]), change)
    file.write_bytes(len(content).to_bytes(8, "little") + content + raw[8 + length :])
    _record(step, file.name)


def _record(step: Path, name: str) -> None:
    content = (step / name).read_bytes()
    record = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    _write_manifest(step, lambda manifest: manifest["files"].update({name: record}))


def _write_manifest(step: Path, change: Callable[[Any], Any] | bytes) -> None:
    if not isinstance(change, bytes):
        content = json.loads((step / MANIFEST).read_bytes())
        content.pop("sha256")
        content = json.loads(_changed(content, change))
        content["sha256"] = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        change = json.dumps(content).encode()
    (step / MANIFEST).write_bytes(change)


def _changed(content: Any, change: Callable[[Any], Any]) -> bytes:
    changed = change(content)
    return json.dumps(changed if isinstance(changed, dict | list | str) else content).encode()


@contextlib.contextmanager
def within(seconds: int) -> Iterator[None]:
    """Fail a block that takes longer; a call that waits for a pipe is interrupted."""

    def fail(*_: object) -> None:
        raise TimeoutError(f"it hangs: {seconds} s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
