"""`settings.json`: the keys of a run that differ from its recipe, with who set each.

It is written when a run begins. A command that continues the run adds the keys that it sets.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from trainkit.errors import UnreadableError
from trainkit.reading import read_map
from trainkit.writing import write_json_atomically

FILE: Final = "settings.json"
_LIMIT: Final = 1 << 20


def record_settings(folder: Path, changed: Sequence[Mapping[str, Any]]) -> None:
    """Write the keys; keys recorded by an earlier command of this run stay, unless they are set again.

    A file that cannot be written does not end the run: the page of the run alone reads it.
    """
    recorded = {one["key"]: one for one in _recorded(folder / FILE)}
    for one in changed:
        earlier = recorded.get(one["key"])
        recorded[one["key"]] = {**one, "recipe": one["recipe"] if earlier is None else earlier.get("recipe")}
    with contextlib.suppress(OSError):
        write_json_atomically(folder / FILE, {"version": 1, "settings": [*recorded.values()]})


def _recorded(path: Path) -> list[dict[str, Any]]:
    try:
        found = read_map(path, {"settings": list}, limit=_LIMIT)["settings"]
    except UnreadableError:
        return []
    return [one for one in found if isinstance(one, dict) and isinstance(one.get("key"), str)]
