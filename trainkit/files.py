"""Files that another program, or another user, may have written; files written as a whole; and full disks.

Every file of a run folder, of a checkpoint and of a sweep folder is opened here: only regular files of limited size,
never through a symbolic link, and never waiting for the other end of a pipe. JSON and YAML of a file or of a connection
are parsed within limits of size, depth, integers and aliases.

    content = read_map(folder / "result.json", {"status": str, "seconds": (int, float)})

Every failure to read is an `UnreadableError`, which names the file and the reason. A file that is written is, for a
reader and after a crash, the old one or the new one. An `OSError` of a write names neither the file, nor the free
space, nor a remedy: here it becomes a `StorageError`, which names all three and ends the command with exit code 4.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import resource
import stat
import tempfile
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Literal

import yaml

from trainkit.errors import AbsentFileError, StorageError, UnreadableError

if TYPE_CHECKING:
    from torch import Tensor

MAX_BYTES: Final = 16 << 20
"""Default limit of the bytes of a file."""
_MAX_LINE: Final = 1 << 20
"""Largest number of bytes of one line."""
_CHUNK: Final = 1 << 20

_KINDS: Final = (
    (stat.S_ISLNK, "a symbolic link, and trainkit follows none inside its own folders"),
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


Mode = Literal["rb", "ab", "wb"]
_FLAGS: Final[Mapping[Mode, int]] = {
    "rb": os.O_RDONLY,
    "ab": os.O_WRONLY | os.O_APPEND | os.O_CREAT,
    "wb": os.O_WRONLY | os.O_CREAT,
}


def open_regular(path: Path, mode: Mode = "rb", *, follow: bool = False, buffering: int = -1) -> BinaryIO:
    """Open a regular file without waiting for the other end of a pipe.

    Args:
        path: the file; created if it is absent and opened for writing.
        mode: read, append, or overwrite.
        follow: whether to follow a symbolic link: for a path that the user named, not for a file inside a folder.
        buffering: as in `open`.

    Raises:
        AbsentFileError: there is no such file.
        UnreadableError: the path is a link, a directory, a pipe, a socket or a device, or cannot be opened.
    """
    descriptor = open_descriptor(path, _FLAGS[mode], follow=follow)
    if mode == "wb":
        os.ftruncate(descriptor, 0)  # not by a flag: anything but a regular file must stay unchanged
    return os.fdopen(descriptor, mode, buffering)


def open_descriptor(path: Path, flags: int, *, follow: bool = False) -> int:
    """Return the descriptor of a regular file; otherwise as `open_regular`.

    Raises:
        StorageError: the file is to be created or written, and the system refuses.
    """
    flags |= os.O_NONBLOCK if follow else os.O_NONBLOCK | os.O_NOFOLLOW
    try:
        # Devices must not even be opened: check the file before and after.
        with contextlib.suppress(FileNotFoundError):
            _refuse_irregular(path, path.stat(follow_symlinks=follow).st_mode)
        descriptor = os.open(path, flags, 0o666)  # as in `open`: the umask applies
    except (OSError, ValueError) as error:  # ValueError: a name with a null character
        if isinstance(error, OSError) and flags & os.O_CREAT:
            raise storage_error(path, error) from None
        if isinstance(error, FileNotFoundError):
            raise AbsentFileError(path, "it does not exist") from None
        raise UnreadableError(path, getattr(error, "strerror", None) or str(error)) from None
    try:
        _refuse_irregular(path, os.fstat(descriptor).st_mode)
    except UnreadableError:
        os.close(descriptor)
        raise
    return descriptor


def _refuse_irregular(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise UnreadableError(path, f"it is {_kind(mode) or 'not a regular file'}")


def size_of(path: Path) -> int:
    """Return the size of a regular file in bytes.

    Raises:
        AbsentFileError: there is no such file.
        UnreadableError: the path is a link, a directory, a pipe, a socket or a device, or cannot be inspected.
    """
    status = _status_of(path)
    _refuse_irregular(path, status.st_mode)
    return status.st_size


def refuse_link(folder: Path) -> None:
    """Refuse a path that is a symbolic link or not a folder; accept an absent one.

    Raises:
        UnreadableError: the path does not name a folder.
    """
    with contextlib.suppress(AbsentFileError):
        mode = _status_of(folder).st_mode
        if not stat.S_ISDIR(mode):
            raise UnreadableError(folder, f"it is {_kind(mode) or 'a file, and a folder was expected'}")


def _status_of(path: Path) -> os.stat_result:
    try:
        return path.lstat()
    except FileNotFoundError:
        raise AbsentFileError(path, "it does not exist") from None
    except (OSError, ValueError) as error:
        raise UnreadableError(path, getattr(error, "strerror", None) or str(error)) from None


def _kind(mode: int) -> str | None:
    return next((name for matches, name in _KINDS if matches(mode)), None)


def read_bytes(path: Path, *, limit: int = MAX_BYTES, follow: bool = False) -> bytes:
    """Read a whole file.

    Args:
        path: the file.
        limit: largest number of bytes.
        follow: as in `open_regular`.

    Raises:
        UnreadableError: it is not a regular file, or has more bytes.
    """
    with open_regular(path, follow=follow, buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise UnreadableError(path, f"it has {size:,} bytes, and at most {limit:,} are read")
        content = bytearray()
        try:
            while part := file.read(_CHUNK):
                content += part
                if len(content) > limit:  # the file grows, or reports a wrong size
                    raise UnreadableError(path, f"it has more than {limit:,} bytes")
        except OSError as error:
            raise UnreadableError(path, error.strerror or str(error)) from None
    return bytes(content)


def read_text(path: Path, *, limit: int = MAX_BYTES, follow: bool = False) -> str:
    """Read a whole file of UTF-8 text.

    Raises:
        UnreadableError: it is not a regular file, has more than `limit` bytes, or is not UTF-8.
    """
    try:
        return read_bytes(path, limit=limit, follow=follow).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UnreadableError(path, f"it is not UTF-8 text (byte {error.start + 1})") from None


def read_json(path: Path, *, limit: int = MAX_BYTES) -> Any:
    """Read a file of JSON.

    Raises:
        UnreadableError: it is not a regular file, has more than `limit` bytes, or `parse_json` refuses it.
    """
    try:
        return parse_json(read_bytes(path, limit=limit))
    except ValueError as error:
        raise UnreadableError(path, str(error)) from None


def read_map(
    path: Path, kinds: Mapping[str, Kind], *, optional: Mapping[str, Kind] | None = None, limit: int = MAX_BYTES
) -> dict[str, Any]:
    """Read a JSON file that contains a map with known keys.

    Args:
        path: the file.
        kinds: key -> the types of its value; further keys are accepted.
        optional: the same for keys that may be absent.
        limit: largest number of bytes of the file.

    Raises:
        UnreadableError: the file cannot be read, a key is missing, or a value has another type.
    """
    try:
        return expect_map(read_json(path, limit=limit), kinds, optional=optional)
    except ValueError as error:
        raise UnreadableError(path, str(error)) from None


def read_lines(path: Path, *, start: int = 0, longest: int = _MAX_LINE) -> Iterator[bytes]:
    """Yield the complete lines of a file with their line breaks; skip a last line without one.

    Args:
        path: the file; it may grow meanwhile.
        start: the byte at which to begin.
        longest: largest number of bytes of a line.

    Raises:
        UnreadableError: it is not a regular file, or a line is longer.
    """
    with open_regular(path) as file:
        file.seek(start)
        while line := file.readline(longest + 1):
            if not line.endswith(b"\n"):
                if len(line) > longest:
                    raise UnreadableError(path, f"a line of it has more than {longest:,} bytes")
                return
            yield line


def read_tail(path: Path, num_bytes: int) -> tuple[bytes, bool]:
    """Return the last bytes of a file, and whether they are the whole file.

    Raises:
        UnreadableError: it is not a regular file.
    """
    with open_regular(path) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - num_bytes))
        return file.read(num_bytes), size <= num_bytes


_MAX_DEPTH: Final = 64
"""Largest depth of nested maps and lists; trainkit writes fewer than 20."""
_MAX_INTEGER: Final = 1 << 64
"""Limit of the absolute value of integers: seeds are unsigned numbers of 64 bits."""

Kind = type | tuple[type, ...]
"""The type of a value; `object` accepts any."""

_NAMES: Final[Mapping[type, str]] = {
    dict: "a map",
    list: "a list",
    str: "a text",
    bool: "true or false",
    int: "an integer",
    float: "a number",
    type(None): "null",
}


def parse_json(text: str | bytes | bytearray, *, depth: int = _MAX_DEPTH) -> Any:
    """Parse JSON from an untrusted source.

    Args:
        text: the text; bytes must be UTF-8.
        depth: largest depth of nested maps and lists.

    Raises:
        ValueError: the text is not UTF-8, empty, not JSON, nested deeper, or contains a duplicate key, an integer
            beyond 64 bits or half of a surrogate pair.

    Example:
        >>> parse_json('{"step": 3}')
        {'step': 3}
        >>> parse_json('{"step": 3, "step": 4}')
        Traceback (most recent call last):
        ValueError: it holds the key 'step' twice
    """
    if not text.strip():
        raise ValueError("it is empty")
    try:
        decoded = text if isinstance(text, str) else text.decode("utf-8")
        content = _DECODER.decode(decoded)
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 text (byte {error.start + 1})") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error}") from None
    except RecursionError:
        raise ValueError(f"its JSON is nested deeper than {depth}") from None
    _refuse_deep(content, depth)
    return content


def _integer(text: str) -> int:
    number = int(text) if len(text) <= 21 else _MAX_INTEGER  # parsing takes quadratic time in the length
    if not -_MAX_INTEGER < number < _MAX_INTEGER:
        raise ValueError("it holds an integer beyond 64 bits")
    return number


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"it holds the key {_short(twice)} twice")
    return content


_DECODER: Final = json.JSONDecoder(parse_int=_integer, object_pairs_hook=_unique)


def _refuse_deep(content: Any, depth: int) -> None:
    """Refuse values nested too deep, and text that no file can hold."""
    level = [content]
    for _ in range(depth + 1):
        inner: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                inner += value
                inner += value.values()
            elif isinstance(value, list):
                inner += value
            elif isinstance(value, str) and not value.isascii():
                _refuse_surrogates(value)
        if not inner:
            return
        level = inner
    raise ValueError(f"its JSON is nested deeper than {depth}")


def _refuse_surrogates(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("it holds half of a surrogate pair, which is not text") from None


def expect_map(
    content: Any, kinds: Mapping[str, Kind], *, optional: Mapping[str, Kind] | None = None
) -> dict[str, Any]:
    """Check the keys of a map and the types of their values; accept further keys.

    An integer is also a number; true and false are neither.

    Raises:
        ValueError: the content is not a map, a key is missing, or a value has another type.

    Example:
        >>> expect_map({"step": "3"}, {"step": int})
        Traceback (most recent call last):
        ValueError: its key step is a text, and an integer was expected
    """
    if not isinstance(content, dict):
        names = f" with the keys {', '.join(kinds)}" if kinds else ""
        raise ValueError(f"it is {_kind_of(content)}, and a map{names} was expected")  # noqa: TRY004 - of a text
    for key, kind in {**kinds, **(optional or {})}.items():
        if key not in content:
            if key in kinds:
                raise ValueError(f"its key {key} is missing")
        elif not _is(content[key], kind):
            names = " or ".join(dict.fromkeys(_NAMES[item] for item in (kind if isinstance(kind, tuple) else (kind,))))
            raise ValueError(f"its key {key} is {_kind_of(content[key])}, and {names} was expected")
    return content


def expect_maps(content: Any, kinds: Mapping[str, Kind], *, optional: Mapping[str, Kind] | None = None) -> list[Any]:
    """Check that a list contains maps with known keys, each as in `expect_map`.

    Raises:
        ValueError: the content is not a list, or an item is not such a map.
    """
    if not isinstance(content, list):
        raise ValueError(f"it is {_kind_of(content)}, and a list was expected")  # noqa: TRY004 - of a text
    for number, item in enumerate(content, start=1):
        try:
            expect_map(item, kinds, optional=optional)
        except ValueError as error:
            raise ValueError(f"of item {number}: {error}") from None
    return content


def whole_numbers(content: Any) -> list[int]:
    """Check that a list contains integers of at least 0.

    Raises:
        ValueError: the content is not a list, or contains something else.
    """
    if not isinstance(content, list | tuple):
        raise ValueError(f"it is {_kind_of(content)}, and a list of whole numbers was expected")  # noqa: TRY004 - of a text
    if any(type(number) is not int or number < 0 for number in content):
        raise ValueError("it holds other values than whole numbers from 0 on")
    return list(content)


def _is(value: Any, kind: Kind) -> bool:
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if isinstance(value, bool):
        return bool in kinds or object in kinds
    if isinstance(value, int) and float in kinds:
        return True
    return isinstance(value, kinds)


def _kind_of(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "infinite"
    return _NAMES.get(type(value), type(value).__name__)


def _short(text: str, most: int = 40) -> str:
    return ascii(text if len(text) <= most else f"{text[:most]}...")


MAX_YAML_BYTES: Final = 1 << 20
"""Largest number of bytes of a YAML file of a config."""
MAX_YAML_DEPTH: Final = 50
"""Largest depth of nested mappings and lists."""
MAX_YAML_VALUES: Final = 20_000
"""Largest number of keys, values and items of one text, with every alias expanded."""

_PREFIX: Final = "tag:yaml.org,2002:"
_TAGS: Final = frozenset(f"{_PREFIX}{name}" for name in ("null", "bool", "int", "float", "str", "seq", "map"))
_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class UnreadableYAMLError(yaml.MarkedYAMLError):
    """A text that trainkit refuses to read as YAML; `problem` is the reason, and `problem_mark` the place."""


class SafeLoader(_Base):  # type: ignore[misc]
    """PyYAML's safe loader; a scalar that cannot be constructed is an error with its place."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Construct the value of a node."""
        try:
            return super().construct_object(node, deep)
        except (ValueError, OverflowError) as error:
            reason = "an integer has too many digits" if "digits" in str(error) else str(error)
            raise UnreadableYAMLError(
                problem=f"holds a scalar that cannot be read: {reason}", problem_mark=node.start_mark
            ) from None


def parse_yaml(text: str) -> Any:
    """Parse YAML from an untrusted source.

    Raises:
        ValueError: the text is not YAML, or exceeds a limit; the message begins with "it".

    Example:
        >>> parse_yaml("step: 3")
        {'step': 3}
        >>> parse_yaml("a: !!set {b}")
        Traceback (most recent call last):
        ValueError: line 1 of it holds the tag !!set; a config holds plain values only
    """
    try:
        check_bounds(text)
        return yaml.load(text, Loader=SafeLoader)  # noqa: S506 - a safe loader
    except UnreadableYAMLError as error:
        line = f"line {error.problem_mark.line + 1} of it" if error.problem_mark else "it"
        raise ValueError(f"{line} {error.problem}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"it is not YAML: {' '.join(str(error).split())}") from None


def check_bounds(text: str) -> None:  # noqa: PLR0912 - one event after the other
    """Refuse YAML that exceeds a limit, before anything is built from it: the parser's events are counted one by one.

    Raises:
        UnreadableYAMLError: the text is nested too deep, has too many values, contains an alias inside its own
            anchor, or a tag of another type than plain values.
        yaml.YAMLError: the text is not YAML.
    """
    open_: list[tuple[str | None, int, int]] = []  # of each mapping and list: anchor, number of values, depth
    anchors: dict[str | None, tuple[int, int]] = {}
    total = 0

    def broken(problem: str) -> UnreadableYAMLError:
        return UnreadableYAMLError(problem=problem, problem_mark=event.start_mark)

    try:
        event: Any
        for event in yaml.parse(text, Loader=_Base):
            anchor = getattr(event, "anchor", None)
            if isinstance(event, yaml.CollectionStartEvent | yaml.ScalarEvent):
                if (tag := event.tag) not in (None, "!") and tag not in _TAGS:
                    shown = f"!!{tag.removeprefix(_PREFIX)}" if tag.startswith(_PREFIX) else tag
                    raise broken(f"holds the tag {shown}; a config holds plain values only")
                size, depth = 1, 1
                if isinstance(event, yaml.ScalarEvent):
                    size, depth = 1 + len(event.value) // 64, 0
            elif isinstance(event, yaml.AliasEvent):
                if any(anchor == outer for outer, *_ in open_):
                    raise broken(f"holds the alias *{anchor} inside its own anchor")
                if anchor not in anchors:
                    raise broken(f"holds the alias *{anchor}, and no anchor &{anchor} before it")
                size, depth = anchors[anchor]
            elif isinstance(event, yaml.CollectionEndEvent):
                anchor, size, depth = open_.pop()
            else:
                continue
            if not isinstance(event, yaml.CollectionEndEvent):
                total += size
                if len(open_) + depth > MAX_YAML_DEPTH:
                    raise broken(f"nests mappings and lists more than {MAX_YAML_DEPTH} deep")
                if total > MAX_YAML_VALUES:
                    raise broken(f"holds more than {MAX_YAML_VALUES:,} values, aliases expanded")
            if isinstance(event, yaml.CollectionStartEvent):
                open_.append((anchor, size, depth))
                continue
            if not isinstance(event, yaml.AliasEvent):
                anchors[anchor] = size, depth
            if open_:
                above, values, deepest = open_.pop()
                open_.append((above, values + size, max(deepest, 1 + depth)))
    except yaml.reader.ReaderError as error:
        line = text.encode()[: error.position].count(b"\n")
        mark = yaml.Mark("", error.position, line, 0, None, 0)
        what = f"holds the character {ascii(chr(error.character))[1:-1]}, which YAML does not allow"
        raise UnreadableYAMLError(problem=what, problem_mark=mark) from None


def write_json_atomically(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON so that a reader, even after a crash, sees either the old file or the new one.

    Numbers that JSON cannot represent (NaN, infinity) become null.
    """
    write_atomically(path, json.dumps(json_value(content), indent=2, allow_nan=False) + "\n")


def write_atomically(path: Path, text: str, *, sync: bool = True) -> None:
    """Write a text file as `replacing` does."""
    with replacing(path, sync=sync) as file:
        file.write(text.encode())


@contextlib.contextmanager
def replacing(path: Path, *, sync: bool = True) -> Iterator[BinaryIO]:
    """Give a new file, which takes the place of `path` at the end of the block: a reader, even after a crash, sees
    either the old file or the new one.

    The folder must exist: a removed run folder is not created again. On return the file is on the disk; without `sync`,
    for a file that can be made again, a crash of the whole machine may lose it.

    Raises:
        OSError: it cannot be written; the error names the file.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.unlink(missing_ok=True)
        with draft.open("xb") as file:  # a new one: a link of this name is not followed
            yield file
            if sync:
                file.flush()
                os.fsync(file.fileno())
        draft.replace(path)
        if sync:
            sync_folder(path.parent)
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)


def json_value(value: Any) -> Any:
    """Return a value as JSON can hold it: null for NaN and infinity, lists for tuples, text for keys and paths.

    Example:
        >>> json_value({1: (float("nan"), 2.0)})
        {'1': [None, 2.0]}
    """
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): json_value(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(inner) for inner in value]
    return str(value) if isinstance(value, Path) else value


def cache_folder() -> Path:
    """Return trainkit's folder among the user's caches: `$XDG_CACHE_HOME/trainkit`, or `~/.cache/trainkit`.

    A relative XDG_CACHE_HOME is ignored, since it would name another folder in each working folder.

    Raises:
        RuntimeError: the user has no home folder.

    Source: XDG Base Directory Specification 0.8.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (folder if folder.is_absolute() else Path.home() / ".cache") / "trainkit"


_ELSEWHERE: Final = "or choose a folder on another file system (hydra.run.dir=FOLDER)"
_REMEDIES: Final = {
    errno.ENOSPC: f"Free space there, {_ELSEWHERE}.",
    errno.EDQUOT: f"Delete files there, request a larger quota, {_ELSEWHERE}.",
    errno.EFBIG: "Raise the limit of the size of a file (ulimit -f), or lower the size of the model.",
    errno.EROFS: f"Mount the file system writable, {_ELSEWHERE}.",
    **dict.fromkeys((errno.EACCES, errno.EPERM), f"Change its permissions, {_ELSEWHERE}."),
    **dict.fromkeys(
        (errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.ENOTCONN),
        f"It was removed, renamed or unmounted. Restore it, {_ELSEWHERE}.",
    ),
    **dict.fromkeys(
        (errno.EIO, errno.ENODEV, errno.ENXIO),
        f"The storage device or its connection failed: check it (dmesg), {_ELSEWHERE}.",
    ),
}
_ALWAYS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG})
"""Errors that only writing causes: they are about storage wherever they are raised."""
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_PROBE_BYTES: Final = 4096
_LITTLE_BYTES: Final = 64 * 1024
"""A file system with less free space than this counts as full."""
SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - only its free space is read
"""The folder in which Linux keeps the memory that the workers of a loader share with their parent."""
_MORE_SHARED_MEMORY: Final = (
    "Free space there, enlarge it (docker run --shm-size=1g; mount -o remount,size=1g /dev/shm), "
    "or lower loader.num_workers."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Free:
    """The free space of a file system for this user."""

    num_bytes: int
    num_files: int | None
    """Number of files and folders that can still be created; None if the file system has no limit."""

    @classmethod
    def at(cls, path: Path) -> Free | None:
        """Return the free space of the file system of a path, existing or not; None if unknown."""
        for folder in (path, *path.absolute().parents):
            try:
                stats = os.statvfs(folder)
            except FileNotFoundError:
                continue
            except OSError:
                return None
            if stats.f_blocks == 0:  # some network file systems report zeros
                return None
            files = stats.f_favail if stats.f_files else None
            return cls(num_bytes=stats.f_bavail * stats.f_frsize, num_files=files)
        return None

    def __str__(self) -> str:
        text = f"{num_bytes(self.num_bytes)} are free on its file system"
        return f"{text}, and it can hold no more files (inodes)" if self.num_files == 0 else text


def file_in_the_way(path: Path) -> Path | None:
    """Return the path or the first one above it that exists and is no folder; None if a folder can be made there.

    A link to nothing or to itself exists, and no folder can take its place.
    """
    first = next((parent for parent in (path, *path.parents) if os.path.lexists(parent)), None)
    return None if first is None or os.path.isdir(first) else first  # noqa: PTH112 - pathlib may raise


def quoted(path: Path) -> str:
    r"""Return a path as a text of Python, in double quotes.

    Example:
        >>> print(quoted(Path('my "run"')))
        "my \"run\""
    """
    return json.dumps(str(path), ensure_ascii=False)


def num_bytes(number: int) -> str:
    """Return a number of bytes with a suitable unit, 1 KiB = 1024.

    Example:
        >>> num_bytes(0), num_bytes(2048), num_bytes(3 << 29)
        ('0 B', '2 KiB', '1.5 GiB')
    """
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = max(0, min(len(units) - 1, (number.bit_length() - 1) // 10))
    return f"{number / (1 << 10 * power):.3g} {units[power]}"


def storage_error(path: Path, error: OSError, *, needed: int | None = None, remedy: str = "") -> StorageError:
    """Return the error of a path that cannot be written.

    Args:
        path: the file or folder.
        error: the error of the system.
        needed: number of bytes to be written, if known.
        remedy: what the user can do; "": the default for the folder of a run.
    """
    remedy = remedy or (_MORE_SHARED_MEMORY if path == SHARED_MEMORY else remedy_of(error))
    return StorageError(f"{path} cannot be written: {reason_and_room(path, error, needed=needed)}. {remedy}")


_FEW: Final = 8
"""Free files of a full file system after what a failed write left there was removed; fewer count as none."""


def reason_and_room(path: Path, error: OSError, *, needed: int | None = None) -> str:
    """Return the system's reason, with the needed and free bytes if they matter; arguments as above."""
    facts = [f"{num_bytes(needed)} are needed"] if needed is not None else []
    if error.errno in _FULL and (free := Free.at(path)) is not None:
        # Enough bytes and hardly a free file: the write found none, and removing what it had written freed a few.
        few_files = free.num_files is not None and free.num_files < _FEW
        had_none = few_files and needed is not None and needed < free.num_bytes
        facts.append(str(replace(free, num_files=0) if had_none else free))
    if error.errno == errno.EFBIG and (limit := file_limit()) is not None:
        facts.append(f"a file may have {num_bytes(limit)}")
    reason = error.strerror or str(error)
    return f"{reason} ({'; '.join(facts)})" if facts else reason


def remedy_of(error: OSError) -> str:
    """Return the remedy for an error of the system, as a sentence."""
    return _REMEDIES.get(error.errno or 0, f"Check the folder, {_ELSEWHERE}.")


def file_limit() -> int | None:
    """Return the largest size of a file that this process may write (`ulimit -f`); None if there is no limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return None if limit == resource.RLIM_INFINITY else limit


_FIXED_BYTES: Final = 32 * 1024
"""Manifest, meta, the two indexes of a checkpoint, rounding to blocks, and a few rows of metrics."""
_BYTES_A_TENSOR: Final = 512
"""Size of a tensor's entries in the header of its file and in the index."""
_NUM_FILES: Final = 8
"""Folder, files and temporary names of a checkpoint that one process writes."""


def bytes_needed(tensors: Iterable[Tensor]) -> int:
    """Return the bytes that a checkpoint of these tensors takes on a disk.

    Example:
        >>> import torch
        >>> bytes_needed([torch.zeros(256), torch.zeros(256, dtype=torch.float64)])
        36864
    """
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    return sum(sizes) + _BYTES_A_TENSOR * len(sizes) + _FIXED_BYTES


def lacking(root: Path, needed: int, largest_file: int) -> int | None:
    """Return the error number that a save would raise; None if it fits, or the free space is unknown."""
    if (limit := file_limit()) is not None and largest_file > limit:
        return errno.EFBIG
    free = Free.at(root)
    if free is None:
        return None
    few_files = free.num_files is not None and free.num_files < _NUM_FILES
    return errno.ENOSPC if free.num_bytes < needed or few_files else None


def refuse_full(path: Path, needed: int) -> None:
    """Refuse to begin a file that does not fit on its file system; writes nothing.

    Raises:
        StorageError: there is too little space, or a file may not become that large.
    """
    if (code := lacking(path.parent, needed, needed)) is not None:
        raise storage_error(path, OSError(code, os.strerror(code)), needed=needed)


def as_storage_error(error: BaseException, root: Path) -> StorageError | None:
    """Return the storage error that caused an exception; None if it has another cause.

    Every error of the system below `root` counts: only trainkit writes there.
    """
    if isinstance(error, StorageError):
        return error
    if not isinstance(error, OSError) or isinstance(error, ConnectionError):
        return None
    # Of two names, as in a rename, the second was to be created.
    name = error.filename2 if error.filename2 is not None else error.filename
    path = Path(os.fsdecode(name)).absolute() if isinstance(name, str | bytes) else None
    inside = path is not None and path.is_relative_to(root.absolute())
    if not inside and error.errno not in _ALWAYS:
        return None
    if error.errno in (errno.ENOENT, errno.ENOTDIR) and not root.exists():
        path = root
    if path is None:  # the first full folder that a run writes to
        folders = (root, SHARED_MEMORY, Path(os.environ.get("TMPDIR", "/tmp")))  # noqa: S108 - only its free space is read
        full = ((folder, Free.at(folder)) for folder in folders)
        path = next(
            (folder for folder, free in full if free and (free.num_bytes < _LITTLE_BYTES or free.num_files == 0)), None
        )
    if path is not None:
        return storage_error(path, error)
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return StorageError(f"a file cannot be written{where}: {error.strerror}. {remedy_of(error)}")


@contextlib.contextmanager
def reporting(root: Path) -> Iterator[None]:
    """Raise errors of the system about storage as `StorageError`, and all others unchanged."""
    try:
        yield
    except OSError as error:
        cause = as_storage_error(error, root)
        if cause is None:
            raise
        raise cause from error


@contextlib.contextmanager
def naming(path: Path, *, needed: int | None = None, remedy: str = "") -> Iterator[None]:
    """Raise every error of the system in this block as the `StorageError` of one path.

    Args:
        path: the path that the block writes.
        needed: number of bytes that it writes, if known.
        remedy: what the user can do; "": the default for the folder of a run.
    """
    try:
        yield
    except OSError as error:
        raise storage_error(path, error, needed=needed, remedy=remedy) from error


def refuse_unwritable(folder: Path) -> None:
    """Write a small file without a name into a folder.

    Raises:
        StorageError: the folder is gone, full or read-only; the message states which.
    """
    with naming(folder, needed=_PROBE_BYTES), tempfile.TemporaryFile(dir=folder) as probe:
        probe.write(bytes(_PROBE_BYTES))
        probe.flush()
        os.fsync(probe.fileno())


def sync_folder(folder: Path) -> None:
    """Make a rename or new name in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Presence:
    """Detects that the folder of a run is gone: removed, renamed, or its file system unmounted.

    It checks the file `resolved.yaml`, which every run has from beginning to end; without it, it checks the folder
    itself. An inode would not be reliable: some network file systems renumber theirs.
    """

    def __init__(self, folder: Path) -> None:
        marker = folder / "resolved.yaml"
        self._folder, self._marker = folder, marker if marker.exists() else folder

    def check(self) -> None:
        """Check that the folder still exists.

        Raises:
            StorageError: it is gone. A file system that does not respond at the moment does not count.
        """
        try:
            self._marker.stat()
        except (FileNotFoundError, NotADirectoryError):
            raise StorageError(
                f"the run folder {self._folder} is gone: it was removed, renamed or unmounted while the run used it. "
                "Nothing can be saved there. Restore it and resume it, or start again."
            ) from None
        except OSError:
            return
