"""Datasets and their reading: the samples of a split, in the order and the batches of the numerics contract.

`sets/` holds the datasets that ship, `reading/` the ways to batches; a dataset of the user's own needs neither.
"""

from trainkit.names import lazy

__getattr__ = lazy(__name__)
