"""All errors of trainkit, as exceptions with the exit code of the command.

TrainkitError                1   anything below
├── ConfigError              2   every problem of the config at once, before anything starts
│   └── MissingExtraError    2   an optional dependency that this config needs
├── DataError                3   a dataset that is absent, damaged or empty
├── CheckpointError          4   a checkpoint that is damaged, or belongs to another training
│   └── StorageError         4   a file or folder that cannot be written: full, read-only, gone
├── TrainingError            1   a step that cannot be computed: rank, step and cause
│   ├── ZeroWeightError      1   a global batch without a single target
│   ├── OutOfMemoryError     1   a device or its host had no memory left
│   ├── CollectiveMismatchError  1   ranks that call different collectives in one place
│   ├── NonFiniteError       1   a loss or gradient that is NaN or infinite
│   └── LossScaleError       1   the loss scale fell to its floor and gradients still overflow
├── LinkError              1   a connection between tasks that broke, or was never made
├── HangError                5   a rank that stopped making progress
├── CrashLoopError           6   restarts that do not get further
├── PeerError                    of a rank: another one failed; the exit code is that of its error
├── HangupError            129   the terminal was closed (SIGHUP); resumable
├── StoppedError           130   Ctrl-C; resumable
└── TerminatedError        143   SIGTERM; resumable
"""

from __future__ import annotations

import copyreg
import os
import re
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, TypeVar, cast

from trainkit.extras import install_command
from trainkit.redaction import is_secret, mask, redacted_argument, secrets_in, without_secrets

T = TypeVar("T")

CALLBACK_NOTE: Final = "in the callback "
"""Prefix of the note on an error that a callback raised."""


class _Missing:
    """The type of `MISSING`: the problem is the key itself, not its value."""

    def __repr__(self) -> str:
        return "MISSING"

    def __reduce__(self) -> str:
        return "MISSING"  # a copy from another process is this same object


MISSING: Final = _Missing()


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One mistake in a config, as text for the user; the text contains no secret.

    Example:
        >>> str(Problem(key="batch.micro_size", value=128, rule="use 100 or less.", origin="command line"))
        'batch.micro_size=128: use 100 or less. (command line)'
        >>> str(Problem(key="logger.w.api_key", value="k7", rule="is too short."))
        'logger.w.api_key=(redacted): is too short.'
    """

    key: str
    """The full key, `batch.micro_size`, or another subject (an argument, a file)."""
    rule: str
    """The violated rule, with its numbers, and the remedy, in full sentences."""
    value: Any = MISSING
    """The value found; MISSING if the key itself is the problem."""
    origin: str = ""
    """The place where the key was set: `command line`, or `file.yaml:12`."""

    def __str__(self) -> str:
        key = _printable(redacted_argument(self.key))  # an argument without key=value is shown whole
        subject = key if self.value is MISSING else f"{key}={_printable(yaml_text(self.shown_value))}"
        where = f" ({self.origin})" if self.origin else ""
        rule = _printable(self.rule, longest=1_200, allowed="\n")
        return mask(f"{subject}: {rule}{where}")

    @property
    def shown_value(self) -> Any:
        """The value, redacted if the key is secret."""
        path = tuple(self.key.lstrip("+~").split("."))
        if is_secret(path) and self.value is not MISSING:
            return without_secrets({"secret": self.value}, dict(secrets_in({"secret": self.value})))["secret"]
        return without_secrets(self.value, dict(secrets_in(self.value, path)), path)


@dataclass(frozen=True, kw_only=True, slots=True)
class UnknownKey(Problem):
    """A key that the class of its group does not have."""


def _printable(text: str, *, longest: int = 400, allowed: str = "") -> str:
    """Return a text without secrets and control characters; a long text is shortened in the middle."""
    text = mask(text)  # before shortening: a part of a secret would not be recognized
    if len(text) > longest:
        text = f"{text[: longest // 2]}...({len(text):,} characters)...{text[-longest // 4 :]}"
    return "".join(char if char.isprintable() or char in allowed else ascii(char)[1:-1] for char in text)


def yaml_text(value: Any) -> str:
    """Return a value as it is written in YAML."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


class TrainkitError(Exception):
    """The base class of all errors that trainkit raises deliberately."""

    exit_code: ClassVar[int] = 1
    anchor: ClassVar[str] = "which-rank-failed"
    """The section of docs/errors.md that explains the error."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Keep class, message and attributes in another process, whatever arguments the class takes."""
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class ConfigError(TrainkitError):
    """Every problem of a config, found before a process, port or file exists.

    Example:
        >>> print(ConfigError([Problem(key="seed", value=-1, rule="must not be negative.")]))
        1 problem in the config
          seed=-1: must not be negative.
    """

    exit_code = 2
    anchor = "other-keys-and-files"

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        count = len(self.problems)
        head = f"{count} problem{'' if count == 1 else 's'} in the config"
        super().__init__("\n".join([head, *(f"  {problem}" for problem in self.problems)]))


def refuse(problems: Iterable[Problem]) -> None:
    """Refuse what has problems.

    Raises:
        ConfigError: all of them; nothing is raised if there are none.

    Example:
        >>> refuse([])
    """
    if collected := tuple(problems):
        raise ConfigError(collected)


def together(*checks: Callable[[], object], then: Callable[[], T]) -> T:
    """Run checks that do not need each other and a last one, and return the result of the last one.

    Raises:
        ConfigError: the problems of all of them. After a problem no other error is raised: it may follow from the
            problem.
    """
    results, problems = [], list[Problem]()
    for check in (*checks, then):
        try:
            results.append(check())
        except ConfigError as error:
            problems += error.problems
        except Exception:
            if not problems:
                raise
    refuse(problems)
    return cast("T", results[-1])


class MissingExtraError(ConfigError):
    """A package that this config needs is not installed; the message contains the command that installs it."""

    anchor = "a-package-that-is-missing"

    def __init__(self, *, key: str, package: str, extra: str) -> None:
        rule = f"needs the package {package}. Install it: {install_command(extra, package)}"
        super().__init__([Problem(key=key, rule=rule)])


def require_packages(packages: Iterable[str], *, key: str, extra: str) -> None:
    """Refuse a key whose packages are not installed.

    Raises:
        MissingExtraError: the first that is absent.
    """
    for package in packages:
        spec = find_spec(package)
        if spec is None or spec.origin is None:  # a folder of that name in the current one is not a package
            raise MissingExtraError(key=key, package=package, extra=extra)


class DataError(TrainkitError):
    """A dataset is absent, damaged or empty."""

    exit_code = 3
    anchor = "data-that-cannot-be-used"


class CheckpointError(TrainkitError):
    """A checkpoint is damaged, incomplete, or belongs to another training."""

    exit_code = 4
    anchor = "checkpoints-that-are-refused"


class StorageError(CheckpointError):
    """A file or folder cannot be written: the disk is full, read-only or gone; the message names the path."""

    anchor = "files-that-cannot-be-written"


class UnreadableError(TrainkitError):
    """A file cannot be read, or does not contain what trainkit wrote; the message names the file and the reason.

    Args:
        args: the path and the reason, which has no full stop; or the whole message.

    Example:
        >>> print(UnreadableError("runs/0/result.json", "it is a named pipe"))
        runs/0/result.json cannot be read: it is a named pipe.
    """

    exit_code = 4
    anchor = "files-that-are-refused"

    @property
    def reason(self) -> str:
        """The reason, without the name of the file and without a full stop."""
        return str(self.args[-1])

    def __str__(self) -> str:
        return "{} cannot be read: {}.".format(*self.args) if len(self.args) == 2 else self.reason


class AbsentFileError(UnreadableError):
    """A file to be read does not exist."""


class TrainingError(TrainkitError):
    """A step cannot be computed; the message names rank, step and cause."""

    anchor = "a-step-that-cannot-be-computed"


class ZeroWeightError(TrainingError):
    """The global batch of a step has no target: its loss would be 0 / 0."""

    anchor = "a-batch-without-a-target"


class OutOfMemoryError(TrainingError):
    """A device, or the host, has no memory left; the message states what the run needs and what to try."""

    anchor = "out-of-memory"


class CollectiveMismatchError(TrainingError):
    """Ranks of one process group call different collectives, or with tensors of different shapes or dtypes."""

    anchor = "collectives-that-differ"


class NonFiniteError(TrainingError):
    """A loss or gradient is NaN or infinite, and no loss scale explains it."""

    anchor = "loss-that-is-not-finite"


class LossScaleError(TrainingError):
    """The loss scale is at its floor and gradients still overflow."""

    anchor = "loss-scale-at-its-floor"


class LinkError(TrainkitError, ConnectionError):
    """A connection to another task broke, or was never made; the message names the other task."""

    anchor = "a-connection-that-broke"


class HangError(TrainkitError):
    """A rank stopped making progress for longer than allowed."""

    exit_code = 5
    anchor = "a-rank-without-progress"


class CrashLoopError(TrainkitError):
    """Several restarts failed, or an exception of user code was raised again in the same place."""

    exit_code = 6
    anchor = "restarts-that-end"


class PeerError(TrainkitError):
    """Another rank of the run failed, and this one ends with it; that rank, or rank 0, reports the error in full."""

    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code  # type: ignore[misc]  # the exit code of the other rank's error


class HangupError(TrainkitError):
    """The terminal of the run was closed (SIGHUP); it can be resumed."""

    exit_code = 129
    anchor = "stopped-by-a-signal"


StopKind = Literal["stopped", "preempted", "hangup", "resized"]
"""How a run was asked to stop from outside: by Ctrl-C, by a signal to end, by the end of its terminal, or to continue
with another number of replicas. It is the status of the result.
"""


class StoppedError(TrainkitError):
    """The user stopped the run with Ctrl-C; it can be resumed."""

    exit_code = 130
    anchor = "stopped-by-a-signal"


class TerminatedError(TrainkitError):
    """The run was asked to end with SIGTERM; it can be resumed."""

    exit_code = 143
    anchor = "stopped-by-a-signal"


def status_of_error(error: BaseException) -> str:
    """Return the status of a run that ended with an error.

    Example:
        >>> status_of_error(HangupError("the terminal was closed")), status_of_error(ValueError())
        ('hangup', 'failed')
    """
    if isinstance(error, HangupError):
        return "hangup"
    if isinstance(error, TerminatedError):
        return "preempted"
    return "stopped" if isinstance(error, KeyboardInterrupt | StoppedError) else "failed"


def callback_note(error: BaseException) -> str:
    """Return the callback and hook that raised an error, as the end of a sentence; empty for any other error.

    Example:
        >>> error = ValueError("no")
        >>> error.add_note("in the callback mine.Worst, hook step_end")
        >>> callback_note(error)
        ' (in the callback mine.Worst, hook step_end)'
    """
    notes = (note for note in getattr(error, "__notes__", ()) if note.startswith(CALLBACK_NOTE))
    return next((f" ({note})" for note in notes), "")


_LIBRARIES: Final = re.compile(
    r"/(?:site|dist)-packages/(?:hydra|numpy|omegaconf|timm|torch|torchmetrics|torchvision|trainkit|transformers)/"
)
_OWN: Final = str(Path(__file__).parent) + os.sep
_STANDARD: Final = str(Path(os.__file__).parent) + os.sep
_MOST: Final = 3
_LONGEST: Final = 300


def with_frames(text: str, error: BaseException) -> str:
    r"""Append the innermost frames of the user's code to a text, one per line.

    Example:
        >>> def mine():
        ...     raise ValueError("no")
        >>> try:
        ...     mine()
        ... except ValueError as error:
        ...     print(with_frames("it fails.", error).splitlines()[0])
        it fails.
    """
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not is_library(frame.filename)]
    lines = [f"    {frame.filename}:{frame.lineno}, in {frame.name}: {frame.line}" for frame in frames[-_MOST:]]
    return "\n".join([text, *lines])


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, its cause or the error it was raised after, and so on.

    Example:
        >>> error = ValueError("no")
        >>> error.__context__ = KeyError("x")
        >>> [type(one).__name__ for one in chain_of(error)]
        ['ValueError', 'KeyError']
    """
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def first_line(error: BaseException) -> str:
    r"""Return the first line of an error's message that is not blank; without one, the name of its class.

    Example:
        >>> first_line(ValueError(" two\nlines")), first_line(MemoryError())
        ('two', 'MemoryError')
    """
    return next((line.strip() for line in text_of(error).splitlines() if line.strip()), type(error).__name__)


def text_of(error: BaseException) -> str:
    """Return the message of an error; an empty text for a user's exception whose `__str__` fails."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - `__str__` may raise anything
        return ""


def named_first_line(error: BaseException) -> str:
    """Return the class and the first line of an error, truncated to 300 characters.

    Example:
        >>> named_first_line(KeyError("label")), named_first_line(MemoryError())
        ("KeyError: 'label'", 'MemoryError')
    """
    name, line = type(error).__name__, first_line(error)
    return name if line == name else f"{name}: {line[:_LONGEST]}"


def listed(texts: Iterable[object], most: int = 5, count: int | None = None) -> str:
    """Return texts for a message: the first few, and the number of the others.

    Args:
        texts: the texts, or the first of them.
        most: how many are shown.
        count: the number of all, if these are the first; None: these are all.

    Example:
        >>> listed("abcd", 2), listed([3, 4], 8, 30)
        ('a, b and 2 more', '3, 4 and 28 more')
    """
    items = [str(text) for text in texts]
    more = (count or len(items)) - min(len(items), most)
    return f"{', '.join(items[:most])}{f' and {more} more' if more > 0 else ''}"


def is_library(file: str) -> bool:
    """Return whether a source file belongs to trainkit, to Python, or to a known library; others are the user's own.

    Example:
        >>> is_library("/env/lib/python3.11/site-packages/torch/nn/linear.py"), is_library("/home/ada/shop/net.py")
        (True, False)
    """
    if file.startswith((_OWN, "<frozen")) or _LIBRARIES.search(file):
        return True
    return file.startswith(_STANDARD) and "-packages/" not in file
