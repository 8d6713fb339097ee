"""The reducers that `strategy.reduce=auto` chose on a machine, in a file of the user's cache folder."""

from __future__ import annotations

import contextlib
import hashlib
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch

from trainkit.cluster.host import num_cores
from trainkit.errors import UnreadableError
from trainkit.files import cache_folder, read_map, write_json_atomically

VERSION: Final = 1
"""The version of the file."""
_MOST: Final = 64
"""Limit of the stored choices; the oldest ones are dropped."""
_MOST_BYTES: Final = 64 << 10


class ChoiceCache:
    """The choices on this machine, by the shape of the exchange.

    A damaged or foreign file counts as empty and is replaced. Without a home folder nothing is stored.
    """

    def __init__(self) -> None:
        mark = hashlib.sha256(f"{socket.gethostname()} {num_cores()} {torch.__version__}".encode()).hexdigest()[:8]
        try:
            self.path: Path | None = cache_folder() / f"reduce-{mark}.json"
        except RuntimeError:
            self.path = None

    def find(self, shape: str, names: Sequence[str]) -> str | None:
        """Return the choice for a shape, if it is one of `names`."""
        found = self._read().get(shape)
        return found if found in names else None

    def keep(self, shape: str, name: str) -> None:
        """Store a choice; write errors are ignored."""
        if self.path is None:
            return
        choices = {**{key: one for key, one in self._read().items() if key != shape}, shape: name}
        kept = dict(list(choices.items())[-_MOST:])
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_json_atomically(self.path, {"version": VERSION, "choices": kept})

    def _read(self) -> dict[str, str]:
        if self.path is None:
            return {}
        try:
            content = read_map(self.path, {"version": int, "choices": dict}, limit=_MOST_BYTES)
        except UnreadableError:
            return {}
        if content["version"] != VERSION:
            return {}
        return {key: one for key, one in content["choices"].items() if isinstance(one, str)}
