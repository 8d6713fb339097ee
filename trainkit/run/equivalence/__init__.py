"""Compare the training of a strategy with that of one device.

A proof has two answers: are both, as they would be started, the same training, and are their numbers the same?

    answers      both answers, and the comparison of plans for the first
    comparing    compares tensors by name, step by step
    running      trains a few steps with equal shards, reads the weights after each, and names the broken rule
    proving      the proof of every candidate
"""

from __future__ import annotations

from trainkit.run.equivalence.answers import Numbers, Proof, Sameness
from trainkit.run.equivalence.comparing import Comparison, Verdict, compare
from trainkit.run.equivalence.proving import prove
from trainkit.run.equivalence.running import Case, last_weights

__all__ = ["Case", "Comparison", "Numbers", "Proof", "Sameness", "Verdict", "compare", "last_weights", "prove"]
