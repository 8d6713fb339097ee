"""The steps that a run has left out, read from its checkpoints: for a result whose run did not live to write one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trainkit.engine.manifest import scan

__all__ = ["skipped_in"]


def skipped_in(checkpoints: Path) -> dict[str, Any]:
    """Return `skipped_steps` for result.json by the newest complete checkpoint; an empty list where there is none."""
    for checkpoint in scan(checkpoints)[:1]:
        try:
            state: Any = json.loads((checkpoint.folder / "meta.json").read_text(encoding="utf-8"))["state"]
            return {"skipped_steps": list(state["left_out"]["steps"])}
        except (OSError, ValueError, KeyError, TypeError):
            break  # of an earlier version, or damaged, which a resume names
    return {"skipped_steps": []}
