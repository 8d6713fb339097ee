"""The numerics contract: the computation of a training, independent of where it runs.

It covers the order of samples, the cut of a batch into shards, random keys, learning rates, precision and the order of
summation. Nothing here depends on a process, a process group or a strategy.
"""

from trainkit.names import lazy

__getattr__ = lazy(__name__)
