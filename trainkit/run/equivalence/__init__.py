"""Compare the training of a strategy with that of one device.

A proof has two answers: are both, as they would be started, the same training, and are their numbers the same?

    answers      both answers, and the comparison of plans for the first
    comparing    compares tensors by name, step by step
    proving      trains every candidate a few steps with equal shards, reads the weights after each, names a broken rule
"""

from __future__ import annotations

from trainkit.run.equivalence.answers import Numbers, Proof, Sameness
from trainkit.run.equivalence.comparing import Comparison, Verdict, compare
from trainkit.run.equivalence.proving import last_weights, prove

__all__ = ["Comparison", "Numbers", "Proof", "Sameness", "Verdict", "compare", "last_weights", "prove"]
