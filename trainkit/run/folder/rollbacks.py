"""Records of steps that are not finite: the rollbacks of a run, and the skipped steps in its checkpoints.

`rollbacks.json` holds the step of each rollback and the checkpoint that was restored.

It is written before anything is restored: a run that is killed during a rollback and resumed knows from it which step
is trained for the second time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from trainkit.errors import AbsentFileError, CheckpointError, UnreadableError
from trainkit.files import expect_map, expect_maps, read_map, write_json_atomically
from trainkit.trainer.events import Suspect
from trainkit.trainer.manifest import list_complete

FILE: Final = "rollbacks.json"
"""Name of the record in the run folder."""
_MOST: Final = 1000
"""Number of rollbacks that are kept, the latest ones."""


def rollbacks_of(folder: Path) -> list[dict[str, int]]:
    """Return `step` and `checkpoint` of each rollback of a run, the latest last.

    Raises:
        CheckpointError: the file is damaged.
    """
    path = folder / FILE
    try:
        noted = expect_maps(read_map(path, {"rollbacks": list})["rollbacks"], {"step": int, "checkpoint": int})
    except AbsentFileError:
        return []
    except (UnreadableError, ValueError) as error:
        reason = error.reason if isinstance(error, UnreadableError) else error
        raise CheckpointError(
            f"{path} is not a record of rollbacks: {reason}. Remove it to resume without it."
        ) from None
    return [{name: one[name] for name in ("step", "checkpoint")} for one in noted]


def record_rollback(folder: Path, suspect: Suspect) -> None:
    """Add a rollback to the record."""
    noted = [*rollbacks_of(folder), {"step": suspect.step, "checkpoint": suspect.checkpoint}]
    write_json_atomically(folder / FILE, {"rollbacks": noted[-_MOST:]})


def suspect_checkpoint_of(folder: Path, *, checkpoint: int) -> Suspect | None:
    """Return the step that is trained for the second time when a run continues at a checkpoint; None: there is none."""
    noted = rollbacks_of(folder)
    if not noted or checkpoint > noted[-1]["step"] or noted[-1]["checkpoint"] > checkpoint:
        return None
    return Suspect(**noted[-1])


def skipped_in(checkpoints: Path) -> dict[str, Any]:
    """Return `skipped_steps` for result.json from the newest complete checkpoint; an empty list if there is none."""
    for checkpoint in list_complete(checkpoints)[:1]:
        try:
            state = expect_map(read_map(checkpoint.folder / "meta.json", {"state": dict})["state"], {"left_out": dict})
            return {"skipped_steps": expect_maps(state["left_out"].get("steps"), {"step": int})}
        except (UnreadableError, ValueError):
            break  # written by an earlier version, or damaged: a resume reports that
    return {"skipped_steps": []}
