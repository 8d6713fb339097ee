"""Read and write `RUN/tracking/TRACKER.json`: the tracked run of a run, and the data that was sent to it."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Final, Literal

from trainkit.errors import AbsentFileError, UnreadableError
from trainkit.files import Kind, naming, read_map, refuse_link, write_atomically
from trainkit.tracking.service import SERVICES

FOLDER: Final = "tracking"
_ID: Final = re.compile(r"[0-9a-f]{32}")
_KINDS: Final[Mapping[str, Kind]] = {
    "tracker": str, "id": str, "project": str, "mode": str, "artifacts": list, "sent": dict, "files": list,
    "status": (str, type(None)), "not_sent": (str, type(None)), "send": (str, type(None)),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TrackingState:
    """`RUN/tracking/TRACKER.json`: the tracked run of a run, and the data that was sent to it."""

    version: Literal[1] = 1
    """Version of this document."""
    tracker: str
    """`mlflow`, `trackio` or `wandb`."""
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Id of the tracked run, created once per run folder: 32 hexadecimal digits."""
    project: str
    """Project or experiment of the tracked run."""
    mode: str = "online"
    """`online`, or `offline` for a later upload by the tracker's own command."""
    artifacts: list[str] = field(default_factory=list)
    """Patterns of the files of the run folder that are sent at the end."""
    sent: dict[str, int] = field(default_factory=dict)
    """Metric -> the last step that was sent."""
    files: list[str] = field(default_factory=list)
    """Files that were sent at the last end of the run."""
    placement: dict[str, str | float | bool] = field(default_factory=dict)
    """The parameters of `strategy` and `cluster` at the first start: trackers cannot remove those of an earlier one."""
    status: str | None = None
    """Status with which the tracked run was ended; null while it runs, or if the end was not sent."""
    not_sent: str | None = None
    """The unsent data and the reason; null if everything was sent."""
    send: str | None = None
    """The command that sends the rest; null if everything was sent."""

    @property
    def last_step(self) -> int:
        """The last step with a sent metric; 0 if none was sent."""
        return max(self.sent.values(), default=0)


def path_of(folder: Path, tracker: str) -> Path:
    """Return the file of a tracker in a run folder."""
    return folder / FOLDER / f"{tracker}.json"


def read_state(folder: Path, tracker: str) -> TrackingState | None:
    """Read the state of a tracker; None if there is none.

    Raises:
        UnreadableError: the file was not written by trainkit.
    """
    path = path_of(folder, tracker)
    try:
        found = read_map(path, _KINDS, optional={"placement": dict})
    except AbsentFileError:
        return None
    texts = (*found["artifacts"], *found["files"])
    steps = found["sent"].values()
    sound = _ID.fullmatch(found["id"]) and found["tracker"] == tracker and tracker in SERVICES
    placement = found.get("placement", {})
    sound = sound and all(isinstance(one, str | int | float) for one in placement.values())
    if not sound or not all(isinstance(one, str) for one in texts) or not all(type(one) is int for one in steps):
        raise UnreadableError(path, "it is not the state of a tracker")
    return TrackingState(**{name: found[name] for name in _KINDS}, placement=placement)


def write_state(folder: Path, state: TrackingState) -> None:
    """Write the state of a tracker atomically: after a kill, the file is the old or the new one.

    Raises:
        UnreadableError: `tracking` is not a folder.
        StorageError: the file cannot be written.
    """
    path = path_of(folder, state.tracker)
    refuse_link(path.parent)
    with naming(path):
        path.parent.mkdir(exist_ok=True)
        write_atomically(path, f"{json.dumps(asdict(state), indent=1)}\n", sync=False)


def begun_state(folder: Path, wanted: TrackingState) -> TrackingState:
    """Return the state with which a start of the run continues: it keeps the id and the sent data of earlier starts.

    Raises:
        UnreadableError: the state of an earlier start cannot be read.
        StorageError: the file cannot be written.
    """
    earlier = read_state(folder, wanted.tracker)
    state = (
        wanted if earlier is None else replace(wanted, id=earlier.id, sent=earlier.sent, placement=earlier.placement)
    )
    write_state(folder, state)
    return state
