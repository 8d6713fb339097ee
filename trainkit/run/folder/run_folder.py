"""The run folder: it holds all files of a run, is created exclusively, and is locked while in use.

outputs/<name>/<date>_<time>/       (-2, -3 on collision)
    resolved.yaml  environment.json  train.log  metrics.jsonl  restarts.jsonl  result.json
    logs/rank_N.log  plots/  tensorboard/  checkpoints/step_00001234/
    live/rank_N                       heartbeats and error reports of the running attempt
    .owner                            the token of the run (`trainkit.trainer.ownership`)

The process that restarts tasks writes `restarts.jsonl`; every writer of result.json copies it there. It outlives the
process, so that restarts before and after a resume are counted together.

A fencing token prevents two groups of processes from writing into one folder, even if they cannot see each other's
lock. The lock (`trainkit.trainer.ownership`) keeps a second group out; it relies on `flock`, which local disks, NFS and
most cluster file systems share between hosts. If a file system does not, or a disconnected host comes back, the fencing
token remains: the newest group writes its token into the folder, and every group checks that the token is its own
before it renames a checkpoint or writes the result. Microseconds pass between the check and the rename, which no file
system can rule out; a checkpoint written then is one of the same training, under its own name.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import re
import shlex
import socket
import time
import uuid
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Literal, Self

from trainkit.config.commands import printed_command
from trainkit.config.targets.allowed import IN_PROCESS, allowed_packages
from trainkit.errors import ConfigError, Problem, StorageError, TrainingError, UnreadableError
from trainkit.files import (
    Kind,
    expect_map,
    file_in_the_way,
    naming,
    open_regular,
    parse_json,
    quoted,
    read_lines,
    read_map,
    write_json_atomically,
)
from trainkit.redaction import mask
from trainkit.trainer.manifest import named_checkpoints, owner_of_run
from trainkit.trainer.ownership import MARK, OwnershipToken, locked, set_aside

RESTARTS: Final = "restarts.jsonl"
"""Name of the record in the run folder."""
_LISTED: Final = 1000
"""Number of restarts that result.json lists, the first of the run."""
_MOST_LINES: Final = 100_000
"""Lines of the record that are read."""
_LONGEST: Final = 300
"""Limit of the characters of a cause."""
_RESTART_KINDS: Final[Mapping[str, Kind]] = {
    "kind": str,
    "step": (int, type(None)),
    "rank": (int, type(None)),
    "task": (str, type(None)),
    "cause": str,
    "checkpoint": (int, type(None)),
}


@dataclass(frozen=True, kw_only=True)
class Restart:
    """One restart, as result.json lists it."""

    kind: Literal["all", "lost", "returned", "alone"]
    """all: every task; lost: every task except a lost replica (elastic); returned: every task, including a replica that
    was lost; alone: only this task.
    """
    cause: str
    """One line about the failed rank and its failure."""
    step: int | None = None
    """Updates that the failing rank had completed; None: the rank had not begun, or nothing failed."""
    rank: int | None = None
    """The failing rank, by its number in the attempt that failed."""
    task: str | None = None
    """The failing task, such as `worker:1`."""
    checkpoint: int | None = None
    """The step of the checkpoint that the run continued from; None: it continued without a checkpoint."""


def record_restart(folder: Path, restart: Restart) -> None:
    """Append a restart to the record; a record that cannot be written does not end the run."""
    lines = mask(restart.cause).splitlines() or [""]
    noted = {**asdict(restart), "cause": lines[0][:_LONGEST]}
    with contextlib.suppress(OSError, UnreadableError), open_regular(folder / RESTARTS, "ab") as file:
        file.write(json.dumps(noted).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def restarts_of(folder: Path) -> dict[str, Any]:
    """Return `restarts` for result.json: at most the first 1,000; `restarts_not_listed` counts the rest.

    Malformed lines are skipped.
    """
    restarts: list[dict[str, Any]] = []
    count = 0
    with contextlib.suppress(UnreadableError):
        for line in itertools.islice(read_lines(folder / RESTARTS), _MOST_LINES):
            with contextlib.suppress(ValueError):
                content = expect_map(parse_json(line), _RESTART_KINDS)
                count += 1
                restarts += [{key: content[key] for key in _RESTART_KINDS}] * (count <= _LISTED)
    return {"restarts": restarts, **({"restarts_not_listed": count - len(restarts)} if count > len(restarts) else {})}


_RESERVE_BYTES: Final = 64 * 1024
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_LIVE: Final = re.compile(r"\.?((nccl_)?rank_\d+|trained|evaluated)(\..*)?")
"""Names of the files that a run writes into the folder of the live state."""
_BEGUN: Final = re.compile(r"\.lock|\.fence|\.reserve|resolved\.yaml|environment\.json|status\.json|train\.log")
"""Names of the files of a run that has only begun."""
_FILES: Final = (
    "environment.json", "plan.json", "report.html", "settings.json", "result.json", "status.json", "metrics.jsonl",
    "evaluations.jsonl", "updates.jsonl", "restarts.jsonl", "rollbacks.json", "sample.txt", "train.log", ".fence",
    ".attempts", ".stop", ".reserve", "live", "logs", MARK, "checkpoints/index.json", "checkpoints/evaluated.json",
    "plots/*.png", "profile/trace.json", "profile/operations.txt", "tracking/*.json",
)  # fmt: skip
"""Files that a run replaces, deletes or appends to by name."""


class RunPath:
    """A path of a run, by its name in the folder."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: RunFolder, owner: object = None) -> Path:
        return folder.path / self._name


@dataclass(frozen=True)
class RunFolder:
    """The paths of a run, and operations on the folder as a whole.

    Example:
        >>> RunFolder(Path("outputs/digits/1")).log_of(2).as_posix()
        'outputs/digits/1/logs/rank_2.log'
    """

    path: Path
    """The folder itself."""

    @classmethod
    def create(cls, root: Path, name: str, *, now: datetime | None = None) -> RunFolder:
        """Create `root/name/<date>_<time>`, or the same with -2, -3 ... if it exists already.

        Three launches within one second get three folders: the folder is created exclusively.
        """
        stamp = (now or datetime.now().astimezone()).strftime("%Y-%m-%d_%H-%M-%S")
        return cls.claim(root / name / stamp)

    @classmethod
    def claim(cls, path: Path) -> RunFolder:
        """Create the folder `path`, or `path-2`, `path-3` ...: the first that no run has used.

        An existing folder without a run is used: Hydra launchers create the folder before the job starts.

        Raises:
            StorageError: the path, or one above it, is a file.
        """
        if (file := file_in_the_way(path)) is not None:
            raise StorageError(f"{path} cannot be the folder of a run: {file} is no folder. Choose another path.")
        path.parent.mkdir(parents=True, exist_ok=True)
        for number in itertools.count(1):
            candidate = path if number == 1 else path.with_name(f"{path.name}-{number}")
            with contextlib.suppress(FileExistsError):
                candidate.mkdir(exist_ok=True)
                if not (candidate / "resolved.yaml").exists():
                    # the process that creates the lock file owns the folder: two launches never share one
                    (candidate / ".lock").touch(exist_ok=False)
                    return cls(candidate)
        raise AssertionError  # count() never ends

    resolved = RunPath("resolved.yaml")
    """The config with every value resolved; the only input of a worker."""
    environment = RunPath("environment.json")
    """Environment, packages and commit of the start of the run."""
    result = RunPath("result.json")
    """The outcome, written once at the end."""
    metrics = RunPath("metrics.jsonl")
    """Logged metrics, one JSON object per line."""
    log = RunPath("train.log")
    """The log of rank 0."""
    logs = RunPath("logs")
    """The logs of the other ranks."""
    checkpoints = RunPath("checkpoints")
    """The checkpoints, one folder each."""
    evaluations = RunPath("evaluations.jsonl")
    """Results of the evaluator of a training: one JSON object per line and checkpoint."""
    tensorboard = RunPath("tensorboard")
    """TensorBoard event files."""
    live = RunPath("live")
    """Heartbeats and error reports of the running attempt."""
    trained = RunPath("live/trained")
    """The marker file of a training that has ended, whose result waits for its evaluator."""
    evaluated = RunPath("live/evaluated.json")
    """The marker file about the end of the evaluator of the running attempt."""
    nccl_dumps = RunPath("live/nccl_rank_")
    """Prefix of the paths that NCCL's flight recorder writes: `live/nccl_rank_0` of rank 0."""
    reserve = RunPath(".reserve")
    """A file that reserves space while a run is active, so that its result can be written on a full disk."""

    def log_of(self, rank: int) -> Path:
        """Return the file that a rank above 0 writes its output to."""
        return self.logs / f"rank_{rank}.log"

    def heartbeat_of(self, rank: int) -> Path:
        """Return the heartbeat file of a rank."""
        return self.live / f"rank_{rank}"

    def error_of(self, rank: int) -> Path:
        """Return the error report of a failed rank, a JSON file."""
        return self.live / f"rank_{rank}.error.json"

    def done_of(self, rank: int) -> Path:
        """Return the marker file of a rank that has finished its task: exit code 0 without it is a failure."""
        return self.live / f"rank_{rank}.done"

    def collectives_of(self, rank: int) -> Path:
        """Return the mapped file with the last collectives of a rank."""
        return self.live / f"rank_{rank}.collectives"

    def stacks_of(self, rank: int) -> Path:
        """Return the file that a hanging rank writes the stacks of its threads to."""
        return self.live / f"rank_{rank}.stacks"

    @contextlib.contextmanager
    def lock(self) -> Iterator[int]:
        """Hold the lock of the folder for the duration of the block; yields the descriptor to pass to worker processes.

        Raises:
            ConfigError: another run uses the folder; the error names its process.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with locked(self.path / ".lock") as descriptor:
            yield descriptor

    def begin(self) -> None:
        """Take the folder over, and delete the outdated files of an earlier attempt of this run: its result and its
        live state.

        Raises:
            CheckpointError, ConfigError: as `take`.
            OSError: the file system refuses.
        """
        owner = self.take()
        self.result.unlink(missing_ok=True)
        owner.remove(self.live, _LIVE)
        if os.path.lexists(self.live):
            set_aside(self.live, "holds files that this run did not write")
        if not self.reserve.is_file():
            with naming(self.path, needed=_RESERVE_BYTES), self.reserve.open("wb") as file:
                file.write(os.urandom(_RESERVE_BYTES))  # zeros would take no space where a file system compresses

    def take(self) -> OwnershipToken:
        """Return the owner of the folder, whose lock is held; create its token if no run has begun in it.

        Raises:
            ConfigError: it holds files with the names of a run's, and no run has begun in it; nothing is changed.
            CheckpointError: it is the folder of a run, and its token is absent or cannot be read.
            OSError: the file system refuses.
        """
        if os.path.lexists(self.resolved):
            return owner_of_run(self.path)
        with naming(self.path):
            owner = OwnershipToken.find(self.path)
            if owner is None:
                paths = (path for pattern in _FILES for path in sorted(self.path.glob(pattern)))
                # Hydra opens an empty log beforehand
                foreign = [path for path in paths if path.is_symlink() or not path.is_file() or path.stat().st_size]
                if foreign:
                    names = ", ".join(path.relative_to(self.path).as_posix() for path in foreign[:3])
                    rule = f"holds {names}, which a run would write, and no run has begun in it. Choose another folder."
                    raise ConfigError([Problem(key="run folder", value=str(self.path), rule=rule)])
                owner = OwnershipToken()
                owner.mark(self.path)
            return owner

    def forget_result(self) -> None:
        """Delete the result of an earlier run, if a run has begun in the folder."""
        if OwnershipToken.find(self.path) is not None or os.path.lexists(self.resolved):
            self.result.unlink(missing_ok=True)

    def discard(self) -> None:
        """Delete a folder in which a run did not begin after all; files that the run did not write are kept."""
        owner = OwnershipToken.find(self.path)
        if owner is not None and owner.remove(self.path, _BEGUN):
            (self.path / MARK).unlink(missing_ok=True)

    def open_live(self) -> None:
        """Create the folder of the live state, with the token of the run; an existing one is used as it is."""
        owner = OwnershipToken.find(self.path)
        with contextlib.suppress(FileExistsError):
            if owner is None:  # a worker started by hand
                self.live.mkdir()
            else:
                owner.make(self.live)

    def release_reserve(self) -> None:
        """Delete the reserve, because the run has ended or a file must be written on a full disk."""
        with contextlib.suppress(OSError):
            self.reserve.unlink(missing_ok=True)

    def write_report(self, path: Path, content: Mapping[str, Any]) -> None:
        """Write JSON into the run folder; release the reserve if the disk is full.

        Raises:
            OSError: it cannot be written even so; a removed run folder is not created again.
        """
        if path.parent != self.path:
            path.parent.mkdir(exist_ok=True)
        try:
            write_json_atomically(path, content)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            self.release_reserve()
            write_json_atomically(path, content)

    @property
    def resume_command(self) -> str:
        """The command that continues this run.

        It names the config folders and packages that this process was given. A run of objects is continued from Python.
        """
        if IN_PROCESS in allowed_packages():
            return f"trainkit.train(resume={quoted(self.path)}, ...) with the same objects"
        code = self.path / "code"
        variables = [f"PYTHONPATH={shlex.quote(str(code))}"] if code.is_dir() else []
        return " ".join([*variables, printed_command("resume", [self.path])])

    def write_result(self, result: Mapping[str, Any]) -> None:
        """Write `result.json`, with the restarts of the run; secrets in quoted error messages are masked."""
        reason = result.get("reason")
        masked = {"reason": mask(reason)} if isinstance(reason, str) else {}
        self.write_report(self.result, {**result, **masked, **restarts_of(self.path)})

    def read_result(self) -> dict[str, Any] | None:
        """Return the content of `result.json`; None if it is missing or unreadable."""
        try:
            return read_map(self.result, {}, optional=_RESULT)
        except UnreadableError:
            return None

    def best_and_last(self) -> dict[str, str | None]:
        """Return the paths of the best and the last checkpoint of the run."""
        names = named_checkpoints(self.checkpoints)
        return {label: None if name is None else str(self.checkpoints / name) for label, name in names.items()}


_RESULT: Final[Mapping[str, Kind]] = {
    "status": str,
    "reason": (str, type(None)),
    "exit_code": int,
    "last": (str, type(None)),
    "best": (str, type(None)),
}
"""Types of the values of result.json that are read again."""


FENCE: Final = "TRAINKIT_FENCE"
"""The environment variable with the token of a worker's group."""

_FENCE_FILE: Final = ".fence"
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
        fence = cls(path=folder.path / _FENCE_FILE, token=uuid.uuid4().hex)
        write_json_atomically(
            fence.path, {"token": fence.token, "pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}
        )
        return fence

    @classmethod
    def verify(cls, folder: RunFolder, token: str, *, timeout_s: float = _TIMEOUT_S) -> Self:
        """Check that this process sees the token that rank 0 wrote, and return it.

        Raises:
            ConfigError: the folder has no token, or another one: it is not on a file system that both processes share.
        """
        fence = cls(path=folder.path / _FENCE_FILE, token=token)
        deadline = time.monotonic() + timeout_s
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
    def from_environ(cls, folder: RunFolder, environ: MutableMapping[str, str]) -> Self:
        """Return the token of this process's group from its environment, if it is set: a lock may be enough."""
        return cls(path=folder.path / _FENCE_FILE, token=environ.pop(FENCE))

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
            owner_text = f"process {owner['pid']} on {owner['host']}" if "pid" in owner else "another process"
            raise TrainingError(
                f"{self.path.parent} was taken over by {owner_text}. This group ends and writes no more to it."
            )
