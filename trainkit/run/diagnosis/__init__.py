"""Diagnosis: find the rule of docs/numbers.md that a training breaks if its numbers differ from those of a plain loop.

The probe is a short training whose checkpoints give the gradient of every step.

    evidence      the results of each shard of a step, and the values that the rules derive from them
    plain_loop    computes these results, without any part of an executor
    updates       the effect of each fault on the gradients, buffers and update of a step
    matching      differences beyond rounding, and the single known fault that explains all of them
    examining     a candidate, step by step, the probe, and the answer as text
"""

from __future__ import annotations

from trainkit.run.diagnosis.examining import Examiner, Probed, explain_order, explain_probe, explain_updates

__all__ = ["Examiner", "Probed", "explain_order", "explain_probe", "explain_updates"]
