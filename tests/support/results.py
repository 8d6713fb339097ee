"""What a run has left in its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["result_of", "sha256"]


def result_of(folder: str | Path) -> dict[str, Any]:
    """Return the content of `result.json`."""
    result: dict[str, Any] = json.loads(Path(folder, "result.json").read_text())
    return result


def sha256(folder: str | Path) -> str:
    """Return the hash of the weights that the run ended with."""
    return str(result_of(folder)["weights_sha256"])
