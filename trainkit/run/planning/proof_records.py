"""The last proof of a training on a placement, stored for later trainings.

PROOFS/KEY.json, with PROOFS = $XDG_CACHE_HOME/trainkit/proofs, or ~/.cache/trainkit/proofs. KEY is the SHA-256 of the
fingerprint of the training, as it would be started, with the node of its strategy, the number of its processes and the
kinds of their devices. Steps cut in another way have another fingerprint.

A file is validated: a regular file of at most 16 KiB that holds the version of this module and values of the expected
kinds; otherwise it is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import torch

from trainkit.config.identity import digest_of, fingerprint
from trainkit.errors import UnreadableError
from trainkit.files import Kind, cache_folder, read_map, write_json_atomically
from trainkit.run.planning.plan import RunPlan

_VERSION: Final = 1
_LARGEST: Final = 16 * 1024
"""Size limit of a file in bytes."""
_KINDS: Final[Mapping[str, Kind]] = {
    "date": str, "command": str, "same_training": (str, type(None)), "same_numbers": str, "micro_size": int,
    "steps": int, "precision": str, "largest_error": (float, type(None)), "devices": str, "torch": str, "version": int,
}  # fmt: skip
"""Key -> the type of its value."""


def proofs_folder() -> Path | None:
    """Return the folder of all proofs; None if there is no home folder."""
    try:
        return cache_folder() / "proofs"
    except RuntimeError:  # no home folder can be determined
        return None


def key_of(plan: RunPlan) -> str:
    """Return the file name of a plan's proof, without suffix."""
    placement = {
        "fingerprint": fingerprint(plan.cfg),
        "strategy": plan.cfg.strategy,
        "processes": len(plan.tasks),
        "devices": _devices(plan),
    }
    return digest_of(placement)


def keep_proof(plan: RunPlan, proof: Mapping[str, Any]) -> str | None:
    """Write a proof; it replaces the last one of the same key.

    Args:
        plan: the training that was proved, as it would be started.
        proof: `command`, `same_training`, `same_numbers`, `micro_size`, `steps`, `precision`, `largest_error`.

    Returns:
        The reason why it could not be written; None if it was.
    """
    folder = proofs_folder()
    if folder is None:
        return "there is no home folder"
    content = {
        "version": _VERSION,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **proof,
        "command": proof["command"][:4096],
        "devices": _devices(plan),
        "torch": torch.__version__,
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json_atomically(folder / f"{key_of(plan)}.json", content)
    except OSError as error:
        return f"{error.strerror}: {folder}"
    return None


def last_proof(plan: RunPlan) -> dict[str, Any] | None:
    """Return the last proof of a planned training; None if there is no valid one."""
    folder = proofs_folder()
    try:
        proof = None if folder is None else read_map(folder / f"{key_of(plan)}.json", _KINDS, limit=_LARGEST)
    except UnreadableError:
        return None
    return proof if proof is not None and proof["version"] == _VERSION else None


def _devices(plan: RunPlan) -> str:
    return ", ".join(sorted({task.device.partition(":")[0] for task in plan.tasks}))
