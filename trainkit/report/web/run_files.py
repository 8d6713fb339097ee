"""The files of a run that its page shows; each may be absent, damaged or malicious."""

from __future__ import annotations

import base64
import contextlib
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from trainkit.errors import AbsentFileError, UnreadableError
from trainkit.files import Kind, parse_json, read_bytes, read_lines, read_map

_LIMIT: Final = 4 << 20
"""Largest number of bytes of a JSON file that is shown."""
_MOST_LINES: Final = 2_000
_MOST_FOLDERS: Final = 1_000
_PICTURE_BYTES: Final = 1 << 20
_PNG: Final = b"\x89PNG\r\n\x1a\n"
_CHECKPOINT: Final = re.compile(r"step_(\d{1,12})")
_MAP: Final[Kind] = (dict, type(None))
_RESULT: Final[Mapping[str, Kind]] = {
    "status": str,
    "reason": (str, type(None)),
    "steps": (int, type(None)),
    "samples": (int, type(None)),
    "seconds": (float, type(None)),
    "seconds_total": (float, type(None)),
    "model_seconds": (float, type(None)),
    "metrics": _MAP,
    "plan": _MAP,
    "measured": _MAP,
    "proved": _MAP,
    "fingerprint": (str, type(None)),
    "weights_sha256": (str, type(None)),
    "resume": (str, type(None)),
    "best": (str, type(None)),
    "restarts": (list, type(None)),
    "skipped_steps": (list, type(None)),
    "rollbacks": (list, type(None)),
}
_ENVIRONMENT: Final[Mapping[str, Kind]] = {
    "started": str,
    "argv": list,
    "git": _MAP,
    "notes": list,
    "fingerprint": str,
    "begun": dict,
}
_SETTINGS: Final[Mapping[str, Kind]] = {"key": str, "value": object, "recipe": object, "set_by": str, "tag": str}


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """The contents of a run folder, as far as they can be read."""

    folder: Path
    result: Mapping[str, Any]
    """`result.json`; empty before the end."""
    environment: Mapping[str, Any]
    settings: list[dict[str, Any]] | None
    """The keys that differ from the recipe (`settings.json`); None: an earlier version began the run."""
    continued_at: list[int]
    """The steps at which later commands continued the run (the same file)."""
    checkpoints: list[int]
    """The steps of the existing checkpoints."""
    best_step: int | None
    restarts: list[dict[str, Any]]
    rollbacks: list[dict[str, int]] | None
    """`step` and `checkpoint` of each rollback (`result.json`, before the end `rollbacks.json`); None: not recorded."""
    evaluation: Mapping[str, Any] | None
    """The first evaluation below `evaluations/` that lists its worst samples."""
    picture: str | None
    """The picture of its worst samples, as a data URL."""
    unreadable: list[str] = field(default_factory=list)
    """Existing files that cannot be read, with the reason."""

    @classmethod
    def read(cls, folder: Path) -> RunFiles:
        """Read a run folder; nothing in it is trusted."""
        unreadable: list[str] = []
        result = _map_of(folder / "result.json", _RESULT, unreadable)
        recorded = _map_of(folder / "settings.json", {"settings": list, "continued_at": list}, unreadable)
        settings = recorded.get("settings")
        names = _map_of(folder / "checkpoints/index.json", {"best": (str, type(None))}, unreadable)
        evaluation, place = _worst(folder / "evaluations")
        listed = result.get("restarts")
        return cls(
            folder=folder,
            result=result,
            environment=_map_of(folder / "environment.json", _ENVIRONMENT, unreadable),
            settings=None if settings is None else [one for one in settings if _is_setting(one)],
            continued_at=[step for step in recorded.get("continued_at") or [] if type(step) is int and step >= 0],
            checkpoints=sorted(_saved_steps(folder / "checkpoints")),
            best_step=_step_in(names.get("best")),
            restarts=[one for one in listed if isinstance(one, dict)]
            if isinstance(listed, list)
            else list(_rows(folder / "restarts.jsonl")),
            rollbacks=_rollbacks(result, folder / "rollbacks.json", unreadable),
            evaluation=evaluation,
            picture=None if place is None else picture_at(place / "worst.png"),
            unreadable=unreadable,
        )


def _map_of(path: Path, kinds: Mapping[str, Kind], unreadable: list[str]) -> dict[str, Any]:
    try:
        return read_map(path, {}, optional=kinds, limit=_LIMIT)
    except AbsentFileError:
        return {}
    except UnreadableError as error:
        unreadable.append(f"{path.name}: {error}")
        return {}


def _rollbacks(result: Mapping[str, Any], path: Path, unreadable: list[str]) -> list[dict[str, int]] | None:
    found = result.get("rollbacks")
    if found is None:
        found = _map_of(path, {"rollbacks": list}, unreadable).get("rollbacks")
    return None if found is None else [one for one in found if _is_rollback(one)]


def _is_rollback(content: Any) -> bool:
    return isinstance(content, dict) and all(type(content.get(name)) is int for name in ("step", "checkpoint"))


def _is_setting(content: Any) -> bool:
    if not isinstance(content, dict) or not content.keys() >= _SETTINGS.keys():
        return False
    return all(isinstance(content[key], str) for key in ("key", "set_by", "tag"))


def _saved_steps(folder: Path) -> Iterator[int]:
    with contextlib.suppress(OSError):
        for path in itertools.islice(folder.iterdir(), _MOST_FOLDERS):
            step = _step_in(path.name)
            if step is not None and (path / "manifest.json").is_file():
                yield step


def _step_in(name: Any) -> int | None:
    match = _CHECKPOINT.fullmatch(name) if isinstance(name, str) else None
    return int(match[1]) if match else None


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    with contextlib.suppress(UnreadableError):
        for line in itertools.islice(read_lines(path), _MOST_LINES):
            with contextlib.suppress(ValueError):
                row = parse_json(line)
                if isinstance(row, dict):
                    yield row


def _worst(folder: Path) -> tuple[Mapping[str, Any] | None, Path | None]:
    """Return the first evaluation with a table of the worst samples, and its folder."""
    with contextlib.suppress(OSError):
        for place in sorted(itertools.islice(folder.iterdir(), _MOST_FOLDERS)):
            with contextlib.suppress(UnreadableError):
                kinds: dict[str, Kind] = {"split": str, "checkpoint": str, "tables": dict}
                found = read_map(place / "evaluation.json", kinds, limit=_LIMIT)
                table = found["tables"].get(f"{found['split']}/worst")
                if isinstance(table, dict) and isinstance(table.get("columns"), list):
                    return {**found, "worst": table}, place
    return None, None


def picture_at(path: Path) -> str | None:
    """Return a PNG of at most 1 MiB as a data URL; None if it is not a PNG, or is larger."""
    with contextlib.suppress(UnreadableError):
        content = read_bytes(path, limit=_PICTURE_BYTES)
        if content.startswith(_PNG):
            return f"data:image/png;base64,{base64.b64encode(content).decode()}"
    return None
