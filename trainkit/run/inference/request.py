"""The request of a job: the model, the split and the rows; every process of the job reads it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final, Literal

from trainkit.errors import UnreadableError
from trainkit.files import expect_map, read_map

FILE: Final = "job.json"
VARIABLE: Final = "TRAINKIT_JOB"
"""The environment variable that makes a worker read the request, instead of training."""
Verb = Literal["evaluate", "predict"]


@dataclass(frozen=True, kw_only=True)
class Source:
    """Location of the weights of a model."""

    path: str
    """The run, folder or file that the user named."""
    checkpoint: str | None = None
    """The folder of the checkpoint of a run; None: `path` is an exported model."""
    which: Literal["best", "last"] = "last"
    """The weights of an exported model."""


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """A job: its model, its data, and the operation. The config of the job is `resolved.yaml` in the same folder."""

    verb: Verb
    split: str
    """The split of the data."""
    source: Source
    parts: str = ""
    """The folder of the parts of a prediction."""
    todo: Sequence[int] = field(default_factory=list)
    """The chunks that a prediction computes; the same on every rank."""

    def write(self, folder: Path) -> None:
        """Write the request into the folder of the job."""
        (folder / FILE).write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> JobRequest:
        """Read the request of a job.

        Raises:
            UnreadableError: the file is not a request.
        """
        found = read_map(folder / FILE, {"verb": str, "split": str, "source": dict, "parts": str, "todo": list})
        try:
            source = expect_map(found["source"], {"path": str, "checkpoint": (str, type(None)), "which": str})
        except ValueError as error:
            raise UnreadableError(folder / FILE, str(error)) from None
        return cls(
            verb=found["verb"], split=found["split"], source=Source(**source), parts=found["parts"], todo=found["todo"]
        )
