"""Diagnosis: which rule of docs/numbers.md a training breaks whose numbers differ from a plain loop's.

evidence.py      the results of each shard of a step, and what the rules derive from them plain_loop.py    compute these
results, without any part of an executor probe.py         a short training under plain SGD, whose checkpoints give the
gradient of every step differences.py   differences beyond rounding causes.py        the faults that can be named
gradients.py     the effect of each fault on gradients and buffers updates.py       the effect of each fault on an
update matching.py      which single fault explains all differences examining.py     a candidate, step by step
explaining.py    the answer as text
"""

from __future__ import annotations

from trainkit.run.diagnosis.examining import Examiner, Probed
from trainkit.run.diagnosis.explaining import explain_order, explain_probe, explain_updates

__all__ = ["Examiner", "Probed", "explain_order", "explain_probe", "explain_updates"]
