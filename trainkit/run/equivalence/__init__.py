"""Compare the training of a strategy with that of one device.

sameness.py    the first answer: are both, as they would be started, the same training? comparing.py   compare tensors
by name, step by step diagnosing.py  compare gradients, and name the rule that a difference breaks running.py     train
a few steps at one common cut, and read the weights after each answers.py     both answers proving.py     the proof of
every candidate
"""

from __future__ import annotations

from trainkit.run.equivalence.answers import Numbers, Proof
from trainkit.run.equivalence.comparing import Comparison, Verdict, compare
from trainkit.run.equivalence.diagnosing import Case
from trainkit.run.equivalence.proving import prove
from trainkit.run.equivalence.running import last_weights
from trainkit.run.equivalence.sameness import Sameness

__all__ = ["Case", "Comparison", "Numbers", "Proof", "Sameness", "Verdict", "compare", "last_weights", "prove"]
