"""The record of a run's updates, `updates.jsonl`: which gradients made each, by whom, from which version.

One line an update, compact: `{"version":12,"of":[[13,[0,1],11,"worker:1"]]}` says that the update after the 12th was
made of the shards 0 and 1 of step 13, computed by worker:1 from variables that had seen 11 updates. It is the ledger of
samples, and what a replay follows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import Any, Final, Self

from trainkit.bounded_json import expect_map, parse_json, whole_numbers
from trainkit.errors import CheckpointError
from trainkit.numerics.batch import Ticket
from trainkit.reading import open_regular, read_lines
from trainkit.storage import naming
from trainkit.strategies.parameter_server.coordinator.scheduler import PendingUpdate

__all__ = ["FILE", "GradientRef", "UpdateLog", "UpdateRecord", "read_record"]

FILE: Final = "updates.jsonl"
"""Its name in the run folder."""


@dataclass(frozen=True, slots=True)
class GradientRef:
    """A gradient of an update."""

    ticket: Ticket
    read: int
    """Updates that the variables had seen when it was computed from them."""
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
    """Updates before it."""
    parts: tuple[GradientRef, ...]
    """What was summed, in that order."""

    @property
    def staleness(self) -> int:
        """Updates between the oldest read and this one."""
        return self.version - min(part.read for part in self.parts)

    @classmethod
    def of(cls, merge: PendingUpdate) -> Self:
        """What the chief has made."""
        pairs = zip(merge.errands, merge.reads, strict=True)
        return cls(merge.version, tuple(GradientRef(errand.ticket, read, errand.worker) for errand, read in pairs))

    @classmethod
    def parse(cls, text: str | bytes) -> Self:
        """A line of the file."""
        found = expect_map(parse_json(text), {"version": int, "of": list})
        return cls(found["version"], tuple(_part(*item) for item in found["of"]))

    def text(self) -> str:
        """As the file has it."""
        parts = [[part.ticket.step, list(part.ticket.shards), part.read, part.worker] for part in self.parts]
        return json.dumps({"version": self.version, "of": parts}, separators=(",", ":"))


def _part(step: Any, shards: Any, read: Any, worker: Any) -> GradientRef:
    whole_numbers([step, read])
    if not isinstance(worker, str):
        raise ValueError("the name of a worker is no text")  # noqa: TRY004 - of a text
    return GradientRef(Ticket(step, tuple(whole_numbers(shards))), read, worker)


class UpdateLog:
    """Writes the file; what an earlier start wrote after the checkpoint that is continued is cut off.

    Args:
        path: the file.
        version: updates that the variables have seen as this start begins.
    """

    def __init__(self, path: Path, version: int) -> None:
        kept = [line for line in read_record(path) if line.version < version] if path.exists() else []
        self.kept = tuple(kept)
        """What earlier starts have written and is still true."""
        self._path = path
        with naming(path):
            self._file = TextIOWrapper(open_regular(path, "wb"), encoding="utf-8")
            self._file.writelines(f"{line.text()}\n" for line in kept)

    def note(self, merge: PendingUpdate) -> None:
        """Keep an update."""
        with naming(self._path):
            self._file.write(f"{UpdateRecord.of(merge).text()}\n")

    def flush(self) -> None:
        """Let others see it: before a checkpoint, so that none knows more updates than the record."""
        with naming(self._path):
            self._file.flush()

    def close(self) -> None:
        """The end."""
        with naming(self._path):
            self._file.close()


def read_record(path: Path) -> Iterator[UpdateRecord]:
    """The updates of a record; a last line that was cut off is left out.

    Raises:
        CheckpointError: a line is no update.
    """
    for number, text in enumerate(read_lines(path), start=1):
        try:
            yield UpdateRecord.parse(text)
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path}:{number} is no update of a run: {error}") from error
