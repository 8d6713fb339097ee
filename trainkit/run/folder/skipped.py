"""The steps that a run has left out, read from its checkpoints: for a result whose run did not live to write one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainkit.bounded_json import expect_map, expect_maps
from trainkit.errors import UnreadableError
from trainkit.reading import read_map
from trainkit.trainer.manifest import list_complete

__all__ = ["skipped_in"]


def skipped_in(checkpoints: Path) -> dict[str, Any]:
    """Return `skipped_steps` for result.json by the newest complete checkpoint; an empty list where there is none."""
    for checkpoint in list_complete(checkpoints)[:1]:
        try:
            state = expect_map(read_map(checkpoint.folder / "meta.json", {"state": dict})["state"], {"left_out": dict})
            return {"skipped_steps": expect_maps(state["left_out"].get("steps"), {"step": int})}
        except (UnreadableError, ValueError):
            break  # of an earlier version, or damaged, which a resume names
    return {"skipped_steps": []}
