"""Diagnosis: which rule of docs/numbers.md a training breaks whose numbers differ from a plain loop's.

The probe is a short training whose checkpoints give the gradient of every step.

    evidence      the results of each shard of a step, and what the rules derive from them
    plain_loop    computes these results, without any part of an executor
    updates       the effect of each fault on the gradients, buffers and update of a step
    matching      differences beyond rounding, and which single fault that can be named explains all of them
    examining     a candidate, step by step, the probe, and the answer as text
"""

from __future__ import annotations

from trainkit.run.diagnosis.examining import Examiner, Probed, explain_order, explain_probe, explain_updates

__all__ = ["Examiner", "Probed", "explain_order", "explain_probe", "explain_updates"]
