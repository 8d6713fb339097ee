"""Read the skipped steps of a run from its checkpoints, for the result of a run that was killed before it wrote one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainkit.bounded_json import expect_map, expect_maps
from trainkit.errors import UnreadableError
from trainkit.reading import read_map
from trainkit.trainer.manifest import list_complete


def skipped_in(checkpoints: Path) -> dict[str, Any]:
    """Return `skipped_steps` for result.json from the newest complete checkpoint; an empty list if there is none."""
    for checkpoint in list_complete(checkpoints)[:1]:
        try:
            state = expect_map(read_map(checkpoint.folder / "meta.json", {"state": dict})["state"], {"left_out": dict})
            return {"skipped_steps": expect_maps(state["left_out"].get("steps"), {"step": int})}
        except (UnreadableError, ValueError):
            break  # written by an earlier version, or damaged: a resume reports that
    return {"skipped_steps": []}
