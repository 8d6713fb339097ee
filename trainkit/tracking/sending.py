"""Send a run folder to a tracker: beside its training in a thread, or later.

The rows, the config and the result are read from the run folder, which is the queue: it loses nothing, and holds no
secret. `RUN/tracking/TRACKER.json` holds the id of the tracked run and the last step of each metric that was sent.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Final, Literal

from trainkit.errors import AbsentFileError, UnreadableError
from trainkit.files import naming, parse_json, parse_yaml, read_map, read_text, refuse_link, size_of, write_atomically
from trainkit.redaction import mask
from trainkit.report.curves import RowFile, number
from trainkit.report.schemas import kinds_of
from trainkit.tracking.service import SERVICES, LoggedRow, Service, TrackedRun

FOLDER: Final = "tracking"
_POLL_S: Final = 1.0
_SETTLE_S: Final = 2.0
"""Seconds after which rows are recorded as sent: a process of the tracker's package may hold them for a moment."""
_RETRY_S: Final = (_POLL_S, 5.0, 15.0, 60.0)
"""Seconds between attempts after none, one, two, and more failures in a row."""
_ROWS: Final = ("metrics.jsonl", "evaluations.jsonl")
_BATCH: Final = 500
"""Largest number of rows per message."""
_MOST_PARAMETERS, _MOST_FILES, _MOST_METRICS = 2000, 1000, 10_000
_LONGEST_NAME: Final = 200
_ID: Final = re.compile(r"[0-9a-f]{32}")


@dataclass(kw_only=True)
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
    path, kinds = path_of(folder, tracker), kinds_of(TrackingState)
    try:
        values = read_map(path, kinds)
    except AbsentFileError:
        return None
    state = TrackingState(**{name: values[name] for name in kinds})
    checks = [_ID.fullmatch(state.id), state.tracker == tracker, tracker in SERVICES]
    checks += [isinstance(item, str) for item in state.artifacts]
    checks += [isinstance(item, str | int | float) for item in state.placement.values()]
    if not all(checks) or not all(type(step) is int for step in state.sent.values()):
        raise UnreadableError(path, "it is not the state of a tracker")
    return state


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


def begun_state(folder: Path, configured: TrackingState) -> TrackingState:
    """Return the state with which a start of the run continues: it keeps the id and the sent data of earlier starts.

    Raises:
        UnreadableError: the state of an earlier start cannot be read.
        StorageError: the file cannot be written.
    """
    earlier, state = read_state(folder, configured.tracker), configured
    if earlier is not None:
        state = replace(configured, id=earlier.id, sent=earlier.sent, placement=earlier.placement)
    write_state(folder, state)
    return state


def tracked_run(folder: Path, state: TrackingState) -> TrackedRun:
    """Return the description of a run for a tracker; it has no secrets, since no file of a run folder has any.

    Raises:
        UnreadableError: a file of the run folder cannot be read.
    """
    try:
        values = parse_yaml(read_text(folder / "resolved.yaml"))
    except ValueError as error:
        raise UnreadableError(folder / "resolved.yaml", str(error)) from None
    values = values if isinstance(values, Mapping) else {}
    environment = read_map(folder / "environment.json", {"fingerprint": str})
    parameters = dict(islice(_flat(values, ""), _MOST_PARAMETERS))
    if state.placement:  # a resumed run may be elsewhere, and a mixture of two placements is that of no run
        parameters = {name: value for name, value in parameters.items() if not _is_placement(name)} | state.placement
    return TrackedRun(
        folder=folder,
        id=state.id,
        project=state.project,
        mode=state.mode,
        name=f"{values.get('name') or 'run'}/{folder.name}"[:_LONGEST_NAME],
        fingerprint=environment["fingerprint"][:64],
        parameters=parameters,
    )


def _is_placement(name: str) -> bool:
    return name.partition(".")[0] in ("strategy", "cluster")


def _flat(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str | float | bool]]:
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from _flat(value, f"{key}.")
        elif isinstance(value, str | bool | int | float):
            yield key, mask(value) if isinstance(value, str) else value
        elif value is not None:
            yield key, mask(json.dumps(value, default=str))


def files_of(folder: Path, patterns: Sequence[str]) -> Iterator[tuple[Path, str]]:
    """Yield the regular files of a run folder that match a pattern, with their relative names; no link is followed.

    A pattern that leads out of the folder matches no file.
    """
    seen: set[str] = set()
    for pattern in patterns:
        if Path(pattern).is_absolute() or ".." in Path(pattern).parts:
            continue
        for path in islice(sorted(folder.glob(pattern)), _MOST_FILES):
            name = path.relative_to(folder).as_posix()
            with contextlib.suppress(UnreadableError):
                size_of(path)
                for parent in [*path.relative_to(folder).parents][:-1]:
                    refuse_link(folder / parent)
                if name not in seen:
                    seen.add(name)
                    yield path, name


class Sender:
    """Sends the new data of a run folder to one tracker: at once, or from `start` to `end` in a daemon thread, which
    alone waits for the service.
    """

    def __init__(self, folder: Path, state: TrackingState) -> None:
        self.state = state
        self.reason = ""
        """Why the last attempt failed; empty if it did not."""
        self._folder = folder
        self._asked_at: float | None = None
        """When the service was asked something that it has not answered, on `time.monotonic`."""
        self._service: Service | None = None
        """The open service; None before, and after an error."""
        self._files: Sequence[RowFile] = ()
        self._ended, self._is_done, self._is_abandoned = threading.Event(), False, False
        self._thread = threading.Thread(target=self._send, name="tracker", daemon=True)

    def send_new(self) -> None:
        """Send the new rows.

        Raises:
            Exception: any error of the service; what was sent before is recorded.
        """
        if self._service is None:
            self._asked_at = time.monotonic()
            service, run = SERVICES[self.state.tracker](), tracked_run(self._folder, self.state)
            service.open(run)
            self._service, self._files = service, [RowFile(self._folder / name) for name in _ROWS]
            self.state.placement = {name: value for name, value in run.parameters.items() if _is_placement(name)}
            self._record()
        before = dict(self.state.sent)
        for file in self._files:
            file.begins_again()  # a resumed run replaces it
            lines = file.new()
            while chunk := list(islice(lines, _BATCH)):
                rows = [row for line in chunk if (row := self._new_in(line)) is not None]
                if rows:
                    self._asked_at = time.monotonic()
                    self._service.log(rows)
                    for step, values in rows:
                        self.state.sent.update(dict.fromkeys(values, step))
                time.sleep(0.01)  # a resumed run may have a million rows, and Python runs one thread
        self._asked_at = None
        if self.state.sent != before:
            self._ended.wait(_SETTLE_S)  # the end of a service writes all
            self._record()

    def _new_in(self, line: bytes) -> LoggedRow | None:
        """Return the finite numbers of a row that were not sent yet; None if there are none, or the line is no row."""
        try:
            row = parse_json(line)
        except ValueError:
            return None
        step, sent = number(row.get("step")) if isinstance(row, dict) else None, self.state.sent
        if step is None or not 0 <= step < 2**53:
            return None
        room, new = len(sent) < _MOST_METRICS, dict[str, float]()
        for key, item in row.items():
            name, value = mask(key)[:_LONGEST_NAME], number(item)
            if key != "step" and value is not None and (step > sent[name] if name in sent else room):
                new[name] = value
        return (int(step), new) if new else None

    def finish(self) -> None:
        """Send the rest and the files, and end the tracked run.

        Raises:
            Exception: any error of the service.
        """
        self._ended.set()
        self.send_new()
        service, self._asked_at = self._service, time.monotonic()
        assert service is not None
        for path, name in files_of(self._folder, self.state.artifacts):
            service.add_file(path, name)
        try:
            status = str(read_map(self._folder / "result.json", {"status": str})["status"])
        except UnreadableError:
            status = "killed"
        service.close(has_finished=status == "finished", status=status)
        self._service = None
        self.state = replace(self.state, status=status, not_sent=None, send=None)
        self._record()
        self._is_done = True

    def trouble(self, reason: str) -> None:
        """Record why something was not sent; the service is opened again for the next attempt."""
        self.state.not_sent = f"everything after step {self.state.last_step}, the files and the end: {reason}"
        self.state.send = shlex.join(["trainkit", "report", str(self._folder), "--send"])
        with contextlib.suppress(Exception):  # a full disk must not end the attempts
            self._record()
        self.reason, self._service, self._asked_at = reason, None, None

    def _record(self) -> None:
        if self._is_abandoned:  # nobody waits for the service any more
            return
        holds_last = self._service is not None and self._service.holds_last
        last = self.state.last_step - holds_last
        sent = {name: min(step, last) for name, step in self.state.sent.items()}
        write_state(self._folder, replace(self.state, sent=sent))

    def start(self) -> None:
        """Send in a thread from now on."""
        self._thread.start()

    def _send(self) -> None:
        failures = 0
        while not self._is_done:
            has_ended = self._ended.wait(_RETRY_S[min(failures, len(_RETRY_S) - 1)])
            try:
                self.finish() if has_ended else self.send_new()
            except Exception as error:  # noqa: BLE001 - a service may raise anything
                failures += 1
                self.trouble(reason_of(error))
                if has_ended:
                    return
            else:
                failures, self.reason = 0, ""

    def silent_s(self) -> float:
        """Return for how long the service has not answered."""
        return 0.0 if self._asked_at is None else time.monotonic() - self._asked_at

    def end(self, wait_s: float) -> str:
        """Send the rest within a limit of time; return why it was not sent, or an empty text."""
        self._ended.set()
        self._thread.join(wait_s)
        if self._thread.is_alive() and not self._is_done:
            self.trouble(self.reason or f"no answer within {wait_s:g} s")
            self._is_abandoned = True
        return "" if self._is_done else self.reason


def reason_of(error: BaseException) -> str:
    """Return an error of a service in one line, without secrets."""
    return mask(f"{type(error).__name__}: {error}".strip().splitlines()[0][:300].rstrip("."))


def send_later(folder: Path) -> int:
    """Send a run folder to every tracker with a state in it; return 0 if everything was sent.

    Raises:
        UnreadableError: a state cannot be read, or there is none.
    """
    states = [read_state(folder, path.stem) for path in sorted((folder / FOLDER).glob("[!.]*.json"))]
    if not states:
        raise UnreadableError(folder / FOLDER, "the run had no tracker")
    failed = 0
    for state in filter(None, states):
        sender = Sender(folder, state)
        try:
            sender.finish()
        except Exception as error:  # noqa: BLE001 - the same
            sender.trouble(reason_of(error))
            sys.stderr.write(f"{state.tracker}: not sent: {reason_of(error)}\n")
            failed = 1
        else:
            sys.stdout.write(f"{state.tracker}: sent up to step {sender.state.last_step}\n")
    return failed
