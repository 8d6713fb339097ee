"""The log of a run's updates, `updates.jsonl`: the gradients of each update, their workers and the versions they read.

One compact line per update: `{"version":12,"of":[[13,[0,1],11,"worker:1"]]}` means that the update after the 12th was
made of the shards 0 and 1 of step 13, computed by worker:1 from variables of version 11. The log accounts for every
sample, and a replay follows it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import Final, Self

from trainkit.bounded import expect_map, parse_json, whole_numbers
from trainkit.errors import CheckpointError
from trainkit.files import open_regular, read_lines
from trainkit.numerics.batch import Ticket
from trainkit.storage import naming
from trainkit.strategies.parameter_server.coordinator.scheduler import PendingUpdate

FILE: Final = "updates.jsonl"
"""Name of the log in the run folder."""


@dataclass(frozen=True, slots=True)
class GradientRef:
    """A gradient of an update."""

    ticket: Ticket
    read: int
    """Version of the variables from which it was computed."""
    worker: str


@dataclass(frozen=True, slots=True)
class UpdateRecord:
    """An update.

    Example:
        >>> line = UpdateRecord(12, (GradientRef(Ticket(13, (0, 1)), 11, "worker:1"),))
        >>> line.text()
        '{"version":12,"of":[[13,[0,1],11,"worker:1"]]}'
        >>> UpdateRecord.parse(line.text()) == line
        True
    """

    version: int
    """Number of updates before this one."""
    parts: tuple[GradientRef, ...]
    """The summed gradients, in their order."""

    @property
    def staleness(self) -> int:
        """Number of updates between the oldest read and this one."""
        return self.version - min(part.read for part in self.parts)

    @classmethod
    def of(cls, merge: PendingUpdate) -> Self:
        """Create the record of an update."""
        pairs = zip(merge.items, merge.reads, strict=True)
        return cls(merge.version, tuple(GradientRef(item.ticket, read, item.worker) for item, read in pairs))

    @classmethod
    def parse(cls, text: str | bytes) -> Self:
        """Parse a line of the file."""
        found = expect_map(parse_json(text), {"version": int, "of": list})
        return cls(found["version"], tuple(_part(*item) for item in found["of"]))

    def text(self) -> str:
        """Return the line of the file."""
        parts = [[part.ticket.step, list(part.ticket.shards), part.read, part.worker] for part in self.parts]
        return json.dumps({"version": self.version, "of": parts}, separators=(",", ":"))


def _part(step: int, shards: object, read: int, worker: object) -> GradientRef:
    whole_numbers([step, read])
    if not isinstance(worker, str):
        raise ValueError("the name of a worker is not text")  # noqa: TRY004 - the text is at fault
    return GradientRef(Ticket(step, tuple(whole_numbers(shards))), read, worker)


class UpdateLog:
    """Writes the file; lines after the checkpoint that is continued are removed."""

    def __init__(self, path: Path, version: int) -> None:
        kept = [line for line in read_record(path) if line.version < version] if path.exists() else []
        self.kept = tuple(kept)
        """The valid records of earlier starts."""
        self._path = path
        with naming(path):
            self._file = TextIOWrapper(open_regular(path, "wb"), encoding="utf-8")
            self._file.writelines(f"{line.text()}\n" for line in kept)

    def note(self, merge: PendingUpdate) -> None:
        """Append an update."""
        with naming(self._path):
            self._file.write(f"{UpdateRecord.of(merge).text()}\n")

    def flush(self) -> None:
        """Flush the file before a checkpoint, so that no checkpoint contains more updates than the log."""
        with naming(self._path):
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        with naming(self._path):
            self._file.close()


class NoUpdateLog(UpdateLog):
    """The log of a training without a folder, which writes nothing."""

    def __init__(self) -> None:
        self.kept = ()

    def note(self, merge: PendingUpdate) -> None:
        """Do nothing."""

    def flush(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def read_record(path: Path) -> Iterator[UpdateRecord]:
    """Yield the updates of a log; a truncated last line is skipped.

    Raises:
        CheckpointError: a line is not an update.
    """
    for number, text in enumerate(read_lines(path), start=1):
        try:
            yield UpdateRecord.parse(text)
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path}:{number} is not an update of a run: {error}") from error
