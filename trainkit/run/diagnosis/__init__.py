"""Diagnosis: find the rule of docs/numbers.md that a training breaks if its numbers differ from those of a plain loop.

The probe is a short training whose checkpoints give the gradient of every step.

    faults        the effect of each fault on the shards and the update of a step, and the one behind a difference
    plain_loop    computes the results of each shard of a step, without any part of an executor
    examining     a candidate, step by step, the probe, and the answer as text
"""

from __future__ import annotations

from trainkit.run.diagnosis.examining import ORDERED, Examiner, Probed, explain_probe, explain_updates

__all__ = ["ORDERED", "Examiner", "Probed", "explain_probe", "explain_updates"]
