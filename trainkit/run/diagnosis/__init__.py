"""Diagnosis: which rule of docs/numbers.md a training breaks whose numbers differ from a plain loop's.

evidence.py      what each shard of a step gives, and what the rules make of it
plain_loop.py    compute that, without any part of an executor
probe.py         a short training under plain SGD, whose checkpoints give the gradient of every step
differences.py   what is beyond rounding
causes.py        the faults that can be named
gradients.py     what each fault makes of gradients and buffers
updates.py       what each fault makes of an update
matching.py      which single fault gives all that differs
examining.py     a candidate, step by step
explaining.py    the answer in words
"""

from __future__ import annotations

from trainkit.run.diagnosis.examining import Examiner, Probed
from trainkit.run.diagnosis.explaining import explain_order, explain_probe, explain_updates

__all__ = ["Examiner", "Probed", "explain_order", "explain_probe", "explain_updates"]
