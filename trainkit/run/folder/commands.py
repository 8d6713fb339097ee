"""Record the commands of a run: the first in `environment.json`, the settings of all of them in `settings.json`.

`settings.json` holds the keys of a run that differ from its recipe, and the origin of each. It is written when a run
begins. A command that continues the run adds the keys that it sets, and the step of the checkpoint that it continues
from.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from trainkit.errors import UnreadableError
from trainkit.files import read_map, write_json_atomically
from trainkit.trainer.manifest import list_complete

FILE: Final = "settings.json"
_LIMIT: Final = 1 << 20
_KEPT: Final = ("argv", "notes")
_MOST: Final = 1000
"""Commands that are recorded, the latest ones."""


def first_command(environment: Path) -> dict[str, Any]:
    """Return `begun` for the `environment.json` that replaces this one; an empty dict if no command has begun."""
    try:
        before = read_map(environment, {"argv": list, "notes": list}, optional={"begun": dict}, limit=_LIMIT)
    except UnreadableError:
        return {}
    begun = before.get("begun") or {name: before[name] for name in _KEPT}
    return {"begun": {name: [one for one in begun.get(name) or () if isinstance(one, str)] for name in _KEPT}}


def record_settings(folder: Path, changed: Sequence[Mapping[str, Any]]) -> None:
    """Write the keys; keys recorded by an earlier command of this run stay, unless they are set again.

    A file that cannot be written does not end the run: the page of the run alone reads it.
    """
    before = _before(folder / FILE)
    recorded = {one["key"]: one for one in before.get("settings", []) if _is_setting(one)}
    for one in changed:
        earlier = recorded.get(one["key"])
        recorded[one["key"]] = {**one, "recipe": one["recipe"] if earlier is None else earlier.get("recipe")}
    content = {"version": 1, "settings": [*recorded.values()], "continued_at": _continued_at(folder, before)}
    with contextlib.suppress(OSError):
        write_json_atomically(folder / FILE, content)


def _continued_at(folder: Path, before: Mapping[str, Any]) -> list[int]:
    """Return the steps at which commands continued the run, including the newest checkpoint if a command continues it
    now.
    """
    steps = [step for step in before.get("continued_at") or [] if type(step) is int]
    found = list_complete(folder / "checkpoints")[:1] if before else []
    return [*steps, *(one.step for one in found if one.step not in steps)][-_MOST:]


def _before(path: Path) -> Mapping[str, Any]:
    """Return the record of an earlier command; empty if there is none."""
    try:
        return read_map(path, {"settings": list}, optional={"continued_at": list}, limit=_LIMIT)
    except UnreadableError:
        return {}


def _is_setting(content: Any) -> bool:
    return isinstance(content, dict) and isinstance(content.get("key"), str)
