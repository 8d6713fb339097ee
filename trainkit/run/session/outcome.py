"""The progress of a run as recorded in result.json."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from trainkit.errors import CheckpointError, ConfigError, Problem
from trainkit.run.folder.rollbacks import rollbacks_of
from trainkit.trainer.checkpoint.tensors import meta_of
from trainkit.trainer.events import Run
from trainkit.trainer.manifest import MANIFEST, list_complete, read_manifest


def progress_of(run: Run) -> dict[str, Any]:
    """Return the progress of a run, and its skipped and repeated steps."""
    state = run.state
    found = {"steps": state.step, "samples": state.samples, "seconds": state.seconds, **state.left_out.findings()}
    if state.own_loss:
        found["own_loss"] = True
    return found if run.cfg.numerics.on_nonfinite != "rollback" else {**found, "rollbacks": rollbacks_of(run.folder)}


def own_loss_refusal(checkpoint: Path) -> ConfigError:
    """Return the error of a training that only the user's own loop can continue, because it gave the losses."""
    rule = "has steps with a loss from its own loop (trainkit.session). Continue it with its script and resume=RUN."
    return ConfigError([Problem(key="resume", value=str(checkpoint), rule=rule)])


def refuse_own_losses(checkpoints: Path) -> None:
    """Refuse to continue a training with losses of a user's own loop in a process without such a loop.

    Args:
        checkpoints: a folder of checkpoints, or one checkpoint.

    Raises:
        ConfigError: the newest checkpoint has steps with such a loss.
    """
    with contextlib.suppress(CheckpointError):  # a damaged one is reported when it is restored
        newest = [read_manifest(checkpoints)] if (checkpoints / MANIFEST).is_file() else list_complete(checkpoints)[:1]
        states = [meta_of(one).get("state") for one in newest]
        if any(isinstance(state, dict) and state.get("own_loss") is True for state in states):
            raise own_loss_refusal(newest[0].folder)
