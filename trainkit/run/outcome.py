"""How far a run has come and why it ended, as result.json holds it."""

from __future__ import annotations

from typing import Any

from trainkit.engine.events import Run
from trainkit.run.rollbacks import rollbacks_of
from trainkit.run.stopping import REASONS

__all__ = ["progress_of", "status_of"]


def progress_of(run: Run) -> dict[str, Any]:
    """Return how far a run has come, and the steps that it has left out or trained again."""
    state = run.state
    found = {"steps": state.step, "samples": state.samples, "seconds": state.seconds, **state.left_out.findings()}
    return found if run.cfg.numerics.on_nonfinite != "rollback" else {**found, "rollbacks": rollbacks_of(run.folder)}


def status_of(run: Run) -> dict[str, str]:
    """Return the status of a run that has ended as it should, and the reason."""
    reason = run.stop_reason
    if reason is not None:
        known = reason in REASONS
        return {"status": reason if known else "finished", "reason": REASONS[reason] if known else reason}
    if run.state.step < run.num_steps:
        return {"status": "stopped", "reason": f"stop_at_step={run.cfg.stop_at_step}"}
    return {"status": "finished", "reason": "all steps done"}
