"""Keep the command that began a run in `environment.json`, for the commands that continue it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from trainkit.errors import UnreadableError
from trainkit.files import read_map

_LIMIT: Final = 1 << 20
_KEPT: Final = ("argv", "notes")


def first_command(environment: Path) -> dict[str, Any]:
    """Return `begun` for the `environment.json` that replaces this one; an empty dict if no command has begun."""
    try:
        before = read_map(environment, {"argv": list, "notes": list}, optional={"begun": dict}, limit=_LIMIT)
    except UnreadableError:
        return {}
    begun = before.get("begun") or {name: before[name] for name in _KEPT}
    return {"begun": {name: [one for one in begun.get(name) or () if isinstance(one, str)] for name in _KEPT}}
